"""Qwen's families. No torch.

qwen2      Qwen 1.5, 2 and 2.5: Llama with biases on q, k and v. Yang et al., "Qwen2.5 Technical Report", arXiv
           2412.15115
qwen2_moe  Qwen1.5-MoE and Qwen2-57B-A14B: the same with experts, one for all tokens. Yang et al., "Qwen2 Technical
           Report", arXiv 2407.10671
qwen3      Qwen3, dense: Llama whose queries and keys are normed head by head. Yang et al., "Qwen3 Technical Report",
           arXiv 2505.09388
qwen3_moe  Qwen3-30B-A3B and 235B-A22B: the same with 128 experts, eight for each token
"""

from __future__ import annotations

from functools import partial
from typing import Any

from h2o_flexgen.config.model.arch import ExpertSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import LlamaLike, by_layer, everywhere, switched
from h2o_flexgen.models.mixture import EXPERTS, mixture_names, read_experts

_SHARED = {f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("up", "gate", "down")}
_SHARED["mlp.shared_gate"] = "mlp.shared_expert_gate"


def _window(read: ConfigReader) -> int | None:
    """The window, which configs give even where it is switched off."""
    return read.whole_or_null("sliding_window", 4096) if read.flag("use_sliding_window", False) else None


def _from_layer_on(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Windows are used if `use_sliding_window`, from layer `max_window_layers` on."""
    window, first = _window(read), read.count("max_window_layers", 28)
    return by_layer(spec, read, window, [window is not None and layer >= first for layer in range(spec.num_layers)])


def _experts(spec: ModelSpec, read: ConfigReader, count: int, active: int, ffn_size: int, **more: Any) -> ExpertSpec:
    """count, active, ffn_size: defaults. `mlp_only_layers` and all but every `decoder_sparse_step`th have none."""
    listed, step = read.whole_list("mlp_only_layers"), read.whole("decoder_sparse_step", 1)
    dense = tuple(layer for layer in range(spec.num_layers) if layer in listed or (layer + 1) % step)
    size, normalised = read.whole("moe_intermediate_size", ffn_size), read.flag("norm_topk_prob", False)
    return read_experts(read, count, active, size, normalised=normalised, dense=dense, **more)


def _second_mixture(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    shared = read.whole("shared_expert_intermediate_size", 5632)
    experts = _experts(spec, read, 60, 4, 1408, shared_size=shared)
    window, first = _window(read), read.count("max_window_layers", 28)
    windowed = [window is not None and layer < first and layer % 2 == 0 for layer in range(spec.num_layers)]
    spec = switched(spec, qkv_bias=read.flag("qkv_bias", True), experts=experts)
    return by_layer(spec, read, window, windowed)


FAMILIES = (
    LlamaLike("qwen2", switches={"qkv_bias": True}, more=_from_layer_on),
    LlamaLike("qwen3", switches={"qk_norm": True}, more=_from_layer_on),
    LlamaLike(
        "qwen2_moe",
        experts=True,
        more=_second_mixture,
        checkpoint_names=partial(mixture_names, tables=({**EXPERTS, **_SHARED},)),
    ),
    LlamaLike(
        "qwen3_moe",
        experts=True,
        switches={"qk_norm": True},
        more=lambda spec, read: everywhere(
            switched(spec, experts=_experts(spec, read, 128, 8, 768)), read, _window(read)
        ),
        checkpoint_names=mixture_names,
    ),
)
