"""A RunRecord as a person reads it, and as FlexGen's log has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.reports.record import RunRecord
from h2o_flexgen.units import GIB, counted, format_bytes, format_rate, format_seconds, format_speed

_WIDTH = 12
ARITHMETIC = "arithmetic"  # the resource of a roofline that is counted in FLOPs, all others in bytes
_KINDS = ("weights", "cache", "hidden")
NOT_CALIBRATED = "nothing: this machine is not calibrated; --calibrate measures it, once, in about 45 s"
ONE_GPU = "nothing: planned by rule, the cost model knows one GPU"


def run_report(record: RunRecord) -> str:
    """The report of a run: its work, speed, moved bytes, bound and memory, a line each."""
    return aligned(report_lines(record))


def aligned(lines: Iterable[tuple[str, str]]) -> str:
    """Names and texts in two columns."""
    return "\n".join(f"{name:{_WIDTH}}{text}" for name, text in lines)


def block_text(policy: Mapping[str, Any]) -> str:
    """The shape of a block: "4 GPU batches of 32 sequences"."""
    batches = counted(policy["num_gpu_batches"], "GPU batch", "GPU batches")
    return f"{batches} of {counted(policy['gpu_batch_size'], 'sequence')}"


def shares_text(policy: Mapping[str, Any]) -> str:
    """Where the three kinds of things live."""
    tiers = {tier for kind in _KINDS for tier, share in policy[kind].items() if share}
    if len(tiers) == 1:
        return f"weights, cache and hidden states all on {tiers.pop()}"
    return "; ".join(f"{kind} {_shares(policy[kind])}" for kind in _KINDS)


def predicted_text(predicted: Mapping[str, Any]) -> str:
    prefill, decode = (format_seconds(predicted[name]) for name in ("prefill_s", "decode_s"))
    return f"{format_speed(predicted['gen_throughput'])} generated: prefill {prefill}, decode {decode}"


def report_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    policy, seconds = record.policy, record.prefill_s + record.decode_s
    dummy = record.weights == "dummy"
    source = "random weights: speed only, text would mean nothing" if dummy else "checkpoint weights"
    yield "model", f"{record.model}, {record.dtype} on {record.device}, {source}"
    if record.device == "cpu" and "kernels" in record.host:
        yield "kernels", record.host["kernels"]
    if record.quantization:
        yield "bits", _bits(record.quantization)
    if record.experts:
        experts = record.experts
        yield (
            "experts",
            f"{experts['active']} of {experts['count']} per token; {experts['read']:,} of {experts['of']:,} read",
        )
    if record.predicted and "bits" in record.predicted:
        yield "chosen", record.predicted["bits"]["text"]
    yield "eviction", _eviction(record.eviction)
    for name, counts in (record.kept or {}).items():
        whole = ", ".join(f"{counts[when]:.1f} after {when}" for when in ("prefill", "decode") if when in counts)
        yield "span", f"{name}: {counts['tokens']:g} tokens, {whole}"
    if record.recall:
        yield "recall", _recall(record.recall)
    yield "block", block_text(policy)
    yield "placement", shares_text(policy)
    work = f"{counted(record.sequences, 'sequence')}, {counted(record.prompt_tokens, 'prompt token')}"
    yield "work", f"{work}, {record.generated_tokens:,} generated"
    yield "load", format_seconds(record.load_s)
    yield "prefill", f"{format_seconds(record.prefill_s)}, {format_speed(record.prefill_throughput)}"
    yield "decode", f"{format_seconds(record.decode_s)}, {format_speed(record.decode_throughput)}"
    generated, every = format_speed(record.gen_throughput), format_speed(record.total_token_throughput)
    yield "throughput", f"{generated} generated over prefill and decode; {every} with the prompts"
    if seconds:
        yield "predicted", _predicted(record)
    for line in roofline_lines(record.roofline or {}):
        yield "roofline", line
    yield "KV cache", f"{format_bytes(record.kv_bytes)} per block"
    if record.state_bytes:
        yield "states", f"{format_bytes(record.state_bytes)} per block"
    if record.flops and seconds:
        yield "compute", f"{_scaled(record.flops, 'FLOP')}, {_scaled(record.flops / seconds, 'FLOP/s')}"
    for link, nbytes in sorted(record.bytes_moved.items()):
        bandwidth = record.bandwidth.get(link)
        busy = f" at {format_rate(bandwidth)} while busy" if bandwidth else ""
        yield "moved", f"{link}: {format_bytes(nbytes)}{busy}{_over_least(record, link)}"
    if record.bound and seconds:
        busy = f"busy for {format_seconds(record.bound['seconds'])} of {format_seconds(seconds)}"
        yield "bound", f"{record.bound['resource']}, {busy}"
    yield "peak memory", _peaks(record.peak_bytes)
    for warning in record.warnings:
        yield "warning", warning


def _recall(recall: Mapping[str, Any]) -> str:
    """The tokens that came back, and the bytes moved for them beside the planned ones."""
    planned, moved = recall["planned"], list[str]()
    for what, way in (("written to", "written"), ("read from", "read")):
        nbytes = format_bytes(recall[f"{way}_bytes"])
        moved.append(f"{nbytes} {what} {recall['tier']} ({format_bytes(planned[way])} planned)")
    rate = recall["hit_rate"]
    hits = "" if rate is None else f", {rate:.1%} of the attention that as many tokens can have at most"
    return f"{counted(recall['recalled'], 'token')} came back{hits}; {', '.join(moved)}"


def _predicted(record: RunRecord) -> str:
    if record.predicted is None:
        return ONE_GPU if "num_gpus" in record.policy else NOT_CALIBRATED
    text = predicted_text(record.predicted)
    expected, measured = record.predicted["gen_throughput"], record.gen_throughput
    work = tuple(record.predicted[name] for name in ("prompt_tokens", "generated_tokens"))
    if work != (record.prompt_tokens, record.generated_tokens):
        text += f", of {work[0]:,} prompt tokens and {work[1]:,} new ones"
    if not expected or not measured:
        return text
    more = measured / expected - 1
    return f"{text}; measured is {abs(more):.0%} {'more' if more >= 0 else 'less'}"


def _over_least(record: RunRecord, link: str) -> str:
    """How many times the fewest bytes that any schedule must move within these caps were moved."""
    if record.least_bytes_moved is None or not record.bytes_moved[link]:
        return ""
    least = record.least_bytes_moved.get(link)
    return f", {record.bytes_moved[link] / least:.2f} times the least" if least else ", none of which the caps call for"


def _eviction(eviction: dict[str, Any]) -> str:
    if eviction["name"] == "full":
        return "none: the full cache"
    shares = ""
    if "share_of_sequence" in eviction:
        of = [f"{span_text(eviction[f'share_of_{what}'], '.0%')} of the {what}" for what in ("sequence", "prompt")]
        shares = f" ({', '.join(of)})"
    parts = ", ".join(f"{span_text(eviction[part])} {part}" for part in ("heavy", "recent", "sinks") if eviction[part])
    if far := eviction.get("far_layers"):
        parts += f"; more in {counted(len(far), 'layer' if isinstance(far[0], int) else 'head')}"
    return f"{eviction['name']} keeps {span_text(eviction['budget'])} tokens per head{shares}: {parts}"


def span_text(value: Any, form: str = "", joint: str = " to ") -> str:
    """A number of a record, or the [smallest, largest] it has where sequences differ and these look different."""
    ends = [format(end, form) for end in (value if isinstance(value, list) else [value])]
    return joint.join(dict.fromkeys((ends[0], ends[-1])))


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{share:.0%} {tier}" for tier, share in shares.items() if share)


def _peaks(peaks: dict[str, int | None]) -> str:
    tiers = [f"{tier} tier {format_bytes(nbytes)}" for tier, nbytes in peaks.items() if nbytes and tier != "rss"]
    whole = peaks.get("rss")
    return ", ".join([*tiers, f"process {format_bytes(whole)}"] if whole else tiers) or "not measured"


def _scaled(value: float, unit: str) -> str:
    """With a decimal prefix, as rates have it: "24.1 GB"."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"


def roofline_lines(roofline: Mapping[str, Any]) -> Iterator[str]:
    """Two lines for each phase that took time and whose rates are known: how near it came to its bound, and why."""
    for phase, each in roofline.items():
        if not each["resources"] or not each["measured_s"] or each["bound"] is None:
            continue
        measured = f"{phase}: {format_seconds(each['measured_s'])}"
        name, seconds = each["bound"]["resource"], each["bound"]["seconds"]
        found = each["resources"][name]
        at = f"{_amount(name, found)} at {_resource_rate(name, _total(found) / seconds)}"
        yield f"{measured}, bound {format_seconds(seconds)} by {name} ({at}), {each['achieved']:.0%}"
        kernels = ", ".join(f"{kind} {format_seconds(took)}" for kind, took in each["kernels_s"].items() if took)
        best = ", ".join(_at_best(name, found) for name, found in each["resources"].items())
        yield f"{' ' * len(phase)}  kernels as calibrated: {kernels}; at best rates: {best}"


def _bits(quantization: Mapping[str, Any]) -> str:
    parts, weights, cache = [], quantization["weights"], quantization["cache"]
    if weights:
        group = f" in groups of {weights['group']}" if weights["group"] else ""
        parts.append(f"weights of {weights['bits']:g} bits{group} ({weights['format']})")
    if cache:
        bits = cache["bits"] if isinstance(cache["bits"], int) else "{} and {}".format(*cache["bits"])
        parts.append(f"KV cache of {bits} bits in groups of {cache['group']}")
    return ", ".join(parts)


def _at_best(name: str, found: Mapping[str, Any]) -> str:
    if found["seconds"] is None:
        return f"{name} {_amount(name, found)}"
    return f"{name} {format_seconds(found['seconds'])} at {_resource_rate(name, found['rate'])}"


def _total(found: Mapping[str, Any]) -> float:
    return sum((found.get("bytes") or found["flops"]).values())


def _amount(name: str, found: Mapping[str, Any]) -> str:
    return _scaled(_total(found), "FLOP" if name == ARITHMETIC else "B")


def _resource_rate(name: str, rate: float) -> str:
    return _scaled(rate, "FLOP/s") if name == ARITHMETIC else format_rate(rate)


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
