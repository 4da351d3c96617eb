"""Checkpoints on disk: found, checked in every respect before any memory is taken, then read tensor by tensor.

safetensors and `pytorch_model.bin`, single or in shards. Both are read with pread in chunks, so that a file that
shrinks is an error, the page cache does not fill, and loading takes two chunks of memory beyond the destination.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from h2o_flexgen.checkpoint.binding import Binding, FileTensor, FoundTensor, PackedTensor, Range, bind_files
from h2o_flexgen.checkpoint.content import content_digest
from h2o_flexgen.checkpoint.files import CheckpointFile, Problems
from h2o_flexgen.checkpoint.matrices import Array, Read
from h2o_flexgen.checkpoint.shards import find_shards
from h2o_flexgen.checkpoint.source import WeightSource, copy, flat_out
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import PAGE
from h2o_flexgen.errors import ModelError, OwnHeadError
from h2o_flexgen.memory.disk import host_view
from h2o_flexgen.memory.handle import Location, torch_dtype
from h2o_flexgen.memory.tiers import HostMemory
from h2o_flexgen.models.schemes import Quantization
from h2o_flexgen.models.stored import Stored
from h2o_flexgen.quant import PackedWeight, Weight

CHUNK = 4 << 20  # bytes
_GAP = 4 * PAGE  # bytes that are read and left rather than that a second request is made
_EXPANDED = 1 << 20  # numbers that are expanded at once
_READERS = 4  # tensors that may be read ahead at once; each has one read under way at most


def open_checkpoint(
    folder: str | os.PathLike[str],
    spec: ModelSpec,
    names: Mapping[str, Sequence[str | Stored]],
    ignored: Iterable[str | re.Pattern[str]] = (),
    quantization: Quantization | None = None,
) -> CheckpointSource:
    """The checkpoint in `folder`, ready to be read as the model of `spec`.

    `names`: canonical name -> the tensors of a checkpoint, or rows of them, that it may be; one of them must be there.
    Tensors that match one of the patterns `ignored` (searched for, as re.search does) are left alone. `quantization`:
    the description of packed matrices in config.json. Links to files elsewhere are followed, as the Hugging Face cache
    needs it. Takes no weight memory.

    Raises ModelError with the complete list of what is wrong: missing, doubled, unknown, misshapen or unusable tensors,
    rows of them that are no part of the model, missing or foreign files, damaged ones, a tied output head that is not
    the token embedding. StorageError where the disk fails, ValueError where `names` is not of such a model.
    """
    root = os.fspath(folder)
    problems = Problems()
    with ExitStack() as opened:
        shards = find_shards(root, problems)
        binding = Binding(spec, names, ignored, problems, quantization)
        tensors, files = ({}, []) if shards is None else bind_files(root, shards, binding, opened)
        problems.raise_any(root)
        source = opened.enter_context(CheckpointSource(tensors, files, quantization.method if quantization else None))
        if binding.tied_copy is not None and not source.equals("embed.tokens", binding.tied_copy[1]):
            raise OwnHeadError(
                f"{binding.tied_copy[0]} in {root} is not the token embedding, to which config.json ties it",
                "needed a config.json that says what the checkpoint is",
                "if the model has a head of its own, set tie_word_embeddings to false in config.json",
            )
        opened.pop_all()
    return source


class FileSource(WeightSource):
    """Weights in files, which it owns; reading is thread-safe. Every read checks afterwards that the file is still the
    one that was opened: ModelError otherwise."""

    def __init__(self, files: Iterable[CheckpointFile] = ()) -> None:
        self._files, self._chunks = list(files), ChunkReader()

    @contextmanager
    def _reading(self, name: str, files: Collection[CheckpointFile]) -> Iterator[None]:
        if any(file.closed for file in files):
            raise ValueError(f"the checkpoint is closed, {name} cannot be read")
        yield
        for file in files:
            file.check()

    def close(self) -> None:
        self._chunks.close()
        for file in self._files:
            file.close()


class CheckpointSource(FileSource):
    """The weights of an open checkpoint. `dtype` is that of the plain tensors, if there are any."""

    def __init__(
        self, tensors: Mapping[str, FoundTensor], files: Sequence[CheckpointFile], method: str | None = None
    ) -> None:
        """`method`: by which the packed tensors were quantised."""
        super().__init__(files)
        self._tensors = dict(tensors)
        self.packings = {name: each.packing for name, each in tensors.items() if isinstance(each, PackedTensor)}
        self.format = method if self.packings else None
        sizes: Counter[str] = Counter()
        for tensor in self._tensors.values():
            if isinstance(tensor, FileTensor):
                sizes[tensor.dtype] += tensor.nbytes
        self.dtype = max(sizes, key=lambda dtype: (sizes[dtype], dtype), default="float16")
        self.fingerprint = _fingerprint(self._files, self._tensors)

    def read_into(self, name: str, out: Weight) -> None:
        """Fill `out` with tensor `name`; see WeightSource. Raises ModelError, StorageError or ValueError."""
        part = self._tensors[name]
        with self._reading(name, _files_of(part)):
            if isinstance(part, PackedTensor):
                self._read_packed(name, part, out)
            elif part.transposed:
                flat_out(name, part.shape, out)
                columns = torch.empty(tuple(reversed(part.shape)), dtype=torch_dtype(part.dtype))
                self._stream(part, f"tensor {name}", columns.view(-1))
                cast(Tensor, out).copy_(columns.t())
            else:
                self._stream(part, f"tensor {name}", flat_out(name, part.shape, out))

    def _stream(self, part: FileTensor, what: str, flat: torch.Tensor) -> None:
        stored = torch_dtype(part.dtype)
        for start, chunk in self._chunks.stream(part, what):
            values = chunk.view(stored)
            copy(flat.narrow(0, start // stored.itemsize, values.numel()), values)

    def _read_packed(self, name: str, part: PackedTensor, out: Weight) -> None:
        """Fill `out` with a matrix of fewer bits, or with what it stands for."""
        if isinstance(out, PackedWeight):
            if (out.packing, out.shape) != (part.packing, part.shape):
                raise ValueError(f"{name} is {part.packing} of {part.shape}, got {out.packing} of {out.shape}")
            packed = out if out.device.type == "cpu" else PackedWeight.empty(part.packing, part.shape)
        else:
            flat_out(name, part.shape, out)
            packed = PackedWeight.empty(part.packing, part.shape)
        try:
            part.stored.fill(
                self._reader(name, part), part.rows, {key: raw(each) for key, each in packed.parts.items()}
            )
        except ValueError as error:
            raise ModelError(f"{name} cannot be read: {error}", "needed the files that were opened") from error
        if isinstance(out, PackedWeight):
            for key, each in packed.parts.items() if packed is not out else ():
                out.parts[key].copy_(each)
            return
        rows = max(1, _EXPANDED // part.shape[1])
        for start in range(0, part.shape[0], rows):
            stop = min(start + rows, part.shape[0])
            out[start:stop].copy_(packed.rows(start, stop).expanded(out.dtype))

    def _reader(self, name: str, tensor: PackedTensor) -> Read:
        def read(part: str, start: int = 0, stop: int | None = None) -> Array:
            stored = tensor.parts[part] if stop is None else tensor.parts[part].rows(start, stop)
            data = torch.empty(stored.shape, dtype=torch_dtype(stored.dtype))
            self._stream(stored, f"tensor {name}, {part}", data.view(-1))
            return raw(data)

        return read

    def location(self, name: str) -> Location | None:
        """Where the bytes of `name` lie, if they are one run, of this source's dtype, on a multiple of its size.

        ModelError where the file is no longer the one that was opened.
        """
        part = self._tensors[name]
        if isinstance(part, PackedTensor):
            return None
        part.file.check()
        start, stop = part.runs[0]
        if (
            len(part.runs) > 1
            or part.transposed
            or part.dtype != self.dtype
            or start % torch_dtype(self.dtype).itemsize
        ):
            return None
        return Location(part.file.path, start, stop - start)

    def equals(self, name: str, other: FileTensor) -> bool:
        """Whether `other` holds the same numbers as tensor `name`, to the bit. Raises as read_into does."""
        part = self._tensors[name]
        if isinstance(part, PackedTensor):
            return False
        if (part.file, part.runs) == (other.file, other.runs):
            return True
        if (part.dtype, part.shape) != (other.dtype, other.shape):
            return False
        pairs = zip(self._chunks.stream(part, f"tensor {name}"), self._chunks.stream(other, "its copy"), strict=True)
        return all(torch.equal(mine, others) for (_, mine), (_, others) in pairs)

    def content(self) -> str:
        found: dict[str, tuple[object, FileTensor]] = {}
        for name, each in self._tensors.items():
            if isinstance(each, PackedTensor):
                facts = (each.stored.scheme, each.packing, each.rows)
                found |= {f"{name} {key}": (facts, part) for key, part in each.parts.items()}
            else:
                found[name] = (None, each)
        return content_digest(found)


def _fingerprint(files: Iterable[CheckpointFile], tensors: Mapping[str, FoundTensor]) -> str:
    """A digest of which files these are, when they were last written to, and which of their bytes are which tensor."""
    facts = [(os.path.realpath(file.path), file.size, file.mtime_ns) for file in files]
    places = {}
    for name, each in tensors.items():
        parts = each.parts if isinstance(each, PackedTensor) else {"": each}
        places[name] = [(key, part.file.name, part.runs, part.dtype) for key, part in parts.items()]
        if isinstance(each, PackedTensor):
            places[name].append((repr(each.stored.scheme), repr(each.packing), each.rows, ""))
    return hashlib.sha256(json.dumps([facts, places], sort_keys=True).encode()).hexdigest()


def _files_of(part: FoundTensor) -> tuple[CheckpointFile, ...]:
    return tuple({each.file for each in part.parts.values()}) if isinstance(part, PackedTensor) else (part.file,)


def raw(tensor: torch.Tensor) -> Array:
    """The numbers of a contiguous host tensor as unsigned integers of their width, and int16 as it is."""
    kinds = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    kind = np.int16 if tensor.dtype == torch.int16 else kinds[tensor.itemsize]
    return np.frombuffer(host_view(tensor).view, kind).reshape(tensor.shape)


class Excerpt(NamedTuple):
    """`nbytes` bytes that lie `skip` bytes into a request, and from byte `start` on in the tensor."""

    start: int
    skip: int
    nbytes: int


class FileRead(NamedTuple):
    """Bytes [offset, stop) of a file, CHUNK of them at most, and which of them are wanted."""

    offset: int
    stop: int
    excerpts: tuple[Excerpt, ...]


def requests_for(runs: Iterable[Range], most: int = CHUNK) -> list[FileRead]:
    """The reads of the file that get the bytes of `runs`, none of which is empty, one after another, `most` at once.

    A request takes in as many runs as follow one another in the file with small gaps: for a bias, a fused projection
    leaves each head a run of a few hundred bytes.
    """
    found: list[FileRead] = []
    done = 0
    for start, stop in runs:
        while start < stop:
            last = found[-1] if found else None
            if last is not None and 0 <= start - last.stop <= _GAP and start < last.offset + most:
                end = min(stop, last.offset + most)
                excerpt = Excerpt(done, start - last.offset, end - start)
                found[-1] = FileRead(last.offset, end, (*last.excerpts, excerpt))
            else:
                end = min(stop, start + most)
                found.append(FileRead(start, end, (Excerpt(done, 0, end - start),)))
            done += end - start
            start = end
    return found


class ChunkReader:
    """Streams tensors through pairs of staging buffers, one pair for each thread that reads at the same time.

    Owns the buffers (2 x CHUNK each) and the threads that read ahead; `close` ends them.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._threads = ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint-read")

    def stream(self, tensor: FileTensor, what: str, whole: int = 1) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes of `tensor` in order, as (first byte, uint8 chunk); a chunk is valid until the next is asked for.

        `what` names them in errors. A tensor of one run comes in multiples of `whole` bytes, which are CHUNK at most.
        StorageError and ModelError as file.read."""
        pair = self._take()
        views = tuple(host_view(buffer) for buffer in pair)
        requests, itemsize = requests_for(tensor.runs, CHUNK - CHUNK % whole), torch_dtype(tensor.dtype).itemsize

        def place(number: int) -> int:
            # Chunks lie in their pages as they do in the file's, so that whole pages are read in place. Chunks from
            # an odd byte on cannot lie so and be a float tensor too: such reads take a detour.
            offset = requests[number].offset
            return offset % PAGE if offset % itemsize == 0 else 0

        def read(number: int) -> None:
            request = requests[number]
            nbytes = request.stop - request.offset
            tensor.file.read(views[number % 2], place(number), request.offset, nbytes, what)

        ahead = None
        try:
            if requests:
                read(0)
            for number, request in enumerate(requests):
                if ahead is not None:
                    ahead.result()
                if number + 1 < len(requests):
                    ahead = self._threads.submit(read, number + 1)
                buffer = pair[number % 2][place(number) :]
                for start, skip, nbytes in request.excerpts:
                    yield start, buffer[skip : skip + nbytes]
        finally:
            if ahead is not None:
                wait([ahead])
            self._pairs.append(pair)

    def close(self) -> None:
        """Wait for what is being read and drop the buffers; a second call does nothing."""
        self._threads.shutdown()
        self._pairs.clear()

    def _take(self) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            return self._pairs.pop()
        except IndexError:
            memory = HostMemory()
            return memory.allocate(CHUNK + PAGE).tensor, memory.allocate(CHUNK + PAGE).tensor
