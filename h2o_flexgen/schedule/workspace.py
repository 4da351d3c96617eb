"""Upper bounds, in bytes, of the memory that a unit needs while it computes, beside weights, caches and hidden states.

Symbols: see `schedule.footprint`. Attention on the host: see `engine.execution.host_attention`.
"""

from __future__ import annotations

from h2o_flexgen.config.eviction import LAST_QUERIES, ROW_LOGITS
from h2o_flexgen.config.model.modules import NOTHING, Activations, ModuleSpec
from h2o_flexgen.config.model.packing import EXPANDED
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import PAGE, TENSOR_ALIGN, WeightGroup, dtype_bytes, round_up
from h2o_flexgen.config.offload import Kernels
from h2o_flexgen.schedule.request import BlockShape

HOST_ATTENTION = "cpu attention"
"""Name of the resource in timelines."""
FILL_BUFFERS = 2
"""Buffers on either side for prompts copied into caches in host memory: one arriving, one being filled in."""
_OUTPUT = ("o.", "norm.", "post_norm.")

_MIN_CHUNK = 16  # queries whose logits torch's prompt kernel has alive at once, at least
_NATIVE_ROWS = 48  # queries, of all heads that share a KV head, in a block of the native prompt kernel
_NATIVE_PARTS = 64  # partial column sums: of twice the tasks that it divides few long prompts into
_PATH_LEVELS = 3  # prefixes inside prefixes, beside the parts of a long prompt


def positions(block: BlockShape) -> int:
    """Token ids, positions and lengths, 32 T, and for each kind of rotation cosines and sines (T, D); of all GPU
    batches."""
    angles = 2 * sum(block.rotary_dims) * block.size
    return block.policy.num_gpu_batches * block.tokens * (32 + angles)


def workspace(block: BlockShape) -> int:
    """Activations of the unit that needs most, beside hidden states, which are updated in place.

    embed      four (T, max(E, H)); then at most four float32 (T, D) of angles
    norms      input, output and residual (t, H), queries and keys (t, Q + G) twice, one of them in float32, twice
    attention  `_attention_token`; column sums (b, kv_heads, P) float32 and (kv_heads, P) for each part of a prompt that
               others follow, if anything is evicted; `_looked_at`; the larger of `_prompt_kernel` and `_fill`
    decode     `_attention_token` of b tokens, and `decode_attention`
    mlp        norm, output and post-norm (t, H), and (t, F) before and after the activation, with gate and up (t, 2 F)
    experts    `_mixture`
    modules    `_in_modules`
    head       two (b, hidden_width), logits (b, V) in the dtype and in float32, a sampler's sorted copies of one row
    """
    spec, size, tokens, rows = block.spec, block.size, block.chunk, block.rows
    query, kv, token = block.query_width, block.kv_width, _attention_token(block)
    levels = _PATH_LEVELS + block.prompt // block.policy.chunk
    sums = 4 * (block.heads + levels * spec.num_kv_heads) * block.prompt if block.evicts else 0
    wide, modules = 3 if spec.arch.gated_mlp else 2, _modules(spec)
    return max(
        block.tokens * 4 * max(spec.embed_dim, spec.hidden_size) * size,
        block.tokens * 16 * max(block.rotary_dims, default=0),
        tokens * ((3 * spec.hidden_size + 2 * (query + kv)) * size + 8 * max(spec.hidden_size, query)),
        tokens * token + sums + _looked_at(block) + max(_prompt_kernel(block), _fill(block)),
        rows * token + decode_attention(block),
        tokens * (3 * spec.hidden_size + wide * spec.ffn_size) * size,
        _mixture(block, block.policy.num_gpu_batches * block.tokens, tokens),
        _in_modules(block, modules),
        rows * max(2 * spec.hidden_width + spec.vocab_size, modules.head) * size + (4 * rows + 32) * spec.vocab_size,
    )


def _modules(spec: ModelSpec) -> Activations:
    return spec.activations if isinstance(spec, ModuleSpec) else NOTHING


def _in_modules(block: BlockShape, modules: Activations) -> int:
    """A unit of transformers' modules, by `Activations`. Of one layer the states after each part of a prompt that
    others follow, and three copies of a step's where torch's functions make them anew instead of our kernels in
    place."""
    ours = block.request.kernels is Kernels.CPU
    growing, fixed = modules.mixing if ours else modules.in_torch
    layers = (block.spec.states_of(layer) for layer in range(block.spec.num_layers))
    states = max((sum(state.nbytes(block.dtype) for state in each) for each in layers), default=0)
    parts = block.follows * (_PATH_LEVELS + block.prompt // block.policy.chunk)
    times = parts + (0 if ours else 3 * block.rows)
    return (block.chunk * (modules.working + growing) + fixed) * block.size + times * states


def _looked_at(block: BlockShape) -> int:
    """`cache.eviction.base.attention_rows`, for policies that look at m queries of the prompt: queries (m, Q), also of
    each part that others follow, and twice in float32; K and V of one row joined, also in float32, (P, 2 G); three
    float32 of the probabilities."""
    spec, looks = block.spec, block.request.eviction.split.queries
    if looks == "none" or not block.evicts:
        return 0
    count = block.prompt if looks == "all" else min(block.prompt, max(LAST_QUERIES, -(-block.prompt // 10)))
    levels = _PATH_LEVELS + block.prompt // block.policy.chunk
    heads = spec.num_heads * max(block.prompt, ROW_LOGITS // spec.num_heads)
    queries = count * block.query_width * (levels * block.size + 8)
    pieces = block.prompt * 2 * block.kv_width * (block.size + 4)
    return queries + pieces + 12 * heads


def _mixture(block: BlockShape, routed: int, tokens: int) -> int:
    """A mixture of experts. For the n `routed` tokens of a block: inputs, outputs and a shared expert's results, (n, H)
    each, and 56 bytes for each choice. For the t tokens that go through an expert at once: three (t, H) and (t, 3 F).
    """
    spec, experts = block.spec, block.spec.arch.experts
    if experts is None:
        return 0
    wide = 3 * max(experts.ffn_size, experts.shared_size)
    states = 3 if experts.shared_size else 2
    many = routed * (states * spec.hidden_size * block.size + 56 * experts.active + 8 * experts.count)
    return many + tokens * (3 * spec.hidden_size + wide) * block.size


def _attention_token(block: BlockShape) -> int:
    """Bytes of a token in attention beside the kernel, with c copies of queries and keys (projected, normed, rotated):
    norm, output and post-norm (H), queries (c Q), keys (c G), keys and values for the kernel (2 G), its output and that
    of all segments (2 Q)."""
    spec, query, kv = block.spec, block.query_width, block.kv_width
    copies = spec.arch.qk_norm + bool(block.rotary_dims)
    own = 3 * spec.hidden_size + (3 + copies) * query + (2 + copies) * kv
    return max(own, _modules(spec).attending + 2 * (query + kv)) * block.size


def recorded(block: BlockShape) -> int:
    """Recorded decode steps (`schedule.tasks`): the (b, ...) activations of `workspace`, which the recordings of all
    GPU batches share, with scores and free slots (b, kv_heads, C), and for each of them logits (b, V) float32."""
    spec, size, rows = block.spec, block.size, block.rows
    wide = 3 if spec.arch.gated_mlp else 2
    activations = max(
        rows * 4 * max(spec.embed_dim, spec.hidden_size) * size,
        rows * _attention_token(block) + 12 * block.heads * block.most_slots,
        rows * (3 * spec.hidden_size + wide * spec.ffn_size) * size,
        rows * (2 * spec.hidden_width + spec.vocab_size) * size,
    )
    return activations + 4 * block.policy.num_gpu_batches * rows * spec.vocab_size


def prompt_keys(block: BlockShape) -> int:
    """K and V of one layer: of the t tokens of a chunk, and of the prompt parts that it follows, as segments and
    joined, 2 P tokens; with rolling positions their keys unrotated as well, half of another 2 P."""
    tokens = block.chunk + (block.follows * (3 if block.rolling else 2)) * block.prompt
    return tokens * block.spec.computed_kv_bytes(block.dtype)


def decode_attention(block: BlockShape) -> int:
    """One step of one GPU batch in the layer with most slots C: logits and softmax (b, heads, C) float32, their cast,
    and ranks (b, kv_heads, C) int64. With rolling positions: rotated keys, cosines and sines (b, kv_heads, C, head_dim)
    and twice half of it, ranks, and the table of angles. Of packed caches: K and V expanded at once, float32 and
    codes."""
    spec, slots, size = block.spec, block.most_slots, block.size
    rolled = 0
    if block.rolling:
        rolled = block.heads * slots * (2 * spec.head_dim * size + 8) + 6 * slots * sum(block.rotary_dims) * 4
    expanded = 0
    if spec.cache_packings is not None:
        row = slots * block.kv_width
        expanded = min(block.rows * row, max(row, EXPANDED)) * (2 * size + 16)
    return block.rows * slots * (spec.num_heads * (8 + size) + 16 * spec.num_kv_heads) + rolled + expanded


def on_cpu_beside_gpu(block: BlockShape) -> int:
    """On cpu, if only attention over caches there is computed on it: the larger of `decode_attention`, and K and V of
    t + P arriving prompt tokens with `_fill`."""
    arriving = (block.chunk + block.prompt) * block.spec.computed_kv_bytes(block.dtype)
    return max(decode_attention(block), arriving + _fill(block))


def _prompt_kernel(block: BlockShape) -> int:
    """Prompt attention by the kernel that needs most. torch's, chunk by chunk of queries: three float32 and the cast of
    at most `Kernels.logits` logits or _MIN_CHUNK rows of (heads, P), a mask of three bytes per query and key, and
    queries and output (m, Q) of the m queries, twice where they follow earlier keys."""
    spec, tokens, keys = block.spec, block.chunk, block.spec.num_heads * block.prompt
    most = block.request.kernels.logits
    logits = min(max(most, _MIN_CHUNK * keys), tokens * keys)
    queries = min(tokens, max(block.prompt, most // keys))
    width = (4 if block.follows else 2) * block.query_width * block.size
    in_torch = logits * (12 + block.size % 4) + 3 * logits // spec.num_heads + queries * width
    return max(in_torch, _native_worker(block), _on_gpu(block))


def _on_gpu(block: BlockShape) -> int:
    """Flash attention on a GPU, with column sums by Triton: six float32 per query and head; where queries follow
    earlier keys, queries and output (t, Q) again, and the weighted sum of both outputs in float32."""
    if block.request.kernels is not Kernels.TRITON:
        return 0
    return block.chunk * (24 * block.spec.num_heads + block.follows * block.query_width * (2 * block.size + 4))


def _native_worker(block: BlockShape) -> int:
    """One thread's scratch in the native bfloat16 kernel; more threads never take more than torch's logits would.

    In bfloat16 K and V of one head (P, 2 d), R queries (R, d) and the weights of 128 keys; in float32 logits (R, P +
    16), output (R, d), largest and sum (R, 2 x 16), column sums (P) and their parts.
    """
    if block.compute_tier != "cpu" or block.dtype != "bfloat16":
        return 0
    d, keys = block.spec.head_dim, round_up(block.prompt, 16)
    rows = round_up(max(_NATIVE_ROWS, block.spec.num_heads // block.spec.num_kv_heads), 6)
    packed = 4 * keys * d + rows * (2 * d + 2 * 128)
    return packed + 4 * rows * (keys + 16 + d + 32) + 4 * (1 + _NATIVE_PARTS) * keys + 64


def _fill(block: BlockShape) -> int:
    """Choosing from the prompt: ranks, four int64 (b, kv_heads, P); for K or V the candidates (P + 2 t, G) and the
    chosen (b, C, G). Also torch's packing of a part."""
    packing = 0 if block.spec.cache_packings is None else 20 * EXPANDED
    if not block.evicts:
        return packing
    chosen = block.prompt + 2 * block.chunk + block.rows * block.most_slots
    return 32 * block.heads * block.prompt + chosen * block.kv_width * block.size + packing


# ---- attention on the host


def is_output(name: str) -> bool:
    """Whether attention's second half, the output projection, may need the unit's tensor `name`."""
    return name.startswith(_OUTPUT)


def output_bytes(group: WeightGroup, dtype: str) -> int:
    """Bytes of a copy of an attention unit's output projection."""
    kept = [tensor for tensor in group.tensors if is_output(tensor.name.split(".", 3)[3])]
    return round_up(sum(round_up(tensor.nbytes(dtype), TENSOR_ALIGN) for tensor in kept), PAGE)


def query_bytes(spec: ModelSpec, rows: int, dtype: str) -> int:
    """Bytes of the queries, keys and values of `rows` in one layer, (rows, Q + 2 G)."""
    return rows * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * dtype_bytes(dtype)


def answer_bytes(spec: ModelSpec, rows: int, dtype: str) -> int:
    """Bytes of attention's output for `rows`, (rows, Q)."""
    return rows * spec.num_heads * spec.head_dim * dtype_bytes(dtype)


def prompt_bytes(spec: ModelSpec, dtype: str, rows: int, longest: int, chunk: int, *, sums: bool) -> int:
    """Bytes that are copied at once for caches of `rows` prompts of up to `longest` tokens: K and V of a chunk and of
    the tokens that it follows, and with `sums` float32 (rows, kv_heads, longest)."""
    tokens = min(chunk, rows * longest) + longest
    summed = 4 * rows * spec.num_kv_heads * longest if sums else 0
    return round_up(tokens * spec.computed_kv_bytes(dtype) + summed + 5 * TENSOR_ALIGN, PAGE)


def buffer_bytes(spec: ModelSpec, rows: int, dtype: str) -> int:
    """Bytes of one GPU batch's buffers for queries and answers, on either side."""
    return round_up(query_bytes(spec, rows, dtype), PAGE) + round_up(answer_bytes(spec, rows, dtype), PAGE)
