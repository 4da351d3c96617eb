"""Section paper: the H2O paper's throughput table on this machine, by h2o_flexgen.bench.

OPT-6.7B and 30B with random weights in float16 (FlexGen knows no other on a GPU), prompts of 512 tokens, 32, 512 or
1,024 new ones, within 16 GiB of GPU memory: every system at its best batch, which runs of a few tokens find, ours by
the policy of the search on calibrated rates. A comparison that is cut off goes on in the next call.
"""

from __future__ import annotations

import sys
from functools import partial

from benchmarks.gpu.section import KEPT, Section, run, serve, tiny_model
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.folders import cached

SYSTEMS = "h2o,full,flexgen,accelerate,deepspeed"
RUN_S = 200
"""Seconds of a run, loading included, and of a system's search for its batch."""


def comparisons(section: Section) -> dict[str, str]:
    """Flags of bench by the name of the comparison, those first that say most."""
    if section.dry_run:
        model = tiny_model(section.output / "tiny-opt")
        return {"tiny-opt, 32+4": f"--model {model} --prompt-len 32 --gen-len 4 --batch-size 2 --no-search"}
    how = f"--device cuda --gpu-mem 16GiB --dtype float16 --timeout {RUN_S} --search-time {RUN_S} --search-tokens 4"
    return {
        f"{model}, 512+{new}": f"--model {model} --prompt-len 512 --gen-len {new} --batch-size auto --only-best {how}"
        for model in ("opt-6.7b", "opt-30b")
        for new in (512, 32, 1024)
    }


def compared(section: Section, name: str, flags: str) -> Record:
    output = section.output / "paper" / name.replace(", ", "-")
    scratch = output if section.dry_run else cached(KEPT)
    where = ["--output-dir", str(output), "--scratch-dir", str(scratch / "bench"), "--peers", section.peers]
    bench = [sys.executable, "-m", "h2o_flexgen.bench", "--systems", SYSTEMS, "--weights", "dummy"]
    done = run([*bench, "--repetitions", "1", *flags.split(), *where], section.left()).checked()
    return {"table": done.output.strip().rpartition("\n")[0]}  # the last line is JSON: in summary.json


def measure(section: Section) -> None:
    for name, flags in comparisons(section).items():
        section.attempt(name, partial(compared, section, name, flags))


if __name__ == "__main__":
    sys.exit(serve(measure))
