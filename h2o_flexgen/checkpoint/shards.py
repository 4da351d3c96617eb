"""Which files of a folder hold the weights, before any of them is opened.

As transformers chooses: one file before an index, safetensors before .bin, and of an index the files that it names,
whatever they are called. Files beside these are left alone, with a warning: they may be another kind of the same model
(`model.fp16.safetensors`), a part of another one (`value_head.safetensors`), or what is left of an older copy.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from h2o_flexgen.checkpoint.files import CheckpointFile, Problems, name_fault, strict_json
from h2o_flexgen.config.model.known import is_gguf
from h2o_flexgen.errors import warn_once

_NUMBERED = re.compile(r"-\d+-of-\d+\.")  # one of several
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


def wanted_files(names: Iterable[str]) -> str | None:
    """The file to begin with among the names of a repository's: the weights in one file, or the index of their shards;
    else the only weight file, whatever its name; None where there is none of these."""
    have = set(names)
    for kind, stem in _LAYOUTS:
        for name in (f"{stem}.{kind}", f"{stem}.{kind}.index.json"):
            if name in have:
                return name
    for kind, _ in _LAYOUTS:
        mine = [name for name in have if "/" not in name and _is_weight_file(name, kind)]
        if mine:
            return mine[0] if len(mine) == 1 and not _NUMBERED.search(mine[0]) else None
    return None


def _kind_of(name: str) -> Kind:
    return "safetensors" if name.endswith((".safetensors", ".safetensors.index.json")) else "bin"


def shards_of(path: Path) -> tuple[str, ...]:
    """The files that the index at `path` names. ModelError where it cannot be used."""
    problems = Problems()
    weight_map = _read_index(str(path.parent), path.name, _kind_of(path.name), problems)
    problems.raise_any(str(path.parent), "needed the index of the checkpoint's files")
    return tuple(sorted(set((weight_map or {}).values())))


def find_shards(folder: str, problems: Problems) -> Shards | None:
    """The weight files of `folder`, safetensors before .bin; None, and a reason in `problems`, where there are none."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        problems.add(f"the folder cannot be listed: {error.strerror}")
        return None
    first = wanted_files(names)
    if first is None:
        _say_none(names, problems)
        return None
    kind = _kind_of(first)
    found, usual = Shards(kind, (first,), None, frozenset({first})), f"{dict(_LAYOUTS)[kind]}.{kind}"
    if first == f"{usual}.index.json":
        weight_map = _read_index(folder, first, kind, problems)
        if weight_map is None:
            return None
        files = tuple(sorted(set(weight_map.values())))
        found = Shards(kind, files, weight_map, frozenset(files) & frozenset(names))
        for name in found.missing:
            problems.add(f"{name} is missing, which the index names", download=True)
    elif first != usual:  # as those of AutoGPTQ are called
        warn_once(f"the weights are read from {first}: {folder} has no {usual}")
    extra = [name for name in names if _is_weight_file(name, kind) and name not in found.files]
    if extra:
        warn_once(f"{listed(extra)} in {folder} is not read: the weights are in {listed(found.files)}")
    return found


def _say_none(names: list[str], problems: Problems) -> None:
    """Why no file of a folder is the one to begin with."""
    for kind, stem in _LAYOUTS:
        mine = [name for name in names if _is_weight_file(name, kind)]
        if mine:
            many = f"{stem}.{kind} and {stem}.{kind}.index.json are missing, although there is {listed(mine)}"
            change = "" if _NUMBERED.search(mine[0]) else f": rename the one that is the model to {stem}.{kind}"
            problems.add(many + change, download=not change)
            return
    none = "the weights are missing: no model.safetensors, pytorch_model.bin or index of shards"
    other = other_layout(names)
    problems.add(other or none, download=not other)


def other_layout(names: Iterable[str]) -> str:
    """The description of a folder without a checkpoint of ours, where the names of its files tell; else empty."""
    names = list(names)
    if "adapter_config.json" in names or any(name.startswith("adapter_model.") for name in names):
        return (
            "there is a LoRA adapter (adapter_model) alone: merge it into its base model elsewhere (peft's "
            "merge_and_unload, then save_pretrained), or give the base model"
        )
    if any(name.startswith("consolidated.") for name in names):
        return "the weights are in Meta's or Mistral's own layout (consolidated): get the files for transformers"
    if any(is_gguf(name) for name in names):
        return "there are GGUF files: get one, and give it with --model /path/to/file.gguf"
    return ""


def _is_weight_file(name: str, ending: str) -> bool:
    if not name.endswith(f".{ending}") or name.lower().startswith(_FOREIGN):
        return False
    return ending == "safetensors" or name.startswith(("pytorch_model", "gptq_model-"))


def _read_index(folder: str, name: str, ending: str, problems: Problems) -> dict[str, str] | None:
    """Tensor name -> shard name, or None where the index cannot be used."""
    try:
        file = CheckpointFile(os.path.join(folder, name))
    except OSError as error:
        problems.add(f"{name} cannot be read: {error.strerror}", download=True)
        return None
    with file:
        text = file.head(_MAX_INDEX)
    try:
        index = strict_json(text.removeprefix(codecs.BOM_UTF8))
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


def listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
