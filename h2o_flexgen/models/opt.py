"""OPT and Galactica (transformers' model_type "opt"): config.json to ModelSpec, and the names in their checkpoints.

No torch. Zhang et al., "OPT: Open Pre-trained Transformer Language Models", arXiv 2205.01068.
"""

from __future__ import annotations

from h2o_flexgen.config.model.arch import ArchSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.models.fields import ACTIVATIONS, ConfigReader
from h2o_flexgen.models.llama_like import IGNORED, LlamaLike
from h2o_flexgen.models.stored import named

_LAYER_PARTS = {
    "attn.norm": "self_attn_layer_norm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.out_proj",
    "mlp.norm": "final_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
}

_OUTER_NAMES = {
    "embed.tokens": "embed_tokens.weight",
    "embed.positions": "embed_positions.weight",
    "embed.project_in": "project_in.weight",
    "head.project_out": "project_out.weight",
    "head.norm.weight": "final_layer_norm.weight",
    "head.norm.bias": "final_layer_norm.bias",
}


class _Opt(LlamaLike):
    """With learned positions and layer norms; keys that are absent have OPTConfig's defaults."""

    def spec_from_config(self, read: ConfigReader) -> ModelSpec:
        hidden = read.whole("hidden_size", 768)
        heads = read.whole("num_attention_heads", 12)
        head_dim = read.divide("hidden_size", hidden, "num_attention_heads", heads)
        pre_norm = read.flag("do_layer_norm_before", True)
        biases = read.flag("enable_bias", True)
        return ModelSpec(
            name=read.name,
            vocab_size=read.whole("vocab_size", 50272),
            hidden_size=hidden,
            ffn_size=read.whole("ffn_dim", 3072),
            num_layers=read.whole("num_hidden_layers", 12),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            embed_dim=read.whole("word_embed_proj_dim", hidden),
            max_positions=read.whole("max_position_embeddings", 2048),
            arch=ArchSpec(
                family="opt",
                norm_affine=read.flag("layer_norm_elementwise_affine", True),
                pre_norm=pre_norm,
                # Only the first conversions of OPT lost the final norm; transformers marks them so.
                final_norm=pre_norm and not read.flag("_remove_final_layer_norm", False),
                activation=read.choice("activation_function", "relu", ACTIVATIONS),
                qkv_bias=biases,
                output_bias=biases,
                mlp_bias=biases,
                position_offset=2,
                tied_head=read.flag("tie_word_embeddings", True),
            ),
            dtype=read.dtype("float16"),
            **read.special_tokens(bos=2, eos=2, pad=1),
        )


FAMILIES = (
    _Opt(
        "opt",
        checkpoint_names=lambda spec: named(spec, ("model.decoder.", "decoder."), _OUTER_NAMES, _LAYER_PARTS),
        ignored=(*IGNORED, r"\.attention\.bias$", r"\.masked_bias$", r"(^|\.)decoder\.version$"),
    ),
)
