"""Attention over caches in host memory while a GPU computes other GPU batches: its name, and the bytes it takes.

A decode step of such a cache is in two halves. The first computes queries, keys and values, which go to the host; the
second takes the answer up, and is computed once somebody needs the GPU batch's hidden states. In between the host
attends, on a thread of its own, and the hidden states stay where they are. Prompts are brought into their caches on the
same thread, while the GPU goes on with the next ones.
"""

from __future__ import annotations

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import PAGE, TENSOR_ALIGN, WeightGroup, dtype_bytes, round_up

HOST_ATTENTION = "cpu attention"
"""The resource, beside "compute" and the links."""
FILL_BUFFERS = 2
"""Of prompts on their way into caches in host memory, on either side: one arriving, one filled in."""
_OUTPUT = ("o.", "norm.", "post_norm.")


def is_output(name: str) -> bool:
    """Whether the second half may need the tensor of an attention unit that is called `name` in it."""
    return name.startswith(_OUTPUT)


def output_bytes(group: WeightGroup, dtype: str) -> int:
    """Bytes of a copy of what the second half needs of an attention unit's weights."""
    kept = [tensor for tensor in group.tensors if is_output(tensor.name.split(".", 3)[3])]
    return round_up(sum(round_up(tensor.nbytes(dtype), TENSOR_ALIGN) for tensor in kept), PAGE)


def query_bytes(spec: ModelSpec, rows: int, dtype: str) -> int:
    """Bytes of the queries, keys and values of so many rows in one layer."""
    return rows * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * dtype_bytes(dtype)


def answer_bytes(spec: ModelSpec, rows: int, dtype: str) -> int:
    """Bytes of what attention makes of them."""
    return rows * spec.num_heads * spec.head_dim * dtype_bytes(dtype)


def prompt_bytes(spec: ModelSpec, dtype: str, rows: int, longest: int, chunk: int, *, sums: bool) -> int:
    """Bytes of what is filled at once into caches of `rows` prompts of up to `longest` tokens.

    K and V of a chunk and of what it follows, and perhaps a float32 for each row, KV head and token.
    """
    tokens = min(chunk, rows * longest) + longest
    summed = 4 * rows * spec.num_kv_heads * longest if sums else 0
    return round_up(tokens * spec.kv_bytes_per_token_and_layer(dtype) + summed + 5 * TENSOR_ALIGN, PAGE)


def buffer_bytes(spec: ModelSpec, rows: int, dtype: str) -> int:
    """Bytes of one GPU batch's buffers for both, on either side."""
    return round_up(query_bytes(spec, rows, dtype), PAGE) + round_up(answer_bytes(spec, rows, dtype), PAGE)
