"""Is the cost model right? Measures settings whose speed was predicted, and grids of policies beside the chosen one.

    python scripts/cost_check.py                      every setting, predicted and measured: median and worst error
    python scripts/cost_check.py --grid               also the policies around the chosen one: how good was the choice?
    python scripts/cost_check.py --only 3,7 --repetitions 3

Every run is a process of its own with random weights, under scripts/memcap.sh where its memory is capped. The machine
is calibrated once per model before anything is timed. Records go to --output, a line each; the tables to stdout. Needs
root for the caps, about 20 GB of disk in --offload-dir and a quiet machine: the load average is in every record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SLACK = 1.25  # of the control group over --cpu-mem: page cache of libraries, the interpreter before it counts


@dataclass(frozen=True)
class Setting:
    """A workload under caps; `cpu_mem` in GiB, None for all that is free."""

    model: str
    cpu_mem: float | None
    sequences: int
    prompt_len: int
    gen_len: int
    ratio: float

    @property
    def label(self) -> str:
        cap = "ample" if self.cpu_mem is None else f"{self.cpu_mem:g} GiB"
        return f"{self.model}, {cap}, {self.sequences} x {self.prompt_len}+{self.gen_len}, KV {self.ratio:.0%}"

    @property
    def flags(self) -> list[str]:
        flags = ["--model", self.model, "--weights", "dummy", "--dtype", "bfloat16", "--num-prompts", self.sequences]
        flags += ["--prompt-len", self.prompt_len, "--gen-len", self.gen_len, "--hh-ratio", self.ratio]
        return [str(flag) for flag in flags] + ([] if self.cpu_mem is None else ["--cpu-mem", f"{self.cpu_mem}GiB"])


SETTINGS = (
    Setting("opt-125m", None, 32, 512, 64, 1.0),
    Setting("opt-125m", None, 32, 512, 64, 0.2),
    Setting("opt-125m", None, 8, 128, 256, 0.2),
    Setting("opt-125m", 0.5, 32, 256, 32, 0.2),
    Setting("opt-1.3b", None, 8, 256, 32, 1.0),
    Setting("opt-1.3b", None, 32, 256, 64, 0.2),
    Setting("opt-1.3b", 1.5, 16, 128, 64, 0.2),
    Setting("opt-1.3b", 0.9, 8, 128, 32, 1.0),
    Setting("opt-2.7b", None, 8, 128, 32, 0.2),
    Setting("opt-2.7b", 2.5, 16, 128, 32, 1.0),
    Setting("opt-6.7b", None, 8, 128, 16, 0.2),
    Setting("opt-6.7b", 6.0, 16, 128, 16, 0.2),
    Setting("opt-6.7b", 3.0, 16, 16, 64, 1.0),
)


def run(setting: Setting, offload: Path, extra: Iterable[str] = ()) -> dict[str, Any]:
    """The record of one run; `extra` flags fix a policy. RuntimeError with what was said where it fails."""
    command = [sys.executable, "-m", "h2o_flexgen.run", *setting.flags, "--offload-dir", str(offload), *extra]
    if setting.cpu_mem is not None:
        limit = f"{int(setting.cpu_mem * SLACK * 1024)}M"
        command = [str(ROOT / "scripts/memcap.sh"), limit, "--cold", str(offload), "--", *command]
    load = os.getloadavg()[0]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{setting.label}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"setting": setting.label, "load_average": load, **record}


def grid(record: dict[str, Any]) -> Iterator[list[str]]:
    """Flags of block shapes around the chosen one; where weights go is left to the search, within the same cap."""
    rows, batches = record["policy"]["gpu_batch_size"], record["policy"]["num_gpu_batches"]
    count = record["sequences"]
    for size in sorted({max(1, rows // 4), max(1, rows // 2), rows, min(count, 2 * rows)}):
        for number in sorted({1, max(1, batches // 2), batches, 2 * batches}):
            if size * number <= max(count, rows * batches) and (size, number) != (rows, batches):
                yield ["--gpu-batch-size", str(size), "--num-gpu-batches", str(number)]


def calibrate(settings: Iterable[Setting], offload: Path) -> None:
    """Once per model, so that no calibration runs inside a cap or beside a measurement."""
    for model in dict.fromkeys(setting.model for setting in settings):
        command = [sys.executable, "-m", "h2o_flexgen.calibrate", "--model", model, "--dtype", "bfloat16"]
        subprocess.run([*command, "--offload-dir", str(offload)], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def table(rows: list[tuple[str, float, float]]) -> str:
    """Predicted and measured generated tokens per second, median and worst error."""
    lines = ["| setting | predicted tokens/s | measured | error |", "|---|---:|---:|---:|"]
    errors = [predicted / measured - 1 for _, predicted, measured in rows]
    for (label, predicted, measured), error in zip(rows, errors, strict=True):
        lines.append(f"| {label} | {predicted:.3g} | {measured:.3g} | {error:+.0%} |")
    sizes = sorted(map(abs, errors))
    lines.append(f"\nerror: median {median(sizes):.0%}, worst {sizes[-1]:.0%}")
    return "\n".join(lines)


def check(setting: Setting, args: argparse.Namespace, out: Any) -> tuple[str, float, float]:
    """Predicted and measured tokens per second of the chosen policy; prints how others did, if asked to."""

    def measured(extra: Iterable[str], times: int) -> tuple[float, dict[str, Any]]:
        records = []
        for _ in range(times):
            record = run(setting, args.offload_dir, extra)
            records.append(record)
            out.write(json.dumps(record) + "\n")
            out.flush()
        return median(record["gen_throughput"] for record in records), records[-1]

    if setting.cpu_mem is not None:
        run(setting, args.offload_dir)  # packs the weights that go to disk
    speed, record = measured((), args.repetitions)
    predicted = record["predicted"]["gen_throughput"]
    print(f"{setting.label}: predicted {predicted:.3g}, measured {speed:.3g} tokens/s", flush=True)
    if args.grid:
        others = {}
        for flags in grid(record):
            try:
                others[" ".join(flags)], _ = measured(flags, args.repetitions)
            except RuntimeError as error:
                print(f"  {' '.join(flags)}: {str(error).splitlines()[0]}", flush=True)
        best = max(others, key=lambda name: others[name], default=None)
        if best is not None:
            share = speed / max(speed, others[best])
            print(f"  chosen: {share:.0%} of the best of {len(others) + 1} ({best})", flush=True)
    return setting.label, predicted, speed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of settings, from 1, as 2,5")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--offload-dir", type=Path, default=Path("~/.cache/h2o_flexgen/offload").expanduser())
    parser.add_argument("--output", type=Path, default=ROOT / "results/local/cost-check")
    args = parser.parse_args()
    chosen = SETTINGS if args.only is None else [SETTINGS[int(number) - 1] for number in args.only.split(",")]
    args.output.mkdir(parents=True, exist_ok=True)
    args.offload_dir.mkdir(parents=True, exist_ok=True)
    calibrate(chosen, args.offload_dir)
    with (args.output / "records.jsonl").open("a", encoding="utf-8") as out:
        rows = [check(setting, args, out) for setting in chosen]
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
