"""Adapter of Hugging Face transformers: `python -m h2o_flexgen.baselines.transformers FOLDER`.

SDPA attention, the default dynamic KV cache, weights made or loaded in the dtype asked for, `model.generate`. The
model's eos token is taken away, which is cheaper than suppressing it at every step: both give a fixed length.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from h2o_flexgen.baselines.work import WARMUP_NEW, WARMUP_PROMPT, Outcome, Work, give


class _Clock(transformers.StoppingCriteria):
    """Never stops anything; notes when the first new token of every sequence was there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.started = self.now()
        self.first: float | None = None

    def now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        if self.first is None:
            self.first = self.now()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


def main(folder: str) -> int:
    """Runs the work in `folder`."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    work = Work.read(Path(folder))
    torch.set_num_threads(work.threads)
    started = time.perf_counter()
    model = _model(work, folder)
    load_s = time.perf_counter() - started
    prompts = torch.tensor(work.prompts, device=model.device)
    _generate(model, prompts[:, :WARMUP_PROMPT], WARMUP_NEW)
    clock = _Clock(model.device)
    tokens = _generate(model, prompts, work.gen_len, clock)
    ended = clock.now()
    if clock.first is None:
        raise RuntimeError("generate made no token")
    return give(
        Outcome(
            prefill_s=clock.first - clock.started,
            decode_s=ended - clock.first,
            total_s=ended - clock.started,
            load_s=load_s,
            token_ids=tokens.tolist(),
            versions={"transformers": transformers.__version__, "torch": torch.__version__},
            detail={
                "attention": model.config._attn_implementation,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": str(model.device),
                "threads": torch.get_num_threads(),
            },
        )
    )


def _model(work: Work, folder: str) -> Any:
    """The model of `folder`/config.json with random weights, or the checkpoint."""
    dtype = getattr(torch, work.dtype)
    if work.folder is None:
        torch.manual_seed(work.seed)
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(work.folder, dtype=dtype, attn_implementation="sdpa")
    cuda = work.device == "cuda" or (work.device == "auto" and torch.cuda.is_available())
    model = model.to("cuda" if cuda else "cpu").eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def _generate(model: Any, prompts: torch.Tensor, new_tokens: int, clock: _Clock | None = None) -> torch.Tensor:
    """`new_tokens` greedy tokens for each row of `prompts` (n, S), as (n, new_tokens)."""
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        stopping_criteria=transformers.StoppingCriteriaList([clock] if clock else []),
    )
    return output[:, prompts.shape[1] :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
