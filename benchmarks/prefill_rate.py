"""How close does prefill come to what the machine can multiply? FLOPs of prompts per second, beside those of GEMMs.

    python -m benchmarks.prefill_rate                      every setting, one repetition
    python -m benchmarks.prefill_rate --only 1,2 --repetitions 3

A run is a process of its own that takes turns: products, prefill, products, prefill, ... Products are torch's linear in
bfloat16, with bias: those of one layer at the rows that go through a unit at once ("model's GEMMs": their FLOPs over
their seconds), and 4,096 rows times 4,096 x 4,096 ("large GEMM"). Each prefill is compared with the products before and
after it. Its FLOPs are those of the projections, the MLPs, causal attention (half of the square) and the logits, as far
as they are computed: the last layer's MLP sees only last tokens. Norms, softmax, scores, choosing what stays, filling
the cache and sampling the first token count as time, not as FLOPs. Records go to --output, a line each, and table.md is
made of all of them. Deep models are given few layers, all alike: the name says how many.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.records import arguments, in_process, provenance, run_all, spread
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.schedule.work import PhaseWork

LARGE = 4096
_WEIGHTS = 96 << 20  # bytes of each weight's copies, which take turns, so that none is found in a cache
_GEMM_SECONDS = 1.0  # of each kind of product in a turn, at least
_WORK = (("opt-125m", 12, 32, 512), ("opt-1.3b", 6, 8, 256), ("opt-1.3b", 3, 32, 512), ("opt-6.7b", 2, 8, 256))


def points(rounds: int) -> list[Record]:
    """The settings, with the full cache and with H2O at 20 %, whose scores come from the prompts' attention."""
    found = []
    for model, layers, rows, prompt in _WORK:
        for ratio in (1.0, 0.2):
            cache = "full" if ratio == 1 else f"H2O {ratio:.0%}"
            title = f"{model}, {layers} layers, {rows} x {prompt}, {cache}"
            point = {"model": model, "layers": layers, "rows": rows, "prompt": prompt, "ratio": ratio}
            found.append({"title": title, **point, "rounds": rounds})
    return found


def prefill_flops(spec: ModelSpec, rows: int, prompt: int) -> float:
    """FLOPs that the prompts of `rows` sequences take in the engine."""
    tokens, layers = rows * prompt, spec.num_layers
    units = {("embed", tokens): 1, ("attn", tokens): layers, ("mlp", tokens): layers - 1, ("mlp", rows): 1}
    pairs = {(None, prompt): rows * prompt * (prompt + 1) / 2}
    work = PhaseWork(products={**units, ("head", rows): 1}, prompt_pairs=pairs)
    return work.product_flops(spec) + work.attention_flops(spec)


def gemm_rates(spec: ModelSpec, rows: int) -> Iterator[tuple[float, float]]:
    """Again and again: FLOP/s of one layer's products of `rows` rows, and of a large one."""
    import torch

    layer = spec.layer_products
    kinds = [[(rows, *product) for product in layer], [(LARGE, LARGE, LARGE)]]
    made: list[list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]] = []
    for kind in kinds:
        made.append([])
        for count, outs, ins in kind:
            weights = [torch.randn(outs, ins).bfloat16() for _ in range(max(2, _WEIGHTS // (2 * outs * ins)))]
            made[-1].append((torch.randn(count, ins).bfloat16(), weights, torch.randn(outs).bfloat16()))
    turn = 0
    while True:
        rates = []
        for kind, tensors in zip(kinds, made, strict=True):
            flops, begun = 0, time.perf_counter()
            while not flops or time.perf_counter() - begun < _GEMM_SECONDS:
                turn += 1
                for (count, outs, ins), (x, weights, bias) in zip(kind, tensors, strict=True):
                    torch.nn.functional.linear(x, weights[turn % len(weights)], bias)
                    flops += 2 * count * outs * ins
            rates.append(flops / (time.perf_counter() - begun))
        yield rates[0], rates[1]


def run(point: Record) -> int:
    """One run, in this process; its record goes to stdout."""
    import torch

    from h2o_flexgen import LLM, EvictionConfig

    eviction = EvictionConfig("h2o" if point["ratio"] < 1 else "full", ratio=point["ratio"])
    policy = {"gpu_batch_size": point["rows"], "num_gpu_batches": 1, "weights": {"cpu": 1.0}, "cache": {"cpu": 1.0}}
    draw = Random(0)
    with TemporaryDirectory() as folder, torch.inference_mode():
        config = {**(known_config(point["model"]) or {}), "num_hidden_layers": point["layers"]}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with LLM(folder, weights="dummy", dtype="bfloat16", eviction=eviction, policy=policy) as llm:
            spec = llm.model.spec

            def prefill() -> float:
                prompts = [[draw.randrange(4, spec.vocab_size) for _ in range(point["prompt"])] for _ in range(rows)]
                llm.generate(prompts, max_new_tokens=2, ignore_eos=True)
                return float(llm.last_record.to_json()["prefill_s"])

            rows = point["rows"]
            prefill()  # a warm-up
            flops = prefill_flops(spec, rows, point["prompt"])
            chunk = llm.last_plan.policy.prefill_chunk // point["prompt"] * point["prompt"]
            rates = gemm_rates(spec, min(rows * point["prompt"], chunk))
            next(rates)
            turns, before = [], next(rates)
            for _ in range(point["rounds"]):
                seconds = prefill()
                after = next(rates)
                gemm, large = ((a + b) / 2 for a, b in zip(before, after, strict=True))
                turns.append({"prefill_s": seconds, "prefill": flops / seconds, "gemm": gemm, "large": large})
                before = after
    shares = {f"{kind}_share": median(t["prefill"] / t[kind] for t in turns) for kind in ("gemm", "large")}
    print(json.dumps({"flops": flops, "turns": turns, **shares}))
    return 0


def table(records: list[Record]) -> Iterator[str]:
    """Rates and shares of every setting: medians over all turns of all runs, and their range."""
    yield "| setting | prefill s | its GFLOP/s | model's GEMMs | large GEMM | share of model's GEMMs | of large GEMM |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for title in dict.fromkeys(record["title"] for record in records):
        turns = [turn for record in records if record["title"] == title for turn in record["turns"]]
        rates = [f"{median(turn[kind] for turn in turns) / 1e9:.0f}" for kind in ("prefill", "gemm", "large")]
        shares = [spread([turn["prefill"] / turn[kind] for turn in turns], ".0%") for kind in ("gemm", "large")]
        yield f"| {title} | {median(turn['prefill_s'] for turn in turns):.3g} | {' | '.join((*rates, *shares))} |"
    yield ""
    yield provenance(records)


def main() -> int:
    parser = arguments(__doc__, "prefill-rate", 1, "processes per setting", takes_points=True)
    parser.add_argument("--rounds", type=int, default=3, help="prefills in each")
    parser.add_argument("--only", help="numbers of settings, from 1, as 2,5")
    args = parser.parse_args()
    if args.run:
        return run(args.run)
    chosen = points(args.rounds)
    if args.only is not None:
        chosen = [chosen[int(number) - 1] for number in args.only.split(",")]
    return run_all(args, chosen, partial(in_process, "prefill_rate"), "title", table)


if __name__ == "__main__":
    sys.exit(main())
