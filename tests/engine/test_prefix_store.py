"""A store of prefixes changes the work alone: same tokens and log-probabilities, over blocks, calls and engines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.cache.prefix_store import PrefixStore
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.prompt import Prompt, Span
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import PlanError, UsageError
from tests.policy_matrix import POLICIES, PolicyRow
from tests.tiny import prompts_of

SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": 0}
SHAPE = {"gpu_batch_size": 3, "num_gpu_batches": 1}
PARTS, BATCHES = {**SHAPE, "prefill_chunk": 16}, {"gpu_batch_size": 2, "num_gpu_batches": 3}
HEADERS = prompts_of([40, 50, 33], seed=3)


def _prompts(seed: int) -> list[list[int]]:
    """Each header four times, one of them inside of another's prompts, and strangers."""
    tails = prompts_of([4, 9, 3, 20, 7, 5, 30, 6, 2, 8, 11, 3, 25], seed=seed)
    nested = [HEADERS[0], HEADERS[1], HEADERS[0] + HEADERS[2][1:]]
    return [*(nested[i % 3] + tail[1:] for i, tail in enumerate(tails[:-1])), tails[-1]]


def _same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def _computed(llm: Engine) -> int:
    assert llm.last_record is not None
    assert llm.last_record.computed_prompt_tokens is not None
    return llm.last_record.computed_prompt_tokens


def _store(llm: Engine) -> PrefixStore:
    assert llm.prefixes is not None
    return llm.prefixes


@pytest.mark.turns
@pytest.mark.parametrize("policy", POLICIES, ids=lambda row: row.name)
def test_results_are_those_without_it(policy: PolicyRow, checkpoint: Any) -> None:
    _, folder = checkpoint("llama")
    calls = [_prompts(1), _prompts(2)]
    with Engine(folder, dtype="float32", eviction=policy.eviction(), policy=SHAPE) as llm:
        expected = [llm.generate(prompts, **SETTINGS) for prompts in calls]
        without = _computed(llm)
    with Engine(folder, dtype="float32", eviction=policy.eviction(), policy=SHAPE, prefix_mem="64MiB") as llm:
        for prompts, outputs in zip(calls, expected, strict=True):
            _same(llm.generate(prompts, **SETTINGS), outputs)
        assert _computed(llm) <= without + 16 * 4
        counts = _store(llm).counts
    if counts.found == 0:  # a policy that looks at all queries of a prompt
        assert policy.name.startswith("expected_attention"), "nothing was found"


@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_fair_spans_look_at_all_queries_of_column_sums(policy: str, checkpoint: Any) -> None:
    """Of a prompt's beginning in the store there are none."""
    _, folder = checkpoint("llama")
    eviction = EvictionConfig(policy, ratio=0.5, spans="fair")
    prompts = [Prompt(tokens, [Span(3, 12, "rule")]) for tokens in _prompts(1)]
    with Engine(folder, dtype="float32", eviction=eviction, policy=SHAPE) as llm:
        expected = llm.generate(prompts, **SETTINGS)
    with Engine(folder, dtype="float32", eviction=eviction, policy=SHAPE, prefix_mem="64MiB") as llm:
        for _ in range(2):
            _same(llm.generate(prompts, **SETTINGS), expected)
        assert (_store(llm).counts.found > 0) == (policy == "streaming")


@pytest.mark.turns
@pytest.mark.parametrize(
    ("family", "shape"), [("opt", PARTS), ("opt", BATCHES), ("gemma3", PARTS), ("gpt-oss", BATCHES)]
)
def test_families_parts_and_blocks_of_several_batches(family: str, shape: dict[str, int], checkpoint: Any) -> None:
    _, folder = checkpoint(family)
    eviction = EvictionConfig("h2o", ratio=0.4)
    with Engine(folder, dtype="float32", eviction=eviction, policy=shape) as llm:
        expected = [llm.generate(_prompts(seed), **SETTINGS) for seed in (1, 2)]
    with Engine(folder, dtype="float32", eviction=eviction, policy=shape, prefix_mem="64MiB") as llm:
        for seed, outputs in zip((1, 2), expected, strict=True):
            _same(llm.generate(_prompts(seed), **SETTINGS), outputs)
        assert _store(llm).counts.found > 0


def test_tokens_that_are_computed(checkpoint: Any) -> None:
    """Whole sixteens of a header once, whatever the blocks; nothing of it in a later call."""
    _, folder = checkpoint("opt")
    header, *tails = prompts_of([40, *[5] * 9], seed=6)
    prompts = [header + tail for tail in tails]
    with Engine(folder, dtype="float32", policy={"gpu_batch_size": 1, "num_gpu_batches": 1}, prefix_mem="64MiB") as llm:
        llm.generate(prompts, max_new_tokens=2)
        assert _computed(llm) == 32 + 9 * (len(prompts[0]) - 32)
        llm.generate(prompts, max_new_tokens=2)
        assert _computed(llm) == 9 * (len(prompts[0]) - 32)
        llm.generate(prompts[:1], max_new_tokens=2)
        assert _computed(llm) == len(prompts[0]) - 32


def test_a_second_process_starts_warm_and_believes_no_damaged_file(checkpoint: Any, tmp_path: Path) -> None:
    _, folder = checkpoint("llama")
    settings: dict[str, Any] = {"dtype": "float32", "policy": SHAPE, "eviction": EvictionConfig("h2o", ratio=0.5)}
    prompts, stored = _prompts(1), {"prefix_dir": str(tmp_path), "prefix_mem": "8MiB"}
    with Engine(folder, **settings) as llm:
        expected = llm.generate(prompts, **SETTINGS)
    with Engine(folder, **settings, **stored) as llm:
        _same(llm.generate(prompts, **SETTINGS), expected)
        cold = _computed(llm)
    with Engine(folder, **settings, **stored) as llm:
        _same(llm.generate(prompts, **SETTINGS), expected)
        assert _computed(llm) < 0.7 * cold
        assert _store(llm).counts.from_disk > 0
    files = sorted(tmp_path.rglob("*.kv"))
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        if number % 3 == 0:
            data[len(data) // 2] ^= 4
        elif number % 3 == 1:
            del data[-7:]
        else:
            data[:40] = b"\0" * 40
        file.write_bytes(data)
    with Engine(folder, **settings, **stored) as llm:
        _same(llm.generate(prompts, **SETTINGS), expected)
        counts = _store(llm).counts
        assert (counts.damaged > 0, counts.from_disk) == (True, 0)
    for other in ({"dtype": "bfloat16"}, {"weight_bits": 8}, {"eviction": EvictionConfig()}):
        with Engine(folder, **{**settings, **other}, **stored) as llm:
            llm.generate(prompts[:1], **SETTINGS)
            assert _store(llm).counts.found == 0, other


@pytest.mark.parametrize("disk", [False, True])
def test_a_store_that_is_too_small_for_all(disk: bool, checkpoint: Any, tmp_path: Path) -> None:
    """Entries come and go; caps are kept, and answers do not depend on any of it."""
    _, folder = checkpoint("opt")
    prompts = _prompts(1)
    stored: dict[str, Any] = {"prefix_mem": "1MiB"}
    if disk:
        stored |= {"prefix_dir": str(tmp_path), "prefix_disk": "1MiB"}
    with Engine(folder, dtype="float32", policy=SHAPE) as llm:
        expected = llm.generate(prompts, **SETTINGS)
    with Engine(folder, dtype="float32", policy=SHAPE, **stored) as llm:
        store = _store(llm)
        store.memory, store.disk = 60_000, 40_000 if disk else 0
        for _ in range(3):
            _same(llm.generate(prompts, **SETTINGS), expected)
            assert store.bytes_held <= store.memory
            assert store.bytes_on_disk <= store.disk
        assert store.counts.evicted > 0
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 40_000


def test_its_memory_is_part_of_the_plan(checkpoint: Any) -> None:
    _, folder = checkpoint("opt")
    with Engine(folder, prefix_mem="3MiB") as llm:
        llm.generate(_prompts(1)[:2], max_new_tokens=1)
        assert llm.last_plan is not None
        assert ("cpu", "prefix store", 3 << 20) in llm.last_plan.footprint.items
    with Engine(folder, prefix_mem="64GiB", cpu_mem="8GiB") as llm, pytest.raises(PlanError, match="prefix store"):
        llm.generate(_prompts(1)[:2], max_new_tokens=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix_disk": "1GiB"}, "without --prefix-dir"),
        ({"prefix_mem": "1GiB", "share_prefixes": False}, "share_prefixes is off"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        Engine("demo", **settings)
