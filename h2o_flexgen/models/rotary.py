"""Rotary position embedding (Su et al., arXiv 2104.09864) and the ways to stretch it beyond the trained context.

Dimension i of the rotated part of a head, i < dim / 2, turns together with dimension i + dim / 2 by the angle
position * f_i, where f_i = theta ** (-2 i / dim) before scaling:

linear      f / factor: positions are interpolated (Chen et al., arXiv 2306.15595)
dynamic     NTK-aware: theta grows with the length of the sequence, once that exceeds the trained context
llama3      f / factor for waves longer than the trained context, f for short ones, a ramp in between (Llama 3.1)
yarn        the same idea with the ramp over dimensions, and a temperature (Peng et al., arXiv 2309.00071)
longrope    f / a factor per dimension, of two sets: for sequences within the trained context, and for longer ones
            (Ding et al., arXiv 2402.13753)

Frequencies are computed in float32 in the order of operations that transformers has: at position 100,000 one rounding
more is an angle of 0.01.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.config.model.arch import RotarySpec
from h2o_flexgen.kernels import triton_available
from h2o_flexgen.kernels.layers import rotate_halves, rotate_heads


class Angles(NamedTuple):
    """Cosines and sines, both (..., dim), of the angles by which the leading `dim` dimensions of a head turn.

    The second half of `dim` repeats the first: both members of a pair turn by the same angle.
    """

    cos: Tensor
    sin: Tensor


class Rotary:
    """The angles of one RotarySpec. Frequencies are computed once; positions cost one outer product."""

    def __init__(self, spec: RotarySpec, max_positions: int) -> None:
        """`max_positions`: the model's context, the trained one where the spec names no other."""
        self.spec = spec
        self._original = spec.original_positions or max_positions
        self._exponents = torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim
        self._frequencies = self._scaled(spec.short_factors)
        self._long_frequencies = self._scaled(spec.long_factors) if spec.scaling == "longrope" else self._frequencies
        self._on = cache(Tensor.to)  # constants on a device, where they then stay

    def angles(self, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> Angles:
        """Angles (T, dim) in `dtype` of tokens at `positions` (T,) int64, computed in float32 where `positions` are.

        `lengths` (T,) int64: how many tokens the sequence of each token has so far, the newest one's position + 1; the
        same for all tokens of a prompt. Read only where `spec.by_length`.
        """
        frequencies = self._by_length(lengths) if self.spec.by_length else self._on(self._frequencies, positions.device)
        angles = positions.unsqueeze(-1).float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.spec.attention_factor != 1.0:
            cos, sin = cos.mul_(self.spec.attention_factor), sin.mul_(self.spec.attention_factor)
        return Angles(*(torch.cat((t, t), dim=-1) for t in (cos.to(dtype), sin.to(dtype))))

    def growth(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The factors (T, 1, 1) of queries (T, heads, head_dim) at `positions` (T,); None: all are 1."""
        if not self.spec.growth:
            return None
        times = 1 + torch.floor(positions / self.spec.grows_every)
        return (1 + self.spec.growth * times.log()).to(dtype).view(-1, 1, 1)

    def table(self, size: int, dtype: torch.dtype, device: torch.device) -> Angles:
        """Angles (size, dim) of positions 0 to size - 1 of a sequence of `size` tokens."""
        return self.angles(torch.arange(size, device=device), torch.full((size,), size, device=device), dtype)

    def _by_length(self, lengths: Tensor) -> Tensor:
        """Frequencies (T, dim / 2) of tokens in sequences of `lengths` tokens."""
        lengths = lengths.unsqueeze(-1)
        short = self._on(self._frequencies, lengths.device)
        if self.spec.scaling == "dynamic":
            long = self._dynamic(lengths)
        else:
            long = self._on(self._long_frequencies, lengths.device)
        return torch.where(lengths > self._original, long, short)

    def _dynamic(self, lengths: Tensor) -> Tensor:
        """Frequencies by NTK-aware scaling: theta grows so that the longest wave stretches as the sequence does."""
        spec = self.spec
        # Short lengths could make the root's argument negative; the caller has other frequencies for them.
        stretch = spec.factor * lengths.clamp(min=self._original) / self._original - (spec.factor - 1)
        return 1.0 / (spec.theta * stretch ** (spec.dim / (spec.dim - 2))) ** self._on(self._exponents, lengths.device)

    def _scaled(self, factors: tuple[float, ...]) -> Tensor:
        """Frequencies (dim / 2,) float32 that hold for sequences of every length, or for those `factors` are for."""
        spec = self.spec
        waves = spec.theta**self._exponents
        if spec.scaling == "linear":
            return 1.0 / waves / spec.factor
        if spec.scaling == "llama3":
            return self._llama3(1.0 / waves)
        if spec.scaling == "yarn":
            return self._yarn(waves)
        if spec.scaling == "longrope":
            return 1.0 / (torch.tensor(factors) * waves)
        return 1.0 / waves

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Waves that fit into the context less than `low_freq_factor` times are stretched, those that fit more often
        than `high_freq_factor` are kept, and the share of stretching falls linearly with the number in between.
        """
        spec, context = self.spec, self._original
        waves = 2 * math.pi / frequencies
        kept = (context / waves - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
        between = (1 - kept) * frequencies / spec.factor + kept * frequencies
        stretched = torch.where(waves > context / spec.low_freq_factor, frequencies / spec.factor, between)
        return torch.where(waves < context / spec.high_freq_factor, frequencies, stretched)

    def _yarn(self, waves: Tensor) -> Tensor:
        """Dimensions that turn more than `beta_fast` times within the context are kept, those that turn less than
        `beta_slow` times are stretched, and the share of stretching rises linearly with the dimension in between.
        """
        spec = self.spec
        low, high = (self._turning(turns) for turns in (spec.beta_fast, spec.beta_slow))
        if spec.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, spec.dim - 1)
        # Where both ends meet, a step of the ramp's own: no division by zero.
        ramp = (torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
        kept = 1 - ramp.clamp(0, 1)
        return 1.0 / (spec.factor * waves) * (1 - kept) + 1.0 / waves * kept

    def _turning(self, turns: float) -> float:
        """The dimension, a fraction too, that turns `turns` times within the trained context."""
        return self.spec.dim * math.log(self._original / (turns * 2 * math.pi)) / (2 * math.log(self.spec.theta))


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turns x (..., heads, head_dim) by angles (..., dim); dimensions beyond `dim` pass through.

    The result is new and contiguous, whatever the strides of x; both have one dtype.
    """
    half = angles.cos.shape[-1] // 2
    return rotate_halves(x, *(part[..., :half].unsqueeze(-2) for part in angles))


def rotate_both(q: Tensor, k: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """Queries (T, heads, head_dim) and keys (T, kv_heads, head_dim) of the same tokens, turned as by `rotate`."""
    if triton_available.serves(q.device):
        from h2o_flexgen.kernels import triton_rotate  # imports Triton, which is not there on every machine

        return triton_rotate.rotate_both(q, k, *angles)
    found = rotate_heads(q, k, *angles) if q.ndim == 3 else None
    return (rotate(q, angles), rotate(k, angles)) if found is None else found
