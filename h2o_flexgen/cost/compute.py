"""Seconds of computing one unit for one GPU batch, in named parts, as engine and kernels really go about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from h2o_flexgen.config.hardware.rates import ComputeRates
from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.config.offload import Kernels
from h2o_flexgen.config.recall import index_packing, share_of_looks
from h2o_flexgen.cost.inputs import CostInputs, Moves, PromptPart, chunks, prompt_parts
from h2o_flexgen.schedule.footprint import REWRITE_EVERY
from h2o_flexgen.schedule.tasks import FIRST_REPLAYED, Task, TaskKind
from h2o_flexgen.schedule.workspace import output_bytes

Parts = dict[str, float]
"""Seconds by kind of work; kinds that take none may be left out."""

_MIN_QUERIES = 16  # of one chunk of torch's prompt kernel


class Compute:
    """The compute ticks of one block.

    "products" are GEMMs; "attention" includes the cache's own work; "elementwise" are norms, activations, residuals,
    rotations and copies; "fresh memory" is the first write of a resident cache, in the first block of a call; "moving
    state" is what the computing thread does for caches and hidden states that move, and for answers of the host;
    "overhead" is what a tick takes beside; "sampling" chooses.
    """

    def __init__(self, block: CostInputs, moves: Moves) -> None:
        self._block, self._moves = block, moves
        self._rates: ComputeRates = block.machine.rates(block.compute_tier)
        self._cpu = block.compute_tier == "cpu"
        self._attn_units = [unit.index for unit in block.spec.units if unit.kind == "attn"]

    def parts(self, task: Task) -> Parts:
        """The parts of a compute task's time, in seconds."""
        if task.experts:
            tokens = self._block.mixture_tokens(task.step, self._block.spec.units[task.unit])
            return self._experts(tokens, len(task.experts))
        unit, rows = self._block.spec.units[task.unit], self._block.batches[task.batch]
        make = {"embed": self._embed, "attn": self._attn, "mlp": self._mlp, "head": self._head}[unit.kind]
        parts = make(unit, task.step, rows, task.batch)
        shape, seconds = self._block.shape, 0.0  # of state that has just arrived
        if unit.kind != "embed" and task.batch in shape.hidden_moves:
            load = Task(TaskKind.LOAD_HIDDEN, task.step, task.unit, task.batch)
            seconds += self._elementwise(2 * self._moves.state_bytes(load))
        if unit.kind == "attn" and task.step > 0 and (unit.layer, task.batch) in shape.cache_moves:
            waiting = (task.step - 1) % REWRITE_EVERY
            seconds += waiting * self._new_tokens(unit.layer or 0, task.batch)
        parts["moving state"] = parts.get("moving state", 0.0) + seconds
        replayed = self._block.recorded and task.step >= FIRST_REPLAYED
        if task.step > 0:
            parts["overhead"] = self._rates.tick_seconds(unit.kind, rows, replayed=replayed)
        else:
            parts["overhead"] = self._rates.prompts_seconds(unit.kind, rows, self._block.prompt)
        return parts

    def seconds(self, task: Task) -> float:
        return sum(self.parts(task).values())

    def host_seconds(self, task: Task) -> float:
        """Seconds of the host for a task while the computing thread goes on: attends, or fills caches."""
        layer = self._block.spec.units[task.unit].layer or 0
        if self._block.fills_beside(task):
            return sum(self._filling(layer, task.batch).values())
        if not self._block.attends_beside(task):
            return 0.0
        return sum(self._attending(layer, task.step, self._block.batches[task.batch], "cpu").values())

    def finish_seconds(self, task: Task) -> float:
        """The part of `seconds` after the host's attention: the answer goes up, and through the output projection."""
        block, rows = self._block, self._block.batches[task.batch]
        if not block.attends_beside(task):
            return 0.0
        arch, width = block.spec.arch, block.spec.hidden_size
        seconds = self._moves.transfers(task)[-1].seconds
        packed = self._rates.packed_factor(block.spec.packed_shares["attn"], rows, block.size)
        seconds += packed * self._rates.gemm_seconds(rows, *block.spec.products("attn")[-1], block.size)
        if arch.post_norms or not arch.pre_norm:
            seconds += self._norm(rows, width)
        return seconds

    def issue_seconds(self, task: Task) -> float:
        """Seconds in which the computing thread copies aside: before a store's transfer what is to be stored, and
        before attention weights are freed, if the host is still at a batch of theirs, what the second half needs of
        them."""
        block, unit = self._block, self._block.spec.units[task.unit]
        if task.kind is TaskKind.FREE_WEIGHTS and unit.kind == "attn":
            return self._elementwise(2 * output_bytes(block.spec.groups_by_key[unit.weights], block.dtype))
        if task.kind is TaskKind.STORE_HIDDEN:
            return self._elementwise(2 * self._moves.state_bytes(task))
        if task.kind is TaskKind.STORE_CACHE and task.step % REWRITE_EVERY:
            return self._new_tokens(unit.layer or 0, task.batch)
        return 0.0

    # ---- units

    def _embed(self, unit: UnitSpec, step: int, rows: int, batch: int) -> Parts:
        spec, tokens = self._block.spec, self._tokens(step, rows)
        # Only the rows of the table that are asked for are read.
        numbers = 2 * spec.embed_dim + (4 * spec.hidden_size if spec.arch.positions == "learned" else 0)
        numbers += 3 * spec.hidden_size if spec.arch.parallel else 0
        numbers += 2 * spec.embed_dim if spec.arch.embed_scale != 1.0 else 0
        return {"products": self._products("embed", tokens), "elementwise": self._numbers(tokens * numbers)}

    def _attn(self, unit: UnitSpec, step: int, rows: int, batch: int) -> Parts:
        block, layer = self._block, unit.layer or 0
        spec, tokens = block.spec, self._tokens(step, rows)
        kept = self._elementwise(2 * block.kept_bytes(layer, batch))  # states are read, and written
        fresh = self._fresh(block.kept_bytes(layer, batch), layer, batch) if step == 0 else {}
        if not spec.attends(layer):
            # A mixer goes through prompts one by one.
            parts = self._parts(step, rows) if step > 0 else Counter({block.prompt: rows})
            products = self._chunked(unit.products, parts)
            return {"products": products, "elementwise": kept + self._half(tokens, attn=True), **fresh}
        query, kv = block.query_width, block.kv_width
        elementwise = self._half(tokens, attn=True)
        if spec.arch.qk_norm:
            elementwise += self._norm(tokens, query + kv)
        if spec.arch.rotary_of(layer) is not None:
            turned = query if step > 0 and block.request.eviction.rolling_positions else query + kv
            elementwise += self._numbers(5 * tokens * turned)
        if step > 0:
            attend = self._decode(layer, step, rows, batch)
        else:
            attend = self._prompt(layer, rows, batch)
        for more in (self._recalling(layer, step, batch), {"elementwise": elementwise + kept, **fresh}):
            for part, seconds in more.items():
                attend[part] = attend.get(part, 0.0) + seconds
        return {**attend, "products": self._chunked(unit.products, self._parts(step, rows))}

    def _mlp(self, unit: UnitSpec, step: int, rows: int, batch: int) -> Parts:
        spec = self._block.spec
        if self._block.ends_only(unit):
            step = 1
        tokens = self._tokens(step, rows)
        if unit.experts:
            routing = self._chunked("router", chunks(tokens, self._block.policy.chunk))
            return {"products": routing, "elementwise": self._half(tokens, attn=False)}
        passes = 5 if spec.arch.gated_mlp else 2
        if self._rates.fused_products and not spec.arch.gated_mlp and spec.arch.activation == "relu":
            passes = 0
        activation = self._numbers(tokens * spec.ffn_size * passes)
        return {
            "products": self._chunked("mlp", chunks(tokens, self._block.policy.chunk)),
            "elementwise": self._half(tokens, attn=False) + activation,
        }

    def _experts(self, tokens: int, count: float) -> Parts:
        """`count` experts of a unit, for the `tokens` of all GPU batches."""
        spec = self._block.spec
        down = spec.product_calls("experts", tokens)[-1]
        products = {"products": count / down.times * self._products("experts", tokens)}
        if spec.expert_bits in self._rates.experts:
            return products
        # Tokens are gathered (2 passes), and results scaled and added up (5); the gate as in an MLP.
        numbers = down.rows * (7 * spec.hidden_size + 5 * down.product.in_features)
        return {**products, "elementwise": self._numbers(count * numbers)}

    def chosen_experts(self, step: int, unit: UnitSpec, sequences: int = 0) -> Parts:
        """All experts of a unit that the tokens of this block choose, or of one of `sequences`."""
        if not unit.experts:
            return {}
        tokens = self._block.mixture_tokens(step, unit, sequences)
        return self._experts(tokens, self._block.spec.product_calls("experts", tokens)[-1].times)

    def _head(self, unit: UnitSpec, step: int, rows: int, batch: int) -> Parts:
        spec = self._block.spec
        logits = rows * spec.vocab_size * (self._block.size + 4 + 4)  # to float32, and looked through
        norm = self._norm(rows, spec.hidden_size) if spec.arch.final_norm else 0.0
        return {
            "products": self._products("head", rows),
            "elementwise": norm + self._elementwise(logits),
            "sampling": rows * self._rates.sample_s,
        }

    # ---- attention

    def _prompt(self, layer: int, rows: int, batch: int) -> Parts:
        block = self._block
        curve = self._rates.prefill_attention["scored" if block.sums_columns(layer) else "plain"]
        seconds, numbers = 0.0, 0
        for part, count in prompt_parts(rows, block.prompt, block.policy.chunk).items():
            keys = self._keys(layer, part)
            flops = 4 * part.rows * part.length * keys * block.query_width
            seconds += count * flops / curve.at(keys)
            # The output is copied into place; earlier parts of a long prompt are put together, with their own.
            copied = 2 * part.rows * part.length * block.query_width + 4 * part.past * block.kv_width
            numbers += count * copied
        parts = {"attention": seconds, "elementwise": self._numbers(numbers)}
        task = Task(TaskKind.COMPUTE, 0, self._attn_units[layer], batch)
        nbytes = sum(size for _, _, size in self._moves.exchanged(task))
        if nbytes:
            parts["elementwise"] += self._elementwise(2 * nbytes)
            return parts
        device = block.attention_device(layer, batch)
        filling = self._filling(layer, batch)
        parts["elementwise"] += filling.pop("elementwise")
        if device != block.compute_tier:
            nbytes = 2 * rows * block.prompt * block.kv_width * block.size
            parts["moving state"] = block.machine.link(f"{block.compute_tier}->cpu").seconds(nbytes)
        return {**parts, **filling}

    def _filling(self, layer: int, batch: int) -> Parts:
        block, device = self._block, self._block.attention_device(layer, batch)
        rates, kept = block.machine.rates(device), min(block.prompt, block.request.budgets[layer].after_prompt)
        copied = 4 * block.batches[batch] * kept * block.kv_width * block.size
        parts = {"elementwise": copied / rates.elementwise_bytes_per_s}
        return {**parts, **self._fresh(self._moves.cache_bytes(layer, batch), layer, batch)}

    def _fresh(self, nbytes: int, layer: int, batch: int) -> Parts:
        """The first write of so much of a resident cache, where that is new memory."""
        block = self._block
        rate = block.machine.rates(block.attention_device(layer, batch)).fresh_bytes_per_s
        resident = (layer, batch) not in block.shape.cache_moves
        if rate is None or not nbytes or not resident or block.later or block.request.endless:
            return {}
        return {"fresh memory": nbytes / rate}

    def _keys(self, layer: int, part: PromptPart) -> int:
        """Keys per query that the kernel multiplies: all, or with a window what a chunk of queries sees together."""
        total, window = part.past + part.length, self._block.spec.arch.window_of(layer)
        if window is None:
            return total
        logits = (Kernels.TORCH if self._rates.torch_attention else Kernels.CPU).logits
        queries = min(part.length, max(_MIN_QUERIES, logits // (self._block.spec.num_heads * total)))
        return min(total, window + queries)

    def _decode(self, layer: int, step: int, rows: int, batch: int) -> Parts:
        block, device = self._block, self._block.attention_device(layer, batch)
        if (layer, batch) in block.shape.host_attends:
            down, up = self._moves.transfers(Task(TaskKind.COMPUTE, step, self._attn_units[layer], batch))
            return {"elementwise": self._elementwise(2 * down.nbytes), "moving state": up.seconds}
        parts = self._attending(layer, step, rows, device)
        if device != block.compute_tier:
            there, back = (
                block.machine.link(f"{a}->{b}") for a, b in ((block.compute_tier, "cpu"), ("cpu", block.compute_tier))
            )
            query = rows * block.query_width * block.size
            new = rows * block.kv_width * block.size
            parts["moving state"] = there.seconds(query) + 2 * there.seconds(new) + back.seconds(query)
        return parts

    def _attending(self, layer: int, step: int, rows: int, device: str) -> Parts:
        """A step of a cache on `device`, all of it there."""
        block, rates = self._block, self._block.machine.rates(device)
        # torch is handed the whole buffer: a prefix of every row's slots would have to be copied first.
        whole = rates.reads_all_slots or (device == "cpu" and block.request.eviction.rolling_positions)
        width = block.request.slots[block.spec.source_of(layer)] if whole else block.held(layer, step)
        spec, dtype = block.spec, block.dtype
        curve = rates.decode_attention["scored" if block.request.budgets[layer].scored else "plain"]
        parts = {"attention": curve.time_at(rows * width * spec.attended_kv_bytes(dtype, layer))}
        if block.request.eviction.rolling_positions:
            # Keys are turned (five passes) by angles that are looked up, cosines and sines of half a head each (two).
            # Packed ones, and values, are expanded before: read, and written.
            passes = 7 / 2 if spec.cache_packings is None else 7 / 2 + 2
            parts["elementwise"] = passes * rows * width * spec.computed_kv_bytes(dtype) / rates.elementwise_bytes_per_s
        return parts

    def _recalling(self, layer: int, step: int, batch: int) -> Parts:
        """Seconds that recall adds: for bytes to its tier and back, and for the index that a query looks through, which
        is read as packed keys are."""
        block, (written, read) = self._block, self._moves.shelved(step, layer, batch)
        tier, spec, found = block.request.eviction.recall, block.spec, dict[str, float]()
        if tier is None or not written:
            return found
        if tier == block.compute_tier:
            found["elementwise"] = self._elementwise(2 * (written + read))
        else:
            found["moving state"] = sum(seconds for *_, seconds in self._moves.shelving(step, layer, batch))
        if step > 0:
            heads, window = spec.heads_of(layer), spec.arch.window_of(layer)
            seen = min(block.prompt + step, window or block.prompt + step)
            key = (index_packing(heads.dim).nbytes + heads.dim * block.size) / 2
            seconds = self._rates.decode_attention["scored"].time_at(block.batches[batch] * seen * heads.keys * key)
            found["attention"] = seconds * share_of_looks(step - 1, block.request.eviction.recall_every)
        return found

    def _new_tokens(self, layer: int, batch: int) -> float:
        """Copying one token of each row out of a cache that moves, or into it, by an index of each number or byte."""
        block = self._block
        size = block.size if block.spec.cache_packings is None else 1
        nbytes = block.batches[batch] * block.spec.kv_bytes_per_token_and_layer(block.dtype, layer)
        return self._elementwise(nbytes * (2 + 8 / size))

    # ---- what units share

    def _tokens(self, step: int, rows: int) -> int:
        return rows if step > 0 else rows * self._block.prompt

    def _parts(self, step: int, rows: int) -> Counter[int]:
        """Tokens that go through attention at once, and how often: of prompts those of a part."""
        if step > 0:
            return chunks(rows, self._block.policy.chunk)
        found = Counter[int]()
        for part, count in prompt_parts(rows, self._block.prompt, self._block.policy.chunk).items():
            found[part.rows * part.length] += count
        return found

    def _chunked(self, kind: str, parts: Mapping[int, int]) -> float:
        return sum(count * self._products(kind, tokens) for tokens, count in parts.items())

    def _products(self, kind: str, rows: int) -> float:
        return self._rates.products_seconds(self._block.spec, kind, rows, self._block.size)

    def _half(self, tokens: int, *, attn: bool) -> float:
        """The norms and the residual addition of one half of a layer. A product that adds to the residual reads it."""
        arch, width = self._block.spec.arch, self._block.spec.hidden_size
        norms = 2 if arch.post_norms else 1
        passes = 3 if arch.pre_norm else 5
        if self._rates.fused_products and arch.pre_norm and not arch.post_norms:
            passes = 1
        if arch.parallel:
            passes = 2 if attn else 6
        return norms * self._norm(tokens, width) + self._numbers(passes * tokens * width)

    def _norm(self, tokens: int, width: int) -> float:
        """LayerNorm is one pass in and one out. In torch, on a CPU, RMSNorm goes by float32 copies."""
        size = self._block.size
        per_number = 2 * size
        if self._block.spec.arch.norm == "rmsnorm" and self._cpu:
            per_number = 20 if size == 4 else 20 + 4 * size
        return self._elementwise(tokens * width * per_number)

    def _numbers(self, count: float) -> float:
        return self._elementwise(count * self._block.size)

    def _elementwise(self, nbytes: float) -> float:
        return nbytes / self._rates.elementwise_bytes_per_s
