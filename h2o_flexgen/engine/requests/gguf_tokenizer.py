"""The tokenizer of a GGUF file's metadata, built by the light `tokenizers` library, with the ids of AutoTokenizer; the
tokens that end turns; and the merges of a vocabulary that comes without them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from h2o_flexgen.engine.requests.vocabularies import ENDS_OF_TURNS, SPACED, VOCABULARIES
from h2o_flexgen.errors import ModelError
from h2o_flexgen.folders import cached, whole_file

_KEY = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are matched whole in a text."""
_SPACE = "\u2581"
_ANSWER = "Indeed it is."
_GEMMAS = ("gemma", "gemma2", "gemma3")
_Value = TypeVar("_Value", str, bool)

_UNSUPPORTED = {
    "bert": "WordPiece",
    "t5": "Unigram",
    "rwkv": "RWKV's",
    "plamo2": "PLaMo 2's",
    "hybriddna": "HybridDNA's",
    "whitespace": "of whole words",
}
"""Kinds for which only token ids work."""


class GgufTokenizer(NamedTuple):
    """A `tokenizers.Tokenizer` of a file, and the file's chat settings.

    special     the texts of bos_token, eos_token, unk_token and pad_token, if there are any
    ends        ids of tokens that end a turn
    refusal     why no text can be encoded, (found, needed); None if it can
    """

    tokenizer: Any
    special: dict[str, str]
    chat_template: str | None
    ends: tuple[int, ...]
    refusal: tuple[str, str] | None

    def transformed(self) -> Any:
        """The same as transformers' tokenizer, which renders chat templates."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer, chat_template=self.chat_template, **self.special
        )


def gguf_tokenizer(metadata: Mapping[str, Any], path: str) -> GgufTokenizer | None:
    """The tokenizer in the metadata of the file at `path`, None if there is none. One of an unknown kind only decodes,
    and has a `refusal`. ModelError if it is damaged."""
    from tokenizers import processors

    kind = metadata.get(f"{_KEY}model")
    if kind in (None, "no_vocab", "none"):
        return None
    read, refusal = _Metadata(metadata, path), None
    spaced = kind == "gemma4" or (kind == "gpt2" and read.pre in SPACED)
    if kind == "llama" or spaced:
        tokenizer = _sentencepiece(read, spaced=spaced)
    elif kind == "gpt2":
        tokenizer = _byte_level(read)
        if read.pre not in VOCABULARIES:
            refusal = (
                f"the tokenizer of {path} is not known: {_KEY}pre is {read.pre[:80]!r}",
                "needed token ids in place of texts, or one of " + ", ".join((*VOCABULARIES, *SPACED)),
            )
    else:
        tokenizer = _decoding(read)
        what = f" ({_UNSUPPORTED[kind]})" if kind in _UNSUPPORTED else ""
        found = f"{path} has a tokenizer of the kind {str(kind)[:80]!r}{what}, which is not supported"
        refusal = (found, "needed token ids in place of texts, or one of llama, gpt2, gemma4")
    special = read.special()
    _add_tokens(tokenizer, read, special)
    starts_with_bos = kind == "llama" or (kind == "gpt2" and read.pre in VOCABULARIES and VOCABULARIES[read.pre].bos)
    # Gemma 4's flag is set, and its template writes BOS: transformers adds none.
    adds_bos = kind != "gemma4" and read.flag("add_bos_token", starts_with_bos)
    before = [special["bos_token"]] if adds_bos and "bos_token" in special else []
    after = [special["eos_token"]] if read.flag("add_eos_token", False) and "eos_token" in special else []
    if before or after:
        ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B:1"], special_tokens=ids
        )
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return GgufTokenizer(tokenizer, special, template, _ends(read), refusal)


def _ends(read: _Metadata) -> tuple[int, ...]:
    """Ids of tokens that end a turn or a text: by their keys, else by their texts."""
    ids = [read.token(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    there = {token: number for number, token in enumerate(read.tokens) if token in ENDS_OF_TURNS}
    # Where a call or a return ends a turn, <|end|> only ends one of its parts; Gemma 4 has an </s> for other ends.
    if ("<|return|>" in there and "<|call|>" in there) or ("<|flush|>" in there and "<|calls|>" in there):
        there.pop("<|end|>", None)
    if "<|tool_response>" in there:
        there.pop("</s>", None)
    return tuple(dict.fromkeys([*(number for number in ids if number is not None), *there.values()]))


class _Metadata:
    """Typed access to a tokenizer's keys; ModelError names the key."""

    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self._metadata, self._path = metadata, path
        self.architecture = metadata.get("general.architecture")
        self.tokens: list[str] = self._list("tokens")
        self.pre = self.value("pre", "default", "a text")

    def _list(self, key: str) -> list[Any]:
        value = self._metadata.get(_KEY + key)
        if not isinstance(value, list):
            raise self.error(key, "a list of texts")
        return value

    def merges(self) -> list[tuple[str, str]] | None:
        """Pairs of tokens in order of merging; None if the file has none."""
        if f"{_KEY}merges" not in self._metadata:
            return None
        pairs = [tuple(merge.split(" ")) for merge in self._list("merges")]
        if any(len(pair) != 2 for pair in pairs):
            raise self.error("merges", "pairs of tokens, with a space between them")
        return [(pair[0], pair[1]) for pair in pairs]

    def numbers(self, key: str) -> list[Any] | None:
        """A number per token; None if the file has none."""
        values = self._metadata.get(_KEY + key)
        if values is None:
            return None
        if not hasattr(values, "tolist") or len(values) != len(self.tokens):
            raise self.error(key, f"a number for each of {len(self.tokens)} tokens")
        return list(values.tolist())

    def value(self, key: str, default: _Value, needed: str) -> _Value:
        """A value of the kind of `default`."""
        value = self._metadata.get(_KEY + key, default)
        if not isinstance(value, type(default)):
            raise self.error(key, needed)
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self.value(key, default, "true or false")

    def special(self) -> dict[str, str]:
        """The texts of special tokens by transformers' names."""
        found = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token = self.token(f"{key}_token_id")
            if token is not None:
                found[f"{name}_token"] = self.tokens[token]
        return found

    def token(self, key: str) -> int | None:
        """The id of a token; None without the key, or if no token has that id (such as -1), as in llama.cpp."""
        token = self._metadata.get(_KEY + key)
        if token is not None and type(token) is not int:
            raise self.error(key, "the id of a token")
        return token if token is not None and 0 <= token < len(self.tokens) else None

    def error(self, key: str, needed: str) -> ModelError:
        value = repr(self._metadata.get(_KEY + key))[:80]
        return ModelError(f"{self._path}: {_KEY}{key} is {value}", f"needed {needed}")


def _sentencepiece(read: _Metadata, *, spaced: bool = False) -> Any:
    """BPE of characters with byte fallback and a visible character for the space. spaced: as Gemma 4's, whose merges
    are in the file."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    gemma = spaced or read.architecture in _GEMMAS
    # Gemma's runs of spaces come as spaces, and its scores do not follow the order of its merges: that of ids does.
    respelt = gemma and not spaced
    tokens = [_SPACE * len(each) if respelt and each and not each.strip(" ") else each for each in read.tokens]
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

    merges = read.merges()
    known = VOCABULARIES.get(read.pre, VOCABULARIES["default"])
    if merges is None:
        raise read.error("merges", "a list of merges")
    vocab = {token: number for number, token in enumerate(read.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=known.whole))
    words = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in known.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _decoding(read: _Metadata) -> Any:
    """Decodes tokens of an unsupported kind."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {token: number for number, token in enumerate(read.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _add_tokens(tokenizer: Any, read: _Metadata, special: Mapping[str, str]) -> None:
    """Adds the tokens that are matched whole in a text."""
    from tokenizers import AddedToken

    kinds = read.numbers("token_type") or []

    def of(kind: int) -> Iterable[str]:
        return (token for token, its in zip(read.tokens, kinds, strict=False) if its == kind and token)

    whole = {token: True for token in (*of(_CONTROL), *special.values())}
    whole |= {token: False for token in of(_USER_DEFINED) if token not in whole}
    # A text that is no token under its own spelling would become one with a new id.
    there = {token: its for token, its in whole.items() if tokenizer.token_to_id(token) is not None}
    # Phi-3's marks of turns take with them the line that a template ends after them.
    phi3 = read.architecture == "phi3" and read.value("model", "", "a text") == "llama"
    ends = {token for token in there if phi3 and (token.startswith("<|") or token == "</s>")} - {"<|endoftext|>"}
    added = [AddedToken(token, rstrip=token in ends, normalized=False, special=its) for token, its in there.items()]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def closing_token(tokenizer: Any, encode: Callable[[str], list[int]]) -> int | None:
    """The special token that follows an answer in the rendered chat, None if there is none. Harmony's <|end|> does not
    count, as it ends one part of a turn."""
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(talk, tokenize=False))
    except Exception:  # whatever a template raises for a conversation that it is not made for
        return None
    _, found, rest = text.rpartition(_ANSWER)
    ids = encode(rest.lstrip()) if found else []
    starts = (tokenizer.bos_token_id, tokenizer.unk_token_id)
    added = tokenizer.added_tokens_decoder
    if not ids or ids[0] not in added or ids[0] in starts:
        return None
    parts = str(added[ids[0]]) == "<|end|>" and "<|return|>" in map(str, added.values())
    return None if parts else ids[0]


log = logging.getLogger(__name__)

_LARGE = 1 << 16
"""Tokens of a vocabulary whose merges take seconds to find: kept in the user's cache folder, by its content."""
_VERSION = 1


def merges_of(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of `tokens`, no two of which are equal, that make up a token, in the order of its score, highest first.

    Of equal scores the pair with the longest first half goes first, then the one with the longest second half.
    """
    kept = _kept(tokens, scores) if len(tokens) >= _LARGE else None
    pairs = None if kept is None else _read(kept, len(tokens))
    if pairs is None:
        pairs = _pairs(tokens, scores)
        if kept is not None:
            _write(kept, pairs)
    return [(tokens[a], tokens[b]) for a, b in zip(*pairs.T.tolist(), strict=True)] if len(pairs) else []


def _kept(tokens: list[str], scores: list[float]) -> Path:
    """Where the merges of a vocabulary are kept, by all that they follow from."""
    lengths, numbers = np.array([len(token) for token in tokens]), np.asarray(scores, np.float64)
    digest = hashlib.sha256("".join(tokens).encode("utf-8", "surrogatepass"))
    digest.update(lengths.tobytes() + numbers.tobytes())
    return cached("merges", f"{_VERSION}-{digest.hexdigest()[:32]}.npy")


def _read(path: Path, count: int) -> NDArray[np.int32] | None:
    """Pairs of numbers of `count` tokens; None where there are none, or not as they were left."""
    try:
        pairs = np.load(path, allow_pickle=False)
        if pairs.dtype == np.int32 and pairs.shape == (len(pairs), 2) and ((pairs >= 0) & (pairs < count)).all():
            return pairs
        log.warning("%s cannot be used: merges are looked for again", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError) as error:
        log.warning("%s cannot be read (%s): merges are looked for again", path, error)
    return None


def _write(path: Path, pairs: NDArray[np.int32]) -> None:
    """A run goes on without the file."""
    try:
        with whole_file(path) as temporary, temporary.open("wb") as file:
            np.save(file, pairs)
    except OSError as error:
        log.debug("merges are not kept in %s: %s", path.parent, error)


def _pairs(tokens: list[str], scores: list[float]) -> NDArray[np.int32]:
    """The merges as numbers of tokens, (n, 2)."""
    numbers = {token: number for number, token in enumerate(tokens)}
    ways = [
        (first, second, made)
        for token, made in numbers.items()
        for cut in range(1, len(token))
        if (first := numbers.get(token[:cut], -1)) >= 0 and (second := numbers.get(token[cut:], -1)) >= 0
    ]
    found = np.array(ways, np.int32).reshape(-1, 3)
    left, right, whole = found.T
    lengths = np.array([len(token) for token in tokens], np.int64)
    order = np.lexsort((whole, -lengths[right], -lengths[left], -np.asarray(scores, np.float64)[whole]))
    return found[order, :2]
