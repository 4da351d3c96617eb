"""Layers that choose what they attend to, under eviction: against transformers, whose mask hides what has gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.self_test import prompts_of
from h2o_flexgen.models.hf.shrink import VOCAB, random_model, shrunk

BUDGET, SINKS, NEW = 10, 2, 6  # more than are chosen


def hidden(prompt: int, length: int) -> torch.Tensor:
    """What transformers adds to logits (1, 1, length, length): sinks and the most recent are seen behind a prompt."""
    query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
    kept = (key < SINKS) | (key >= query - (BUDGET - SINKS))
    seen = (key <= query) & (kept | (query < prompt))
    return torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.parametrize(
    "kind", ["hy_v4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("deepseek_v32", "glm_moe_dsa"))]
)
def test_what_is_chosen_is_of_what_is_kept(kind: str, tmp_path: Path) -> None:
    """Each layer by its own index, or by that of the layer before, with a prefix that prompts share."""
    with torch.no_grad():
        model = random_model(shrunk({"model_type": kind}))
        assert model.config.index_topk < BUDGET
        model.save_pretrained(tmp_path)
    short, long, other = prompts_of(VOCAB)
    prompts = [long, [*long[:12], *other], short, other]
    how = {"dtype": "float32", "model_impl": "transformers", "offload_dir": str(tmp_path)}
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 2, "prefill_chunk": 16}
    eviction = EvictionConfig("streaming", budget=BUDGET, sinks=SINKS)
    with Engine(str(tmp_path), eviction=eviction, policy=policy, **how) as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, outputs, strict=True):
        whole = torch.tensor([[*prompt, *output.token_ids[:-1]]])
        with torch.no_grad():
            logits = model(whole, attention_mask=hidden(len(prompt), whole.shape[1])).logits[0, len(prompt) - 1 :]
        assert output.token_ids == logits.argmax(-1).tolist()
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
        assert output.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)
