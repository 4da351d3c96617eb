"""Adapter of Hugging Face transformers: `python -m h2o_flexgen.baselines.transformers FOLDER`.

SDPA attention, weights made or loaded in the dtype asked for, `model.generate` with its default, dynamic KV cache; with
the `options` {"static": true} its static one.
"""

from __future__ import annotations

import sys
import time

from h2o_flexgen.baselines.generation import model_in_memory, start, timed
from h2o_flexgen.baselines.work import give, run


def main(folder: str) -> int:
    """Runs the work in `folder`."""
    work = start(folder)
    started = time.perf_counter()
    model = model_in_memory(work, folder)
    load_s = time.perf_counter() - started
    detail = {"attention": model.config._attn_implementation}
    return give(timed(model, work, load_s, {}, detail, static=work.options.get("static", False)))


if __name__ == "__main__":
    sys.exit(run(main))
