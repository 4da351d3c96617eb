"""Is the cost model right? Measures settings whose speed was predicted, and grids of policies beside the chosen one.

    python scripts/cost_check.py                      every setting, predicted and measured: median and worst error
    python scripts/cost_check.py --grid               also the policies around the chosen one: how good was the choice?
    python scripts/cost_check.py --only 3,7 --repetitions 3

Every run is a process of its own with random weights, under scripts/memcap.sh where its memory is capped. The machine
is calibrated for a model right before its settings, in each repetition anew. Records go to --output, a line each; the
tables to stdout and to table.md there. Needs root for the caps, about 20 GB of disk in --offload-dir and a quiet
machine: the load average is in every record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
_CHOSEN = "as chosen"
_GRIDS = 3  # repetitions that measure a grid, too
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


def calibrate(model: str, offload: Path) -> None:
    """Now: machines that others share are not as fast in every minute."""
    command = [sys.executable, "-m", "h2o_flexgen.calibrate", "--model", model, "--dtype", "bfloat16"]
    subprocess.run([*command, "--offload-dir", str(offload)], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def pack(model: str, offload: Path) -> None:
    """All weights in the offload folder, so that no run that is measured writes them."""
    flags = ["--model", model, "--weights", "dummy", "--dtype", "bfloat16", "--weights-placement", "disk=1"]
    work = ["--num-prompts", "1", "--prompt-len", "4", "--gen-len", "1", "--no-calibrate", "--quiet"]
    command = [sys.executable, "-m", "h2o_flexgen.run", *flags, *work, "--offload-dir", str(offload)]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def table(pairs: dict[str, list[tuple[float, float]]]) -> str:
    """Predicted and measured generated tokens per second, and the errors of all runs: their median and worst."""
    lines = ["| setting | predicted tokens/s | measured | error of each run |", "|---|---:|---:|---:|"]
    sizes: list[float] = []
    for label, runs in pairs.items():
        errors = [predicted / measured - 1 for predicted, measured in runs]
        sizes += map(abs, errors)
        predicted, measured = (median(values) for values in zip(*runs, strict=True))
        shown = ", ".join(f"{error:+.0%}" for error in errors)
        lines.append(f"| {label} | {predicted:.3g} | {measured:.3g} | {shown} |")
    lines.append(f"\nerror over {len(sizes)} runs: median {median(sizes):.0%}, worst {max(sizes):.0%}")
    return "\n".join(lines)


class Check:
    """Runs settings and keeps what they gave. `out`: an open file for the records."""

    def __init__(self, offload: Path, out: TextIO) -> None:
        self._offload, self._out = offload, out
        self.pairs: dict[str, list[tuple[float, float]]] = {}
        self.grids: dict[str, dict[str, list[float]]] = {}

    def measure(self, setting: Setting, with_grid: bool) -> None:
        """One run by the chosen policy, and one by each policy around it."""
        record = self._run(setting, ())
        speed, predicted = record["gen_throughput"], record["predicted"]["gen_throughput"]
        self.pairs.setdefault(setting.label, []).append((predicted, speed))
        print(f"{setting.label}: predicted {predicted:.3g}, measured {speed:.3g} tokens/s", flush=True)
        if with_grid:
            speeds = self.grids.setdefault(setting.label, {})
            speeds.setdefault(_CHOSEN, []).append(speed)
            for flags in grid(record):
                with suppress(RuntimeError):  # what does not fit is no competitor
                    name = " ".join(flags)
                    speeds.setdefault(name, []).append(self._run(setting, flags)["gen_throughput"])
                    print(f"  {name}: {speeds[name][-1]:.3g}", flush=True)

    def choices(self) -> Iterator[str]:
        """How good each chosen policy was."""
        for label, speeds in self.grids.items():
            medians = {name: median(values) for name, values in speeds.items()}
            best = max(medians, key=lambda name: medians[name])
            share = medians[_CHOSEN] / medians[best]
            yield f"{label}: chosen {share:.0%} of the best of {len(medians)} ({best})"

    def _run(self, setting: Setting, extra: Iterable[str]) -> dict[str, Any]:
        record = run(setting, self._offload, extra)
        self._out.write(json.dumps(record) + "\n")
        self._out.flush()
        return record


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
    for model in dict.fromkeys(setting.model for setting in chosen if setting.cpu_mem is not None):
        pack(model, args.offload_dir)
    with (args.output / "records.jsonl").open("a", encoding="utf-8") as out:
        check = Check(args.offload_dir, out)
        for repetition in range(args.repetitions):
            for model, settings in groupby(chosen, key=lambda setting: setting.model):
                calibrate(model, args.offload_dir)
                for setting in settings:
                    check.measure(setting, args.grid and repetition < _GRIDS)
    said = "\n".join([table(check.pairs), *check.choices()])
    print(said)
    (args.output / "table.md").write_text(said + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
