"""Adapter of this package: `python -m h2o_flexgen.baselines.own FOLDER`; `options` are the fields of EvictionConfig."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from h2o_flexgen.baselines.work import WARMUP_NEW, WARMUP_PROMPT, Outcome, Work, disk_bytes, give, run
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.record import package_version
from h2o_flexgen.engine.llm import LLM

SHARE_OF_CAP = 0.8
"""Of a cap, that the engine plans with: a control group also counts pages of files, which the engine does not."""


def main(folder: str) -> int:
    """Runs the work in `folder` through `LLM.generate`, the path that `run` takes too."""
    work = Work.read(Path(folder))
    policy = {"gpu_batch_size": len(work.prompts), "num_gpu_batches": 1}
    eviction = EvictionConfig(**work.options)
    with LLM(
        work.folder or work.model,
        eviction=eviction,
        policy=policy,
        weights=work.weights,
        dtype=work.dtype,
        device=work.device,
        seed=work.seed,
        cpu_mem=None if work.cpu_mem is None else int(work.cpu_mem * SHARE_OF_CAP),
        gpu_mem=work.gpu_mem,
        offload_dir=str(Path(work.scratch) / "offload"),
    ) as llm:
        llm.generate([prompt[:WARMUP_PROMPT] for prompt in work.prompts], max_new_tokens=WARMUP_NEW, ignore_eos=True)
        load_s = llm.last_record.load_s if llm.last_record else 0.0
        read, started = disk_bytes(), time.perf_counter()
        outputs = llm.generate(work.prompts, max_new_tokens=work.gen_len, ignore_eos=True)
        total_s, read = time.perf_counter() - started, disk_bytes() - read
        record = llm.last_record
    if record is None:
        raise RuntimeError("the run left no record")
    return give(
        Outcome(
            prefill_s=record.prefill_s,
            decode_s=record.decode_s,
            # A second plan may place the weights anew: that is loading, not generation.
            total_s=total_s - record.load_s,
            load_s=load_s + record.load_s,
            token_ids=[output.token_ids for output in outputs],
            versions={"h2o_flexgen": package_version(), "torch": torch.__version__},
            detail=record.to_json(),
            disk_read_bytes=read,
            bytes_moved=record.bytes_moved,
        )
    )


if __name__ == "__main__":
    sys.exit(run(main))
