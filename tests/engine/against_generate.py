"""Left-padded prompts, and `generate_ids` beside transformers' `generate` on them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from h2o_flexgen.engine.engine import Engine
from tests.tiny import prompts_of

PAD, EOS, NEW = 1, 2, 14
Inputs = tuple[torch.Tensor, torch.Tensor]
RAGGED = [4, 11, 1, 7]


def padded(lengths: list[int], seed: int = 0) -> Inputs:
    """Left-padded prompts and their mask."""
    prompts = prompts_of(lengths, seed=seed)
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts]
    return torch.tensor(ids), torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])


def same(model: PreTrainedModel, llm: Engine, inputs: Inputs, **settings: Any) -> torch.Tensor:
    """Both generate, with everything recorded; what they agree on is given back."""
    ids, mask = inputs
    recorded = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = model.generate(ids, attention_mask=mask, **settings, **recorded)
    found = llm.generate_ids(ids, mask, **settings, **recorded)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.sequences.dtype == torch.int64
    new = expected.sequences[:, ids.shape[1] :]
    # What transformers computes for a row after its eos is the continuation of a sequence that has ended.
    ended = torch.isin(new, torch.tensor(_eos_of(model, settings))).int().cumsum(1).roll(1, 1)
    ended[:, 0] = 0
    for mine, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        assert len(mine) == len(theirs) == new.shape[1]
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            going = ended[:, step] == 0
            torch.testing.assert_close(a[going], b[going], atol=1e-4, rtol=1e-4)
    assert torch.equal(llm.generate_ids(input_ids=ids, attention_mask=mask, **settings), expected.sequences)
    return new


def _eos_of(model: PreTrainedModel, settings: dict[str, Any]) -> list[int]:
    eos = settings.get("eos_token_id", model.generation_config.eos_token_id)
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
