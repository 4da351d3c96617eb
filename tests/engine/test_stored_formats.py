"""Quantised checkpoints answer as transformers' model of their dequantised weights, from memory and from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from tests.checkpoint.formats import FORMATS
from tests.checkpoint.quantised import Checkpoint, checkpoint
from tests.seeds import python_random
from tests.tiny import transformers_logprobs

PHI3 = {"model_type": "phi3", "pad_token_id": 0}
COHERE2 = {
    "model_type": "cohere2",
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
"""Rows of q and k in another order than in the checkpoint."""
NAMES = [
    "gptq 128",
    "gptq act-order",
    "gptq 8 zeros",
    "awq",
    "packed 4",
    "packed 8 zeros",
    "int8",
    "fp8 128",
    "fp8 channel",
    "nvfp4",
    "mxfp4 packed",
    "modelopt nvfp4",
    "bnb nf4 double",
    "bnb int8",
]


def _model_of(written: Checkpoint) -> PreTrainedModel:
    """transformers' model of what the weights stand for."""
    fields = {key: value for key, value in written.config.items() if key not in ("model_type", "quantization_config")}
    config = AutoConfig.for_model(written.config["model_type"], **{**fields, "torch_dtype": "float32"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(written.dense)
    return model


def pairs_to_score() -> list[tuple[list[int], list[int]]]:
    chance = python_random(1)
    return [
        ([chance.randrange(3, 40) for _ in range(n)], [chance.randrange(3, 40) for _ in range(6)]) for n in (5, 19, 1)
    ]


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in NAMES),
        ("gptq act-order", PHI3),
        ("awq", PHI3),
        *((name, COHERE2) for name in ("gptq act-order", "awq", "packed 8 zeros", "fp8 128")),
    ],
)
def test_log_probabilities(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    written = checkpoint(FORMATS[name], num_hidden_layers=2, **changes)
    folder = tmp_path / "model"
    folder.mkdir()
    written.write(folder)
    model, pairs, expected = _model_of(written), pairs_to_score(), list[list[float]]()
    for context, continuation in pairs:
        rows = transformers_logprobs(model, context, continuation)
        expected.append(rows[torch.arange(len(continuation)), torch.tensor(continuation)].tolist())
    for place in ("memory", "disk", "dequantized"):
        policy = {"gpu_batch_size": 2, "weights": {"disk": 1.0} if place == "disk" else {"cpu": 1.0}}
        settings: dict[str, Any] = {"dtype": "float32", "policy": policy, "dequantize": place == "dequantized"}
        with Engine(str(folder), offload_dir=str(tmp_path / place), **settings) as llm:
            packed = 0 if place == "dequantized" else written.config["num_hidden_layers"] * 7
            assert len(llm.model.spec.packings) == packed, place
            scores = llm.score(pairs)
        for logprobs, score in zip(expected, scores, strict=True):
            assert score.token_logprobs == pytest.approx(logprobs, abs=1e-4), place


def test_weight_bits_of_a_packed_checkpoint(tmp_path: Path) -> None:
    """They are packed once: in other bits only where they are dequantised first."""
    checkpoint(FORMATS["gptq"]).write(tmp_path)
    with pytest.raises(UsageError, match="whose checkpoint has packed weights"):
        Engine(str(tmp_path), weight_bits=8)
    with Engine(str(tmp_path), weight_bits=8, dequantize=True, dtype="float32") as llm:
        assert {packing.bits for _, packing in llm.model.spec.packings} == {8}
        assert len(llm.generate([[3, 4, 5]], max_new_tokens=3, ignore_eos=True)[0].token_ids) == 3


def test_the_format_is_known_by_its_method(tmp_path: Path) -> None:
    written = checkpoint(FORMATS["packed 4"])
    with written.open(written.write(tmp_path)) as source:
        assert source.format == "compressed-tensors"
    for name in [name for name in written.dense if name.endswith("_proj.weight")]:
        written.put(name.removesuffix(".weight"), written.dense[name].half())
    with written.open(written.write(tmp_path)) as source:
        assert (source.format, source.packings) == (None, {})
