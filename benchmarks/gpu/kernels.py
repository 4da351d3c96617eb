"""Section kernels: time, bytes and share of the bandwidth of the Triton kernels, beside the bandwidth measured here.

A decode step is one launch as the cache makes it: the new token is written, every slot attended to, scores added.
Bytes are what the step must move once: K and V of all slots, with scores 12 bytes for each. Several caches take turns,
so that none is in the second-level cache when it is read. Times are medians, by CUDA events around replays of a CUDA
graph where the launches can be recorded in one, else around plain launches.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from h2o_flexgen.kernels.types import Logits

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from benchmarks.gpu.section import Section, say, serve
from h2o_flexgen.baselines.process import RunFailed
from h2o_flexgen.kernels import triton_available

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Call = Callable[[], Any]
COLD_BYTES = 1 << 30  # of caches that take turns: many times what a GPU keeps close
REPETITIONS = 30
COMPILING = 0.4
"""Of the section's seconds, in which kernels are compiled ahead."""


class Shape(NamedTuple):
    """Of a decode step: rows, query heads, KV heads, slots that each holds, numbers per head."""

    batch: int
    heads: int
    kv_heads: int
    slots: int
    dim: int
    like: str


DECODE = (
    Shape(24, 32, 32, 820, 128, "OPT-6.7B, 20 % of 4,096"),
    Shape(96, 56, 56, 109, 128, "OPT-30B, 20 % of 544"),
    Shape(32, 32, 8, 2048, 128, "LLaMA-3-8B, 2,048"),
    Shape(4, 32, 32, 4096, 128, "OPT-6.7B, full, 4,096"),
    Shape(1, 32, 8, 8192, 128, "LLaMA-3-8B, one sequence, 8,192"),
)
TINY = (Shape(2, 2, 1, 70, 16, "dry run"),)


def seconds(calls: Sequence[Call], repetitions: int = REPETITIONS) -> tuple[float, bool]:
    """Seconds of one call, median of rounds over all `calls`, warm; and whether they were replayed as a CUDA graph."""
    for call in (*calls, *calls):
        call()
    if DEVICE == "cpu":
        started = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - started) / len(calls), False
    torch.cuda.synchronize()
    round_of_all, recorded = _graph(calls)
    times = []
    for _ in range(repetitions):
        begin, finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        round_of_all()
        finish.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(finish) / 1e3 / len(calls))
    return median(times), recorded


def _graph(calls: Sequence[Call]) -> tuple[Call, bool]:
    """All of `calls` at once: as a graph, or one after another where a graph cannot hold them."""

    def plain() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            plain()
    except RuntimeError:
        torch.cuda.synchronize()
        return plain, False
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, True


def bandwidth() -> dict[str, float]:
    """Bytes per second of a large copy on the device, read and written counted, and of reading alone."""
    size = 1 << 30 if DEVICE == "cuda" else 1 << 20
    source, target = (torch.ones(size // 4, dtype=torch.float32, device=DEVICE) for _ in range(2))
    copied, _ = seconds([lambda: target.copy_(source)])
    summed, _ = seconds([lambda: source.sum()])
    return {"copy_bytes_per_s": 2 * size / copied, "read_bytes_per_s": size / summed}


def best(rates: dict[str, float]) -> float:
    """The rate that shares are taken of: the faster of the two."""
    return max(rates.values())


def _random(size: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float32, device=DEVICE).to(dtype)


def decode_cache(shape: Shape, packed: bool, scored: bool, made: Callable[..., torch.Tensor] = _random) -> Any:
    """A TritonAttend whose rows have one slot left, and q, k and v of a step; `made` makes tensors of a size."""
    from h2o_flexgen.kernels import triton_quant
    from h2o_flexgen.kernels.triton_decode import TritonAttend

    batch, heads, kv_heads, slots, dim, _ = shape
    tasks, size = batch * kv_heads, (batch, kv_heads, slots, dim)
    # The step takes the slot that is left, whichever number it has.
    rule = (slots - 1, slots, slots - 1, slots - 1 if not scored else 0, 0, 0, slots // 2 if scored else 0, 0)
    ranking = None
    if scored:
        free = torch.arange(tasks, device=DEVICE) * slots + slots - 1
        pos = torch.arange(slots, dtype=torch.int32, device=DEVICE).repeat(batch, kv_heads, 1)
        ranking = (made(size[:3], dtype=torch.float32).abs(), pos, free)
    kernel = TritonAttend([rule] * batch, size, DEVICE, ranking=ranking, adds=scored)
    k, v = made(size), made(size)
    if packed:
        kernel.attach_packed(triton_quant.quantise(k), triton_quant.quantise(v))
    else:
        kernel.attach(k, v)
    return kernel, (made((batch, heads, dim)), made((batch, kv_heads, dim)), made((batch, kv_heads, dim)))


def decode_calls(shape: Shape, packed: bool, scored: bool) -> tuple[list[Call], int]:
    """Steps of caches that take turns, and the bytes that each must move."""
    batch, heads, kv_heads, slots, dim, _ = shape
    tasks = batch * kv_heads
    kept = tasks * slots * (dim // 2 + 4 * -(-dim // 64) if packed else 2 * dim)  # bytes of K
    nbytes = 2 * kept + 12 * tasks * slots * scored + 2 * dim * batch * (2 * heads + 2 * kv_heads)
    turns = max(1, min(32, COLD_BYTES // (2 * kept))) if DEVICE == "cuda" else 1
    caches = [decode_cache(shape, packed, scored) for _ in range(turns)]
    return [partial(kernel.step, 0, qkv, Logits(dim**-0.5)) for kernel, qkv in caches], nbytes


def decode_kinds(section: Section) -> Iterator[tuple[str, Shape, bool, bool]]:
    """Every shape, in bfloat16 and 4 bits, without and with scores: (name, shape, packed, scored)."""
    for shape in TINY if section.dry_run else DECODE:
        for packed, scored in ((False, False), (False, True), (True, False), (True, True)):
            kind = f"decode, {shape.like}, {'4 bit' if packed else 'bfloat16'}, {'with' if scored else 'no'} scores"
            yield kind, shape, packed, scored


def compile_decode(section: Section) -> None:
    """Compiles the kernels of decode steps, side by side: one after the other that takes minutes, and machines start
    bare. Kernels that there is no time for are compiled when they are measured."""
    from h2o_flexgen.kernels.triton_tune import compiling

    began = time.monotonic()
    unwritten = partial(torch.empty, dtype=torch.bfloat16, device=DEVICE)
    with compiling(COMPILING * section.left()) as jobs:
        for name, shape, packed, scored in decode_kinds(section):
            if section.wanted(name):
                kernel, qkv = decode_cache(shape, packed, scored, unwritten)
                kernel.compile(0, qkv, Logits(shape.dim**-0.5))
    say(f"kernels: {time.monotonic() - began:.0f} s of compiling" + ", which was not enough for all" * jobs.late)


def measured(calls: list[Call], nbytes: int, rate: float) -> dict[str, Any]:
    took, recorded = seconds(calls)
    share = nbytes / took / rate
    facts = {"seconds": took, "bytes": nbytes, "bytes_per_s": nbytes / took, "share_of_bandwidth": share}
    return {**facts, "cuda_graph": recorded, "said": f"{took * 1e6:.1f} us, {share:.0%} of the bandwidth"}


def decode_attention(section: Section, rate: float) -> None:
    compile_decode(section)
    for name, *how in decode_kinds(section):
        section.attempt(name, partial(_decode, *how, rate))


def _decode(shape: Shape, packed: bool, scored: bool, rate: float) -> dict[str, Any]:
    facts = measured(*decode_calls(shape, packed, scored), rate)
    return {"kernel": "decode", "shape": shape._asdict(), "packed": packed, "scored": scored, **facts}


def column_sums(section: Section, rate: float) -> None:
    """Sums of the columns of a prompt's attention, beside torch's flash attention, which gives the output."""
    rows, heads, length, dim = (1, 2, 40, 16) if section.dry_run else (4, 32, 2048, 128)

    def sums() -> dict[str, Any]:
        from h2o_flexgen.kernels import triton_prompt

        q, k, v = (_random((rows, heads, length, dim)) for _ in range(3))
        _, lse = triton_prompt.flash(q, k, v, dim**-0.5, None)
        nbytes = 2 * q.nbytes + lse.nbytes + 4 * rows * heads * length
        facts = measured([lambda: triton_prompt.sum_columns(q, k, lse, Logits(dim**-0.5))], nbytes, rate)
        flops = rows * heads * length * length * dim
        flash, _ = seconds([lambda: triton_prompt.flash(q, k, v, dim**-0.5, None)])
        shape = {"rows": rows, "heads": heads, "length": length, "dim": dim}
        facts |= {"flops_per_s": flops / facts["seconds"], "flash_seconds": flash}
        return {"kernel": "column sums", "shape": shape, **facts}

    section.attempt(f"column sums, {rows} x {heads} heads x {length:,}", sums)


def quantisation(section: Section, rate: float) -> None:
    """Both directions of 4 bits in groups of 64."""
    size = (4, 128) if section.dry_run else (65536, 4096)

    def numbers(back: bool) -> dict[str, Any]:
        from h2o_flexgen.kernels import triton_quant

        x = _random(size)
        packed = triton_quant.quantise(x)
        calls: list[Call] = [lambda: triton_quant.dequantise(packed, x.dtype) if back else triton_quant.quantise(x)]
        facts = measured(calls, x.nbytes + sum(part.nbytes for part in packed), rate)
        return {"kernel": "dequantise" if back else "quantise", "shape": {"numbers": x.numel()}, **facts}

    for back in (True, False):
        section.attempt(f"{'dequantise' if back else 'quantise'}, 4 bit", partial(numbers, back))


def experts(section: Section, rate: float) -> None:
    """All experts of a layer of Qwen3-30B-A3B for few and for many tokens each, held beside torch's numbers for one of
    them; beside it the same in torch, expert by expert. Bytes are those of the experts' weights."""
    count, hidden, ffn = (2, 64, 32) if section.dry_run else (128, 2048, 768)
    for rows in (2,) if section.dry_run else (4, 64, 256):
        name = f"experts, {count} for {rows} tokens each"
        section.attempt(name, partial(_experts, (count, hidden, ffn), rows, rate))


def _experts(sizes: tuple[int, int, int], rows: int, rate: float) -> dict[str, Any]:
    from h2o_flexgen.kernels.layers import gated
    from h2o_flexgen.kernels.triton_experts import TritonExpert, add_experts

    count, hidden, ffn = sizes
    scale = hidden**-0.5
    weights = [
        {"up.weight": _random((ffn, hidden)) * scale, "gate.weight": _random((ffn, hidden)) * scale}
        | {"down.weight": _random((hidden, ffn)) * scale}
        for _ in range(count)
    ]
    places = [place for place in map(TritonExpert.of, weights) if place is not None]
    tokens = torch.arange(count * rows, device=DEVICE)
    choices = tokens, torch.ones(count * rows, device=DEVICE), tokens.view(-1, 1)
    x, starts, most = _random((count * rows, hidden)), [rows * number for number in range(count + 1)], 8192
    out = torch.zeros_like(x)

    def by_torch(number: int, some: torch.Tensor) -> torch.Tensor:
        up, gate, down = (weights[number][f"{name}.weight"].t() for name in ("up", "gate", "down"))
        return gated(some @ gate, some @ up, "silu") @ down

    def all_by_torch() -> None:
        for number, some in enumerate(x.split(rows)):
            out.index_add_(0, tokens[rows * number : rows * (number + 1)], by_torch(number, some))

    add_experts(x, out, choices, starts, places, None, most)
    wanted = by_torch(count - 1, x[-rows:]).float()
    error = float((out[-rows:].float() - wanted).norm() / wanted.norm())
    if not error < 0.02:
        raise RunFailed(f"the experts' results differ from torch's by {error:.1%}")
    facts = measured([lambda: add_experts(x, out, choices, starts, places, None, most)], 6 * count * hidden * ffn, rate)
    apart, _ = seconds([all_by_torch])
    facts |= {"flops_per_s": 6 * count * rows * hidden * ffn / facts["seconds"], "torch_seconds": apart}
    shape = {"experts": count, "tokens": rows, "hidden": hidden, "ffn": ffn}
    return {"kernel": "experts", "shape": shape, "error": error, **facts}


def measure(section: Section) -> None:
    problem = triton_available.why_not(DEVICE)
    rates = bandwidth()
    section.keep("bandwidth", **rates, said=", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in rates.items()))
    if problem is not None:
        section.keep("Triton kernels", failed=problem)
        return
    if DEVICE == "cpu":  # Triton's interpreter, with what it needs beside newer numpy
        import tests.kernels.triton_device  # noqa: F401
    for part in (quantisation, column_sums, experts, decode_attention):
        part(section, best(rates))


if __name__ == "__main__":
    sys.exit(serve(measure))
