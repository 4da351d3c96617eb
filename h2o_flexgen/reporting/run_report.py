"""A RunRecord as a person reads it."""

from __future__ import annotations

from typing import Any

from h2o_flexgen.config.record import RunRecord
from h2o_flexgen.units import format_bytes, format_rate, format_seconds


def run_report(record: RunRecord) -> str:
    """Speed, bytes, bound and memory of one run, a line each."""
    policy = record.policy
    lines = [
        f"{record.model}, {record.dtype} on {record.device}, {record.weights} weights"
        + (" (random numbers: speed only, the text means nothing)" if record.weights == "dummy" else ""),
        f"eviction    {_eviction(record.eviction)}",
        f"block       {policy['num_gpu_batches']} GPU batches of {policy['gpu_batch_size']}; "
        + "; ".join(f"{kind} {_shares(policy[kind])}" for kind in ("weights", "cache", "hidden")),
        f"work        {record.sequences} sequences, {record.prompt_tokens} prompt tokens, "
        f"{record.generated_tokens} generated",
        f"prefill     {format_seconds(record.prefill_s)}, {_tokens(record.prefill_throughput)}",
        f"decode      {format_seconds(record.decode_s)}, {_tokens(record.decode_throughput)}",
        f"throughput  {_tokens(record.gen_throughput)} generated over prefill and decode; "
        f"{_tokens(record.total_token_throughput)} in all",
        f"kv cache    {format_bytes(record.kv_bytes)} per block",
    ]
    seconds = record.prefill_s + record.decode_s
    if record.flops and seconds:
        lines.append(f"compute     {record.flops / 1e12:.3g} TFLOP, {record.flops / seconds / 1e12:.3g} TFLOP/s")
    for link, nbytes in sorted(record.bytes_moved.items()):
        rate = record.bandwidth.get(link)
        at = f" at {format_rate(rate)} while busy" if rate else ""
        lines.append(f"moved       {link}: {format_bytes(nbytes)}{at}")
    if record.bound:
        lines.append(f"bound       {record.bound['resource']}, busy for {format_seconds(record.bound['seconds'])}")
    peaks = ", ".join(f"{tier} {format_bytes(n)}" for tier, n in record.peak_bytes.items() if n)
    lines.append(f"peak memory {peaks}")
    lines.extend(f"warning     {warning}" for warning in record.warnings)
    return "\n".join(lines)


def _eviction(eviction: dict[str, Any]) -> str:
    if eviction["name"] == "full":
        return "full cache"
    share = eviction.get("share_of_sequence")
    of = f" ({share:.0%} of the sequence, {eviction['share_of_prompt']:.0%} of the prompt)" if share else ""
    parts = ", ".join(f"{_span(eviction[part])} {part}" for part in ("heavy", "recent", "sinks"))
    return f"{eviction['name']}: {_span(eviction['budget'])} tokens per head{of}: {parts}"


def _span(value: Any) -> str:
    return f"{value[0]} to {value[1]}" if isinstance(value, list) else str(value)


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{share:.0%} {tier}" for tier, share in shares.items())


def _tokens(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.4g} tokens/s"
