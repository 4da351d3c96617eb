"""The weights of GGUF files: read in ranges of rows, and converted on the way to where they will be used."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch

from h2o_flexgen.checkpoint.content import content_digest
from h2o_flexgen.checkpoint.files import CheckpointFile
from h2o_flexgen.checkpoint.gguf.blocks import FORMATS, Bytes, Format, Parts
from h2o_flexgen.checkpoint.gguf.config import stored_dtype
from h2o_flexgen.checkpoint.gguf.header import GgufHeader
from h2o_flexgen.checkpoint.gguf.names import StoredTensor, bind, packings_of
from h2o_flexgen.checkpoint.reader import CHUNK, FileSource
from h2o_flexgen.checkpoint.source import SERIAL, copy, flat_out
from h2o_flexgen.checkpoint.tables import FileTensor
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.memory.handle import Location, torch_dtype
from h2o_flexgen.quant import PackedWeight, Weight

_LARGE = 4 << 20  # bytes of a tensor to a thread
_MOST_THREADS = 4


class GgufSource(FileSource):
    """The weights of a GGUF model.

    packings    the tensors that it can fill as PackedWeight, by canonical name; any tensor can be read as floats
    """

    def __init__(self, header: GgufHeader, spec: ModelSpec) -> None:
        """ModelError with all that does not fit the model of `spec`, or where the files are not those of `header`."""
        super().__init__()
        self._bound = bind(header, spec)
        self.dtype = stored_dtype(header)
        self.packings = dict(packings_of(header, spec))
        self.format = "gguf" if self.packings else None
        for name, pieces in self._bound.items():
            most = max(_row_bytes(bound) for bound in pieces)
            if most > CHUNK:
                raise ModelError(f"{header.path}: rows of {name} have {most} bytes", f"needed {CHUNK}")
        facts = [[tuple(part) for part in header.parts], self._bound]
        self.fingerprint = hashlib.sha256(json.dumps(["gguf", facts], sort_keys=True).encode()).hexdigest()
        with ExitStack() as opened:
            opened.enter_context(self)
            for part in header.parts:
                try:
                    file = CheckpointFile(part.path)
                except OSError as error:
                    raise ModelError(f"cannot open {part.path}: {error.strerror}") from error
                self._files.append(file)
                if (file.size, file.mtime_ns) != (part.size, part.mtime_ns):
                    raise ModelError(f"{part.path} changed while it was read", change="run again")
            opened.pop_all()

    def read_into(self, name: str, out: Weight) -> None:
        """Fill `out` with tensor `name`: floats as WeightSource has it, or a PackedWeight of `packings[name]`.

        Raises ModelError, StorageError or ValueError.
        """
        pieces = self._bound[name]
        if isinstance(out, PackedWeight):
            if out.packing != self.packings.get(name) or out.shape != pieces[0].whole:
                raise ValueError(f"{name} is {self.packings.get(name)} of {pieces[0].whole}, got {out.packing}")
            packed = out

            def take(bound: StoredTensor, part: range) -> None:
                convert_blocks = FORMATS[bound.tensor.kind].convert
                assert convert_blocks is not None, "only blocks have a packing"
                for rows, blocks in self._rows(name, bound, part):
                    _fill(packed, _destination(bound, rows), convert_blocks(blocks))
        else:
            flat = flat_out(name, pieces[0].whole, out)

            def take(bound: StoredTensor, part: range) -> None:
                for rows, blocks in self._rows(name, bound, part):
                    _fill_floats(bound, rows, blocks, flat)

        tasks = [(bound, part) for bound in pieces for part in _parts(bound)]
        with self._reading(name, [self._files[bound.tensor.part] for bound in pieces]):
            if len(tasks) == len(pieces):
                for task in tasks:
                    take(*task)
            else:
                with ThreadPoolExecutor(min(len(tasks), _MOST_THREADS)) as pool:
                    list(pool.map(lambda task: take(*task), tasks))

    def location(self, name: str) -> Location | None:
        """Where the bytes of `name` lie, if they are floats of this source's dtype, just as they are wanted."""
        bound, *others = self._bound[name]
        tensor, place = bound.tensor, bound.place
        file = self._files[tensor.part]
        file.check()
        start = tensor.offset + place.start * _row_bytes(bound)
        if others or FORMATS[tensor.kind].dtype != self.dtype or place.heads or place.offset or place.decay:
            return None
        if start % torch_dtype(self.dtype).itemsize:
            return None
        return Location(file.path, start, bound.shape[0] * _row_bytes(bound))

    def content(self) -> str:
        facts = {
            f"{name}{'+' * turn}": ((bound.tensor.kind, bound.place.heads, bound.place.offset), self._stored(bound))
            for name, pieces in self._bound.items()
            for turn, bound in enumerate(pieces)
        }
        return content_digest(facts)

    def _rows(self, name: str, bound: StoredTensor, part: range) -> Iterator[tuple[range, np.ndarray]]:
        """Rows `part` of a tensor as the file has them, some at a time: which, and their bytes (rows, blocks, n)."""
        row, block = _row_bytes(bound), FORMATS[bound.tensor.kind].nbytes
        whole = self._stored(bound).rows(part.start, part.stop)
        for at, chunk in self._chunks.stream(whole, f"tensor {name}", row):
            rows = range(part.start + at // row, part.start + (at + chunk.numel()) // row)
            yield rows, chunk.numpy().reshape(len(rows), row // block, block)

    def _stored(self, bound: StoredTensor) -> FileTensor:
        row = _row_bytes(bound)
        start = bound.tensor.offset + bound.place.start * row
        run = (start, start + bound.shape[0] * row)
        return FileTensor(self._files[bound.tensor.part], (run,), "uint8", bound.shape)


def _parts(bound: StoredTensor) -> list[range]:
    """The rows of a tensor in parts for threads of their own: numpy takes one, and lets others work meanwhile."""
    count = min(len(os.sched_getaffinity(0)), _MOST_THREADS, bound.shape[0] * _row_bytes(bound) // _LARGE)
    size = -(-bound.shape[0] // max(1, count))
    return [range(at, min(at + size, bound.shape[0])) for at in range(0, bound.shape[0], size)]


def _row_bytes(bound: StoredTensor) -> int:
    """Bytes of a row; a list of numbers is a column of them."""
    form = FORMATS[bound.tensor.kind]
    return math.prod(bound.shape[1:]) // form.numbers * form.nbytes


def _destination(bound: StoredTensor, rows: range) -> slice | np.ndarray:
    stored, place = np.arange(rows.start, rows.stop), bound.place
    if place.take > 1:
        return stored // place.take * place.turns + place.turn + stored % place.take
    if not place.heads:
        return slice(rows.start * place.turns + place.turn, rows.stop * place.turns, place.turns)
    dim = bound.shape[0] // place.heads
    within, half = stored % dim, place.rotated // 2
    return np.where(within < 2 * half, stored - within + within % 2 * half + within // 2, stored)


def _fill(out: PackedWeight, where: slice | np.ndarray, parts: Parts) -> None:
    for name, values in parts.items():
        part = out.parts[name]
        if part.device.type == "cpu":
            part.numpy()[where] = values
        else:
            part[where] = torch.from_numpy(np.ascontiguousarray(values)).to(part.device)


def _fill_floats(bound: StoredTensor, rows: range, blocks: Bytes, out: torch.Tensor) -> None:
    """The rows of `out`, which is flat, from the file's bytes of them."""
    form, place = FORMATS[bound.tensor.kind], bound.place
    width = math.prod(bound.shape[1:])
    if form.dtype is not None:
        values = torch.from_numpy(blocks.reshape(-1)).view(torch_dtype(form.dtype))
        if not place.heads and not place.offset and not place.decay and place.turns == 1:
            copy(out.narrow(0, rows.start * width, values.numel()), values)
            return
        numbers = values.view(len(rows), width).float()
        pieces = iter([(rows, torch.log(-numbers) if place.decay else numbers + place.offset)])
    else:
        pieces = _expanded(form, rows, blocks, width)
    if place.columns:
        turned = out.view(-1, place.turns, place.columns)[:, place.turn : place.turn + place.take]
        for some, numbers in pieces:
            head, column = np.divmod(np.arange(some.start, some.stop), place.columns)
            turned[head, :, column] = numbers.to(out.dtype).to(out.device)
        return
    matrix = out.view(-1, width)
    for some, numbers in pieces:
        matrix[_destination(bound, some)] = numbers.to(out.dtype).to(out.device)


def _expanded(form: Format, rows: range, blocks: Bytes, width: int) -> Iterator[tuple[range, torch.Tensor]]:
    """The numbers of the blocks of `rows` in float32, in pieces too small for torch to share among threads."""
    assert form.packing is not None, "floats are not expanded"
    assert form.convert is not None, "floats are not expanded"
    step = max(1, SERIAL // width)
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        parts = form.convert(blocks[start : start + len(some)])
        held = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in parts.items()}
        yield some, PackedWeight(form.packing, (len(some), width), held, torch.float32).expanded()
