"""Caches of 8 and 4 bits in whole models: every policy on every tier is its oracle on rounded keys and values."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.packing import CacheBits
from h2o_flexgen.config.model.tensors import page_ceil
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from tests.engine.compare import History, assert_engine_equals_oracle
from tests.policy_matrix import POLICIES, PolicyRow
from tests.tiny import make_model, prompts_of, save

pytestmark = pytest.mark.usefixtures("rewriting")

LENGTHS, NEW = [17, 26, 9, 26, 23], 9  # more than the steps after which a cache on disk is rewritten
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
CPU, DISK, THREE = {"cpu": 1.0}, {"disk": 1.0}, {"gpu": 0.3, "cpu": 0.3, "disk": 0.4}
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {"policy": {"gpu_batch_size": 3}},
    "disk": {"policy": {"gpu_batch_size": 2, "num_gpu_batches": 2, "weights": CPU, "cache": DISK, "hidden": CPU}},
    "gpu": {
        "policy": {"gpu_batch_size": 2, "num_gpu_batches": 3, "weights": CPU, "cache": THREE, "hidden": CPU},
        "emulate_gpu": "1GiB",
    },
    "beside": {
        "policy": {"gpu_batch_size": 2, "num_gpu_batches": 2, "cache": CPU, "cpu_cache_compute": True},
        "emulate_gpu": "1GiB",
    },
}

each_kind = pytest.mark.parametrize("bits", [4, 8])
CELLS = [
    pytest.param(POLICIES[i % len(POLICIES)], place, bits, id=f"{POLICIES[i % len(POLICIES)].name}-{place}-{bits}")
    for i, (place, bits) in enumerate(product(PLACES, (4, (8, 4), 8, (4, 8))))
    if i % 2 == i // 4 % 2
]
"""Every policy, and every place with two kinds. Policies on every tier, caches of 16 bits: test_matrix.py."""


@pytest.mark.turns
@pytest.mark.parametrize(("policy", "place", "bits"), CELLS)
def test_every_policy_on_every_tier(
    policy: PolicyRow, place: str, bits: CacheBits, checkpoint, history: History
) -> None:
    assert_engine_equals_oracle(checkpoint("llama-gqa"), policy, LENGTHS, NEW, history, bits, PLACES[place])


@pytest.mark.parametrize(("policy", "place", "bits"), CELLS[::4])
def test_the_newest_tokens_are_seen_as_they_came(
    policy: PolicyRow, place: str, bits: CacheBits, checkpoint, history: History
) -> None:
    places = {**PLACES[place], "cache_newest": 4}
    assert_engine_equals_oracle(checkpoint("llama-gqa"), policy, LENGTHS, NEW, history, bits, places)


@pytest.mark.parametrize(
    ("policy", "place", "bits", "newest"),
    [pytest.param(*cell.values, newest, id=f"{cell.id}-{newest}") for newest in (0, 3) for cell in CELLS[newest::4]],
)
def test_centred_keys(
    policy: PolicyRow, place: str, bits: CacheBits, newest: int, checkpoint, history: History
) -> None:
    places = {**PLACES[place], "cache_rotation": "centre", "cache_newest": newest}
    assert_engine_equals_oracle(checkpoint("llama-gqa"), policy, LENGTHS, NEW, history, bits, places)


@pytest.mark.parametrize(
    ("name", "rolling"),
    [("gemma2", False), ("gemma3", False), ("gpt-oss", False), ("opt", False), ("gemma2", True), ("gpt-oss", True)],
)
def test_centred_keys_beside_caps_sinks_and_windows(name: str, rolling: bool, checkpoint, history: History) -> None:
    changes = {"budget": 12, "sinks": 1, "rolling_positions": rolling}
    places = {"cache_rotation": "centre", "cache_newest": 2}
    assert_engine_equals_oracle(checkpoint(name), POLICIES[1], [*LENGTHS, 70], NEW, history, 8, places, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rolling"), [("opt", False), ("gemma3", True), ("gpt-neox", True)], ids=str)
def test_other_families(name: str, rolling: bool, checkpoint, history: History) -> None:
    changes = {"budget": 12, "rolling_positions": True} if rolling else {}
    assert_engine_equals_oracle(checkpoint(name), POLICIES[1], LENGTHS, NEW, history, 8, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bits", "newest"),
    [("bfloat16", 4, 3), ("float16", 8, 0), ("float32", 4, 0), ("float32", 4, 5), ("float32", 8, 0)],
)
def test_tokens_do_not_depend_on_tiers_neighbours_or_shared_prefixes(
    dtype: str, bits: int, newest: int, checkpoint
) -> None:
    """More rows than places, so that they come and go, and prompts that begin alike."""
    prompts = prompts_of(LENGTHS)
    prompts = [*prompts, *(prompts[1][:20] + prompt for prompt in prompts[:2])]
    found = []
    alone = {"policy": {"gpu_batch_size": 1}, "share_prefixes": False}
    places = [PLACES["cpu"], alone] if dtype != "float32" else [*PLACES.values(), alone]
    for place in places:
        kept: dict[str, Any] = {"cache_bits": bits, "cache_newest": newest}
        settings = {"dtype": dtype, **kept, "eviction": EvictionConfig("h2o", ratio=0.3), **place}
        with Engine(checkpoint("llama-gqa")[1], **settings) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, **SETTINGS)])
    if dtype == "float32":
        assert all(tokens == found[0] for tokens in found)
    else:
        assert [len(tokens) for tokens in found[0]] == [NEW] * len(prompts)


@each_kind
def test_bytes_are_those_of_the_plan(bits: int, checkpoint) -> None:
    place = PLACES["disk"]
    with Engine(checkpoint("opt")[1], dtype="float32", cache_bits=bits, **place) as llm:
        llm.generate(prompts_of([30, 30]), **SETTINGS)
        spec, record, plan = llm.model.spec, llm.last_record, llm.last_plan
    head = spec.head_dim * bits // 8 + 4  # one group
    cache = 2 * spec.num_kv_heads * head * 2 * (30 + NEW)
    assert record.kv_bytes == spec.num_layers * cache
    assert record.bytes_moved["disk->cpu"] == (NEW - 1) * spec.num_layers * page_ceil(cache)
    assert record.peak_bytes["disk"] <= plan.footprint.total("disk")
    assert record.quantization == {
        "weights": None,
        "cache": {"bits": bits, "group": min(64, spec.head_dim), "rotation": "scale"},
    }


def test_keys_and_values_of_different_bits(checkpoint) -> None:
    with Engine(checkpoint("opt")[1], dtype="float32", cache_bits=(8, 4), **PLACES["disk"]) as llm:
        llm.generate(prompts_of([30, 30]), **SETTINGS)
        spec, record = llm.model.spec, llm.last_record
    cache = spec.num_kv_heads * (spec.head_dim * 12 // 8 + 2 * 4) * 2 * (30 + NEW)
    assert record.kv_bytes == spec.num_layers * cache
    assert record.bytes_moved["disk->cpu"] == (NEW - 1) * spec.num_layers * page_ceil(cache)
    assert record.quantization["cache"] == {"bits": [8, 4], "group": min(64, spec.head_dim), "rotation": "scale"}


def test_rounding_errors_of_newest_tokens_are_counted(checkpoint) -> None:
    found = []
    for newest in (0, 5):
        with Engine(checkpoint("llama-gqa")[1], dtype="float32", cache_bits=4, cache_newest=newest) as llm:
            llm.generate(prompts_of([30, 30]), **SETTINGS)
            spec = llm.model.spec
            found.append(llm.last_record.kv_bytes)
    assert found[1] - found[0] == spec.num_layers * 2 * spec.num_kv_heads * 5 * 2 * (spec.head_dim // 2 + 4)


def test_weights_and_caches_of_fewer_bits(checkpoint) -> None:
    with Engine(checkpoint("llama")[1], weight_bits=4, weight_group=32, cache_bits=8) as llm:
        llm.generate(prompts_of([9]), **SETTINGS)
        assert llm.last_record.quantization["weights"]["bits"] == 4
        assert llm.last_record.quantization["cache"]["bits"] == 8


def test_values_of_three_bits(tmp_path: Path, history: History) -> None:
    """What a budget in bytes takes where heads are of 16 numbers."""
    model = make_model("llama-head-dim", head_dim=16)
    made, places = (model, str(save(model, tmp_path))), {**PLACES["disk"], "cache_newest": 4}
    assert_engine_equals_oracle(made, POLICIES[1], LENGTHS, NEW, history, (4, 3), places)
    with Engine(made[1], eviction=EvictionConfig("h2o", bytes=0.5)) as llm:
        llm.generate(prompts_of([30]), **SETTINGS)
        assert llm.model.spec.cache_bits == (4, 3)
        assert llm.last_record.quantization["cache"]["bits"] == [4, 3]
        plain, token = 2 * 16 * 2, 8 + 4 + 6 + 4
        assert llm.last_record.eviction["budget"] == int((0.5 * 39 * plain - 2 * 2 * 16 - (16 + 1) * token) / token)


def test_bits_that_there_are_not(checkpoint) -> None:
    for bits in (3, (8, 16), (3, 4), (4, 8, 4), "8,4"):
        with pytest.raises(UsageError, match=re.escape(f"cache_bits is {bits!r}")):
            Engine(checkpoint("opt")[1], cache_bits=bits)


def test_a_share_of_bytes_is_filled_with_packed_tokens(checkpoint) -> None:
    prompts, found = prompts_of([30, 41]), {}
    cases = ("bytes", 0.3, 0), ("bytes, 8 and 4", 0.3, 0), ("newest", 0.6, None), ("whole", 0.9, 2)
    for name, share, newest in cases:
        bits: CacheBits = (8, 4) if "and" in name else 16
        settings = {"cache_bits": bits, "cache_newest": newest, "eviction": EvictionConfig("h2o", bytes=share)}
        with Engine(checkpoint("llama-gqa")[1], **settings) as llm:
            found[name] = [output.token_ids for output in llm.generate(prompts, **SETTINGS)], llm.last_record
            spec = llm.model.spec
            assert spec.cache_bits == (4 if bits == 16 else bits), "heads of 8 numbers take no 3 bits"
    lengths, plain = [30 + NEW, 41 + NEW], 2 * spec.head_dim * 2
    for name, token in (("bytes", spec.head_dim + 8), ("bytes, 8 and 4", spec.head_dim * 12 // 8 + 8)):
        beside = 2 * 2 * spec.head_dim + token  # scales and means, and what packing cost the first token
        totals = [int((0.3 * length * plain - beside) / token) for length in lengths]
        assert found[name][1].eviction["budget"] == totals
        assert found[name][1].quantization["cache"]["bits"] == (4 if name == "bytes" else [8, 4])
    assert totals != lengths
    assert found["whole"][1].eviction["budget"] == lengths
    token = spec.head_dim + 8
    totals = [int((0.6 * length * plain - 2 * 2 * spec.head_dim - 17 * token) / token) for length in lengths]
    assert found["newest"][1].eviction["budget"] == totals
    assert found["newest"][1].quantization["cache"]["newest"] == 16
    eviction = EvictionConfig("h2o", budget=found["bytes"][1].eviction["budget"][0])
    with Engine(checkpoint("llama-gqa")[1], cache_bits=4, cache_rotation="centre", eviction=eviction) as llm:
        assert llm.generate(prompts[:1], **SETTINGS)[0].token_ids == found["bytes"][0][0]


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize(("name", "rotation"), [("llama-gqa", "centre"), ("gemma2", "scale"), ("gpt-oss", "scale")])
def test_keys_are_centred_by_itself_where_only_tokens_have_logits(
    name: str, rotation: str, impl: str, checkpoint
) -> None:
    with Engine(checkpoint(name)[1], model_impl=impl, eviction=EvictionConfig("h2o", bytes=0.2)) as llm:
        assert (llm.model.spec.cache_rotation, llm.model.spec.cache_newest) == (rotation, 16)


def test_shares_of_bytes_that_there_are_not() -> None:
    with pytest.raises(UsageError, match=r"--kv-bytes is 1\.5"):
        EvictionConfig("h2o", bytes=1.5)
    with pytest.raises(UsageError, match=re.escape("--kv-bytes 0.2 and --hh-ratio 0.5 are both given")):
        EvictionConfig("h2o", 0.5, bytes=0.2)
    with pytest.raises(UsageError, match=re.escape("--kv-bytes 0.2 is given with the full cache")):
        EvictionConfig(bytes=0.2)


@pytest.mark.parametrize("share", [0.001, 0.05, 0.2])
def test_sequences_hold_sixteen_tokens_and_their_share(share: float) -> None:
    """No more than the share beyond that; a longer sequence never holds fewer tokens, so that it has room for all."""
    eviction, budgets = EvictionConfig("h2o", bytes=share, token_bytes=(4, 16, 20, 17)), []
    for length in range(2, 400):
        budget = eviction.resolve(length - 1, 1)
        assert budget.full == (length <= 16)
        budgets.append(budget.total)
        assert budget.total <= 16 or 20 + 4 * (budget.total + 17) <= share * length * 16
    assert budgets == sorted(budgets)
    assert budgets[60 - 2] == max(16, int(60 * 4 * share) - 5 - 17)


@pytest.mark.parametrize(
    ("eviction", "bits", "newest"),
    [
        (EvictionConfig("h2o", ratio=0.2), 8, 16),
        (EvictionConfig("h2o", bytes=0.05, budget_split="pyramid", recent=0), 8, None),  # the last layer keeps nothing
        (EvictionConfig("kvzip+h2o", ratio=0.4), 4, 0),
    ],
    ids=["newest", "nothing kept", "replayed"],
)
def test_what_is_kept_does_not_depend_on_neighbours(
    eviction: EvictionConfig, bits: CacheBits, newest: int | None
) -> None:
    prompts = prompts_of([3, 210, 70])
    with Engine("demo", cache_bits=bits, cache_newest=newest, dtype="float32", eviction=eviction) as llm:
        together = llm.generate(prompts, logprobs=0, **SETTINGS)
        for prompt, beside in zip(prompts, together, strict=True):
            alone = llm.generate([prompt], logprobs=0, **SETTINGS)[0]
            assert alone.token_ids == beside.token_ids
            assert alone.logprobs == pytest.approx(beside.logprobs, abs=2e-3)
