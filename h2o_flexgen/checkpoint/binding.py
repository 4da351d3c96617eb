"""Matches what weight files hold with what a model needs: which rows of which stored tensors, and their bytes."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from h2o_flexgen.checkpoint.files import CheckpointFile, Problems
from h2o_flexgen.checkpoint.shards import Shards
from h2o_flexgen.checkpoint.source import WEIGHT_DTYPES
from h2o_flexgen.checkpoint.tables import Entry
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.stored import Stored

log = logging.getLogger(__name__)

_TIED_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDING = "embed.tokens"

_QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_shape|weight_g_idx|weight_zero_point|weight_scale(_inv|_2)?"
    r"|(input|output|k|v)_scale|absmax|nested_absmax|quant_map|nested_quant_map|quant_state\.\w+|SCB|weight_format)$"
)
"""What GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes store beside or instead of weights."""

Tables = Mapping[str, Mapping[str, Entry]]
"""Shard name -> tensor name -> where it is."""


Range = tuple[int, int]
"""[start, stop)"""


class FileTensor(NamedTuple):
    """A canonical tensor in a file: the bytes of its `runs`, one after another, are its rows, row-major.

    runs    [start, stop) bytes of the file, in the order of the rows; none follows the one before it without a gap
    dtype   torch's word, one of WEIGHT_DTYPES
    """

    file: CheckpointFile
    runs: tuple[Range, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.runs)


def tensor_in(entry: Entry, stored: Stored, shape: tuple[int, ...]) -> FileTensor:
    """The tensor of `shape` that is the rows of `entry` that `stored` names; the shape of `entry` has been checked."""
    if stored.spans is None:
        return FileTensor(entry.file, ((entry.offset, entry.offset + entry.nbytes),), entry.dtype, shape)
    row = entry.nbytes // stored.rows
    runs = ((entry.offset + start * row, entry.offset + stop * row) for start, stop in merged(stored.spans))
    return FileTensor(entry.file, tuple(runs), entry.dtype, shape)


def merged(spans: Iterable[Range]) -> list[Range]:
    """The same rows in the same order, with spans that follow one another as one, and without empty ones."""
    found: list[Range] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found


class Binding:
    """What the model of `spec` needs, to be compared with the tables of its files; notes every difference.

    `tied_copy`: the output head that a tied model's checkpoint holds besides its token embedding, once bound.
    """

    def __init__(
        self,
        spec: ModelSpec,
        names: Mapping[str, Sequence[str | Stored]],
        ignored: tuple[re.Pattern[str], ...],
        problems: Problems,
    ) -> None:
        self._wanted = Wanted(spec, names)
        self._ignored = ignored
        self._tied_heads = {name: Stored(name) for name in _TIED_HEADS if spec.arch.tied_head}
        self._vocab_shape = (spec.vocab_size, spec.embed_dim)
        self.problems = problems
        self.tied_copy: tuple[str, FileTensor] | None = None

    def least_bytes(self, shards: Shards, shard: str) -> int:
        """What the weights that `shard` should hold take in 16 bits."""
        index = shards.index
        held = (
            name
            for name, options in self._wanted.options.items()
            if index is None or any(index.get(option.name) == shard for option in options)
        )
        return 2 * sum(self._wanted.numel(name) for name in held)

    def bind(self, shards: Shards, tables: Tables) -> dict[str, FileTensor]:
        """Canonical name -> where its bytes are, for all tensors that are fine."""
        where: dict[str, list[str]] = {}
        for shard, table in tables.items():
            for stored in table:
                where.setdefault(stored, []).append(shard)
        self._check_index(shards, tables, where)
        quantised = {stored: None for stored in where if self._is_quantised(stored)}
        self._note_quantised(list(quantised))
        found: dict[str, str] = {}
        tensors: dict[str, FileTensor] = {}
        for stored, holders in where.items():
            if self._is_ignored(stored) or stored in quantised:
                continue
            if len(holders) > 1:
                self.problems.add(f"tensor {stored!r} is in {' and in '.join(holders)}")
            entry = tables[holders[0]][stored]
            if stored in self._wanted.users:
                self._claim(stored, entry, found, tensors)
            elif stored in self._tied_heads:
                self._bind_tied(stored, entry)
            else:
                self.problems.add(f"tensor {stored!r} of {holders[0]} is not part of this model")
        self._settle_tied(found, tensors)
        if quantised:
            return tensors  # what is missing is there in another form, which has been reported
        if len(tables) == len(shards.files):
            self._check_missing(found)
        elif shards.index is not None:
            lost = {stored for stored, shard in shards.index.items() if shard not in tables}
            self._check_missing(found, lost)
        return tensors

    def _claim(self, stored: str, entry: Entry, found: dict[str, str], tensors: dict[str, FileTensor]) -> None:
        """Give tensor `stored` to the canonical tensors that it holds. `found`: canonical name -> stored name."""
        fine = self._check_tensor(stored, self._wanted.shape(stored), entry)
        unused = ", ".join(f"{start} to {stop - 1}" for start, stop in self._wanted.unused(stored))
        if fine and unused:
            self.problems.add(f"tensor {stored!r}: rows {unused} are not part of this model")
        doubled: dict[str, list[str]] = {}
        for name, option in self._wanted.users[stored].items():
            if name in found:
                doubled.setdefault(found[name], []).append(name)
                continue
            found[name] = stored
            if fine:
                tensors[name] = tensor_in(entry, option, self._wanted.shapes[name])
        for other, names in doubled.items():
            self.problems.add(f"tensors {other!r} and {stored!r} are both {', '.join(names)}")

    def _bind_tied(self, stored: str, entry: Entry) -> None:
        if self._check_tensor(stored, self._vocab_shape, entry):
            self.tied_copy = (stored, tensor_in(entry, self._tied_heads[stored], self._vocab_shape))

    def _settle_tied(self, found: dict[str, str], tensors: dict[str, FileTensor]) -> None:
        """Of a tied pair either one may be in a checkpoint, or both."""
        if self.tied_copy is None:
            return
        stored, tensor = self.tied_copy
        if _EMBEDDING not in found:
            found[_EMBEDDING], tensors[_EMBEDDING] = stored, tensor
            self.tied_copy = None
            log.info("the token embedding is read from %s, to which it is tied", stored)
        else:
            log.info("%s is not read: the model's head is its token embedding", stored)

    def _is_known(self, stored: str) -> bool:
        return stored in self._wanted.users or stored in self._tied_heads

    def _is_ignored(self, stored: str) -> bool:
        return not self._is_known(stored) and any(pattern.search(stored) for pattern in self._ignored)

    def _is_quantised(self, stored: str) -> bool:
        return not self._is_known(stored) and not self._is_ignored(stored) and bool(_QUANTISED.search(stored))

    def _note_quantised(self, stored: Sequence[str]) -> None:
        if stored:
            more = f" and {len(stored) - 1} more are" if len(stored) > 1 else " is"
            self.problems.add(
                f"tensor {stored[0]!r}{more} of quantised weights, which are not read: "
                f"use the model's checkpoint in {', '.join(WEIGHT_DTYPES)}"
            )

    def _check_index(self, shards: Shards, tables: Tables, where: Mapping[str, list[str]]) -> None:
        if shards.index is None:
            return
        for stored, shard in shards.index.items():
            if shard in tables and stored not in tables[shard]:
                self.problems.add(f"tensor {stored!r} is not in {shard}, where the index has it", download=True)
        for stored, holders in where.items():
            if stored not in shards.index and not self._is_ignored(stored):
                self.problems.add(f"tensor {stored!r} of {holders[0]} is not in the index", download=True)

    def _check_tensor(self, stored: str, shape: tuple[int, ...], entry: Entry) -> bool:
        """Whether the tensor has `shape` and a dtype that can be read; a problem for each that is not so."""
        if entry.shape != shape:
            self.problems.add(f"tensor {stored!r}: expected shape {shape} from config.json, found {entry.shape}")
        if entry.dtype not in WEIGHT_DTYPES:
            self.problems.add(f"tensor {stored!r}: expected dtype {', '.join(WEIGHT_DTYPES)}, found {entry.dtype}")
        return entry.shape == shape and entry.dtype in WEIGHT_DTYPES

    def _check_missing(self, found: Mapping[str, str], excused: Iterable[str] = ()) -> None:
        """Note what is missing, but for tensors that a file already reported would hold."""
        missing: dict[str, list[str]] = {}
        excused = set(excused)
        for name, options in self._wanted.options.items():
            if name not in found and not excused.intersection(option.name for option in options):
                missing.setdefault(options[0].name, []).append(name)
        for stored, names in missing.items():
            self.problems.add(f"tensor {stored!r} ({', '.join(names)}) is missing", download=True)


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
