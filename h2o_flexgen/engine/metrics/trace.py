"""Optional recordings of a run: a timeline of tasks and tiers, and the scores of prompts' tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.config.model.spec import ModelSpec, UnitSpec
from h2o_flexgen.engine.limits import devices as machine
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.memory.cuda import Device, Mark, Stream
from h2o_flexgen.memory.tiers import Ledger
from h2o_flexgen.schedule.tasks import Task
from h2o_flexgen.schedule.timeline import Level, Row, Timeline, on_stage

_EVERY = 0.005
"""Seconds between two looks at the process's memory."""


class Trace:
    """Collects rows from any thread; with `enabled` False only the busy seconds of computes.

    On a GPU a task is timed by marks in its queue, which are waited for only when the trace is read.
    """

    def __init__(self, enabled: bool = False, devices: SequenceOf[Device] = ()) -> None:
        """devices: of the stages, in order; none if the CPU computes."""
        self.enabled = enabled
        self._devices = devices
        self._seconds: dict[str, float] = {}
        self._rows: list[Row] = []
        self._queued: list[deque[tuple[Callable[[float, float], None], Mark, Mark]]] = [deque() for _ in devices]
        self._tiers: Mapping[str, Ledger] = {}
        self._caps: dict[str, int] = {}
        self._levels: list[Level] = []
        self._held: dict[str, int] = {}
        self._looked = 0.0
        self._lock = threading.Lock()
        self._zero = time.perf_counter()

    @property
    def compute_seconds(self) -> dict[str, float]:
        """Seconds by phase and kind of unit ("decode.mlp", ...). Waits for the GPU."""
        self._collect(wait=True)
        return self._seconds

    @contextmanager
    def record(self, task: Task, unit: UnitSpec, prompts: float, what: str = "", stage: int = 0) -> Iterator[None]:
        """A context that times one compute task by the clock of its device, unless that records a graph. prompts: the
        share of prompts in its tokens. what: the part of the task, if it is computed in several."""
        book = partial(self._book, task, unit, prompts, what, stage)
        if not self._devices:
            begun = time.perf_counter()
            yield
            book(begun, time.perf_counter())
        elif (device := self._devices[stage]).capturing():
            yield
        else:
            first = device.record(Stream.COMPUTE)
            yield
            self._queued[stage].append((book, first, device.record(Stream.COMPUTE)))
            self._collect(wait=False)

    def add(self, task: str, start: float, end: float, resource: str) -> None:
        """Adds a row; `start` and `end` are `time.perf_counter` readings. Called by copy threads, too."""
        if self.enabled:
            with self._lock:
                self._rows.append(Row(task, start - self._zero, end - self._zero, resource))
                self._sample()

    def watch(self, tiers: Mapping[str, Ledger], process_cap: int | None) -> None:
        """From now on records the memory of `tiers`, by name, and of the process with each row."""
        with self._lock:
            self._tiers = tiers
            caps = {**{name: tier.capacity for name, tier in tiers.items()}, "process": process_cap}
            self._caps = {name: cap for name, cap in caps.items() if cap is not None}
            if self.enabled:
                self._sample()

    def timeline(self) -> Timeline:
        """The rows so far. Waits for the GPU."""
        self._collect(wait=True)
        rows = tuple(sorted(self._rows, key=lambda row: row.start))
        return Timeline(rows, tuple(self._levels), dict(self._caps))

    def _sample(self) -> None:
        """Records changed memory; of the process at most every `_EVERY` seconds."""
        now = time.perf_counter() - self._zero
        held = {name: tier.used for name, tier in self._tiers.items()}
        if held and now - self._looked >= _EVERY:
            self._looked, held["process"] = now, machine.rss()
        for name, nbytes in held.items():
            if self._held.get(name) != nbytes:
                self._held[name] = nbytes
                self._levels.append(Level(now, name, nbytes))

    def _collect(self, wait: bool) -> None:
        """Books finished tasks, or waits and books all."""
        for device, queued in zip(self._devices, self._queued, strict=True):
            if wait and queued:
                device.synchronize(queued[-1][2])
            while queued and device.passed(queued[0][2]):
                book, first, last = queued.popleft()
                start = device.clock(first)
                book(start, start + device.seconds(first, last))
                device.release(first)
                device.release(last)

    def _book(
        self, task: Task, unit: UnitSpec, prompts: float, what: str, stage: int, start: float, end: float
    ) -> None:
        for phase, share in (("prefill", prompts), ("decode", 1 - prompts)):
            if share:
                key = f"{phase}.{unit.kind}"
                self._seconds[key] = self._seconds.get(key, 0.0) + share * (end - start)
        if self.enabled:
            batch = "" if task.experts else f" batch {task.batch}"
            self.add(f"{unit.name}{what} step {task.step}{batch}", start, end, on_stage("compute", stage))


MOST_SCORES = 1_000_000
"""Scores (one per token, layer and KV head) that are recorded at most; later prompts are left out."""
_AROUND = 6
"""Tokens before one that its text is decoded with, as that may depend on them."""


class ScoreLog:
    """The exact scores of a call's prompts, by which its eviction policy ranked them, and the tokens that its caches
    ended with. A prompt that its budget holds whole has no scores, and is not recorded."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.begin()

    def begin(self) -> None:
        self._scores: dict[int, dict[int, list[list[float]]]] = {}
        self._ended: dict[int, tuple[Sequence, dict[int, list[list[int]]]]] = {}
        self._returns: dict[int, dict[int, list[list[tuple[int, int]]]]] = {}
        self._numbers, self._left_out = 0, set[int]()

    def filled(self, row_id: int, layer: int, scores: Tensor) -> None:
        """A `PromptWatch`."""
        if layer == 0:
            whole = scores.numel() * self._spec.num_layers
            if self._numbers + whole > MOST_SCORES:
                self._left_out.add(row_id)
                return
            self._numbers += whole
        if row_id not in self._left_out:
            self._scores.setdefault(row_id, {})[layer] = _finite(scores).tolist()

    def ended(self, row: Sequence, held: Iterable[tuple[int, KVCache, int]]) -> None:
        """Takes a finished sequence: the positions that it holds by layer, cache and place, and those that recall has
        brought back, and how often."""
        if row.row_id in self._scores:
            kept, returns = dict[int, list[list[int]]](), dict[int, list[list[tuple[int, int]]]]()
            for layer, cache, place in held:
                kept[layer] = [cache.kept(place, head) for head in range(cache.shape.kv_heads)]
                if cache.recall is not None and (back := cache.recall.returns(place)) is not None:
                    returns[layer] = back
            self._ended[row.row_id], self._returns[row.row_id] = (row, kept), returns

    def to_json(self, eviction: Mapping[str, Any], decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
        """Everything recorded as plain JSON, by layer and KV head. eviction: of the run's record. decode: from token
        ids to text, None if ids mean nothing. Of packed caches there are `bits`, of keys and of values, and `newest`,
        how many tokens at the end are seen as they came; with recall `returns`, [position, times] each."""
        windows = [self._spec.arch.window_of(layer) for layer in range(self._spec.num_layers)]
        packings = self._spec.cache_packings
        bits = [] if packings is None else [each.bits for each in packings]
        packed = {"bits": bits, "newest": self._spec.cache_newest} if bits else {}
        return {
            "heavy_hitters": 1,
            "model": self._spec.name,
            **packed,
            "eviction": dict(eviction),
            "windows": windows,
            "left_out": len(self._left_out),
            "sequences": [self._entry(row, kept, decode) for row, kept in self._ended.values()],
        }

    def _entry(
        self, row: Sequence, kept: Mapping[int, list[list[int]]], decode: Callable[[list[int]], str] | None
    ) -> dict[str, Any]:
        ids, scores, budget = [*row.given_ids, *row.token_ids], self._scores[row.row_id], row.budget
        # Layers whose window holds the whole budget have no scores.
        heads = [self._spec.heads_of(layer).keys for layer in range(self._spec.num_layers)]
        empty = [[[0.0] * len(row.prompt_ids)] * count for count in heads]
        returns = self._returns[row.row_id]
        back = {"returns": [returns.get(layer, []) for layer in range(self._spec.num_layers)]} if returns else {}
        return {
            "tokens": [str(each) for each in ids] if decode is None else texts_of(ids, decode),
            "prompt": len(row.prompt_ids),
            "budget": {"heavy": budget.heavy, "recent": budget.recent, "sinks": budget.sinks, "total": budget.total},
            "scores": [scores.get(layer, empty[layer]) for layer in range(self._spec.num_layers)],
            "kept": [kept.get(layer, []) for layer in range(self._spec.num_layers)],
            **back,
        }


def _finite(scores: Tensor) -> Tensor:
    """`scores` as JSON has numbers. Tokens that spans keep are beyond all others: +inf is twice the highest of these,
    and 1 where the others have nothing. Of a sequence whose numbers stop being finite, nan is 0."""
    if not scores.numel():  # of a policy without scores
        return scores
    others = scores.double().nan_to_num(0.0, posinf=0.0)
    most = others.amax(-1, keepdim=True)
    return others.where(scores != torch.inf, (2 * most).where(most > 0, 1.0))


def texts_of(ids: list[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text that each token adds to those before it."""
    found = []
    for at in range(len(ids)):
        before = ids[max(0, at - _AROUND) : at]
        head, whole = decode(before) if before else "", decode([*before, ids[at]])
        found.append(whole[len(head) :] if whole.startswith(head) else decode([ids[at]]))
    return found
