"""Attention, score accumulation, products and norms: one signature each, several implementations."""

from h2o_flexgen.kernels.native.linear import linear
from h2o_flexgen.kernels.native.norm import layer_norm
from h2o_flexgen.kernels.prompt import prefill_attention
from h2o_flexgen.kernels.torch_cpu import decode_attention
from h2o_flexgen.kernels.types import DecodeAttention, KeysValues, PrefillAttention

__all__ = [
    "DecodeAttention",
    "KeysValues",
    "PrefillAttention",
    "decode_attention",
    "layer_norm",
    "linear",
    "prefill_attention",
]
