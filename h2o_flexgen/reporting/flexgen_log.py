"""The five-line log that FlexGen writes and its users' scripts parse."""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.units import GIB


def flexgen_log(record: RunRecord, spec: ModelSpec) -> str:
    """Model, cache and hidden sizes, peak GPU memory, then latency and throughput of prefill, decode and both."""
    tokens = record.sequences * (record.prompt_len + record.gen_len)
    peak = record.peak_bytes.get("gpu") or 0
    rows = [
        f"model size: {spec.weight_bytes(record.dtype) / GIB:.3f} GB\t"
        f"cache size: {record.kv_bytes / GIB:.3f} GB\t"
        f"hidden size (p): {spec.hidden_bytes(tokens, record.dtype) / GIB:.3f} GB",
        f"peak gpu mem: {peak / GIB:.3f} GB\tprojected: {record.projected}",
        f"prefill latency: {record.prefill_s:.3f} s\tprefill throughput: {record.prefill_throughput or 0:.3f} token/s",
        f"decode latency: {record.decode_s:.3f} s\tdecode throughput: {record.decode_throughput or 0:.3f} token/s",
        f"total latency: {record.prefill_s + record.decode_s:.3f} s\t"
        f"total throughput: {record.gen_throughput or 0:.3f} token/s",
    ]
    return "\n".join(rows) + "\n"
