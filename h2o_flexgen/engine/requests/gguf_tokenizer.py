"""The tokenizer that a GGUF file's metadata describes, built by the light `tokenizers` library.

It gives the ids that transformers' AutoTokenizer gives for the file, which takes it up to twenty times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from h2o_flexgen.engine.requests.merges import merges_of
from h2o_flexgen.errors import ModelError

_KEY = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are matched whole in a text: special ones, and such as a model's users have added."""
_SPACE = "\u2581"
_GEMMAS = ("gemma", "gemma2", "gemma3")

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_WORDS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:{_WORDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"(?i:{_WORDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LETTERS = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LETTERS[0]}|{_LETTERS[1]}|\p{{N}}{_SLASHED}"
_GPT4O = rf"{_LETTERS[0]}(?i:{_WORDS})?|{_LETTERS[1]}(?i:{_WORDS})?|\p{{N}}{{1,3}}{_SLASHED}"

_SPLITS = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "phi-2"), _GPT2),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
}
"""How a text is cut into words, by `tokenizer.ggml.pre`: the published patterns of the vocabularies."""
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3")
"""Vocabularies whose words are taken whole where they are tokens, and that start a text with BOS unless told not to."""


class GgufTokenizer:
    """A `tokenizers.Tokenizer` as a file describes it, and what a chat needs besides.

    special     the texts of bos_token, eos_token, unk_token and pad_token, as far as there are any
    """

    def __init__(self, tokenizer: Any, special: dict[str, str], chat_template: str | None) -> None:
        self.tokenizer, self.special, self.chat_template = tokenizer, special, chat_template

    def transformed(self) -> Any:
        """transformers' tokenizer of the same, which renders chat templates."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer, chat_template=self.chat_template, **self.special
        )


def gguf_tokenizer(metadata: Mapping[str, Any], path: str) -> GgufTokenizer | None:
    """The tokenizer that the metadata of the file at `path` describes, None where it describes none.

    ModelError for one that is damaged, or of a kind that is not known.
    """
    from tokenizers import processors

    kind = metadata.get(f"{_KEY}model")
    if kind in (None, "no_vocab", "none"):
        return None
    read = _Metadata(metadata, path)
    if kind == "llama":
        tokenizer = _sentencepiece(read)
    elif kind == "gpt2":
        tokenizer = _byte_level(read)
    else:
        raise ModelError(f"{path} has a tokenizer of the kind {str(kind)[:80]!r}", "needed one of llama, gpt2")
    special = read.special()
    _add_tokens(tokenizer, read, special)
    starts_with_bos = kind == "llama" or read.word("pre", "default") in _LLAMA3_NAMES
    before = [special["bos_token"]] if read.flag("add_bos_token", starts_with_bos) and "bos_token" in special else []
    after = [special["eos_token"]] if read.flag("add_eos_token", False) and "eos_token" in special else []
    if before or after:
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B:1"], special_tokens=ids
        )
    template = metadata.get("tokenizer.chat_template")
    return GgufTokenizer(tokenizer, special, template if isinstance(template, str) else None)


class _Metadata:
    """Typed access to the keys of a tokenizer. ModelError names the key."""

    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self._metadata, self._path = metadata, path
        self.architecture = metadata.get("general.architecture")
        self.tokens: list[str] = self._list("tokens")

    def _list(self, key: str) -> list[Any]:
        value = self._metadata.get(_KEY + key)
        if not isinstance(value, list):
            raise self.error(key, "a list of texts")
        return value

    def merges(self) -> list[tuple[str, str]] | None:
        """Pairs of tokens, the first to be merged first; None where the file has none."""
        if f"{_KEY}merges" not in self._metadata:
            return None
        pairs = [tuple(merge.split(" ")) for merge in self._list("merges")]
        if any(len(pair) != 2 for pair in pairs):
            raise self.error("merges", "pairs of tokens, with a space between them")
        return [(pair[0], pair[1]) for pair in pairs]

    def numbers(self, key: str) -> list[Any] | None:
        """A number per token; None where the file has none."""
        values = self._metadata.get(_KEY + key)
        if values is None:
            return None
        if not hasattr(values, "tolist") or len(values) != len(self.tokens):
            raise self.error(key, f"a number for each of {len(self.tokens)} tokens")
        return list(values.tolist())

    def word(self, key: str, default: str) -> str:
        value = self._metadata.get(_KEY + key, default)
        if not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_KEY + key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def special(self) -> dict[str, str]:
        """The texts of the special tokens by transformers' names for them."""
        found = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token = self._metadata.get(f"{_KEY}{key}_token_id")
            if token is None:
                continue
            if type(token) is not int or not 0 <= token < len(self.tokens):
                raise self.error(f"{key}_token_id", f"the id of one of {len(self.tokens)} tokens")
            found[f"{name}_token"] = self.tokens[token]
        return found

    def error(self, key: str, needed: str) -> ModelError:
        """That the value of `key` will not do."""
        value = repr(self._metadata.get(_KEY + key))[:80]
        return ModelError(f"{self._path}: {_KEY}{key} is {value}", f"needed {needed}")


def _sentencepiece(read: _Metadata) -> Any:
    """BPE of characters, with bytes for those that are not tokens, and a visible character for the space."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    gemma = read.architecture in _GEMMAS
    # Gemma's runs of spaces come as spaces, and its scores do not follow the order of its merges: that of ids does.
    tokens = [_SPACE * len(each) if gemma and each and not each.strip(" ") else each for each in read.tokens]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = read.merges()
    if merges is None:
        scores = None if gemma else read.numbers("scores")
        if scores is None and not gemma:
            raise read.error("scores", "scores or merges")
        ranks = [-number for number in vocab.values()] if scores is None else [scores[n] for n in vocab.values()]
        merges = merges_of(list(vocab), ranks)
    unknown = read.special().get("unk_token", "<unk>") if gemma else None
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown))
    prefixed = not gemma and read.flag("add_space_prefix", True)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif read.architecture == "phi3" and prefixed:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    else:
        scheme = "first" if prefixed else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    return tokenizer


def _byte_level(read: _Metadata) -> Any:
    """BPE of bytes, each written as a character of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre, merges = read.word("pre", "default"), read.merges()
    if pre not in _SPLITS:
        raise read.error("pre", f"one of {', '.join(_SPLITS)}")
    if merges is None:
        raise read.error("merges", "a list of merges")
    vocab = {token: number for number, token in enumerate(read.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_NAMES))
    words = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(tokenizer: Any, read: _Metadata, special: Mapping[str, str]) -> None:
    """Have the tokens that are matched whole in a text known to `tokenizer`."""
    from tokenizers import AddedToken

    kinds = read.numbers("token_type") or []

    def of(kind: int) -> Iterable[str]:
        return (token for token, its in zip(read.tokens, kinds, strict=False) if its == kind and token)

    whole = {token: True for token in (*of(_CONTROL), *special.values())}
    whole |= {token: False for token in of(_USER_DEFINED) if token not in whole}
    # What is no token under its own spelling would become one with a new id.
    there = {token: its for token, its in whole.items() if tokenizer.token_to_id(token) is not None}
    added = [AddedToken(token, normalized=False, special=its) for token, its in there.items()]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
