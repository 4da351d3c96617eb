"""The shape of a model that is computed by transformers' own modules, as a run of them on no data has shown it.

No torch. Caches, plans and costs are the same as of any other model. A layer holds something of each row: keys and
values, states, or both. Its first half reaches up to the end of its attention or mixer; modules that follow, up to the
next layer, are halves without either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from h2o_flexgen.config.model.packing import groupwise
from h2o_flexgen.config.model.spec import ModelSpec, Product, ProductCall
from h2o_flexgen.config.model.tensors import LayerHeads, StateSpec, TensorSpec, WeightGroup


class ModuleTensor(NamedTuple):
    """A canonical tensor's place among the modules.

    name        canonical
    parameter   transformers' name of the parameter or buffer
    product     whether it is the matrix of a product, which may be kept in fewer bits
    transposed  whether the modules keep it the other way round (GPT-2's Conv1D)
    resident    whether it is used outside of a single unit: it is copied when the embedding is computed
    also        other names of the parameter, in the same unit
    expert      the number of the expert that it is a part of, which `parameter` has for all: its rows from `start` on,
                of as many as `rows`
    tied        its names elsewhere, in other units
    piece       what the modules would call it if it were a tensor of its own, which it is in checkpoints: here it is
                rows of `parameter`
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    product: bool = False
    transposed: bool = False
    resident: bool = False
    expert: int | None = None
    start: int = 0
    rows: int = 0
    also: tuple[str, ...] = ()
    piece: str = ""
    tied: tuple[str, ...] = ()


class LayerSpec(NamedTuple):
    """The attention and states of a layer: `number`, by which modules know it in their cache; its heads of attention,
    and `scale`, the factor of logits, None where it does not attend; its states; and the layer whose keys it reads,
    itself but where it has none of its own."""

    number: int
    heads: LayerHeads
    scale: float | None
    states: tuple[StateSpec, ...]
    source: int


class HalfSpec(NamedTuple):
    """A unit of a layer: `mixer` where that is what the first half does instead of attending."""

    kind: Literal["attn", "mlp"]
    layer: int
    products: Literal["attn", "mixer", "mlp", "router"]


class Activations(NamedTuple):
    """Numbers that modules have alive, of each token, in 16 bits: of what is always in float32 each counts as two.

    held       between two units, and while experts are computed
    working    the most within a unit, beside these, and without what attention itself takes
    attending  as it begins to attend, beside what was there when the unit began
    head       of each row that wants logits, while these are computed
    mixing     of each token beside `working` while states are computed, and besides however many these are, where
               kernels of ours compute recurrences
    in_torch   the same where torch does
    """

    held: int = 0
    working: int = 0
    attending: int = 0
    head: int = 0
    mixing: tuple[int, int] = (0, 0)
    in_torch: tuple[int, int] = (0, 0)


NOTHING = Activations()
Matrices = tuple[tuple[str, tuple[tuple[Product, float], ...]], ...]
"""By the kind of units, products, and how many of each a unit has in the mean."""


@dataclass(frozen=True)
class ModuleSpec(ModelSpec):
    """A model computed by transformers' modules. `groups`: the tensors of each weight group, "embed" or "vocab" first.

    config    the config.json of the model, from which the modules are made
    layers    the attention and states of each
    halves    the units between the embedding and the head
    matrices  the products of the units of each kind
    starts    the module at whose call each unit but the embedding begins, in the order of units: the next call of it
    """

    config: str = "{}"
    groups: tuple[tuple[str, tuple[ModuleTensor, ...]], ...] = ()
    layers: tuple[LayerSpec, ...] = ()
    halves: tuple[HalfSpec, ...] = ()
    matrices: Matrices = ()
    starts: tuple[str, ...] = ()
    joined: tuple[tuple[str, ...], ...] = ()
    """Paths of modules whose products are of the same tensor, in the order of their calls."""
    alone: str = ""
    """Why each sequence goes through the modules by itself, with the caches that they make; empty: all are packed."""
    activations: Activations = NOTHING

    @property
    def keeps_caches(self) -> bool:
        return not self.alone

    def heads_of(self, layer: int) -> LayerHeads:
        """The heads of a layer; where it does not attend, the largest of all."""
        return self.layers[layer].heads

    def attends(self, layer: int) -> bool:
        return self.layers[layer].scale is not None

    def states_of(self, layer: int) -> tuple[StateSpec, ...]:
        return self.layers[layer].states

    def _halves(self) -> Iterator[tuple[str, Literal["attn", "mlp"], int, int, str]]:
        """The halves of the layers."""
        for (kind, layer, products), name in zip(self.halves, half_names(self.halves), strict=True):
            if layer < self.num_layers:
                count = 0 if products != "router" or self.arch.experts is None else self.arch.experts.count
                yield name, kind, layer, count, products

    def source_of(self, layer: int) -> int:
        """The layer whose cache a layer reads."""
        return self.layers[layer].source

    @cached_property
    def tensors(self) -> dict[str, ModuleTensor]:
        """By canonical name."""
        return {each.name: each for _, tensors in self.groups for each in tensors}

    def plain_groups(self) -> tuple[WeightGroup, ...]:
        """The weight groups of the units, without packings."""
        used = {key for unit in self.units for key in (unit.weights, *unit.experts)}
        return tuple(
            WeightGroup(key, tuple(TensorSpec(each.name, each.shape) for each in tensors))
            for key, tensors in self.groups
            if key in used
        )

    def with_bits(self, bits: int, group: int) -> ModuleSpec:
        """As of any model: matrices of products are packed, the head and a tied table in 8 bits at least."""
        packings, packed = list(self.packings), dict(self.packings)
        for each in self.tensors.values():
            table = each.name == "head.vocab" or (each.name == "embed.tokens" and self.arch.tied_head)
            if (each.product or table) and each.shape[0] > 1 and not each.shape[1] % 2 and each.name not in packed:
                packings.append((each.name, groupwise(8 if table else bits, group)))
        return replace(self, packings=tuple(packings))

    @property
    def hidden_width(self) -> int:
        """Numbers of a token held between units: at least a half's input, and the sum that its output is added to."""
        return max(2 * self.hidden_size, self.activations.held)

    def products(self, kind: str) -> tuple[Product, ...]:
        """The products of one kind of unit: all that any unit of the kind has."""
        return tuple(product for product, _ in dict(self.matrices).get(kind, ()))

    def product_calls(self, kind: str, rows: float) -> tuple[ProductCall, ...]:
        """As of any model; units of a kind may differ, and have the mean of all."""
        if kind == "experts":
            return super().product_calls(kind, rows)
        return tuple(ProductCall(product, rows, times) for product, times in dict(self.matrices).get(kind, ()))


def half_names(halves: tuple[HalfSpec, ...]) -> list[str]:
    """The names of these units, which their weight groups have, too. Of several behind one first half, the second is
    called "mlp2", and so on."""
    names, seen = list[str](), dict[tuple[str, int], int]()
    for kind, layer, _ in halves:
        count = seen[kind, layer] = seen.get((kind, layer), 0) + 1
        names.append(f"layers.{layer}.{kind}{'' if count == 1 else count}")
    return names
