"""Stored formats by transformers' modules, of several types: what matrices stand for is what transformers multiplies,
dequantised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.models.hf.shrink import random_model, shrunk
from tests.checkpoint.formats import FORMATS, Format
from tests.engine.test_modules import tiny
from tests.seeds import torch_generator

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
}
PLAIN = ("stablelm", "olmo2", "gemma2", "granite", "glm4_moe", "deepseek_v3", "gpt_oss")
STATES = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
    "falcon_h1",
    "jamba",
)
KINDS = (*PLAIN, *STATES)
NAMES = ("gptq act-order", "awq", "packed 4 zeros", "fp8 128")
PAIRS = [([5, 9, 30, 7, 12], [3, 8, 21]), ([4], [17, 33])]
LAYERS = {"gemma2": 3, "gpt_oss": 3}
KEPT = ("lm_head", "embed_tokens", "mlp.gate.", "in_proj_a", "in_proj_b", "router", "shared_expert_gate")
KEPT = (*KEPT, "dt_proj", "x_proj", "wte", "wpe", "word_embeddings")
"""Matrices that quantisers leave as they are."""
OWN = {"gpt2": "gptq act-order", "falcon": "gptq act-order", "jamba": "fp8 channel", "qwen2_5_vl": "fp8 channel"}
"""Types whose modules multiply in ways of their own, Jamba's by `dt_proj`, or are not read: those of images."""


def scored(folder: Path) -> list[float]:
    """By transformers, from dense weights in float32."""
    seeing = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    kind: Any = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    with torch.no_grad():
        for context, rest in PAIRS:
            rows = model(torch.tensor([context + rest])).logits[0, len(context) - 1 : -1].log_softmax(-1)
            found.append(float(rows.gather(1, torch.tensor(rest)[:, None]).sum()))
    return found


def made(kind: str, **changes: bool) -> PreTrainedModel:
    if kind in (*STATES, *OWN):
        return random_model(shrunk({"model_type": kind, **changes}))
    return tiny(kind, **{**SIZES, "num_hidden_layers": LAYERS.get(kind, 2), **changes})


def store(kind: str, form: Format, dense: Path, quantised: Path, kept: Sequence[str] = KEPT) -> None:
    """The same tiny model twice: matrices of its layers in a stored format, and what they stand for."""
    made(kind).save_pretrained(dense)
    turned = kind == "gpt2"
    generator, meant, stored = torch_generator(5), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(dense / "model.safetensors").items():
        if tensor.dim() == 2 and name.endswith(".weight") and not any(each in name for each in kept):
            matrix = form.write(generator, *(tensor.T if turned else tensor).shape)
            meant[name] = matrix.dense.T.contiguous() if turned else matrix.dense
            stored |= {f"{name.removesuffix('weight')}{part}": each for part, each in matrix.parts.items()}
        else:
            meant[name] = stored[name] = tensor
    save_file(meant, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    said = dict(form.config)
    if said["quant_method"] == "compressed-tensors":
        said["ignore"] = ["lm_head", "re:.*mlp.gate$"]
    else:
        said["modules_to_not_convert"] = ["lm_head", "mlp.gate"]
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": said}))


def cases(ways: Sequence[Any], quick: tuple[str, Any]) -> list[Any]:
    """Of types with states, and of gpt-oss, all but `quick` are slow."""
    every = [(kind, way) for kind in KINDS for way in ways]
    return [
        pytest.param(*case, marks=() if case[0] in PLAIN[:-1] or case == quick else pytest.mark.slow) for case in every
    ]


@pytest.mark.parametrize("kind", OWN)
def test_matrices_that_are_multiplied_otherwise(kind: str, tmp_path: Path) -> None:
    dense, quantised = tmp_path / "dense", tmp_path / "quantised"
    dense.mkdir()
    quantised.mkdir()
    store(kind, FORMATS[OWN[kind]], dense, quantised, [each for each in KEPT if each != "dt_proj"])
    with Engine(str(quantised), dtype="float32", model_impl="transformers") as llm:
        assert [score.logprob for score in llm.score(PAIRS)] == pytest.approx(scored(dense), abs=2e-3)


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "name"), cases(NAMES, ("qwen3_5_moe_text", "awq")))
def test_what_is_stored_is_what_transformers_would_multiply(kind: str, name: str, tmp_path: Path) -> None:
    dense, quantised = tmp_path / "dense", tmp_path / "quantised"
    dense.mkdir()
    quantised.mkdir()
    store(kind, FORMATS[name], dense, quantised)
    wanted = scored(dense)
    for tier in ("cpu", "disk"):
        how: dict[str, Any] = {"dtype": "float32", "policy": {"weights": {tier: 1.0}}, "model_impl": "transformers"}
        with Engine(str(quantised), offload_dir=str(tmp_path / "offload"), **how) as llm:
            assert [score.logprob for score in llm.score(PAIRS)] == pytest.approx(wanted, abs=2e-3)
            assert llm.last_record is not None
            assert llm.last_record.quantization["weights"]["bits"] in (4, 8)


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "bits"), cases([8, 4], ("qwen3_next", 8)))
def test_shards_and_tied_heads_are_packed_as_they_come(kind: str, bits: int, tmp_path: Path) -> None:
    """Weights packed while they are loaded are near what they were (those of a tiny model are far from each
    other, and so are its logits); those of the disk tier are those of memory. Experts are apart as on the hub, or in
    one tensor."""
    made(kind, tie_word_embeddings=True).save_pretrained(
        tmp_path, max_shard_size="60KB", save_original_format=bits == 8
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    wanted, found = scored(tmp_path), []
    for tier, packing in (("cpu", None), ("disk", None), ("cpu", bits), ("disk", bits)):
        how: dict[str, Any] = {"dtype": "float32", "policy": {"weights": {tier: 1.0}}, "model_impl": "transformers"}
        how |= {} if packing is None else {"weight_bits": packing, "weight_group": 32, "weight_importance": False}
        with Engine(str(tmp_path), offload_dir=str(tmp_path / "offload"), **how) as llm:
            found.append([score.logprob for score in llm.score(PAIRS)])
    assert found[0] == pytest.approx(wanted, abs=4e-3)
    assert found[1] == pytest.approx(wanted, abs=4e-3)
    assert found[2] == pytest.approx(found[3], abs=1e-3)
    assert found[2] == pytest.approx(wanted, rel=0.1 if bits == 8 else 0.5)
