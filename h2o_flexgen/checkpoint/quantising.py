"""A source of weights in fewer bits than they are stored in: packed while they are read, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from h2o_flexgen.checkpoint.source import WeightSource
from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.memory.handle import Location
from h2o_flexgen.quant import PackedWeight, Weight
from h2o_flexgen.quant.weights import pack

_VERSION = 1  # of the method: another one makes other numbers
_RANDOM = 1 << 16  # random numbers that are packed of a matrix, and repeated
_ROWS = 32 << 20  # bytes of float32 numbers at a time


class QuantisingSource:
    """A WeightSource that packs what `source` holds as `spec` has it. Owns `source`."""

    format: str | None = "groupwise"

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        self._source = source
        self.packings: Mapping[str, Packing] = dict(spec.packings)
        self.dtype, self.dummy = source.dtype, source.dummy
        self.fingerprint = f"{source.fingerprint} {_VERSION} {sorted(spec.packings, key=str)}"

    def read_into(self, name: str, out: Weight) -> None:
        """Fill `out` with tensor `name`; see WeightSource."""
        if not isinstance(out, PackedWeight):
            self._source.read_into(name, out)
            return
        values = torch.empty(out.shape, dtype=getattr(torch, self.dtype))
        self._source.read_into(name, values)
        outs, ins = out.shape
        some, packed = max(1, _ROWS // (4 * ins)), outs
        if self.dummy:  # packing billions of random numbers would take minutes, and makes them no more random
            packed = min(outs, max(1, _RANDOM // ins))
        for start in range(0, packed, some):
            stop = min(packed, start + some)
            pack(values[start:stop], out.rows(start, stop))
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
