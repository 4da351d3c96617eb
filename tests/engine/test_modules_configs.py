"""Odd configs of popular types: by transformers' modules a config gives transformers' own probabilities, or is refused;
never others in silence."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import ModelError
from tests.engine.odd_configs import odd_fields
from tests.seeds import moved
from tests.tiny import VOCAB, prompts_of

KINDS = ("llama", "olmo2", "gemma2", "cohere2", "granite", "phi", "starcoder2", "deepseek_v3", "qwen2_moe", "mixtral")
KINDS += ("stablelm", "smollm3", "exaone4", "glm4_moe", "nemotron", "gpt_neox", "gemma3_text", "qwen3_moe", "gpt_oss")
DRAWS = 5
"""Of each type."""
CONTEXT, REST = prompts_of([26, 9])


def odd_model(kind: str, number: int, folder: Path) -> PreTrainedModel:
    """Saved to a folder and read from it. What transformers cannot make or run is skipped."""
    fields = odd_fields(kind, random.Random(moved(1000 * number + KINDS.index(kind))))
    torch.manual_seed(3)
    try:
        config = AutoConfig.for_model(kind, **json.loads(json.dumps(fields)))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                if parameter.dim() > 1:
                    parameter.copy_(noise * (0.5 if parameter.shape[0] == VOCAB else 1.3 * parameter.shape[-1] ** -0.5))
                else:
                    parameter.add_(noise * 0.1)
            model.save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
            model(torch.tensor([CONTEXT]), use_cache=False)
    except Exception as error:
        pytest.skip(f"transformers: {type(error).__name__}")
    return model.eval()


@torch.no_grad()
def logprob(model: PreTrainedModel, context: list[int], rest: list[int]) -> float:
    logits = model(torch.tensor([context + rest[:-1]]), use_cache=False, return_dict=True).logits
    rows = logits[0, len(context) - 1 :].float().log_softmax(-1)
    return float(rows.gather(1, torch.tensor(rest)[:, None]).sum())


CASES = [
    pytest.param(kind, number, marks=() if number == i % DRAWS else pytest.mark.slow)
    for i, kind in enumerate(KINDS)
    for number in range(DRAWS)
]


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "number"), CASES)
def test_an_odd_config_is_right_or_refused(kind: str, number: int, tmp_path: Path) -> None:
    model = odd_model(kind, number, tmp_path)
    how: dict[str, Any] = {"dtype": "float32", "model_impl": "transformers"}
    try:
        with Engine(str(tmp_path), **how) as llm:
            found = llm.score([(CONTEXT, REST)])[0].logprob
    except ModelError:
        return
    assert found == pytest.approx(logprob(model, CONTEXT, REST), abs=2e-3)
