"""The rates of a model on each kind of processor: ours beside llama.cpp, both compiled for the same instructions.

    python -m benchmarks.processors                                      LLaMA's shape of 1.1 B, AVX2, 4 and 8 bits
    python -m benchmarks.processors --kernels avx2,native --bits 4
    python -m benchmarks.processors --models FILE.gguf --batches 1,32    the same file on both sides
    python -m benchmarks.processors --cells avx2:4:8 --seconds 100       one cell of them, what 100 seconds allow

A process per cell (kernels:bits:batch) and side, one side right after the other, full cache, what `auto` picks. Of
batches with more than 2,048 tokens of prompts, prompts are shorter. The same command goes on where it ended, so that a
table can be made in pieces of --seconds. llama.cpp by its own llama-batched-bench, whose tokens are random; ours are of
the demo's held-out text, or with --random-ids random as well. Of random weights 4 bits lie beside Q4_0, 8 beside Q8_0,
16 beside BF16. On a processor that has more, avx2 and avxvnni are measured beside a llama.cpp built for them:
scripts/peer_env.sh says how.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.records import ROOT, arguments, in_process, provenance, run_all, shaped, spread
from h2o_flexgen.baselines.process import run_command
from h2o_flexgen.baselines.settings import usable_threads
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.baselines.work import PASSIVE, batched_bench, bench_row
from h2o_flexgen.cli.prompts import random_prompts
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import required
from h2o_flexgen.folders import expanded
from h2o_flexgen.kernels.native.tiers import SWITCH

SHAPE = "llama-1.1b"
LLAMA_1B: Record = {
    **(known_config("llama-3.2-1b") or {}),
    **{"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False},
    **{"max_position_embeddings": 8192, "rope_scaling": None},
}
OURS, PEER = "ours", "llama.cpp"
TYPES = {4: "q4_0", 8: "q8_0", 16: "bf16"}
"""The types of llama.cpp with about as many bits."""
BUILDS = {"native": "llamacpp", "avx2": "v3/llamacpp", "avxvnni": "vnni/llamacpp"}
"""Below --peers: llama.cpp for the instructions of a tier."""
DEMO = ROOT / "h2o_flexgen" / "data" / "demo"
SCRATCH = ROOT / "results" / "local"
_MOST = 2048  # tokens of a batch's prompts
_CELLS = 256  # to which llama.cpp rounds the cells of a sequence


def measure(point: Record) -> Record:
    """A process for each side of a point, of the tier that it names: kernels are chosen when they are imported."""
    os.environ[SWITCH] = point["kernels"]
    found = {side: in_process("processors", {**point, "side": side}) for side in point["sides"]}
    both = {side: {key: record[key] for key in ("prefill_s", "decode_s")} for side, record in found.items()}
    return {**found[point["sides"][0]], "found": both}


def ours(point: Record) -> Record:
    """Seconds of a batch and its steps of decoding, after a warm-up that does not count."""
    model, bits = _model(point), point["bits"]
    made: dict[str, Any] = {} if bits is None else {"weights": "dummy", "weight_bits": bits}
    policy = {"gpu_batch_size": point["batch"], "num_gpu_batches": 1}
    with Engine(str(model), policy=policy, **made) as engine:
        prompts = _prompts(engine, point)
        engine.generate([prompt[:8] for prompt in prompts], max_new_tokens=3, ignore_eos=True)
        engine.generate(prompts, max_new_tokens=point["new"] + 1, ignore_eos=True)
        record = required(engine.last_record, "a run has just ended")
    return {"prefill_s": record.prefill_s, "decode_s": record.decode_s}


def _prompts(engine: Engine, point: Record) -> list[list[int]]:
    """As many stretches of ids as the batch has sequences: of random weights by the demo's tokenizer, whose ids they
    know too."""
    batch, length = point["batch"], point["prompt"]
    if point["random_ids"]:
        return random_prompts(batch, length, engine.model.spec.vocab_size, 0)
    codec = engine.model.codec or TextCodec.open(DEMO)
    assert codec is not None, "the demo has a tokenizer"
    ids = codec.encode_bare((DEMO / "heldout.txt").read_text(encoding="utf-8"))
    apart = (len(ids) - length) // batch
    return [ids[i * apart : i * apart + length] for i in range(batch)]


def peer(point: Record) -> Record:
    batch, threads, prompt, new = point["batch"], usable_threads(), point["prompt"], point["new"]
    cells = -(-(prompt + new) // _CELLS) * _CELLS * batch
    build = Path(point["peers"]) / BUILDS[point["kernels"]]
    command = batched_bench(build, batch, prompt, new, cells, threads, m=_file(point))
    environment = {**os.environ, **PASSIVE, "OMP_NUM_THREADS": str(threads)}
    row = bench_row(run_command(command, cwd=ROOT, environment=environment).checked().output)
    return {"prefill_s": row["t_pp"], "decode_s": row["t_tg"]}


def _model(point: Record) -> Path:
    """The folder or file of a point's model: LLaMA's shape is written down here."""
    if point["bits"] is None:
        return Path(expanded(point["model"]))
    return Path(shaped(SCRATCH / "models" / point["model"], LLAMA_1B))


def _file(point: Record) -> Path:
    """The file that llama.cpp reads: the same file, or one of random weights, made once."""
    from h2o_flexgen.baselines.random_gguf import GgufShape, random_file  # gguf is not there everywhere

    model = _model(point)
    if point["bits"] is None:
        return model
    shape = GgufShape.from_config(json.loads((model / "config.json").read_text(encoding="utf-8")))
    return random_file(SCRATCH, shape, TYPES[point["bits"]])


def table(records: list[Record]) -> Iterator[str]:
    """A row for each cell: medians of the rates, and of the ratios of runs side by side."""
    columns = [f"{phase}, tokens/s | llama.cpp | ratio" for phase in ("prefill", "decode")]
    yield f"| model, weights | kernels | batch, tokens | {' | '.join(columns)} | n |"
    yield "|---|---|" + "---:|" * 8
    cells: dict[str, list[Record]] = {}
    for record in records:
        cells.setdefault(record["point"], []).append(record)
    for some in cells.values():
        cell, shown = some[0], []
        for phase, tokens in (("prefill_s", cell["prompt"]), ("decode_s", cell["new"])):
            rates = {
                side: [tokens * cell["batch"] / each["found"][side][phase] for each in some] for side in cell["sides"]
            }
            shown += [f"{median(rates[side]):.3g}" if side in rates else "" for side in (OURS, PEER)]
            ratios = [our / other for our, other in zip(rates.get(OURS, []), rates.get(PEER, []), strict=False)]
            shown.append(spread(ratios, ".2f"))
        sizes = f"{cell['batch']}, {cell['prompt']} + {cell['new']}"
        name = f"{cell['model_name']}, {cell['weights']} | {cell['kernels']}"
        yield f"| {name} | {sizes} | {' | '.join(shown)} | {len(some)} |"
    yield from ("", provenance(records).replace("random weights in bfloat16, ", ""))


def points_of(args: Namespace) -> list[Record]:
    found: list[Record] = []
    for model in args.models.split(","):
        name = Path(model).name.removesuffix(".gguf")
        for kernels in args.kernels.split(","):
            for bits in map(int, args.bits.split(",")) if model == SHAPE else [None]:
                weights = f"{bits} bits" if bits else "as stored"
                for batch in map(int, args.batches.split(",")):
                    sizes = {"batch": batch, "prompt": min(args.prompt, max(1, _MOST // batch)), "new": args.new}
                    what = {"model": model, "model_name": name, "bits": bits, "kernels": kernels, "weights": weights}
                    cell = {"cell": f"{kernels}:{bits or name}:{batch}", "sides": args.sides.split(",")}
                    more = {"random_ids": args.random_ids, "peers": args.peers}
                    found.append(
                        {**what, **sizes, **cell, **more, "point": f"{name}, {weights}, {kernels}, batch {batch}"}
                    )
    wanted = args.cells.split(",") if args.cells else [point["cell"] for point in found]
    if unknown := set(wanted).difference(point["cell"] for point in found):
        sys.exit(f"no cells {', '.join(sorted(unknown))} among {', '.join(point['cell'] for point in found)}")
    return [point for point in found if point["cell"] in wanted]


def main() -> int:
    parser = arguments(__doc__, "processors", 3)
    parser.add_argument("--models", default=SHAPE, help=f"GGUF files with commas between, or {SHAPE} (default)")
    parser.add_argument("--bits", default="4,8", help="of random weights: 4, 8, 16")
    parser.add_argument("--kernels", default="avx2", help=f"tiers, with commas between: {', '.join(BUILDS)}")
    parser.add_argument("--batches", default="1,8,32,128", help="sequences, with commas between")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=16, help="steps of decoding")
    parser.add_argument("--random-ids", action="store_true", help="prompts of random ids instead of text")
    parser.add_argument("--sides", default=f"{OURS},{PEER}", help="what to run")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers"), help="folder of the peers' environments")
    parser.add_argument(
        "--cells", help="of all these only some: kernels:bits:batch (a file: its name for bits), commas"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which none is begun (default: all)")
    args = parser.parse_args()
    begun = time.monotonic()

    def in_time(point: Record) -> Record:
        if time.monotonic() - begun > args.seconds:
            raise KeyboardInterrupt
        return measure(point)

    sides = {OURS: ours, PEER: peer}
    return run_all(args, points_of(args), in_time, "point", table, lambda point: sides[point["side"]](point))


if __name__ == "__main__":
    sys.exit(main())
