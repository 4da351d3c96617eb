"""The four throughputs of a run, defined once for our records and for those of the peers."""

from __future__ import annotations

import math

DERIVED = ("gen_throughput", "total_token_throughput", "prefill_throughput", "decode_throughput")
"""Keys of a record that are computed from others."""


class Rates:
    """Mixin: tokens per second from token counts and seconds, None where no time was spent."""

    sequences: int
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float
    decode_s: float

    @property
    def gen_throughput(self) -> float | None:
        """Generated tokens per second of prefill and decode together (FlexGen's definition)."""
        return _rate(self.generated_tokens, self.prefill_s + self.decode_s)

    @property
    def total_token_throughput(self) -> float | None:
        """Prompt and generated tokens per second of prefill and decode together (vLLM's definition)."""
        return _rate(self.prompt_tokens + self.generated_tokens, self.prefill_s + self.decode_s)

    @property
    def prefill_throughput(self) -> float | None:
        """Prompt tokens per second of prefill."""
        return _rate(self.prompt_tokens, self.prefill_s)

    @property
    def decode_throughput(self) -> float | None:
        """Generated tokens per second of decode; the first of each sequence is prefill's."""
        return _rate(max(0, self.generated_tokens - self.sequences), self.decode_s)


def _rate(count: int, seconds: float) -> float | None:
    """`count` per second, None where that says nothing: no time, or too little to divide by."""
    rate = count / seconds if seconds > 0 else math.inf
    return rate if math.isfinite(rate) else None
