"""`PrefixStore`: keys and values of the beginnings of prompts, found by their tokens, in host memory and on disk.

Entries are pieces of prefixes: each is for the tokens from `start` to `end` of all prompts whose first `end` tokens are
the same, and serves where the pieces before it are there, too. Entries in use lie in host memory; entries evicted
from there may still be on disk, and are read back with their checksums checked.

A file has a line of JSON, then the tensors of each layer one after another. Its name says which tokens it is for; the
folder that it is in, for which model. It is written under another name first, so that a kill leaves no half of a file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from h2o_flexgen.cache.reuse import Category, ExpectedReuse
from h2o_flexgen.errors import UsageError
from h2o_flexgen.folders import whole_file

log = logging.getLogger(__name__)
GRAIN = 16
"""Prefixes end at multiples of it: neighbours that go on alike by chance then find the same."""
LIFE = 4096.0
"""Looked-up prompts for which an entry is expected to be worth its room."""
VERSION = 1
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class LayerPrefix(NamedTuple):
    """Tokens of a prefix in one layer, those of a store on the host: k as queries see it and v, (kv_heads, n, d).

    stored_k: as caches keep it, the same tensor where that is no difference; sums: float32 (kv_heads, everything up to
    their end), the attention that all these tokens got from each other, None where no policy asks for it. queries: the
    last m, (heads, m, d), where policies look at them; no store keeps them.
    """

    k: Tensor
    v: Tensor
    stored_k: Tensor
    sums: Tensor | None
    queries: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that differ."""
        rolled = [] if self.stored_k is self.k else [self.stored_k]
        return [self.k, self.v, *rolled, *([] if self.sums is None else [self.sums])]

    def changed(self, keys: Callable[[Tensor], Tensor], sums: Callable[[Tensor], Tensor]) -> LayerPrefix:
        """`keys` of k, v and stored_k, once where they are the same, and `sums` of the sums; without queries."""
        k = keys(self.k)
        stored = k if self.stored_k is self.k else keys(self.stored_k)
        return LayerPrefix(k, keys(self.v), stored, None if self.sums is None else sums(self.sums))


class FileName(NamedTuple):
    """Tokens from `start` to `end` of the prompts whose first `end` tokens have this digest."""

    start: int
    end: int
    digest: str

    @property
    def text(self) -> str:
        return f"{self.start}-{self.end}-{self.digest}.kv"

    @classmethod
    def read(cls, text: str) -> FileName | None:
        """None for a file of another kind."""
        words = text.removesuffix(".kv").split("-")
        if not text.endswith(".kv") or len(words) != 3 or not (words[0].isdecimal() and words[1].isdecimal()):
            return None
        name = cls(int(words[0]), int(words[1]), words[2])
        return name if name.text == text and name.start < name.end else None


def write_prefix(folder: Path, name: FileName, identity: str, layers: Sequence[LayerPrefix]) -> None:
    """OSError as the file system has it; then nothing is left behind. Others may not look into a folder that is made:
    it tells what prompts begin with."""
    facts = {
        "identity": identity,
        "name": name.text,
        "dtype": str(layers[0].k.dtype),
        "rolled": layers[0].stored_k is not layers[0].k,
        "shapes": [[list(part.shape) for part in layer.parts] for layer in layers],
        "version": VERSION,
    }
    payload = [part.contiguous().view(torch.uint8).numpy().data for layer in layers for part in layer.parts]
    facts["checksum"] = _checksum(facts, payload)
    with whole_file(folder / name.text) as part, part.open("wb") as file:
        file.write(json.dumps(facts).encode() + b"\n")
        for each in payload:
            file.write(each)


def read_prefix(folder: Path, name: FileName, identity: str) -> list[LayerPrefix] | None:
    """The layers; None for a file that is gone, damaged in any way, or for something else."""
    try:
        with (folder / name.text).open("rb") as file:
            line = file.readline(1 << 20)
            data = bytearray(file.read())
        facts = json.loads(line)
        checksum = facts.pop("checksum")
        if checksum != _checksum(facts, [memoryview(data)]):
            return None
        same = facts["identity"] == identity and facts["name"] == name.text and facts["version"] == VERSION
        return _layers_of(facts["shapes"], _DTYPES[facts["dtype"]], facts["rolled"], data) if same else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError):
        return None


def _layers_of(shapes: list[list[list[int]]], dtype: torch.dtype, rolled: bool, data: bytearray) -> list[LayerPrefix]:
    layers, at = list[LayerPrefix](), 0
    for each in shapes:
        parts = list[Tensor]()
        for number, shape in enumerate(each):
            kind = dtype if number < 2 + rolled else torch.float32
            count = torch.Size(shape).numel()
            parts.append(torch.frombuffer(data, dtype=kind, count=count, offset=at).view(shape))
            at += parts[-1].nbytes
        k, v, *others = parts
        stored = others.pop(0) if rolled else k
        layers.append(LayerPrefix(k, v, stored, others[0] if others else None))
    return layers


def _checksum(facts: dict[str, object], payload: Sequence[memoryview]) -> str:
    digest = xxhash.xxh3_128(json.dumps(facts, sort_keys=True).encode())
    for part in payload:
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True)
class StoredPrefix:
    """An entry, in host memory."""

    name: FileName
    layers: tuple[LayerPrefix, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def layer(self, number: int, past: int, device: torch.device) -> LayerPrefix:
        """Its tokens from the prompt's token `past` on, in one layer."""
        first = past - self.name.start
        return self.layers[number].changed(lambda x: x[:, first:].contiguous().to(device), lambda x: x.to(device))


@dataclass
class StoreCounts:
    """Prompts that were looked up, their tokens, and of these what was found; entries that came and went."""

    prompts: int = 0
    tokens: int = 0
    found: int = 0
    stored: int = 0
    evicted: int = 0
    damaged: int = 0
    from_disk: int = 0


class NewPrefix:
    """An entry that is being computed, layer by layer. One that is not finished leaves nothing behind."""

    def __init__(self, store: PrefixStore, name: FileName, kind: str, depth: int) -> None:
        self._store, self.name, self.category = store, name, (kind, depth)
        self._layers: dict[int, LayerPrefix] = {}
        self._room = True

    def add(self, number: int, layer: LayerPrefix) -> None:
        """Keeps a copy. The last layer finishes the entry, if no part of it is missing and there is room for all."""
        if not self._layers:
            self._room = self._store.admit(self, self._store.num_layers * layer.nbytes)
        if not self._room:
            return
        copied = partial(Tensor.to, device="cpu", copy=True)
        self._layers[number] = layer.changed(copied, copied)
        if len(self._layers) == self._store.num_layers:
            self._store.take(self)

    @property
    def layers(self) -> tuple[LayerPrefix, ...]:
        return tuple(self._layers[number] for number in sorted(self._layers))


@dataclass
class PrefixStore:
    """At most `memory` bytes on the host, and `disk` bytes in `folder` if there is one. Not thread safe.

    identity    all that keys and values depend on beside tokens: entries of another one are not found
    sums        whether entries have column sums; one without them is none then
    """

    identity: str
    num_layers: int
    memory: int
    folder: Path | None = None
    disk: int = 0
    sums: bool = False

    def __post_init__(self) -> None:
        self.counts = StoreCounts()
        self.held, self.on_disk = ExpectedReuse[FileName](LIFE), ExpectedReuse[FileName](LIFE)
        self._ends = Counter[int]()
        self._starts: dict[str, FileName] = {}
        self._entries: dict[FileName, StoredPrefix] = {}
        self._files: dict[FileName, int] = {}
        self._pinned: dict[object, set[FileName]] = {}
        self._pending: dict[FileName, int] = {}
        self._told = False
        self.bytes_held = self.bytes_on_disk = 0
        if self.folder is not None:
            digest = hashlib.blake2b(self.identity.encode(), digest_size=12).hexdigest()
            self.folder = self.folder / digest
            self._list_files(self.folder)

    def belongs_to(self, identity: str) -> None:
        """Entries of another identity are forgotten; a planner may have chosen other bits for the weights."""
        if identity != self.identity:
            folder = None if self.folder is None else self.folder.parent
            counts, self.identity, self.folder = self.counts, identity, folder
            self.__post_init__()
            self.counts = counts

    def find(self, user: object, ids: Sequence[int], most: int, kind: str = "") -> list[StoredPrefix]:
        """The entries that cover as much as there is of the first `most` tokens, in order; they stay until `release` of
        `user`."""
        self.counts.prompts += 1
        self.counts.tokens += len(ids)
        found = list[StoredPrefix]()
        for name in self._known(ids, most):
            entry = self._entries.get(name) or self._fetch(user, name, (kind, len(found)))
            if entry is None:
                break
            found.append(entry)
            self._pinned.setdefault(user, set()).add(name)
        for depth, entry in reversed(list(enumerate(found))):
            self._touch(entry.name, (kind, depth))
        self.counts.found += found[-1].name.end if found else 0
        return found

    def begin(self, ids: Sequence[int], start: int, end: int, depth: int, kind: str = "") -> NewPrefix | None:
        """An entry to be computed for tokens `start` to `end`; None where there is one."""
        name = FileName(start, end, _digests(ids, [end])[0])
        return None if name.digest in self._starts else NewPrefix(self, name, kind, depth)

    def admit(self, new: NewPrefix, nbytes: int) -> bool:
        """Makes room in memory for an entry that is begun; False where there is none."""
        if new.name.digest in self._starts or not self._clear(nbytes):
            return False
        self._pending[new.name] = nbytes
        return True

    def take(self, new: NewPrefix) -> None:
        layers = new.layers
        self._pending.pop(new.name, None)
        if new.name.digest in self._starts or (self.sums and any(layer.sums is None for layer in layers)):
            return
        if not self.sums:
            layers = tuple(layer._replace(sums=None) for layer in layers)
        entry = StoredPrefix(new.name, layers)
        written = self._write(entry, new.category)
        if self._hold(entry, new.category) or written:
            self.counts.stored += 1
            self._learn(new.name)

    def release(self, user: object) -> None:
        """Entries that `user` found may be evicted now; entries that were begun and not finished give up their room."""
        self._pinned.pop(user, None)
        self._pending.clear()

    @property
    def _now(self) -> float:
        return float(self.counts.prompts)

    def _known(self, ids: Sequence[int], most: int) -> list[FileName]:
        """The entries of the longest chain from the first token on, in order."""
        ends = sorted(end for end in self._ends if end <= most)
        there = dict[int, FileName]()
        for digest in _digests(ids, ends):
            name = self._starts.get(digest)
            if name is not None and (name.start == 0 or name.start in there):
                there[name.end] = name
        chain, end = list[FileName](), max(there, default=0)
        while end:
            chain.append(there[end])
            end = there[end].start
        return chain[::-1]

    def _learn(self, name: FileName) -> None:
        if name.digest not in self._starts:
            self._starts[name.digest] = name
            self._ends[name.end] += 1

    def _touch(self, name: FileName, category: Category) -> None:
        self.held.touch(name, category, name.start, self._now)
        if name in self._files:
            self.on_disk.touch(name, category, name.start, self._now)

    # In memory

    def _hold(self, entry: StoredPrefix, category: Category) -> bool:
        if not self._clear(entry.nbytes):
            return False
        self._entries[entry.name] = entry
        self.bytes_held += entry.nbytes
        self.held.touch(entry.name, category, entry.name.start, self._now)
        return True

    def _clear(self, nbytes: int) -> bool:
        """Evicts until so many bytes fit beside what is held and begun; False, and nothing goes, where they cannot."""
        spared = {name for names in self._pinned.values() for name in names}
        taken = sum(self._pending.values())
        if taken + sum(self._entries[name].nbytes for name in spared & self._entries.keys()) + nbytes > self.memory:
            return False
        while self.bytes_held + taken + nbytes > self.memory:
            name = self.held.victim(self._now, spared)
            assert name is not None, "what is not spared takes no room"
            self._drop(name)
        return True

    def _drop(self, name: FileName) -> None:
        self.bytes_held -= self._entries.pop(name).nbytes
        self.held.forget(name)
        self.counts.evicted += 1
        self._forget(name)

    def _forget(self, name: FileName) -> None:
        """An entry that is neither in memory nor on disk is not found any more."""
        if name not in self._entries and name not in self._files and self._starts.get(name.digest) == name:
            del self._starts[name.digest]
            self._ends[name.end] -= 1
            self._ends += Counter()  # without those that are 0

    # On disk

    def _list_files(self, folder: Path) -> None:
        """Takes over the files that earlier processes left, the oldest first."""
        found = list[tuple[float, FileName, int]]()
        try:
            with suppress(FileNotFoundError), os.scandir(folder) as files:
                for file in files:
                    name = FileName.read(file.name)
                    if name is not None:
                        found.append((file.stat().st_mtime, name, file.stat().st_size))
        except OSError as error:
            told = f"--prefix-dir {folder.parent}: {error.strerror}"
            raise UsageError(told, "needed a folder that can be read", "name another folder") from None
        for _, name, nbytes in sorted(found):
            self._files[name] = nbytes
            self.bytes_on_disk += nbytes
            self.on_disk.touch(name, ("", 0), name.start, self._now)
            self._learn(name)
        self._make_room(0)

    def _fetch(self, user: object, name: FileName, category: Category) -> StoredPrefix | None:
        if self.folder is None or name not in self._files:
            return None
        layers = read_prefix(self.folder, name, self.identity)
        sound = layers is not None and len(layers) == self.num_layers
        if layers is None or not sound or (self.sums and any(layer.sums is None for layer in layers)):
            self.counts.damaged += 1
            self._remove(name)
            return None
        entry = StoredPrefix(name, tuple(layers))
        if not self._hold(entry, category):
            return None
        self.counts.from_disk += 1
        with suppress(OSError):
            os.utime(self.folder / name.text, (time.time(), time.time()))
        return entry

    def _write(self, entry: StoredPrefix, category: Category) -> bool:
        if self.folder is None or not self._make_room(entry.nbytes):
            return False
        try:
            write_prefix(self.folder, entry.name, self.identity, entry.layers)
            self._files[entry.name] = (self.folder / entry.name.text).stat().st_size
        except OSError as error:  # a store that is full or gone makes nothing wrong, only slower
            if not self._told:
                log.warning("--prefix-dir %s keeps nothing for later: %s", self.folder.parent, error.strerror or error)
            self._told = True
            return False
        self.bytes_on_disk += self._files[entry.name]
        self.on_disk.touch(entry.name, category, entry.name.start, self._now)
        return self._make_room(0)

    def _make_room(self, nbytes: int) -> bool:
        while self.bytes_on_disk + nbytes > self.disk:
            name = self.on_disk.victim(self._now)
            if name is None:
                return False
            self._remove(name)
        return True

    def _remove(self, name: FileName) -> None:
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / name.text).unlink(missing_ok=True)
        self.bytes_on_disk -= self._files.pop(name)
        self.on_disk.forget(name)
        self._forget(name)


def _digests(ids: Sequence[int], ends: Iterable[int]) -> list[str]:
    """Of the first n tokens, for each n of `ends`, ascending."""
    digest, at, found = hashlib.blake2b(digest_size=16), 0, list[str]()
    for end in ends:
        digest.update(array("q", ids[at:end]).tobytes())
        at = end
        found.append(digest.hexdigest())
    return found
