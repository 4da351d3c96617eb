"""What each load and store moves, over which links: the same bytes as the engine's counters."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import NamedTuple

from h2o_flexgen.config.model.tensors import PAGE, round_up
from h2o_flexgen.cost.case import Case
from h2o_flexgen.cost.segments import prompt_segments
from h2o_flexgen.schedule.footprint import REWRITE_EVERY
from h2o_flexgen.schedule.host_attention import answer_bytes, query_bytes
from h2o_flexgen.schedule.tasks import Task, TaskKind
from h2o_flexgen.schedule.traffic import links


class Transfer(NamedTuple):
    """Bytes over one link, and the seconds that takes while nothing else runs."""

    link: str
    nbytes: int
    seconds: float


class Traffic(NamedTuple):
    """What many transfers over one link add up to; `seconds` one after the other, while nothing else runs."""

    nbytes: int
    seconds: float


class Moves:
    """The transfers of one case."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._keys = [unit.weights for unit in case.spec.units]

    @cached_property
    def group_bytes(self) -> dict[str, int]:
        """Of each weight group as it is moved: its packed buffer. Read in place from a checkpoint it is no more than
        its padding less."""
        return {group.key: group.buffer_bytes(self._case.dtype) for group in self._case.spec.weight_groups}

    def state_bytes(self, task: Task) -> int:
        """Of a cache or hidden task. A store of a cache between two rewrites moves nothing: its tokens wait."""
        case, unit = self._case, self._case.spec.units[task.unit]
        if case.stays(task):
            return 0
        if task.kind in (TaskKind.LOAD_CACHE, TaskKind.STORE_CACHE):
            if task.kind is TaskKind.STORE_CACHE and task.step % REWRITE_EVERY:
                return 0
            return self.cache_bytes(unit.layer or 0, task.batch)
        store, last = task.kind is TaskKind.STORE_HIDDEN, unit.layer == case.spec.num_layers - 1
        # After the last layer's attention only each prompt's last token goes on.
        ends_only = unit.kind == "head" or (last and (unit.kind == "mlp" or (unit.kind == "attn" and store)))
        rows = case.rows[task.batch]
        tokens = rows if task.step > 0 or ends_only else rows * case.workload.prompt_len
        return round_up(case.spec.hidden_bytes(tokens, case.dtype), PAGE)

    def cache_bytes(self, layer: int, batch: int) -> int:
        """K and V of one (layer, GPU batch), all slots."""
        case = self._case
        per_slot = case.rows[batch] * case.spec.kv_bytes_per_token_and_layer(case.dtype)
        return round_up(per_slot * case.slots[layer], PAGE)

    def transfers(self, task: Task) -> tuple[Transfer, ...]:
        """Of one load or store, in the order in which they follow each other; of a compute whose attention is the
        host's work what goes there and comes back, or each of the prompts that do. Nothing for other tasks."""
        if task.kind is TaskKind.COMPUTE:
            rate = self._case.profile.link
            return tuple(Transfer(link, size, rate(link).seconds(size)) for link, _, size in self.exchanged(task))
        if task.kind is TaskKind.FREE_WEIGHTS:
            return ()
        home, nbytes = self._home(task), self._bytes(task)
        inward = task.kind not in (TaskKind.STORE_CACHE, TaskKind.STORE_HIDDEN)
        path = links(home, self._case.compute_tier, inward=inward) if nbytes else ()
        rate = self._case.profile.link
        return tuple(Transfer(link, nbytes, rate(link).seconds(nbytes)) for link in path)

    def exchanged(self, task: Task) -> list[tuple[str, str, int]]:
        """What a compute task and a host that attends or fills send each other: links, names and bytes, in order."""
        case, rows, tier = self._case, self._case.rows[task.batch], self._case.compute_tier
        if case.attends_beside(task):
            down, up = query_bytes(case.spec, rows, case.dtype), answer_bytes(case.spec, rows, case.dtype)
            return [(f"{tier}->cpu", "queries", down), (f"cpu->{tier}", "answers", up)]
        if not case.fills_beside(task):
            return []
        layer, length = case.spec.units[task.unit].layer or 0, case.workload.prompt_len
        summed = 4 * case.spec.num_kv_heads if case.sums_columns(layer) else 0
        token = case.spec.kv_bytes_per_token_and_layer(case.dtype) + summed
        segments = prompt_segments(rows, length, case.policy.chunk).elements()
        whole = [segment.rows for segment in segments if segment.past + segment.length == length]
        return [(f"{tier}->cpu", "prompts", count * length * token) for count in whole]

    def traffic(self, steps: range) -> dict[tuple[str, str], Traffic]:
        """What all loads and stores that belong to `steps` add up to, by link and by what is moved."""
        case, found = self._case, dict[tuple[str, str], Traffic]()
        keys = self._keys
        for key in sorted(case.shape.streamed):
            # Tied embeddings stay from the head to the next embedding: only the first pass reads them twice.
            times = len(steps) + (keys[0] == keys[-1] == key and 0 in steps)
            self._add(found, "weights", case.placement.weights[key], self.group_bytes[key], inward=times)
        loads = len(steps) - (0 in steps)
        stores = sum(step % REWRITE_EVERY == 0 and step < case.steps - 1 for step in steps)
        passes = ((0, len(steps) - loads), (1, loads))
        for (unit, batch), alike in case.alike.items():
            place = case.spec.units[unit].layer or 0, batch
            if case.spec.units[unit].kind == "attn" and place in case.shape.cache_moves:
                home, nbytes = case.placement.cache[place], self.cache_bytes(*place)
                self._add(found, "cache", home, nbytes, inward=alike * loads, outward=alike * stores)
        for (unit, batch), alike in case.alike.items():
            for step, times in passes if unit > 0 and batch in case.shape.hidden_moves else ():
                # What a unit loads, the one before it has stored.
                home, nbytes = (
                    case.placement.hidden[batch],
                    self.state_bytes(Task(TaskKind.LOAD_HIDDEN, step, unit, batch)),
                )
                self._add(found, "hidden", home, nbytes, inward=alike * times, outward=alike * times)
        for (unit, batch), alike in case.alike.items() if case.attends_on_host else ():
            for step, times in passes:
                for link, what, nbytes in self.exchanged(Task(TaskKind.COMPUTE, step, unit, batch)) if times else ():
                    self._count(found, link, what, nbytes, alike * times)
        return found

    def bytes_moved(self) -> Counter[str]:
        """Bytes over each link in all steps: what walking the whole schedule adds up to."""
        moved = Counter[str]()
        for (link, _), traffic in self.traffic(range(self._case.steps)).items():
            moved[link] += traffic.nbytes
        return moved

    def _add(
        self, found: dict[tuple[str, str], Traffic], what: str, home: str, nbytes: int, *, inward: int, outward: int = 0
    ) -> None:
        for times, direction in ((inward, True), (outward, False)):
            for link in links(home, self._case.compute_tier, inward=direction) if times else ():
                self._count(found, link, what, nbytes, times)

    def _count(self, found: dict[tuple[str, str], Traffic], link: str, what: str, nbytes: int, times: int) -> None:
        before = found.get((link, what), Traffic(0, 0.0))
        seconds = self._case.profile.link(link).seconds(nbytes)
        found[link, what] = Traffic(before.nbytes + times * nbytes, before.seconds + times * seconds)

    def _bytes(self, task: Task) -> int:
        return self.group_bytes[self._keys[task.unit]] if task.kind is TaskKind.LOAD_WEIGHTS else self.state_bytes(task)

    def _home(self, task: Task) -> str:
        placement = self._case.placement
        if task.kind is TaskKind.LOAD_WEIGHTS:
            return placement.weights[self._keys[task.unit]]
        if task.kind in (TaskKind.LOAD_HIDDEN, TaskKind.STORE_HIDDEN):
            return placement.hidden[task.batch]
        return placement.cache[self._case.spec.units[task.unit].layer or 0, task.batch]
