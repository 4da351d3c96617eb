"""Products, norms, gates and rotations of a decoder layer, in C for bfloat16 on a CPU, else by torch on any device.

Of float32 numbers products of few rows as well, where the processor has AVX2 alone. And the next tokens, the likeliest
of all or of those that a grammar allows, or drawn ones, in C on a CPU: torch takes several passes.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from h2o_flexgen.huge import LARGE, LEAST
from h2o_flexgen.kernels.native import function, has_matrix_unit, library, structure
from h2o_flexgen.kernels.native.tiers import has_only_avx2, torch_widens
from h2o_flexgen.kernels.packed import PackedWeight, Weight
from h2o_flexgen.kernels.triton_available import serves

MOST_ROWS = 16 if has_matrix_unit() else 1 << 62
"""Beyond so many rows torch multiplies with the processor's matrix unit (AMX), which the kernels in C do not use: its
peak is many times theirs. Not measured."""

_EXPANDED = 1 << 20  # numbers of a packed weight that torch is given at once

_WIDENED = 4  # rows from which on widening weights is worth it, where torch multiplies bfloat16 numbers one by one

_EXACTLY = 2  # in float32, as product.h counts ways

_WIDE_ROWS = 32 if has_only_avx2() else 0
"""Up to so many rows of float32 numbers C is faster than torch: two cores of a Zen 3, 1.5 to 3.3 times at 2 to 4 rows,
1.1 to 2.9 at 8, 1.2 to 1.8 at 32, from 64 on 0.7 to 1.3."""

_MANY = LEAST // 4  # numbers that may be large

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "silu": lambda x: F.silu(x, inplace=True),
}
"""All in place: the input is the output of a projection, which nothing else reads."""
NATIVE_GATES = {"silu": False, "gelu_tanh": True}
"""Activations of gates that C knows, and whether it is GELU by tanh."""
_Draw, _Logprobs = structure("draw.c", "Draw"), structure("draw.c", "Logprobs")
SOME_OF_EQUAL = -2
"""In place of a token: of equal scores top_p leaves some, and the sort in transformers' processor says which."""


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    wide: bool = False,
    relu: bool = False,
    onto: Tensor | None = None,
) -> Tensor:
    """x (T, in) times weight (out, in) transposed, plus bias (out): newly made (T, out), in x's dtype.

    A packed weight stands for its numbers rounded to x's dtype; or, where `PackedWeight.whole`, for its numbers, and x
    is rounded to 8 bits in groups of up to 64 neighbours.

    `wide`: in float32. A native product then keeps the sums as they are, where torch's are rounded to x's dtype first.
    `relu`: negative results become 0. `onto` (T, out), in x's dtype: the product is added to it in place, and it is
    returned; not with `wide`. Sums are float32 either way. Gradients do not flow through native products. Raises
    RuntimeError for shapes that do not fit together, as F.linear does.
    """
    # Written out, and in this order, because it is done some fifty times per step: 2 microseconds.
    if isinstance(weight, PackedWeight):
        return _packed_linear(x, weight, bias, wide, relu, onto)
    dtype, exact = x.dtype, x.dtype is torch.float32
    takes = dtype is weight.dtype and (exact or dtype is torch.bfloat16) and x.is_cpu and weight.is_cpu
    if takes and x.ndim == weight.ndim == 2:
        (rows, ins), (outs, same), (stride, one) = x.shape, weight.shape, x.stride()
        fits = 0 < rows <= (_WIDE_ROWS if exact else MOST_ROWS) and outs and ins and ins == same and one == 1
        fits = fits and weight.is_contiguous()
        if fits and library() and _is_vector(bias, outs, dtype) and (onto is None or _takes(onto, rows, outs, dtype)):
            call = function("product", "PPPPllllliiiiPi", "i")
            y = _new(x, wide, rows, outs) if onto is None else onto
            places = x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
            kind = wide or exact, relu, onto is not None, torch.get_num_threads()
            if call(*places, rows, outs, ins, stride, y.stride(0), *kind, None, _EXACTLY if exact else False):
                raise MemoryError(f"no memory to pack weights of {ins} inputs")
            return y
    return _linear_by_torch(x, weight, bias, wide, relu, onto)


def _packed_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, wide: bool, relu: bool, onto: Tensor | None
) -> Tensor:
    """In C where `linear` would be, or of float32 numbers; by Triton on a GPU, else by torch, some expanded rows of the
    weight at a time."""
    (outs, ins), rows = weight.shape, x.shape[0]
    x = x if weight.order is None else x.index_select(1, weight.order)
    exact = x.dtype is torch.float32
    fits = (exact or x.dtype is torch.bfloat16) and x.is_cpu and x.shape == (rows, ins) and rows and x.stride(1) == 1
    fits = fits and _is_vector(bias, outs, x.dtype) and (onto is None or _takes(onto, rows, outs, x.dtype))
    if fits and weight.place is not None:
        call = function("product", "PPPPllllliiiiPi", "i")
        wide = wide or exact
        y = _new(x, wide, rows, outs) if onto is None else onto
        places = x.data_ptr(), None, None if bias is None else bias.data_ptr(), y.data_ptr()
        kind = wide, relu, onto is not None, torch.get_num_threads(), ctypes.byref(weight.place)
        if call(*places, rows, outs, ins, x.stride(0), y.stride(0), *kind, _EXACTLY if exact else weight.whole):
            raise MemoryError(f"no memory to expand weights of {ins} inputs")
        return y
    if serves(x.device) and x.ndim == 2 and x.shape[1] == ins:
        from h2o_flexgen.kernels.triton_linear import packed_linear  # imports Triton, which is not there everywhere

        y = x.new_empty(rows, outs, dtype=torch.float32 if wide else x.dtype) if onto is None else onto
        return packed_linear(x, weight, bias, y, relu=relu, add=onto is not None)
    y = x.new_empty(rows, outs)
    some = max(1, _EXPANDED // ins)
    for start in range(0, outs, some):
        stop = min(outs, start + some)
        y[:, start:stop] = F.linear(x, weight.rows(start, stop).in_order(x.dtype))
    return _ended(y if bias is None else y.add_(bias), wide, relu, onto)


def _ended(y: Tensor, wide: bool, relu: bool, onto: Tensor | None) -> Tensor:
    y = y.relu_() if relu else y
    if onto is not None:
        return onto.add_(y)
    return y.float() if wide else y


def _new(x: Tensor, wide: bool, *shape: int) -> Tensor:
    """As x, or float32 where `wide`."""
    if wide or math.prod(shape) >= _MANY:
        return LARGE.empty(*shape, dtype=torch.float32 if wide else x.dtype)
    return x.new_empty(*shape)  # takes half of the time


def _is_vector(x: Tensor | None, n: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernels in C read this as a bias or the weight of a norm over n numbers; None is none."""
    return x is None or (x.dtype is dtype and x.is_cpu and x.shape == (n,) and x.is_contiguous())


def _takes(onto: Tensor, rows: int, outs: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernels in C can add to this, or multiply it."""
    return onto.dtype is dtype and onto.is_cpu and onto.shape == (rows, outs) and onto.stride(1) == 1


def _linear_by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, wide: bool, relu: bool, onto: Tensor | None
) -> Tensor:
    """On a GPU the product ends with ReLU, or starts from `onto`, where cuBLAS does that: not with both a bias and
    `onto`, which is one launch more either way."""
    fused = _has_epilogues(x)
    if fused and onto is not None and bias is None and not relu:
        return onto.addmm_(x, weight.t())
    if fused and relu and bias is not None:
        y, relu = torch._addmm_activation(bias, x, weight.t()), False
    elif not fused and x.dtype is weight.dtype is torch.bfloat16 and x.is_cpu and len(x) >= _WIDENED and torch_widens():
        y = _widened_linear(x, weight, bias)
    else:
        y = F.linear(x, weight, bias)
    return _ended(y, wide, relu, onto)


def _widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32, to which some outputs' weights at a time are widened, and rounded at the end."""
    y, wide, (outs, ins) = x.new_empty(*x.shape[:-1], len(weight)), x.float(), weight.shape
    some = max(1, _EXPANDED // max(1, ins))
    for start in range(0, outs, some):
        span = slice(start, min(outs, start + some))
        y[..., span] = F.linear(wide, weight[span].float(), None if bias is None else bias[span].float())
    return y


def _has_epilogues(x: Tensor) -> bool:
    return x.is_cuda


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x (T, n) less its mean over its standard deviation, row by row, times weight (n) plus bias (n): a new (T, n).

    In x's dtype; statistics and intermediate results are float32. Raises RuntimeError for shapes that do not fit.
    """
    y = _native_norm(x, weight, bias, eps) if x.ndim == 2 else None
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps) if y is None else y


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """x (..., n) over its root mean square, times weight (n) + offset; newly made, in the dtype of x.

    Statistics are float32. With an offset everything is, up to the last rounding; without, the product with the weight
    is of rounded numbers, as transformers has it. Zhang and Sennrich, arXiv 1910.07467.
    """
    if x.dtype is torch.bfloat16 and x.is_cpu:
        flat = x.ndim == 2  # a view takes as long as the norm of a row
        y = _native_norm(x if flat else x.reshape(-1, x.shape[-1]), weight, None, eps, offset, rms=True)
        if y is not None:
            return y if flat else y.view(x.shape)
    return _rms_norm_by_torch(x, weight, eps, offset)


def _native_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float = 0.0, rms: bool = False
) -> Tensor | None:
    """x (T, n) normed by `rows.c`; None where that cannot be had, or does not take this."""
    if not (x.dtype is torch.bfloat16 and x.is_cpu and x.stride(1) == 1 and x.numel() and library()):
        return None
    rows, n = x.shape
    if not _is_vector(weight, n) or not _is_vector(bias, n):
        return None
    y = _new(x, False, rows, n)
    scale, added = (None if each is None else each.data_ptr() for each in (weight, bias))
    places = x.data_ptr(), scale, added, y.data_ptr()
    kind = eps, offset, rms, torch.get_num_threads()
    function("norm", "PPPPlllddii")(*places, rows, n, x.stride(0), *kind)
    return y


def _rms_norm_by_torch(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    if offset and weight is not None:
        return _rms_norm_by_torch(x.float(), weight.float() + offset, eps).to(x.dtype)
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    # On a CPU F.rms_norm is no single kernel and writes all squares down; this takes 0.6 of its time.
    wide = x.float()
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed = (wide * inverse if wide is x else wide.mul_(inverse)).to(x.dtype)
    return normed if weight is None else normed.mul_(weight)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) times up, both (T, n) of one dtype: `gate`, which is overwritten, in that dtype.

    activation: a key of `ACTIVATIONS`, computed in float32, then rounded. Raises RuntimeError for shapes that do not
    fit together.
    """
    fits = gate.ndim == 2 and gate.numel() and _takes(gate, *gate.shape) and _takes(up, *gate.shape)
    if fits and activation in NATIVE_GATES and library():
        strides, kind = (gate.stride(0), up.stride(0)), (NATIVE_GATES[activation], torch.get_num_threads())
        function("gate_up", "PPllllii")(gate.data_ptr(), up.data_ptr(), *gate.shape, *strides, *kind)
        return gate
    return ACTIVATIONS[activation](gate).mul_(up)


def rotate_heads(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, rounds: bool = True
) -> tuple[Tensor, Tensor] | None:
    """Queries (T, heads, d) and keys (T, kv_heads, d) of the same tokens, turned as by `rotate_halves`, newly made, in
    C; None where that cannot be had or does not take this. Without keys the second is empty.

    cos, sin (T, 2 m), of both dimensions of each pair. `rounds`: products to bfloat16 before they are added, as
    transformers has it. Gradients do not flow through.
    """
    rows, heads, dim = q.shape
    same = q.dtype is cos.dtype is sin.dtype is torch.bfloat16 and q.is_cpu and cos.is_cpu and cos.shape == sin.shape
    if not (same and rows and cos.ndim == 2 and len(cos) == rows and cos.stride() == sin.stride() and library()):
        return None
    turned = cos.shape[1]
    if turned % 2 or not 0 < turned <= dim or cos.stride(1) != 1 or q.stride(2) != 1:
        return None
    keys = q[:, :0] if k is None else k
    kv_heads = keys.shape[1]
    fits = keys.dtype is torch.bfloat16 and keys.is_cpu and keys.shape == (rows, kv_heads, dim)
    if not fits or (kv_heads and keys.stride(2) != 1):
        return None
    new_q, new_k = (_new(q, False, rows, count, dim) for count in (heads, kv_heads))
    places = q.data_ptr(), keys.data_ptr(), new_q.data_ptr(), new_k.data_ptr(), cos.data_ptr(), sin.data_ptr()
    sizes = rows, heads, kv_heads, *q.stride()[:2], *keys.stride()[:2], dim, turned // 2, cos.stride(0)
    function("rotate_halves", "PPPPPPllllllllllii")(*places, *sizes, rounds, torch.get_num_threads())
    return new_q, new_k


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns dimension i of x (..., head_dim) together with dimension i + m by the angle of pair i, i < m.

    cos, sin (..., m) in the dtype of x, 2 m <= head_dim, broadcast to x; dimensions from 2 m on pass through. The
    result is new and contiguous, whatever the strides of x. Su et al., arXiv 2104.09864.
    """
    half = cos.shape[-1]
    dim = 2 * half
    out = LARGE.like(x)
    pairs, turned = (t[..., :dim].unflatten(-1, (2, half)) for t in (x, out))
    # One product of all and two fused multiply-adds: no temporary, and half the time of other orders.
    torch.mul(pairs, cos.unsqueeze(-2), out=turned)
    turned[..., 0, :].addcmul_(pairs[..., 1, :], sin, value=-1)
    turned[..., 1, :].addcmul_(pairs[..., 0, :], sin)
    if dim < x.shape[-1]:
        out[..., dim:] = x[..., dim:]
    return out


def takes_scores(scores: Tensor) -> bool:
    """Whether the kernel takes the rows of `scores` (n, vocab)."""
    host = scores.device.type == "cpu" and scores.dtype is torch.float32
    return host and scores.stride(-1) == 1 and library() is not None


def likeliest(scores: Tensor, allowed: Tensor) -> int:
    """The first of the largest `scores` (vocab,) of tokens that are allowed; -1 where there is none above -inf.

    allowed: int32, contiguous; bit i % 32 of number i // 32 is of token i. No score is NaN.
    """
    return int(function("likeliest", "PPq", "q")(scores.data_ptr(), allowed.data_ptr(), scores.shape[0]))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.max(logits, -1)` of logits (n, vocab): the largest of each row and where it is first, (n,) each."""
    if not takes_scores(logits) or not logits.numel():
        best, tokens = torch.max(logits, dim=-1)
        return best, tokens
    rows, vocab = logits.shape
    best, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    places = best.data_ptr(), tokens.data_ptr(), torch.get_num_threads()
    function("largest", "PqqqPPi")(logits.data_ptr(), rows, vocab, logits.stride(0), *places)
    return best, tokens


def drawn(
    scores: Tensor,
    rows: Sequence[int],
    numbers: Tensor,
    allowed: Sequence[Tensor | None],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> Tensor:
    """Tokens (m,) int64 for m `rows` of `scores` (n, vocab) that `takes_scores` takes, by their `numbers` (m,) float64
    from 0 to below 1, as draw.c draws them from the tokens that transformers' processors of these names leave (0: no
    top_k). `allowed`: of each as of `likeliest`, or None. Negative where no score is finite, and SOME_OF_EQUAL."""
    places, tokens = torch.tensor(rows), torch.empty(len(rows), dtype=torch.int64)
    masks = torch.tensor([0 if each is None else each.data_ptr() for each in allowed])
    task = _Draw(n=scores.shape[1], stride=scores.stride(0), top_k=top_k)
    task.temperature, task.top_p, task.min_p = temperature, top_p, min_p
    task.point(scores=scores, rows=places, numbers=numbers, allowed=masks, drawn=tokens)
    if function("draw", "Pqi", "i")(ctypes.byref(task), len(rows), torch.get_num_threads()):
        raise MemoryError(f"no memory to draw {len(rows)} tokens")
    return tokens


def logprobs(scores: Tensor, rows: Sequence[int], tokens: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """Of m `rows` of `scores` (n, vocab) that `takes_scores` takes: log-probabilities (m, 1 + count) float32, of their
    `tokens` and, from the likeliest on, of the `count` likeliest tokens, and these (m, count) int64."""
    asked = torch.tensor([rows, tokens])
    found, places = torch.empty(len(rows), 1 + count), torch.empty(len(rows), count, dtype=torch.int64)
    task = _Logprobs(n=scores.shape[1], stride=scores.stride(0), count=count)
    task.point(scores=scores, rows=asked[0], tokens=asked[1], found=found, places=places)
    if function("logprobs", "Pqi", "i")(ctypes.byref(task), len(rows), torch.get_num_threads()):
        raise MemoryError(f"no memory for log-probabilities of {len(rows)} rows")
    return found, places
