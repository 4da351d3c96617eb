"""Adapter of NVIDIA's kvpress: `python -m h2o_flexgen.baselines.kvpress FOLDER`; `options`: {"ratio": R}.

Its H2O-like press, ObservedAttentionPress, with the eager attention that it needs. The press works on the prompt alone:
ceil(R x (prompt + new tokens)) tokens per layer and head stay of it, and what is generated is added. Its hooks find
layers where rotary models have them; on OPT we put the same hooks on the decoder's layers.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
from kvpress import ObservedAttentionPress
from transformers import DynamicCache

from h2o_flexgen.baselines.transformers import GenerationTimer, model_in_memory, start
from h2o_flexgen.baselines.work import WARMUP_NEW, WARMUP_PROMPT, CannotRun, Outcome, run


def measure(folder: str) -> Outcome:
    work = start(folder)
    started = time.perf_counter()
    model = model_in_memory(work, folder, attention="eager")
    load_s = time.perf_counter() - started
    prompts = torch.tensor(work.prompts, device=model.device)
    length = prompts.shape[1]
    kept = min(length, math.ceil(work.options.get("ratio", 1.0) * (length + work.gen_len)))
    # The press keeps int(length x (1 - ratio)) tokens: half a token more makes that `kept` whatever the rounding.
    press = ObservedAttentionPress(compression_ratio=max(0.0, 1 - (kept + 0.5) / length) if kept < length else 0.0)
    _generate(model, prompts[:, :WARMUP_PROMPT], WARMUP_NEW, press)
    timer = GenerationTimer(prompts.device)
    tokens, cached = _generate(model, prompts, work.gen_len, press, timer)
    detail = {"press": type(press).__name__, "kept_of_prompt": kept, "cached_at_the_end": cached, "attention": "eager"}
    return timer.outcome(tokens, load_s, {"kvpress": version("kvpress")}, detail)


@torch.inference_mode()
def _generate(
    model: Any, prompts: torch.Tensor, new_tokens: int, press: Any, timer: GenerationTimer | None = None
) -> tuple[torch.Tensor, int]:
    """`new_tokens` greedy tokens for each row of `prompts` (n, S), as (n, new_tokens), and the tokens in the cache.

    Step by step, as kvpress's own pipeline does it: after the press, the cache is shorter than the positions.
    """
    cache, positions = DynamicCache(config=model.config), torch.arange(prompts.shape[1], device=prompts.device)[None]
    tokens: list[torch.Tensor] = []
    with _pressed(model, press):
        step = prompts
        for _ in range(new_tokens):
            output = model(step, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1)
            step = output.logits[:, -1].argmax(dim=-1, keepdim=True)
            positions = positions[:, -1:] + 1
            tokens.append(step)
            if timer is not None and timer.first is None:
                timer.first = timer.now()
    return torch.cat(tokens, dim=1), cache.get_seq_length()


@contextlib.contextmanager
def _pressed(model: Any, press: Any) -> Iterator[None]:
    """The press on every layer, by its own context manager where it knows the model's layers."""
    decoder = getattr(model.model, "decoder", None)
    if decoder is None:
        if not hasattr(model.model, "layers") or not hasattr(model.model, "rotary_emb"):
            raise CannotRun(f"kvpress finds no layers in {type(model).__name__}")
        with press(model):
            yield
        return
    hooks = []
    for layer in decoder.layers:
        hooks.append(layer.self_attn.register_forward_pre_hook(_with_weights, with_kwargs=True))
        hooks.append(layer.self_attn.register_forward_hook(press.forward_hook, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_weights(module: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Has OPT's attention return the prompt's attention, as others do unasked; the layer above drops it again."""
    return arguments, {**named, "output_attentions": named["hidden_states"].shape[1] > 1}


if __name__ == "__main__":
    sys.exit(run(measure))
