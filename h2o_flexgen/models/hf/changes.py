"""Forwards that replace those of single modules of transformers: experts, routers and attention that do not call the
interfaces, by which alone the engine's take their place."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations import moe

from h2o_flexgen.kernels.layers import linear
from h2o_flexgen.models.hf.attention import NAME, Call, NotUnderstood, attention, current, wide
from h2o_flexgen.models.hf.experts import ExpertPart, Routing, tell_form


def adapt(model: nn.Module, alone: bool) -> None:
    """From now on experts are asked for where ours can answer, and positions are those of packed tokens.

    alone: attention stays the modules' own.
    """
    changes = CHANGES if alone else CHANGES | OWN
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if any(by_length(str(kind)) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            # Within `record.context` these angles are all; transformers would look for the longest row of a batch.
            module.forward = partial(inspect.unwrap(type(module).forward), module)
        change = changes.get(type(module).__name__)
        if change is not None:
            change(module)


def by_length(kind: str) -> bool:
    """Whether angles of this kind are others where a sequence is longer than the model was trained for."""
    return "dynamic" in kind or kind == "longrope"


def _phimoe_angles(module: Any) -> None:
    """The angles of sequences within the context, scaled as PhiMoE scales them."""
    rope = module.config.rope_parameters
    if module.rope_type != "default":
        module.config = copy(module.config)
        module.config.rope_parameters = {**rope, "rope_type": "default"}
        module.rope_init_fn = lambda _: (module.inv_freq, rope["short_mscale"])


def _forward(by: Callable[..., Any]) -> Callable[[Any], None]:
    """A change of nothing but the forward."""
    return lambda module: setattr(module, "forward", partial(by, module))


def _given(**always: Any) -> Callable[[Any], None]:
    """A change of nothing but some of what its own forward is given."""

    def change(module: Any) -> None:
        forward = module.forward
        module.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, **always})

    return change


def _llama4_experts(module: Any) -> None:
    module.has_gate, module.is_transposed, module.is_concatenated, module.has_bias = True, True, True, False
    module._apply_gate = partial(moe._default_apply_gate, module)


def _llama4_forward(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4 weighs what experts are given, not what they make of it."""
    x = hidden_states.reshape(-1, module.hidden_dim)
    scores, logits = module.router(x)
    shares, experts = scores.topk(module.top_k, dim=-1)
    weighed = (x.unsqueeze(1) * shares.unsqueeze(2)).flatten(0, 1)
    chosen = experts.reshape(-1, 1)
    made = current().route(Routing(module.experts, weighed, chosen, torch.ones_like(chosen, dtype=x.dtype)))
    out = module.shared_expert(x)
    return out + made.to(x.dtype).unflatten(0, (-1, module.top_k)).sum(1), logits


def _llama4_attention(module: Any) -> None:
    """Queries of layers that turn nothing grow with their positions, which it would take from the cache."""
    if module.attn_temperature_tuning and not module.use_rope:
        module.attn_temperature_tuning = False
        module.query_scale = partial(_temperature, module.floor_scale, module.attn_scale)


def _temperature(floor: float, scale: float, positions: Tensor) -> Tensor:
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * scale + 1.0


PAIRS = f"{NAME}_pairs"
"""Of attention that each head does twice, over the values of two heads."""


def _pairs(module: Any) -> None:
    if module.config._attn_implementation == NAME:
        module.config = copy(module.config)
        module.config._attn_implementation = PAIRS


def _attention_of_pairs(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **others: Any
) -> tuple[Tensor, None]:
    """As `attention`, of DiffLlama: it attends with the same queries and keys to the first half of the value heads, and
    then to the second. KV heads i and i + n / 2 are made one of twice the size, both halves of whose values are mixed
    at once; of its queries each looks at one half of the keys."""
    run = current()
    if run.cache.given is None:
        second: Tensor = module.second
        del module.second
        return second, None
    layer, own_k, own_v = run.cache.given
    if key is not own_k or own_v.shape[1] % 2 or value.shape != own_v.shape:
        raise NotUnderstood(f"{type(module).__name__} attends to other keys or values than its cache was given")
    k, v = (torch.cat(each.chunk(2, 1), -1) for each in (own_k, own_v))
    heads, dim = k.shape[1], query.shape[-1]
    first, last = query.unflatten(1, (2, heads, -1)).unbind(1)
    pad = nn.functional.pad
    q = torch.cat([pad(first, (0, dim)), pad(last, (dim, 0))], 2).flatten(1, 2)
    run.cache.given = layer, k, v
    mixed, _ = attention(module, q, k, v, *args, **others)
    one, module.second = mixed.unflatten(2, (heads, 2, -1)).transpose(2, 3).flatten(2, 4).chunk(2, -1)
    return one, None


def _dbrx_experts(module: Any) -> None:
    """Experts are rows of matrices; in all three a row, not a column, is one of the numbers between projections."""
    ffn, hidden = module.ffn_hidden_size, module.hidden_size
    keys = (("up", "v1"), ("gate", "w1"))
    wide = [ExpertPart(f"{name}.weight", f"mlp.{key}", (ffn, hidden), 0, ffn) for name, key in keys]
    down = ExpertPart("down.weight", "mlp.w2", (hidden, ffn), 0, ffn, transposed=True)
    tell_form(module, module.mlp.activation_fn, module.num_experts, (ffn, hidden), [*wide, down])
    module.forward = partial(_dbrx_forward, module)


def _dbrx_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    x = hidden_states.reshape(-1, module.hidden_size)
    made = current().route(Routing(module, x, top_k_index, top_k_weights))
    return made.to(x.dtype).view(hidden_states.shape)


def _jetmoe_route(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """x (T, H) -> experts (T, k) and their shares (T, k)."""
    logits, experts = module.layer(x).float().topk(module.top_k, dim=1)
    return experts, logits.softmax(1).type_as(x)


def _gate_up_down(wide: str, down: str, ffn: int, hidden: int) -> list[ExpertPart]:
    """Of experts with two tensors, the first of which has all of the gate, then all of up."""
    sizes = (ffn, hidden)
    return [
        ExpertPart("up.weight", wide, sizes, ffn, 2 * ffn),
        ExpertPart("gate.weight", wide, sizes, 0, 2 * ffn),
        ExpertPart("down.weight", down, (hidden, ffn), 0, hidden),
    ]


def _jetmoe_mixture(module: Any) -> None:
    ffn, hidden = module.hidden_size, module.input_size
    parts = _gate_up_down("input_linear.weight", "output_linear.weight", ffn, hidden)
    tell_form(module, module.activation, module.router.num_experts, (ffn, hidden), parts)
    module.forward = partial(_jetmoe_forward, module)


def _jetmoe_forward(module: Any, layer_input: Tensor) -> Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    made = current().route(Routing(module, x, *module.router(x)))
    return (made.to(x.dtype) + module.bias).view(layer_input.shape)


REPEATED = f"{NAME}_repeated"
"""Of attention whose keys and values are repeated for heads that are in our order already."""


def _attention_of_repeated(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **others: Any
) -> tuple[Tensor, None]:
    given = current().cache.given
    if given is not None:
        _, key, value = given
    return attention(module, query, key, value, *args, **others)


def _jetmoe_attention(module: Any) -> None:
    """Each token's experts make its queries, of which there are as many for each key, and mix what these have found.
    All of them are read, with the other weights of the layer."""
    experts, heads = module.experts, 0
    if module.config._attn_implementation == NAME:
        module.config, heads = copy(module.config), module.num_key_value_heads
        module.config._attn_implementation = REPEATED
    experts.map, experts.reduce = partial(_jetmoe_queries, experts, heads), partial(_jetmoe_mixed, experts, heads)
    for each in (experts.input_linear, experts.output_linear):
        each.forward = partial(_jetmoe_products, each)


def _jetmoe_queries(module: Any, heads: int, layer_input: Tensor) -> tuple[Tensor, None, tuple[Tensor, Tensor]]:
    """x (1, T, H) -> queries (1, T, k, heads * d). `heads`: of keys, whose queries are then side by side, as our
    attention has them; 0: they are left where they are."""
    x = layer_input.reshape(-1, layer_input.shape[-1])
    experts, shares = module.router(x)
    queries = module.input_linear(x.repeat_interleave(module.top_k, 0), experts.flatten())
    queries = queries.view(len(x), module.top_k, -1)
    queries = _turned(queries, module.top_k, heads) if heads else queries
    return queries[None], None, (experts, shares)


def _jetmoe_mixed(module: Any, heads: int, layer_input: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
    """Results of attention (1, T, k, heads * d), with the `chosen` experts and their shares -> (1, T, H)."""
    experts, shares = chosen
    found = layer_input[0]
    found = _turned(found, heads, module.top_k) if heads else found
    made = module.output_linear(found.flatten(0, 1), experts.flatten()) * shares.flatten()[:, None]
    return (made.view(len(experts), module.top_k, -1).sum(1) + module.bias)[None]


def _jetmoe_products(module: Any, x: Tensor, experts: Tensor) -> Tensor:
    """x (N, in) by the expert of each row, of experts (N,) -> (N, out)."""
    out = x.new_empty(len(x), module.output_size)
    for expert in () if x.is_meta else experts.unique().tolist():
        rows = (experts == expert).nonzero()[:, 0]
        out[rows] = linear(x[rows], module.weight[expert])
    return out


def _turned(x: Tensor, first: int, second: int) -> Tensor:
    """Heads in the order [first][second] (T, ...) in that of [second][first], in the same shape."""
    return x.reshape(len(x), first, second, -1).transpose(1, 2).reshape(x.shape)


NOBODY = -1
"""Chosen instead of LongCat-Flash's experts without weights (arXiv 2509.01322), which give back what they are given."""


class _Classifier(nn.Linear):
    """A router's projection: in float32, whatever its matrix is kept in, which is none of a product's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight.float())


def _longcat_router(module: Any) -> None:
    """Its projection is called, and not its matrix taken, so that it is seen whose that is."""
    if module.classifier.bias is not None:
        raise NotUnderstood(f"{type(module).__name__} has a bias, which transformers leaves out")
    weight = module.classifier.weight
    module.classifier = _Classifier(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.classifier.weight = weight
    module.forward = partial(_longcat_route, module)


def _longcat_route(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x (1, T, H) -> logits (T, experts), the shares of those that are chosen (T, k), and their numbers (T, k)."""
    logits = module.classifier(hidden_states.reshape(-1, module.hidden_dim))
    scores = logits.softmax(-1)
    chosen = module.get_topk_indices(scores)
    return logits, scores.gather(1, chosen) * module.routed_scaling_factor, chosen


def _longcat_experts(module: Any) -> None:
    """The wide matrices have rows for all experts, those back only for such as have weights: these come first."""
    ffn, hidden, count = module.intermediate_size, module.hidden_size, module.num_routed_experts
    if not count:
        raise NotUnderstood(f"{type(module).__name__} has no experts with weights")
    parts = _gate_up_down("gate_up_proj", "down_proj", ffn, hidden)
    tell_form(module, module.act_fn, count, (ffn, hidden), parts)
    module.forward = partial(_longcat_forward, module)


def _longcat_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """x (T, H), experts (T, k) and their shares (T, k) -> (T, H)."""
    without = top_k_index >= module.num_routed_experts
    chosen = top_k_index.masked_fill(without, NOBODY)
    made = current().route(Routing(module, hidden_states, chosen, top_k_weights)).to(hidden_states.dtype)
    kept = top_k_weights.masked_fill(~without, 0.0).sum(1, keepdim=True)
    return made + (hidden_states * kept).to(hidden_states.dtype)


CHANGES: dict[str, Callable[[Any], None]] = {
    "DbrxExperts": _dbrx_experts,
    "DiffLlamaAttention": _pairs,
    "JetMoeAttention": _jetmoe_attention,
    "JetMoeMoE": _jetmoe_mixture,
    "JetMoeTopKGating": _forward(_jetmoe_route),
    "Llama4TextAttention": _llama4_attention,
    "Llama4TextExperts": _llama4_experts,
    "Llama4TextMoe": _forward(_llama4_forward),
    "LongcatFlashExperts": _longcat_experts,
    "LongcatFlashTopkRouter": _longcat_router,
    "PhimoeRotaryEmbedding": _phimoe_angles,
    # all tokens go through it anew in each step; a lone one would go on with the states of another sequence
    "RecurrentGemmaRecurrentBlock": _given(use_cache=False),
}
"""By the names of modules, what is done to them."""

# Attention that is a module's own. ALiBi (Press et al. 2022, arXiv 2108.12409) adds to the logit of a key its position
# times a slope of the head, as far as a softmax can tell. That is a product of further numbers of query and key, so
# that caches, budgets and kernels need not know of it. Each of them is exact in bfloat16.

_CLASSES = {"falcon": "FALCON_ATTENTION_CLASSES", "gpt_neo": "GPT_NEO_ATTENTION_CLASSES"}
_NEAR, _MULTIPLE = 256, 16
"""Positions that bfloat16 can count; numbers of a head are a multiple, for kernels."""


def register(kind: str) -> None:
    """Before a model of this type is made: its attention may be ours."""
    if kind in _CLASSES:
        classes = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), _CLASSES[kind])
        classes[NAME] = classes["eager"]


class Biases(NamedTuple):
    """Numbers of queries, `asked` (heads, n), and of keys, `held` (T, n), whose products are biases of logits before
    these are scaled."""

    asked: Tensor
    held: Tensor

    @classmethod
    def of(cls, slopes: Tensor, dtype: torch.dtype) -> Biases:
        """Slopes (heads,) float32 times positions, exactly: positions are two numbers, and slopes are sums of three."""
        positions, parts, rest = current().positions, list[Tensor](), slopes.to(current().positions.device)
        for _ in range(3):
            parts.append(rest.to(dtype))
            rest = rest - parts[-1]
        asked = torch.stack([part * times for part in parts for times in (_NEAR, 1)], -1)
        return cls(asked, torch.stack([positions // _NEAR, positions % _NEAR] * len(parts), -1))


def _attend(
    layer: int, qkv: Sequence[Tensor], scale: float, *, window: int | None = None, biases: Biases | None = None
) -> Tensor:
    """q (1, T, heads, d), k, v (1, T, kv_heads, d) -> (1, T, heads * d)."""
    q, k, v = (each[0] for each in qkv)
    dim = v.shape[-1]
    if biases is not None:
        width = dim + biases.held.shape[1]
        width += -width % _MULTIPLE
        asked, held = biases.asked.to(q).unsqueeze(0), biases.held.to(k).unsqueeze(1)
        q = wide(torch.cat([q, asked.expand(*q.shape[:2], -1)], -1), width)
        k = wide(torch.cat([k, held.expand(*k.shape[:2], -1)], -1), width)
        v = wide(v, width)
    mixed = current().attend(Call(layer, q, k, v, scale, window, by_distance=biases is not None))
    return mixed[..., :dim].flatten(1).unsqueeze(0)


def _slopes(module: Any) -> Tensor:
    """As transformers makes them of positions 0 and 1."""
    made = sys.modules[type(module).__module__].build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)
    return made[:, 0, 1]


def _rotated(module: Any, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """q, k (1, T, heads, d), as the module's file turns them with heads first."""
    turn = sys.modules[type(module).__module__].apply_rotary_pos_emb
    q, k = turn(q.transpose(1, 2), k.transpose(1, 2), *angles)
    return q.transpose(1, 2), k.transpose(1, 2)


def _falcon(module: Any, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
    fused = module.query_key_value(hidden_states)
    keys = module.num_kv_heads
    if module.new_decoder_architecture or module.multi_query:  # a KV head's queries, then its key and value
        fused = fused.unflatten(-1, (keys, -1, module.head_dim))
        q, k, v = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
    else:
        q, k, v = fused.unflatten(-1, (keys, 3, module.head_dim)).unbind(-2)
    biases = None
    if module.config.alibi:  # of positions in bfloat16, times slopes that round nothing where they are powers of two
        if module.num_heads & (module.num_heads - 1):
            raise NotUnderstood(f"ALiBi of {module.num_heads} heads")
        slopes, positions = _slopes(module).to(q.device), current().positions.bfloat16()
        biases = Biases(slopes.unsqueeze(1), positions.unsqueeze(1))
    else:
        q, k = _rotated(module, q, k, given["position_embeddings"])
    return module.dense(_attend(module.layer_idx, (q, k, v), module.inv_norm_factor, biases=biases)), None


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
    fused = module.query_key_value(hidden_states).unflatten(-1, (module.num_heads, 3, module.head_dim))
    biases = Biases.of(_slopes(module) / module.inv_norm_factor, fused.dtype)
    mixed = _attend(module.layer_idx, fused.unbind(-2), module.inv_norm_factor, biases=biases)
    return module.dense(mixed) + residual, None


def _mpt(module: Any, hidden_states: Tensor, position_bias: Tensor, **_: Any) -> tuple[Tensor, None]:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    slopes = (position_bias[:, 0, -1] - position_bias[:, 0, -2]).float()
    biases = Biases.of(slopes / module.softmax_scale, fused.dtype)
    qkv = fused.unflatten(-1, (3, module.n_heads, module.head_dim)).unbind(2)
    return module.out_proj(_attend(module.layer_idx, qkv, module.softmax_scale, biases=biases)), None


def _apart(module: Any, hidden_states: Tensor) -> list[Tensor]:
    """Queries, keys and values (1, T, heads, d) of three projections."""
    each = (module.q_proj, module.k_proj, module.v_proj)
    return [project(hidden_states).unflatten(-1, (module.num_heads, module.head_dim)) for project in each]


def _gpt_neo(module: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    window = module.config.window_size if module.attention_type == "local" else None
    return module.out_proj(_attend(module.layer_id, _apart(module, hidden_states), 1.0, window=window)), None


def _xglm(module: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    return module.out_proj(_attend(module.layer_idx, _apart(module, hidden_states), module.scaling)), None


def _attention(by: Callable[..., Any]) -> Callable[[Any], None]:
    """A change of the forward, without a mask of the whole context where a module keeps one."""

    def change(module: Any) -> None:
        module.forward = partial(by, module)
        module._buffers.pop("bias", None)

    return change


OWN: dict[str, Callable[[Any], None]] = {
    "BloomAttention": _attention(_bloom),
    "FalconAttention": _attention(_falcon),
    "FalconModel": lambda module: setattr(module, "use_alibi", False),  # its masks have ALiBi's biases in them
    "GPTNeoSelfAttention": _attention(_gpt_neo),
    "MptAttention": _attention(_mpt),
    "MptModel": _given(attention_mask=torch.zeros(1, 1, 1, 1)),  # it changes its mask's dtype: there must be one
    "XGLMAttention": _attention(_xglm),
}
"""By the names of modules, what is done to them where attention is ours."""


AttentionInterface.register(PAIRS, _attention_of_pairs)
AttentionInterface.register(REPEATED, _attention_of_repeated)
