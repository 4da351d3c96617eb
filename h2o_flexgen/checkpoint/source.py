"""The base of all sources of weights, and the source that makes them up: random weights of a model's shape."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import WEIGHT_DTYPES
from h2o_flexgen.errors import ModelError
from h2o_flexgen.folders import Closing
from h2o_flexgen.memory.disk import host_view
from h2o_flexgen.memory.handle import Location, torch_dtype
from h2o_flexgen.models.schemes import MXFP4
from h2o_flexgen.quant import PackedWeight, Weight

SERIAL = 1 << 14  # numbers; half of what torch gives to a second thread
_POOL = 4_194_319  # numbers; prime, so that no two rows of a matrix are the same stretch of it
_STD = 0.02
_SCALE = 120  # the exponent of 2 ** -7, with 127 added: levels of MXFP4 deviate by 2.9


class WeightSource(Closing):
    """Weights by canonical name. Any number of threads may read at once; reading after `close` raises ValueError.

    dtype        how they are stored: "float16", "bfloat16", "float32"
    fingerprint  changes whenever their content may have
    packings     the tensors that are kept in fewer bits, and how; the others are in `dtype`
    format       the name of the packed tensors' format; None where no tensor is packed
    dummy        whether they are random
    """

    dtype: str
    fingerprint: str
    packings: Mapping[str, Packing]
    format: str | None = None
    dummy: bool = False

    def read_into(self, name: str, out: Weight) -> None:
        """Fill `out` with tensor `name`: contiguous, of the canonical shape, any of WEIGHT_DTYPES, any device; or of
        the packing that the source has for it."""
        raise NotImplementedError

    def location(self, name: str) -> Location | None:
        """The bytes of `name` on disk in the source's dtype, row-major without gaps; None where no file has them so."""
        return None

    def content(self) -> str:
        """A digest of what the weights are, equal for equal weights wherever their files lie: see `content_digest`."""
        return self.fingerprint


def flat_out(name: str, shape: tuple[int, ...], out: Weight) -> torch.Tensor:
    """`out` as a flat tensor; ValueError unless it is contiguous, of `shape` and of a dtype in WEIGHT_DTYPES."""
    if isinstance(out, PackedWeight):
        raise ValueError(f"{name} is not packed")
    dtype = str(out.dtype).removeprefix("torch.")
    if tuple(out.shape) != shape or not out.is_contiguous() or dtype not in WEIGHT_DTYPES:
        raise ValueError(f"{name} needs a contiguous float tensor of shape {shape}, got {dtype} of {tuple(out.shape)}")
    return out.view(-1)


def copy(out: torch.Tensor, values: torch.Tensor) -> None:
    """Copy flat host `values` to flat `out`, in its dtype, with one thread and, of the same dtype, no lock held.

    Loading may run beside the computation: torch's copy would have all its threads wait for one another, which on busy
    cores costs a factor of ten. Pieces of another dtype are too small for torch to share among threads.
    """
    if out.device.type != "cpu":
        out.copy_(values)
    elif out.dtype == values.dtype:
        np.copyto(np.frombuffer(host_view(out).view, np.uint8), np.frombuffer(host_view(values).view, np.uint8))
    else:
        for start in range(0, values.numel(), SERIAL):
            out[start : start + SERIAL].copy_(values[start : start + SERIAL])


class DummySource(WeightSource):
    """Random weights: normal with standard deviation 0.02, norms that change nothing and biases 0.
    Matrices that the model has in MXFP4 are codes that are all as likely, with one scale for about that deviation.

    A norm's weight is 1, or 0 where the model adds 1 to it. Any other tensor depends on the seed, its name and `dtype`
    alone; read into another dtype it holds the same numbers as a checkpoint of `dtype` would. Copied from one pool of
    random numbers, at a start of its own for each tensor, as fast as memory. Owns the pool (16 MiB in float32, and one
    copy per dtype asked for); thread-safe.
    """

    dummy = True

    def __init__(self, spec: ModelSpec, dtype: str | None = None, seed: int = 0) -> None:
        """`dtype`: one of WEIGHT_DTYPES, the model's own where it is None, ModelError for another. ValueError where
        `spec` has other packings than MXFP4's."""
        self.dtype = dtype or spec.dtype
        if self.dtype not in WEIGHT_DTYPES:
            raise ModelError(f"dummy weights cannot be {self.dtype}", f"needed one of {', '.join(WEIGHT_DTYPES)}")
        self.packings = dict(spec.packings)
        self.format = "mxfp4" if self.packings else None
        if set(self.packings.values()) - {MXFP4}:
            raise ValueError("dummy weights are in MXFP4 or not packed")
        self._seed = seed
        self._shapes = {tensor.name: tuple(tensor.shape) for group in spec.weight_groups for tensor in group.tensors}
        self._norm = 1.0 - spec.arch.norm_offset
        facts = json.dumps(["dummy", _POOL, _STD, self._norm, seed, self.dtype, self._shapes, sorted(self.packings)])
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        pool = torch.empty(_POOL).normal_(0.0, _STD, generator=generator)
        self._pool = cache(pool.to(torch_dtype(self.dtype)).to)  # in a dtype, rounded to the source's first
        self._codes = torch.randint(0, 256, (_POOL if self.packings else 0,), generator=generator, dtype=torch.uint8)

    def read_into(self, name: str, out: Weight) -> None:
        if isinstance(out, PackedWeight) and name in self.packings:
            out.parts["scale"].fill_(_SCALE)
            self._repeat(name, out.parts["codes"].view(-1), self._codes)
            return
        flat = flat_out(name, self._shapes[name], out)
        if name.endswith("bias"):
            flat.zero_()
            return
        if name.endswith("norm.weight"):
            flat.fill_(self._norm)
            return
        self._repeat(name, flat, self._pool(flat.dtype))

    def _repeat(self, name: str, flat: torch.Tensor, pool: torch.Tensor) -> None:
        """Fill `flat` with `pool` over and over, from a start of its own for each tensor."""
        digest, done = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest(), 0
        start = int.from_bytes(digest) % _POOL
        while done < flat.numel():
            taken = min(_POOL - start, flat.numel() - done)
            copy(flat.narrow(0, done, taken), pool.narrow(0, start, taken))
            done, start = done + taken, 0

    def close(self) -> None:
        """No file is open."""
