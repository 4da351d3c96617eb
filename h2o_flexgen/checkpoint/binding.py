"""Matches what weight files hold with what a model needs."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from h2o_flexgen.checkpoint.problems import Problems
from h2o_flexgen.checkpoint.shards import Shards
from h2o_flexgen.checkpoint.source import WEIGHT_DTYPES
from h2o_flexgen.checkpoint.tables import Entry

if TYPE_CHECKING:
    from h2o_flexgen.config.model import ModelSpec

log = logging.getLogger(__name__)

_TIED_HEADS = ("lm_head.weight", "embed_out.weight")


class Binding:
    """What the model of `spec` needs, to be compared with the tables of its files; notes every difference."""

    def __init__(
        self,
        spec: ModelSpec,
        names: Mapping[str, Sequence[str]],
        ignored: tuple[re.Pattern[str], ...],
        problems: Problems,
    ) -> None:
        self._needed = {tensor.name: tuple(tensor.shape) for group in spec.weight_groups for tensor in group.tensors}
        self._names = {name: tuple(names[name]) for name in self._needed}
        self._canonical = {stored: name for name, options in self._names.items() for stored in options}
        self._ignored = ignored
        self._tied = spec.arch.tied_head
        self._vocab_shape = (spec.vocab_size, spec.embed_dim)
        self.problems = problems

    def least_bytes(self, shards: Shards, shard: str) -> int:
        """What the weights that `shard` should hold take in 16 bits."""
        index = shards.index
        held = (
            self._canonical.values()
            if index is None
            else [name for stored, name in self._canonical.items() if index.get(stored) == shard]
        )
        return 2 * sum(math.prod(self._needed[name]) for name in set(held))

    def bind(self, shards: Shards, tables: Mapping[str, Mapping[str, Entry]]) -> dict[str, Entry]:
        """Canonical name -> where its bytes are, for all tensors that are fine."""
        where: dict[str, list[str]] = {}
        for shard, table in tables.items():
            for stored in table:
                where.setdefault(stored, []).append(shard)
        self._check_index(shards, tables, where)
        found: dict[str, tuple[str, Entry]] = {}
        for stored, holders in where.items():
            if self._is_ignored(stored):
                continue
            if len(holders) > 1:
                self.problems.add(f"tensor {stored!r} is in {' and in '.join(holders)}")
            entry = tables[holders[0]][stored]
            name = self._canonical.get(stored)
            if name is None:
                self._unknown(stored, holders[0], entry)
            elif name in found:
                self.problems.add(f"tensors {found[name][0]!r} and {stored!r} are both {name}")
            else:
                found[name] = (stored, entry)
                self._check_tensor(stored, self._needed[name], entry)
        if len(tables) == len(shards.files):
            self._check_missing(found)
        elif shards.index is not None:
            lost = {stored for stored, shard in shards.index.items() if shard not in tables}
            self._check_missing(found, lost)
        return {name: entry for name, (_, entry) in found.items()}

    def _is_ignored(self, stored: str) -> bool:
        return stored not in self._canonical and any(pattern.search(stored) for pattern in self._ignored)

    def _check_index(
        self, shards: Shards, tables: Mapping[str, Mapping[str, Entry]], where: Mapping[str, list[str]]
    ) -> None:
        if shards.index is None:
            return
        for stored, shard in shards.index.items():
            if shard in tables and stored not in tables[shard]:
                self.problems.add(f"tensor {stored!r} is not in {shard}, where the index has it", download=True)
        for stored, holders in where.items():
            if stored not in shards.index and not self._is_ignored(stored):
                self.problems.add(f"tensor {stored!r} of {holders[0]} is not in the index", download=True)

    def _unknown(self, stored: str, shard: str, entry: Entry) -> None:
        if not (self._tied and stored in _TIED_HEADS):
            self.problems.add(f"tensor {stored!r} of {shard} is not part of this model")
        elif entry.shape != self._vocab_shape:
            self._check_tensor(stored, self._vocab_shape, entry)
        else:
            log.info("%s is not read: the model's head is its token embedding", stored)

    def _check_tensor(self, stored: str, shape: tuple[int, ...], entry: Entry) -> None:
        if entry.shape != shape:
            self.problems.add(f"tensor {stored!r}: expected shape {shape} from config.json, found {entry.shape}")
        if entry.dtype not in WEIGHT_DTYPES:
            self.problems.add(f"tensor {stored!r}: expected dtype {', '.join(WEIGHT_DTYPES)}, found {entry.dtype}")

    def _check_missing(self, found: Mapping[str, object], excused: Iterable[str] = ()) -> None:
        """Note what is missing, but for tensors that a file already reported would hold."""
        for name, options in self._names.items():
            if name not in found and not set(options) & set(excused):
                self.problems.add(f"tensor {options[0]!r} ({name}) is missing", download=True)
