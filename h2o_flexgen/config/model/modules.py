"""The shape of a model that is computed by transformers' own modules, as a run of them on no data has shown it.

No torch. Units, caches, plans and costs are those of any other model: a layer's attention half reaches up to the end of
what attends, its MLP half is the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from h2o_flexgen.config.model.packing import groupwise
from h2o_flexgen.config.model.spec import LayerHeads, ModelSpec, Product
from h2o_flexgen.config.model.tensors import TensorSpec, WeightGroup


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


@dataclass(frozen=True)
class ModuleSpec(ModelSpec):
    """`groups`: what each weight group holds, "embed" or "vocab" first. `scales`: of each layer's attention.

    config    the config.json of the model, from which the modules are made
    matrices  the products of the first layer's halves and of the head, by the kind of unit
    starts    the module at whose call each unit but the embedding begins, in the order of units
    """

    config: str = "{}"
    groups: tuple[tuple[str, tuple[ModuleTensor, ...]], ...] = ()
    matrices: tuple[tuple[str, tuple[Product, ...]], ...] = ()
    scales: tuple[float, ...] = ()
    heads: tuple[LayerHeads, ...] = ()
    """Of each layer."""
    sources: tuple[int, ...] = ()
    """Of each layer the one whose cache it reads."""
    starts: tuple[str, ...] = ()
    joined: tuple[tuple[str, ...], ...] = ()
    """Paths of modules whose products are of the same tensor, in the order of their calls."""
    alone: str = ""
    """Why each sequence goes through the modules by itself, with the caches that they make; empty: all are packed."""

    @property
    def shares_prefixes(self) -> bool:
        """Not where caches are the modules' own."""
        return not self.alone

    @property
    def keeps_caches(self) -> bool:
        """As of any model."""
        return not self.alone

    def heads_of(self, layer: int) -> LayerHeads:
        """Those of a layer."""
        return self.heads[layer]

    def source_of(self, layer: int) -> int:
        """The layer whose cache a layer reads."""
        return self.sources[layer]

    @cached_property
    def tensors(self) -> dict[str, ModuleTensor]:
        """By canonical name."""
        return {each.name: each for _, tensors in self.groups for each in tensors}

    def plain_groups(self) -> tuple[WeightGroup, ...]:
        """The weight groups, without packings."""
        return tuple(
            WeightGroup(key, tuple(TensorSpec(each.name, each.shape) for each in tensors))
            for key, tensors in self.groups
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
        """A half's input, and beside it the sum that it is added to, which both are alive between two units."""
        return 2 * self.hidden_size

    def products(self, kind: str) -> tuple[Product, ...]:
        """The products of one kind of unit, those of the first layer for all."""
        return dict(self.matrices).get(kind, ())
