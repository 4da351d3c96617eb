"""Families with experts of which a bias corrects the choice, after DeepSeek-V3 (arXiv 2412.19437). No torch.

dots1         dots.llm1: DeepSeek's router, queries and keys normed head by head. rednote-hilab, "dots.llm1 Technical
              Report", arXiv 2506.05767. Defaults of experts that Dots1Config does not have are the published model's
ernie4_5_moe  ERNIE 4.5 with experts, text only: a softmax; rotated pairs lie side by side. Baidu, "ERNIE 4.5 Technical
              Report", 2025
glm4_moe      GLM-4.5 to 4.7: DeepSeek's router, and half of each head turned. GLM-4.5 Team, "GLM-4.5", arXiv 2508.06471
hy_v3         Hunyuan 3: experts by a sigmoid, queries and keys normed head by head. Tencent Hunyuan Team, "Hy3", 2026
minimax_m2    MiniMax-M2: 256 experts by a sigmoid, queries and keys normed as a whole; heads turn in part, of which the
              published files say how much as `rotary_dim`. MiniMax, "MiniMax-M2", 2025

Layers that predict more tokens at once are left out.
"""

from __future__ import annotations

from functools import partial

from h2o_flexgen.config.model.arch import ExpertSpec, RotarySpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import required
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import IGNORED, LlamaLike, by_layer, switched
from h2o_flexgen.models.mistral import NUMBERED
from h2o_flexgen.models.mixture import EXPERTS, mixture_names, read_experts
from h2o_flexgen.models.rope_fields import read_rotary
from h2o_flexgen.models.stored import Names, Stored, pairs_apart

_SHARED = {**EXPERTS, **{f"mlp.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("up", "gate", "down")}}
"""The parts of a layer where all tokens go through an MLP besides."""
_CHOICE = {"mlp.choice": "mlp.e_score_correction_bias"}
_GROUPED = {**_SHARED, "mlp.choice": "mlp.gate.e_score_correction_bias"}
_PREDICTING = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
"""The names that families have for how many layers predict more tokens at once."""


def _with(spec: ModelSpec, read: ConfigReader, experts: ExpertSpec) -> ModelSpec:
    """`spec` with experts, and layers behind the others that predict: one where a config.json does not say."""
    key = next((key for key in _PREDICTING if key in read), _PREDICTING[0])
    return switched(spec, experts=experts, predicting=read.count(key, 1))


def _in_groups(
    read: ConfigReader, spec: ModelSpec, count: int, active: int, *, normalised: bool, shared: int, dense: int
) -> ExpertSpec:
    """Experts by DeepSeek's router: a sigmoid of each logit, a bias for the choice, groups, a scale. ModelError.

    count, active, normalised, shared, dense   the family's defaults: of all experts, of those that a token chooses, of
        dividing their weights by the sum, of experts for all tokens, and of plain layers before the others
    """
    size = read.whole("moe_intermediate_size", 1408)
    made = read_experts(
        read,
        count,
        active,
        size,
        normalised=read.flag("norm_topk_prob", normalised),
        shared_size=size * read.count("n_shared_experts", shared),
        shared_gate=False,
        dense=tuple(range(min(read.count("first_k_dense_replace", dense), spec.num_layers))),
        router="each",
        choice_bias=True,
        groups=read.whole("n_group", 1),
        active_groups=read.whole("topk_group", 1),
        scale=read.number("routed_scaling_factor", 1.0),
    )
    size = read.divide("n_routed_experts", made.count, "n_group", made.groups)
    if made.active_groups > made.groups or (made.groups > 1 and size < 2):
        raise read.error("topk_group", f"at most n_group, {made.groups}, whose groups have two experts at least")
    if made.active > made.active_groups * size:
        needed = f"at most the {made.active_groups * size} of {made.active_groups} groups"
        raise read.error("num_experts_per_tok", needed)
    return made


def _dots1(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    experts = _in_groups(read, spec, 128, 6, normalised=False, shared=2, dense=0)
    window, first = read.whole_or_null("sliding_window", 4096), read.count("max_window_layers", 62)
    return by_layer(_with(spec, read, experts), read, window, [layer >= first for layer in range(spec.num_layers)])


def _glm_filled(read: ConfigReader) -> ConfigReader:
    """Without head_dim heads are as wide as hidden_size has it; the default sizes make no whole number, and get 128."""
    if "hidden_size" not in read:
        return read
    return read.filled(head_dim=read.whole("hidden_size") // read.whole("num_attention_heads", 96))


def _glm(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    experts = _in_groups(read, spec, 128, 8, normalised=True, shared=1, dense=1)
    return switched(_with(spec, read, experts), qk_norm=read.flag("use_qk_norm", False))


_LEAST_SUM = 1e-6
_ERNIE_CHOICES = ("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias")


def _ernie(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.refuse(["use_bias"])
    if read.number("moe_norm_min", 1e-12) > _LEAST_SUM:
        raise read.error("moe_norm_min", f"at most {_LEAST_SUM:g}, which no sum of weights is below")
    size, layers = read.whole("moe_intermediate_size", 1536), range(spec.num_layers)
    # Both bounds are layers; -1 stands for the last.
    first, step = read.count("moe_layer_start_index", 1), read.whole("moe_layer_interval", 1)
    ends = read.values().get("moe_layer_end_index", -1)
    last = spec.num_layers - 1 if ends == -1 else read.count("moe_layer_end_index")
    experts = read_experts(
        read,
        64,
        6,
        size,
        choice_bias=True,
        shared_size=size * read.count("moe_num_shared_experts", 2),
        shared_gate=False,
        dense=tuple(layer for layer in layers if (layer + 1) % step or not first <= layer <= last),
    )
    return switched(spec, experts=experts)


def _ernie_names(spec: ModelSpec) -> Names:
    count = required(spec.arch.experts, "the model has no experts").count
    choices = tuple(Stored(choice, rows=count, shape=(1, count)) for choice in _ERNIE_CHOICES)
    return pairs_apart(spec, mixture_names(spec, ({**_SHARED, "mlp.choice": choices},)))


_HUNYUAN_OLD = {
    "mlp.router": "mlp.router.gate",
    "mlp.choice": "mlp.expert_bias",
    **{f"mlp.shared.{part}": f"mlp.shared_mlp.{part}_proj" for part in ("up", "gate", "down")},
}


def _hunyuan(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.refuse(["mlp_bias"])
    dense = [layer == 0 for layer in range(spec.num_layers)]
    if "mlp_layer_types" in read:
        dense = list(read.words("mlp_layer_types", spec.num_layers, {"dense": True, "sparse": False}))
    size = read.whole("moe_intermediate_size", 1536)
    experts = read_experts(
        read,
        192,
        8,
        size,
        router="each",
        choice_bias=True,
        scale=read.number("router_scaling_factor", 2.826),
        # In transformers the MLP of no experts is as large as those of dense layers.
        shared_size=size * read.count("num_shared_experts", 1) or spec.ffn_size,
        shared_gate=False,
        dense=tuple(layer for layer, it_is in enumerate(dense) if it_is),
    )
    return _with(spec, read, experts)


def _minimax_rotary(read: ConfigReader, head_dim: int, positions: int) -> RotarySpec:
    share = read.whole("rotary_dim") / read.whole("head_dim", 128) if "rotary_dim" in read else 1.0
    return read_rotary(read, head_dim, positions, theta=5e6, share=share)


def _minimax(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.choice("scoring_func", "sigmoid", {"sigmoid": None})
    read.choice("qk_norm_type", "per_layer", {"per_layer": None})
    read.refuse(["shared_intermediate_size"])
    return _with(spec, read, read_experts(read, 256, 8, spec.ffn_size, router="each", choice_bias=True))


_MINIMAX_OLD = {**EXPERTS, **NUMBERED, "mlp.choice": "block_sparse_moe.e_score_correction_bias"}
FAMILIES = (
    LlamaLike(
        "dots1",
        experts=True,
        switches={"qk_norm": True},
        more=_dots1,
        checkpoint_names=partial(mixture_names, tables=(_GROUPED,)),
    ),
    LlamaLike(
        "ernie4_5_moe",
        experts=True,
        rotary=partial(read_rotary, theta=5e5),
        more=_ernie,
        checkpoint_names=_ernie_names,
        ignored=(*IGNORED, r"\bmtp_"),
    ),
    LlamaLike(
        "glm4_moe",
        experts=True,
        filled=_glm_filled,
        rotary=partial(read_rotary, share=0.5),
        switches={"output_bias": False},
        more=_glm,
        checkpoint_names=partial(mixture_names, tables=(_GROUPED,)),
    ),
    LlamaLike(
        "hy_v3",
        experts=True,
        rotary=partial(read_rotary, theta=11158840.0),
        switches={"qk_norm": True},
        more=_hunyuan,
        checkpoint_names=partial(mixture_names, tables=({**_SHARED, **_HUNYUAN_OLD}, {**_SHARED, **_CHOICE})),
    ),
    LlamaLike(
        "minimax_m2",
        experts=True,
        rotary=_minimax_rotary,
        switches={"qk_norm": True, "qk_norm_joint": True},
        more=_minimax,
        checkpoint_names=partial(mixture_names, tables=(_MINIMAX_OLD, {**EXPERTS, **_CHOICE})),
    ),
)
