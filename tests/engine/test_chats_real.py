"""Chats with the real models of scripts/real_model.sh: greedy answers are those of transformers' generate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from h2o_flexgen import LLM, OffloadPolicy, SamplingParams
from h2o_flexgen.checkpoint.gguf.header import read_header
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.folders import cached
from tests.checkpoint.gguf_files import large_by_transformers, read_once
from tests.engine.test_gguf_tokenizer import TEXTS
from tests.engine.test_vocabularies import MORE

FILE = cached() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason=f"scripts/real_model.sh has not put {FILE} there"),
]

ASKED = [
    "What is the capital of France?", "What is 2+2?", "Name three fruits.", "Write a haiku about rain.",
    "Who wrote Hamlet?", "Translate 'good morning' to Spanish.", "What colour is the sky?", "Say hello.",
    "List the days of the week.", "What is the opposite of hot?", "How many legs does a spider have?",
    "What is H2O?", "Write a line of Python that prints 1 to 10.", "Name a planet.", "What do bees make?",
    "Give me a synonym of happy.", "Is 17 prime?", "What is the tallest mountain?", "Count to five.", "Tell me a joke.",
]  # fmt: skip
NEW = 24


def tricky() -> list[str]:
    """200 texts: those of the tests, lines of this file, and joins of them with all kinds of spaces."""
    lines = [*TEXTS, *MORE, *ASKED, *Path(__file__).read_text(encoding="utf-8").splitlines()]
    joined = [
        first + space + second
        for space in (" ", "  ", "\n", " \n\n  ", "\t", "\u00a0", "\u3000", "")
        for first, second in zip(lines, reversed(lines), strict=True)
    ]
    return [*lines, *joined][:200]


@pytest.fixture(scope="module", autouse=True)
def _read_once() -> Iterator[None]:
    with read_once(FILE):
        yield


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(FILE.parent), gguf_file=FILE.name)


def test_ids_are_those_of_its_tokenizer(theirs: PreTrainedTokenizerBase) -> None:
    """Its tokenizer.json cuts single digits and then as GPT-2; transformers does not know its word and leaves out the
    digits, which makes a difference where spaces stand before them."""
    metadata = read_header(FILE).metadata
    codec = TextCodec.of_gguf(metadata, str(FILE))
    assert codec is not None
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    published = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    published.add_special_tokens([token for token, kind in zip(tokens, kinds.tolist(), strict=True) if kind == 3])
    others = []
    for text in tricky():
        ids = codec.encode(text)
        assert ids == published.encode(text).ids, text
        assert codec.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        if ids != theirs(text).input_ids:
            others.append(text)
    assert all(any(letter.isnumeric() for letter in text) for text in others), others


def test_greedy_answers_are_transformers(theirs: PreTrainedTokenizerBase) -> None:
    reference = large_by_transformers(FILE)
    everything = {"cpu": 1.0}
    policy = OffloadPolicy(
        gpu_batch_size=len(ASKED), num_gpu_batches=1, weights=everything, cache=everything, hidden=everything
    )
    with LLM(str(FILE), dtype="float32", device="cpu", policy=policy) as llm:
        answers = llm.chat(ASKED, SamplingParams(max_new_tokens=NEW))
    assert sum(answer.finish_reason == "stop" for answer in answers) > 5
    for asked, answer in zip(ASKED, answers, strict=True):
        talk = [{"role": "user", "content": asked}]
        given = theirs.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        assert answer.prompt_ids == given[0].tolist()
        tokens = list(answer.token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([[*given[0].tolist(), *tokens[:-1]]]), logits_to_keep=len(tokens)).logits[0]
        # Token by token what its generate would choose: each is the best after those before it, until the first end.
        assert logits.argmax(-1).tolist() == tokens, asked
        ended = [token == reference.config.eos_token_id for token in tokens]
        assert not any(ended[:-1])
        assert ended[-1] == (answer.finish_reason == "stop")
        assert ended[-1] or len(tokens) == NEW
        assert answer.text == theirs.decode(tokens, skip_special_tokens=True)
