"""What does each kind of processor make of a model? Ours beside llama.cpp, each compiled for the same instructions.

    python -m benchmarks.processors                                      LLaMA's shape of 1.1 B, AVX2, 4 and 8 bits
    python -m benchmarks.processors --kernels avx2,native --bits 4
    python -m benchmarks.processors --models FILE.gguf --batches 1,32    the same file on both sides

A process per model, kernels and side, sides in turns: each takes one batch after the other, full cache, what `auto`
picks. llama.cpp by its own llama-batched-bench, whose tokens are random; ours are of the demo's held-out text, or with
--random-ids random as well. Of random weights 4 bits lie beside Q4_0, 8 beside Q8_0, 16 beside BF16. On a processor
that has more, the AVX2 tier is measured beside a llama.cpp built for x86-64-v3: scripts/peer_env.sh says how.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.records import ROOT, arguments, in_process, llama, provenance, run_all, spread
from benchmarks.shared_cores import LLAMA_1B
from h2o_flexgen.baselines.process import run_command
from h2o_flexgen.baselines.settings import usable_threads
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.folders import expanded
from h2o_flexgen.kernels.native.tiers import SWITCH

SHAPE = "llama-1.1b"
OURS, PEER = "ours", "llama.cpp"
TYPES = {4: "q4_0", 8: "q8_0", 16: "bf16"}
"""What llama.cpp has of about as many bits."""
BUILDS = {"native": "llamacpp", "avx2": "v3/llamacpp"}
"""Below --peers: llama.cpp for the instructions of a tier."""
DEMO = ROOT / "h2o_flexgen" / "data" / "demo"
SCRATCH = ROOT / "results" / "local"
_CELLS = 256  # to which llama.cpp rounds the cells of a sequence
_PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}  # spinning, its threads are erratic on few cores


def run(point: Record) -> int:
    """One point, in this process or one of llama.cpp's; the record goes to stdout."""
    print(json.dumps({"cells": (ours if point["side"] == OURS else peer)(point)}))
    return 0


def measure(point: Record) -> Record:
    """A process for a point, of the tier that it names: what the kernels are is settled when they are imported."""
    os.environ[SWITCH] = point["kernels"]
    return in_process("processors", point)


def ours(point: Record) -> list[Record]:
    """Seconds of each batch, after a warm-up of each that does not count."""
    model, bits = _model(point), point["bits"]
    made: dict[str, Any] = {} if bits is None else {"weights": "dummy", "weight_bits": bits}
    policy = {"gpu_batch_size": max(point["batches"]), "num_gpu_batches": 1}
    cells = []
    with Engine(str(model), policy=policy, **made) as engine:
        for batch in point["batches"]:
            prompts = _prompts(engine, batch, point)
            engine.generate([prompt[:8] for prompt in prompts], max_new_tokens=3, ignore_eos=True)
            engine.generate(prompts, max_new_tokens=point["new"] + 1, ignore_eos=True)
            record = engine.last_record
            assert record is not None, "a run has just ended"
            cells.append({"batch": batch, "prefill_s": record.prefill_s, "decode_s": record.decode_s})
    return cells


def _prompts(engine: Engine, batch: int, point: Record) -> list[list[int]]:
    """As many stretches of ids as the batch has sequences: of random weights by the demo's tokenizer, whose ids they
    know too."""
    length, vocab = point["prompt"], engine.model.spec.vocab_size
    if point["random_ids"]:
        draw = random.Random(0)
        return [[draw.randrange(4, vocab) for _ in range(length)] for _ in range(batch)]
    codec = engine.model.codec or TextCodec.open(DEMO)
    assert codec is not None, "the demo has a tokenizer"
    ids = codec.encode_bare((DEMO / "heldout.txt").read_text(encoding="utf-8"))
    apart = (len(ids) - length) // batch
    return [ids[i * apart : i * apart + length] for i in range(batch)]


def peer(point: Record) -> list[Record]:
    """The rows of llama-batched-bench."""
    threads, batches = str(usable_threads()), point["batches"]
    cells = -(-(point["prompt"] + point["new"]) // _CELLS) * _CELLS * max(batches)
    program = Path(point["peers"]) / BUILDS[point["kernels"]] / "bin" / "llama-batched-bench"
    values = {
        "-m": _file(point),
        "-c": cells,
        "-npp": point["prompt"],
        "-ntg": point["new"],
        "-npl": ",".join(map(str, batches)),
        "-t": threads,
        "-tb": threads,
        "--output-format": "jsonl",
    }
    command = [str(program), *(str(word) for pair in values.items() for word in pair)]
    environment = {**os.environ, **_PASSIVE, "OMP_NUM_THREADS": threads}
    said = run_command(command, cwd=ROOT, environment=environment).checked().output
    rows = [json.loads(line) for line in said.splitlines() if line.startswith("{") and '"t_pp"' in line]
    return [{"batch": row["pl"], "prefill_s": row["t_pp"], "decode_s": row["t_tg"]} for row in rows]


def _model(point: Record) -> Path:
    """The folder or file of a point's model: LLaMA's shape is written down here."""
    if point["bits"] is None:
        return Path(expanded(point["model"]))
    return llama(SCRATCH / "models" / point["model"], **LLAMA_1B)


def _file(point: Record) -> Path:
    """What llama.cpp reads: the same file, or one of random weights, made once."""
    from h2o_flexgen.baselines.random_gguf import GgufShape, write_random  # gguf is not there everywhere

    model = _model(point)
    if point["bits"] is None:
        return model
    kind = TYPES[point["bits"]]
    shape = GgufShape.from_config(json.loads((model / "config.json").read_text(encoding="utf-8")))
    path = SCRATCH / f"random-{shape.fingerprint}-{kind}.gguf"
    if not path.is_file():
        write_random(path, shape, kind, 0)
    return path


def table(records: list[Record]) -> Iterator[str]:
    """A row for each model, kernels and batch: medians of the rates, and of the ratios of runs side by side."""
    runs: dict[tuple[str, str, str], dict[str, dict[int, Record]]] = {}
    for record in records:
        key = record["model_name"], record["weights"], record["kernels"]
        sides = runs.setdefault(key, {OURS: {}, PEER: {}})
        sides[record["side"]][record["repetition"]] = {cell["batch"]: cell for cell in record["cells"]}
    columns = [f"{phase}, tokens/s | llama.cpp | ratio" for phase in ("prefill", "decode")]
    yield f"| model, weights | kernels | batch | {' | '.join(columns)} | n |"
    yield "|---|---|" + "---:|" * 8
    sizes = records[0] if records else {}
    for (name, weights, kernels), sides in runs.items():
        pairs = [(sides[OURS][n], sides[PEER][n]) for n in sides[OURS] if n in sides[PEER]]
        for batch in dict.fromkeys(batch for our, _ in pairs for batch in our):
            both = [(our[batch], other[batch]) for our, other in pairs if batch in our and batch in other]
            shown = []
            for phase, tokens in (("prefill_s", sizes["prompt"]), ("decode_s", sizes["new"])):
                rates = [[tokens * batch / cell[phase] for cell in pair] for pair in both]
                shown += [f"{median(side):.3g}" for side in zip(*rates, strict=True)]
                shown.append(spread([our / other for our, other in rates], ".2f"))
            yield f"| {name}, {weights} | {kernels} | {batch} | {' | '.join(shown)} | {len(both)} |"
    yield from ("", provenance(records).replace("random weights in bfloat16, ", ""))


def main() -> int:
    """Measures what is missing in the output folder, then writes the table of all that is there."""
    parser = arguments(__doc__, "processors", 3, takes_points=True)
    parser.add_argument("--models", default=SHAPE, help=f"GGUF files with commas between, or {SHAPE} (default)")
    parser.add_argument("--bits", default="4,8", help="of random weights")
    parser.add_argument("--kernels", default="avx2", help=f"tiers, with commas between: {', '.join(BUILDS)}")
    parser.add_argument("--batches", default="1,8,32,128", help="sequences, with commas between")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=16, help="steps of decoding")
    parser.add_argument("--random-ids", action="store_true", help="prompts of random ids instead of text")
    parser.add_argument("--sides", default=f"{OURS},{PEER}", help="what to run")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers"), help="folder of the peers' environments")
    args = parser.parse_args()
    if args.run:
        return run(args.run)
    sizes = {"prompt": args.prompt, "new": args.new, "random_ids": args.random_ids, "peers": args.peers}
    sizes["batches"] = [int(number) for number in args.batches.split(",")]
    points: list[Record] = []
    for model in args.models.split(","):
        for bits in map(int, args.bits.split(",")) if model == SHAPE else [None]:
            for kernels in args.kernels.split(","):
                name = Path(model).name.removesuffix(".gguf")
                what = {"model": model, "model_name": name, "bits": bits, "kernels": kernels, **sizes}
                what["weights"] = f"{bits} bits" if bits else "as stored"
                for side in args.sides.split(","):
                    points.append({**what, "side": side, "point": f"{name}, {what['weights']}, {kernels}, {side}"})
    return run_all(args, points, measure, "point", table)


if __name__ == "__main__":
    sys.exit(main())
