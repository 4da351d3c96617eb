"""The real model of scripts/real_model.sh, Gemma 3 270M in Q4_K_M: as transformers and the `gguf` package have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from h2o_flexgen import LLM, OffloadPolicy, SamplingParams
from h2o_flexgen.checkpoint.gguf.header import read_header
from h2o_flexgen.checkpoint.gguf.names import bind
from h2o_flexgen.checkpoint.gguf.source import GgufSource
from h2o_flexgen.checkpoint.hub import resolve_model
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.folders import cached
from tests.checkpoint.gguf_files import large_by_transformers, read_once
from tests.engine.test_chats_real import tricky
from tests.engine.test_gguf_tokenizer import TEXTS

FILE = cached() / "models" / "gemma-3-270m-q4_k_m.gguf"
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason=f"scripts/real_model.sh has not put {FILE} there"),
]

PROMPTS = [
    "The capital of France is", "def fib(n):\n", "两个黄鹂鸣翠柳，", "1, 2, 3, 4,", "Q: What is 2+2?\nA:", "In 1969,",
    "<html>", "\U0001f600\U0001f600", "Once upon a time", "SELECT name FROM", "La vie est", "Der schnelle braune Fuchs",
    "x = [i for i in", "Привет, ", "The derivative of x^2 is", "Roses are red,", "To be, or not to be,", "{\"name\": ",
    "Dear Sir or Madam,", "日本の首都は",
]  # fmt: skip
NEW = 4
ENDS = 500
"""Rows at either end of the vocabulary that are compared; of other matrices all rows are."""


@pytest.fixture(scope="module", autouse=True)
def reader() -> Iterator[gguf.GGUFReader]:
    with read_once(FILE) as made:
        yield made


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    made = TextCodec.of_gguf(read_header(FILE).metadata, str(FILE))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return large_by_transformers(FILE)


def test_every_tensor_is_what_gguf_makes_of_it(reader: gguf.GGUFReader) -> None:
    found = resolve_model(str(FILE), offline=True)
    assert found.gguf is not None
    places = bind(found.gguf, found.spec())
    stored = {each.name: each for each in reader.tensors}
    with GgufSource(found.gguf, found.spec()) as source:
        assert {packing.levels for packing in source.packings.values()} == {"uint4", "int8"}
        for name, (bound,) in places.items():
            values = torch.empty(bound.shape)
            source.read_into(name, values)
            raw = stored[bound.place.name]
            parts = (slice(ENDS), slice(-ENDS, None)) if len(values) > 100 * ENDS else (slice(None),)
            for part in parts:
                wanted = gguf.quants.dequantize(raw.data[part], raw.tensor_type) + np.float32(bound.place.offset)
                assert np.array_equal(values[part].numpy(), wanted), name


def test_ids_and_texts_are_transformers(codec: TextCodec) -> None:
    other = AutoTokenizer.from_pretrained(str(FILE.parent), gguf_file=FILE.name)
    this = Path(__file__).read_text(encoding="utf-8")
    more = [*TEXTS, *PROMPTS, this, "<start_of_turn>user\nHi<end_of_turn>\n", "<unused7>", "a" + " " * 40 + "b"]
    for text in [*more, *tricky()]:
        ids = codec.encode(text)
        assert ids == other(text).input_ids, text
        assert codec.decode(ids) == other.decode(ids, skip_special_tokens=True), text


def test_greedy_tokens_are_transformers(reference: PreTrainedModel, codec: TextCodec) -> None:
    everything = {"cpu": 1.0}
    policy = OffloadPolicy(
        gpu_batch_size=len(PROMPTS), num_gpu_batches=1, weights=everything, cache=everything, hidden=everything
    )
    with LLM(str(FILE), dtype="float32", device="cpu", policy=policy) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = codec.encode(prompt)
        with torch.no_grad():
            given = torch.tensor([[*ids, *output.token_ids[:-1]]])
            logits = reference(given, logits_to_keep=len(output.token_ids)).logits[0]
        # Token by token the same as what its generate would choose: each is the best after those before it.
        assert logits.argmax(-1).tolist() == list(output.token_ids), prompt
