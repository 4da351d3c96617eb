"""The choice among configurations: what it may cost, what it holds for, and that trying them out leaves no trace."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from triton.runtime import _async_compile
from triton.runtime.errors import OutOfResources

from h2o_flexgen.kernels import triton_decode, triton_tune
from h2o_flexgen.kernels.triton_decode import TritonAttend, candidates
from h2o_flexgen.kernels.triton_tune import COMPILE_S, Config, compiling, fastest
from h2o_flexgen.kernels.types import Logits
from tests.kernels.triton_pair import Pair, holds, keeps

CONFIGS = [Config(64, 4, 2), Config(128, 4, 2), Config(32, 8, 3)]


def nothing(config: Config) -> None:
    """What there is to compile of a kernel that is not one."""


def submit(mode: Any, key: object, compiled: Callable[[], object], done: Callable[[object], None]) -> None:
    """As `warmup` of a kernel does; from Triton 3.9 on with what a failed compilation is followed by."""
    nothing_more = [lambda *_: None] * (len(inspect.signature(mode.submit).parameters) - 3)
    mode.submit(key, compiled, done, *nothing_more)


class Time:
    """A clock that stands still but for `pass_by`, and compilations that take so long of it."""

    def __init__(self) -> None:
        self.now, self._lock = 100.0, threading.Lock()

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds

    def compile(self, key: object, seconds: float, done: Callable[[object], None] = lambda kernel: None) -> None:
        """As `warmup` of a kernel does."""
        mode = _async_compile.active_mode.get()
        assert mode is not None
        submit(mode, key, lambda: self.pass_by(seconds) or key, done)


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    triton_tune.forget()
    yield
    triton_tune.forget()


def test_the_fastest_is_taken_and_remembered() -> None:
    asked: list[Config] = []
    times = dict(zip(CONFIGS, (3.0, 1.0, 2.0), strict=True))

    def clock(call) -> float:
        call()
        return times[asked[-1]]

    assert fastest("kind", CONFIGS, nothing, asked.append, clock) == CONFIGS[1]
    assert fastest("kind", CONFIGS, nothing, asked.append, clock) == CONFIGS[1]
    assert asked == CONFIGS
    assert fastest("another", CONFIGS[:1], nothing, asked.append, clock) == CONFIGS[0]


def test_what_does_not_fit_is_left_out() -> None:
    def run(config: Config) -> None:
        if config.block > 32:
            raise OutOfResources(2, 1, "shared memory")

    def clock(call) -> float:
        call()
        return 1.0

    assert fastest("kind", CONFIGS, nothing, run, clock) == CONFIGS[2]
    for _ in range(2):
        with pytest.raises(OutOfResources):
            fastest("another", CONFIGS[:2], nothing, run, clock)


def test_without_memory_to_measure_with_it_is_the_first() -> None:
    def clock(call) -> float:
        raise torch.OutOfMemoryError("256 MiB")

    assert fastest("kind", CONFIGS, nothing, nothing, clock) == CONFIGS[0]


def test_what_is_compiled_together_is_there_at_the_end() -> None:
    time, there = Time(), set[object]()
    with compiling(10.0, time) as jobs:
        for key in "abc":
            time.compile(key, 1.0, there.add)
    assert there == {"a", "b", "c"}
    assert not jobs.late


def test_nothing_is_begun_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, so that the third compilation finds the time gone; it is left to whoever launches that kernel."""
    monkeypatch.setattr(triton_tune, "_MOST_THREADS", 1)
    time, there = Time(), list[object]()
    with compiling(10.0, time) as jobs:
        for key in "abcd":
            time.compile(key, 6.0, there.append)
    assert there == ["a", "b"]
    assert jobs.late
    assert time.now == 112.0


def test_a_compilation_that_fails_is_left_to_the_launch() -> None:
    def refuse() -> None:
        raise RuntimeError("ptxas")

    with compiling(10.0) as jobs:
        submit(_async_compile.active_mode.get(), "key", refuse, lambda kernel: None)
    assert not jobs.late


def test_a_process_compiles_what_it_chooses_from_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty kinds of three configurations, seven seconds each: those that were begun in time, and not one more."""
    time, measured = Time(), set[int]()
    monkeypatch.setattr(triton_tune, "time", SimpleNamespace(monotonic=time))
    monkeypatch.setattr(triton_tune, "compiling", partial(compiling, clock=time))
    monkeypatch.setattr(triton_tune, "_MOST_THREADS", 2)
    for kind in range(40):

        def clock(call, kind: int = kind) -> float:
            measured.add(kind)
            return 1.0

        found = fastest(kind, CONFIGS, lambda config, kind=kind: time.compile((kind, config), 7.0), nothing, clock)
        assert found == CONFIGS[0]
    assert measured == {0}, "the second kind has too little time for all of its configurations"
    assert time.now - 100.0 < COMPILE_S + 2 * 7.0
    triton_tune.forget()
    assert fastest(0, CONFIGS, partial(time.compile, seconds=0.0), nothing, lambda call: 1.0) == CONFIGS[0]


def attends(rows: int, kv_heads: int, slots: int, *, held: int | None = None, splits: int = 1, **how) -> TritonAttend:
    """One step from full, or with `held` tokens, in order of arrival; K and V are random."""
    rule = (slots - 1 if held is None else held, slots, 200, slots - 1, 0, 0, 0, 1 << 62)
    kernel = TritonAttend([rule] * rows, (rows, kv_heads, slots, 16), DEVICE, splits=splits, **how)
    kernel.attach(*torch.randn(2, rows, kv_heads, slots, 16, device=DEVICE).unbind(0))
    return kernel


def kind_of(kernel: TritonAttend, heads: int = 1) -> tuple[object, ...]:
    rows, kv_heads, _, dim = kernel.size
    qkv = [torch.randn(rows, n * kv_heads, dim, device=DEVICE) for n in (heads, 1, 1)]
    return kernel._launch(0, tuple(qkv), Logits(1.0)).kind


def test_a_choice_holds_for_work_of_its_size() -> None:
    """Tasks and slots to the next power of two, whatever rows and heads make the tasks; and what is compiled."""
    of = kind_of(attends(3, 4, 100))
    for rows, kv_heads, slots in ((4, 4, 128), (9, 1, 65), (2, 8, 100)):
        assert kind_of(attends(rows, kv_heads, slots)) == of
    others = [
        attends(3, 4, 129),
        attends(3, 4, 64),
        attends(17, 1, 100),
        attends(2, 4, 100),
        attends(3, 4, 100, splits=2),
    ]
    kinds = [kind_of(each) for each in others] + [kind_of(attends(3, 4, 100), heads=2), of]
    assert len(set(kinds)) == len(kinds)


def test_a_full_cache_is_not_tuned_on_its_first_tokens() -> None:
    """Rehearsals have every slot occupied, as after all steps, and write where no token is yet."""
    kernel = attends(2, 1, 40, held=5)
    launch = kernel._launch(
        torch.full((2, 1), 3, device=DEVICE), torch.randn(3, 2, 1, 16, device=DEVICE).unbind(0), Logits(1.0)
    )
    rules = launch._rehearsal().rules
    assert (rules[:, 0] + 3 == 39).all()
    assert torch.equal(rules[:, 1:], kernel._slots.rules[:, 1:])
    few = torch.empty(2, 1, 9, device=DEVICE)
    launch = kernel._launch(3, torch.randn(3, 2, 1, 16, device=DEVICE).unbind(0), Logits(1.0), probs=few)
    assert (launch._rehearsal().rules[:, 0] + 3 == 8).all(), "no more than there is room for their probabilities"


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every configuration that is tried out, twice each; the last one is the fastest."""
    found: list[object] = []

    def twice(call) -> float:
        call()
        call()
        found.append(call)
        return -float(len(found))

    monkeypatch.setattr(triton_tune, "_milliseconds", twice)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("counts", [False, True])
def test_trying_out_changes_nothing(splits: int, counts: bool, tried: list[object]) -> None:
    rows = [(30, keeps(20, 6)), (9, keeps(20, 6)), (4, holds(12))]
    pair = Pair(rows, kv_heads=1, group=2, splits=splits, counts=counts)
    pair.kernel._tune = True
    for _ in range(3):
        pair.step()
    pair.check_contents()
    assert len(tried) == len(candidates(16, torch.float32)), f"the candidates, once, on {DEVICE}"


@pytest.mark.parametrize("counts", [False, True])
def test_nor_does_it_where_slots_are_taken_in_order(counts: bool, tried: list[object]) -> None:
    """A ring that is full beside a cache that grows; what the tuned kernel leaves is what an untuned one does."""
    rules = [(6, 7, 200, 2, 0, 0, 0, 1 << 62), (3, 20, 3, 19, 0, 0, 0, 1 << 62)]
    kernels = [TritonAttend(rules, (2, 1, 20, 16), DEVICE, splits=1) for _ in range(2)]
    kv = [torch.randn(2, 2, 1, 20, 16, device=DEVICE)] * 2
    for kernel, held in zip(kernels, (each.clone() for each in kv), strict=True):
        kernel.attach(*held.unbind(0))
    kernels[0]._tune = True
    numbers: list[torch.Tensor | int] = [torch.zeros(2, 1, dtype=torch.int64, device=DEVICE) for _ in kernels]
    for step in range(4):
        qkv = torch.randn(3, 2, 1, 16, device=DEVICE).unbind(0)
        outs = [
            kernel.step(number if counts else step, qkv, Logits(0.5))
            for kernel, number in zip(kernels, numbers, strict=True)
        ]
        torch.testing.assert_close(*outs, atol=1e-6, rtol=1e-5)
        assert torch.equal(kernels[0].used, kernels[1].used)
        occupied = [slice(0, 7), slice(0, 3 + step + 1)]
        for ours, theirs in zip(*(kernel._held[:2] for kernel in kernels), strict=True):
            for row, slots in enumerate(occupied):
                assert torch.equal(ours[row, :, slots], theirs[row, :, slots])
    assert len(tried) == len(candidates(16, torch.float32))


@pytest.mark.parametrize("processors", [108, 132, 144])
def test_a_processor_gets_about_three_programs(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for tasks in range(1, 3000):
        splits = triton_decode._programs_wanted(tasks, 1 << 20, torch.device("cuda"))
        each = splits * tasks / processors
        assert 2 <= each <= 4 or (splits == 1 and each > 2)


@pytest.mark.parametrize(
    ("tasks", "slots", "splits"),
    [
        (768, 820, 1),
        (140, 820, 3),
        (192, 820, 2),
        (256, 2048, 2),
        (128, 4096, 3),
        (140, 300, 1),
        (8, 8192, 32),
        (1, 200, 1),
    ],
)
def test_splits_of_an_h100(tasks: int, slots: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as its 132 processors want, and no fewer slots for each than are worth it."""
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert triton_decode._programs_wanted(tasks, slots, torch.device("cuda")) == splits
