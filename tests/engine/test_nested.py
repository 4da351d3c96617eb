"""Language models of multimodal checkpoints, in the layouts of the hub and of newer transformers: text only."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
)

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.families import spec_from_config
from tests.checkpoint.formats import FORMATS
from tests.oracles.parameters import parameters_of
from tests.seeds import torch_generator
from tests.tiny import config_of, decided, prompts_of, transformers_greedy

NEW = 8
TITLE = "__metadata__"
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PIXTRAL = {"model_type": "pixtral", **SIGLIP, "head_dim": 8}


def _gemma3() -> PreTrainedModel:
    text = config_of("gemma3").to_dict()
    tower = {"model_type": "siglip_vision_model", **SIGLIP}
    made = Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration._from_config(made, attn_implementation="eager")


def _mistral3(text_model: str = "mistral", tied: bool = False) -> PreTrainedModel:
    text = {**config_of(text_model).to_dict(), "tie_word_embeddings": tied}
    made = Mistral3Config(vision_config=PIXTRAL, text_config=text, tie_word_embeddings=tied)
    return Mistral3ForConditionalGeneration._from_config(made, attn_implementation="eager")


MODELS = {"gemma3": _gemma3, "mistral3": _mistral3, "mistral3-tied": lambda: _mistral3(tied=True)}
MODELS["ministral3"] = lambda: _mistral3("ministral3")


def _made(name: str) -> PreTrainedModel:
    """Random weights that leave the next token far from certain."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn_like(parameter)
            if parameter_name.endswith("norm.weight"):
                parameter.add_(noise)
            else:
                parameter.copy_(noise)
    return model


def _write(model: PreTrainedModel, folder: Path, layout: str, **changes: Any) -> None:
    """layout: "hub" has the prefixes of the published files, "new" those of the modules."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    plain = {re.sub(r"^language_model\.model\.", "model.language_model.", name): x for name, x in tensors.items()}
    plain = {re.sub(r"^language_model\.lm_head\.", "lm_head.", name): x for name, x in plain.items()}
    plain = {re.sub(r"^(vision_tower|multi_modal_projector)\.", r"model.\1.", name): x for name, x in plain.items()}
    if layout == "hub":
        plain = {re.sub(r"^model\.language_model\.", "language_model.model.", name): x for name, x in plain.items()}
        plain = {re.sub(r"^lm_head\.", "language_model.lm_head.", name): x for name, x in plain.items()}
        plain = {re.sub(r"^model\.(vision|multi)", r"\1", name): x for name, x in plain.items()}
    save_file({name: x.contiguous() for name, x in plain.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.turns
@pytest.mark.parametrize("layout", ["hub", "new"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_whole_model(name: str, layout: str, tmp_path: Path) -> None:
    model = _made(name)
    _write(model, tmp_path, layout)
    prompts, answers = decided(prompts_of([5, 29, 1]), lambda _, prompt: transformers_greedy(model, prompt, NEW))
    for policy in ({"gpu_batch_size": 3}, {"gpu_batch_size": 2, "num_gpu_batches": 2, "weights": {"disk": 1.0}}):
        with Engine(str(tmp_path), dtype="float32", model_impl="native", policy=policy) as llm:
            outputs = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True, logprobs=0)
        for output, (tokens, logprobs) in zip(outputs, answers, strict=True):
            assert output.token_ids == tokens
            assert output.logprobs == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.turns
@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("layout", ["hub", "new"])
@pytest.mark.parametrize("name", ["gemma3", "ministral3"])
def test_what_belongs_to_images_is_never_read(
    name: str, layout: str, impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what shares a page with what is."""
    for tower in (SIGLIP, PIXTRAL):
        monkeypatch.setitem(tower, "intermediate_size", 8192)
    _write(_made(name), tmp_path, layout)
    path, reads = tmp_path / "model.safetensors", list[tuple[int, int]]()
    raw = path.read_bytes()[: 1 << 20]
    size = int.from_bytes(raw[:8], "little")
    held = {key: each["data_offsets"] for key, each in json.loads(raw[8 : 8 + size]).items() if key != TITLE}
    towers = [[8 + size + edge for edge in held[key]] for key in held if "vision_tower" in key]
    assert sum(last - first for first, last in towers) > 1 << 20
    preadv = os.preadv

    def watched(fd: int, views: list[memoryview], offset: int) -> int:
        count = preadv(fd, views, offset)
        if os.readlink(f"/proc/self/fd/{fd}") == str(path):
            reads.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", watched)
    for weights in ({"cpu": 1.0}, {"disk": 1.0}):
        with Engine(str(tmp_path), dtype="float32", model_impl=impl, policy={"weights": weights}) as llm:
            llm.generate(prompts_of([5]), max_new_tokens=2, ignore_eos=True)
        pairs = [(read, tower) for read in reads for tower in towers]
        inside = sum(max(0, min(read[1], tower[1]) - max(read[0], tower[0])) for read, tower in pairs)
        assert sum(stop - start for start, stop in reads) > 10_000
        assert inside < 64 * 1024, "of more than a MiB"


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_fp8_with_scales_of_activations(impl: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ministral 3 as the hub has it: the language model in FP8, its scales one number each, those of inputs too."""
    model, form, generator = _made("ministral3"), FORMATS["fp8 static"], torch_generator(4)
    kept = ["lm_head", "model.vision_tower", "model.multi_modal_projector"]
    _write(model, tmp_path, "hub", quantization_config={**form.config, "modules_to_not_convert": kept})
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if "language_model" in name and name.endswith("_proj.weight")]:
        matrix = form.write(generator, *stored.pop(name).shape)
        stored |= {f"{name.removesuffix('weight')}{part}": each for part, each in matrix.parts.items()}
        own = model.get_parameter(name.replace("language_model.model.", "model.language_model."))
        own.data.copy_(matrix.dense)
    save_file(stored, tmp_path / "model.safetensors")
    prompts, answers = decided(prompts_of([5, 29, 1]), lambda _, prompt: transformers_greedy(model, prompt, NEW))
    with Engine(str(tmp_path), dtype="float32", model_impl=impl, policy={"gpu_batch_size": 3}) as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True, logprobs=0)
        assert llm.last_record is not None
        assert llm.last_record.quantization["weights"]["format"] == "fp8"
    for output, (tokens, logprobs) in zip(outputs, answers, strict=True):
        assert output.token_ids == tokens
        assert output.logprobs == pytest.approx(logprobs, abs=1e-3)
    assert "its static scales of activations are not used" in caplog.text


def test_published_configs() -> None:
    """As the hub has them: what is the default of the text model's config is left out."""
    small = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    spec = spec_from_config(small, "x")
    # What is published, less the tower and the projection to the language model.
    assert parameters_of(spec) == 4_300_079_472 - 416_866_032 - 2_950_272
    assert (spec.dtype, spec.eos_token_ids) == ("bfloat16", (1, 106))
    assert (spec.arch.window, spec.max_positions) == (1024, 131072)
    with pytest.raises(ModelError, match="text_config is 'x'"):
        spec_from_config({**small, "text_config": "x"}, "x")
