"""Between text and token ids. The light `tokenizers` library where tokenizer.json is there, transformers otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from h2o_flexgen.engine.sequence import Sequence
from h2o_flexgen.errors import ModelError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class TextCodec:
    """Encodes prompts (special tokens as the model wants them) and decodes new tokens (without special tokens)."""

    def __init__(self, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]) -> None:
        self.encode, self.decode = encode, decode

    @classmethod
    def open(cls, folder: Path | None) -> TextCodec | None:
        """The tokenizer in `folder`, None where there is none. ModelError for one that cannot be read."""
        if folder is None or not any((folder / name).exists() for name in _FILES):
            return None
        try:
            return cls._fast(folder) if (folder / "tokenizer.json").exists() else cls._converted(folder)
        except Exception as error:  # the libraries raise bare Exception for a torn file
            raise ModelError(
                f"the tokenizer in {folder} cannot be read: {error}",
                "needed tokenizer.json or the files it is made from",
            ) from error

    @classmethod
    def _fast(cls, folder: Path) -> TextCodec:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(lambda text: list(tokenizer.encode(text).ids), lambda ids: str(tokenizer.decode(ids)))

    @classmethod
    def _converted(cls, folder: Path) -> TextCodec:
        from transformers import AutoTokenizer

        # Code in the folder (auto_map) is never run.
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return cls(
            lambda text: list(tokenizer(text).input_ids),
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        )


def text_of(codec: TextCodec | None, row: Sequence) -> str | None:
    """The row's new text, cut before the stop string that ended it."""
    if codec is None:
        return None
    text = codec.decode(row.token_ids)
    return text if row.stop_string is None else text.split(row.stop_string, 1)[0]
