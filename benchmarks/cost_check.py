"""Is the cost model right? Measures settings whose speed was predicted, and grids of policies beside the chosen one.

    python -m benchmarks.cost_check           every setting, predicted and measured: median and worst error
    python -m benchmarks.cost_check --grid    also the policies around the chosen one: how good was the choice?
    python -m benchmarks.cost_check --only 3,7 --repetitions 3

Every run is a process of its own with random weights, under a cap on its memory where the setting has one. The machine
is calibrated for a model right before its settings, in each repetition anew. Records go to --output, a line each, those
of runs that failed or were ended too; the tables, of all records there, to stdout and to table.md. Needs root for the
caps, about 20 GB of disk in --offload-dir and a quiet machine: the load average is in every record.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

from benchmarks.records import ROOT
from h2o_flexgen.baselines.memcap import cap_command
from h2o_flexgen.baselines.process import RunFailed, run_command
from h2o_flexgen.baselines.store import Record, RecordFile

_CHOSEN = "as chosen"
_GRIDS = 3  # repetitions that measure a grid, too
_PATIENCE = 1.1  # a policy of a grid is given this many times the seconds of the chosen one: after that it has lost
_SPARE_S = 5  # and these, as no two runs take equally long to start and load
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


class TooSlow(RunFailed):
    """A run was ended because it had taken longer than the one it is compared with."""


def run(setting: Setting, offload: Path, extra: Iterable[str] = (), seconds: float | None = None) -> Record:
    """The record of one run, and its seconds from start to end; `extra` flags fix a policy.

    RunFailed with the reason where it fails, its stderr being shown; TooSlow where it takes over `seconds` in all.
    """
    command = [sys.executable, "-m", "h2o_flexgen.run", *setting.flags, "--offload-dir", str(offload), *extra]
    if setting.cpu_mem is not None:
        command = [*cap_command(int(setting.cpu_mem * SLACK * 1024) << 20, [offload]), *command]
    load, done = os.getloadavg()[0], run_command(command, math.inf if seconds is None else seconds, cwd=ROOT)
    if done.timed_out:
        raise TooSlow(f"over {seconds:.0f} s")
    if done.exit_code:
        sys.stderr.write(done.errors[-2000:])
    return {"load_average": load, "process_s": done.seconds, **done.json()}


def grid(record: Record) -> Iterator[list[str]]:
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
    run_command([*command, "--offload-dir", str(offload)], cwd=ROOT, loud=True).checked()


def pack(model: str, offload: Path) -> None:
    """All weights in the offload folder, so that no run that is measured writes them."""
    flags = ["--model", model, "--weights", "dummy", "--dtype", "bfloat16", "--weights-placement", "disk=1"]
    work = ["--num-prompts", "1", "--prompt-len", "4", "--gen-len", "1", "--no-calibrate", "--quiet"]
    command = [sys.executable, "-m", "h2o_flexgen.run", *flags, *work, "--offload-dir", str(offload)]
    run_command(command, cwd=ROOT, loud=True).checked()


def report(records: list[Record]) -> Iterator[str]:
    """Predicted and measured generated tokens per second, the errors of all runs, how good the choices were, failures.

    A run counts where it came to its end: others have no `gen_throughput`.
    """
    sizes: list[float] = []
    yield "| setting | predicted tokens/s | measured | error of each run |"
    yield "|---|---:|---:|---:|"
    for setting in SETTINGS:
        chosen = [record for record in records if (record["setting"], record["flags"]) == (setting.label, _CHOSEN)]
        runs = [record for record in chosen if "gen_throughput" in record]
        if runs:
            pairs = [(record["predicted"]["gen_throughput"], record["gen_throughput"]) for record in runs]
            errors = [predicted / measured - 1 for predicted, measured in pairs]
            sizes += map(abs, errors)
            predicted, measured = (median(values) for values in zip(*pairs, strict=True))
            shown = ", ".join(f"{error:+.0%}" for error in errors)
            yield f"| {setting.label} | {predicted:.3g} | {measured:.3g} | {shown} |"
    yield ""
    if sizes:
        yield f"error over {len(sizes)} runs: median {median(sizes):.0%}, worst {max(sizes):.0%}"
    yield from _choices(records)
    failures = [record for record in records if "failed" in record]
    if failures:
        yield ""
        yield f"{len(failures)} of {len(records)} runs failed:"
    for record in failures:
        yield f"- {record['setting']}, {record['flags']}: {record['failed']}"


def _choices(records: list[Record]) -> Iterator[str]:
    """The chosen policy of each setting against the best of the grid that was measured with it, each repetition."""
    for setting in SETTINGS:
        repetitions: list[list[Record]] = []
        for record in (record for record in records if record["setting"] == setting.label):
            if record["flags"] == _CHOSEN:
                repetitions.append([])
            repetitions[-1].append(record)
        said = [_choice(repetition) for repetition in repetitions if len(repetition) > 1]
        if said:
            yield f"{setting.label}: chosen {'; '.join(said)}"


def _choice(repetition: list[Record]) -> str:
    finished = [record for record in repetition if "gen_throughput" in record]
    best = max(finished, key=lambda record: record["gen_throughput"])
    share = repetition[0]["gen_throughput"] / best["gen_throughput"]
    failed = sum("failed" in record for record in repetition)
    ended = len(repetition) - len(finished) - failed
    unfinished = f", {ended} of them ended unfinished after {_PATIENCE:g} times its seconds" if ended else ""
    besides = f"; {failed} more failed" if failed else ""
    return f"{share:.0%} of the best of {len(repetition) - failed} ({best['flags']}){unfinished}{besides}"


def measure(setting: Setting, offload: Path, with_grid: bool, store: RecordFile) -> bool:
    """One run by the chosen policy, and one by each policy around it. False where the chosen one failed."""

    def keep(extra: Iterable[str] = (), most: float = 0, limit: float | None = None) -> Record:
        flags = " ".join(extra) or _CHOSEN
        try:
            found = run(setting, offload, extra, limit)
            predicted, speed = found["predicted"]["gen_throughput"], found["gen_throughput"]
            said = f"predicted {predicted:.3g}, measured {speed:.3g}"
        except TooSlow as slow:
            found, said = {"slower_than_s": most}, str(slow)
        except RunFailed as error:  # what does not fit is no competitor, but it may also have crashed
            found, said = {"failed": str(error)}, f"failed, {error}"
        print(f"{setting.label}, {flags}: {said}", flush=True)
        store.add({"setting": setting.label, "flags": flags, **found})
        return store.records[-1]

    chosen = keep()
    if "failed" in chosen:
        return False
    generating = chosen["prefill_s"] + chosen["decode_s"]
    most, beside = _PATIENCE * generating, chosen["process_s"] - generating
    for flags in grid(chosen) if with_grid else ():
        keep(flags, most, most + beside + _SPARE_S)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="numbers of settings, from 1, as 2,5")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--offload-dir", type=Path, default=Path("~/.cache/h2o_flexgen/offload").expanduser())
    parser.add_argument("--output", type=Path, default=ROOT / "results/local/cost-check")
    args = parser.parse_args()
    chosen = SETTINGS if args.only is None else [SETTINGS[int(number) - 1] for number in args.only.split(",")]
    store, failed = RecordFile.open(args.output), 0
    args.offload_dir.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(setting.model for setting in chosen if setting.cpu_mem is not None):
        pack(model, args.offload_dir)
    for repetition in range(args.repetitions):
        for model, settings in groupby(chosen, key=lambda setting: setting.model):
            calibrate(model, args.offload_dir)
            for setting in settings:
                failed += not measure(setting, args.offload_dir, args.grid and repetition < _GRIDS, store)
    print(store.write(report(store.records)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
