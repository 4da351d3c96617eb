"""Prefixes on disk: a file each, whose checksum is looked at before anything in it is believed.

A file has a line of JSON, then the tensors of each layer one after another. Its name says which tokens it is for; the
folder that it is in, for which model. It is written under another name first, so that a kill leaves none that is half.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

VERSION = 1
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class LayerPrefix(NamedTuple):
    """Tokens of a prefix in one layer, on the host: k as queries see it and v, (kv_heads, n, d).

    stored_k: as caches keep it, the same tensor where that is no difference; sums: float32 (kv_heads, everything up to
    their end), the attention that all these tokens got from each other, None where no policy asks for it.
    """

    k: Tensor
    v: Tensor
    stored_k: Tensor
    sums: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that differ."""
        rolled = [] if self.stored_k is self.k else [self.stored_k]
        return [self.k, self.v, *rolled, *([] if self.sums is None else [self.sums])]


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
    """OSError as the file system has it; then nothing is left behind."""
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
    part = folder / f"{name.text}.{os.getpid()}.part"
    try:
        with part.open("wb") as file:
            file.write(json.dumps(facts).encode() + b"\n")
            for each in payload:
                file.write(each)
        part.replace(folder / name.text)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


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
        return _layers(facts["shapes"], _DTYPES[facts["dtype"]], facts["rolled"], data) if same else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError):
        return None


def _layers(shapes: list[list[list[int]]], dtype: torch.dtype, rolled: bool, data: bytearray) -> list[LayerPrefix]:
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
