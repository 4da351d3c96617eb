"""Random weights of a model's shape, made in place: for timing a model that is not on this machine."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

from h2o_flexgen.checkpoint.source import WEIGHT_DTYPES, copy, flat_out
from h2o_flexgen.errors import ModelError
from h2o_flexgen.memory.handle import Location, torch_dtype

if TYPE_CHECKING:
    from h2o_flexgen.config.model.spec import ModelSpec

_POOL = 4_194_319  # numbers; prime, so that no two rows of a matrix are the same stretch of it
_STD = 0.02


class DummySource:
    """A WeightSource of random weights: normal with standard deviation 0.02, norms that change nothing and biases 0.

    A norm's weight is 1, or 0 where the model adds 1 to it. Any other tensor depends on the seed, its name and `dtype`
    alone; read into another dtype it holds the same numbers as a checkpoint of `dtype` would. Copied from one pool of
    random numbers, at a start of its own for each tensor, as fast as memory. Owns the pool (16 MiB in float32, and one
    copy per dtype asked for); thread-safe.
    """

    dummy = True

    def __init__(self, spec: ModelSpec, dtype: str | None = None, seed: int = 0) -> None:
        """`dtype`: one of WEIGHT_DTYPES, the model's own where it is None; ModelError for another."""
        self.dtype = dtype or spec.dtype
        if self.dtype not in WEIGHT_DTYPES:
            raise ModelError(f"dummy weights cannot be {self.dtype}", f"needed one of {', '.join(WEIGHT_DTYPES)}")
        self._seed = seed
        self._shapes = {tensor.name: tuple(tensor.shape) for group in spec.weight_groups for tensor in group.tensors}
        self._norm = 1.0 - spec.arch.norm_offset
        facts = json.dumps(["dummy", _POOL, _STD, self._norm, seed, self.dtype, self._shapes])
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()
        generator = torch.Generator().manual_seed(seed % (1 << 63))
        pool = torch.empty(_POOL).normal_(0.0, _STD, generator=generator)
        self._pools = {self.dtype: pool.to(torch_dtype(self.dtype))}

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with tensor `name`; see WeightSource."""
        flat = flat_out(name, self._shapes[name], out)
        if name.endswith("bias"):
            flat.zero_()
            return
        if name.endswith("norm.weight"):
            flat.fill_(self._norm)
            return
        pool, done = self._pool(flat.dtype), 0
        start = int.from_bytes(hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()) % _POOL
        while done < flat.numel():
            taken = min(_POOL - start, flat.numel() - done)
            copy(flat.narrow(0, done, taken), pool.narrow(0, start, taken))
            done, start = done + taken, 0

    def location(self, name: str) -> Location | None:
        """None: dummy weights are in no file."""
        return None

    def close(self) -> None:
        """Nothing is open."""

    def _pool(self, dtype: torch.dtype) -> torch.Tensor:
        """The pool in `dtype`, rounded to the source's dtype first."""
        key = str(dtype).removeprefix("torch.")
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = self._pools[self.dtype].to(dtype)
        return pool
