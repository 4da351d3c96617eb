"""The shares of the processor's rates that products of 16 bits reach, beside loops of their instructions alone.

    python -m benchmarks.peaks                                     LLaMA's shapes of 1.1 B parameters
    H2O_FLEXGEN_KERNELS=avx2 python -m benchmarks.peaks            as AVX2 has it
    python -m benchmarks.peaks --rows 1,32 --turns 3               some of it

The loops are compiled here, of the vectors that the tier has: float32 multiply-adds in registers, and sums of memory
that no cache holds, by as many threads as torch has. A turn measures loops, the best of four times, then all products,
each on copies of a weight that no cache holds together; shares are of that turn's loops, medians of all turns.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.records import arguments, in_process, provenance, run_all, spread
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.kernels import native

SHAPES = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
"""Outputs and inputs of the products of a layer."""
_COLD = 256 << 20
_SECONDS = 0.02  # of a product in a turn, at least
_TIMES = 10_000_000
_LOOPS = r"""
#include <stdint.h>
#ifdef __AVX512F__
enum { LANES = 16, AHEAD = 4096 };
#elif defined __aarch64__
enum { LANES = 4, AHEAD = 4096 };
#else
enum { LANES = 8, AHEAD = 4096 };
#endif
#ifdef __aarch64__
#define HELD "+w"
#else
#define HELD "+x"
#endif
const int lanes = LANES;
typedef float numbers __attribute__((vector_size(LANES * 4)));
typedef int64_t whole __attribute__((vector_size(LANES * 4)));
#define ALL(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
double multiply(int64_t times) { /* returns operations */
    numbers x = {0}, y = {0};
    for (int i = 0; i < LANES; i++) x[i] = 1e-9f, y[i] = 0.999f;
    /* variables, not an array: of that compilers may make memory */
#define MAKE(J) numbers sum##J = x;
#define ADD(J) sum##J = sum##J * y + x; __asm__ volatile("" : HELD(sum##J));
    ALL(MAKE)
    for (int64_t i = 0; i < times; i++) { ALL(ADD) }
    return times * 24.0 * LANES;
}
int64_t read_all(const void *from, int64_t bytes) { /* eight stretches at a time, as a product does */
    const int64_t apart = bytes / 8;
    whole any = {0};
    for (const char *at = from, *end = at + apart; at < end; at += 64)
        for (int part = 0; part < 8; part++) {
            const whole *line = (const whole *)(at + part * apart);
            __builtin_prefetch((const char *)line + AHEAD, 0, 2);
            for (int i = 0; i < 64 / (int)sizeof any; i++) any |= line[i];
        }
    return any[0];
}
"""


def loops(folder: Path) -> ctypes.CDLL:
    source, made = folder / "loops.c", folder / "loops.so"
    source.write_text(_LOOPS, encoding="utf-8")
    compiler = native.building.find_compiler()
    if compiler is None:
        sys.exit("no C compiler was found")
    flags = native.tiers.machine_flags()
    subprocess.run([compiler, "-O3", *flags, "-fPIC", "-shared", source, "-o", made], check=True)
    found = ctypes.CDLL(str(made))
    found.multiply.restype, found.multiply.argtypes = ctypes.c_double, [ctypes.c_int64]
    found.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return found


def by_all(work: Callable[[int], object], threads: int) -> float:
    """Seconds that threads take together, each with its number."""
    with ThreadPoolExecutor(threads) as team:
        begun = time.perf_counter()
        list(team.map(work, range(threads)))
        return time.perf_counter() - begun


def rate(product: Callable[..., object], weights: Sequence[object], flops: int) -> float:
    """FLOP/s of a product with one weight after the other."""
    product(weights[0])
    begun, done = time.perf_counter(), 0
    while not done or time.perf_counter() - begun < _SECONDS:
        product(weights[done % len(weights)])
        done += 1
    return done * flops / (time.perf_counter() - begun)


def run(point: Record) -> Record:
    import torch

    from h2o_flexgen.kernels.layers import linear

    threads, turns = torch.get_num_threads(), []
    buffer = torch.ones(_COLD // 8, dtype=torch.int64)
    part = _COLD // threads // 4096 * 4096
    weights = {}
    for outs, ins in SHAPES:
        copies = max(2, _COLD // (2 * outs * ins))
        weights[outs, ins] = [torch.randn(outs, ins).bfloat16() for _ in range(copies)]
    with TemporaryDirectory() as folder, torch.inference_mode():
        found = loops(Path(folder))
        for _ in range(point["turns"]):
            each = threads * _TIMES * 24 * ctypes.c_int.in_dll(found, "lanes").value
            flops, reads = [], []
            for _ in range(4):
                flops.append(each / by_all(lambda _: found.multiply(_TIMES), threads))
                seconds = by_all(lambda n: found.read_all(buffer.data_ptr() + n * part, part), threads)
                reads.append(threads * part / seconds)
            rates = {}
            for rows in point["rows"]:
                done = moved = spent = 0.0
                for (outs, ins), some in weights.items():
                    work = 2 * rows * outs * ins
                    speed = rate(partial(linear, torch.randn(rows, ins).bfloat16()), some, work)
                    done, moved, spent = done + work, moved + 2 * outs * ins, spent + work / speed
                rates[rows] = [done / spent, moved / spent]
            turns.append({"flops": max(flops), "bytes": max(reads), "rates": rates})
    return {"measured": turns, "computes": native.what_computes()}


def table(records: list[Record]) -> Iterator[str]:
    yield "| kernels | rows | GFLOP/s | of the loop's | GB/s of weights | of the loop's |"
    yield "|---|" + "---:|" * 5
    for record in records:
        for rows in record["rows"]:
            turns = [(*turn["rates"][str(rows)], turn["flops"], turn["bytes"]) for turn in record["measured"]]
            shares = [[turn[i] / turn[i + 2] for turn in turns] for i in (0, 1)]
            rates = [median(turn[i] for turn in turns) / 1e9 for i in (0, 1)]
            shown = [part for i in (0, 1) for part in (f"{rates[i]:.1f}", spread(shares[i], ".2f"))]
            yield f"| {record['computes']} | {rows} | {' | '.join(shown)} |"
    yield from ("", provenance(records))


def main() -> int:
    parser = arguments(__doc__, "peaks", 1, "processes")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,512", help="numbers of rows, with commas between")
    parser.add_argument("--turns", type=int, default=5, help="of all loops and products")
    args = parser.parse_args()
    tier = native.best_tier()
    point = {"kernels": tier.name if tier else "none", "turns": args.turns}
    point["rows"] = [int(number) for number in args.rows.split(",")]
    return run_all(args, [point], partial(in_process, "peaks"), "kernels", table, run)


if __name__ == "__main__":
    sys.exit(main())
