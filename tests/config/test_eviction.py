"""Budgets: exact ceilings, splits that add up, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.config.eviction import Budget, EvictionConfig, exact_ceiling
from h2o_flexgen.config.far_layers import FarPlaces, keep_far_places
from h2o_flexgen.config.flags import layer_numbers
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.splits import SPLITS
from h2o_flexgen.config.workload import counted_in_bytes
from h2o_flexgen.errors import UsageError
from h2o_flexgen.models.families import spec_from_config
from tests.tiny import config_of

EVICTING = [name for name in SPLITS.names() if name != "full"]


def test_an_unknown_option_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"'foo' is not an option of EvictionConfig\. needed one of name, ratio, "):
        EvictionConfig("h2o", foo=1)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"of OffloadPolicy\. needed one of .*did you mean 'gpu_batch_size'"):
        OffloadPolicy(gpu_batch=4)  # type: ignore[call-arg]


@given(
    name=st.sampled_from(EVICTING),
    prompt_len=st.integers(1, 40),
    gen_len=st.integers(0, 40),
    ratio=st.sampled_from(["0.01", "0.2", "0.5", "0.99", "1"]),
    recent_ratio=st.none() | st.sampled_from([0.01, 0.3, 1.0]),
)
def test_budgets_add_up(name: str, prompt_len: int, gen_len: int, ratio: str, recent_ratio: float | None) -> None:
    length = prompt_len + gen_len
    total = math.ceil(Fraction(ratio) * length)
    options: dict[str, Any] = {"recent_ratio": recent_ratio} if SPLITS.get(name).takes_recent else {}
    config = EvictionConfig(name, float(ratio), **options)
    split = SPLITS.get(name)
    if total <= split.sinks and total < length:
        with pytest.raises(UsageError, match="sinks leave nothing"):
            config.resolve(prompt_len, gen_len)
        return
    budget = config.resolve(prompt_len, gen_len)
    assert budget.heavy + budget.recent + budget.sinks == budget.after_prompt >= 1
    assert min(budget.heavy, budget.recent, budget.sinks) >= 0
    if not split.prompt_only:
        assert budget.total == total
        assert budget.after_prompt == (total + 1 - budget.burst if split.early else total)
        assert budget.full == (total >= length)
    elif budget.full:
        assert budget.total == length
    else:
        kept = max(total - gen_len, budget.sinks + budget.recent + 1)
        assert budget.after_prompt == kept < prompt_len, "what is chosen of the prompt, and room for the answer"
        assert budget.total == kept + gen_len


@given(st.integers(1, 10**7), st.integers(1, 10**6))
def test_the_ceiling_is_of_the_decimal_number(millionths: int, count: int) -> None:
    ratio = millionths / 10**6
    assert exact_ceiling(ratio, count) == math.ceil(Fraction(repr(ratio)) * count)


def test_seven_hundredths_of_a_hundred_are_seven() -> None:
    assert math.ceil(0.07 * 100) == 8, "the fault this guards against is gone from Python"
    assert EvictionConfig("h2o", 0.07).resolve(90, 10).total == 7


def test_the_splits() -> None:
    def split(name: str, **options: Any) -> tuple[int, int, int]:
        budget = EvictionConfig(name, **options).resolve(60, 40)
        assert not budget.full
        return budget.sinks, budget.heavy, budget.recent

    assert split("h2o", ratio=0.2) == (0, 10, 10)
    assert split("h2o", budget=21) == (0, 10, 11)
    assert split("h2o", budget=1) == (0, 0, 1)
    assert split("h2o", budget=21, sinks=4) == (4, 8, 9)
    assert split("h2o", budget=21, recent=3) == (0, 18, 3)
    assert split("h2o", budget=21, recent=0) == (0, 21, 0)
    assert split("h2o", budget=21, recent_ratio=0.07) == (0, 14, 7)
    assert split("h2o", budget=21, recent_ratio=1) == (0, 0, 21)
    assert split("random", budget=21) == (0, 10, 11)
    assert split("local", budget=21) == (0, 0, 21)
    assert split("streaming", budget=21) == (4, 0, 17)
    assert split("streaming", budget=21, sinks=1) == (1, 0, 20)
    assert split("heavy", budget=21) == (0, 21, 0)


def test_the_full_cache() -> None:
    assert EvictionConfig().resolve(60, 40) == Budget(100, 0, 100, 0, True)
    assert EvictionConfig("h2o").resolve(60, 40) == Budget(100, 50, 50, 0, True)
    assert EvictionConfig("h2o", budget=500, recent=400).resolve(60, 40) == Budget(100, 0, 100, 0, True)
    assert EvictionConfig("streaming").resolve(2, 1) == Budget(3, 0, 0, 3, True)
    assert EvictionConfig("h2o", budget=99).resolve(60, 40).full is False


@pytest.mark.parametrize("ratio", [0, 0.0, -0.1, 1.0001, math.nan, math.inf, -math.inf, "0.2", None, True])
@pytest.mark.parametrize("field", ["ratio", "recent_ratio"])
def test_shares_that_make_no_sense(field: str, ratio: Any) -> None:
    if field == "recent_ratio" and ratio is None:
        return
    with pytest.raises(UsageError, match="--hh-ratio is" if field == "ratio" else "--recent-ratio is") as caught:
        EvictionConfig("h2o", **{field: ratio})
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "h20"}, "unknown eviction policy 'h20'.*did you mean 'h2o'"),
        ({"name": ["h2o"]}, "unknown eviction policy"),
        ({"name": "h2o", "far_layers": 3}, "--far-layers is 3. needed a list of layers"),
        ({"name": "h2o", "far_layers": [[1, 2, 3]]}, r"--far-layers names \[1, 2, 3\]. needed a list of layers"),
        ({"name": "h2o", "budget": 0}, "--kv-budget is 0. needed at least 1"),
        ({"name": "h2o", "budget": 2.0}, "--kv-budget is 2.0"),
        ({"name": "h2o", "recent": -1}, "--recent is -1"),
        ({"name": "h2o", "sinks": True}, "--sinks is True"),
        ({"name": "h2o", "rolling_positions": 1}, "--rolling-positions is 1. needed true or false"),
        ({"name": "h2o", "recent": 4, "recent_ratio": 0.1}, "both given"),
        ({"ratio": 0.2}, "--hh-ratio 0.2 is given with the full cache. name an eviction policy"),
        ({"budget": 20}, "--kv-budget 20 is given with the full cache"),
        ({"name": "local", "sinks": 4}, "--sinks is 4 with --eviction local"),
        ({"name": "heavy", "recent": 4}, "--recent is 4 with --eviction heavy"),
        ({"name": "streaming", "recent_ratio": 0.1}, "--recent-ratio is 0.1 with --eviction streaming"),
        ({"name": "h2o", "budget": 8, "recent": 9}, "--recent is 9, the budget has 8 tokens. needed at most 8"),
        ({"name": "h2o", "budget": 8, "recent": 7, "sinks": 2}, "--recent is 7, beside the sinks the budget has 6"),
        ({"name": "h2o", "budget": 8, "sinks": 8}, "the budget is 8 tokens, 8 sinks leave nothing of it"),
        ({"name": "streaming", "budget": 4}, "the budget is 4 tokens, 4 sinks leave nothing of it. .* at least 5"),
        ({"name": "random", "budget": math.nan}, "--kv-budget is nan"),
        ({"name": "h2o", "recall": "gpu"}, "--recall is 'gpu'. needed one of cpu, disk"),
        ({"name": "h2o", "recall": "cpu", "recall_every": 0}, "--recall-every is 0. needed at least 1"),
        ({"name": "h2o", "recall_every": 2}, "--recall-every is 2 without --recall"),
        ({"recall": "cpu"}, "--recall cpu with --eviction full. needed h2o, alone or behind a policy for prompts"),
        ({"name": "tova", "recall": "cpu"}, "--recall cpu with --eviction tova"),
        ({"name": "h2o", "recall": "cpu", "rolling_positions": True}, "--recall cpu with --rolling-positions"),
        ({"name": "h2o", "recall": "cpu", "spans": "fair"}, "--recall cpu with --spans fair"),
    ],
)
def test_what_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EvictionConfig(**options)


def test_what_does_not_fit_the_budget() -> None:
    with pytest.raises(
        UsageError, match=r"--recent is 11, beside the sinks the budget has 10 tokens. needed at most 10"
    ):
        EvictionConfig("h2o", 0.12, sinks=2, recent=11).resolve(60, 40)
    with pytest.raises(UsageError, match=r"the budget is 4 of 100 tokens, 4 sinks leave nothing of it. .* at least 5"):
        EvictionConfig("streaming", 0.04).resolve(60, 40)
    with pytest.raises(UsageError, match="the prompt length is 0"):
        EvictionConfig().resolve(0, 4)


@given(
    name=st.sampled_from(SPLITS.names()),
    prompt_len=st.integers(1, 40),
    gen_len=st.integers(0, 40),
    asked=st.integers(5, 90),
    window=st.integers(1, 90),
)
def test_within_a_window(name: str, prompt_len: int, gen_len: int, asked: int, window: int) -> None:
    config = EvictionConfig(name, budget=None if name == "full" else asked)
    budget = config.resolve(prompt_len, gen_len)
    within = budget.within(window)
    assert within.within(window) == within
    assert budget.within(None) == budget
    assert within.heavy + within.recent + within.sinks == within.after_prompt <= within.total <= max(window - 1, 0)
    if within == budget:
        assert budget.total < window, "nothing it could hold is out of sight, but for sinks"
    else:
        assert (within.total, within.recent, within.full) == (window - 1, window - 1, False), "what the next query sees"
        assert budget.total >= window - 1
        assert prompt_len + gen_len > window - 1


def test_json_round_trip() -> None:
    config = EvictionConfig("h2o", 0.07, recent=5, seed=3, rolling_positions=True)
    assert EvictionConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(UsageError, match=r"no key 'ration'.*did you mean 'ratio'"):
        EvictionConfig.from_json({"ration": 0.2})


@given(
    name=st.sampled_from(SPLITS.names()),
    how=st.sampled_from(["global", "far", "pyramid"]),
    prompt_len=st.integers(1, 60),
    gen_len=st.integers(0, 20),
    asked=st.integers(5, 80),
    windows=st.lists(st.none() | st.integers(2, 90), min_size=1, max_size=7),
)
def test_layers_share_what_they_would_hold(
    name: str, how: str, prompt_len: int, gen_len: int, asked: int, windows: list[int | None]
) -> None:
    config = EvictionConfig(name, budget=None if name == "full" else asked, budget_split=how)
    length = prompt_len + gen_len
    even = [config.resolve(prompt_len, gen_len).within(window) for window in windows]
    found = config.by_layer(windows, prompt_len, gen_len)
    assert all(each == each.within(window) for each, window in zip(found, windows, strict=True))
    held, kept = (sum(min(each.total, length) for each in budgets) for budgets in (found, even))
    if SPLITS.get(name).prompt_only:
        assert held >= kept, "the answer and the window that chooses have their place in every layer"
    else:
        assert held == kept
    for budget in found:
        assert min(budget.heavy, budget.recent, budget.sinks) >= 0
        assert budget.heavy + budget.recent + budget.sinks == budget.after_prompt


def test_a_pyramid_is_that_of_the_paper() -> None:
    totals = [each.total for each in EvictionConfig("pyramidkv", ratio=0.3).by_layer([None] * 6, 1000, 50)]
    assert totals == [537, 449, 360, 270, 181, 93]
    assert sum(totals) == 6 * 315
    chosen = [total - 50 - 32 for total in totals]
    assert (chosen[0], chosen[-1]) == (2 * 233 - 233 // 20, 233 // 20)


@pytest.mark.parametrize(
    ("budget", "prompt", "new", "chosen"),
    [(30, 80, 5, [43, 1]), (30, 80, 24, [6, 0]), (30, 9, 24, [6, 0]), (30, 40, 5, [22, 22]), (27, 40, 5, [37, 1])],
)
def test_the_last_layers_of_a_pyramid_may_keep_the_window_alone(
    budget: int, prompt: int, new: int, chosen: list[int]
) -> None:
    """Worked out by hand: of b = max(budget - new, 4) - 3 to choose the last layer of two has b // 20, the first the
    rest of 2 b, or all 3 apart from the prompt where that is less; both b where the prompt is shorter than 2 b."""
    found = EvictionConfig("pyramidkv", budget=budget, recent=3).by_layer([None, None], prompt, new)
    assert [min(each.total - new, prompt) - 3 for each in found] == chosen


def test_layers_without_a_window_get_what_the_others_spare() -> None:
    config = EvictionConfig("h2o", ratio=0.2, budget_split="global")
    assert [each.total for each in config.by_layer([512, 512, None], 1536, 256)] == [102, 102, 873]
    with pytest.raises(UsageError, match="did you mean 'pyramid'"):
        EvictionConfig("h2o", ratio=0.2, budget_split="pyramids")


def test_far_layers_keep_few_recent_tokens() -> None:
    config = EvictionConfig("h2o", ratio=0.2, budget_split="far")
    near, other, far = config.by_layer([512, 512, None], 1536, 256)
    assert near == other == Budget(total=179, heavy=89, recent=90, sinks=0, full=False)
    assert far == Budget(total=719, heavy=687, recent=32, sinks=0, full=False)
    asked = EvictionConfig("h2o", ratio=0.2, recent=50, budget_split="far").by_layer([512, None], 1536, 256)
    assert [each.recent for each in asked] == [50, 50]
    few = EvictionConfig("h2o", ratio=0.2, budget_split="far").by_layer([512, None], 80, 20)
    assert [(each.total, each.recent) for each in few] == [(10, 5), (30, 15)]
    for windows in ([None, None], [512, 512]):
        assert config.by_layer(windows, 1536, 256) == (config.resolve(1536, 256),) * 2, "nobody has anything to spare"
    full = EvictionConfig("h2o", ratio=0.6, budget_split="far").by_layer([None, 90], 60, 40)
    assert [each.total for each in full] == [90, 30]
    most = EvictionConfig("h2o", ratio=0.8, budget_split="far").by_layer([None, 90], 60, 40)
    assert most[0].full
    assert most[1].total == 60, "what a layer cannot use goes back to the others"


def test_the_last_layer_keeps_half_though_it_sees_everything() -> None:
    config = EvictionConfig("roco", ratio=0.2, budget_split="far")
    near, far, last = config.by_layer([512, None, None], 1536, 256)
    assert [each.total for each in (near, far, last)] == [179, 719, 179]
    assert far.recent == last.recent == 10
    few = EvictionConfig("h2o", ratio=0.2, budget_split="far")
    assert [each.recent for each in few.by_layer([512, None, None], 1536, 256)] == [90, 32, 90]
    alone, near = few.by_layer([None, 512], 1536, 256)
    assert few.by_layer([512, None], 1536, 256) == (near, alone), "unless no other sees everything"


def test_far_layers_that_are_named() -> None:
    config = EvictionConfig("h2o", ratio=0.6, far_layers=(2, 0, 2))
    assert (config.far_layers, config.how_layers_share) == ((0, 2), "far")
    found = config.by_layer([None] * 4, 60, 40)
    assert [(each.total, each.recent) for each in found] == [(90, 32), (30, 15)] * 2
    most = EvictionConfig("h2o", ratio=0.8, far_layers=(0, 3)).by_layer([None] * 4, 60, 40)
    assert [each.total for each in most] == [100, 60, 60, 100]
    assert [each.full for each in most] == [True, False, False, True]
    alone = EvictionConfig("h2o", ratio=3.5 / 4, far_layers=(0, 1, 3)).by_layer([None] * 4, 60, 40)
    assert [each.total for each in alone] == [100, 100, 52, 100], "what is rounded up is layer 2's as well"
    assert EvictionConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(UsageError, match="--far-layers with --budget-split global"):
        EvictionConfig("h2o", ratio=0.6, far_layers=(0,), budget_split="global")
    with pytest.raises(UsageError, match="'0,x' are no layers"):
        layer_numbers("0,x")


def test_layers_that_were_measured_to_look_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a model of this name and shape, unless they are named; a file that is damaged is as none, and said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    auto = EvictionConfig("auto", bytes=0.2)
    spec = replace(spec_from_config(config_of("llama", num_hidden_layers=30).to_dict(), "tiny"), name="a/SmolLM2_135M")
    assert counted_in_bytes(auto, spec).far_layers is None
    kept = keep_far_places(spec, FarPlaces((3, (5, 1)), (3, 5)))
    for same in (spec, replace(spec, name="b/smollm2-135m")):
        assert counted_in_bytes(auto, same).far_layers == (3, (5, 1))
        assert counted_in_bytes(replace(auto, recall="disk"), same).far_layers == (3, 5)
    for other in (replace(spec, num_layers=29), replace(spec, vocab_size=99), replace(spec, name="a/SmolLM2_360M")):
        assert counted_in_bytes(auto, other).far_layers is None
    assert counted_in_bytes(replace(auto, far_layers=(1,)), spec).far_layers == (1,)
    assert counted_in_bytes(EvictionConfig("h2o", ratio=0.2), spec).far_layers is None
    keep_far_places(spec, FarPlaces((), ()))
    assert counted_in_bytes(auto, spec).far_layers is None, "none stands out"
    numbers = ("30", "-1", "[1, -1]", "[-1, 0]", "[1, 2.5]", "1e999", "[Infinity, 0]", '"3"', "true", "[1, 4]", "[1]")
    others = [f'{{"places": [{number}], "layers": []}}' for number in numbers]
    layers = [f'{{"places": [1], "layers": [{number}]}}' for number in ("-1", "1e999", "2.5", "[1, 0]", "30", "true")]
    for damaged in ("", "{}", '{"places": 3, "layers": []}', "[[[", *others, *layers):
        kept.write_text(damaged, encoding="utf-8")
        caplog.clear()
        assert counted_in_bytes(auto, spec).far_layers is None
        assert f"{kept} cannot be used" in caplog.text


def test_layers_that_a_model_has_not_are_no_far_ones() -> None:
    known = spec_from_config(config_of("llama", num_hidden_layers=30).to_dict(), "tiny")
    with pytest.raises(UsageError, match=r"names layer 30.*has 30 layers, from 0"):
        counted_in_bytes(EvictionConfig("h2o", ratio=0.2, far_layers=(30,)), known)
    with pytest.raises(UsageError, match=r"names head 9 of layer 1.*has KV heads 0 to 3 in each layer"):
        counted_in_bytes(EvictionConfig("h2o", ratio=0.2, far_layers=((1, 9),)), known)


def test_layers_without_caches_have_no_tokens_to_give() -> None:
    """Of a model of eight layers the two that attend share what these two would hold, as if there were no others."""
    others = (0, 1, 2, 4, 5, 6)
    for settings in ({"far_layers": (3,)}, {"far_layers": (0, 3)}, {"budget_split": "pyramid"}):
        found = EvictionConfig("h2o", budget=60, cacheless=others, **settings).by_layer([None] * 8, 60, 40)
        alone = settings if "budget_split" in settings else {"far_layers": (0,)}
        assert [found[3], found[7]] == list(EvictionConfig("h2o", budget=60, **alone).by_layer([None] * 2, 60, 40))
        assert found[3].total + found[7].total == 120
    heads = EvictionConfig("h2o", budget=60, cacheless=others, far_layers=((3, 1),), kv_heads=2)
    near, far = heads.by_layer([None] * 8, 60, 40)[3].parts
    assert (near.total, far.total) == (47, 100)


def test_heads_of_layers_that_are_named() -> None:
    """Of four layers of two heads, eight in all, two look far: they keep all 100 tokens, the others have the rest."""
    config = EvictionConfig("h2o", budget=60, far_layers=[[2, 1], 0], kv_heads=2)
    assert config.far_layers == (0, (2, 1)) == layer_numbers("0,2.1")
    found = config.by_layer([None] * 4, 60, 40)
    assert [each.total for each in found] == [100, 36, 68, 36]
    assert (found[0].full, found[0].parts, found[1].parts) == (True, (), ())
    near, far = found[2].parts
    assert (near.total, far.total, far.full, found[2].full) == (36, 100, True, False)
    assert (found[2].part(0), found[2].part(1), found[1].part(1)) == (near, far, found[1])
    assert [config.far_heads(layer) for layer in range(4)] == [(), (), (1,), ()]
    both = EvictionConfig("h2o", budget=60, far_layers=((2, 0), (2, 1)), kv_heads=2)
    assert both.far_heads(2) == ()
    assert [each.total for each in both.by_layer([None] * 4, 60, 40)] == [47, 47, 100, 46]
    assert EvictionConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(UsageError, match=r"'1\.x' are no layers"):
        layer_numbers("1.x")
    with pytest.raises(UsageError, match="heads of layers with --recall"):
        EvictionConfig("h2o", budget=50, far_layers=((2, 1),), recall="cpu")


def test_a_prompt_that_stays() -> None:
    config = EvictionConfig("random", budget=50, keep_prompt=True)
    assert config.resolve(30, 70) == Budget(total=50, heavy=10, recent=10, sinks=30, full=False)
    with pytest.raises(UsageError, match=r"50 of 120 tokens, 50 of the prompt leave nothing.*leave --keep-prompt out"):
        config.resolve(50, 70)
    for options in ({"name": "snapkv"}, {"name": "local"}, {"name": "h2o", "sinks": 2}):
        with pytest.raises(UsageError, match="--keep-prompt is given with"):
            EvictionConfig(budget=50, keep_prompt=True, **options)


def test_policies_that_do_not_fit_are_refused_by_name() -> None:
    for name, why in (("adakv", "different numbers of tokens"), ("rpc", "grows"), ("kvzap+h2o", "trained")):
        with pytest.raises(UsageError, match=f"not offered. .*{why}"):
            EvictionConfig(name, budget=20)
    with pytest.raises(UsageError, match=r"tova evicts in decode steps itself. needed one of snapkv, .* before \+h2o"):
        EvictionConfig("tova+h2o", budget=20)


def test_auto_is_a_policy_and_a_split() -> None:
    auto = EvictionConfig("auto", ratio=0.2)
    assert auto == EvictionConfig("h2o", ratio=0.2, budget_split="far")
    assert EvictionConfig("auto", ratio=0.2, budget_split="uniform").how_layers_share == "uniform"
    assert EvictionConfig("auto").resolve(10, 5).full
    assert EvictionConfig.from_json(auto.to_json()) == auto


@pytest.mark.parametrize("share", [0.1, 0.2, 0.45, 0.9])
@pytest.mark.parametrize("name", ["h2o", "auto"])
def test_a_share_of_bytes_is_one_of_caches_that_windows_bound(name: str, share: float) -> None:
    """Of what the full cache holds: a layer with a window no more than that, whatever the sequence's length."""
    spec = spec_from_config(config_of("gemma3", sliding_window=96).to_dict(), "tiny")
    packed = spec.with_cache_bits(4)
    config, lengths = counted_in_bytes(EvictionConfig(name, bytes=share), packed), (500, 140)
    kept, plain = (each.kv_bytes_per_token_and_layer("bfloat16") for each in (packed, spec))
    scales = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    full = plain * sum(640 if window is None else window - 1 for window in spec.windows)
    held = kept * sum(each.total for each in config.by_layer(spec.windows, *lengths))
    assert len(set(spec.windows)) == 2
    if config.resolve(*lengths).full:
        assert share * full >= kept * full // plain + scales
    else:
        assert share * full - kept * len(spec.windows) < held + scales <= share * full
    assert EvictionConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
