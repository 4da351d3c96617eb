"""The keys of a GGUF file's metadata that belong to its architecture, and the scaling of positions that they stand for.

Keys are those of ggml's docs/gguf.md and of llama.cpp's converter.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from h2o_flexgen.checkpoint.files import CheckpointFile
from h2o_flexgen.checkpoint.gguf.header import GgufHeader
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.fields import ConfigReader

_IDLE = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
"""GgufKeys that are not needed: the table of tokens says how many there are."""
_MOST_FACTORS = 4096
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings of Llama 3.1 to 3.3; GGUF keeps only the factors that follow from them."""


class GgufKeys(ConfigReader):
    """Typed access to the keys of one architecture; remembers which were asked for. ModelError names the key."""

    where = ""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        prefix = f"{architecture}."
        own = {key.removeprefix(prefix): each for key, each in header.metadata.items() if key.startswith(prefix)}
        super().__init__(own, header.path, prefix)
        self.header, self._asked = header, set(_IDLE)

    def value(self, key: str) -> Any:
        """As it is; None where there is no such key."""
        return self._value(key, None)

    def _value(self, key: str, default: Any) -> Any:
        self._asked.add(key)
        return super()._value(key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        """As everywhere; a list with the same number for each layer is that number."""
        value = self.value(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            return ConfigReader({key: value[0].item()}, self.name, self._path).whole(key, default)
        return super().whole(key, default)

    def biased(self, part: str) -> bool:
        names = part, part.replace("attn_q", "attn_qkv")  # where these are one tensor
        return any(f"blk.0.{name}.bias" in self.header.tensors for name in names)

    def refuse_rest(self) -> None:
        """ModelError for the first key that nothing asked for, unless it is 0, false or empty."""
        for key, value in self.values().items():
            there = value.size and value.any() if isinstance(value, np.ndarray) else value
            if key not in self._asked and there:
                raise self.error(key, "a model without it: it is not supported")


def scaling_of(keys: GgufKeys, theta: float, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json."""
    factors = factors_of(keys.header, "rope_freqs.weight")
    kind = keys.value("rope.scaling.type")
    if factors is not None:
        if kind not in (None, "none"):
            raise keys.error("rope.scaling.type", "none beside rope_freqs.weight")
        return _by_factors(keys, factors, theta, head_dim)
    if kind == "linear" or (kind is None and keys.value("rope.scale_linear")):
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor", keys.value("rope.scale_linear"))}
    if kind == "yarn":
        for key, usual in (("rope.scaling.attn_factor", 1.0), ("rope.scaling.yarn_ext_factor", 1.0)):
            if keys.number(key, usual) != usual:
                raise keys.error(key, f"{usual:g}: others are not supported")
        own = keys.value("rope.scaling.yarn_attn_factor")
        return {
            "rope_type": "yarn",
            "factor": keys.number("rope.scaling.factor"),
            **({} if own is None else {"attention_factor": keys.number("rope.scaling.yarn_attn_factor")}),
            "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length"),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    if kind not in (None, "none"):
        raise keys.error("rope.scaling.type", "one of none, linear, yarn")
    for key in ("rope.scaling.factor", "rope.scaling.attn_factor"):
        if keys.number(key, 1.0) != 1:
            raise keys.error(key, "a rope.scaling.type that it belongs to")
    keys.value("rope.scaling.original_context_length")
    return None


def _by_factors(keys: GgufKeys, factors: list[float], theta: float, head_dim: int) -> dict[str, Any]:
    """The divisors of rotary frequencies: Llama 3's scaling where that gives the same, else one by one."""
    if len(factors) != head_dim // 2:
        raise ModelError(f"{keys.header.path}: rope_freqs.weight has {len(factors)} numbers", f"needed {head_dim // 2}")
    # Of the lowest frequency; where only some are stretched, this is the factor.
    usual = {"rope_type": "llama3", "factor": round(max(factors), 6), **_LLAMA3}
    if np.allclose(factors, _llama3_factors(usual, theta, head_dim), rtol=1e-5, atol=0):
        return usual
    positions = keys.whole("context_length")
    own = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
    return {"rope_type": "longrope", **own, "original_max_position_embeddings": positions}


def _llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """Grattafiori et al., arXiv 2407.21783: long waves are stretched by the factor, short ones not at all."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (scaling["original_max_position_embeddings"] / waves - low) / (high - low)
    return 1 / ((1 - np.clip(smooth, 0, 1)) / factor + np.clip(smooth, 0, 1))


def factors_of(header: GgufHeader, name: str) -> list[float] | None:
    """The numbers of a small tensor that belongs to the config; None where there is none."""
    tensor = header.tensors.get(name)
    if tensor is None:
        return None
    if tensor.kind != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_FACTORS:
        raise ModelError(f"{header.path}: {name} is {tensor.kind} of shape {tensor.shape}", "needed a list in F32")
    part = header.parts[tensor.part]
    with CheckpointFile(part.path) as file:
        factors = np.frombuffer(file.head(tensor.nbytes, tensor.offset), "<f4").astype(float)
    if len(factors) != tensor.shape[0] or not np.isfinite(factors).all() or (factors <= 0).any():
        raise ModelError(f"{header.path}: {name} has numbers that are not above 0", change="download it again")
    return [float(factor) for factor in factors]
