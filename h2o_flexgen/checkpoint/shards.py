"""Which files of a folder hold the weights, before any of them is opened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from h2o_flexgen.checkpoint.files import CheckpointFile, Problems, name_fault, strict_json

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.(safetensors|bin)")
_MAX_INDEX = 64 << 20  # bytes
# Other tools' files that share the ending: they are never part of the checkpoint that config.json describes.
_FOREIGN = ("consolidated", "adapter", "optimizer", "scheduler", "training", "rng_state")


Kind = Literal["safetensors", "bin"]
_LAYOUTS: tuple[tuple[Kind, str], ...] = (("safetensors", "model"), ("bin", "pytorch_model"))
"""Ending and stem of a checkpoint's file: single, in shards stem-00001-of-00002.ending, or named by an index."""


@dataclass(frozen=True)
class Shards:
    """The files of one checkpoint, by name in its folder; `index` says which tensor is in which, where there is one."""

    kind: Kind
    files: tuple[str, ...]
    index: Mapping[str, str] | None
    present: frozenset[str]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.files if name not in self.present)


def wanted_files(names: Iterable[str]) -> tuple[str, ...]:
    """The checkpoint's files among the names of a repository's: safetensors where there are any, else .bin."""
    have = set(names)
    for kind, stem in _LAYOUTS:
        if f"{stem}.{kind}.index.json" in have:
            shards = (name for name in have if _SHARD.fullmatch(name) and name.startswith(f"{stem}-"))
            return (f"{stem}.{kind}.index.json", *sorted(name for name in shards if name.endswith(kind)))
        if f"{stem}.{kind}" in have:
            return (f"{stem}.{kind}",)
    return ()


def find_shards(folder: str, problems: Problems) -> Shards | None:
    """The weight files of `folder`, safetensors before .bin; None, and a reason in `problems`, where there are none."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        problems.add(f"the folder cannot be listed: {error.strerror}")
        return None
    for kind, stem in _LAYOUTS:
        single, index, weight_map = f"{stem}.{kind}", f"{stem}.{kind}.index.json", None
        mine = [name for name in names if _is_weight_file(name, kind)]
        files: tuple[str, ...] = (single,)
        if index in names:
            weight_map = _read_index(folder, index, kind, problems)
            if weight_map is None:
                return None
            files = tuple(sorted(set(weight_map.values())))
        elif single not in names:
            if not mine:
                continue
            problems.add(f"{single} and {index} are missing, although there is {_listed(mine)}", download=True)
            return None
        found = Shards(kind, files, weight_map, frozenset(files) & frozenset(mine))
        _note_misfits(found, mine, problems)
        return found
    problems.add("the weights are missing: no model.safetensors, pytorch_model.bin or index of shards", download=True)
    return None


def _is_weight_file(name: str, ending: str) -> bool:
    if not name.endswith(f".{ending}") or name.lower().startswith(_FOREIGN):
        return False
    return ending == "safetensors" or name.startswith("pytorch_model")


def _note_misfits(found: Shards, mine: list[str], problems: Problems) -> None:
    """Notes what is missing of `found`, and what of the folder's weight files does not belong to it."""
    for name in found.missing:
        problems.add(f"{name} is missing, which the index names", download=True)
    extra = [name for name in mine if name not in found.files]
    if extra:
        problems.add(
            f"{_listed(extra)} does not belong to the checkpoint of {_listed(found.files)}: remove one of both"
        )


def _read_index(folder: str, name: str, ending: str, problems: Problems) -> dict[str, str] | None:
    """Tensor name -> shard name, or None where the index cannot be used."""
    try:
        file = CheckpointFile(os.path.join(folder, name))
    except OSError as error:
        problems.add(f"{name} cannot be read: {error.strerror}", download=True)
        return None
    try:
        text = file.head(_MAX_INDEX)
    finally:
        file.close()
    try:
        index = strict_json(text)
    except ValueError as error:
        problems.add(f"{name} ({file.size} bytes) is torn or not JSON ({error})", download=True)
        return None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        problems.add(f"{name} has no weight_map", download=True)
        return None
    before = len(problems.texts)
    for tensor in weight_map:
        fault = name_fault(tensor)
        if fault:
            problems.add(f"{name}: tensor name {tensor!r} {fault}")
    for shard in sorted({value for value in weight_map.values() if isinstance(value, str)}):
        fault = name_fault(shard) or (None if shard.endswith(f".{ending}") else f"does not end in .{ending}")
        if fault:
            problems.add(f"{name}: shard name {shard!r} {fault}")
    if not all(isinstance(value, str) for value in weight_map.values()):
        problems.add(f"{name}: a shard name is not a text", download=True)
    return weight_map if len(problems.texts) == before else None


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
