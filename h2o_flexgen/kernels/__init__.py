"""Attention, score accumulation, products and norms: one signature each, several implementations."""

from h2o_flexgen.kernels.layers import ACTIVATIONS, gated, layer_norm, linear, rms_norm
from h2o_flexgen.kernels.prompt import prefill_attention
from h2o_flexgen.kernels.torch_attention import decode_attention
from h2o_flexgen.kernels.types import DecodeAttention, KeysValues, PrefillAttention

__all__ = [
    "ACTIVATIONS",
    "DecodeAttention",
    "KeysValues",
    "PrefillAttention",
    "decode_attention",
    "gated",
    "layer_norm",
    "linear",
    "prefill_attention",
    "rms_norm",
]
