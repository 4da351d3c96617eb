"""Layers that keep states, by transformers' modules: states move with their rows, whatever tier they lie on, and go on
behind parts of a prompt and behind prefixes that rows share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from h2o_flexgen.models.hf.shrink import VOCAB, random_model, shrunk
from tests.checkpoint.formats import FORMATS
from tests.engine.test_modules_stored import store
from tests.tiny import prompts_of, transformers_logprobs

KINDS = ("lfm2", "mamba", "falcon_h1", "qwen3_next")
"""Short convolutions alone, states alone, states beside keys, and in turns with them."""
NEW = 5


def prompts() -> list[list[int]]:
    """Of several lengths, longer than a part, two of which begin alike."""
    found = [[token % (VOCAB - 8) + 3 for token in ids] for ids in prompts_of([5, 21, 13, 1, 30])]
    return [*found, found[4][:20] + found[1][:4], found[4][:20] + found[0]]


def answers(folder: Path, asked: list[list[int]], new: list[int] | None = None, **how: Any) -> list[list[int]]:
    how = {"dtype": "float32", "model_impl": "transformers", "offload_dir": str(folder / "offload"), **how}
    with Engine(str(folder), **how) as llm:
        if new is None:
            return [each.token_ids for each in llm.generate(asked, max_new_tokens=NEW, ignore_eos=True)]
        return [
            llm.generate([ids], max_new_tokens=n, ignore_eos=True)[0].token_ids
            for ids, n in zip(asked, new, strict=True)
        ]


@pytest.mark.turns
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_neighbours(kind: str, tmp_path: Path) -> None:
    random_model(shrunk({"model_type": kind})).save_pretrained(tmp_path)
    asked = prompts()
    alone = answers(tmp_path, asked, [NEW] * len(asked))
    policies: list[dict[str, Any]] = [
        {"gpu_batch_size": 3, "num_gpu_batches": 2, "prefill_chunk": 16},  # the last row refills a place
        {"gpu_batch_size": 2, "num_gpu_batches": 2, "cache": {"disk": 1.0}},
        {"gpu_batch_size": 7, "num_gpu_batches": 1, "prefill_chunk": 256},
    ]
    for policy in policies:
        assert answers(tmp_path, asked, policy=policy) == alone
    emulated = {"gpu_batch_size": 2, "num_gpu_batches": 2, "cache": {"cpu": 0.5, "disk": 0.5}}
    assert answers(tmp_path, asked, policy=emulated, emulate_gpu="1GiB") == alone


@pytest.mark.parametrize("kind", ["nemotron_h", "zamba2"])
def test_a_token_of_a_prompt_is_computed_alike_whether_alone_or_not(kind: str, tmp_path: Path) -> None:
    """These modules hold the steps of several tokens above a least one, and do not where a lone token follows others;
    a step of decoding is such a one in transformers as well."""
    model = random_model(shrunk({"model_type": kind}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.sub_(5)
    model.save_pretrained(tmp_path)
    first = prompts()[4]
    asked = [first[:17], [*first[:16], 9], [*first[:17], 9]]
    found = []
    for shape, chunk in (((3, 1), 256), ((1, 3), 16), ((3, 1), 16)):
        policy = {"gpu_batch_size": shape[0], "num_gpu_batches": shape[1], "prefill_chunk": chunk}
        with Engine(str(tmp_path), dtype="float32", model_impl="transformers", policy=policy) as llm:
            outputs = llm.generate(asked, max_new_tokens=NEW, ignore_eos=True, logprobs=0)
            found.append([each for output in outputs for each in output.logprobs or ()])
    assert found[1] == pytest.approx(found[0], abs=1e-4)
    assert found[2] == pytest.approx(found[0], abs=1e-4)


@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next"])
def test_a_plan_and_a_record_have_the_bytes_of_states(kind: str, tmp_path: Path) -> None:
    random_model(shrunk({"model_type": kind})).save_pretrained(tmp_path)
    how: dict[str, Any] = {"policy": {"gpu_batch_size": 2, "num_gpu_batches": 2}, "dtype": "float32"}
    with Engine(str(tmp_path), model_impl="transformers", **how) as llm:
        llm.generate(prompts()[:4], max_new_tokens=NEW, ignore_eos=True)
        record, plan, spec = llm.last_record, llm.last_plan, llm.model.spec
    assert record is not None
    assert plan is not None
    states = [each for layer in range(spec.num_layers) for each in spec.states_of(layer)]
    least = 4 * sum(each.nbytes("float32") for each in states)
    planned = sum(item.nbytes for item in plan.footprint.items if item.what == "states")
    assert least <= record.state_bytes == planned
    assert record.kv_bytes > 0


def test_layers_with_states_alone_have_no_budget_to_give(tmp_path: Path) -> None:
    random_model(shrunk({"model_type": "qwen3_next"})).save_pretrained(tmp_path)
    found = []
    for far in ({}, {"far_layers": (3,)}):
        with Engine(str(tmp_path), dtype="float32", eviction=EvictionConfig("h2o", ratio=0.3, **far)) as llm:
            spec = llm.model.spec
            llm.generate(prompts()[:2], max_new_tokens=NEW, ignore_eos=True)
            assert llm.last_record is not None
            found.append(llm.last_record.kv_bytes)
    assert sum(map(spec.attends, range(spec.num_layers))) < spec.num_layers
    assert spec.attends(3)
    assert found[0] == found[1]


def test_what_states_cannot_do_is_a_usage_error(tmp_path: Path) -> None:
    random_model(shrunk({"model_type": "lfm2"})).save_pretrained(tmp_path)
    for settings in (
        {"prefix_mem": "1MiB"},
        {"eviction": EvictionConfig("kvzip", ratio=0.5)},
    ):
        with pytest.raises(UsageError, match="keep states"):
            Engine(str(tmp_path), model_impl="transformers", **settings)


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        ("mamba", {"ratio": 0.5}),
        ("mamba2", {"bytes": 0.5}),
        pytest.param("falcon_mamba", {"ratio": 0.5}, marks=pytest.mark.slow),
    ],
)
def test_where_nothing_attends_nothing_is_evicted_and_a_warning_says_so(
    kind: str, budget: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random_model(shrunk({"model_type": kind})).save_pretrained(tmp_path)
    whole = answers(tmp_path, prompts()[:2])
    assert "no layer that attends" not in caplog.text
    with Engine(str(tmp_path), dtype="float32", eviction=EvictionConfig("h2o", **budget)) as llm:
        found = [each.token_ids for each in llm.generate(prompts()[:2], max_new_tokens=NEW, ignore_eos=True)]
        assert llm.last_record is not None
        said = [each for each in llm.last_record.warnings if "has no layer that attends" in each]
    assert len(said) == 1
    assert said[0] in caplog.text
    assert "--eviction h2o has nothing to evict" in said[0]
    assert found == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3_5_text", "qwen3_next", "falcon_h1", "lfm2", "mamba", "granitemoehybrid", "jamba"]
)
def test_weights_stored_in_16_bits(kind: str, tmp_path: Path) -> None:
    """Computed in float32 they give what transformers gives, and in 16 bits nothing much worse than it does there. Of
    mixtures only the former: in 16 bits rounding decides which of two experts that are about as good a token goes to.
    """
    made = random_model(shrunk({"model_type": kind})).to(torch.bfloat16)
    pairs = [([5, 9, 30, 7, 12, 99, 64], [3, 8, 21, 44, 9, 9, 10, 70, 4, 17, 33, 2, 8, 50, 90, 91])]
    made.save_pretrained(tmp_path)
    dtypes = (torch.float32, torch.bfloat16)
    judges = [type(made).from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval() for dtype in dtypes]
    exact, rounded = (transformers_logprobs(judge, *pairs[0])[range(16), pairs[0][1]] for judge in judges)
    for weights in ({"cpu": 1.0}, {"disk": 1.0}):
        how: dict[str, Any] = {"policy": {"weights": weights}, "offload_dir": str(tmp_path / "offload")}
        for dtype, loose in (("float32", 1e-3), ("auto", 3 * float((rounded - exact).abs().max()) + 0.1)):
            if dtype == "auto" and kind in ("qwen3_next", "granitemoehybrid", "jamba"):
                continue
            with Engine(str(tmp_path), dtype=dtype, model_impl="transformers", **how) as llm:
                assert llm.model.dtype == ("bfloat16" if dtype == "auto" else dtype)
                found = llm.score(pairs)[0].token_logprobs
            assert found == pytest.approx(exact.tolist(), abs=loose)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "falcon_h1"])
def test_packed_weights_and_budgets_beside_states(kind: str, tmp_path: Path) -> None:
    """A row's answers are its own, whatever block it is in and tier the weights and caches lie on."""
    (tmp_path / "dense").mkdir()
    (tmp_path / "packed").mkdir()
    store(kind, FORMATS["awq"], tmp_path / "dense", tmp_path / "packed")
    found = []
    for sizes, tier in (((3, 2), "cpu"), ((1, 3), "disk")):
        policy = {"gpu_batch_size": sizes[0], "num_gpu_batches": sizes[1], "weights": {tier: 1.0}, "cache": {tier: 1.0}}
        how = {"eviction": EvictionConfig("h2o", ratio=0.5), "policy": policy, "cache_bits": 8}
        found.append(answers(tmp_path / "packed", prompts(), **how))
    assert found[0] == found[1]
