"""Where weights, KV cache and hidden states live, and the shape of the block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from h2o_flexgen.config.checks import Checked, Count, KeptAsJson, made_of, whole
from h2o_flexgen.config.flags import option
from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion

TIERS = ("gpu", "cpu", "disk")
"""Fastest first."""


def elsewhere(shares: Mapping[str, float], compute_tier: str) -> list[str]:
    """The tiers with a share that are not the one that computes. A machine without a GPU computes on the CPU with the
    tensors that are placed on a gpu."""
    return [tier for tier, share in shares.items() if share and tier not in (compute_tier, "gpu")]


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
        """The kernels of a compute tier, "gpu" or "cpu". `triton`: whether it serves the GPU, where one is real."""
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
        longer than starting them; in all they take some 14 bytes for each logit. Triton's kernels write none.
        """
        return 1 << 24 if self is Kernels.TORCH else 1 << 20


class Shares(Mapping[str, float]):
    """Shares over the tiers: immutable, hashable, fastest tier first, zero shares left out.

    Reading a tier that has no share gives 0.0 (as a Counter does), while `in` and iteration see the others only.
    `label` names the flag in a UsageError: an unknown tier, a share that is negative or nan, a sum other than 1.
    """

    __slots__ = ("_items",)

    def __init__(self, shares: Mapping[str, float], label: str = "shares") -> None:
        if not isinstance(shares, Mapping):
            raise UsageError(f"{label} is {shares!r}", 'needed shares by tier: {"cpu": 0.3, "disk": 0.7}')
        for tier, value in shares.items():
            if tier not in TIERS:
                hint = suggestion(str(tier), TIERS)
                raise UsageError(f"{label} names the tier {tier!r}", f"needed tiers among {', '.join(TIERS)}", hint)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise UsageError(f"{label} gives {tier} the share {value!r}", "needed a number from 0 to 1")
        total = sum(shares.values())
        if abs(total - 1) > 1e-6:
            listed = ", ".join(f"{tier} {value:g}" for tier, value in shares.items())
            raise UsageError(f"{label} adds up to {total:g} ({listed})", "needed shares that sum to 1")
        self._items = tuple((tier, float(shares[tier])) for tier in TIERS if shares.get(tier))

    def __getitem__(self, tier: str) -> float:
        if tier not in TIERS:
            raise KeyError(tier)
        return dict(self._items).get(tier, 0.0)

    def __contains__(self, tier: object) -> bool:
        return any(name == tier for name, _ in self._items)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(dict(self._items))

    def __str__(self) -> str:
        return ",".join(f"{tier}={value!r}" for tier, value in self._items)


def parse_shares(text: str) -> Shares:
    """The shares in `cpu=0.3,disk=0.7`, or `cpu` for all of it there. Raises UsageError."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        tier, _, value = part.strip().partition("=")
        tier = tier.strip().lower()
        if tier in shares:
            raise UsageError(f"{text!r} names {tier} twice", "needed every tier once: cpu=0.3,disk=0.7")
        try:
            shares[tier] = float(value) if "=" in part else 1.0
        except ValueError:
            raise UsageError(f"{part!r} is not a share", "needed tier=number: cpu=0.3,disk=0.7") from None
    return Shares(shares, f"{text!r}")


def _placed(value: Mapping[str, float], flag: str) -> Shares:
    """The value of a placement's `flag`."""
    kind = flag.removeprefix("--").removesuffix("-placement")
    return value if isinstance(value, Shares) else Shares(value, f"the placement of {kind}")


def _placement(name: str, what: str) -> Any:
    text = f"shares of the {what} over the tiers, cpu=0.3,disk=0.7; whole units, spread over the depth"
    default = Shares({"cpu": 1.0})
    return option(default, name, help=text, metavar="TIER=SHARE,...", parse=parse_shares, show=str, unset="planned")


@dataclass(frozen=True)
class OffloadPolicy(Checked, KeptAsJson):
    """The placements and the block shape of a run (FlexGen, arXiv 2303.06865, section 4). Hashable; raises UsageError.

    Placements are given as any mapping from tier to share and kept as Shares.
    """

    gpu_batch_size: Count = option(
        1, "--gpu-batch-size", "--gbs", help="sequences that go through a layer together", unset="planned"
    )
    num_gpu_batches: Count = option(
        1, "--num-gpu-batches", "--num-gb", help="GPU batches per pass over the weights", unset="planned"
    )
    weights: Annotated[Mapping[str, float], _placed] = _placement("--weights-placement", "weights")
    cache: Annotated[Mapping[str, float], _placed] = _placement("--cache-placement", "KV cache")
    hidden: Annotated[Mapping[str, float], _placed] = _placement("--hidden-placement", "hidden states")
    cpu_cache_compute: bool = option(False, help="compute the attention of a cache on the CPU there", unset="planned")
    overlap: bool = option(True, help="copy and compute at the same time")
    lookahead: Count = option(1, help="streamed weight groups in flight beyond the current", unset="planned")
    prefill_chunk: Annotated[int, partial(whole, minimum=16)] | None = option(
        None,
        help="prompt tokens that go through a unit at once",
        unset=f"{Kernels.CPU.chunk}, or {Kernels.TRITON.chunk} where a GPU has the memory",
    )
    """A long prompt takes no more working memory than a chunk, its keys and values of one layer, and its hidden states.
    None: by the device and its memory, see `cuts`; plans always have a number."""

    @property
    def block_size(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def chunk(self) -> int:
        """`prefill_chunk`; where that is open the smallest of `cuts`, which is a CPU's."""
        return Kernels.CPU.chunk if self.prefill_chunk is None else self.prefill_chunk

    def cuts(self, kernels: Kernels) -> list[OffloadPolicy]:
        """The same policy with a `prefill_chunk`: its own, or each that suits these kernels, of which the first is to
        be taken that fits."""
        if self.prefill_chunk is not None:
            return [self]
        return [replace(self, prefill_chunk=size) for size in dict.fromkeys((kernels.chunk, self.chunk))]

    @classmethod
    def from_percent(cls, percent: Sequence[int], **others: Any) -> OffloadPolicy:
        """FlexGen's six percentages: weights, cache and hidden on gpu and cpu (wg wc cg cc hg hc); disk has the rest.

        `others` are the remaining fields. Raises UsageError.
        """
        found = f"--percent is {' '.join(map(str, percent))}"
        if len(percent) != 6:
            raise UsageError(found, f"needed 6 numbers: gpu and cpu, of weights, cache and hidden; got {len(percent)}")
        numbers = [whole(value, f"{found}: one of them", 0) for value in percent]
        placements: dict[str, Any] = {}
        for position, kind in enumerate(("weights", "cache", "hidden")):
            gpu, cpu = numbers[2 * position : 2 * position + 2]
            if gpu + cpu > 100:
                raise UsageError(
                    f"{found}: {kind} {gpu} + {cpu} = {gpu + cpu}", "needed at most 100; disk has the rest"
                )
            placements[kind] = Shares({"gpu": gpu / 100, "cpu": cpu / 100, "disk": (100 - gpu - cpu) / 100})
        return cls(**placements, **others)

    def with_gpu_as_cpu(self) -> OffloadPolicy:
        """The same policy on a machine without a gpu tier: the shares of gpu are on cpu."""

        def moved(shares: Mapping[str, float]) -> Shares:
            return Shares({"cpu": shares["gpu"] + shares["cpu"], "disk": shares["disk"]})

        return replace(self, weights=moved(self.weights), cache=moved(self.cache), hidden=moved(self.hidden))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OffloadPolicy:
        """The policy of `to_json`; unknown keys raise UsageError with a suggestion. `made_for` is a note, not read."""
        return made_of(cls, data, derived=("made_for",))
