"""`run --model FOLDER` of models that look at images besides, as transformers saves and as it names them: text only."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from h2o_flexgen.models.hf.shrink import OWN, VISION, VOCAB, random_model, small
from tests.programs import Run, answers, tokenizer

PROMPTS = ["The dog does not mind.", "12 of 345", "Over"]
NEW = 6
TOWERS = re.compile(r"(^|\.)(vision_tower|vision_model|visual|embed_vision|multi_modal_projector)\.")
_EYES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN = {key: value for key, value in VISION.items() if key in ("depth", "num_heads", "intermediate_size")}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_LISTS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma4": ({"num_key_value_heads": 2, "head_dim": 16}, _LISTS, {}),
    "llama4": ({"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}, {}, {}),
    "qwen3_vl": ({"deepstack_visual_indexes": [0], "out_hidden_size": 64}, {"rope_parameters": _SECTIONS}, {}),
    "qwen3_5": ({"out_hidden_size": 64}, {"layer_types": ["linear_attention", "full_attention"] * 2}, {}),
    "qwen2_5_vl": ({"out_hidden_size": 64, "fullatt_block_indexes": [0]}, {"rope_parameters": _SECTIONS}, {}),
    "gemma3": ({"image_size": 28, "patch_size": 14}, _LISTS, {"mm_tokens_per_image": 4}),
    "mistral3": ({"image_size": 28, "patch_size": 14, "head_dim": 16}, {}, {"tie_word_embeddings": True}),
    "internvl": ({"image_size": [28, 28], "patch_size": [14, 14]}, {}, {}),
}
"""What tiny ones say of their towers, of their language models, and beside these."""
CASES = [(kind, layout) for kind in KINDS for layout in ("saved", "own")]
QUICK = (("gemma4", "own"), ("qwen2_5_vl", "saved"), ("mistral3", "saved"))


def config_of(kind: str) -> PreTrainedConfig:
    eyes, words, beside = KINDS[kind]
    towers = {"vision_config": {"model_type": "gemma4_vision"}} if kind == "gemma4" else {}
    usual = AutoConfig.for_model(kind, **towers)
    text = usual.get_text_config(decoder=True)
    made = usual.to_dict() | beside | {"eos_token_id": None}
    made["text_config"] = {"model_type": text.model_type, **small(text), **OWN.get(text.model_type, {}), **words}
    made["vision_config"] |= {**(_QWEN if kind.startswith("qwen") else _EYES), **eyes}
    made["vision_config"] |= {"hidden_size": 32}
    made |= {key: VOCAB - 1 for key in made if re.search(r"_token_(id|index)$", key) and key != "eos_token_id"}
    return AutoConfig.for_model(**made)


def write(model: PreTrainedModel, folder: Path, layout: str) -> None:
    """layout: "saved" has the names that save_pretrained writes, which are those of the hub; "own" the modules'."""
    model.save_pretrained(folder)
    if layout == "own":
        tied = ("lm_head.weight",) if model.config.tie_word_embeddings else ()
        held = {name: x.clone() for name, x in model.state_dict().items() if name not in tied}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    if model.config.model_type.startswith("qwen3_5"):  # what predicts more tokens at once
        held = load_file(folder / "model.safetensors") | {"mtp.fc.weight": torch.zeros(64, 128)}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(folder / "tokenizer.json"))


def tokens(model: PreTrainedModel) -> list[list[int]]:
    """Of transformers, from texts."""
    words, found = tokenizer(), list[list[int]]()
    speaks: Any = model.language_model if model.config.model_type == "llama4" else model
    for prompt in PROMPTS:
        ids = torch.tensor([words.encode(prompt).ids])
        made = speaks.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=1)
        found.append(made[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.turns
@pytest.mark.parametrize(
    ("kind", "layout"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_text_is_that_of_transformers(
    kind: str, layout: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no byte of a tower is read, but for what shares a page with what is."""
    model = random_model(config_of(kind))
    write(model, tmp_path / "model", layout)
    path, reads, preadv = tmp_path / "model" / "model.safetensors", list[tuple[int, int]](), os.preadv

    def watched(fd: int, views: list[memoryview], offset: int) -> int:
        count = preadv(fd, views, offset)
        if os.readlink(f"/proc/self/fd/{fd}") == str(path):
            reads.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", watched)
    asked = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    how = ("--gen-len", NEW, "--ignore-eos", "--dtype", "float32", "--no-calibrate", "--output", tmp_path / "answers")
    done = run("--model", path.parent, *asked, *how)
    assert done.code == 0, done.err
    assert [each["token_ids"] for each in answers(tmp_path / "answers")] == tokens(model)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    table = json.loads(path.read_bytes()[8 : 8 + size])
    towers = [each["data_offsets"] for name, each in table.items() if TOWERS.search(name)]
    seen = sum(max(0, min(b, end + 8 + size) - max(a, start + 8 + size)) for a, b in reads for start, end in towers)
    assert len(towers) > 5
    assert seen < min(16384, sum(end - start for start, end in towers) // 8)
    assert sum(b - a for a, b in reads) > 100_000


@pytest.mark.parametrize(("kind", "impl"), [("internvl", "auto"), ("mistral3", "transformers")])
def test_a_head_of_its_own_is_the_head(
    kind: str, impl: str, tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """As on the hub: config.json leaves out what transformers then takes for tied, and the head is there."""
    config = config_of(kind)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    model = random_model(config)
    write(model, tmp_path / "model", "saved")
    path = tmp_path / "model" / "config.json"
    said = json.loads(path.read_text())
    assert said.pop("tie_word_embeddings") is said["text_config"].pop("tie_word_embeddings", False) is False
    path.write_text(json.dumps(said))
    again = type(model).from_pretrained(path.parent, attn_implementation="eager").eval()
    assert tokens(again) == tokens(model)
    asked = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    how = ("--gen-len", NEW, "--ignore-eos", "--dtype", "float32", "--no-calibrate", "--output", tmp_path / "answers")
    done = run("--model", path.parent, "--model-impl", impl, *asked, *how)
    assert done.code == 0, done.err
    assert [each["token_ids"] for each in answers(tmp_path / "answers")] == tokens(model)
    assert "language_model.lm_head.weight" in caplog.text
    assert "it is the output head all the same" in caplog.text
