"""GGUF files, whole models: the tokens are those of transformers' dequantised load of the same file, on any tier."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from h2o_flexgen.checkpoint.gguf.header import read_header
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import ModelError, UsageError
from tests.checkpoint import gguf_files
from tests.checkpoint.gguf_files import (
    FLOATS,
    MIXTURES,
    ROWS,
    Kind,
    by_transformers,
    in_kind,
    stored_tensors,
    tiny_model,
    write_gguf,
)
from tests.engine.test_gguf_tokenizer import sentencepiece
from tests.engine.test_packed import PLACES
from tests.tiny import prompts_of

NEW = 6
EXAONES = ("exaone4", "exaone4-full")
OURS_ONLY = ("granite", "smollm3", "olmo2", "seed_oss", *EXAONES, "gptneox", "gptneox-serial", *MIXTURES)
OURS_ONLY += ("olmo3", "cohere2", "glm4", "mistral3")
"""What transformers does not read from GGUF."""


def check(path: Path, judge: PreTrainedModel, place: str = "cpu", **settings: object) -> Engine:
    """Tokens and log-probabilities are those of `judge`; gives the engine, which is closed."""
    prompts = prompts_of([11, 4, 17])
    with Engine(str(path), dtype="float32", **PLACES[place], **settings) as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True, logprobs=0)
        for prompt, output in zip(prompts, outputs, strict=True):
            with torch.no_grad():
                logits = judge(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
            assert (logits.log_softmax(-1).amax(-1) - chosen).max() < 1e-4
            assert output.logprobs == pytest.approx(chosen.tolist(), abs=2e-4)
    return llm


KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
READ = [row for row in ROWS if row not in OURS_ONLY]
CASES = [(row, KINDS[(i + k) % len(KINDS)]) for i, row in enumerate(READ) for k in (0, 2)]


@pytest.mark.turns
@pytest.mark.parametrize(("row", "kind"), CASES)
def test_every_family(row: str, kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(row), in_kind(Kind[kind]))
    llm = check(path, by_transformers(path))
    assert llm.last_record.quantization["weights"]["format"] == "gguf"


@pytest.mark.turns
@pytest.mark.parametrize(("row", "place"), [(row, list(PLACES)[i % len(PLACES)]) for i, row in enumerate(OURS_ONLY)])
def test_floats_of_a_family_that_transformers_does_not_read(row: str, place: str, tmp_path: Path) -> None:
    model = tiny_model(row)
    llm = check(write_gguf(tmp_path / "tiny.gguf", model), model, place)
    assert llm.last_record.quantization is None


def joint(model: PreTrainedModel, path: Path) -> Path:
    """The model's file with gates and ups of all experts of a layer in one tensor, for each its gate before its up."""
    values = stored_tensors(model)
    for name in [name for name in values if "_gate_exps" in name]:
        pair = values.pop(name), values.pop(name.replace("_gate_", "_up_"))
        values[name.replace("_gate_", "_gate_up_")] = np.concatenate(pair, axis=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "stored_tensors", lambda model: values)
        return write_gguf(path, model)


JOINT = [(row, impl, False) for row in ("qwen3moe", "glm4moe", "gpt-oss") for impl in ("native", "transformers")]
APART = [("qwen3moe", "transformers", True), ("glm4moe", "transformers", True)]


@pytest.mark.turns
@pytest.mark.parametrize(("row", "impl", "apart"), [*JOINT[:-1], *APART])
def test_mixtures_by_either_way_in_with_gates_and_ups_apart_or_joint(
    row: str, impl: str, apart: bool, tmp_path: Path
) -> None:
    """gpt-oss has the native way only, and rows of gates and ups in turns."""
    model = tiny_model(row)
    path = write_gguf(tmp_path / "tiny.gguf", model) if apart else joint(model, tmp_path / "tiny.gguf")
    llm = check(path, model, "disk" if apart else "cpu", model_impl=impl)
    assert isinstance(llm.model.spec, ModuleSpec) == (impl == "transformers")


@pytest.mark.parametrize("row", ["llama-gqa", "seed_oss"])
def test_queries_keys_and_values_in_one_tensor(row: str, tmp_path: Path) -> None:
    model = tiny_model(row)
    values = stored_tensors(model)
    for name in [name for name in values if ".attn_q." in name]:
        parts = [values.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        values[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "stored_tensors", lambda model: values)
        path = write_gguf(tmp_path / "tiny.gguf", model)
    check(path, model, "disk")


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_gpt_oss_with_experts_in_mxfp4(place: str, tmp_path: Path) -> None:
    """Gate and up are two tensors in GGUF, and rows in turns of one in the engine."""
    model, kind = tiny_model("gpt-oss"), Kind.MXFP4
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            codes = gguf.quants.quantize(parameter.detach().transpose(1, 2).contiguous().numpy(), kind)
            values = torch.from_numpy(gguf.quants.dequantize(codes, kind))
            parameter.data.copy_(values.transpose(1, 2))

    def blocks(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        return (gguf.quants.quantize(values, kind), kind) if "_exps" in name else (values, Kind.F32)

    llm = check(write_gguf(tmp_path / "tiny.gguf", model, blocks), model, place)
    packings = dict(llm.model.spec.packings)
    assert {name for name in packings} == {each.name for each in llm.model.spec.multiplied["experts"]}
    assert {packing.levels for packing in packings.values()} == {"e2m1"}


@pytest.mark.turns
@pytest.mark.parametrize("place", ["disk", "gpu"])
@pytest.mark.parametrize("blocks", [FLOATS, in_kind(Kind.Q4_0), in_kind(Kind.F16)], ids=["F32", "Q4_0", "F16"])
def test_every_tier(blocks: object, place: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama-gqa"), blocks)  # type: ignore[arg-type]
    check(path, by_transformers(path), place)


def test_blocks_may_be_expanded_or_packed_anew(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2"), in_kind(Kind.Q4_0))
    llm = check(path, by_transformers(path), dequantize=True)
    assert llm.last_record.quantization is None
    with Engine(str(path), dequantize=True, weight_bits=8) as llm:
        llm.generate(prompts_of([5]), max_new_tokens=1)
        assert llm.last_record.quantization["weights"]["format"] == "groupwise"
    with pytest.raises(UsageError, match="whose checkpoint has packed weights"):
        Engine(str(path), weight_bits=8)


def test_a_file_brings_its_tokenizer(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.resize_token_embeddings(700)
    path = write_gguf(tmp_path / "tiny.gguf", model, extra=sentencepiece())
    codec = TextCodec.of_gguf(read_header(path).metadata, str(path))
    assert codec is not None
    with Engine(str(path.parent)) as llm:
        settings = {"max_new_tokens": 4, "ignore_eos": True}
        by_text, by_ids = llm.generate(["the cache", codec.encode("the cache")], **settings)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == codec.decode(by_text.token_ids)


@pytest.mark.parametrize("stored", ["gguf", "safetensors"])
def test_a_faulty_tokenizer_leaves_no_file_open(stored: str, checkpoint, tmp_path: Path) -> None:
    if stored == "gguf":
        path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), extra=lambda w: w.add_tokenizer_model("bert"))
    else:
        path = Path(shutil.copytree(checkpoint("llama")[1], tmp_path / "model"))
        (path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer") as caught:
        Engine(str(path))
    assert caught.tb is not None  # which keeps all that the call had
    links = (link for link in Path("/proc/self/fd").iterdir() if link.exists())
    assert not [link for link in links if str(tmp_path) in os.readlink(link)]
