"""A mixture larger than memory: tokens per second by the number of sequences, beside llama.cpp on the same file.

    python -m benchmarks.overnight --caps 1.5GiB,2.5GiB --sequences 1,32,256,1024

Random weights in Q4_0, a process per run, in a control group that counts the page cache, which is cold. This engine is
calibrated once before (python -m h2o_flexgen.calibrate --model FILE), outside the cap, and keeps H2O's 20 % in 4 bits
(--flags changes that). llama.cpp maps the file, without repacking, which would copy all of it; it has the cells of all
sequences in one pool (in float16 where an eighth of the cap holds them, else in q4_0), and takes 256 sequences at most.
Of it --steps steps are timed, and the rest of an answer is taken to go at that pace. Needs root (scripts/memcap.sh),
scripts/peer_env.sh llamacpp, and twice the size of the file on disk.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.records import ROOT, arguments, provenance, run_all, run_json
from h2o_flexgen.baselines.memcap import cap_command, read_report
from h2o_flexgen.baselines.settings import LLAMACPP, PEERS, usable_threads
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.baselines.work import PASSIVE, batched_bench
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.units import format_bytes, parse_bytes

OURS, PEER = "h2o_flexgen", "llama.cpp"
MOST = 256  # sequences that llama.cpp is compiled for
SCRATCH = ROOT / "results" / "local"
_CLOCKS = ("prefill_s", "decode_s")
_FACTS = ("date", "host", "torch", "threads", "load_average", "command", "version", "commit")
_KEPT = ("policy", "experts", "load_s", "bandwidth", "bytes_moved", "roofline", "predicted")


def made(model: str, folder: Path) -> Path:
    """The file of random weights of a model of configs/models, written once."""
    from h2o_flexgen.baselines.random_gguf import GgufShape, random_file

    if (config := known_config(model)) is None:
        raise SystemExit(f"--model is {model}: needed a name of configs/models")
    return random_file(folder / model, GgufShape.from_config(config), "q4_0")


def ours(point: Record) -> list[str]:
    """The command of this engine, which packs the file's weights into the folder `offload` beside it, once."""
    sizes = {"--prompt-len": point["prompt"], "--gen-len": point["new"], "--num-prompts": point["sequences"]}
    sizes |= {"--model": point["file"], "--offload-dir": Path(point["file"]).parent / "offload"}
    words = [str(word) for pair in sizes.items() for word in pair]
    return [sys.executable, "-m", "h2o_flexgen.run", *words, *shlex.split(point["flags"])]


def theirs(point: Record) -> list[str]:
    config, sequences, threads = known_config(point["model"]) or {}, point["sequences"], usable_threads()
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    cells = sequences * (point["prompt"] + point["steps"] + 1)
    wide = cells * config["num_hidden_layers"] * 4 * heads * dim
    kind = "f16" if wide <= parse_bytes(point["cap"]) / 8 else "q4_0"
    sizes = {"m": point["file"], "b": 2048, "ub": point["micro"], "ctk": kind, "ctv": kind, "fa": "on"}
    environment = Path(point["peers"]) / LLAMACPP
    command = batched_bench(environment, sequences, point["prompt"], point["steps"], cells, threads, **sizes)
    return ["env", *map("=".join, PASSIVE.items()), *command, "-kvu", "--no-repack"]


def measure(point: Record) -> Record:
    """Runs a point under its cap: seconds of prefill and of decode, how many steps these were, and the peak."""
    report, own = SCRATCH / "overnight-memcap.json", point["side"] == OURS
    report.parent.mkdir(parents=True, exist_ok=True)
    prefix = cap_command(parse_bytes(point["cap"]), [Path(point["file"]).parent], report)
    found = run_json([*prefix, *(ours if own else theirs)(point)])
    if not own:
        found |= {"prefill_s": found["t_pp"], "decode_s": found["t_tg"]}
    keys = (*_CLOCKS, *_FACTS, *(_KEPT if own else ()))
    memory = read_report(report)
    return {**{key: found[key] for key in keys}, "timed": point["new"] - 1 if own else point["steps"], "memory": memory}


def rates(record: Record) -> tuple[float, float, float]:
    """Tokens per second: of the prompts, of decoding, and new ones over the time for both."""
    count, steps = record["sequences"], record["new"] - 1
    decode_s = record["decode_s"] * steps / record["timed"]
    prompts, new = count * record["prompt"], count * record["new"]
    return prompts / record["prefill_s"], count * steps / decode_s, new / (record["prefill_s"] + decode_s)


def table(records: list[Record]) -> Iterator[str]:
    """A row for each cap, side and number of sequences; then what the largest block brings, cap by cap."""
    runs: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        runs.setdefault((record["cap"], record["side"], record["sequences"]), []).append(record)
    heads = ("cap", "sequences", "side", "prefill, tokens/s", "decode", "end to end", "read, of predicted")
    yield f"| {' | '.join(heads)} | bound, reached | peak | n |"
    yield "|---|---:|---|---:|---:|---:|---:|---|---:|---:|"
    ends: dict[str, dict[tuple[str, int], float]] = {}
    for (cap, side, sequences), found in sorted(runs.items(), key=lambda run: (run[0][0], run[0][2], run[0][1])):
        prefill, decode, end = (median(each) for each in zip(*map(rates, found), strict=True))
        ends.setdefault(cap, {})[side, sequences] = end
        peak = max(each["memory"].get("peak_bytes") or 0 for each in found)
        last = found[-1]
        words = (f"{prefill:.3g}", f"{decode:.3g}", f"{end:.3g}", _read(last), _bounds(last), format_bytes(peak))
        yield f"| {cap} | {sequences} | {side} | {' | '.join(words)} | {len(found)} |"
    for cap, by_side in ends.items():
        theirs = {count: end for (side, count), end in by_side.items() if side == PEER}
        most = max((count for side, count in by_side if side == OURS), default=0)
        if theirs and most:
            best, count = max((end, count) for count, end in theirs.items())
            end, single = by_side[OURS, most], theirs.get(1)
            alone = "" if single is None else f"{end / single:.3g} times {PEER} alone, and "
            yield ""
            yield f"{cap}: {most:,} sequences {alone}{end / best:.3g} times its best batch ({count}), end to end."
    yield from ("", provenance(records))


def _read(record: Record) -> str:
    """Bytes from disk, and how many more than predicted."""
    predicted = (record.get("predicted") or {}).get("bytes_moved") or {}
    moved, guess = ((each or {}).get("disk->cpu") for each in (record.get("bytes_moved"), predicted))
    return f"{format_bytes(moved)}, {moved / guess - 1:+.1%}" if moved and guess else ""


def _bounds(record: Record) -> str:
    """The resources that bound prefill and decode by known rates, and how near the run came."""
    phases = (record.get("roofline") or {}).items()
    found = {phase: each for phase, each in phases if each.get("achieved")}
    return ", ".join(f"{phase}: {each['bound']['resource']} {each['achieved']:.0%}" for phase, each in found.items())


def main() -> int:
    parser = arguments(__doc__, "overnight", 1)
    parser.add_argument("--model", default="olmoe-1b-7b", help="a mixture of configs/models")
    parser.add_argument("--caps", default="1.5GiB,2.5GiB", help="memory of a whole process, page cache included")
    parser.add_argument("--sequences", default="1,32,256,1024", help="with commas between")
    parser.add_argument("--sides", default=f"{OURS},{PEER}", help=f"{OURS}, {PEER}")
    parser.add_argument("--flags", default="--hh-ratio 0.2 --cache-bits 4", help="of h2o_flexgen.run")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="new tokens of a sequence")
    parser.add_argument("--steps", type=int, default=31, help=f"steps of {PEER} that are timed")
    parser.add_argument("--micro", type=int, default=512, help=f"tokens that go through a layer of {PEER} at once")
    parser.add_argument("--files", type=Path, default=SCRATCH / "models", help="folder of the file of random weights")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder of the peers' environments")
    args = parser.parse_args()
    sizes = {"prompt": args.prompt, "new": args.new, "model": args.model}
    file = str(made(args.model, args.files.resolve()))
    points = []
    for cap in args.caps.split(","):
        for sequences in map(int, args.sequences.split(",")):
            for side in args.sides.split(","):
                own = {"flags": args.flags} if side == OURS else {"steps": args.steps, "micro": args.micro}
                if side == OURS or sequences <= MOST:
                    name = f"{side}, {sequences} sequences in {cap}"
                    points.append({"cap": cap, "side": side, "sequences": sequences, **sizes, **own, "point": name})
    places = {"file": file, "peers": str(args.peers)}
    return run_all(args, points, lambda point: measure({**point, **places}), "point", table)


if __name__ == "__main__":
    sys.exit(main())
