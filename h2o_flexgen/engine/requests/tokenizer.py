"""Text to token ids and back, as transformers' AutoTokenizer; by the light `tokenizers` library where it can."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from h2o_flexgen.config.checks import is_text
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.gguf_tokenizer import closing_token, gguf_tokenizer
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.requests.vocabularies import spelling
from h2o_flexgen.errors import ModelError, UsageError

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that take tokenizer.json as it is."""
_GEMMA_CLASSES = ("GemmaTokenizer", "GemmaTokenizerFast")
"""Classes that build Gemma's pipeline from its vocabulary."""
_OVERRULED = ("qwen2",)
"""model_types for which transformers replaces a plain class by its own."""

_IDLE_SETTINGS = (
    "backend", "chat_template", "model_input_names", "model_max_length", "padding_side", "processor_class",
    "sp_model_kwargs", "tokenizer_class", "use_default_system_prompt",
)  # fmt: skip
"""Keys of tokenizer_config.json that change no id and no text."""
_OFF = ("clean_up_tokenization_spaces", "spaces_between_special_tokens")
"""Keys that change nothing if they are false."""
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def light_tokenizer(folder: Path) -> Any:
    """The `tokenizers.Tokenizer` of the folder if it works as AutoTokenizer, which costs seconds, else None."""
    if not (folder / "tokenizer.json").exists():
        return None
    has_settings = (folder / "tokenizer_config.json").exists()
    settings = {**read_json(folder / "tokenizer_config.json"), **read_json(folder / "special_tokens_map.json")}
    name = settings.get("tokenizer_class")
    if settings and name not in (*_PLAIN_CLASSES, *_GEMMA_CLASSES):
        return None
    if has_settings and read_json(folder / "config.json").get("model_type") in _OVERRULED:
        return None
    tokenizer = _stored(folder)
    if name in _GEMMA_CLASSES:
        if not _has_gemmas_pipeline(tokenizer, settings.get("unk_token", "<unk>")):
            return None
        # The class adds these special tokens unless others are named.
        named = {f"{word}_token": f"<{word}>" for word in ("bos", "eos", "unk", "pad", "mask")}
        settings = {**named, **settings}
    added = {token.content: (number, token) for number, token in tokenizer.get_added_tokens_decoder().items()}
    beside = read_json(folder / "added_tokens.json").items()
    if any(content not in added or added[content][0] != number for content, number in beside):
        return None
    if not _adds_as_told(tokenizer, settings):
        return None
    return tokenizer if all(_adds_nothing(key, value, added) for key, value in settings.items()) else None


def _stored(folder: Path) -> Any:
    """The tokenizer of tokenizer.json, for whole texts as they are."""
    from tokenizers import Tokenizer

    # Read here, as the library takes no path that is not UTF-8.
    tokenizer = Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _has_gemmas_pipeline(tokenizer: Any, unknown: Any) -> bool:
    """Whether the steps around the vocabulary are those of transformers' GemmaTokenizer."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    built = (
        normalizers.Replace(" ", "\u2581"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
    )
    steps = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder)
    if any(step is None or step.__getstate__() != own.__getstate__() for step, own in zip(steps, built, strict=True)):
        return False
    model = tokenizer.model
    return (
        isinstance(model, models.BPE)
        and (model.byte_fallback, model.fuse_unk, model.unk_token) == (True, True, unknown)
        and not (model.dropout or model.ignore_merges)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
    )


def _adds_as_told(tokenizer: Any, settings: dict[str, Any]) -> bool:
    """Whether the tokenizer adds BOS and EOS as `add_bos_token` and `add_eos_token` say, if there are any."""
    flags = {word: settings.get(f"add_{word}_token") for word in ("bos", "eos")}
    if all(flag is None for flag in flags.values()):
        return True
    wanted = [_described(settings.get(f"{word}_token"))["content"] for word, flag in flags.items() if flag]
    return bool(tokenizer.encode("").tokens == wanted)


def _adds_nothing(name: str, value: Any, added: dict[str, tuple[int, Any]]) -> bool:
    """Whether a setting changes no id and no text, or is judged by `_adds_as_told`. added: ids, tokens by content."""
    if name in (*_IDLE_SETTINGS, "add_bos_token", "add_eos_token") or value is None:
        return True
    if name in _OFF:
        return value is False
    if name == "added_tokens_decoder":
        return all(_is_there(token, added, int(number)) for number, token in value.items())
    if name.endswith("_token"):
        return _is_there(value, added)
    if name in ("extra_special_tokens", "additional_special_tokens"):
        return all(_is_there(token, added) for token in (value.values() if isinstance(value, dict) else value))
    return False


def _is_there(token: Any, added: dict[str, tuple[int, Any]], number: int | None = None) -> bool:
    """Whether a token of the settings is among the added ones, as it is described."""
    described = _described(token)
    if described["content"] not in added:
        return False
    known, has = added[described["content"]]
    attributes = {key: value for key, value in described.items() if not key.startswith("__")}
    return number in (None, known) and all(getattr(has, key) == value for key, value in attributes.items())


def _described(token: Any) -> dict[str, Any]:
    """A token of the settings, which may be only its text, as an object."""
    return {"content": None, "special": True, **(token if isinstance(token, dict) else {"content": token})}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty without a file. ValueError or OSError if it cannot be read."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8-sig")) if path.exists() else {}
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return loaded


def has_chat_template(folder: Path) -> bool:
    """Whether transformers would find a chat template in the folder."""
    in_settings = read_json(folder / "tokenizer_config.json").get("chat_template")
    return bool(in_settings) or any((folder / name).exists() for name in _TEMPLATES)


def require_sentencepiece(folder: Path) -> None:
    """ModelError if there is only a sentencepiece model, and its reader is not installed."""
    if (folder / "tokenizer.json").exists() or not (folder / "tokenizer.model").exists():
        return
    missing = [name for name in ("sentencepiece", "google.protobuf") if not _installed(name)]
    if missing:
        raise ModelError(
            f"the tokenizer in {folder} is a sentencepiece model (tokenizer.model), and {' and '.join(missing)} "
            "cannot be imported",
            "needed a tokenizer.json, or what reads tokenizer.model",
            "pip install 'h2o_flexgen[sentencepiece]'",
        )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def _torn(folder: Path) -> str:
    """Why no tokenizer can be read: the path, or the first of its files that is torn; else empty."""
    if not is_text(str(folder)):
        return "its path is not UTF-8, which transformers needs: rename the folder, or name it by a link"
    templates = (*folder.glob("chat_template.*"), *folder.glob("additional_chat_templates/*"))
    for path in sorted((*folder.glob("*token*.json"), *templates)):
        try:
            read_json(path) if path.suffix == ".json" else path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            return f"{path.name}: {str(error).removeprefix(f'{path.name} ')}"
    return ""


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raises ModelError where the libraries raise anything for the tokenizer in `folder`, as torn files and settings of
    a wrong type make them."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        why = _torn(folder) or (repr(error) if isinstance(error, LookupError) else error)
        raise ModelError(f"the tokenizer in {folder} cannot be read: {why}", _NEEDED) from error


_NEEDED = "needed tokenizer.json or the files it is made from"
Decode = Callable[[list[int]], str]
Offsets = Callable[[str, bool], list[tuple[int, int]]]
"""From a text and whether special tokens are added to [start, end) of each token; special ones are empty."""

_CONTEXT = 16  # tokens
_PROBES = (
    "Hello world", " a", "two  spaces\n\n  and lines\n", "don't WE'LL", "12345 x1", "(x) == y_z;", "e\u0301 \u00e9",
    "你好，мир", "\U0001f600", "",
)  # fmt: skip
"""Texts in which tokenizers differ."""
UNKNOWN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet


class TokenText(NamedTuple):
    """A token in its place: the text that it adds, and its own bytes."""

    text: str
    raw: bytes

    @property
    def name(self) -> str:
        """The text; of no whole character the bytes, as OpenAI's services have it."""
        whole = self.raw == self.text.encode(errors="replace")
        return self.text if whole else "".join(f"\\x{byte:02x}" for byte in self.raw)

    @property
    def label(self) -> str:
        """The same, as completions have it."""
        return self.name if self.name == self.text else f"bytes:{self.name}"


class TextCodec:
    """Encodes prompts and decodes new tokens.

    encode       with the special tokens that the model wants; encode_bare: without. Both read spelt-out special tokens
    decode       without special tokens
    offsets      the characters of each token; None if the tokenizer does not tell
    light        the tokenizer of the library `tokenizers`, if there is one
    transformed  transformers' tokenizer, None if the light one is enough; loaded when it is asked for
    ends         tokens that end turns by a GGUF file's keys and texts
    context      tokens that a prompt may have
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        encode_bare: Callable[[str], list[int]],
        decode: Decode,
        transformed: Callable[[], Any] = lambda: None,
        light: Any = None,
        offsets: Offsets | None = None,
    ) -> None:
        self.encode, self.encode_bare, self._transformed = encode, encode_bare, transformed
        self.decode = lambda ids: _whole_characters(decode, ids)
        self.light, self.offsets = light, offsets
        self.ends, self.context = tuple[int, ...](), sys.maxsize

    @cached_property
    def transformed(self) -> Any:
        return self._transformed()

    @cached_property
    def opening(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text, whichever it is."""
        whole, bare = self.encode("x"), self.encode_bare("x")
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The tokens that end the model's turn: the chat template's, the tokenizer's, and those of `ends`. None without
        a renderer of conversations."""
        tokenizer = self.transformed
        if tokenizer is None:
            return ()
        closing = closing_token(tokenizer, self.encode_bare)
        ids = (closing, getattr(tokenizer, "eos_token_id", None), *self.ends)
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    def told(self, ids: list[int], place: int, token: int) -> TokenText:
        """`token` behind the first `place` of `ids`."""
        start = max(0, place - 2 * _CONTEXT)
        text = added_text(self.decode, [*ids[start:place], token], place - start)
        if UNKNOWN in self.decode([token]) and self._spell is not None:
            return TokenText(text.rstrip(UNKNOWN), self._spell(self.light.id_to_token(token)))
        return TokenText(text, text.encode(errors="replace"))

    @cached_property
    def _spell(self) -> Callable[[str], bytes] | None:
        return None if self.light is None else spelling(self.light)

    @classmethod
    def open(cls, folder: Path | None) -> TextCodec | None:
        """The tokenizer in `folder`, None if there is none: the light one if it gives the same ids, see
        `light_tokenizer`, else AutoTokenizer's. Code in the folder (auto_map) is never run. ModelError if it cannot be
        read."""
        if folder is None or not any((folder / name).exists() for name in TOKENIZER_FILES):
            return None
        with _reading(folder):
            tokenizer = light_tokenizer(folder)
            if tokenizer is None:
                return cls._auto(folder)
            return cls._light(tokenizer, lambda: _transformed(folder) if has_chat_template(folder) else None)

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any], path: str) -> TextCodec | None:
        """The tokenizer in a GGUF file's metadata, None if there is none. ModelError if it is damaged; one of an
        unknown kind decodes, and raises UsageError for texts."""
        try:
            found = gguf_tokenizer(metadata, path)
        except ModelError:
            raise
        except Exception as error:  # the library raises bare Exception for merges of what is no token
            raise ModelError(f"the tokenizer in {path} cannot be used: {error}", change="download it again") from error
        if found is None:
            return None
        codec = cls._light(found.tokenizer, found.transformed)
        codec.ends = found.ends
        if found.refusal is not None:
            why = UsageError(*found.refusal)

            def refuse(*_: Any) -> Any:
                raise why

            codec.encode = codec.encode_bare = codec.offsets = refuse
        return codec

    @classmethod
    def _light(cls, tokenizer: Any, transformed: Callable[[], Any]) -> TextCodec:
        return cls(
            lambda text: list(tokenizer.encode(text).ids),
            lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            lambda ids: str(tokenizer.decode(ids)),
            transformed,
            tokenizer,
            lambda text, special: list(tokenizer.encode(text, add_special_tokens=special).offsets),
        )

    @classmethod
    def _auto(cls, folder: Path) -> TextCodec:
        require_sentencepiece(folder)
        tokenizer = _transformed(folder)
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        if special >= tokenizer.get_vocab().keys():
            # Some of transformers' classes are made without files: then every text has no tokens.
            raise ModelError(
                f"the tokenizer in {folder} has no vocabulary", _NEEDED, "download the files that are missing"
            )
        _warn_of_others(folder, tokenizer)

        def encode(text: str, special: bool = True) -> list[int]:
            # Not verbose: the length is checked against the model, not against what the tokenizer's file says of it.
            return list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)

        def offsets(text: str, special: bool) -> list[tuple[int, int]]:
            how = {"add_special_tokens": special, "return_offsets_mapping": True, "verbose": False}
            return [(start, end) for start, end in tokenizer(text, **how).offset_mapping]

        return cls(
            encode,
            lambda text: encode(text, special=False),
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            lambda: tokenizer,
            getattr(tokenizer, "backend_tokenizer", None),
            offsets if tokenizer.is_fast else None,
        )


def _warn_of_others(folder: Path, tokenizer: Any) -> None:
    """Warns if transformers' class gives other ids than the folder's tokenizer.json."""
    if not (folder / "tokenizer.json").exists():
        return
    stored = _stored(folder)
    settings = read_json(folder / "tokenizer_config.json")
    told = any(settings.get(f"add_{word}_token") is not None for word in ("bos", "eos"))
    for text in _PROBES:
        # Added special tokens may be named beside tokenizer.json; how words are cut stands in it alone.
        for special in (False,) if told else (False, True):
            ids = list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)
            other = list(stored.encode(text, add_special_tokens=special).ids)
            if ids != other:
                plain = settings.get("tokenizer_class") in _PLAIN_CLASSES
                change = "have no" if plain else "name tokenizer_class PreTrainedTokenizerFast in its"
                log.warning(
                    "the tokenizer in %s cuts %r into %s by its class %s, as transformers does, and into %s by its "
                    "tokenizer.json; for the latter %s tokenizer_config.json",
                    folder, text, ids, type(tokenizer).__name__, other, change,
                )  # fmt: skip
                return


def _transformed(folder: Path) -> Any:
    """transformers' tokenizer, by tokenizer.json alone if the folder's own code would have to run; with the chat
    template in chat_template.json, which transformers reads for processors only."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with _reading(folder):
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), **settings)
        except (LookupError, ValueError) as error:
            if "auto_map" not in read_json(folder / "tokenizer_config.json"):
                raise
            if not (folder / "tokenizer.json").exists():
                raise ModelError(
                    f"the tokenizer in {folder} is code of its own (auto_map), which is never run",
                    "needed a tokenizer.json beside it",
                ) from error
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), **settings)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = read_json(folder / "chat_template.json").get("chat_template")
    return tokenizer


def text_of(codec: TextCodec | None, row: Sequence) -> str | None:
    """The text of the row's new tokens after its prompt, cut before the stop string that ended it."""
    if codec is None:
        return None
    text = _new_text(codec.decode, row)
    cut = None if row.stop_string is None else stop_in(text, codec.decode, row.given_ids, row.token_ids, row.params)
    return text if cut is None else text[: cut[0]]


def find_stop(decode: Decode, row: Sequence) -> str | None:
    """The stop string that the row's last token completes, the first in the text; or None.

    Called for every token, so that only a tail is decoded at first; a character takes four tokens at most.
    """
    if len(row.token_ids) <= row.params.min_new_tokens:
        return None
    stops = row.params.stop_strings
    longest = max(map(len, stops), default=0)
    tail = min(len(row.token_ids), 4 * longest + 8)
    # The prompt is looked at only as far as the context of the tail reaches back into it.
    ids = row.token_ids if tail < len(row.token_ids) - _CONTEXT - 3 else [*row.given_ids, *row.token_ids]
    text = added_text(decode, ids, len(ids) - tail)
    if not any(stop in text for stop in stops):
        return None
    found = stop_in(_new_text(decode, row), decode, row.given_ids, row.token_ids, row.params)
    return None if found is None else found[1]


def stop_in(
    text: str, decode: Decode, prompt: list[int], new: list[int], params: SamplingParams
) -> tuple[int, str] | None:
    """The place in `text`, which the answer `new` ends with, of the first stop string, and that string; None without
    one. One that is complete within the first `min_new_tokens` does not count."""
    late, fewest = len(text), params.min_new_tokens if any(stop in text for stop in params.stop_strings) else 0
    if fewest:
        early, whole = (added_text(decode, [*prompt, *ids], len(prompt), len(prompt)) for ids in (new[:fewest], new))
        late = len(whole) - len(early.rstrip(UNKNOWN))
    found = ((text.find(stop, max(0, len(text) - late - len(stop) + 1)), stop) for stop in params.stop_strings)
    return min((each for each in found if each[0] >= 0), key=itemgetter(0), default=None)


def added_text(decode: Decode, ids: list[int], cut: int, context: int = _CONTEXT) -> str:
    """The text that `ids[cut:]` adds to that of `ids[:cut]`, as decoding all of it gives it.

    Decoded alone, tokens may lose a space (sentencepiece) or half a character: about `context` tokens before `cut` are
    decoded with them, more if these begin within a character. A character that `cut` divides is added.
    """
    before = ""
    starts = [start for start in range(cut - context, cut - context - 4, -1) if start > 0]  # four tokens a character
    for start in (*starts, 0):
        before = decode(ids[start:cut])
        if before and not before.startswith(UNKNOWN):
            break
    whole = decode(ids[start:])
    while not whole.startswith(before):
        before = before[:-1]
    return whole[len(before) :]


def _whole_characters(decode: Decode, ids: list[int]) -> str:
    """`decode`, but a last character that lacks bytes leaves those before it as they are: decoders with byte fallback
    make U+FFFD of a whole run of bytes that is no text."""
    text = decode(ids)
    for cut in range(1, 5) if text.endswith(UNKNOWN) else ():  # three bytes, and an eos
        whole = decode(ids[:-cut])
        if not whole.endswith(UNKNOWN):
            return text if text.startswith(whole) else whole + UNKNOWN
    return text


def _new_text(decode: Decode, row: Sequence) -> str:
    prompt, new = row.given_ids, row.token_ids
    # An eos after a text with a form may have a text of its own.
    if row.grammar is not None and new and new[-1] in row.eos:
        new = new[:-1]
    return added_text(decode, [*prompt, *new], len(prompt), len(prompt))
