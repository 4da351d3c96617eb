"""Every word of `tokenizer.ggml.pre`: ids of a tiny file are those of a pipeline built of the published pattern."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from h2o_flexgen.checkpoint.gguf.header import read_header
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.engine.requests.vocabularies import SPACED, VOCABULARIES
from h2o_flexgen.errors import UsageError
from tests.engine.test_gguf_tokenizer import TEXTS, both, byte_level, flags, opened, written

# As llama.cpp and the tokenizer.json of the models spell them, in full.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


def of(names: str, *patterns: str) -> dict[str, list[str]]:
    return {name: list(patterns) for name in names.split()}


CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
PUBLISHED: dict[str, list[str]] = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    **of("gpt-2 gpt2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en "
        "jina-v2-code roberta-bpe olmo mpt jais trillion granite-docling exaone4", GPT2),
    **of("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", r"\p{N}", GPT2),
    **of("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 "
        "glm5 chatglm-bpe", LLAMA3),
    **of("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", QWEN2),
    **of("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", CJK, DEEPSEEK3),
    **of("gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m", GPT4O),
    **of("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O),
    **of("poro-chat bloom gpt3-finnish", BLOOM),
    "viking": [BLOOM, r"\p{N}"],
    "tekken": [TEKKEN],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "laguna": [r"[^\n]+|[\n]+", QWEN2],
    "minicpm5": [r"\p{N}{1,3}", QWEN2.replace(r"\p{N}| ?", r"\p{N}+| ?")],
    "ufakzeka": [QWEN2.removeprefix("(?i:'s|'t|'re|'ve|'m|'ll|'d)|")],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"],
    **of("bailingmoe bailingmoe2 llada-moe",
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+"
        ),
    "seed-coder": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "qwen35": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "jais-2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
        r"|\s{1,2}(?!\S)|\s{1}"
    ],
    "youtu": [
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
    ],
    "spark2_5": [
        r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]"
        r"|\s+(?!\S)|\s+",
        r"\p{N}",
    ],
    "chameleon": [
        "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]", GPT2,
    ],
}  # fmt: skip
WHOLE = {
    *of(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken minicpm5 youtu glm4 glm5"
    ),
    "granite-embed-multi-97m",
}
"""Vocabularies with `ignore_merges`."""
WORDS = {
    "deepseek-llm": ["H", "\u00e9", " Ко", "你", "123", " !?", "\u3000", "\n", "\n", "  "],
    "afmoe": ["ab", "1", "234", "567", " x", "日本", "12", "\n"],
    "kimi-k2": ["IT", " don't", "你好", " ab", "123", "4", "!\n", "  "],
}
"""Of the three that the library cannot spell as published, or not in characters that all editors keep: words."""
MORE = [
    "12 123 1234567 x1234y",
    "  12",
    "a  1\n\n  b",
    "don't DON'T we'LL",
    "日本語テキスト1234",
    "e\u0301a\u0303 <sentinel:12>!?",
]


def test_all_words_are_known() -> None:
    assert set(VOCABULARIES) == {*PUBLISHED, *WORDS}
    assert len({*VOCABULARIES, *SPACED}) == 91


@pytest.mark.turns
@pytest.mark.parametrize("word", PUBLISHED)
def test_ids_are_those_of_the_published_pattern(tmp_path: Path, word: str) -> None:
    path = written(tmp_path, "llama", both(byte_level(word), flags(False, False)))
    metadata = read_header(path).metadata
    vocab = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(each.split(" ")) for each in metadata["tokenizer.ggml.merges"]]
    whole = word in WHOLE
    other = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PUBLISHED[word]]
    other.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False, use_regex=False)])
    other.add_special_tokens(["<unk>", "<s>", "</s>", "<end>"])
    other.add_tokens(["<tool>"])
    codec = opened(path)
    for text in [*TEXTS, *MORE]:
        ids = codec.encode(text)
        assert ids == other.encode(text).ids, text


@pytest.mark.parametrize("word", WORDS)
def test_words_of_the_others(word: str) -> None:
    text = "".join(WORDS[word])
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in VOCABULARIES[word].patterns]
    assert [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)] == WORDS[word]


@pytest.mark.parametrize("word", ["llama-bpe", "lfm2", "tekken", "chameleon", "smollm", "minicpm5"])
def test_bos_is_added_where_the_vocabulary_has_it_so(tmp_path: Path, word: str) -> None:
    codec = opened(written(tmp_path, "llama", byte_level(word)))
    assert (codec.encode("a")[0] == 2) == (word not in ("smollm", "minicpm5"))  # bos is token 2 in all tiny models


def test_a_file_without_the_word_is_as_default(tmp_path: Path) -> None:
    keys = read_header(written(tmp_path, "llama", byte_level("default"))).metadata
    codecs = [
        TextCodec.of_gguf({key: value for key, value in keys.items() if key != left_out}, "x.gguf")
        for left_out in ("", "tokenizer.ggml.pre")
    ]
    assert all(codecs)
    for text in MORE:
        assert codecs[0].encode(text) == codecs[1].encode(text)


def test_of_an_unknown_word_ids_are_decoded_and_texts_refused(tmp_path: Path) -> None:
    known, unknown = (opened(written(tmp_path, "llama", byte_level(word))) for word in ("gpt-2", "unheard-of"))
    ids = known.encode("the cache")
    assert unknown.decode(ids) == "the cache"
    for encode in (unknown.encode, unknown.encode_bare):
        with pytest.raises(UsageError, match=r"tokenizer\.ggml\.pre is 'unheard-of'"):
            encode("the cache")


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "unheard-of"])
def test_of_other_kinds_ids_are_decoded_and_texts_refused(kind: str) -> None:
    codec = TextCodec.of_gguf({"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["a", "\u2581b"]}, "x.gguf")
    assert codec is not None
    assert codec.decode([0, 1]) == "a b"
    with pytest.raises(UsageError, match=f"the kind '{kind}'"):
        codec.encode("a b")
