"""Which rows of which stored tensors a model's tensors are, and where their bytes lie in the files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from h2o_flexgen.checkpoint.files import CheckpointFile
from h2o_flexgen.checkpoint.tables import Entry
from h2o_flexgen.models.stored import Stored

if TYPE_CHECKING:
    from h2o_flexgen.config.model.spec import ModelSpec

Span = tuple[int, int]
"""[start, stop)"""


class Part(NamedTuple):
    """A canonical tensor in a file: the bytes of its `runs`, one after another, are its rows, row-major.

    runs    [start, stop) bytes of the file, in the order of the rows; none follows the one before it without a gap
    dtype   torch's word, one of WEIGHT_DTYPES
    """

    file: CheckpointFile
    runs: tuple[Span, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.runs)


def part_of(entry: Entry, stored: Stored, shape: tuple[int, ...]) -> Part:
    """The tensor of `shape` that is the rows of `entry` that `stored` names; the shape of `entry` has been checked."""
    if stored.spans is None:
        return Part(entry.file, ((entry.offset, entry.offset + entry.nbytes),), entry.dtype, shape)
    row = entry.nbytes // stored.rows
    runs = ((entry.offset + start * row, entry.offset + stop * row) for start, stop in merged(stored.spans))
    return Part(entry.file, tuple(runs), entry.dtype, shape)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same rows in the same order, with spans that follow one another as one, and without empty ones."""
    found: list[Span] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found


class Wanted:
    """What the model of a spec needs of stored tensors, by canonical and by stored names.

    options   canonical name -> where it may be, the usual place first
    users     name of a stored tensor -> canonical name -> the rows of it that this is
    shapes    canonical name -> shape
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

    def shape(self, stored: str) -> tuple[int, ...]:
        """The shape that tensor `stored` of a checkpoint must have."""
        name, option = next(iter(self.users[stored].items()))
        return self._shape_for(name, option)

    def unused(self, stored: str) -> list[Span]:
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

    def numel(self, name: str) -> int:
        """Numbers in the canonical tensor `name`."""
        return math.prod(self.shapes[name])

    def _shape_for(self, name: str, option: Stored) -> tuple[int, ...]:
        shape = self.shapes[name]
        return shape if option.spans is None else (option.rows, *shape[1:])

    def _check_rows(self, name: str, option: Stored) -> None:
        if option.spans is None:
            return
        if not all(0 <= start <= stop <= option.rows for start, stop in option.spans):
            raise ValueError(f"{name}: rows {option.spans} do not lie within the {option.rows} of {option.name!r}")
        held = sum(stop - start for start, stop in option.spans)
        if held != self.shapes[name][0]:
            raise ValueError(f"{name} has {self.shapes[name][0]} rows, the spans of {option.name!r} hold {held}")
