"""Matches what weight files hold with what a model needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from h2o_flexgen.checkpoint.parts import Part, Wanted, part_of
from h2o_flexgen.checkpoint.problems import Problems
from h2o_flexgen.checkpoint.shards import Shards
from h2o_flexgen.checkpoint.source import WEIGHT_DTYPES
from h2o_flexgen.checkpoint.tables import Entry
from h2o_flexgen.models.stored import Stored

if TYPE_CHECKING:
    from h2o_flexgen.config.model.spec import ModelSpec

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
        self.tied_copy: tuple[str, Part] | None = None

    def least_bytes(self, shards: Shards, shard: str) -> int:
        """What the weights that `shard` should hold take in 16 bits."""
        index = shards.index
        held = (
            name
            for name, options in self._wanted.options.items()
            if index is None or any(index.get(option.name) == shard for option in options)
        )
        return 2 * sum(self._wanted.numel(name) for name in held)

    def bind(self, shards: Shards, tables: Tables) -> dict[str, Part]:
        """Canonical name -> where its bytes are, for all tensors that are fine."""
        where: dict[str, list[str]] = {}
        for shard, table in tables.items():
            for stored in table:
                where.setdefault(stored, []).append(shard)
        self._check_index(shards, tables, where)
        quantised = {stored: None for stored in where if self._is_quantised(stored)}
        self._note_quantised(list(quantised))
        found: dict[str, str] = {}
        parts: dict[str, Part] = {}
        for stored, holders in where.items():
            if self._is_ignored(stored) or stored in quantised:
                continue
            if len(holders) > 1:
                self.problems.add(f"tensor {stored!r} is in {' and in '.join(holders)}")
            entry = tables[holders[0]][stored]
            if stored in self._wanted.users:
                self._claim(stored, entry, found, parts)
            elif stored in self._tied_heads:
                self._bind_tied(stored, entry)
            else:
                self.problems.add(f"tensor {stored!r} of {holders[0]} is not part of this model")
        self._settle_tied(found, parts)
        if quantised:
            return parts  # what is missing is there in another form, which has been reported
        if len(tables) == len(shards.files):
            self._check_missing(found)
        elif shards.index is not None:
            lost = {stored for stored, shard in shards.index.items() if shard not in tables}
            self._check_missing(found, lost)
        return parts

    def _claim(self, stored: str, entry: Entry, found: dict[str, str], parts: dict[str, Part]) -> None:
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
                parts[name] = part_of(entry, option, self._wanted.shapes[name])
        for other, names in doubled.items():
            self.problems.add(f"tensors {other!r} and {stored!r} are both {', '.join(names)}")

    def _bind_tied(self, stored: str, entry: Entry) -> None:
        if self._check_tensor(stored, self._vocab_shape, entry):
            self.tied_copy = (stored, part_of(entry, self._tied_heads[stored], self._vocab_shape))

    def _settle_tied(self, found: dict[str, str], parts: dict[str, Part]) -> None:
        """Of a tied pair either one may be in a checkpoint, or both."""
        if self.tied_copy is None:
            return
        stored, part = self.tied_copy
        if _EMBEDDING not in found:
            found[_EMBEDDING], parts[_EMBEDDING] = stored, part
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
