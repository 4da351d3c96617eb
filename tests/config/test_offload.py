"""OffloadPolicy: shares, percentages, JSON; and their placement in whole units."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.arch import ArchSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import TIERS, OffloadPolicy, Shares, parse_shares
from h2o_flexgen.config.placement import place
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.errors import UsageError
from h2o_flexgen.schedule.request import Caps, PlanRequest


def shares() -> st.SearchStrategy[dict[str, float]]:
    """Hundredths over the tiers."""
    return st.tuples(st.integers(0, 100), st.integers(0, 100)).map(
        lambda cuts: dict(
            zip(TIERS, (min(cuts) / 100, abs(cuts[0] - cuts[1]) / 100, (100 - max(cuts)) / 100), strict=True)
        )
    )


def spec(layers: int, vocab: int = 50) -> ModelSpec:
    return ModelSpec("tiny", vocab, 16, 64, layers, 4, 4, 4, 16, 32, ArchSpec("opt"), 2, 2, 1)


def test_the_default_is_everything_on_the_cpu() -> None:
    policy = OffloadPolicy()
    assert policy.weights == policy.cache == policy.hidden == {"cpu": 1.0}
    assert policy.block_size == 1
    assert OffloadPolicy(8, 4).block_size == 32


def test_a_policy_is_a_value() -> None:
    one = OffloadPolicy(weights={"disk": 0.7, "cpu": 0.3, "gpu": 0})
    two = OffloadPolicy(weights={"cpu": 0.3, "disk": 0.7})
    assert one == two
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != OffloadPolicy()


def test_shares_read_like_a_counter() -> None:
    held = Shares({"disk": 0.7, "cpu": 0.3, "gpu": 0})
    assert list(held) == ["cpu", "disk"]
    assert (held["gpu"], held.get("gpu"), "gpu" in held, len(held)) == (0.0, 0.0, False, 2)
    with pytest.raises(KeyError):
        held["tpu"]
    assert held == {"cpu": 0.3, "disk": 0.7}
    assert repr(held) == "{'cpu': 0.3, 'disk': 0.7}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"cpu": 0.3}, r"the placement of weights adds up to 0.3 \(cpu 0.3\). needed shares that sum to 1"),
        ({"cpu": 0.6, "disk": 0.6}, r"adds up to 1.2 \(cpu 0.6, disk 0.6\)"),
        ({}, "adds up to 0"),
        ({"cpu": -0.5, "disk": 1.5}, "gives cpu the share -0.5"),
        ({"cpu": math.nan}, "gives cpu the share nan"),
        ({"cpu": math.inf}, "gives cpu the share inf"),
        ({"cpu": "1"}, "gives cpu the share '1'"),
        ({"cpu": True}, "gives cpu the share True"),
        ({"dsk": 1.0}, "names the tier 'dsk'. needed tiers among gpu, cpu, disk. did you mean 'disk'"),
        ({"CPU": 1.0}, "names the tier 'CPU'.*did you mean 'cpu'"),
        ("cpu", "is 'cpu'"),
    ],
)
def test_shares_that_make_no_sense(value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        OffloadPolicy(weights=value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_batch_size": 0}, "--gpu-batch-size is 0. needed at least 1"),
        ({"num_gpu_batches": 1.5}, "--num-gpu-batches is 1.5"),
        ({"lookahead": -1}, "--lookahead is -1"),
        ({"prefill_chunk": 15}, "--prefill-chunk is 15. needed at least 16"),
        ({"prefill_chunk": 64.0}, "--prefill-chunk is 64.0"),
        ({"overlap": 1}, "--overlap is 1. needed true or false"),
        ({"cpu_cache_compute": "no"}, "--cpu-cache-compute is 'no'"),
    ],
)
def test_block_shapes_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OffloadPolicy(**options)


def test_percentages() -> None:
    policy = OffloadPolicy.from_percent((20, 80, 0, 30, 0, 0), gpu_batch_size=4, overlap=False)
    assert policy.weights == {"gpu": 0.2, "cpu": 0.8}
    assert policy.cache == {"cpu": 0.3, "disk": 0.7}
    assert policy.hidden == {"disk": 1.0}
    assert (policy.gpu_batch_size, policy.overlap) == (4, False)


@pytest.mark.parametrize(
    ("percent", "message"),
    [
        ((60, 60, 0, 100, 0, 100), r"--percent is 60 60 0 100 0 100: weights 60 \+ 60 = 120. needed at most 100"),
        ((0, 100, 0, 100, 1, 100), r"hidden 1 \+ 100 = 101"),
        ((0, -1, 0, 100, 0, 100), "--percent is 0 -1 .* is -1. needed at least 0"),
        ((0, 0.5, 0, 100, 0, 100), "is 0.5"),
        ((0, 100), "needed 6 numbers.*got 2"),
    ],
)
def test_percentages_that_make_no_sense(percent: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OffloadPolicy.from_percent(percent)


def test_without_a_gpu_its_shares_are_on_the_cpu() -> None:
    policy = OffloadPolicy(2, weights={"gpu": 0.1, "cpu": 0.2, "disk": 0.7}, hidden={"gpu": 1}).with_gpu_as_cpu()
    assert policy.weights["cpu"] == pytest.approx(0.3)
    assert (policy.weights["gpu"], policy.hidden, policy.gpu_batch_size) == (0, {"cpu": 1.0}, 2)


@given(weights=shares(), cache=shares(), hidden=shares(), batches=st.integers(1, 5))
def test_json_round_trip(weights: Any, cache: Any, hidden: Any, batches: int) -> None:
    policy = OffloadPolicy(3, batches, weights, cache, hidden, overlap=False, prefill_chunk=64)
    assert OffloadPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(UsageError, match=r"no key 'gpu_batchsize'.*did you mean 'gpu_batch_size'"):
        OffloadPolicy.from_json({"gpu_batchsize": 3})
    with pytest.raises(UsageError, match="needed a JSON object"):
        OffloadPolicy.from_json([1])  # type: ignore[arg-type]


def test_shares_as_text() -> None:
    assert parse_shares("cpu=0.3,disk=0.7") == parse_shares(" disk=.7, CPU=3e-1") == {"cpu": 0.3, "disk": 0.7}
    assert parse_shares("disk") == {"disk": 1.0}
    for text, message in (("cpu=x", "'cpu=x' is not a share"), ("cpu=.5,cpu=.5", "twice"), ("", "names the tier ''")):
        with pytest.raises(UsageError, match=message):
            parse_shares(text)


@given(
    weights=shares(), cache=shares(), layers=st.integers(1, 12), batches=st.integers(1, 6), vocab=st.integers(1, 2000)
)
def test_placements_meet_their_shares(weights: Any, cache: Any, layers: int, batches: int, vocab: int) -> None:
    model, policy = spec(layers, vocab), OffloadPolicy(1, batches, weights, cache, cache)
    placement = place(model, policy, "float16")
    sizes = {group.key: group.nbytes("float16") for group in model.weight_groups}
    assert list(placement.weights) == list(sizes)
    assert set(placement.cache) == {(layer, batch) for layer in range(layers) for batch in range(batches)}
    assert set(placement.hidden) == set(range(batches))
    achieved = placement.achieved(model, "float16")
    for tier in TIERS:
        for kind, unit, asked in (
            ("weights", max(sizes.values()) / sum(sizes.values()), weights),
            ("cache", 1 / (layers * batches), cache),
            ("hidden", 1 / batches, cache),
        ):
            assert abs(achieved[kind].get(tier, 0) - asked[tier]) <= unit + 1e-9
            assert asked[tier] or tier not in achieved[kind]


@given(
    share=st.floats(0, 1),
    rest=st.floats(0, 1),
    slots=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    batches=st.integers(1, 2),
)
def test_caches_of_unequal_layers_go_by_bytes(share: float, rest: float, slots: list[int], batches: int) -> None:
    """No assignment of whole caches to two tiers is closer by more than the largest of them."""
    asked = {"gpu": share, "cpu": (1 - share) * rest, "disk": (1 - share) * (1 - rest)}
    policy, model = OffloadPolicy(1, batches, cache=asked), spec(len(slots))
    placement = place(model, policy, "float16", tuple(slots))
    total = batches * sum(slots)
    held = {tier: sum(slots[layer] for (layer, _), home in placement.cache.items() if home == tier) for tier in TIERS}
    sums = {sum(subset) for n in range(len(slots) * batches + 1) for subset in combinations(slots * batches, n)}
    for tier in TIERS:
        error = abs(held[tier] - asked[tier] * total)
        assert error <= min(abs(each - asked[tier] * total) for each in sums) + max(slots) + 1e-6
        assert placement.achieved(model, "float16")["cache"].get(tier, 0.0) == pytest.approx(held[tier] / total)
    alike = place(model, policy, "float16", (7,) * len(slots))
    assert alike.cache == place(model, policy, "float16").cache


def test_slots_of_windowed_layers() -> None:
    """Two of three layers hold 9 tokens at most: a third of the caches may be far less than a third of the bytes."""
    arch = dataclasses.replace(spec(6).arch, window=9, window_layers=(0, 1, 3, 4))
    model, work = dataclasses.replace(spec(6), arch=arch), Workload(prompt_len=24, gen_len=8, num_sequences=2)
    full = PlanRequest(model, work, EvictionConfig(), "float16", Caps(), "cpu").slots
    assert full == (9, 9, 32) * 2
    evicting = PlanRequest(model, work, EvictionConfig("h2o", budget=10), "float16", Caps(), "cpu").slots
    assert evicting == (9, 9, 11) * 2
    policy = OffloadPolicy(2, cache={"cpu": 1 / 3, "disk": 2 / 3})

    def held(slots: tuple[int, ...]) -> int:
        homes = place(model, policy, "float16", slots).cache
        return sum(full[layer] for (layer, _), home in homes.items() if home == "cpu")

    assert held(()) == 18, "two caches of six, both of windowed layers"
    assert held(full) == 27, "33 are asked for"


def test_placements_are_spread_over_the_depth() -> None:
    policy = OffloadPolicy(cache={"cpu": 0.25, "disk": 0.75})
    tiers = list(place(spec(12), policy, "float16").cache.values())
    assert [tiers[start : start + 4].count("cpu") for start in (0, 4, 8)] == [1, 1, 1]
    weights = list(place(spec(24), OffloadPolicy(weights={"cpu": 0.5, "disk": 0.5}), "float16").weights.values())
    for start in range(0, 40, 8):
        assert 2 <= weights[start : start + 8].count("disk") <= 6


@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_has_the_fastest_tier_with_room_for_it(tied: bool) -> None:
    """And the layers have what is left, spread over the depth."""
    model = spec(12, vocab=500)
    model = dataclasses.replace(model, arch=dataclasses.replace(model.arch, tied_head=tied))
    sizes = {group.key: group.nbytes("float16") for group in model.weight_groups}
    ends, whole = ["vocab"] if tied else ["embed", "head"], sum(sizes.values())

    def homes(nbytes: float) -> dict[str, str]:
        cpu = nbytes / whole
        return dict(place(model, OffloadPolicy(weights={"cpu": cpu, "disk": 1 - cpu}), "float16").weights)

    too_little = homes(0.9 * sizes[ends[0]])
    assert list(too_little) == list(sizes)
    assert {too_little[key] for key in ends} == {"disk"}
    assert "cpu" in too_little.values()
    one = homes(1.1 * sizes[ends[0]])
    assert [key for key in ends if one[key] == "cpu"] == ends[:1]
    of_ends = sum(sizes[key] for key in ends)
    both = homes((whole + of_ends) / 2)
    assert {both[key] for key in ends} == {"cpu"}
    layers = [home for key, home in both.items() if key not in ends]
    assert all(3 <= layers[start : start + 8].count("cpu") <= 5 for start in (0, 8, 16))


def test_placement_is_whole_where_the_share_is() -> None:
    placement = place(spec(3), OffloadPolicy.from_percent((100, 0, 0, 100, 0, 0)), "float16")
    assert set(placement.weights.values()) == {"gpu"}
    assert set(placement.cache.values()) == {"cpu"}
    assert set(placement.hidden.values()) == {"disk"}
