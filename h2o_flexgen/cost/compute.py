"""Seconds of computing one unit for one GPU batch, in named parts, as engine and kernels really go about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from h2o_flexgen.config.hardware.rates import ComputeRates
from h2o_flexgen.config.kernels import Kernels
from h2o_flexgen.config.model.products import products
from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.cost.case import Case
from h2o_flexgen.cost.moves import Moves
from h2o_flexgen.cost.segments import Segment, chunks, prompt_segments
from h2o_flexgen.schedule.footprint import REWRITE_EVERY
from h2o_flexgen.schedule.host_attention import output_bytes
from h2o_flexgen.schedule.recorded import FIRST_REPLAYED
from h2o_flexgen.schedule.tasks import Task, TaskKind

Parts = dict[str, float]
"""Seconds by what they are spent on; what takes none may be left out."""

_MIN_QUERIES = 16  # of one chunk of torch's prompt kernel


class Compute:
    """The compute ticks of one case.

    "products" are GEMMs; "attention" includes the cache's own work; "elementwise" are norms, activations, residuals,
    rotations and copies; "fresh memory" is the first write of a resident cache, in the first block of a call; "moving
    state" is what the computing thread does for caches and hidden states that move, and for answers of the host;
    "overhead" is what a tick takes beside; "sampling" chooses.
    """

    def __init__(self, case: Case) -> None:
        self._case, self._moves = case, Moves(case)
        self._rates: ComputeRates = case.profile.rates(case.compute_tier)
        self._cpu = case.compute_tier == "cpu"
        self._attn_units = [unit.index for unit in case.spec.units if unit.kind == "attn"]

    def parts(self, task: Task) -> Parts:
        """Of one compute task."""
        unit, rows = self._case.spec.units[task.unit], self._case.rows[task.batch]
        make = {"embed": self._embed, "attn": self._attn, "mlp": self._mlp, "head": self._head}[unit.kind]
        parts = make(unit, task.step, rows, task.batch)
        parts["moving state"] = parts.get("moving state", 0.0) + self._arrival(unit, task)
        replayed = self._case.recorded and task.step >= FIRST_REPLAYED
        parts["overhead"] = self._rates.tick_seconds(unit.kind, self._tokens(task.step, rows), replayed=replayed)
        return parts

    def seconds(self, task: Task) -> float:
        """The sum of `parts`."""
        return sum(self.parts(task).values())

    def host_seconds(self, task: Task) -> float:
        """What the host does for a task while the computing thread goes on: attends, or fills caches."""
        layer = self._case.spec.units[task.unit].layer or 0
        if self._case.fills_beside(task):
            return sum(self._filling(layer, task.batch).values())
        if not self._case.attends_beside(task):
            return 0.0
        return sum(self._attending(layer, task.step, self._case.rows[task.batch], "cpu").values())

    def finish_seconds(self, task: Task) -> float:
        """Of `seconds` what comes after the host's attention: the answer goes up, and through the output projection."""
        case, rows = self._case, self._case.rows[task.batch]
        if not case.attends_beside(task):
            return 0.0
        arch, width = case.spec.arch, case.spec.hidden_size
        seconds = self._moves.transfers(task)[-1].seconds
        seconds += self._rates.gemm_seconds(rows, *products(case.spec, "attn")[-1], case.itemsize)
        if arch.post_norms or not arch.pre_norm:
            seconds += self._norm(rows, width)
        return seconds

    def issue_seconds(self, task: Task) -> float:
        """What the computing thread copies aside: before a store's transfer what is to be stored, and before attention
        weights are freed, if the host is still at a batch of theirs, what the second half needs of them."""
        case, unit = self._case, self._case.spec.units[task.unit]
        if task.kind is TaskKind.FREE_WEIGHTS and unit.kind == "attn":
            return self._elementwise(2 * output_bytes(case.spec.groups_by_key[unit.weights], case.dtype))
        if task.kind is TaskKind.STORE_HIDDEN:
            return self._elementwise(2 * self._moves.state_bytes(task))
        if task.kind is TaskKind.STORE_CACHE and task.step % REWRITE_EVERY:
            return self._elementwise(2 * case.rows[task.batch] * case.kv_width * (2 * case.itemsize + 8))
        return 0.0

    # ---- units

    def _embed(self, unit: UnitSpec, step: int, rows: int, batch: int) -> Parts:
        spec, tokens = self._case.spec, self._tokens(step, rows)
        # Only the rows of the table that are asked for are read.
        numbers = 2 * spec.embed_dim + (4 * spec.hidden_size if spec.arch.positions == "learned" else 0)
        numbers += 3 * spec.hidden_size if spec.arch.parallel else 0
        numbers += 2 * spec.embed_dim if spec.arch.embed_scale != 1.0 else 0
        return {"products": self._products("embed", tokens), "elementwise": self._numbers(tokens * numbers)}

    def _attn(self, unit: UnitSpec, step: int, rows: int, batch: int) -> Parts:
        case, layer = self._case, unit.layer or 0
        spec, tokens = case.spec, self._tokens(step, rows)
        query, kv = case.query_width, case.kv_width
        elementwise = self._half(tokens, attn=True)
        if spec.arch.qk_norm:
            elementwise += self._norm(tokens, query + kv)
        if spec.arch.rotary_of(layer) is not None:
            turned = query if step > 0 and case.eviction.rolling_positions else query + kv
            elementwise += self._numbers(5 * tokens * turned)
        if step > 0:
            attend = self._decode(layer, step, rows, batch)
        else:
            attend = self._prompt(layer, rows, batch)
        attend["elementwise"] = attend.get("elementwise", 0.0) + elementwise
        return {**attend, "products": self._chunked("attn", self._parts(step, rows))}

    def _mlp(self, unit: UnitSpec, step: int, rows: int, batch: int) -> Parts:
        spec = self._case.spec
        if unit.layer == spec.num_layers - 1:
            step = 1  # nothing but the prompts' last tokens has come this far
        tokens = self._tokens(step, rows)
        passes = 5 if spec.arch.gated_mlp else 2
        if self._rates.fused_products and not spec.arch.gated_mlp and spec.arch.activation == "relu":
            passes = 0
        activation = self._numbers(tokens * spec.ffn_size * passes)
        return {
            "products": self._chunked("mlp", chunks(tokens, self._case.policy.chunk)),
            "elementwise": self._half(tokens, attn=False) + activation,
        }

    def _head(self, unit: UnitSpec, step: int, rows: int, batch: int) -> Parts:
        spec = self._case.spec
        logits = rows * spec.vocab_size * (self._case.itemsize + 4 + 4)  # to float32, and looked through
        norm = self._norm(rows, spec.hidden_size) if spec.arch.final_norm else 0.0
        return {
            "products": self._products("head", rows),
            "elementwise": norm + self._elementwise(logits),
            "sampling": rows * self._rates.sample_s,
        }

    # ---- attention

    def _prompt(self, layer: int, rows: int, batch: int) -> Parts:
        case = self._case
        curve = self._rates.prefill_attention["scored" if case.sums_columns(layer) else "plain"]
        seconds, numbers = 0.0, 0
        for segment, count in prompt_segments(rows, case.workload.prompt_len, case.policy.chunk).items():
            keys = self._keys(layer, segment)
            flops = 4 * segment.rows * segment.length * keys * case.query_width
            seconds += count * flops / curve.at(keys)
            # The output is copied into place; earlier parts of a long prompt are put together, with their own.
            copied = 2 * segment.rows * segment.length * case.query_width + 4 * segment.past * case.kv_width
            numbers += count * copied
        parts = {"attention": seconds, "elementwise": self._numbers(numbers)}
        task = Task(TaskKind.COMPUTE, 0, self._attn_units[layer], batch)
        nbytes = sum(size for _, _, size in self._moves.exchanged(task))
        if nbytes:
            parts["elementwise"] += self._elementwise(2 * nbytes)
            return parts
        device = case.attention_device(layer, batch)
        filling = self._filling(layer, batch)
        parts["elementwise"] += filling.pop("elementwise")
        if device != case.compute_tier:
            nbytes = 2 * rows * case.workload.prompt_len * case.kv_width * case.itemsize
            parts["moving state"] = case.profile.link(f"{case.compute_tier}->cpu").seconds(nbytes)
        return {**parts, **filling}

    def _filling(self, layer: int, batch: int) -> Parts:
        """Bringing prompts into their caches, where these are."""
        case, device = self._case, self._case.attention_device(layer, batch)
        rates, kept = case.profile.rates(device), min(case.workload.prompt_len, case.budgets[layer].total)
        copied = 4 * case.rows[batch] * kept * case.kv_width * case.itemsize
        parts = {"elementwise": copied / rates.elementwise_bytes_per_s}
        resident = (layer, batch) not in case.shape.cache_moves
        if rates.fresh_bytes_per_s is not None and resident and not case.later:
            parts["fresh memory"] = self._moves.cache_bytes(layer, batch) / rates.fresh_bytes_per_s
        return parts

    def _keys(self, layer: int, segment: Segment) -> int:
        """Keys per query that the kernel multiplies: all, or with a window what a chunk of queries sees together."""
        total, window = segment.past + segment.length, self._case.spec.arch.window_of(layer)
        if window is None:
            return total
        logits = (Kernels.TORCH if self._rates.torch_attention else Kernels.CPU).logits
        queries = min(segment.length, max(_MIN_QUERIES, logits // (self._case.spec.num_heads * total)))
        return min(total, window + queries)

    def _decode(self, layer: int, step: int, rows: int, batch: int) -> Parts:
        case, device = self._case, self._case.attention_device(layer, batch)
        if (layer, batch) in case.shape.host_attends:
            down, up = self._moves.transfers(Task(TaskKind.COMPUTE, step, self._attn_units[layer], batch))
            return {"elementwise": self._elementwise(2 * down.nbytes), "moving state": up.seconds}
        parts = self._attending(layer, step, rows, device)
        if device != case.compute_tier:
            there, back = (
                case.profile.link(f"{a}->{b}") for a, b in ((case.compute_tier, "cpu"), ("cpu", case.compute_tier))
            )
            query = rows * case.query_width * case.itemsize
            new = rows * case.kv_width * case.itemsize
            parts["moving state"] = there.seconds(query) + 2 * there.seconds(new) + back.seconds(query)
        return parts

    def _attending(self, layer: int, step: int, rows: int, device: str) -> Parts:
        """A step of a cache on `device`, all of it there."""
        case, rates = self._case, self._case.profile.rates(device)
        # torch is handed the whole buffer: a prefix of every row's slots would have to be copied first.
        whole = rates.reads_all_slots or (device == "cpu" and case.eviction.rolling_positions)
        width = case.slots[layer] if whole else case.held(layer, step)
        nbytes = 2 * rows * width * case.kv_width * case.itemsize
        parts = {"attention": rates.decode_attention["scored" if case.ranks(layer) else "plain"].time_at(nbytes)}
        if case.eviction.rolling_positions:
            # Keys are turned (five passes) by angles that are looked up, cosines and sines of half a head each (two).
            parts["elementwise"] = 7 * nbytes / 2 / rates.elementwise_bytes_per_s
        return parts

    def _arrival(self, unit: UnitSpec, task: Task) -> float:
        """What the computing thread does with state that has just arrived."""
        case, seconds = self._case, 0.0
        if unit.kind != "embed" and task.batch in case.shape.hidden_moves:
            load = Task(TaskKind.LOAD_HIDDEN, task.step, task.unit, task.batch)
            seconds += self._elementwise(2 * self._moves.state_bytes(load))
        if unit.kind == "attn" and task.step > 0 and (unit.layer, task.batch) in case.shape.cache_moves:
            waiting = (task.step - 1) % REWRITE_EVERY
            numbers = 2 * case.rows[task.batch] * case.kv_width
            seconds += self._elementwise(waiting * numbers * (2 * case.itemsize + 8))
        return seconds

    # ---- what units share

    def _tokens(self, step: int, rows: int) -> int:
        return rows if step > 0 else rows * self._case.workload.prompt_len

    def _parts(self, step: int, rows: int) -> Counter[int]:
        """Tokens that go through attention at once, and how often: of prompts those of a segment."""
        if step > 0:
            return chunks(rows, self._case.policy.chunk)
        segments = prompt_segments(rows, self._case.workload.prompt_len, self._case.policy.chunk)
        found = Counter[int]()
        for segment, count in segments.items():
            found[segment.rows * segment.length] += count
        return found

    def _chunked(self, kind: str, parts: Mapping[int, int]) -> float:
        return sum(count * self._products(kind, tokens) for tokens, count in parts.items())

    def _products(self, kind: str, rows: int) -> float:
        size = self._case.itemsize
        return sum(self._rates.gemm_seconds(rows, *product, size) for product in products(self._case.spec, kind))

    def _half(self, tokens: int, *, attn: bool) -> float:
        """The norms and the residual addition of one half of a layer. A product that adds to the residual reads it."""
        arch, width = self._case.spec.arch, self._case.spec.hidden_size
        norms = 2 if arch.post_norms else 1
        passes = 3 if arch.pre_norm else 5
        if self._rates.fused_products and arch.pre_norm and not arch.post_norms:
            passes = 1
        if arch.parallel:
            passes = 2 if attn else 6
        return norms * self._norm(tokens, width) + self._numbers(passes * tokens * width)

    def _norm(self, tokens: int, width: int) -> float:
        """LayerNorm is one pass in and one out. In torch, on a CPU, RMSNorm goes by float32 copies."""
        size = self._case.itemsize
        per_number = 2 * size
        if self._case.spec.arch.norm == "rmsnorm" and self._cpu:
            per_number = 20 if size == 4 else 20 + 4 * size
        return self._elementwise(tokens * width * per_number)

    def _numbers(self, count: int) -> float:
        return self._elementwise(count * self._case.itemsize)

    def _elementwise(self, nbytes: float) -> float:
        return nbytes / self._rates.elementwise_bytes_per_s
