"""Between text and token ids, as transformers' AutoTokenizer has it; by the light `tokenizers` library where it can."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_OTHERS = (
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
"""What says more than a tokenizer.json beside it, other than tokenizer_config.json."""

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_PLAIN_SETTINGS = ("backend", "model_input_names", "model_max_length", "padding_side", "tokenizer_class")
_PLAIN_VOCABULARY = 100_000  # above it transformers may repair a fault that early Mistral files have
_OVERRULED = ("qwen2",)
"""model_types of ours for which transformers puts a class of its own in the place of a plain one."""


def is_plain(folder: Path) -> bool:
    """Whether tokenizer.json says all there is to say, so that AutoTokenizer would encode and decode as it does."""
    if not (folder / "tokenizer.json").exists() or any((folder / name).exists() for name in _OTHERS):
        return False
    if not (folder / "tokenizer_config.json").exists():
        return True
    settings = read_json(folder / "tokenizer_config.json")
    if settings.get("tokenizer_class") not in _PLAIN_CLASSES:
        return False
    tokenizer = read_json(folder / "tokenizer.json")
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    return (
        len(tokenizer["model"]["vocab"]) <= _PLAIN_VOCABULARY
        and read_json(folder / "config.json").get("model_type") not in _OVERRULED
        and all(_adds_nothing(name, value, special) for name, value in settings.items())
    )


def _adds_nothing(name: str, value: Any, special: set[str]) -> bool:
    """Whether a setting of tokenizer_config.json changes no id and no text."""
    if name in _PLAIN_SETTINGS or value is None:
        return True
    if name == "clean_up_tokenization_spaces":
        return value is False
    return name.endswith("_token") and isinstance(value, str) and value in special


def require_sentencepiece(folder: Path) -> None:
    """ModelError where a sentencepiece model is all there is, and what reads it is not installed."""
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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty where there is no file. ValueError or OSError for one that cannot be read."""
    loaded = json.loads(path.read_text(encoding="utf-8-sig")) if path.exists() else {}
    if not isinstance(loaded, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return loaded


Decode = Callable[[list[int]], str]

_CONTEXT = 16  # tokens
_UNKNOWN = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet


class TextCodec:
    """Encodes prompts and decodes new tokens.

    `encode` adds special tokens as the model wants them, `encode_bare` none; both read special tokens that are spelt
    out in the text. `decode` leaves special tokens out. `transformed` is transformers' tokenizer, None where the light
    library is enough.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        encode_bare: Callable[[str], list[int]],
        decode: Decode,
        transformed: Any = None,
    ) -> None:
        self.encode, self.encode_bare, self.decode, self.transformed = encode, encode_bare, decode, transformed

    @classmethod
    def open(cls, folder: Path | None) -> TextCodec | None:
        """The tokenizer in `folder`, None where there is none. ModelError for one that cannot be read.

        A tokenizer.json that is the only file of a tokenizer means what it says, and so it does beside a
        tokenizer_config.json that adds nothing: one that names the plain class, and special tokens that tokenizer.json
        has already. Anything else is read by AutoTokenizer, which takes a second to import and is what counts: classes
        that build their own pipeline, flags for BOS and EOS, prefix spaces, tokens of its own, chat templates,
        sentencepiece models, vocab.json with merges.txt. Code in the folder (auto_map) is never run.
        """
        if folder is None or not any((folder / name).exists() for name in TOKENIZER_FILES):
            return None
        try:
            return cls._light(folder) if is_plain(folder) else cls._auto(folder)
        except ModelError:
            raise
        except Exception as error:  # the libraries raise bare Exception for a torn file
            raise ModelError(
                f"the tokenizer in {folder} cannot be read: {error}",
                "needed tokenizer.json or the files it is made from",
            ) from error

    @classmethod
    def _light(cls, folder: Path) -> TextCodec:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(
            lambda text: list(tokenizer.encode(text).ids),
            lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            lambda ids: str(tokenizer.decode(ids)),
        )

    @classmethod
    def _auto(cls, folder: Path) -> TextCodec:
        require_sentencepiece(folder)
        tokenizer = _transformed(folder)
        if tokenizer.chat_template is None:
            # Some folders keep it as their processor's; transformers reads that file for processors only.
            tokenizer.chat_template = read_json(folder / "chat_template.json").get("chat_template")

        def encode(text: str, special: bool = True) -> list[int]:
            # Not verbose: the length is checked against the model, not against what the tokenizer's file says of it.
            return list(tokenizer(text, add_special_tokens=special, verbose=False).input_ids)

        return cls(
            encode,
            lambda text: encode(text, special=False),
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            tokenizer,
        )


def _transformed(folder: Path) -> Any:
    """transformers' tokenizer. Where the folder wants code of its own to be run, tokenizer.json is taken as it is."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        return AutoTokenizer.from_pretrained(str(folder), **settings)
    except ValueError as error:
        if "auto_map" not in read_json(folder / "tokenizer_config.json"):
            raise
        if not (folder / "tokenizer.json").exists():
            raise ModelError(
                f"the tokenizer in {folder} is code of its own (auto_map), which is never run",
                "needed a tokenizer.json beside it",
            ) from error
        return PreTrainedTokenizerFast.from_pretrained(str(folder), **settings)


def text_of(codec: TextCodec | None, row: Sequence) -> str | None:
    """What the row's new tokens add to the text of its prompt, cut before the stop string that ended it."""
    if codec is None:
        return None
    text = _new_text(codec.decode, row)
    return text if row.stop_string is None else text.split(row.stop_string, 1)[0]


def find_stop(decode: Decode, row: Sequence) -> str | None:
    """The stop string that the row's last token completes, the first in the text where there are several; or None.

    Only a tail is decoded at first, since this is done for every token: a character takes four tokens at most. What is
    found there must be in the whole text too.
    """
    stops = row.params.stop_strings
    longest = max(map(len, stops), default=0)
    tail = min(len(row.token_ids), 4 * longest + 8)
    # The prompt is looked at only as far as the context of the tail reaches back into it.
    ids = row.token_ids if tail < len(row.token_ids) - _CONTEXT - 3 else [*_prompt(row), *row.token_ids]
    text = added_text(decode, ids, len(ids) - tail)
    if not any(stop in text for stop in stops):
        return None
    text = _new_text(decode, row)
    found = [stop for stop in stops if stop in text]
    return min(found, key=text.index, default=None)


def added_text(decode: Decode, ids: list[int], cut: int, context: int = _CONTEXT) -> str:
    """The text that `ids[cut:]` adds to that of `ids[:cut]`, as decoding all of it gives it.

    Decoded on their own, tokens may lose a space at the start (sentencepiece) or half a character. So about `context`
    tokens before `cut` are decoded with them, and more where these are no text or begin within a character. A
    character that `cut` divides belongs to what is added.
    """
    before, start = "", 0
    for start in _starts(cut, context):
        before = decode(ids[start:cut])
        if before and not before.startswith(_UNKNOWN):
            break
    whole = decode(ids[start:])
    while not whole.startswith(before):
        before = before[:-1]
    return whole[len(before) :]


def _starts(cut: int, context: int) -> Iterator[int]:
    """Where decoding may start: a character has four tokens at most, and if none of them will do, all must be read."""
    yield from (start for start in range(cut - context, cut - context - 4, -1) if start > 0)
    yield 0


def _new_text(decode: Decode, row: Sequence) -> str:
    prompt = _prompt(row)
    return added_text(decode, [*prompt, *row.token_ids], len(prompt), len(prompt))


def _prompt(row: Sequence) -> list[int]:
    return [*row.prompt_ids, *row.fed]
