"""The inputs of prices: a block under a plan on a machine, sizes they share, and what loads and stores move."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.config.model.tensors import PAGE, round_up, states_bytes
from h2o_flexgen.config.placement import Placement
from h2o_flexgen.config.recall import Reading, share_of_looks
from h2o_flexgen.schedule.footprint import REWRITE_EVERY, shelved_layers
from h2o_flexgen.schedule.request import BlockShape
from h2o_flexgen.schedule.tasks import NO_BATCH, ScheduleShape, Task, TaskKind, alone, recordable
from h2o_flexgen.schedule.weight_room import expert_slots, reads_all
from h2o_flexgen.schedule.work import links
from h2o_flexgen.schedule.workspace import answer_bytes, query_bytes

_FROM_DISK = "disk->cpu"


@dataclass(frozen=True)
class CostInputs(BlockShape):
    """A block under one placement, on the request's machine.

    batches: the sequences of each GPU batch; left out, those of the call's first block. later: another block of the
    call came before it, whose memory its caches get; of endless work that is always so.
    """

    placement: Placement
    batches: tuple[int, ...] = ()
    later: bool = False

    def __post_init__(self) -> None:
        if not self.batches:
            object.__setattr__(self, "batches", self.blocks[0])

    @cached_property
    def machine(self) -> HardwareProfile:
        return self.request.machine

    @property
    def call_sequences(self) -> int:
        """Sequences of the whole call; of a block where the work is endless."""
        return self.policy.block_size if self.request.endless else self.request.workload.num_sequences

    @property
    def blocks(self) -> list[tuple[int, ...]]:
        """How the call is divided: for each block, the rows of its GPU batches."""

        def parts(whole: int, size: int) -> tuple[int, ...]:
            return (*[size] * (whole // size), *([whole % size] if whole % size else []))

        return [parts(block, self.rows) for block in parts(self.call_sequences, self.policy.block_size)]

    @property
    def sequences(self) -> int:
        return sum(self.batches)

    @cached_property
    def steps(self) -> int:
        """Steps of the schedule; the first computes the prompts and the first new token."""
        return self.request.workload.gen_len

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The first layer of each kind; layers whose caches have the same budget are of one kind."""
        return tuple({budget: layer for layer, budget in reversed(list(enumerate(self.request.budgets)))}.values())

    @cached_property
    def first_alike(self) -> dict[tuple[int, int], tuple[int, int]]:
        """For each unit and GPU batch the first whose tasks cost the same; with NO_BATCH the first whose weights do."""
        first: dict[object, tuple[int, int]] = {}
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for unit in self.spec.units:
            size = self.spec.groups_by_key[unit.weights].buffer_bytes(self.dtype)
            weights = (unit.products, self.placement.weights[unit.weights], size)
            found[unit.index, NO_BATCH] = first.setdefault(weights, (unit.index, NO_BATCH))
            alike: tuple[object, ...] = (unit.index,)
            if unit.layer is not None:
                last, window = unit.layer == self.spec.num_layers - 1, self.spec.arch.window_of(unit.layer)
                alike = (unit.products, last, self.request.budgets[unit.layer], window, self.spec.states_of(unit.layer))
            for batch, rows in enumerate(self.batches):
                cache = None if unit.layer is None else self.placement.cache[unit.layer, batch]
                place = (unit.index, batch)
                found[place] = first.setdefault((*alike, rows, cache, self.placement.hidden[batch]), place)
        return found

    @cached_property
    def alike(self) -> Counter[tuple[int, int]]:
        """How many computes of a step cost the same, by the first unit and GPU batch of each sort."""
        return Counter(like for (_, batch), like in self.first_alike.items() if batch != NO_BATCH)

    def mixture_tokens(self, step: int, unit: UnitSpec, sequences: int = 0) -> int:
        """Tokens of all GPU batches that the experts of `unit` are chosen by in `step`; of a block of `sequences` where
        these are given."""
        whole = step == 0 and not self.ends_only(unit)
        return (sequences or self.sequences) * (self.prompt if whole else 1)

    def ends_only(self, unit: UnitSpec) -> bool:
        """Whether only the last token of a prompt comes as far as this unit, the second half of a layer."""
        return unit.layer == self.spec.num_layers - 1 and not self.spec.arch.whole_ends

    def reads_ahead(self, step: int, unit: UnitSpec) -> bool:
        """Whether experts of `unit` are read before the tokens of `step` have chosen."""
        return reads_all(self.spec, self.mixture_tokens(step, unit))

    def chosen(self, step: int, unit: UnitSpec) -> list[int]:
        """As many experts as tokens choose if all are equally likely, at random."""
        calls = self.spec.product_calls("experts", self.mixture_tokens(step, unit))
        count = max(1, round(calls[-1].times))
        return sorted(random.Random(unit.index).sample(range(len(unit.experts)), count))

    def held(self, layer: int, step: int) -> int:
        """Slots of a row's cache in `layer` that are in use in a decode step, the new token's included."""
        budget = self.request.budgets[layer]
        slots = self.request.slots[self.spec.source_of(layer)]
        return min(min(self.prompt, budget.after_prompt) + step, slots)

    def kept_bytes(self, layer: int, batch: int) -> int:
        """Bytes of the states of a GPU batch's rows in `layer`."""
        return states_bytes(self.spec.states_of(layer), self.batches[batch], self.dtype)

    def attention_device(self, layer: int, batch: int) -> str:
        """Where the attention over a cache is computed in decode steps."""
        on_cpu = self.policy.cpu_cache_compute and self.placement.cache[layer, batch] == "cpu"
        return "cpu" if on_cpu else self.compute_tier

    def sums_columns(self, layer: int) -> bool:
        """Whether the caches of `layer` are told how much attention the prompt's tokens received."""
        return self.request.budgets[layer].scored and self.request.eviction.split.column_sums

    @cached_property
    def shape(self) -> ScheduleShape:
        """The shape of the schedule that the engine would run."""
        placed, batches = self.placement, range(len(self.batches))
        tokens = self.request.tokens_of(self.policy)
        parked = set(batches) - set(alone(len(batches)))
        return ScheduleShape(
            units=self.spec.units,
            num_steps=self.steps,
            num_batches=len(batches),
            streamed=frozenset(key for key, tier in placed.weights.items() if tier != self.compute_tier),
            cache_moves=frozenset(
                p for p in self._all_places() if placed.cache[p] not in (self.attention_device(*p), self.compute_tier)
            ),
            hidden_moves=frozenset(batch for batch in parked if placed.hidden[batch] != self.compute_tier),
            lookahead=self.policy.lookahead,
            host_attends=frozenset(p for p in self._all_places() if self._attends_beside(p)),
            expert_slots=expert_slots(self.spec, placed.weights, self.compute_tier, tokens),
        )

    def attends_beside(self, task: Task) -> bool:
        """Whether the attention of a compute task is the host's work, while other GPU batches are computed."""
        place = self.spec.units[task.unit].layer, task.batch
        return task.step > 0 and self.spec.units[task.unit].kind == "attn" and place in self.shape.host_attends

    def fills_beside(self, task: Task) -> bool:
        """Whether the prompts of a compute task are brought into its cache by the host, while others are computed."""
        unit = self.spec.units[task.unit]
        if task.step > 0 or unit.kind != "attn" or not self.policy.overlap:
            return False
        return self.attention_device(unit.layer or 0, task.batch) != self.compute_tier

    def stays(self, task: Task) -> bool:
        """Whether a hidden task moves nothing, because attention on the host is still to be added to what it is of."""
        unit = self.spec.units[task.unit]
        halves = {TaskKind.STORE_HIDDEN: "attn", TaskKind.LOAD_HIDDEN: "mlp"}
        if task.step == 0 or halves.get(task.kind) != unit.kind:
            return False
        return (unit.layer, task.batch) in self.shape.host_attends

    def _attends_beside(self, place: tuple[int, int]) -> bool:
        beside = self.policy.overlap and len(self.batches) > 1
        return beside and self.attention_device(*place) != self.compute_tier

    def _all_places(self) -> Iterator[tuple[int, int]]:
        return ((layer, batch) for layer in range(self.spec.num_layers) for batch in range(len(self.batches)))

    @cached_property
    def recorded(self) -> bool:
        """Whether decode steps are recorded and launched again as a whole, on a machine that is known to do that."""
        shape = self.shape
        return self.machine.rates(self.compute_tier).graph_tick_s is not None and recordable(
            moves=bool(shape.streamed or shape.cache_moves or shape.hidden_moves or self.spec.arch.experts),
            elsewhere=any(self.attention_device(*place) != self.compute_tier for place in self.placement.cache),
            rolling=self.request.eviction.rolling_positions,
        )


class PromptPart(NamedTuple):
    """Prompts, or parts of long ones, that go through attention together: `rows` times `length` tokens after `past`."""

    rows: int
    length: int
    past: int


def chunks(tokens: int, chunk: int) -> Counter[int]:
    """`tokens` in chunks, and a rest: how many there are of each size."""
    return +Counter({chunk: tokens // chunk, tokens % chunk: 1 if tokens % chunk else 0})


def prompt_parts(rows: int, prompt_len: int, chunk: int) -> Counter[PromptPart]:
    """How the engine cuts `rows` prompts that share nothing, and how many parts of each kind there are.

    Whole prompts, as many as a chunk holds; longer ones alone, in parts. Each part is a chunk of its own.
    """
    if prompt_len > chunk:
        starts = range(0, prompt_len, chunk)
        return Counter({PromptPart(1, min(chunk, prompt_len - start), start): rows for start in starts})
    fitting = chunk // prompt_len
    parts = Counter({PromptPart(fitting, prompt_len, 0): rows // fitting, PromptPart(rows % fitting, prompt_len, 0): 1})
    return Counter({part: count for part, count in parts.items() if part.rows and count})


class Transfer(NamedTuple):
    """Bytes over one link, and the seconds that takes while nothing else runs; of many transfers their sums."""

    link: str
    nbytes: int
    seconds: float


class Moves:
    def __init__(self, block: CostInputs) -> None:
        self._block, self._shelves = block, shelved_layers(block.request)

    def key(self, task: Task) -> str:
        unit = self._block.spec.units[task.unit]
        return unit.experts[task.experts[0]] if task.experts else unit.weights

    @cached_property
    def group_bytes(self) -> dict[str, int]:
        """Bytes that move for each weight group: its packed buffer. Read in place from a checkpoint it is no more than
        its padding less."""
        return {group.key: group.buffer_bytes(self._block.dtype) for group in self._block.spec.weight_groups}

    def state_bytes(self, task: Task) -> int:
        """Bytes of a cache or hidden task. A cache's store between two rewrites moves states alone: its tokens wait."""
        block, unit = self._block, self._block.spec.units[task.unit]
        if block.stays(task):
            return 0
        if task.kind in (TaskKind.LOAD_CACHE, TaskKind.STORE_CACHE):
            layer = unit.layer or 0
            states = block.kept_bytes(layer, task.batch)
            if task.kind is TaskKind.STORE_CACHE and task.step % REWRITE_EVERY:
                return states
            return states + self.cache_bytes(layer, task.batch)
        store, last = task.kind is TaskKind.STORE_HIDDEN, unit.layer == block.spec.num_layers - 1
        # After the last layer's attention only each prompt's last token goes on.
        ends_only = unit.kind == "head" or (last and (unit.kind == "mlp" or (unit.kind == "attn" and store)))
        rows = block.batches[task.batch]
        tokens = rows if task.step > 0 or ends_only else rows * block.prompt
        return round_up(block.spec.hidden_bytes(tokens, block.dtype), PAGE)

    def cache_bytes(self, layer: int, batch: int) -> int:
        """K and V of one (layer, GPU batch), all slots."""
        block = self._block
        per_slot = block.batches[batch] * block.spec.kv_bytes_per_token_and_layer(block.dtype, layer)
        return round_up(per_slot * block.request.slots[layer], PAGE)

    def transfers(self, task: Task) -> tuple[Transfer, ...]:
        """The transfers of a load or store, in their order. Of a compute whose attention is the host's work: transfers
        to the host and back, or one for each prompt. Empty for other tasks."""
        if task.kind is TaskKind.COMPUTE:
            rate = self._block.machine.link
            return tuple(Transfer(link, size, rate(link).seconds(size)) for link, _, size in self.exchanged(task))
        if task.kind is TaskKind.FREE_WEIGHTS:
            return ()
        weights = task.kind is TaskKind.LOAD_WEIGHTS
        nbytes = self.group_bytes[self.key(task)] if weights else self.state_bytes(task)
        inward = task.kind not in (TaskKind.STORE_CACHE, TaskKind.STORE_HIDDEN)
        path = links(self._tier_of(task), self._block.compute_tier, inward=inward) if nbytes else ()
        rate, more = self._block.machine.link, self._checking(self.key(task)) if weights and task.step == 0 else 0.0
        return tuple(Transfer(link, nbytes, rate(link).seconds(nbytes) + more * (link == _FROM_DISK)) for link in path)

    def _checking(self, key: str) -> float:
        """Seconds of the checksum with which a packed file is first read: at best as fast as memory is."""
        block, rates = self._block, self._block.machine.compute.get("cpu")
        ours = block.placement.weights[key] == "disk" and block.spec.groups_by_key[key].fewer_bits
        if not ours or rates is None or block.later or block.request.endless:
            return 0.0
        return self.group_bytes[key] / rates.memory_bytes_per_s

    def exchanged(self, task: Task) -> list[tuple[str, str, int]]:
        """The transfers between a compute task and a host that attends or fills: links, names and bytes, in order."""
        block, rows, tier = self._block, self._block.batches[task.batch], self._block.compute_tier
        dtype = block.dtype
        if block.attends_beside(task):
            down, up = query_bytes(block.spec, rows, dtype), answer_bytes(block.spec, rows, dtype)
            return [(f"{tier}->cpu", "queries", down), (f"cpu->{tier}", "answers", up)]
        if not block.fills_beside(task):
            return []
        layer, length = block.spec.units[task.unit].layer or 0, block.prompt
        summed = 4 * block.spec.num_kv_heads if block.sums_columns(layer) else 0
        token = block.spec.computed_kv_bytes(dtype) + summed
        parts = prompt_parts(rows, length, block.policy.chunk).elements()
        whole = [part.rows for part in parts if part.past + part.length == length]
        return [(f"{tier}->cpu", "prompts", count * length * token) for count in whole]

    def shelved(self, step: int, layer: int, batch: int) -> tuple[float, float]:
        """Bytes that recall writes to its tier in `step`, and that it reads from there, those of looks in every Nth
        step spread evenly."""
        block, request, token = self._block, self._block.request, self._shelves.get(layer, 0)
        eviction, rows = request.eviction, block.batches[batch]
        if step == 0 or not token:
            return rows * block.prompt * token, 0
        heads, window = block.spec.heads_of(layer).keys, block.spec.arch.window_of(layer)
        before = block.prompt + step - 1
        back = Reading(eviction.recall, heads, request.recalled).tokens(request.budgets[layer], window, before)
        return rows * token, rows * back * token * share_of_looks(step - 1, eviction.recall_every)

    def shelving(self, step: int, layer: int, batch: int) -> Iterator[tuple[str, float, float]]:
        """Links, bytes and seconds of what recall moves. A disk writes row by row and reads token by token."""
        block, tier = self._block, self._block.request.eviction.recall
        if tier is None or tier == block.compute_tier:
            return
        for inward, nbytes in zip((False, True), self.shelved(step, layer, batch), strict=True):
            for link in links(tier, block.compute_tier, inward=inward) if nbytes else ():
                token = self._shelves[layer]
                times = 1 if "disk" not in link else nbytes / token if inward else block.batches[batch]
                yield link, nbytes, times * block.machine.link(link).seconds(nbytes / times)

    def traffic(self, steps: range) -> dict[tuple[str, str], Transfer]:
        """The sum of all loads and stores that belong to `steps`, by link and by what is moved."""
        found = dict[tuple[str, str], Transfer]()
        for link, what, nbytes, seconds in self._moved(steps):
            before = found.get((link, what), Transfer(link, 0, 0.0))
            found[link, what] = Transfer(link, before.nbytes + nbytes, before.seconds + seconds)
        return found

    def _moved(self, steps: range) -> Iterator[tuple[str, str, int, float]]:
        """The loads and stores of `steps`: link, what is moved, bytes and seconds."""
        block = self._block
        keys = [unit.weights for unit in block.spec.units]
        loads, reads = len(steps) - (0 in steps), Counter[str]()
        first = set[str]() if 0 not in steps else set(keys)
        for mixture in (unit for unit in block.spec.units if block.shape.streamed.intersection(unit.experts)):
            for step, times in ((0, len(steps) - loads), (1, loads)):
                chosen = [mixture.experts[number] for number in block.chosen(step, mixture)]
                reads.update(dict.fromkeys(chosen, times))
                first.update(chosen if step == 0 and 0 in steps else ())
        for key in sorted(block.shape.streamed):
            # Tied embeddings stay from the head to the next embedding: only the first pass reads them twice.
            times = len(steps) + (keys[0] == keys[-1] == key and 0 in steps)
            times = reads[key] if ".experts." in key else times
            yield from self._to_and_from(block.placement.weights[key], "weights", self.group_bytes[key], times)
            if key in first and (seconds := self._checking(key)):
                yield _FROM_DISK, "weights", 0, seconds
        stores = sum(step % REWRITE_EVERY == 0 and step < block.steps - 1 for step in steps)
        passes = ((0, len(steps) - loads), (1, loads))
        for (unit, batch), alike in block.alike.items():
            place = block.spec.units[unit].layer or 0, batch
            if block.spec.units[unit].kind == "attn" and place in block.shape.cache_moves:
                tier, kept = block.placement.cache[place], block.kept_bytes(*place)
                written = len(steps) - (block.steps - 1 in steps)  # states, in every step but the last
                for nbytes, outward in ((self.cache_bytes(*place), stores), (kept, written)):
                    if nbytes:
                        yield from self._to_and_from(tier, "cache", nbytes, alike * loads, alike * outward)
        for (unit, batch), alike in block.alike.items():
            for step, times in passes if unit > 0 and batch in block.shape.hidden_moves else ():
                # A unit loads the states that the unit before it has stored.
                nbytes = self.state_bytes(Task(TaskKind.LOAD_HIDDEN, step, unit, batch))
                tier, both = block.placement.hidden[batch], alike * times
                yield from self._to_and_from(tier, "hidden", nbytes, both, both)
        beside = block.policy.cpu_cache_compute and block.policy.overlap and block.compute_tier != "cpu"
        for (unit, batch), alike in block.alike.items() if beside else ():
            for step, times in passes:
                for link, what, nbytes in self.exchanged(Task(TaskKind.COMPUTE, step, unit, batch)) if times else ():
                    yield link, what, alike * times * nbytes, alike * times * block.machine.link(link).seconds(nbytes)
        for (unit, batch), alike in block.alike.items():
            each = block.spec.units[unit]
            for step in steps if each.kind == "attn" else ():
                for link, shelved, seconds in self.shelving(step, each.layer or 0, batch):
                    yield link, "evicted tokens", alike * round(shelved), alike * seconds

    def bytes_moved(self) -> Counter[str]:
        """Bytes over each link in all steps, the sums of walking the whole schedule."""
        moved = Counter[str]()
        for (link, _), traffic in self.traffic(range(self._block.steps)).items():
            moved[link] += traffic.nbytes
        return moved

    def _to_and_from(
        self, tier: str, what: str, nbytes: int, inward: int, outward: int = 0
    ) -> Iterator[tuple[str, str, int, float]]:
        """As `_moved`: `nbytes` that come from `tier`, and go there, so many times."""
        for times, direction in ((inward, True), (outward, False)):
            for link in links(tier, self._block.compute_tier, inward=direction) if times else ():
                yield link, what, times * nbytes, times * self._block.machine.link(link).seconds(nbytes)

    def _tier_of(self, task: Task) -> str:
        placement = self._block.placement
        if task.kind is TaskKind.LOAD_WEIGHTS:
            return placement.weights[self.key(task)]
        if task.kind in (TaskKind.LOAD_HIDDEN, TaskKind.STORE_HIDDEN):
            return placement.hidden[task.batch]
        return placement.cache[self._block.spec.units[task.unit].layer or 0, task.batch]
