"""A source of weights in fewer bits than they are stored in: packed while they are read, a few rows at a time."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from h2o_flexgen.checkpoint.source import WeightSource
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import WeightGroup
from h2o_flexgen.errors import StorageError
from h2o_flexgen.folders import whole_file
from h2o_flexgen.huge import LARGE
from h2o_flexgen.memory.handle import Location, torch_dtype
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.models.decoder import importance
from h2o_flexgen.quant import PackedWeight, Weight
from h2o_flexgen.quant.weights import pack

log = logging.getLogger(__name__)

_VERSION = 2  # of the method: another one makes other numbers
_RANDOM = 1 << 16  # random numbers that are packed of a matrix, and repeated
_ROWS = 32 << 20  # bytes of float32 numbers at a time


METHOD = "importance 1"
"""Changes whenever other numbers come of the same model and text."""
_FILE = "importance.pt"

Importance = Mapping[str, Tensor]
"""Of a matrix, by name: float32 (ins)."""


class QuantisingSource(WeightSource):
    """Packs what `source` holds as `spec` has it. Owns `source`.

    importance  of the inputs of matrices of 4 bits, to be set before these are read if it is `by_importance`
    """

    format = "groupwise"

    def __init__(self, source: WeightSource, spec: ModelSpec, *, by_importance: bool = False) -> None:
        self._source = source
        self.packings = dict(spec.packings)
        self.dtype, self.dummy = source.dtype, source.dummy
        self.by_importance = by_importance and any(packing.bits == 4 for packing in self.packings.values())
        self.importance: Importance | None = None
        method = f"{_VERSION} {METHOD if self.by_importance else ''}"
        self.fingerprint = f"{source.fingerprint} {method} {sorted(spec.packings, key=str)}"

    def read_into(self, name: str, out: Weight) -> None:
        if not isinstance(out, PackedWeight) or self._as_stored(name):
            self._source.read_into(name, out)
            return
        if self.by_importance and self.importance is None:
            raise RuntimeError("which inputs matter was not measured")
        weight = None if self.importance is None else self.importance.get(name)
        outs, ins = out.shape
        some, packed = min(outs, max(1, _ROWS // (4 * ins))), outs
        # Not from the heap, in which each of thousands of experts would leave a hole.
        values = LARGE.empty(outs, ins, dtype=getattr(torch, self.dtype))
        numbers = LARGE.empty(some, ins, dtype=torch.float32)
        self._source.read_into(name, values)
        if self.dummy:  # packing billions of random numbers would take minutes, and makes them no more random
            packed = min(outs, max(1, _RANDOM // ins))
        for start in range(0, packed, some):
            stop = min(packed, start + some)
            pack(numbers[: stop - start].copy_(values[start:stop]), out.rows(start, stop), weight)
        for start in range(packed, outs, packed):
            stop = min(start + packed, outs)
            for part, repeated in zip(
                out.rows(start, stop).parts.values(), out.rows(0, stop - start).parts.values(), strict=True
            ):
                part.copy_(repeated)

    def location(self, name: str) -> Location | None:
        """Where the bytes of a tensor that stays as it is lie; None of others."""
        return self._source.location(name) if self._as_stored(name) else None

    def content(self) -> str:
        return self._source.content()

    def close(self) -> None:
        self._source.close()

    def _as_stored(self, name: str) -> bool:
        return self.packings.get(name) == self._source.packings.get(name)


def kept_importance(
    spec: ModelSpec,
    source: WeightSource,
    tokens: Tensor,
    dtype: str,
    offload: Path,
    progress: Callable[[int, int], None],
) -> Importance:
    """`models.importance` of the model of `spec` over `tokens` (n, S), computed in `dtype` on the tokens' device.

    Read from the offload folder where an earlier run has left it, else measured and left there. Waits for another run
    that is measuring. Takes the memory of one unit. `progress` hears of the bytes read, and of all. Raises what
    `source` raises, and UsageError for a folder that is not to be trusted.
    """
    digest = hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()
    identity = f"{METHOD} {source.fingerprint} {dtype} {digest}"

    total = sum(spec.groups_by_key[unit.weights].nbytes(dtype) for unit in spec.units[:-1])
    done = 0

    def read(group: WeightGroup) -> dict[str, Tensor]:
        nonlocal done
        tensors = {}
        for tensor in group.tensors:
            tensors[tensor.name] = torch.empty(tensor.shape, dtype=torch_dtype(dtype), device=tokens.device)
            source.read_into(tensor.name, tensors[tensor.name])
        done += group.nbytes(dtype)
        progress(done, total)
        return tensors

    def measured() -> dict[str, Tensor]:
        return {name: each.cpu() for name, each in importance(spec, read, tokens).items()}

    try:
        with OffloadDir(offload) as folder, folder.packed(identity) as path:
            found = _read(path / _FILE, spec)
            if found is None:
                found = measured()
                _write(path / _FILE, found)
            return found
    except StorageError as error:
        log.warning("which inputs matter is not kept for later runs: %s", error)
        return measured()


def _read(path: Path, spec: ModelSpec) -> dict[str, Tensor] | None:
    """The tensors that an earlier run has left; None where it left none, or they do not fit `spec`."""
    wanted = {each.name: each.shape for group in spec.weight_groups for each in group.tensors}
    try:
        found = torch.load(path, weights_only=True)
        fits = all(each.shape == wanted[name][1:] and each.dtype == torch.float32 for name, each in found.items())
    except FileNotFoundError:
        return None
    except Exception as error:  # torch and pickle raise whatever they stumble over
        fits, found = False, error
    if not fits:
        log.warning("%s cannot be used: inputs are measured again", path)
        return None
    return dict(found)


def _write(path: Path, found: Importance) -> None:
    """Where the file cannot be written, the next run measures again."""
    try:
        with whole_file(path) as temporary:
            torch.save(dict(found), temporary)
    except (OSError, RuntimeError) as error:
        log.warning("which inputs matter cannot be kept in %s: %s", path.parent, error)
