"""An adapter that measures nothing: its options say how it behaves."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from h2o_flexgen.baselines.work import Outcome, Work, give


def main(folder: str) -> int:
    """Options: speed (times are 1 s and 2 s divided by it), fail (a message), short, sleep (seconds)."""
    work = Work.read(Path(folder))
    time.sleep(work.options.get("sleep", 0))
    if "fail" in work.options:
        sys.stderr.write(f"Traceback\n{work.options['fail']}\n")
        return 4
    new, speed = work.gen_len - work.options.get("short", 0), work.options.get("speed", 1.0)
    tokens = [[sum(prompt) % 97] * new for prompt in work.prompts]
    return give(Outcome(1 / speed, 2 / speed, 3 / speed, 0.5, tokens, {"fake": "1"}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
