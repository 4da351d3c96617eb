"""The engine with eviction against the slow oracle: tokens, log-probabilities and kept sets, step by step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.packing import CacheBits
from h2o_flexgen.config.recall import RecallTier
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from tests.engine.compare import History, assert_engine_equals_oracle
from tests.oracles.policies import RecallOracle
from tests.policy_matrix import EVICTING, LATER, POLICIES, THEN_H2O, PolicyRow
from tests.tiny import FAMILIES, WINDOW, prompts_of

LENGTHS = [17, 26, 9, 22]
NEW = 7
CLOSER = ("opt", "opt-350m", "llama-gqa", "mistral", "gemma3", "gpt-neox")


CASES = [
    (row, name)
    for i, row in enumerate(POLICIES)
    for j, name in enumerate(FAMILIES if row.name == "h2o" else CLOSER)
    if row.name == "h2o" or (i + j) % 2 == 0
]


@pytest.mark.turns
@pytest.mark.parametrize(("policy", "name"), CASES, ids=lambda value: getattr(value, "name", value))
def test_engine_equals_the_oracle_alone_and_in_ragged_batches(
    policy: PolicyRow, name: str, checkpoint, history: History
) -> None:
    """H2O for every family, each of the other policies for three kinds of attention."""
    assert_engine_equals_oracle(checkpoint(name), policy, LENGTHS, NEW, history)


WINDOWED = [
    pytest.param(row, name, (i + j) % 2 == 0, id=f"{row.name}-{name}-{'absolute' if (i + j) % 2 else 'rolling'}")
    for i, row in enumerate(EVICTING)
    for j, name in enumerate(("mistral", "gemma3"))
]
"""Every policy with both families, and absolute and rolling positions with every policy and family."""


@pytest.mark.turns
@pytest.mark.parametrize(("policy", "name", "rolling"), WINDOWED)
def test_budgets_below_the_window(policy: PolicyRow, name: str, rolling: bool, checkpoint, history: History) -> None:
    """There the window leaves a choice: tokens that go because they have left it, sinks that are kept unseen."""
    changes = {"budget": WINDOW - 4, "rolling_positions": rolling}
    assert_engine_equals_oracle(checkpoint(name), policy, [23, 7, 12, 31], NEW, history, **changes)


@pytest.mark.turns
@pytest.mark.parametrize("policy", EVICTING, ids=lambda row: row.name)
def test_ratio_one_is_the_full_cache_bit_for_bit(policy: PolicyRow, checkpoint, monkeypatch) -> None:
    _, folder = checkpoint("opt")
    seen: dict[str, list[Tensor]] = defaultdict(list)
    for name in ("full", policy.name):
        eviction = EvictionConfig(name) if name == "full" else EvictionConfig(name, ratio=1.0)
        with Engine(folder, dtype="float32", eviction=eviction) as llm:
            head = llm._decoder.head
            monkeypatch.setattr(
                llm._decoder, "head", lambda w, h, head=head, name=name: seen[name].append(head(w, h)) or seen[name][-1]
            )
            llm.generate(prompts_of(LENGTHS), max_new_tokens=NEW, ignore_eos=True)
    assert all(torch.equal(a, b) for a, b in zip(seen["full"], seen[policy.name], strict=True))


@pytest.mark.parametrize("budget", [1, 2, 3, 1000])
def test_budgets_from_one_token_to_more_than_the_sequence(budget: int, checkpoint) -> None:
    _, folder = checkpoint("opt")
    prompts = prompts_of([9, 20])
    with Engine(folder, dtype="float32", eviction=EvictionConfig("h2o", budget=budget)) as llm:
        outputs = llm.generate(prompts, max_new_tokens=8, ignore_eos=True)
        assert [len(output.token_ids) for output in outputs] == [8, 8]
        low, high = llm.last_record.eviction["budget"] if budget == 1000 else (budget, budget)
        assert (low, high) == ((17, 28) if budget == 1000 else (budget, budget))


def test_running_a_b_a_gives_a_twice(checkpoint) -> None:
    """No score, slot or position survives a request (trap 9)."""
    _, folder = checkpoint("opt")
    a, b = prompts_of([30]), prompts_of([25, 28], seed=5)
    with Engine(folder, dtype="float32", eviction=EvictionConfig("h2o", ratio=0.3)) as llm:
        first = llm.generate(a, max_new_tokens=NEW, logprobs=0)
        llm.generate(b, max_new_tokens=NEW)
        assert llm.generate(a, max_new_tokens=NEW, logprobs=0) == first


def test_row_order_does_not_matter(checkpoint) -> None:
    _, folder = checkpoint("opt")
    prompts = prompts_of(LENGTHS)
    with Engine(folder, dtype="float32", eviction=EvictionConfig("h2o", ratio=0.3)) as llm:
        forward = [o.token_ids for o in llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True)]
        backward = [o.token_ids for o in llm.generate(prompts[::-1], max_new_tokens=NEW, ignore_eos=True)]
    assert forward == backward[::-1]


def test_left_padding_never_counts(checkpoint) -> None:
    """A left-padded short prompt beside a long one: same tokens as alone for 64 steps (trap 1)."""
    _, folder = checkpoint("opt")
    short, long = prompts_of([9, 33])
    ids = torch.tensor([[1] * 24 + short, long])
    mask = torch.tensor([[0] * 24 + [1] * 9, [1] * 33])
    with Engine(folder, dtype="float32", eviction=EvictionConfig("h2o", ratio=0.3)) as llm:
        both = llm.generate_ids(ids, mask, max_new_tokens=64, ignore_eos=True)
        for row, prompt in enumerate((short, long)):
            alone = llm.generate_ids(torch.tensor([prompt]), max_new_tokens=64, ignore_eos=True)
            assert both[row, 33:].tolist() == alone[0, len(prompt) :].tolist()


APART = {"budget_split": "far", "far_layers": ((0, 1), (1, 0)), "kv_heads": 2}
"""Of two layers of two KV heads one looks far in each."""


@pytest.mark.parametrize(
    ("places", "changes"),
    [
        ({"policy": {"gpu_batch_size": 3, "prefill_chunk": 16}}, {"budget": 12}),
        ({}, {"budget": 12}),
        ({}, {"ratio": 0.7}),  # some heads are whole
        ({}, {"budget": 9, "rolling_positions": True}),
        ({"emulate_gpu": "1GiB", "policy": {"gpu_batch_size": 2, "num_gpu_batches": 2}}, {"ratio": 0.4, "recent": 2}),
        ({"policy": {"gpu_batch_size": 2, "num_gpu_batches": 2, "cache": {"disk": 1.0}}}, {"ratio": 0.3, "sinks": 1}),
        ({"cache_rotation": "centre", "cache_newest": 3}, {"budget": 10}),
    ],
)
def test_heads_that_look_far_keep_more(
    places: dict[str, Any], changes: dict[str, Any], checkpoint, history: History, rewriting: None
) -> None:
    bits: CacheBits = (8, 4) if "cache_newest" in places else 16
    policy = next(row for row in EVICTING if row.name == "h2o")
    model = checkpoint("llama-gqa")
    assert_engine_equals_oracle(model, policy, LENGTHS, 9, history, bits, places, **APART, **changes)
    held = [len(head) for head in history[0, 0][-1]]
    assert held[0] < held[1]


def test_heads_apart_take_the_memory_that_was_planned(checkpoint, tmp_path: Path) -> None:
    """Rows come and go, of different lengths; their caches shrink with them, and fit where they are."""
    places = {"gpu_batch_size": 2, "num_gpu_batches": 2, "cache": {"disk": 1.0}}
    eviction, prompts = EvictionConfig("h2o", ratio=0.35, **APART), prompts_of([40, 26, 33, 21, 9, 38])
    settings = [SamplingParams(new, ignore_eos=True) for new in (5, 9, 7, 9, 9, 6)]
    with Engine(checkpoint("llama-gqa")[1], dtype="float32", eviction=eviction) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, settings)]
    engine = {"dtype": "float32", "policy": places, "offload_dir": str(tmp_path)}
    with Engine(checkpoint("llama-gqa")[1], eviction=eviction, **engine) as llm:
        assert [output.token_ids for output in llm.generate(prompts, settings)] == expected
        same = prompts_of([40] * 4)
        llm.generate(same, SamplingParams(9, ignore_eos=True))
        disk, plan = llm._loaded.stages[0].tiers.disk, llm.last_plan
        assert disk.peak == plan.footprint.total("disk")


BY_CHANCE = ("random", "vase", "nacl")


@pytest.mark.turns
@pytest.mark.parametrize(
    "policy",
    [row for row in (*EVICTING, *LATER, *THEN_H2O) if row.name.removesuffix("+h2o") not in (*BY_CHANCE, "pyramidkv")],
    ids=lambda row: row.name,
)
def test_every_policy_chooses_among_heads_that_keep_as_many(policy: PolicyRow, checkpoint, history: History) -> None:
    """What draws lots is left out: it counts the heads of each kind by themselves."""
    assert_engine_equals_oracle(checkpoint("llama-gqa"), policy, LENGTHS, NEW, history, **APART)


class OftenRecalling(RecallOracle):
    every = 2


NEW_OF_EACH = (5, 9, 7, 9, 9, 6, 8)
PACKED = {"cache_bits": (8, 4), "cache_newest": 9}
RECALLING = PolicyRow("h2o", OftenRecalling, {"budget": 14, "sinks": 2, "recall": "cpu", "recall_every": 2})


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "places", "changes"),
    [
        ("llama-gqa", {"policy": {"gpu_batch_size": 3, "prefill_chunk": 16}}, {}),
        ("gemma2", {}, {"budget": WINDOW - 3, "recent": 3, "sinks": 1}),
        ("gemma2", {}, {"budget": WINDOW - 3, "recent": 3, "sinks": 1, "recall": "disk"}),
        ("opt", {"emulate_gpu": "1GiB", "policy": {"gpu_batch_size": 2, "num_gpu_batches": 2}}, {"recent": 2}),
        ("opt", {"emulate_gpu": "1GiB"}, {"recent": 2, "recall": "disk"}),
    ],
)
def test_recall_equals_the_oracle(
    name: str, places: dict[str, Any], changes: dict[str, Any], checkpoint, history: History
) -> None:
    assert_engine_equals_oracle(checkpoint(name), RECALLING, [36, 26, 9], 7, history, places=places, **changes)


@pytest.mark.turns
@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize(("name", "packed"), [("snapkv+h2o", {}), ("h2o", {}), ("h2o", PACKED)])
def test_what_is_recalled_does_not_depend_on_neighbours(
    name: str, packed: dict[str, Any], tier: RecallTier, checkpoint, tmp_path: Path
) -> None:
    """More rows than places, so that they come and go, prompts that begin alike; the record has what was planned."""
    _, folder = checkpoint("llama-gqa")
    prompts = prompts_of([40, 26, 33, 21])
    prompts = [*prompts, *(prompts[0][:20] + prompt for prompt in prompts[1:])]
    eviction, found = EvictionConfig(name, budget=14, sinks=2, recall="cpu", recall_every=2), []
    if tier == "disk":
        with Engine(folder, eviction=eviction, dtype="float32", **packed) as llm:
            outputs = llm.generate(prompts, [SamplingParams(new, ignore_eos=True) for new in NEW_OF_EACH])
            found.append([output.token_ids for output in outputs])
        eviction = replace(eviction, recall="disk")
    for place in ({"gpu_batch_size": 3}, {"gpu_batch_size": 1}, {"gpu_batch_size": 2, "num_gpu_batches": 2}):
        alone, gpu = place["gpu_batch_size"] == 1, "1GiB" if len(place) == 2 else None
        engine = {"dtype": "float32", "policy": place, "share_prefixes": not alone, "emulate_gpu": gpu, **packed}
        with Engine(folder, eviction=eviction, offload_dir=str(tmp_path), **engine) as llm:
            outputs = llm.generate(prompts, [SamplingParams(new, ignore_eos=True) for new in NEW_OF_EACH])
            record, spec, plan = llm.last_record, llm.model.spec, llm.last_plan
            disk = llm._loaded.stages[0].tiers.disk
            assert disk.used == 0
            assert disk.peak == plan.footprint.total("disk")
            found.append([output.token_ids for output in outputs])
        recall = record.recall
        assert recall["recalled"] > 0.9 * recall["looks"]
        assert recall["written_bytes"] == recall["planned"]["written"]
        assert 0.5 < recall["hit_rate"] <= 1
        if gpu:
            assert record.bytes_moved["gpu->cpu"] >= recall["written_bytes"]
            assert plan.footprint.total(tier) > recall["written_bytes"] / 4
        if tier == "cpu":
            assert recall["read_bytes"] == pytest.approx(recall["planned"]["read"], rel=0.1)
            assert recall["read_bytes"] == recall["recalled"] * 2 * spec.head_dim * 4
        else:
            assert recall["read_bytes"] == pytest.approx(recall["planned"]["read"], rel=0.25)
            assert record.bytes_moved["disk->cpu"] == recall["read_bytes"]
            assert record.bytes_moved["cpu->disk"] == recall["written_bytes"]
    assert all(tokens == found[0] for tokens in found)
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama-gqa", {"policy": {"cache": {"disk": 1.0}}}, "with caches on disk. needed them on cpu"),
        (
            "llama-gqa",
            {"emulate_gpu": "1GiB", "policy": {"cpu_cache_compute": True}},
            "--recall cpu is given with --cpu-cache-compute",
        ),
    ],
)
def test_what_recall_does_not_go_with(name: str, settings: dict[str, Any], message: str, checkpoint) -> None:
    """What the eviction's config refuses by itself: tests/config/test_eviction.py."""
    eviction = EvictionConfig("h2o", ratio=0.3, recall="cpu")
    with pytest.raises(UsageError, match=message):
        Engine(checkpoint(name)[1], dtype="float32", eviction=eviction, **settings)
