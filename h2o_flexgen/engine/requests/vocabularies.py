"""How vocabularies spell bytes, and how the byte-level ones of GGUF files cut a text into words: published facts.

The keys, of `tokenizer.ggml.pre`, are those that llama.cpp's llama-vocab.cpp knows, the patterns those of the
tokenizer.json that each was made from. A vocabulary has one pattern or several, each of which cuts further what those
before it left.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Vocabulary(NamedTuple):
    """`patterns`: each match is a word, and so is the text between two. `whole`: a word that is a token is taken
    before any merges. `bos`: BOS starts a text unless the file says otherwise."""

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False


def _named(names: str, *patterns: str, whole: bool = False, bos: bool = False) -> dict[str, Vocabulary]:
    """The same vocabulary by each of these words."""
    return dict.fromkeys(names.split(), Vocabulary(patterns, whole, bos))


_SHORT = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST, _SECOND = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"

_GPT2 = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:{_SHORT})|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"(?i:{_SHORT})|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"(?i:{_SHORT})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = rf"{_FIRST}|{_SECOND}|\p{{N}}|{_SLASHED}"
_GPT4O = rf"{_FIRST}(?i:{_SHORT})?|{_SECOND}(?i:{_SHORT})?|\p{{N}}{{1,3}}|{_SLASHED}"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NOT_HAN}*{_LOWER[:-1]}{_NOT_HAN}+(?i:{_SHORT})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NOT_HAN}+{_LOWER[:-1]}{_NOT_HAN}*(?i:{_SHORT})?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters that have two cases."""
_HAN = "[一-龥\u0800-一가-\ud7ff]+"
_ASIAN = "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"

VOCABULARIES = {
    **_named("default", r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **_named(
        "gpt-2 gpt2 phi-2 olmo mpt jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 modern-bert "
        "roberta-bpe jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
        _GPT2,
    ),
    **_named("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", r"\p{N}", _GPT2),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3, whole=True, bos=True
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", _LLAMA3),
    **_named("glm4 glm5", _LLAMA3, whole=True),
    **_named(
        "jais-2",
        rf"(?i:{_SHORT})|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
        + "|".join(rf"\s{{{n}}}(?!\S)" for n in ["512", "256", "128", "64", "32", "16", "8", "4", "1,2"])
        + r"|\s{1}",
    ),
    **_named("minicpm5", r"\p{N}{1,3}", rf"(?i:{_SHORT})|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}", whole=True),
    **_named("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", _QWEN2),
    **_named("qwen35", _QWEN35),
    **_named("ufakzeka", rf"{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"),
    **_named("laguna", r"[^\n]+|[\n]+", _QWEN2),
    **_named("seed-coder", rf"(?i:{_SHORT})|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"),
    **_named(
        "exaone-moe",
        rf"(?i:{_SHORT})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    **_named("bailingmoe bailingmoe2 llada-moe", rf"{_BAILING}|\s*[\r\n]|\s+(?!\S)|\s+"),
    **_named("tekken", _TEKKEN, whole=True, bos=True),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    **_named("granite-embed-multi-97m", _GPT4O, whole=True),
    **_named("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    **_named(
        "youtu",
        rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_CJK}",
        rf"{_FIRST}(?i:{_SHORT})?|{_SECOND}(?i:{_SHORT})?|\p{{N}}|{_SLASHED}",
        whole=True,
    ),
    **_named(
        "deepseek-llm", r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _HAN, r"\p{N}+"
    ),
    **_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", *_DEEPSEEK3),
    **_named("spark2_5", *_DEEPSEEK3[:2], rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    # Digits are grouped by three from their end.
    **_named("afmoe", r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3[2]),
    **_named("kimi-k2", _KIMI),
    **_named("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    **_named("poro-chat bloom gpt3-finnish", _BLOOM),
    **_named("viking", _BLOOM, r"\p{N}"),
    **_named(
        "chameleon",
        r"<sentinel:[0-9]+>",
        r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        bos=True,
    ),
    **_named("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
}
SPACED = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
"""Words of vocabularies that are no bytes but characters, with a visible one for the space, and merges."""
ENDS_OF_TURNS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
"""Texts of tokens that end what a model says, in files that name no ids of such."""

_SPACE = "\u2581"


def spelling(tokenizer: Any) -> Callable[[str], bytes] | None:
    """A function from a token's name in the vocabulary of a `tokenizers.Tokenizer` to its bytes; None for an unknown
    kind of decoder."""
    types = decoder_types(tokenizer)
    if "ByteLevel" in types:
        # Each byte is written as itself if it is visible, else as a letter from 256 on.
        seen, hidden = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}, iter(range(256, 512))
        table = {chr(byte if byte in seen else next(hidden)): byte for byte in range(256)}
        # Names with other letters are texts that were added.
        return lambda text: bytes(map(table.__getitem__, text)) if table.keys() >= set(text) else text.encode()
    if types & {"ByteFallback", "Metaspace", "Replace"}:
        bytes_of = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if "ByteFallback" in types else {}
        return lambda text: bytes_of.get(text) or text.replace(_SPACE, " ").encode()
    return str.encode if types == {"Fuse"} else None


def decoder_types(tokenizer: Any) -> set[str]:
    """The kinds of the parts of its decoder."""
    decoder = tokenizer.decoder
    return _types_in(json.loads(str(decoder.__getstate__(), "utf-8")) if decoder is not None else {})


def _types_in(decoder: Any) -> set[str]:
    return {str(decoder.get("type"))}.union(*map(_types_in, decoder.get("decoders", ())))
