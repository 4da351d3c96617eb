"""Layers that keep a state of a fixed size in place of keys and values: their recurrences and short convolutions, in C.

Gated delta rule (Yang, Kautz and Hatamizadeh, arXiv 2412.06464; decays of each channel: Kimi Team, arXiv 2510.26692)
and Mamba-2's scan (Dao and Gu, arXiv 2405.21060). Of a head with keys of K and values of V numbers, K = V = 128:
- A step reads and writes its state once: 8 K V bytes (131 KB) for 7 K V operations (5 K V of a scan), bound by memory
  (some 25 GB/s: 5 us a row and head).
- A prompt does 6 K V operations a token and head (4 K V of a scan), bound by multiplications: 0.1 million a token.
A row's numbers are the same whatever rows are beside it.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from h2o_flexgen.kernels.native import function, library, structure

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_KEY = 1024
_TAPS = (2, 3, 4)


_States, _GatedNorm = structure("states.h", "States"), structure("gated_norm.c", "GatedNorm")
_Selective, _Conv = structure("selective.c", "Selective"), structure("short_conv.c", "Conv")


class GatedNorm(NamedTuple):
    """An RMSNorm in groups of `size` numbers with a gate: `gate_first`, x is gated before it is normed, not after;
    `sigmoid`, the gate's activation is that, not SiLU; `rounds`, what is normed is rounded to bfloat16, if x is, and
    so is its product with the weight."""

    eps: float
    size: int
    gate_first: bool
    sigmoid: bool
    rounds: bool

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """x, gate (..., n), weight (n), each of a dtype that `serves`, n in whole groups: newly made, in that of x.

        MemoryError where a group's float32 numbers are not to be had.
        """
        n = weight.shape[0]
        if x.shape != gate.shape or x.shape[-1] != n or n % self.size:
            raise ValueError(f"numbers {tuple(x.shape)}, gate {tuple(gate.shape)}, weight {n}, groups of {self.size}")
        flat, gate = (
            each if each.stride(1) == 1 else each.contiguous() for each in (x.reshape(-1, n), gate.reshape(-1, n))
        )
        flat, gate, weight = _wide(flat, gate, weight.contiguous())
        out = torch.empty(len(flat), n, dtype=flat.dtype)
        bits = (each.dtype is torch.bfloat16 for each in (flat, gate, weight))
        task = _GatedNorm(len(flat), n // self.size, self.size, *bits, self.gate_first, self.sigmoid, self.rounds)
        task.threads, task.eps = torch.get_num_threads(), self.eps
        task.x_row, task.gate_row = flat.stride(0), gate.stride(0)
        task.point(x=flat, gate=gate, weight=weight, out=out)
        if function("gated_norm", "P", "i")(ctypes.byref(task)):
            raise MemoryError(f"no memory for {self.size} numbers")
        return out.view(x.shape).to(x.dtype)


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels take numbers like these: of one dtype, on a CPU."""
    dtype = tensors[0].dtype
    return dtype in _DTYPES and all(x.is_cpu and x.dtype is dtype for x in tensors) and library() is not None


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same numbers as the kernels take them: float16 becomes float32."""
    return tuple(x.float() if x.dtype is torch.float16 else x for x in tensors)


def serves_state(state: Tensor, key_dim: int) -> bool:
    """Whether `state` can be updated in place, and its keys are of a size that the kernels take."""
    exact = state.dtype is torch.float32 and state.is_cpu and state.is_contiguous()
    return exact and 0 < key_dim <= _MOST_KEY and state.numel() > 0


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *, scale: float, normed: bool
) -> Tensor:
    """Each token's state = exp(decay) state, then + k beta (v - k state), then out = scale q state, token by token.

    q, k (B, T, key heads, K), v (B, T, heads, V) in one dtype that `serves`; heads share keys evenly, in order. decay
    (B, T, heads) or (B, T, heads, K) at most 0, beta (B, T, heads), any dtype. state (B, heads, K, V) float32, updated
    in place. normed: q and k are divided by their lengths, to whose squares 1e-6 is added. Returns (B, T, heads, V) in
    their dtype, newly made. MemoryError where some KiB are not to be had.
    """
    return _run(q, k, v, decay, beta, state, None, scale, delta=True, normed=normed)


def scan(c: Tensor, b: Tensor, x: Tensor, decay: Tensor, dt: Tensor, state: Tensor, skip: Tensor | None) -> Tensor:
    """Each token's state = exp(decay) state + dt x b, then out = state c + skip x, token by token.

    c, b (B, T, groups, N), x (B, T, heads, P) in one dtype that `serves`; heads share b and c evenly, in order. decay,
    dt (B, T, heads), skip (heads), any dtype. state (B, heads, P, N) float32, updated in place. Returns (B, T, heads,
    P) in their dtype, newly made. MemoryError where some KiB are not to be had.
    """
    return _run(c, b, x, decay, dt, state, skip, 1.0, delta=False, normed=False)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    skip: Tensor | None,
    scale: float,
    *,
    delta: bool,
    normed: bool,
) -> Tensor:
    (rows, tokens, key_heads, key_dim), (heads, value_dim) = k.shape, v.shape[2:]
    sizes = (key_dim, value_dim) if delta else (value_dim, key_dim)
    fits = q.shape == k.shape and v.shape[:2] == k.shape[:2] and heads % key_heads == 0
    fits = (
        fits and beta.shape == v.shape[:3] and decay.shape in (beta.shape, (*beta.shape, key_dim)[: 4 if delta else 3])
    )
    if not fits or state.shape != (rows, heads, *sizes):
        shapes = ", ".join(str(tuple(each.shape)) for each in (q, k, v, decay, beta, state))
        raise ValueError(f"queries, keys, values, decays, betas and states of shapes that do not fit: {shapes}")
    dtype = v.dtype
    q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in _wide(q, k, v))
    decay, beta = decay.float().contiguous(), beta.float().contiguous()
    skip = None if skip is None else skip.float().contiguous()
    out = torch.empty(rows, tokens, heads, value_dim, dtype=v.dtype)
    if not out.numel():
        return out.to(dtype)
    task = _States(rows, tokens, heads, key_heads, key_dim, value_dim, v.dtype is torch.bfloat16, delta, normed)
    task.by_channel, task.threads = decay.ndim == 4, torch.get_num_threads()
    task.q_row, task.q_token, task.q_head = q.stride()[:3]
    task.k_row, task.k_token, task.k_head = k.stride()[:3]
    task.v_row, task.v_token, task.v_head = v.stride()[:3]
    task.point(q=q, k=k, v=v, decay=decay, beta=beta, skip=skip, state=state, out=out)
    task.scale = scale
    if tokens == 1:
        function("state_step", "P")(ctypes.byref(task))
    elif function("state_prompts", "P", "i")(ctypes.byref(task)):
        raise MemoryError("no memory for the keys of some tokens")
    return out.to(dtype)


def selective_scan(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor, skip: Tensor) -> Tensor:
    """Each token's state = exp(dt rates) state + dt x b, then out = state c + skip x, token by token.

    x (B, T, channels) of a dtype that `serves`, dt likewise; rates (channels, N), b, c (B, T, N), skip (channels), any
    dtype. state (B, channels, N) float32, updated in place. Returns (B, T, channels) in the dtype of x, newly made. Gu
    and Dao, arXiv 2312.00752.
    """
    (rows, tokens, channels), numbers = x.shape, rates.shape[1]
    fits = dt.shape == x.shape and b.shape == c.shape == (rows, tokens, numbers) and skip.shape == (channels,)
    if not fits or len(rates) != channels or state.shape != (rows, channels, numbers):
        shapes = ", ".join(str(tuple(each.shape)) for each in (x, dt, rates, b, c, state, skip))
        raise ValueError(
            f"numbers, steps, rates, inputs, outputs, states and skips of shapes that do not fit: {shapes}"
        )
    dtype, (x,) = x.dtype, _wide(x.contiguous())
    out = torch.empty(rows, tokens, channels, dtype=x.dtype)
    dt, rates, b, c, skip = (each.float().contiguous() for each in (dt, rates, b, c, skip))
    task = _Selective(rows, tokens, channels, numbers, x.dtype is torch.bfloat16, torch.get_num_threads())
    task.point(x=x, dt=dt, a=rates, b=b, c=c, skip=skip, state=state, out=out)
    function("selective_scan", "P")(ctypes.byref(task))
    return out.to(dtype)


def serves_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `short_conv` takes x, weight (channels, taps) and bias (channels)."""
    given = (x, weight) if bias is None else (x, weight, bias)
    return serves(*given) and weight.shape[-1] in _TAPS and x.shape[1] == len(weight) and x.numel() > 0


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, *, silu: bool) -> Tensor:
    """Each channel's sum over the last `taps` tokens, times weight (channels, taps), + bias (channels); `silu`: SiLU.

    x (B, channels, T), of a dtype that `serves_conv`. state (B, channels, held) in the same: the tokens before, held
    at least taps - 1; T is then 1, and the state moves on in place. None: no token is before the first. Returns (B,
    channels, T), newly made, channels next to each other.
    """
    (rows, channels, tokens), taps = x.shape, weight.shape[1]
    if state is not None and (tokens != 1 or not state.is_contiguous() or state.shape[2] < taps - 1):
        raise ValueError(f"{tokens} tokens after a state {tuple(state.shape)} of {taps} taps")
    x = x.transpose(1, 2)
    dtype, given = x.dtype, state
    x, weight = _wide(x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous())
    bias, state = (None if each is None else _wide(each.contiguous())[0] for each in (bias, state))
    out = torch.empty(rows, tokens, channels, dtype=x.dtype)
    task = _Conv(rows, tokens, channels, taps, 0 if state is None else state.shape[2], x.dtype is torch.bfloat16, silu)
    task.threads, task.x_row, task.x_token = torch.get_num_threads(), x.stride(0), x.stride(1)
    task.point(x=x, weight=weight, bias=bias, state=state, out=out)
    function("short_conv", "P")(ctypes.byref(task))
    if given is not None and state is not None and given is not state:
        given.copy_(state)
    return out.to(dtype).transpose(1, 2)
