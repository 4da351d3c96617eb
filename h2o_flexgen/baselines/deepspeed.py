"""Adapter of DeepSpeed ZeRO-Inference: `python -m h2o_flexgen.baselines.deepspeed FOLDER`.

Stage 3 partitioning in one process, parameters offloaded to host memory, or to the disk where the model is larger than
`cpu_mem`, which needs libaio. Without a GPU its CPU accelerator computes.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from h2o_flexgen.baselines.work import AdapterWork, CannotRun, Outcome, run

_ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
_ROOM = 0.6
"""Of `cpu_mem`, for parameters; the rest is the process, the KV cache and what is being gathered."""


def prepare(folder: str) -> None:
    from h2o_flexgen.baselines import transformers

    transformers.prepare(folder)


def measure(folder: str) -> Outcome:
    os.environ.update(_ONE)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    if AdapterWork.read(Path(folder)).device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # it looks at the environment as it is imported
    import torch
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    from h2o_flexgen.baselines.transformers import saved_checkpoint, start, timed

    work = start(folder)
    checkpoint = saved_checkpoint(work, folder)
    settings = _settings(work, checkpoint)
    keep = HfDeepSpeedConfig(settings)  # while it lives, from_pretrained partitions as it loads
    started = time.perf_counter()
    deepspeed.init_distributed()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, work.dtype))
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.module.eval()
    load_s = time.perf_counter() - started
    offload = settings["zero_optimization"]["offload_param"]["device"]
    outcome = timed(engine.module, work, load_s, {"deepspeed": deepspeed.__version__}, offload_param=offload)
    del keep
    return outcome


def _settings(work: AdapterWork, checkpoint: str) -> dict[str, Any]:
    """Its configuration; CannotRun where parameters would have to go to the disk and cannot."""
    nbytes = sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors"))
    offload: dict[str, Any] = {"device": "cpu"}
    if work.cpu_mem is not None and nbytes > _ROOM * work.cpu_mem:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise CannotRun(
                "a model of this size needs DeepSpeed's disk offload, and that needs libaio: not installed here"
            )
        offload = {"device": "nvme", "nvme_path": work.scratch, "buffer_count": 5, "buffer_size": 1 << 28}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": work.dtype == "bfloat16"},
        "fp16": {"enabled": work.dtype == "float16"},
        "zero_optimization": {"stage": 3, "offload_param": offload},
    }


if __name__ == "__main__":
    sys.exit(run(measure, prepare))
