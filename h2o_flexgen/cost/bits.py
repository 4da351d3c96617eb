"""Which bits for the weights: every choice is searched, and the fastest is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PERPLEXITY: Mapping[int, float | None] = {16: 0.0, 8: 0.004, 4: 0.128}
"""By how much of itself perplexity grows with weights of so many bits in groups of 64, as measured on Gemma 3 270M, see
docs/bits.md; None: that was not measured."""
ALIKE = 1.01
"""Predictions cannot tell throughputs apart that differ by less: of these the one with most bits is taken."""


@dataclass(frozen=True)
class BitsChoice:
    """The bits that a search chose among. throughputs: generated tokens per second by bits; None where nothing fits the
    caps."""

    throughputs: Mapping[int, float | None]

    @property
    def bits(self) -> int:
        """The most that are as fast as any."""
        known = {bits: rate for bits, rate in self.throughputs.items() if rate is not None}
        return max(bits for bits, rate in known.items() if ALIKE * rate >= max(known.values()))

    @property
    def text(self) -> str:
        """The choice, its alternatives and its cost."""
        tried = ", ".join(
            f"{bits} bits {'do not fit' if rate is None else f'{rate:.3g} tokens/s'}"
            for bits, rate in self.throughputs.items()
        )
        return f"{self.bits} of {tried} (predicted); {quality(self.bits)}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        rates = {str(bits): rate for bits, rate in self.throughputs.items()}
        return {"chosen": self.bits, "gen_throughput": rates, "quality": quality(self.bits), "text": self.text}


def quality(bits: int) -> str:
    """The quality that weights of so many bits cost, in a sentence."""
    more = PERPLEXITY[bits]
    if more is None:
        return f"{bits} bits: what they cost in perplexity was not measured"
    return (
        f"{bits} bits: perplexity about {more:+.1%} (a model of 270 M parameters)"
        if more
        else f"{bits} bits: the model as it is"
    )
