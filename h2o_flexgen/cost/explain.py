"""Why a policy was chosen: bound, binding memory, runner-up, and what more memory or smaller caches would buy."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from h2o_flexgen.config.placement import KINDS
from h2o_flexgen.cost.candidate import Candidate, place
from h2o_flexgen.cost.search import SearchResult, search
from h2o_flexgen.cost.simulate import Prediction
from h2o_flexgen.errors import PlanError
from h2o_flexgen.schedule.request import PlanRequest
from h2o_flexgen.schedule.work import io_lower_bound
from h2o_flexgen.schedule.workspace import HOST_ATTENTION
from h2o_flexgen.units import format_bytes, format_seconds, format_speed

_WIDTH = 12
_LINKS = {
    "disk->cpu": "disk reads",
    "cpu->disk": "disk writes",
    "cpu->gpu": "copies to the GPU",
    "gpu->cpu": "copies from the GPU",
}

_WORK = {"compute": "computing", HOST_ATTENTION: "attention on the CPU"}
_MOST_SEQUENCES = 1 << 20  # to look among
_FREE = "nothing: more memory would not make this faster"


def explain(result: SearchResult) -> str:
    return "\n".join(f"{name:{_WIDTH}}{text}" for name, text in _lines(result))


def to_json(result: SearchResult) -> dict[str, Any]:
    """The same as plain JSON values: bytes, seconds, tokens per second. Everything in it is predicted."""
    request, runner_up = result.best.request, result.runner_up
    return {
        "model": request.spec.name,
        "dtype": request.dtype,
        "weight_bits": request.spec.packed_kind,
        "bits_choice": None if result.bits is None else result.bits.to_json(),
        "compute_tier": request.compute_tier,
        "hardware": request.machine.name,
        "eviction": {**request.eviction.to_json(), "tokens": _budget(result).total},
        "prompt_len": request.workload.prompt_len,
        "gen_len": request.workload.gen_len,
        "sequences": result.best.prediction.sequences,
        "caps": request.capped,
        "fixed": sorted(request.fixed),
        "policy": result.best.policy.to_json(),
        "predicted": result.best.prediction.to_json(),
        "bound": bound_text(result.best.prediction),
        "peak_bytes": {tier: result.best.footprint.total(tier) for tier in request.tiers},
        "binding": result.binding,
        "one_more_gib": dict(result.more),
        "least_bytes_moved": least_traffic(result),
        "runner_up": runner_up
        and {"policy": runner_up.policy.to_json(), "gen_throughput": result.runner_up_throughput},
        "shapes_tried": result.tried,
        "simulated": result.simulated,
        "projected": True,
    }


def bound_text(predicted: Prediction) -> str:
    """The resource that takes the time: "disk reads: 13.3 GB per step, busy for 98 % of the run"."""
    model, (phase, resource, seconds) = predicted.block.model, predicted.bound
    passes, per = (range(1), "for the prompts") if phase == "prefill" else (range(1, model.steps), "per step")
    share = f"busy for {seconds / predicted.total_s:.0%} of the run"
    if resource in _WORK:
        found = [term for term in model.terms() if term.resource == resource]
        terms = [term for term in found if term.phase == phase] or found  # of the host perhaps nothing but the prompts
        largest = max(terms, key=lambda term: term.value)
        whole = format_seconds(sum(term.value for term in terms))
        return f"{_WORK[resource]}: {whole} {per}, {format_seconds(largest.value)} of it for {largest.name}; {share}"
    moved = sum(traffic.nbytes for (link, _), traffic in model.moves.traffic(passes).items() if link == resource)
    return f"{_LINKS[resource]}: {_gigabytes(moved / len(passes))} {per}, {share}"


def runner_up_text(result: SearchResult) -> str | None:
    """The second-best block, its predicted throughput and placement, and why it lost; None if nothing else fits."""
    other = result.runner_up
    if other is None:
        return None
    why = "within 1 % fewer bytes moved, fewer GPU batches, equal blocks and smaller ones are taken"
    if other.moves and not result.best.moves:
        why = "within 5 % what moves nothing is taken"
    faster = f"; faster, and {why}" if other.seconds < result.best.seconds else ""
    placements = "; ".join(f"{kind} {_shares(getattr(other.policy, kind))}" for kind in KINDS)
    return f"{_block(other)}, {format_speed(result.runner_up_throughput)}: {placements}{faster}"


def cache_row(request: PlanRequest, solver: str) -> dict[str, Any]:
    """The best plan with the cache of `request` in a few figures, seconds and tokens per second predicted; None where
    nothing fits the caps."""
    try:
        best: Candidate | None = search(request, solver).best
    except PlanError:
        best = None
    predicted = None if best is None else best.prediction
    names = ("prefill_s", "decode_s", "gen_throughput")
    return {
        "kv_bytes": request.eviction.bytes,
        "tokens": request.eviction.resolve(request.workload.prompt_len, request.workload.gen_len).total,
        "most_sequences": _most_unmoved(request),
        "sequences": predicted and predicted.block.sequences,
        **{name: predicted and getattr(predicted, name) for name in names},
    }


def _most_unmoved(request: PlanRequest) -> int:
    """Sequences that fit the caps while everything stays where it is computed on."""
    there = {kind: {request.compute_tier: 1.0} for kind in KINDS}
    policy = request.with_shares(replace(request.policy, num_gpu_batches=1), there)

    def fits(rows: int) -> bool:
        return not place(request, replace(policy, gpu_batch_size=rows)).over

    return bisect_left(range(1, _MOST_SEQUENCES), True, key=lambda rows: not fits(rows))


def least_traffic(result: SearchResult) -> dict[str, int]:
    """Bytes over each link that any schedule with blocks of this size must move in the whole run."""
    predicted = result.best.prediction
    computing = result.best.policy.cpu_cache_compute
    least = io_lower_bound(result.best.request, predicted.block.sequences, cpu_cache_compute=computing)
    whole_blocks = predicted.sequences // predicted.block.sequences
    return {link: whole_blocks * nbytes for link, nbytes in least.items()}


def _lines(result: SearchResult) -> Iterator[tuple[str, str]]:
    request, predicted, policy = result.best.request, result.best.prediction, result.best.policy
    yield (
        "model",
        f"{request.spec.name}, {_dtype(result)} on the {request.compute_tier.upper()} of {request.machine.name}",
    )
    if result.bits is not None:
        yield "bits", result.bits.text
    work, budget = f"{request.workload.prompt_len} + {request.workload.gen_len} tokens", _budget(result)
    amount = "one block of as many as there are" if request.endless else f"{request.workload.num_sequences} sequences"
    kept = "the full cache" if budget.full else f"{request.eviction.name} keeps {budget.total} tokens per head"
    yield "work", f"{amount}, {work}; {kept}"
    yield "block", _block(result.best)
    for kind in KINDS:
        yield kind, _shares(getattr(policy, kind))
    if policy.cpu_cache_compute:
        yield "attention", "of caches on the CPU is computed there"
    yield "prefill", f"{format_seconds(predicted.prefill_s)}, {format_speed(predicted.prefill_throughput)} (predicted)"
    yield "decode", f"{format_seconds(predicted.decode_s)}, {format_speed(predicted.decode_throughput)} (predicted)"
    yield "throughput", f"{format_speed(predicted.gen_throughput)} generated over prefill and decode (predicted)"
    yield "bound", bound_text(predicted)
    yield "traffic", _traffic(predicted.bytes_moved, least_traffic(result))
    yield "memory", "; ".join(_used(result, tier) for tier in request.tiers if result.best.footprint.total(tier))
    flag = "" if result.binding is None else request.caps.flag(result.binding)
    yield "binding", f"{flag}, the {result.binding} tier's cap" if flag else _FREE
    if (second := runner_up_text(result)) is not None:
        yield "runner-up", second
    if result.more:
        gains = ", ".join(f"{tier} {gain:+.2g} tokens/s" for tier, gain in result.more.items())
        yield "1 GiB more", f"of {gains} (by the linear program, with the block chosen anew)"
    yield "searched", f"{result.tried} block shapes, {result.simulated} plans simulated"


def _dtype(result: SearchResult) -> str:
    """The dtype of the numbers, and the bits of packed weights."""
    request, kind = result.best.request, result.best.request.spec.packed_kind
    if kind is None:
        return request.dtype
    groups = f" in groups of {kind['group']}" if kind["group"] else ""
    return f"{request.dtype} with weights of {kind['bits']:g} bits{groups}"


def _block(candidate: Candidate) -> str:
    policy = candidate.policy
    rows = f"{policy.gpu_batch_size} sequence{'s' * (policy.gpu_batch_size > 1)}"
    return f"{policy.num_gpu_batches} GPU batch{'es' * (policy.num_gpu_batches > 1)} of {rows}"


def _budget(result: SearchResult) -> Any:
    request = result.best.request
    return request.eviction.resolve(request.workload.prompt_len, request.workload.gen_len)


def _used(result: SearchResult, tier: str) -> str:
    used, cap = result.best.footprint.total(tier), result.best.request.capped.get(tier)
    return f"{tier} {format_bytes(used)}" + (f" of {format_bytes(cap)}" if cap is not None else "")


def _traffic(moved: Mapping[str, int], least: Mapping[str, int]) -> str:
    """Bytes by link, and how many times the least they are."""
    parts = []
    for link, nbytes in moved.items():
        times = f", {nbytes / least[link]:.2f} times the least" if least.get(link) else ""
        parts.append(f"{link} {_gigabytes(nbytes)}{times}")
    return "; ".join(parts) or "none: everything stays where it is computed on"


def _gigabytes(nbytes: float) -> str:
    """In powers of ten, the unit of data sheets and of the papers."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.0%} {tier}" for tier, share in shares.items() if share >= 0.005) or "-"
