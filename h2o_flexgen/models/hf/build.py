"""Makes a model of transformers without weights, and puts ours in the place of its products."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from h2o_flexgen.errors import ModelError
from h2o_flexgen.kernels import linear
from h2o_flexgen.kernels.packed import PackedWeight, look_up
from h2o_flexgen.models.hf import experts as _registers_experts  # noqa: F401
from h2o_flexgen.models.hf.attention import NAME
from h2o_flexgen.models.hf.experts import TEXT_ONLY, adapt

OTHER_CODE = ("auto_map", "custom_pipelines", "quantization_config", "torch_dtype", "dtype")
"""Keys of a config.json that the modules are made without."""


def model_types() -> frozenset[str]:
    """The model types of which this transformers has a decoder, alone or with others that look at images."""
    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | frozenset(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def build(
    config: str, name: str, dtype: torch.dtype = torch.float32, *, alone: bool = False
) -> transformers.PreTrainedModel:
    """The modules of a config.json (its text), on a CPU: parameters on meta, buffers in memory.

    `alone`: for sequences that go through them one by one, by transformers' own attention.

    ModelError in transformers' words where it cannot make them.
    """
    raw = json.loads(config)
    kept = {key: value for key, value in raw.items() if key not in OTHER_CODE}
    try:
        with quiet(), _parameters_on_meta():
            made = CONFIG_MAPPING[raw["model_type"]].from_dict(_plain(kept))
            kind: Any = transformers.AutoModelForCausalLM
            if raw["model_type"] in TEXT_ONLY:
                made = made.get_text_config(decoder=True)
            elif raw["model_type"] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:  # names of tensors are then its own
                kind = transformers.AutoModelForImageTextToText
            attention = "eager" if alone else NAME
            model = kind.from_config(made, dtype=dtype, attn_implementation=attention, experts_implementation=NAME)
            model.tie_weights()
            adapt(model)
            for module in model.modules():
                if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # it would look at the tokens
                    module.warn_if_padding_and_no_attention_mask = lambda *_, **__: None
    except Exception as error:  # whatever it raises is about this config
        raise ModelError(
            f"{name}: transformers {transformers.__version__} cannot make a {raw['model_type']!r}: "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            "needed a config.json of a decoder that it can",
        ) from error
    return model.eval()


def _plain(value: Any) -> Any:
    """Of a config.json: infinities, which transformers writes as objects, as numbers."""
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else {k: _plain(v) for k, v in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


@contextmanager
def quiet() -> Iterator[None]:
    """transformers says nothing within but errors."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.set_verbosity(level)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:  # one that is stays itself: others may be tied to it
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=False)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Absent:
    """Stands for a tensor while its unit is not computed: whatever uses it fails."""

    def __init__(self, name: str) -> None:
        self.name = name


class Packed:
    """A packed matrix where modules look for a tensor: products with it, and rows of it, are ours."""

    def __init__(self, weight: PackedWeight) -> None:
        self.packed, self.dtype, self.device, self.shape = weight, weight.dtype, weight.device, weight.shape

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.embedding:
            return _rows(args[1].packed, args[0])
        if function is torch.nn.functional.linear:
            return multiply(args[1], args[0], *args[2:], **(kwargs or {}))
        raise TypeError(f"{function} of a packed matrix")


def _rows(table: PackedWeight, ids: Tensor) -> Tensor:
    return look_up(table, ids.flatten()).unflatten(0, ids.shape)


def multiply(weight: Tensor | Packed, x: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """x (..., in) times weight (out, in) transposed, plus bias: by our kernels."""
    matrix = weight.packed if isinstance(weight, Packed) else weight
    if isinstance(matrix, Absent):
        raise RuntimeError(f"{matrix.name} is used outside of its unit")
    if x.dim() == 2:
        return linear(x, matrix, bias, wide=wide)
    return linear(x.reshape(-1, x.shape[-1]), matrix, bias, wide=wide).view(*x.shape[:-1], -1)


def product(module: nn.Module, x: Tensor, wide: bool = False) -> Tensor:
    """x (..., in) times the matrix of a module for which `is_product` holds, plus its bias."""
    return multiply(module._parameters["weight"], x, module._parameters["bias"], wide)  # type: ignore[arg-type]


def is_product(module: nn.Module) -> bool:
    """Whether all that a module does is a product with its weight."""
    return type(module) in (nn.Linear, Conv1D)


def take_products(model: nn.Module, head: nn.Module | None) -> None:
    """From now on products are computed by our kernels, that of the output head in float32."""
    for module in model.modules():
        if is_product(module):
            module.forward = partial(product, module, wide=module is head)
