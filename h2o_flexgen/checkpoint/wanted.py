"""The stored tensors that a model needs: by its own names, and by those that a checkpoint may have for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.stored import Stored

Range = tuple[int, int]
"""[start, stop)"""

LAYER = re.compile(r"((?:.*\.)?layers\.)(\d{1,6})\.")
"""The name of a layer's tensor: the part before the layer's number, and the number."""


class Wanted:
    """The stored tensors that the model of a spec needs, by canonical and by stored names.

    options   canonical name -> where it may be, the usual place first
    users     name of a stored tensor -> canonical name -> the rows of it that this is
    shapes    canonical name -> shape
    stems     what comes before the numbers of layers in stored names
    layers    how many of these there are: more than the model's where some hold nothing of a sequence
    """

    def __init__(self, spec: ModelSpec, names: Mapping[str, Sequence[str | Stored]]) -> None:
        """ValueError where the rows that `names` gives cannot make up the tensors of `spec`."""
        self.shapes = {tensor.name: tuple(tensor.shape) for group in spec.weight_groups for tensor in group.tensors}
        self.options: dict[str, tuple[Stored, ...]] = {
            name: tuple(Stored(option) if isinstance(option, str) else option for option in names[name])
            for name in self.shapes
        }
        self.users: dict[str, dict[str, Stored]] = {}
        for name, options in self.options.items():
            for option in options:
                users = self.users.setdefault(option.name, {})
                if users.setdefault(name, option) != option:
                    raise ValueError(f"{name} is two different selections of rows of {option.name!r}")
                self._check_rows(name, option)
                if self._shape_for(name, option) != self.shape(option.name):
                    other = next(iter(users))
                    raise ValueError(f"{other} and {name} want {option.name!r} in two shapes")
        numbered = [found for found in map(LAYER.match, self.users) if found]
        self.stems = {found[1] for found in numbered}
        self.layers = max([spec.num_layers, *(int(found[2]) + 1 for found in numbered)])

    def shape(self, stored: str) -> tuple[int, ...]:
        """The shape that tensor `stored` of a checkpoint must have."""
        name, option = next(iter(self.users[stored].items()))
        return self._shape_for(name, option)

    def unused(self, stored: str) -> list[Range]:
        """Rows of tensor `stored` that belong to no tensor of the model, in order."""
        options = self.users[stored].values()
        if any(option.spans is None for option in options):
            return []
        free, end = [], 0
        for start, stop in sorted(span for option in options for span in option.spans or ()):
            if start > end:
                free.append((end, start))
            end = max(end, stop)
        rows = next(iter(options)).rows
        return [*free, (end, rows)] if end < rows else free

    def _shape_for(self, name: str, option: Stored) -> tuple[int, ...]:
        shape = self.shapes[name]
        return option.shape or (shape if option.spans is None else (option.rows, *shape[1:]))

    def _check_rows(self, name: str, option: Stored) -> None:
        if option.spans is None:
            return
        if not all(0 <= start <= stop <= option.rows for start, stop in option.spans):
            raise ValueError(f"{name}: rows {option.spans} do not lie within the {option.rows} of {option.name!r}")
        held = sum(stop - start for start, stop in option.spans)
        needed = self.shapes[name][1 if option.transposed else 0]
        if held != needed:
            raise ValueError(f"{name} has {needed} rows, the spans of {option.name!r} hold {held}")
