"""Weights of fewer bits, whole models: the tokens are those of transformers on the dequantised weights, on any tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from h2o_flexgen.models.families import checkpoint_names
from h2o_flexgen.quant import PackedWeight
from tests.tiny import FAMILIES, generated_logprobs, prompts_of

NEW = 6
PLACES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "disk": {"policy": {"weights": {"disk": 1.0}, "gpu_batch_size": 2, "num_gpu_batches": 2}},
    "gpu": {"emulate_gpu": "1GiB", "policy": {"weights": {"gpu": 0.4, "cpu": 0.3, "disk": 0.3}, "gpu_batch_size": 3}},
}


def dequantised(llm: Engine) -> dict[str, torch.Tensor]:
    """The tensors that the engine computes with, by canonical name, in float32."""
    found = {}
    for group in llm.model.spec.weight_groups:
        for tensor in group.tensors:
            if tensor.packing is None:
                out = torch.empty(tensor.shape)
                llm.model.source.read_into(tensor.name, out)
            else:
                packed = PackedWeight.empty(tensor.packing, tensor.shape)
                llm.model.source.read_into(tensor.name, packed)
                out = packed.expanded()
            found[tensor.name] = out
    return found


def rounded_to_it(model: torch.nn.Module, llm: Engine) -> torch.nn.Module:
    """transformers' model with its weights replaced by those, where they are whole tensors."""
    names, state = checkpoint_names(llm.model.spec), model.state_dict()
    for name, value in dequantised(llm).items():
        for option in names[name]:
            stored = option if isinstance(option, str) else option.name
            if stored not in state:
                continue
            if isinstance(option, str) or option.spans is None:
                state[stored].copy_(value)
            else:
                rows = [torch.arange(*span) for span in option.spans]
                whole = state[stored].view(option.rows, *option.shape[2:]) if option.shape else state[stored]
                whole[torch.cat(rows)] = value.t() if option.transposed else value
    model.load_state_dict(state)
    return model


@pytest.mark.turns
@pytest.mark.parametrize(("name", "bits"), [(name, (4, 8)[i % 2]) for i, name in enumerate(FAMILIES)])
def test_every_family(name: str, bits: int, checkpoint, tmp_path: Path) -> None:
    _check(name, bits, "cpu", checkpoint)


@pytest.mark.parametrize("place", ["disk", "gpu"])
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_every_tier(name: str, place: str, checkpoint) -> None:
    _check(name, 4, place, checkpoint)


def _check(name: str, bits: int, place: str, checkpoint) -> None:
    model, folder = checkpoint(name)
    prompts = prompts_of([11, 4, 7])
    settings = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": 0}
    with Engine(folder, dtype="float32", weight_bits=bits, weight_group=32, **PLACES[place]) as llm:
        outputs = llm.generate(prompts, **settings)
        kept = {key: value.clone() for key, value in model.state_dict().items()}
        try:
            judge = rounded_to_it(model, llm)
            for prompt, output in zip(prompts, outputs, strict=True):
                logits = generated_logprobs(judge, prompt, output.token_ids)
                chosen = logits.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
                assert torch.equal(logits.amax(-1), chosen) or (logits.amax(-1) - chosen).max() < 1e-4
                assert output.logprobs == pytest.approx(chosen.tolist(), abs=2e-4)
        finally:
            model.load_state_dict(kept)
        record = llm.last_record
    assert record.quantization == {"weights": {"format": "groupwise", "bits": bits, "group": 32}, "cache": None}


def test_eviction_goes_with_it(checkpoint) -> None:
    """H2O on dequantised weights: offloaded and resident agree."""
    _, folder = checkpoint("llama")
    eviction, prompts = EvictionConfig("h2o", budget=8), prompts_of([20, 13])
    found = []
    for place in PLACES.values():
        with Engine(folder, dtype="float32", weight_bits=4, eviction=eviction, **place) as llm:
            found.append([output.token_ids for output in llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True)])
    assert found[0] == found[1] == found[2]


def test_bits_that_there_are_not() -> None:
    with pytest.raises(UsageError, match="weight_bits is 5"):
        Engine("demo", weight_bits=5)
    with pytest.raises(UsageError, match="weight_group is 48"):
        Engine("demo", weight_bits=4, weight_group=48)
