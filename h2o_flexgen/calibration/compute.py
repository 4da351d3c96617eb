"""Rates of the operations of a compute device: products at the shapes of a model and with packed weights, experts of a
mixture, reading memory, norms and activations, first writes to new memory, and choosing tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.calibration.timing import sample_of
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.rates import Curve, GemmShape
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.packing import Packing, groupwise
from h2o_flexgen.config.model.spec import ModelSpec, Product
from h2o_flexgen.config.model.tensors import WeightGroup
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.reader import RequestReader
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.sampling.sampler import Sampler
from h2o_flexgen.errors import required
from h2o_flexgen.kernels.experts import Choices
from h2o_flexgen.kernels.layers import ACTIVATIONS, gated, layer_norm, linear, rms_norm
from h2o_flexgen.kernels.packed import PackedWeight, Weight
from h2o_flexgen.memory.handle import packed_layout, views
from h2o_flexgen.memory.tiers import Allocation, HostMemory
from h2o_flexgen.models.decoder import Decoder, bind
from h2o_flexgen.units import MIB

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Rows of x, up to the usual chunk of prompts."""
EXPERT_ROWS, _SURE_EXPERT_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256), 8
"""Tokens of each expert."""
_HEAD_ROWS = 256  # the output head sees one token per sequence
_SURE_ROWS = 16
_ROWS_BESIDE = 64  # of the product that contends with the links
_FIXED = 10.0  # an activation leaves it about as it is, so that working in place changes nothing from call to call
_PIECE, _PIECES = 32 * MIB, 16  # of new memory
_PROMPT, _SAMPLED_ROWS = 4, 64
_NARROW = 64  # a vocabulary that takes no time
_LEAST = 1e-7


def _product_call(
    bench: Bench, product: Product, rows: int, *, biased: bool = False, wide: bool = False
) -> Callable[[], object]:
    """One product as the decoder does it, `wide`: as its logits; each call takes the next weight of the arena."""
    weights = bench.matrices(product.out_features, product.in_features)
    x = bench.noise(rows, product.in_features)
    bias = bench.noise(product.out_features) if biased else None
    return lambda: linear(x, next(weights), bias, wide=wide)


def _fitting(bench: Bench, product: Product) -> Product:
    """The product, or as large a part of its rows as the arena holds: time goes by these."""
    parts = -(-product.out_features * product.in_features * bench.itemsize // len(bench.arena))
    return product._replace(out_features=-(-product.out_features // parts))


def contending_product(bench: Bench) -> Callable[[], object]:
    """A call of the largest product of a layer, which is done while links are busy."""
    largest = max(bench.spec.layer_products, key=lambda each: each.out_features * each.in_features)
    return _product_call(bench, _fitting(bench, largest), _ROWS_BESIDE)


@torch.inference_mode()
def product_shapes(bench: Bench, seconds: float) -> tuple[GemmShape, ...]:
    """Every shape of the model over the number of rows."""
    spec = bench.spec
    shapes = spec.all_products
    budget = bench.timer.budget(seconds, dict.fromkeys(shapes, 1.0))
    head = spec.products("head")
    found = []
    for shape in shapes:
        part = _fitting(bench, shape)
        most = _HEAD_ROWS if shape in head else bench.chunk
        biased = shape not in head and spec.arch.mlp_bias  # of most models all projections have a bias, or none
        call = partial(_product_call, bench, part, biased=biased, wide=shape == head[-1])
        counts, scale = tuple(rows for rows in ROWS if rows <= most), shape.out_features / part.out_features
        curve = _over_rows(bench, "products", counts, call, budget.take(shape), _SURE_ROWS, scale)
        found.append(GemmShape(shape.out_features, shape.in_features, curve))
    return tuple(found)


def _over_rows(
    bench: Bench,
    figure: str,
    counts: tuple[int, ...],
    make: Callable[[int], Callable[[], object]],
    seconds: float,
    sure: int,
    scale: float,
) -> Curve:
    """`scale` times the seconds of the call that `make` gives for so many rows, over `counts` of them: up to `sure`
    however long it takes, and more while there is time; from there on the rate stays."""
    # The time a call takes grows with its rows, but a few repetitions of fast ones are soon done.
    budget = bench.timer.budget(seconds, {rows: 1.0 + rows / (8 * sure) for rows in counts})
    points: list[tuple[int, float]] = []
    for rows in counts:
        share = budget.take(rows)
        if rows > sure:
            before, lasted = points[-1]
            if 2 * lasted * rows / before > max(share, seconds - budget.elapsed):
                break
        points.append((rows, bench.measure(figure, make(rows), share).seconds))
    return Curve(tuple((rows, lasted * scale) for rows, lasted in points))


@torch.inference_mode()
def expert_curves(bench: Bench, packed: ModelSpec, seconds: float) -> dict[str, Curve]:
    """Seconds of one expert with its tokens gathered and its results added up, over its tokens, as many as there is
    time for, by the bits of its weights (`ModelSpec.expert_bits`): in the dtype, and as `packed` has them. Empty for a
    model without experts.

    Of a layer's experts as many as the arena holds are computed in one call, all for the same number of tokens.
    """
    specs = {spec.expert_bits: spec for spec in (bench.spec, packed) if spec.expert_bits is not None}
    found: dict[str, Curve] = {}
    decoder = _expert_decoder(bench)
    for index, (bits, spec) in enumerate(specs.items()):
        weights = _experts(bench, next(spec.groups_by_key[unit.experts[0]] for unit in spec.units if unit.experts))
        call, share = partial(_expert_call, bench, decoder, weights), seconds / len(specs)
        found[bits] = _over_rows(bench, "experts", EXPERT_ROWS, call, share, _SURE_EXPERT_ROWS, 1 / len(weights))
        if index:
            bench.refill()
    return found


def _experts(bench: Bench, group: WeightGroup) -> list[Mapping[str, Any]]:
    """The experts of one layer, side by side in the arena as they are in the engine."""
    layout = packed_layout(group, str(bench.dtype).removeprefix("torch."))
    experts = required(bench.spec.arch.experts, f"{bench.spec.name} has no experts")
    found: list[Mapping[str, Any]] = []
    for place in bench.places(layout.nbytes, experts.count):
        tensors = views(layout, place)
        for weight in tensors.values():
            if isinstance(weight, PackedWeight):
                fill_scales(weight)
        found.append(bind(tensors))
    return found


def _expert_decoder(bench: Bench) -> Decoder:
    """Of modules whose experts are of a kind of their own, the decoder that calls them."""
    spec, experts = bench.spec, bench.spec.arch.experts
    if not isinstance(spec, ModuleSpec) or experts is None or not experts.own:
        return Decoder(spec)
    from h2o_flexgen.models.hf.decoder import ModuleDecoder  # imports transformers

    return ModuleDecoder(spec, bench.dtype, bench.device)


def _expert_call(bench: Bench, decoder: Decoder, weights: list[Mapping[str, Any]], rows: int) -> Callable[[], object]:
    """All `weights` for `rows` tokens each, which are not those of the expert before."""
    count = len(weights)
    total = max(count, rows)
    x = bench.noise(total, bench.spec.hidden_size)
    tokens = (torch.arange(rows) * (total // rows) + torch.arange(count).unsqueeze(1)) % total
    tokens = tokens.sort(1).values.flatten().to(bench.device)
    shares = torch.ones(count * rows, device=bench.device)
    choices = Choices(tokens, shares, list(range(count)), [rows * i for i in range(count + 1)])
    out = torch.zeros_like(x)
    return lambda: decoder.add_experts(x, out, choices, range(count), weights, bench.chunk)


def general_rate(shapes: tuple[GemmShape, ...], layers: tuple[Product, ...]) -> Curve:
    """FLOP/s over rows of the products in `layers` together: for shapes that were not measured."""
    wanted = [shape for shape in shapes if (shape.out_features, shape.in_features) in layers]
    flops_per_row = sum(2 * shape.out_features * shape.in_features for shape in wanted)
    rows = sorted({rows for shape in wanted for rows, _ in shape.seconds.points})
    return Curve(tuple((n, n * flops_per_row / sum(shape.seconds.time_at(n) for shape in wanted)) for n in rows))


@torch.inference_mode()
def fastest_read(bench: Bench, shapes: tuple[GemmShape, ...], seconds: float) -> float:
    """Bytes per second that no product exceeds: of summing up the arena, or of a product that is even faster."""
    numbers = bench.arena.view(torch.float32)
    plain = numbers.nbytes / bench.measure("memory", numbers.sum, seconds).seconds
    by_products = [
        shape.out_features * shape.in_features * bench.itemsize / min(seconds for _, seconds in shape.seconds.points)
        for shape in shapes
    ]
    return max(plain, *by_products)


@torch.inference_mode()
def elementwise_rate(bench: Bench, seconds: float) -> float:
    """Bytes per second, read and written together, of one layer's two norms, two residuals and activation.

    Bytes are counted as `cost.compute` counts them.
    """
    spec, arch, size = bench.spec, bench.spec.arch, bench.itemsize
    width, ffn = spec.hidden_size, spec.ffn_size
    tokens = max(1, min(bench.chunk, len(bench.arena) // (2 * ffn * size)))
    hidden, inner = bench.noise(tokens, width), bench.noise(tokens, width)
    weight, bias = bench.noise(width), bench.noise(width)
    wide = torch.full((tokens, ffn * (2 if arch.gated_mlp else 1)), _FIXED, dtype=bench.dtype, device=bench.device)
    if arch.gated_mlp:
        wide[:, :ffn] = 1.0
    activation = ACTIVATIONS[arch.activation]

    def norm() -> Tensor:
        if arch.norm == "rmsnorm":
            return rms_norm(hidden, weight, arch.norm_eps, arch.norm_offset)
        return layer_norm(hidden, weight, bias, arch.norm_eps)

    def layer() -> None:
        for _ in range(2):
            norm()
            hidden.add_(inner)
        if arch.gated_mlp:
            up, gate = wide.chunk(2, dim=-1)
            gated(gate, up, arch.activation)
        else:
            activation(wide)

    norm_bytes = 2 * size
    if arch.norm == "rmsnorm" and bench.name == "cpu":
        norm_bytes = 20 if size == 4 else 20 + 4 * size
    nbytes = 2 * tokens * width * (norm_bytes + 3 * size) + tokens * ffn * size * (5 if arch.gated_mlp else 2)
    return nbytes / bench.measure("elementwise", layer, seconds).seconds


def fresh_rate(bench: Bench, seconds: float) -> float | None:
    """Bytes per second by which the first write to new host memory takes longer than the second; None for no longer.

    All memory is kept until the end: the system would hand out again the pages that it has just got back.
    """
    source = bench.noise(min(_PIECE, len(bench.arena)) // bench.itemsize)
    memory, pieces = HostMemory(), list[Allocation]()
    first: list[float] = []
    again: list[float] = []
    start = bench.timer.clock()
    try:
        while len(pieces) < _PIECES and (not pieces or bench.timer.clock() - start < seconds):
            pieces.append(memory.allocate(source.nbytes))
            piece = pieces[-1].tensor.view(bench.dtype)
            for taken in (first, again):
                taken.append(bench.timer.once(lambda piece=piece: piece.copy_(source)))  # type: ignore[misc]
    finally:
        for allocation in pieces:
            allocation.free()
    longer = bench.spreads.note(f"{bench.name} fresh memory", sample_of(first)).seconds - sample_of(again).seconds
    return source.nbytes / longer if longer > 0 else None


@torch.inference_mode()
def sample_seconds(bench: Bench, seconds: float, elementwise: float) -> float:
    """Of choosing one row's token greedily, `sample_s` of ComputeRates.

    elementwise: bytes per second; looking once through a row's logits at that rate is not included.
    """
    one, many = (_choosing(bench, _NARROW, rows, seconds * 0.2) for rows in (1, _SAMPLED_ROWS))
    wide = _choosing(bench, bench.spec.vocab_size, _SAMPLED_ROWS, seconds * 0.6) / _SAMPLED_ROWS
    looked_through = 4 * bench.spec.vocab_size / elementwise
    return max(_LEAST, (many - one) / (_SAMPLED_ROWS - 1), wide - looked_through)


def greedy_sequences(spec: ModelSpec, eviction: EvictionConfig, rows: int, lengths: tuple[int, int]) -> list[Sequence]:
    """Rows that no token ends; `lengths`: tokens of the prompt, all alike, and new ones."""
    prompt, new = lengths
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return RequestReader(spec, eviction, None, 0).read([[0] * prompt] * rows, params)


def _choosing(bench: Bench, vocabulary: int, rows: int, seconds: float) -> float:
    """Seconds of the sampler's step over so many rows that are never done."""
    spec = replace(bench.spec, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, pad_token_id=None)
    sequences = greedy_sequences(replace(spec, max_positions=1 << 40), EvictionConfig(), rows, (_PROMPT, 1 << 30))
    logits = bench.noise(rows, vocabulary).float()
    sampler = Sampler()
    return bench.measure("sampling", lambda: sampler.step(sequences, logits), seconds).seconds


PACKED_ROWS = (1, 4, 8, 16, 32, 64, 128, 512, 1024)
_MOST = 16 << 20  # numbers of the weight: where products of packed weights are slow, they are very slow
_FRACTION, _WHOLE, _EXPONENT = 0.01, 4, 120  # scales and lows as floats, signed and unsigned whole numbers


def usual_packings(spec: ModelSpec) -> dict[str, Packing]:
    """By bits, the packing that most matrices of `spec` with so many have; where none has, as weights are packed while
    they are loaded."""
    counts = Counter(packing for _, packing in spec.packings)
    found = {str(bits): groupwise(bits, 64) for bits in (8, 4)}
    return found | {str(packing.bits): packing for packing, _ in reversed(counts.most_common())}


@torch.inference_mode()
def packed_factors(bench: Bench, packings: Mapping[str, Packing], seconds: float) -> dict[str, Curve]:
    """How many times as long a product takes with a packed weight as with one in the dtype, over its rows, by the keys
    of `packings`; as many rows as there is time for.

    Of the largest product of a layer, or a part of its outputs: such factors hardly depend on the shape. Scales are
    written to the arena, which holds small numbers again afterwards.
    """
    product = _part(bench)
    budget = bench.timer.budget(seconds, {rows: 1.0 + rows / 128 for rows in PACKED_ROWS})
    factors: dict[str, list[tuple[float, float]]] = {key: [] for key in packings}
    weights = {key: _weights(bench, packing, product) for key, packing in packings.items()}
    plain, once = bench.matrices(product.out_features, product.in_features), 0.0  # seconds of a row, of all products
    for rows in PACKED_ROWS:
        share = budget.take(rows) / (1 + len(packings))
        if 3 * once * rows > max(share, seconds - budget.elapsed):
            break
        x = bench.noise(rows, product.in_features)
        alone = bench.measure("packed products", partial(_multiply, x, plain), share).seconds
        took = {
            key: bench.measure("packed products", partial(_multiply, x, w), share).seconds for key, w in weights.items()
        }
        for key, lasted in took.items():
            factors[key].append((rows, lasted / alone))
        once = (alone + sum(took.values())) / rows
    bench.refill()
    return {key: Curve(tuple(points)) for key, points in factors.items()}


def _multiply(x: Tensor, weights: Iterator[Weight]) -> object:
    return linear(x, next(weights))


def _part(bench: Bench) -> Product:
    """The largest product of a layer, cut to what the arena and patience allow, with an even number of inputs."""
    largest = max(bench.spec.layer_products, key=lambda each: each.out_features * each.in_features)
    ins = largest.in_features - largest.in_features % 2
    most = min(_MOST, len(bench.arena) // bench.itemsize)
    return Product(max(1, min(largest.out_features, most // ins)), ins)


def _weights(bench: Bench, packing: Packing, product: Product) -> Iterator[PackedWeight]:
    """Packed matrices without end, one place of the arena after the other: any codes, and scales that are numbers."""
    found = []
    for place in bench.places(packing.nbytes(product)):
        weight = PackedWeight.over(packing, product, place, bench.dtype)
        fill_scales(weight)
        found.append(weight)
    return cycle(found)


def fill_scales(weight: PackedWeight) -> None:
    """Writes scales and lows that are numbers, and an order of the inputs, whatever is in their place."""
    for name, part in weight.parts.items():
        if name == "order":
            part.copy_(torch.randperm(part.numel()))
        elif name != "codes":
            whole = _EXPONENT if part.dtype is torch.uint8 else _WHOLE
            part.fill_(_FRACTION if part.is_floating_point() else whole)
