"""An adapter that measures nothing: its options say how it behaves."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from h2o_flexgen.baselines.work import AdapterWork, CannotRun, Outcome, run
from h2o_flexgen.openmp import SHORT_SPIN


def prepare(folder: str) -> None:
    """Leaves a line in its scratch folder; option: unready (the reason why that cannot be)."""
    work = AdapterWork.read(Path(folder))
    if "unready" in work.options:
        raise CannotRun(work.options["unready"])
    with (Path(work.scratch) / "prepared").open("a", encoding="utf-8") as file:
        file.write("once\n")


def measure(folder: str) -> Outcome:
    """Options, beside what each says: speed (times are 1 s and 2 s divided by it), sleep (seconds), read (bytes)."""
    work = AdapterWork.read(Path(folder))
    options, count = work.options, len(work.prompts)
    time.sleep(options.get("sleep", 0))
    if "fail" in options:  # with a message
        sys.stderr.write(f"Traceback\n{options['fail']}\n")
        raise SystemExit(4)
    if "refuse" in options:  # with a reason
        raise CannotRun(options["refuse"])
    if count > options.get("room", count):  # sequences that its memory has room for
        sys.stderr.write("RuntimeError: DefaultCPUAllocator: can't allocate memory\n")
        raise SystemExit(1)
    if "waste" in options:  # MiB
        held = [b"x" * (1 << 20) for _ in range(options["waste"])]
        sys.stderr.write(f"{len(held)}\n")
    new, speed = work.gen_len - options.get("short", 0), options.get("speed", 1.0)
    # Beyond `flat` sequences it takes twice as long for twice as many.
    seconds = max(1.0, count / options.get("flat", count)) / speed
    wrong = options.get("wrong", 0)
    tokens = [[sum(prompt) % 97 + (row < wrong)] * new for row, prompt in enumerate(work.prompts)]
    detail = {"cpu_mem": work.cpu_mem, "gpu_mem": work.gpu_mem, "python": sys.executable, "plan": work.plan}
    detail |= {"weight_bits": work.weight_bits, "model_impl": work.model_impl}
    detail |= {"openmp": {name: os.environ.get(name) for name in SHORT_SPIN}, **options.get("detail", {})}
    times = (seconds, 2 * seconds, 3 * seconds, 0.5)
    counted = (options.get(name) for name in ("read", "moved", "shared"))
    return Outcome(*times, tokens, {"fake": "1"}, detail, *counted)


if __name__ == "__main__":
    sys.exit(run(measure, prepare))
