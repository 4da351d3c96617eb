"""Attention over caches in host memory beside the GPU: the same tokens, in the order that lets both work at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.cache.shape import CacheShape
from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.execution import block, host_attention
from h2o_flexgen.engine.execution.host_attention import HostAttention
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.engine.state.kv_store import BatchCache
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.pinned import PinnedPool
from h2o_flexgen.memory.tiers import Ledger
from h2o_flexgen.memory.transfers import Ticket
from h2o_flexgen.schedule.workspace import HOST_ATTENTION
from tests.memory.fake_cuda import FakeDevice
from tests.memory.watch import order_threads, watched
from tests.tiny import prompts_of

LENGTHS = [23, 40, 12, 33, 31, 8, 19, 27]
BUDGETS = [20, 3, 9, 17, 31, 2, 14, 5]
CPU, GPU, SOME = {"cpu": 1.0}, {"gpu": 1.0}, {"gpu": 0.3, "cpu": 0.4, "disk": 0.3}
HOST = {"weights": GPU, "cache": CPU, "hidden": GPU, "cpu_cache_compute": True}
PLACES: dict[str, dict[str, Any]] = {
    "resident": HOST,
    "streamed": {**HOST, "weights": CPU},
    "parked": {**HOST, "weights": CPU, "hidden": CPU},
    "some": {**HOST, "weights": SOME, "cache": SOME, "hidden": SOME},
}


def run(folder: str, policy: dict[str, Any], eviction: EvictionConfig, **settings: Any) -> Engine:
    """Ragged prompts and answers, more than there are places: rows come and go."""
    block = {"gpu_batch_size": 2, "num_gpu_batches": 3}
    llm = Engine(folder, dtype="float32", eviction=eviction, policy={**policy, **block}, **settings)
    with llm:
        params = [SamplingParams(max_new_tokens=each, ignore_eos=True) for each in BUDGETS]
        outputs = llm.generate(prompts_of(LENGTHS), params)
    llm.tokens = [output.token_ids for output in outputs]  # type: ignore[attr-defined]
    return llm


@pytest.mark.turns
@pytest.mark.parametrize(
    ("family", "place", "config"),
    [
        *(("opt", place, EvictionConfig("h2o", ratio=0.3)) for place in PLACES),
        ("opt", "streamed", EvictionConfig()),
        ("opt-350m", "streamed", EvictionConfig("random", ratio=0.3)),
        ("llama-gqa", "parked", EvictionConfig("h2o", ratio=0.3, rolling_positions=True)),
        ("gemma3", "some", EvictionConfig("heavy", budget=9)),
        ("gpt-neox", "parked", EvictionConfig("streaming", budget=9)),
        ("qwen3", "streamed", EvictionConfig("h2o", ratio=0.3)),
    ],
    ids=str,
)
def test_the_same_tokens_as_with_everything_resident(family: str, place: str, config, checkpoint) -> None:
    folder = checkpoint(family)[1]
    expected = run(folder, {}, config).tokens
    found = run(folder, PLACES[place], config, emulate_gpu="1GiB")
    assert found.tokens == expected
    assert found.last_record.bound["busy"][HOST_ATTENTION] > 0


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_weights_are_streamed(bits: int, checkpoint) -> None:
    """Of which the output projection is kept, packed, until the second half needs it."""
    folder, config = checkpoint("llama-gqa")[1], EvictionConfig("h2o", ratio=0.3)
    expected = run(folder, {}, config, weight_bits=bits, weight_group=32).tokens
    found = run(folder, PLACES["streamed"], config, emulate_gpu="1GiB", weight_bits=bits, weight_group=32)
    assert found.tokens == expected


class Order:
    """What a block did, in order: halves of attention units by name and GPU batch, and computes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        begin, finish = HostAttention.begin, HostAttention.finish

        def began(host: HostAttention, task: Any, unit: Any, gpu_batch: Any, *rest: Any) -> None:
            self.events.append((f"begin {unit.name} step {task.step}", gpu_batch.index))
            begin(host, task, unit, gpu_batch, *rest)

        def finished(host: HostAttention, gpu_batch: Any) -> None:
            if host.pending(gpu_batch):
                late = host._late[gpu_batch.index]
                self.events.append((f"finish {late.unit.name} step {late.task.step}", gpu_batch.index))
            finish(host, gpu_batch)

        patch.setattr(HostAttention, "begin", began)
        patch.setattr(HostAttention, "finish", finished)


@pytest.mark.parametrize("place", PLACES)
def test_every_gpu_batch_begins_before_the_first_is_finished(place: str, checkpoint, monkeypatch) -> None:
    order = Order(monkeypatch)
    with Engine(
        checkpoint("opt")[1],
        dtype="float32",
        policy={**PLACES[place], "cache": CPU, "gpu_batch_size": 2, "num_gpu_batches": 3},
        emulate_gpu="1GiB",
    ) as llm:
        llm.generate(prompts_of([20] * 6), max_new_tokens=3, ignore_eos=True)
        layers = llm.model.spec.num_layers
    expected = [
        (f"{half} layers.{layer}.attn step {step}", gpu_batch)
        for step in (1, 2)
        for layer in range(layers)
        for half in ("begin", "finish")
        for gpu_batch in range(3)
    ]
    assert order.events == expected


@pytest.mark.parametrize("changes", [{"overlap": False}, {"num_gpu_batches": 1}, {"cpu_cache_compute": False}], ids=str)
def test_nothing_is_left_for_later_where_nothing_could_go_on_meanwhile(changes, checkpoint, monkeypatch) -> None:
    order = Order(monkeypatch)
    policy = {**HOST, "gpu_batch_size": 2, "num_gpu_batches": 3, **changes}
    with Engine(checkpoint("opt")[1], dtype="float32", policy=policy, emulate_gpu="1GiB") as llm:
        llm.generate(prompts_of([20] * 4), max_new_tokens=3, ignore_eos=True)
    assert not order.events


def test_what_fails_on_the_thread_reaches_the_caller(checkpoint, monkeypatch) -> None:
    calls = 0
    attend = KVCache.attend

    def failing(*args: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise ValueError("the seventh step")
        return attend(*args, **settings)

    monkeypatch.setattr(KVCache, "attend", failing)
    policy = {**HOST, "gpu_batch_size": 2, "num_gpu_batches": 3}
    with Engine(checkpoint("opt")[1], dtype="float32", policy=policy, emulate_gpu="1GiB") as llm:
        with pytest.raises(ValueError, match="the seventh step"):
            llm.generate(prompts_of([20] * 6), max_new_tokens=4, ignore_eos=True)
        monkeypatch.setattr(KVCache, "attend", attend)
        again = [output.token_ids for output in llm.generate(prompts_of([20] * 6), max_new_tokens=4, ignore_eos=True)]
    with Engine(checkpoint("opt")[1], dtype="float32") as llm:
        expected = llm.generate(prompts_of([20] * 6), max_new_tokens=4, ignore_eos=True)
    assert again == [output.token_ids for output in expected]


class _Hasty:
    """A ticket that nobody waits for."""

    def __init__(self, ticket: Any) -> None:
        self._ticket = ticket

    def wait(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ticket, name)


@pytest.mark.parametrize("missing", ["nothing", "the wait for what comes down", "the wait for the thread"])
@pytest.mark.parametrize("steps", [1, 4])
def test_the_device_and_the_thread_wait_for_each_other(missing: str, steps: int, checkpoint, monkeypatch) -> None:
    """One step: nothing but prompts."""
    device = FakeDevice(0.4)
    order_threads(device, monkeypatch)
    monkeypatch.setattr(devices, "open_gpu", lambda _: PinnedPool(device))
    run = CopyEngine.run

    def hasty(copies: CopyEngine, fn: Any, link: str, **settings: Any) -> Any:
        if missing == "the wait for what comes down":
            settings["after"] = None
        ticket = run(copies, fn, link, **settings)
        return _Hasty(ticket) if missing == "the wait for the thread" else ticket

    monkeypatch.setattr(CopyEngine, "run", hasty)
    policy = {**PLACES["parked"], "gpu_batch_size": 2, "num_gpu_batches": 3}
    with (
        Engine(checkpoint("opt")[1], dtype="float32", policy=policy, emulate_gpu="1GiB") as llm,
        suppress(Exception),
        watched(device),
    ):
        llm.generate(prompts_of([20] * 6), max_new_tokens=steps, ignore_eos=True)
    assert bool(device.races.found) == (missing != "nothing"), device.races.found[:3]


def test_prompts_are_filled_in_elsewhere_and_no_cache_is_used_before(checkpoint, monkeypatch) -> None:
    """Long prompts in parts, shared beginnings, and rows that come and go: each fill delayed until the GPU goes on."""
    filled: list[str] = []
    fill = host_attention._fill

    def late(*what: Any) -> None:
        time.sleep(0.002)  # nothing depends on it, but a cache that is used too early would be found empty
        filled.append(threading.current_thread().name)
        fill(*what)

    monkeypatch.setattr(host_attention, "_fill", late)
    config, folder = EvictionConfig("h2o", ratio=0.3), checkpoint("llama-gqa")[1]
    expected = run(folder, {"prefill_chunk": 16}, config).tokens
    found = run(folder, {**PLACES["streamed"], "prefill_chunk": 16}, config, emulate_gpu="1GiB")
    assert found.tokens == expected
    assert set(filled) == {f"h2o-{HOST_ATTENTION}-0"}
    assert len(filled) == len(LENGTHS) * found.model.spec.num_layers


def test_prompts_that_are_larger_than_their_buffers_are_waited_for(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(block, "prompt_bytes", lambda *sizes, sums: 4096)
    filled: list[str] = []
    fill = host_attention._fill

    def noted(*what: Any) -> None:
        filled.append(threading.current_thread().name)
        fill(*what)

    monkeypatch.setattr(host_attention, "_fill", noted)
    config, folder = EvictionConfig("h2o", ratio=0.3), checkpoint("opt")[1]
    found = run(folder, {**PLACES["streamed"], "prefill_chunk": 16}, config, emulate_gpu="1GiB")
    assert found.tokens == run(folder, {}, config).tokens
    assert len(set(filled)) == 2, "small ones still go their way"


@pytest.mark.parametrize("batches", [1, 3])
def test_what_it_takes_was_planned(batches: int, checkpoint, monkeypatch) -> None:
    taken = Counter[tuple[str, str]]()
    charge = Ledger.charge

    def noted(ledger: Ledger, nbytes: int, what: str) -> None:
        taken[ledger.name, what] += nbytes
        charge(ledger, nbytes, what)

    monkeypatch.setattr(Ledger, "charge", noted)
    policy = {**PLACES["streamed"], "gpu_batch_size": 2, "num_gpu_batches": batches, "prefill_chunk": 32}
    eviction = EvictionConfig("h2o", ratio=0.3)
    with Engine(checkpoint("opt")[1], dtype="float32", policy=policy, eviction=eviction, emulate_gpu="1GiB") as llm:
        llm.generate(prompts_of([20] * 2 * batches), max_new_tokens=4, ignore_eos=True)
        planned = {(item.tier, item.what): item.nbytes for item in llm.last_plan.footprint.items}
    ours = {"queries for the cpu", "prompts for the cpu", "output projection"}
    found = {place: nbytes for place, nbytes in taken.items() if place[1] in ours}
    assert found == {place: nbytes for place, nbytes in planned.items() if place[1] in ours}
    assert len(found) == (5 if batches > 1 else 2)


def test_a_cache_belongs_to_who_fills_it_until_it_is_settled(checkpoint, monkeypatch) -> None:
    cache = BatchCache(CacheShape(1, 1, 4, 8), torch.float32, shrinks=False)
    cache.attach(torch.zeros(cache.nbytes, dtype=torch.uint8))
    fresh = KVCache(cache.shape, [Budget(8, 0, 8, 0, full=True)], make_policy(EvictionConfig()), layer=0, row_ids=[0])
    cache.change([], fresh)
    cache.filling, waited = Ticket("prompts", HOST_ATTENTION, 0), list[bool]()
    monkeypatch.setattr(cache.filling, "wait", lambda: waited.append(cache.rows is None))
    cache.join()
    assert cache.rows is None
    assert cache.settled().rows is fresh
    assert waited == [True]

    def failing(*what: Any) -> None:
        raise ValueError("no more prompts")

    monkeypatch.setattr(host_attention, "_fill", failing)
    with (
        Engine(checkpoint("opt")[1], dtype="float32", policy=HOST, emulate_gpu="1GiB") as llm,
        pytest.raises(ValueError, match="no more prompts"),
    ):
        llm.generate(prompts_of([20] * 6), max_new_tokens=4, ignore_eos=True)
