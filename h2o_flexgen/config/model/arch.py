"""The kind of a decoder layer, apart from its sizes: the switches one decoder reads for all families. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Scaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RotarySpec:
    """Rotary position embedding (Su et al., arXiv 2104.09864), halves rotated against each other as transformers does.

    dim                 leading dimensions of each head that turn; less than head_dim is partial rotary
    theta               base of the wave lengths
    scaling             how it is stretched beyond `original_positions`, the context it was trained with
    factor              of the stretch
    attention_factor    multiplies cosines and sines (yarn, longrope)
    low_freq_factor, high_freq_factor                     llama3
    beta_fast, beta_slow, truncate                        yarn
    short_factors, long_factors (dim / 2 each)            longrope: for sequences within original_positions, and longer
    recomputed          whether all keys of a sequence have the angles of its present length: they are made anew when
                        it passes original_positions (longrope of Phi-3); else keys keep those that they were made with
    growth, grows_every queries at position p are multiplied by 1 + growth ln(1 + p // grows_every) (Llama 4); 0: by 1
    """

    dim: int
    theta: float = 10000.0
    scaling: Scaling = "none"
    factor: float = 1.0
    original_positions: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    recomputed: bool = False
    growth: float = 0.0
    grows_every: int = 0

    @property
    def by_length(self) -> bool:
        """Whether the angles depend on how long the sequence is, not on the position alone."""
        return self.scaling in ("dynamic", "longrope")


@dataclass(frozen=True)
class ExpertSpec:
    """A mixture of experts in the place of a layer's MLP (Shazeer et al., arXiv 1701.06538; gated as in Mixtral,
    arXiv 2401.04088): a router chooses `active` of `count` experts for each token and adds up their weighted results.

    ffn_size        between an expert's two projections
    router          scores are a softmax over all experts ("all"), or over the logits of the chosen ones ("chosen"), or
                    a sigmoid of each logit ("each"; DeepSeek-V3, arXiv 2412.19437)
    normalised      weights of the chosen ones are divided by their sum; without effect on a softmax over them
    choice_bias     a number per expert is added to its score for the choice alone, not to its weight
    groups, active_groups   experts in so many equal groups; the choice is among those of the groups whose two best
                    scores have the largest sums
    scale           multiplies the weights
    bias            of the router and of each projection of the experts (gpt-oss)
    clamp           gpt-oss: gate and up lie in one projection, row by row in turn; both are clamped to it, and the gate
                    is multiplied with (up + 1). None: as in a gated MLP
    own             what is between the projections, and behind them, is known to transformers' modules alone
    shared_size     of an MLP that every token goes through besides; 0: none
    shared_gate     its result is weighted by a gate of its own (Qwen2)
    dense           the layers that have a plain MLP instead
    """

    count: int
    active: int
    ffn_size: int
    router: Literal["all", "chosen", "each"] = "all"
    normalised: bool = True
    choice_bias: bool = False
    groups: int = 1
    active_groups: int = 1
    scale: float = 1.0
    bias: bool = False
    clamp: float | None = None
    own: bool = False
    shared_size: int = 0
    shared_gate: bool = True
    dense: tuple[int, ...] = ()


@dataclass(frozen=True)
class ArchSpec:
    """The kind of one decoder layer, apart from its sizes."""

    family: str
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    norm_affine: bool = True
    """The norms have a weight."""
    norm_bias: bool = True
    """And a bias, where they are layernorms; False: a weight alone (Cohere)."""
    norm_offset: float = 0.0
    """Added to every norm's weight: 1 where checkpoints hold the difference from it (Gemma)."""
    pre_norm: bool = True
    """False: the norm follows the residual addition, as in OPT-350m, or is left to `post_norms`."""
    post_norms: bool = False
    """Each half's output is normed before the residual addition: besides the norm before it (Gemma), or instead of it,
    where `pre_norm` is False (OLMo 2)."""
    final_norm: bool = True
    qk_norm: bool = False
    """Each head of q and of k is normed, before it is rotated (Qwen3, Gemma 3)."""
    qk_norm_joint: bool = False
    """All heads of q are normed as one vector, and so are those of k (OLMoE)."""
    clip_qkv: float | None = None
    """Queries, keys and values are clamped to it, either way, before they are rotated (OLMoE); None: not at all."""
    sinks: bool = False
    """Each head has a logit of its own in every softmax of attention, that of no token (gpt-oss)."""
    activation: Activation = "relu"
    gated_mlp: bool = False
    qkv_bias: bool = True
    output_bias: bool = True
    """Of the attention's output projection."""
    mlp_bias: bool = True
    parallel: bool = False
    """Both halves of a layer read its input, and their outputs are added to it together (GPT-NeoX)."""
    positions: Literal["learned", "rotary", "biases"] = "learned"
    position_offset: int = 0
    """Rows of the position table before that of position 0."""
    rotary: RotarySpec | None = None
    local_rotary: RotarySpec | None = None
    """Of the windowed layers, where it differs."""
    unrotated: tuple[int, ...] = ()
    """Layers that turn nothing: their keys do not know their positions (SmolLM3)."""
    window: int | None = None
    """Tokens that a query of a windowed layer sees, itself included."""
    window_layers: tuple[int, ...] | None = None
    """Which layers are windowed, if `window` is given; None: all."""
    own_windows: tuple[int | None, ...] = ()
    """The window of each layer, where they have several sizes; `window` is then the largest."""
    chunked: bool = False
    """Windows are chunks, one behind the other from the first token on: a query sees its own (Llama 4)."""
    attention_scale: float | None = None
    """Multiplies the logits of attention; None: head_dim ** -0.5."""
    attention_cap: float | None = None
    """c tanh(logit / c) is what a logit of attention counts (Gemma 2); None: the logit."""
    embed_scale: float = 1.0
    """Multiplies the token embeddings (Gemma)."""
    residual_scale: float = 1.0
    """Multiplies what each half adds (Granite)."""
    logit_scale: float = 1.0
    """Multiplies the logits (Granite)."""
    logit_cap: float | None = None
    """The same of the logits as `attention_cap` (Gemma 2)."""
    experts: ExpertSpec | None = None
    predicting: int = 0
    """Layers of the checkpoint behind the model's own, which predict more tokens at once and are not read."""
    tied_head: bool = True
    whole_ends: bool = False
    """All tokens of a prompt go through the last layer's second half, not its last alone (transformers' modules)."""
    nested: bool = False
    """Its checkpoint is that of a multimodal model, of which nothing else is read (Gemma 3)."""

    def experts_of(self, layer: int) -> ExpertSpec | None:
        """The experts of `layer`; None where it has a plain MLP."""
        return None if self.experts is None or layer in self.experts.dense else self.experts

    def window_of(self, layer: int) -> int | None:
        """Tokens that a query of `layer` sees, itself included; None: all of them."""
        if self.own_windows:
            return self.own_windows[layer]
        return self.window if self.window_layers is None or layer in self.window_layers else None

    def chunk_of(self, layer: int) -> int | None:
        """The tokens of a chunk, where `window_of` is that."""
        return self.window_of(layer) if self.chunked else None

    def rotary_of(self, layer: int) -> RotarySpec | None:
        """How `layer` rotates its queries and keys; None where it does not."""
        if layer in self.unrotated:
            return None
        local = self.local_rotary is not None and self.window_of(layer) is not None
        return self.local_rotary if local else self.rotary
