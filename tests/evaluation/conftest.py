"""A tiny random model with a tokenizer of its own: w3, w4 ... are its words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import OPTForCausalLM

from h2o_flexgen.planning.llm import LLM
from tests.tiny import VOCAB, make_opt, save

POSITIONS = 128


def write_tokenizer(folder: Path, bos: bool = True) -> None:
    """One token per word; an unknown word is `<unk>`."""
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def words_of(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def random_words(count: int, seed: int) -> str:
    return words_of([4 + (seed * 7919 + i * i * 31 + i * 17) % (VOCAB - 4) for i in range(count)])


def make_tiny() -> OPTForCausalLM:
    """A variant that does not repeat itself, and that says words alone, whatever its weights: others have logit 0."""
    model = make_opt("galactica", max_position_embeddings=POSITIONS)
    with torch.no_grad():
        model.get_input_embeddings().weight[:4] = 0  # tied to the output's
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the model and its tokenizer."""
    folder = save(make_tiny(), tmp_path_factory.mktemp("tiny"))
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same, but that no weight is a number."""
    model = make_tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    folder = save(model, tmp_path_factory.mktemp("broken"))
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> tuple[str, str]:
    """Questions whose right answers are what the model says with its full cache, and a text."""
    folder = tmp_path_factory.mktemp("files")
    prompts = [random_words(length, seed) for seed, length in enumerate((40, 64, 90, 33))]
    with LLM(tiny, dtype="float32") as llm:
        outputs = llm.generate(prompts, max_new_tokens=4, ignore_eos=True)
    cases = []
    for prompt, output in zip(prompts, outputs, strict=True):
        length = 1 if output.index == 3 else 4  # one answer of a single token
        cases.append({"prompt": prompt, "answer": words_of(output.token_ids[:length]), "more": "is left alone"})
    recall, text = folder / "recall.jsonl", folder / "text.txt"
    recall.write_text("\n".join(map(json.dumps, cases)) + "\n\n", encoding="utf-8")
    text.write_text(random_words(400, 5), encoding="utf-8")
    return str(recall), str(text)
