"""Whose kernels compute a run: how prompts are cut, and what their attention takes in memory, follow from that."""

from __future__ import annotations

from enum import StrEnum


class Kernels(StrEnum):
    """Whose kernels attend to prompts, on the device that computes everything else."""

    CPU = "cpu"
    """On a CPU, the one behind an emulated GPU included."""
    TORCH = "torch"
    """On a GPU that Triton does not serve: an old one, or one without Triton."""
    TRITON = "triton"
    """On every other GPU. It records decode steps, too."""

    @classmethod
    def of(cls, compute_tier: str, *, emulated: bool, triton: bool) -> Kernels:
        """Those of a compute tier, "gpu" or "cpu". `triton`: whether it serves the GPU, where there is a real one."""
        if compute_tier == "cpu" or emulated:
            return cls.CPU
        return cls.TRITON if triton else cls.TORCH

    @property
    def chunk(self) -> int:
        """Prompt tokens that go through a unit at once, where there is room.

        A CPU computes products at their full rate with 2,048, and the activations stay in its caches. A GPU starts some
        dozens of kernels for each chunk and layer, most of them small: 8,192 where memory is left for the activations.
        """
        return 2048 if self is Kernels.CPU else 8192

    @property
    def logits(self) -> int:
        """Float32 attention logits of prompts alive at once: of 16 queries, or so many where these have fewer.

        On a CPU 4 MiB, which stay in its caches. On a GPU 64 MiB, so that the kernels that torch starts on them take
        longer than starting them; what those take in all is some 14 bytes for each. Triton's kernels write none.
        """
        return 1 << 24 if self is Kernels.TORCH else 1 << 20
