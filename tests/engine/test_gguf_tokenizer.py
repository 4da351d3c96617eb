"""Tokenizers from the metadata of GGUF files: the ids and texts of transformers' AutoTokenizer for the same file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import generate_merges

from h2o_flexgen.checkpoint.gguf.header import read_header
from h2o_flexgen.engine.requests import gguf_tokenizer as reading
from h2o_flexgen.engine.requests.chat import marked_chat
from h2o_flexgen.engine.requests.gguf_tokenizer import gguf_tokenizer, merges_of
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.folders import cached
from tests.checkpoint.gguf_files import model_keys, tiny_model

CORPUS = [
    "The cache keeps 20 heavy hitters, doesn't it?  They're the ones that we've seen.",
    "Größe, naïve café; été 1998\n\n\tdef f(x):\n        return x  # 12345",
    "Привет, мир! 你好，世界。 \U0001f600\U0001f680 a1b2c3 IT'S CamelCaseWords snake_case 3.14159",
]
TEXTS = [
    *CORPUS, "", " ", "  ", "a", " a", "a ", "\n", "\n\n\n", "a\r\nb", "hello</s>world", "<s>", "<unk>",
    "<end> the end", "   three   spaces   ", "\u2581", "e\u0301", "\u00a0", "\u200b", "\U0001f468\u200d\U0001f469",
    "ﬁ", "½", "12345678", "'S 'RE don'T", "<tool>x</tool>", "</s>", "x</s>y<s>",
]  # fmt: skip
SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<model>"


def sentencepiece(*, gemma: bool = False) -> Callable[[gguf.GGUFWriter], None]:
    """A vocabulary as sentencepiece has it: bytes, characters, and pieces of words with scores.

    gemma   with the special tokens that the class of its tokenizer asks for, and runs of spaces as users' tokens
    """
    pieces: Counter[str] = Counter()
    for line in CORPUS:
        text = SPACE + line.replace(" ", SPACE)
        for size in range(1, 6):
            pieces.update(text[at : at + size] for at in range(len(text) - size + 1))
    special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<end>", CONTROL), ("<tool>", USER)]
    if gemma:
        special = [(f"<{word}>", CONTROL) for word in ("pad", "eos", "bos", "unk", "mask", "end")]
        special += [("<tool>", USER), *((" " * count, USER) for count in range(2, 5))]
        pieces = Counter({piece: count for piece, count in pieces.items() if piece.strip(SPACE) or piece == SPACE})
    rows = [(token, kind, 0.0) for token, kind in special]
    rows += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    common = [piece for piece, count in pieces.most_common() if count > 1 or len(piece) == 1]
    rows += [(piece, NORMAL, -float(rank // 2)) for rank, piece in enumerate(common)]  # some scores are equal

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([token for token, _, _ in rows])
        writer.add_token_scores([score for _, _, score in rows])
        writer.add_token_types([kind for _, kind, _ in rows])
        writer.add_unk_token_id(3 if gemma else 0)

    return extra


def byte_level(pre: str) -> Callable[[gguf.GGUFWriter], None]:
    """A vocabulary as GPT-2 has it, learned from the corpus."""
    trained = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?\w+|\W"), "isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    state: dict[str, Any] = json.loads(trained.to_str())["model"]
    ids = sorted(state["vocab"], key=state["vocab"].get)
    tokens = ["<unk>", "<s>", "</s>", "<end>", "<tool>", *ids]
    kinds = [CONTROL, CONTROL, CONTROL, CONTROL, USER] + [NORMAL] * len(ids)

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in state["merges"]])

    return extra


def flags(bos: bool | None, eos: bool | None) -> Callable[[gguf.GGUFWriter], None]:
    def extra(writer: gguf.GGUFWriter) -> None:
        if bos is not None:
            writer.add_add_bos_token(bos)
        if eos is not None:
            writer.add_add_eos_token(eos)

    return extra


def both(*extras: Callable[[gguf.GGUFWriter], None]) -> Callable[[gguf.GGUFWriter], None]:
    def extra(writer: gguf.GGUFWriter) -> None:
        for each in extras:
            each(writer)

    return extra


KINDS: dict[str, tuple[str, Callable[[gguf.GGUFWriter], None]]] = {
    "llama": ("llama", sentencepiece()),
    "llama-no-bos": ("llama", both(sentencepiece(), flags(False, True))),
    "phi3": ("phi3", sentencepiece()),
    "gemma3": ("gemma3", both(sentencepiece(gemma=True), flags(True, False))),
    "llama3": ("llama", both(byte_level("llama-bpe"), flags(True, None))),
    "tekken": ("llama", both(byte_level("tekken"), flags(True, True))),
    "qwen2": ("qwen2", byte_level("qwen2")),
    "qwen3": ("qwen3", both(byte_level("qwen2"), flags(False, None))),
    "gpt-4o": ("phi3", byte_level("gpt-4o")),
    "gpt-2": ("llama", byte_level("gpt-2")),
}
"""Kinds of tokenizers: the architecture whose file they are in, and their keys."""


def written(folder: Path, architecture: str, keys: Callable[[gguf.GGUFWriter], None]) -> Path:
    """A file without weights."""
    path = folder / "x.gguf"
    writer = gguf.GGUFWriter(str(path), architecture)
    model = tiny_model(architecture)
    writer.add_name("x")
    model_keys(writer, model)
    keys(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path: Path) -> TextCodec:
    codec = TextCodec.of_gguf(read_header(path).metadata, str(path))
    assert codec is not None
    return codec


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextCodec, Any]:
    """Ours and transformers' tokenizer of one file."""
    folder = tmp_path_factory.mktemp("gguf")
    path = written(folder, *KINDS[request.param])
    return opened(path), AutoTokenizer.from_pretrained(str(folder), gguf_file=path.name)


def same(pair: tuple[TextCodec, Any], text: str) -> None:
    codec, other = pair
    ids = codec.encode(text)
    assert ids == other(text).input_ids, text
    assert codec.encode_bare(text) == other(text, add_special_tokens=False).input_ids, text
    assert codec.decode(ids) == other.decode(ids, skip_special_tokens=True), text


def test_ids_and_texts_are_transformers(pair: tuple[TextCodec, Any]) -> None:
    for text in TEXTS:
        same(pair, text)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@example("a  b")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_any_text(pair: tuple[TextCodec, Any], text: str) -> None:
    same(pair, text)


@given(
    st.lists(
        st.tuples(st.text("abc\U0001f600", min_size=1, max_size=5), st.integers(0, 3)), unique_by=lambda row: row[0]
    )
)
@settings(deadline=None)
def test_merges_are_all_pairs_by_score(rows: list[tuple[str, int]]) -> None:
    tokens, scores = [token for token, _ in rows], [float(score) for _, score in rows]
    vocab = {token: number for number, token in enumerate(tokens)}
    assert merges_of(tokens, scores) == generate_merges(vocab, dict(zip(tokens, scores, strict=True)))


def test_merges_of_a_large_vocabulary_are_kept(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(reading, "_LARGE", 5)
    tokens, scores = ["a", "b", "ab", "ba", "aba", "\ud800"], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    found = merges_of(tokens, scores)
    assert found == [("a", "b"), ("b", "a"), ("ab", "a"), ("a", "ba")]
    with monkeypatch.context() as patch:
        patch.setattr(reading, "_pairs", None)  # what is kept is not looked for
        assert merges_of(tokens, scores) == found
    assert merges_of(tokens, scores[::-1]) == found[::-1][:2][::-1] + found[1::-1]  # another vocabulary
    for damaged in (b"", b"x" * 200):
        for path in (cached() / "merges").iterdir():
            path.write_bytes(damaged)
        assert merges_of(tokens, scores) == found
        assert "looked for again" in caplog.text


def test_a_chat_is_rendered_by_the_files_template(tmp_path: Path) -> None:
    keys = both(sentencepiece(), lambda writer: writer.add_chat_template(TEMPLATE))
    codec = opened(written(tmp_path, "llama", keys))
    prompt = marked_chat(codec, "x", "the cache", (), "it").content
    assert prompt == codec.encode_bare("</s><user>the cache<end><model>")  # bos is token 2 in all tiny models


ENDS = ["<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|eom_id|>", "<EOT>", "_<EOT>"]


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_turn_may_be_known_by_its_text_alone(end: str) -> None:
    tokens = ["a", "b", end, "</s>", "<|x|>"]
    codec = TextCodec.of_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens,
                               "tokenizer.ggml.merges": [], "tokenizer.ggml.eos_token_id": 3,
                               "tokenizer.ggml.eot_token_id": 4}, "x.gguf")  # fmt: skip
    assert codec is not None
    assert sorted(codec.turn_ends) == [2, 3, 4]


@pytest.mark.parametrize("token", [2**32 - 1, 10**6, -1])
@pytest.mark.parametrize("name", ["bos", "eos", "eot", "padding", "unknown"])
def test_ids_that_are_no_ids(name: str, token: int) -> None:
    """As without the key: converters write -1, which becomes 4294967295."""
    tokens = ["a", "b", "<0x0A>", "</s>"]
    plain: dict[str, Any] = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
                             "tokenizer.ggml.scores": np.full(4, -1.0),
                             "tokenizer.ggml.token_type": np.array([1, 1, 6, 3])}  # fmt: skip
    without = TextCodec.of_gguf(plain, "x.gguf")
    found = TextCodec.of_gguf({**plain, f"tokenizer.ggml.{name}_token_id": token}, "x.gguf")
    assert without is not None
    assert found is not None
    assert (found.encode("ab"), found.turn_ends) == (without.encode("ab"), without.turn_ends)


def test_phi3s_marks_of_turns_take_the_space_behind_them(tmp_path: Path) -> None:
    def renamed(writer: gguf.GGUFWriter) -> None:
        sentencepiece()(writer)
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        tokens[3:5] = ["<|user|>", "<|endoftext|>"]

    folders = {name: tmp_path / name for name in ("phi3", "llama")}
    for folder in folders.values():
        folder.mkdir()
    phi3, llama = (opened(written(folder, name, renamed)) for name, folder in folders.items())
    assert phi3.encode_bare("<|user|>\n a</s> b") == phi3.encode_bare("<|user|>a</s>b")
    assert phi3.encode_bare("<|endoftext|>\na") != phi3.encode_bare("<|endoftext|>a")
    assert llama.encode_bare("<|user|>\na") != llama.encode_bare("<|user|>a")


def test_llama3_starts_with_bos_unless_told_not_to(tmp_path: Path) -> None:
    codec = opened(written(tmp_path, "llama", byte_level("llama-bpe")))
    assert codec.encode("a") == [2, *codec.encode_bare("a")]


def test_a_file_may_have_no_tokenizer(tmp_path: Path) -> None:
    assert TextCodec.of_gguf(read_header(written(tmp_path, "llama", lambda writer: None)).metadata, "x") is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no merges": ({"model": "gpt2", "pre": "gpt-2"}, "tokenizer.ggml.merges is None"),
    "merge of nothing": ({"model": "gpt2", "pre": "gpt-2", "merges": ["a x"]}, "cannot be used"),
    "half a merge": ({"model": "gpt2", "pre": "gpt-2", "merges": ["ab"]}, "needed pairs of tokens"),
    "no tokens": ({"model": "llama", "tokens": "abc"}, "tokenizer.ggml.tokens is 'abc'"),
    "no scores": ({"model": "llama"}, "tokenizer.ggml.scores is None"),
    "flag": ({"model": "gpt2", "pre": "gpt-2", "merges": [], "add_bos_token": "yes"}, "needed true or false"),
    "special": ({"model": "gpt2", "pre": "gpt-2", "merges": [], "bos_token_id": "a"}, "needed the id of a token"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_tokenizer_that_cannot_be_is_refused(fault: str) -> None:
    keys, message = REFUSED[fault]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {"tokens": ["a", "b"], **keys}.items()}
    with pytest.raises(ModelError) as caught:
        TextCodec.of_gguf(metadata, "x.gguf")
    assert message in str(caught.value)


def test_no_tokenizer_is_made_of_no_metadata() -> None:
    assert gguf_tokenizer({}, "x.gguf") is None
