"""A source of weights in fewer bits than they are stored in: packed while they are read, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from h2o_flexgen.checkpoint.importance import METHOD, Importance
from h2o_flexgen.checkpoint.source import WeightSource
from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.memory.handle import Location
from h2o_flexgen.quant import PackedWeight, Weight
from h2o_flexgen.quant.weights import pack

_VERSION = 2  # of the method: another one makes other numbers
_RANDOM = 1 << 16  # random numbers that are packed of a matrix, and repeated
_ROWS = 32 << 20  # bytes of float32 numbers at a time


class QuantisingSource:
    """A WeightSource that packs what `source` holds as `spec` has it. Owns `source`.

    importance  of the inputs of matrices of 4 bits, to be set before these are read if it is `by_importance`
    """

    format: str | None = "groupwise"

    def __init__(self, source: WeightSource, spec: ModelSpec, *, by_importance: bool = False) -> None:
        self._source = source
        self.packings: Mapping[str, Packing] = dict(spec.packings)
        self.dtype, self.dummy = source.dtype, source.dummy
        self.by_importance = by_importance and any(packing.bits == 4 for packing in self.packings.values())
        self.importance: Importance | None = None
        method = f"{_VERSION} {METHOD if self.by_importance else ''}"
        self.fingerprint = f"{source.fingerprint} {method} {sorted(spec.packings, key=str)}"

    def read_into(self, name: str, out: Weight) -> None:
        """Fill `out` with tensor `name`; see WeightSource."""
        if not isinstance(out, PackedWeight):
            self._source.read_into(name, out)
            return
        if self.by_importance and self.importance is None:
            raise RuntimeError("which inputs matter was not measured")
        weight = None if self.importance is None else self.importance.get(name)
        values = torch.empty(out.shape, dtype=getattr(torch, self.dtype))
        self._source.read_into(name, values)
        outs, ins = out.shape
        some, packed = max(1, _ROWS // (4 * ins)), outs
        if self.dummy:  # packing billions of random numbers would take minutes, and makes them no more random
            packed = min(outs, max(1, _RANDOM // ins))
        for start in range(0, packed, some):
            stop = min(packed, start + some)
            pack(values[start:stop], out.rows(start, stop), weight)
        for start in range(packed, outs, packed):
            stop = min(start + packed, outs)
            for part, repeated in zip(
                out.rows(start, stop).parts.values(), out.rows(0, stop - start).parts.values(), strict=True
            ):
                part.copy_(repeated)

    def location(self, name: str) -> Location | None:
        """Where the bytes of a tensor that stays as it is lie; None of others."""
        return None if name in self.packings else self._source.location(name)

    def close(self) -> None:
        self._source.close()
