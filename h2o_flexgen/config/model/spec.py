"""The shape of a model: its tensors, its units, and what they take in bytes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from h2o_flexgen.config.checks import Checked, Count
from h2o_flexgen.config.model.arch import ArchSpec, ExpertSpec, RotarySpec
from h2o_flexgen.config.model.packing import CacheBits, CachePacking, CacheRotation, Packing, cache_packings, groupwise
from h2o_flexgen.config.model.tensors import LayerHeads, StateSpec, TensorSpec, WeightGroup, dtype_bytes
from h2o_flexgen.errors import ModelError, UsageError

MOST_LAYERS, MOST_EXPERTS, MOST_QUERIES = 1000, 1 << 15, 1 << 20
"""Of a model, experts over all its layers and numbers of a token's queries: more than any published one has. A larger
number in a config.json is damage, and would take hours, or all memory, to be refused by its missing tensors."""


@dataclass(frozen=True)
class UnitSpec:
    """One position of the computation, and the key of the weight group that it needs.

    experts: the groups of its experts, which are loaded one by one, and only those that tokens have chosen.
    own: the kind of its products, where that does not follow from `kind` and `experts`.
    """

    index: int
    name: str
    kind: Literal["embed", "attn", "mlp", "head"]
    layer: int | None
    weights: str
    experts: tuple[str, ...] = ()
    own: str = ""

    @property
    def products(self) -> str:
        """Of which kind the products of its own weights are: see `ModelSpec.products`."""
        return self.own or ("router" if self.experts else self.kind)


class Product(NamedTuple):
    """x (rows, in_features) times a weight (out_features, in_features)."""

    out_features: int
    in_features: int


class ProductCall(NamedTuple):
    """A product of `rows` rows, done `times` times in a unit: fractions are means."""

    product: Product
    rows: float
    times: float = 1


@dataclass(frozen=True)
class ModelSpec(Checked):
    """The sizes of one model. Weights and costs follow from them; a size that cannot be raises ModelError."""

    name: str
    vocab_size: Count
    hidden_size: Count
    ffn_size: Count
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    embed_dim: Count
    """Width of the token embedding; where it differs from hidden_size, project_in and project_out bridge them."""
    max_positions: Count
    arch: ArchSpec
    bos_token_id: int
    eos_token_id: int | tuple[int, ...]
    pad_token_id: int | None
    dtype: str = "float16"
    packings: tuple[tuple[str, Packing], ...] = ()
    """The tensors of fewer bits, by canonical name."""
    cache_bits: CacheBits = 16
    cache_rotation: CacheRotation = "scale"
    cache_newest: int = 0

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
            dtype_bytes(self.dtype)
        except UsageError as error:
            raise ModelError(f"{self.name}: {error.found}", error.needed, error.change) from None
        experts = 0 if self.arch.experts is None else self.arch.experts.count * self.num_layers
        for name, count, most in (
            ("layers", self.num_layers, MOST_LAYERS),
            ("experts", experts, MOST_EXPERTS),
            ("numbers in a token's queries", self.num_heads * self.head_dim, MOST_QUERIES),
        ):
            if count > most:
                raise ModelError(f"{self.name} has {count:,} {name}", f"needed at most {most:,}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.name}: {self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads",
                "needed a whole number of query heads per KV head",
            )

    def attends(self, layer: int) -> bool:
        """Whether a layer attends to keys that it keeps; others keep states alone."""
        return True

    def states_of(self, layer: int) -> tuple[StateSpec, ...]:
        """The states that a layer keeps of each row besides keys and values, however many tokens it has."""
        return ()

    @cached_property
    def has_states(self) -> bool:
        return any(self.states_of(layer) for layer in range(self.num_layers))

    @property
    def keeps_caches(self) -> bool:
        """Whether keys and values are in the engine's own caches, not in such as modules make and nothing else sees."""
        return True

    @property
    def shares_prefixes(self) -> bool:
        """Whether equal first tokens have equal keys in every sequence, however long it is."""
        return self.keeps_caches and not self._rotaries_by_length

    @property
    def rolling_slots(self) -> int:
        """Tokens that a cache may hold in a step if positions roll within it: the context.

        Where angles depend on the length it is the trained context: within that they are the same for all neighbours.
        So are queries that grow along a sequence, as far as they do not.
        """
        growing = [each.grows_every for each in (self.arch.rotary, self.arch.local_rotary) if each and each.growth]
        by_length = (rotary.original_positions for rotary in self._rotaries_by_length)
        return min([self.max_positions, *by_length, *growing])

    def turn(self, prompt_len: int, gen_len: int) -> int:
        """The tokens, of prompt and answer, with which all keys are computed anew; 0 where that never happens."""
        for rotary in self._rotaries_by_length:
            original = rotary.original_positions
            if rotary.recomputed and prompt_len <= original < prompt_len + gen_len - 1:
                return original + 1
        return 0

    @property
    def _rotaries_by_length(self) -> list[RotarySpec]:
        return [rotary for rotary in (self.arch.rotary, self.arch.local_rotary) if rotary and rotary.by_length]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence, as a tuple in every case."""
        return (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id

    def heads_of(self, layer: int) -> LayerHeads:
        """The heads of a layer; the model's own numbers are of its largest."""
        return LayerHeads(self.num_heads, self.num_kv_heads, self.head_dim)

    def source_of(self, layer: int) -> int:
        """The layer whose cache a layer reads: itself, but where it has no keys of its own (Gemma 3n)."""
        return layer

    @cached_property
    def last_readers(self) -> dict[int, int]:
        """By layer with a cache the last one that reads it."""
        return {self.source_of(layer): layer for layer in range(self.num_layers)}

    def mean_by_window(self, of_layer: Callable[[int], float]) -> dict[int | None, float]:
        """The mean of something over the layers of each window that attend."""
        found: dict[int | None, list[float]] = {}
        for layer, window in enumerate(self.windows):
            if self.attends(layer):
                found.setdefault(window, []).append(of_layer(layer))
        return {window: sum(values) / len(values) for window, values in found.items()}

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer: the tokens that a query sees, itself included; None: all."""
        return tuple(self.arch.window_of(layer) for layer in range(self.num_layers))

    @cached_property
    def units(self) -> tuple[UnitSpec, ...]:
        """Embedding, then the halves of the layers, then the output head."""
        first, last = ("vocab", "vocab") if self.arch.tied_head else ("embed", "head")
        units = [UnitSpec(0, "embed", "embed", None, first)]
        for name, kind, layer, count, own in self._halves():
            experts = tuple(f"{name}.experts.{number}" for number in range(count))
            units.append(UnitSpec(len(units), name, kind, layer, name, experts, own))
        return (*units, UnitSpec(len(units), "head", "head", None, last))

    def _halves(self) -> Iterator[tuple[str, Literal["attn", "mlp"], int, int, str]]:
        """Attention and MLP of each layer: name, kind, layer, number of experts, and `own` of UnitSpec."""
        for layer in range(self.num_layers):
            mixture = self.arch.experts_of(layer)
            yield f"layers.{layer}.attn", "attn", layer, 0, ""
            yield f"layers.{layer}.mlp", "mlp", layer, mixture.count if mixture else 0, ""

    @cached_property
    def weight_groups(self) -> tuple[WeightGroup, ...]:
        """The weight groups of the units, each once, in the order of first use."""
        packings = dict(self.packings)
        if not packings:
            return self.plain_groups()
        return tuple(
            WeightGroup(group.key, tuple(replace(each, packing=packings.get(each.name)) for each in group.tensors))
            for group in self.plain_groups()
        )

    def plain_groups(self) -> tuple[WeightGroup, ...]:
        """The weight groups, without packings."""
        embed, head = _embed_tensors(self), _head_tensors(self)
        tied = self.arch.tied_head
        groups = [WeightGroup("vocab", embed + head) if tied else WeightGroup("embed", embed)]
        for layer in range(self.num_layers):
            groups.append(WeightGroup(f"layers.{layer}.attn", _attn_tensors(self, f"layers.{layer}.attn")))
            name, experts = f"layers.{layer}.mlp", self.arch.experts_of(layer)
            if experts is None:
                groups.append(WeightGroup(name, (*_half_norms(self, name), *_mlp_tensors(self, name, self.ffn_size))))
                continue
            groups.append(WeightGroup(name, _mixture_tensors(self, name, experts)))
            for key in (f"{name}.experts.{number}" for number in range(experts.count)):
                groups.append(WeightGroup(key, _expert_tensors(self, key, experts)))
        return (*groups, *([] if tied else [WeightGroup("head", head)]))

    @cached_property
    def groups_by_key(self) -> dict[str, WeightGroup]:
        return {group.key: group for group in self.weight_groups}

    def with_bits(self, bits: int, group: int) -> ModelSpec:
        """This model with its matrices in 4 or 8 bits, `group` inputs sharing a scale.

        Packed matrices stay as they are, and so do norms, biases, routers, learned positions, an untied embedding, and
        matrices of one row or an odd number of inputs. The head, or the table to which it is tied, has 8 bits.
        """
        packings, packed = list(self.packings), dict(self.packings)
        for tensor in (tensor for each in self.weight_groups for tensor in each.tensors):
            table = tensor.name in ("embed.tokens", "head.vocab")
            kept = tensor.name == "embed.positions" or (tensor.name == "embed.tokens" and not self.arch.tied_head)
            kept = kept or tensor.name.endswith(".router.weight") or tensor.shape[0] == 1
            if len(tensor.shape) == 2 and not kept and not tensor.shape[1] % 2 and tensor.name not in packed:
                packings.append((tensor.name, groupwise(8 if table else bits, group)))
        return replace(self, packings=tuple(packings))

    def with_cache_bits(self, bits: CacheBits, rotation: CacheRotation = "scale", newest: int = 0) -> ModelSpec:
        """This model with its keys and values in so many bits. UsageError where its heads cannot be packed."""
        made = replace(self, cache_bits=bits, cache_rotation=rotation, cache_newest=newest if bits != 16 else 0)
        try:
            made.cache_packings  # noqa: B018 - raises
        except ValueError as error:
            raise UsageError(f"cache_bits is {bits} for {self.name}: {error}", "leave it out") from None
        return made

    @property
    def cache_packings(self) -> tuple[CachePacking, CachePacking] | None:
        """How caches keep a key, and a value; None: as numbers of the computation's dtype."""
        return self.packings_of(0)

    def packings_of(self, layer: int) -> tuple[CachePacking, CachePacking] | None:
        return cache_packings(self.cache_bits, self.heads_of(layer).dim, self.cache_rotation)

    @property
    def packed_kind(self) -> dict[str, int | float | None] | None:
        """Bits and group of the packed matrices, None where there are none. Tables that are looked up or multiplied
        with by the head do not count, unless all the others differ: then bits are the mean per number, with scales."""
        packings = dict(self.packings)
        tensors = [tensor for group in self.weight_groups for tensor in group.tensors if tensor.packing is not None]
        inner = [each for name, each in packings.items() if name not in ("embed.tokens", "head.vocab")]
        kinds = {(each.bits, each.group or None) for each in inner or packings.values()}
        if not kinds:
            return None
        if len(kinds) == 1:
            bits, group = kinds.pop()
            return {"bits": bits, "group": group}
        nbytes, numbers = sum(each.nbytes(self.dtype) for each in tensors), sum(each.numel for each in tensors)
        return {"bits": round(8 * nbytes / numbers, 3), "group": None}

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights, without the padding of buffers."""
        return sum(group.nbytes(dtype) for group in self.weight_groups)

    def kv_bytes_per_token_and_layer(self, dtype: str, layer: int = 0) -> int:
        """Bytes of one token's key and value in a layer's cache."""
        heads, packings = self.heads_of(layer), self.packings_of(layer)
        key = heads.dim * dtype_bytes(dtype) if packings is None else packings[0].nbytes
        value = 0 if heads.joint else key if packings is None else packings[1].nbytes
        return heads.keys * (key + value)

    def computed_kv_bytes(self, dtype: str, layer: int | None = None) -> int:
        """As much, of keys and values as they are computed, before a cache packs them: of a layer, or at most."""
        heads = LayerHeads(self.num_heads, self.num_kv_heads, self.head_dim) if layer is None else self.heads_of(layer)
        return 2 * heads.keys * heads.dim * dtype_bytes(dtype)

    def attended_kv_bytes(self, dtype: str, layer: int = 0) -> int:
        """Bytes of a token in a layer's cache of `dtype` that takes as long to attend to: of a packed one, half-way
        between what is read of it and what is computed with. Kernels have to take the codes apart."""
        kept = self.kv_bytes_per_token_and_layer(dtype, layer)
        computed = kept if self.cache_packings is None else self.computed_kv_bytes(dtype, layer)
        return (kept + computed) // 2

    @property
    def hidden_width(self) -> int:
        """Numbers of one token's hidden state between two units: hidden_size, and beside it the sum that both halves of
        a parallel layer add to."""
        return self.hidden_size * (2 if self.arch.parallel else 1)

    def hidden_bytes(self, tokens: int, dtype: str) -> int:
        return tokens * self.hidden_width * dtype_bytes(dtype)

    @property
    def bridged(self) -> bool:
        return self.embed_dim != self.hidden_size

    def products(self, kind: str) -> tuple[Product, ...]:
        """The matrix products of one "embed", "attn", "mlp" or "head", in the order of computation. Where an MLP half
        has experts those that every token goes through, its "router", and those of one of its "experts".

        Projections of one input are one product, as they are where the engine lays out the buffer itself.
        """
        hidden, query, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if kind == "embed":
            return (Product(hidden, self.embed_dim),) if self.bridged else ()
        if kind == "attn":
            return Product(query + 2 * kv, hidden), Product(hidden, query)
        if kind == "mlp":
            return self._mlp_products(self.ffn_size)
        experts = self.arch.experts
        if kind == "router" and experts is not None:
            own = self._mlp_products(experts.shared_size) if experts.shared_size else ()
            gate = (Product(1, hidden),) if own and experts.shared_gate else ()
            return (Product(experts.count, hidden), *own, *gate)
        if kind == "experts" and experts is not None:
            return self._mlp_products(experts.ffn_size)
        vocab = Product(self.vocab_size, self.embed_dim)
        return (Product(self.embed_dim, hidden), vocab) if self.bridged else (vocab,)

    def _mlp_products(self, ffn: int) -> tuple[Product, Product]:
        return Product(ffn * (2 if self.arch.gated_mlp else 1), self.hidden_size), Product(self.hidden_size, ffn)

    def product_calls(self, kind: str, rows: float) -> tuple[ProductCall, ...]:
        """The products of `kind` that `rows` rows go through: of experts those of as many as they choose where each is
        as likely as another, with as many rows each."""
        experts, times = self.arch.experts, 1.0
        if kind == "experts" and experts is not None:
            times = experts.count * self.chosen_share(rows)
            rows = rows * experts.active / times if times else 0.0
        return tuple(ProductCall(product, rows, times) for product in self.products(kind))

    def chosen_share(self, tokens: float) -> float:
        """Of the experts of a layer, those that any of so many tokens chooses if all are equally likely; 1 of none."""
        experts = self.arch.experts
        return 1.0 if experts is None else 1 - (1 - experts.active / experts.count) ** tokens

    @cached_property
    def multiplied(self) -> dict[str, tuple[TensorSpec, ...]]:
        """By the kind of products, the matrices that all of them read."""
        found: dict[str, list[TensorSpec]] = {}
        looked_up = ("embed.tokens", "embed.positions")
        for unit in self.units:
            table = ("embed.tokens",) if unit.kind == "head" and self.arch.tied_head else ()
            kinds = {unit.weights: unit.products, **dict.fromkeys(unit.experts, "experts")}
            for key, kind in kinds.items():
                matrices = (each for each in self.groups_by_key[key].tensors if len(each.shape) == 2)
                own = (each for each in matrices if each.name.startswith(f"{unit.name}.") or each.name in table)
                read = (each for each in own if each.name in table or each.name not in looked_up)
                found.setdefault(kind, []).extend(read)
        return {kind: tuple(tensors) for kind, tensors in found.items()}

    @cached_property
    def packed_shares(self) -> dict[str, dict[int, float]]:
        """By the kind of products: of the numbers that they read, the share with so many bits, where they are packed,
        in the mean over all units."""
        found: dict[str, dict[int, float]] = {}
        for kind, tensors in self.multiplied.items():
            whole, numbers = sum(each.numel for each in tensors), dict[int, int]()
            for each in tensors:
                if each.packing is not None:
                    numbers[each.packing.bits] = numbers.get(each.packing.bits, 0) + each.numel
            found[kind] = {bits: count / whole for bits, count in numbers.items()}
        return found

    @property
    def expert_bits(self) -> str | None:
        """Of the weights of an expert, "16" where most are not packed; None: the model has no experts."""
        if self.arch.experts is None:
            return None
        shares = self.packed_shares["experts"]
        most = max(shares, key=lambda bits: shares[bits], default=16)
        return str(most) if shares.get(most, 0) > 0.5 else "16"

    @property
    def all_products(self) -> tuple[Product, ...]:
        """The products of all units, each shape once."""
        ends = (product for kind in ("head", "embed") for product in self.products(kind))
        return tuple(dict.fromkeys((*self.layer_products, *ends)))

    @property
    def layer_products(self) -> tuple[Product, ...]:
        """The products of each kind that layers have, attention's first."""
        kinds = [kind for kind in ("attn", "mixer", "mlp", "router", "experts") if kind in self.multiplied]
        return tuple(product for kind in kinds for product in self.products(kind))


def _embed_tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    tensors = [TensorSpec("embed.tokens", (spec.vocab_size, spec.embed_dim))]
    if spec.arch.positions == "learned":
        rows = spec.max_positions + spec.arch.position_offset
        tensors.append(TensorSpec("embed.positions", (rows, spec.hidden_size)))
    if spec.bridged:
        tensors.append(TensorSpec("embed.project_in", (spec.hidden_size, spec.embed_dim)))
    return tuple(tensors)


def _head_tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Of the output head, without the token embedding that a tied head uses."""
    tensors = [TensorSpec("head.project_out", (spec.embed_dim, spec.hidden_size))] if spec.bridged else []
    if spec.arch.final_norm:
        tensors.extend(_norm(spec, "head.norm"))
    if not spec.arch.tied_head:
        tensors.append(TensorSpec("head.vocab", (spec.vocab_size, spec.embed_dim)))
    return tuple(tensors)


def _attn_tensors(spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
    """Of a layer's attention half, named from `prefix` on."""
    arch, query, kv = spec.arch, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    widths = (("q", query), ("k", kv), ("v", kv))
    # q, k and v lie side by side, so that one view of the buffer is the fused projection.
    tensors = [TensorSpec(f"{prefix}.{name}.weight", (width, spec.hidden_size)) for name, width in widths]
    if arch.qkv_bias:
        tensors.extend(TensorSpec(f"{prefix}.{name}.bias", (width,)) for name, width in widths)
    tensors.append(TensorSpec(f"{prefix}.o.weight", (spec.hidden_size, query)))
    if arch.output_bias:
        tensors.append(TensorSpec(f"{prefix}.o.bias", (spec.hidden_size,)))
    if arch.qk_norm:
        normed = (query, kv) if arch.qk_norm_joint else (spec.head_dim, spec.head_dim)
        tensors.extend(TensorSpec(f"{prefix}.{name}_norm.weight", (n,)) for name, n in zip("qk", normed, strict=True))
    if arch.sinks:
        tensors.append(TensorSpec(f"{prefix}.sinks", (spec.num_heads,)))
    return (*_half_norms(spec, prefix), *tensors)


def _mlp_tensors(spec: ModelSpec, prefix: str, ffn: int) -> tuple[TensorSpec, ...]:
    """Of an MLP, named from `prefix` on."""
    wide = ("up", "gate") if spec.arch.gated_mlp else ("up",)
    tensors = [TensorSpec(f"{prefix}.{name}.weight", (ffn, spec.hidden_size)) for name in wide]
    tensors.append(TensorSpec(f"{prefix}.down.weight", (spec.hidden_size, ffn)))
    if spec.arch.mlp_bias:
        tensors.extend(TensorSpec(f"{prefix}.{name}.bias", (ffn,)) for name in wide)
        tensors.append(TensorSpec(f"{prefix}.down.bias", (spec.hidden_size,)))
    return tuple(tensors)


def _mixture_tensors(spec: ModelSpec, prefix: str, experts: ExpertSpec) -> tuple[TensorSpec, ...]:
    """The tensors of a layer's mixture of experts that all tokens go through: all but the experts."""
    tensors = [*_half_norms(spec, prefix), TensorSpec(f"{prefix}.router.weight", (experts.count, spec.hidden_size))]
    if experts.bias:
        tensors.append(TensorSpec(f"{prefix}.router.bias", (experts.count,)))
    if experts.choice_bias:
        tensors.append(TensorSpec(f"{prefix}.choice", (experts.count,), wide=True))
    if experts.shared_size:
        tensors.extend(_mlp_tensors(spec, prefix, experts.shared_size))
    if experts.shared_size and experts.shared_gate:
        tensors.append(TensorSpec(f"{prefix}.shared_gate.weight", (1, spec.hidden_size)))
    return tuple(tensors)


def _expert_tensors(spec: ModelSpec, prefix: str, experts: ExpertSpec) -> tuple[TensorSpec, ...]:
    if experts.clamp is None:
        return _mlp_tensors(spec, prefix, experts.ffn_size)
    hidden, ffn = spec.hidden_size, experts.ffn_size
    return (
        TensorSpec(f"{prefix}.gate_up.weight", (2 * ffn, hidden)),
        TensorSpec(f"{prefix}.gate_up.bias", (2 * ffn,)),
        TensorSpec(f"{prefix}.down.weight", (hidden, ffn)),
        TensorSpec(f"{prefix}.down.bias", (hidden,)),
    )


def _half_norms(spec: ModelSpec, prefix: str) -> tuple[TensorSpec, ...]:
    if spec.arch.post_norms and not spec.arch.pre_norm:
        return _norm(spec, f"{prefix}.post_norm")
    post = _norm(spec, f"{prefix}.post_norm") if spec.arch.post_norms else ()
    return (*_norm(spec, f"{prefix}.norm"), *post)


def _norm(spec: ModelSpec, name: str) -> tuple[TensorSpec, ...]:
    if not spec.arch.norm_affine:
        return ()
    parts = ("weight", "bias") if spec.arch.norm == "layernorm" and spec.arch.norm_bias else ("weight",)
    return tuple(TensorSpec(f"{name}.{part}", (spec.hidden_size,)) for part in parts)
