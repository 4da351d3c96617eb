"""Is the cost model right? Measures settings whose speed was predicted, and grids of policies beside the chosen one.

    python scripts/cost_check.py                      every setting, predicted and measured: median and worst error
    python scripts/cost_check.py --grid               also the policies around the chosen one: how good was the choice?
    python scripts/cost_check.py --only 3,7 --repetitions 3

Every run is a process of its own with random weights, under scripts/memcap.sh where its memory is capped. The machine
is calibrated for a model right before its settings, in each repetition anew. Records go to --output, a line each; the
tables, of all records there, to stdout and to table.md. Needs root for the caps, about 20 GB of disk in --offload-dir
and a quiet machine: the load average is in every record.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
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
_PATIENCE = 1.1  # a policy of a grid is given this many times the seconds of the chosen one: after that it has lost
_START_S = 8  # in which a run starts, plans and loads
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


class TooSlow(RuntimeError):
    """A run was ended because it had taken longer than the one it is compared with."""


def run(setting: Setting, offload: Path, extra: Iterable[str] = (), seconds: float | None = None) -> dict[str, Any]:
    """The record of one run; `extra` flags fix a policy. RuntimeError with what was said where it fails.

    TooSlow where prefill and decode take over `seconds`, and as many as the program starts in.
    """
    command = [sys.executable, "-m", "h2o_flexgen.run", *setting.flags, "--offload-dir", str(offload), *extra]
    if setting.cpu_mem is not None:
        limit = f"{int(setting.cpu_mem * SLACK * 1024)}M"
        command = [str(ROOT / "scripts/memcap.sh"), limit, "--cold", str(offload), "--", *command]
    load = os.getloadavg()[0]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=None if seconds is None else seconds + _START_S)
        except subprocess.TimeoutExpired as expired:
            os.killpg(process.pid, signal.SIGTERM)
            raise TooSlow(f"{setting.label}: over {seconds:.0f} s") from expired
    if process.returncode:
        raise RuntimeError(f"{setting.label}: exit code {process.returncode}\n{err[-2000:]}")
    record: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {"setting": setting.label, "flags": " ".join(extra) or _CHOSEN, "load_average": load, **record}


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


def report(records: list[dict[str, Any]]) -> Iterator[str]:
    """Predicted and measured generated tokens per second, the errors of all runs, and how good the choices were."""
    sizes: list[float] = []
    yield "| setting | predicted tokens/s | measured | error of each run |"
    yield "|---|---:|---:|---:|"
    for setting in SETTINGS:
        runs = [record for record in records if (record["setting"], record["flags"]) == (setting.label, _CHOSEN)]
        if runs:
            pairs = [(record["predicted"]["gen_throughput"], record["gen_throughput"]) for record in runs]
            errors = [predicted / measured - 1 for predicted, measured in pairs]
            sizes += map(abs, errors)
            predicted, measured = (median(values) for values in zip(*pairs, strict=True))
            shown = ", ".join(f"{error:+.0%}" for error in errors)
            yield f"| {setting.label} | {predicted:.3g} | {measured:.3g} | {shown} |"
    yield ""
    yield f"error over {len(sizes)} runs: median {median(sizes):.0%}, worst {max(sizes):.0%}"
    yield from _choices(records)


def _choices(records: list[dict[str, Any]]) -> Iterator[str]:
    """The chosen policy of each setting against the best of the grid that was measured with it, each repetition."""
    for setting in SETTINGS:
        repetitions: list[list[dict[str, Any]]] = []
        for record in (record for record in records if record["setting"] == setting.label):
            if record["flags"] == _CHOSEN:
                repetitions.append([])
            repetitions[-1].append(record)
        said = [_choice(repetition) for repetition in repetitions if len(repetition) > 1]
        if said:
            yield f"{setting.label}: chosen {'; '.join(said)}"


def _choice(repetition: list[dict[str, Any]]) -> str:
    finished = [record for record in repetition if "slower_than_s" not in record]
    best = max(finished, key=lambda record: record["gen_throughput"])
    share = repetition[0]["gen_throughput"] / best["gen_throughput"]
    ended = len(repetition) - len(finished)
    unfinished = f", {ended} of them ended unfinished after {_PATIENCE:g} times its seconds" if ended else ""
    return f"{share:.0%} of the best of {len(repetition)} ({best['flags']}){unfinished}"


def measure(setting: Setting, offload: Path, with_grid: bool, out: TextIO) -> None:
    """One run by the chosen policy, and one by each policy around it."""

    def keep(extra: Iterable[str], limit: float | None = None) -> dict[str, Any]:
        try:
            record = run(setting, offload, extra, limit)
            predicted, speed = record["predicted"]["gen_throughput"], record["gen_throughput"]
            print(f"{setting.label}, {record['flags']}: predicted {predicted:.3g}, measured {speed:.3g}", flush=True)
        except TooSlow as slow:
            record = {"setting": setting.label, "flags": " ".join(extra), "slower_than_s": limit}
            print(f"{slow} with {record['flags']}", flush=True)
        out.write(json.dumps(record) + "\n")
        out.flush()
        return record

    chosen = keep(())
    limit = _PATIENCE * (chosen["prefill_s"] + chosen["decode_s"])
    for flags in grid(chosen) if with_grid else ():
        with suppress(RuntimeError):  # what does not fit is no competitor
            keep(flags, limit)


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
    path = args.output / "records.jsonl"
    with path.open("a", encoding="utf-8") as out:
        for repetition in range(args.repetitions):
            for model, settings in groupby(chosen, key=lambda setting: setting.model):
                calibrate(model, args.offload_dir)
                for setting in settings:
                    measure(setting, args.offload_dir, args.grid and repetition < _GRIDS, out)
    said = "\n".join(report([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]))
    print(said)
    (args.output / "table.md").write_text(said + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
