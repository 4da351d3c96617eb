"""The config.json that a GGUF file's metadata stands for, of the families that are supported.

A key of the architecture that asks for something unknown is refused, never left out: the program may not quietly run a
different model.
"""

from __future__ import annotations

import math
from typing import Any

from h2o_flexgen.checkpoint.gguf.architectures import ARCHITECTURES
from h2o_flexgen.checkpoint.gguf.blocks import FORMATS
from h2o_flexgen.checkpoint.gguf.header import GgufHeader
from h2o_flexgen.checkpoint.gguf.keys import GgufKeys
from h2o_flexgen.errors import ModelError

_SPECIAL = {"bos_token_id": ("bos",), "eos_token_id": ("eos", "eot", "eom"), "pad_token_id": ("padding",)}
_OTHER_FILES = {
    "mmproj": "the part of a model that reads pictures or sound (mmproj)",
    "adapter": "an adapter (LoRA), which is not read: merge it into its model",
    "imatrix": "a table of how much weights matter (imatrix)",
    "vocab": "a vocabulary without weights",
}
"""What `general.type` may be besides a model."""


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The keys and values of config.json. ModelError for another architecture, and for what is not supported."""
    other = not_a_model(header)
    if other is not None:
        raise ModelError(f"{header.path} is {other}", "needed a language model", "name its .gguf file with --model")
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ModelError(
            f"{header.path} is of the architecture {str(architecture)[:80]!r}, which is not supported",
            f"needed one of {', '.join(ARCHITECTURES)}",
        )
    if header.metadata.get("general.quantization_version", 2) != 2:
        raise ModelError(f"{header.path} has blocks of another version", "needed general.quantization_version 2")
    keys = GgufKeys(header, architecture)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path} has no matrix token_embd.weight", "needed the weights of a model")
    vocab, tokens = embedding.shape[0], header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocab:
        raise ModelError(f"{header.path} has {len(tokens)} tokens", f"needed at most {vocab}, the rows of token_embd")
    if keys.whole("block_count") > len(header.tensors):  # a number of layers that can be no other is not counted up to
        raise keys.error("block_count", f"no more layers than there are tensors, {len(header.tensors)}")
    config = {
        "vocab_size": vocab,
        "hidden_size": keys.whole("embedding_length"),
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": keys.whole("attention.head_count"),
        "max_position_embeddings": keys.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": stored_dtype(header),
        **_special_tokens(header, vocab),
        **ARCHITECTURES[architecture].read(keys),
    }
    keys.refuse_rest()
    return config


def not_a_model(header: GgufHeader) -> str | None:
    """What a GGUF file is that is no language model; None: it may be one."""
    kind, architecture = header.metadata.get("general.type", "model"), header.metadata.get("general.architecture")
    if kind in _OTHER_FILES:
        return _OTHER_FILES[kind]
    if architecture in ("clip", "mmproj"):
        return _OTHER_FILES["mmproj"]
    if architecture == "imatrix":
        return _OTHER_FILES["imatrix"]
    if kind != "model":
        return f"of the type {str(kind)[:80]!r}"
    return "a vocabulary without weights" if not header.tensors else None


def stored_dtype(header: GgufHeader) -> str:
    """The dtype of most numbers in matrices; blocks, whose numbers are in none, count as bfloat16."""
    numbers: dict[str, int] = {}
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            dtype = FORMATS[tensor.kind].dtype or "bfloat16"
            numbers[dtype] = numbers.get(dtype, 0) + math.prod(tensor.shape)
    return max(numbers, key=lambda dtype: (numbers[dtype], dtype))


def _special_tokens(header: GgufHeader, vocab: int) -> dict[str, Any]:
    """bos, eos and pad. A model of conversations has a token that ends a turn besides the one that ends a text.

    An id that is no token's is none: -1, which is 4294967295 in 32 bits, stands in files of many converters.
    """
    found: dict[str, Any] = {}
    for name, words in _SPECIAL.items():
        ids = []
        for word in words:
            key = f"tokenizer.ggml.{word}_token_id"
            token = header.metadata.get(key)
            if token is not None and type(token) is not int:
                raise ModelError(f"{header.path}: {key} is {str(token)[:80]!r}", "needed the id of a token")
            ids += [token] if token is not None and 0 <= token < vocab and token not in ids else []
        found[name] = ids if len(ids) > 1 else ids[0] if ids else None
    return found
