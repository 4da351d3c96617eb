"""Kernels in C for the functions that transformers' mixers compute with torch, token by token or in large chunks: under
the names by which the modules call them, with the same arguments and results.

Given states are updated in place and returned, where transformers returns new ones that its caches copy. Calls that
the kernels do not take go to transformers' own function. Norms with a gate are known by their numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from h2o_flexgen.kernels import states
from h2o_flexgen.kernels.native import library
from h2o_flexgen.models.hf.fused import Norm, among, epsilons, first_same, take_norms
from h2o_flexgen.models.hf.states import NotTogether, PromptStates, together

Original = Callable[..., Any]


@cache
def _usual(original: Original) -> dict[str, Any]:
    """The arguments that a function of transformers names, and their defaults; a kernel of the hub is a module."""
    named = inspect.signature(getattr(original, "forward", original)).parameters.values()
    usual = {each.name: each.default for each in named if each.kind is each.POSITIONAL_OR_KEYWORD}
    return {name: None if default is inspect.Parameter.empty else default for name, default in usual.items()}


def _by(compute: Callable[[Any], Any], original: Original, *args: Any, **others: Any) -> Any:
    """The result of `compute`, given the arguments by their names in transformers; where it is None, the result of
    `original`, which also gets packed sequences, and all calls where it names no arguments. Of several prompts in one
    call, each by itself."""
    usual, states = _usual(original), together()
    if not usual or others.get("cu_seqlens") is not None or others.get("seq_idx") is not None:
        if states is not None:
            raise NotTogether
        return original(*args, **others)
    call = {**usual, **dict(zip(usual, args, strict=False)), **others}

    def made(**changed: Any) -> Any:
        given = {**call, **changed}
        found = compute(SimpleNamespace(**given))
        return original(**given) if found is None else found

    if states is None:
        return made()
    if compute is _conv:
        return states.convolved(call["hidden_states"], call["weight"].shape[-1], lambda x: made(hidden_states=x))
    if compute not in _ALONG:
        raise NotTogether
    return _each_prompt(states, _ALONG[compute], call, made)


class Along(NamedTuple):
    """Of a recurrence: which arguments have tokens, in which dimension, the argument for the states before these, and
    the one that asks for the states behind them."""

    tokens: tuple[str, ...]
    dim: int
    begins: str | None
    returns: str


def _each_prompt(states: PromptStates, along: Along, call: dict[str, Any], made: Callable[..., Any]) -> Any:
    """The result of a recurrence for prompts one behind the other, and the states (n, ...) after each."""
    given = {name: call[name] for name in along.tokens if call.get(name) is not None}
    if not call[along.returns] or any(x.shape[along.dim] != states.tokens for x in given.values()):
        raise NotTogether
    begun, outs = states.begun(), list[Tensor]()
    for i, prompt in enumerate(states.prompts):
        own = {name: x.narrow(along.dim, prompt.start, prompt.length) for name, x in given.items()}
        before = begun[i : i + 1]
        out, after = made(**own, **({} if along.begins is None else {along.begins: before}))
        if after.shape != before.shape:
            raise NotTogether
        if after.data_ptr() != before.data_ptr():
            before.copy_(after)
        outs.append(out)
    return torch.cat(outs, along.dim), begun


def _delta_rule(rule: Any) -> Any:
    """query, key (B, T, key heads, K), value (B, T, heads, V), g (B, T, heads) or, Kimi's, (B, T, heads, K), beta
    (B, T, heads), initial_state (B, heads, K, V)."""
    if not states.serves(rule.query, rule.key, rule.value):
        return None
    rows, _, heads, value_dim = rule.value.shape
    state, dim = rule.initial_state, rule.key.shape[-1]
    state = torch.zeros(rows, heads, dim, value_dim) if state is None else state
    if not states.serves_state(state, dim):
        return None
    given = (rule.query, rule.key, rule.value, rule.g, rule.beta)
    out = states.delta_rule(*given, state, scale=dim**-0.5, normed=rule.use_qk_l2norm_in_kernel)
    return out, state if rule.output_final_state else None


def _conv_step(conv: Any) -> Any:
    """A convolution over a new token: hidden_states (B, channels, 1), conv_state (B, channels, held)."""
    x, state = conv.hidden_states, conv.conv_state
    fits = x.shape[-1] == 1 and state.dtype is x.dtype and state.is_contiguous()
    return _conv(conv, state) if fits and state.shape[-1] >= conv.weight.shape[-1] - 1 else None


def _conv(conv: Any, state: Tensor | None = None) -> Any:
    """hidden_states (B, channels, T), with what is before them unless a state has it, weight (channels, taps)."""
    x, weight, bias = conv.hidden_states, conv.weight, conv.bias
    if conv.activation not in (None, "silu", "swish") or not states.serves_conv(x, weight, bias):
        return None
    return states.short_conv(x, weight, bias, state, silu=conv.activation is not None)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def _of_heads(x: Tensor | None, dims: int) -> Tensor | None:
    """One number of each head where the last `dims` dimensions repeat it; None where they do not."""
    for _ in range(dims):
        if x is None or (x.shape[-1] != 1 and x.stride(-1) != 0):
            return None
        x = x[..., 0]
    return x


def _second_step(step: Any) -> Any:
    """state (B, heads, P, N); x, dt (B, heads, P); A (heads, P, N); B, C (B, groups, N); D, dt_bias (heads, P)."""
    if not states.serves(step.hidden_states, step.B, step.C):
        return None
    dt, rates = _of_heads(step.dt, 1), _of_heads(step.A, 2)
    skip, bias = _of_heads(step.D, 1), _of_heads(step.dt_bias, 1)
    missing = (skip is None) != (step.D is None) or (bias is None) != (step.dt_bias is None)
    if missing or dt is None or rates is None or not states.serves_state(step.state, step.B.shape[-1]):
        return None
    dt = _steps(dt, bias, step.dt_softplus).unsqueeze(1)
    c, b, x = (each.unsqueeze(1) for each in (step.C, step.B, step.hidden_states))
    return _passed(states.scan(c, b, x, dt * rates.float(), dt, step.state, skip).squeeze(1), step.z)


def _second_scan(scan: Any) -> Any:
    """hidden_states (B, T, heads, P), dt (B, T, heads), A, D, dt_bias (heads), B, C (B, T, groups, N), initial_states
    (B, heads, P, N). In float32, as transformers has it for several tokens."""
    if not states.serves(scan.hidden_states, scan.B, scan.C) or scan.A.ndim != 1:
        return None
    (rows, _, heads, dim), numbers = scan.hidden_states.shape, scan.B.shape[-1]
    state = torch.zeros(rows, heads, dim, numbers) if scan.initial_states is None else scan.initial_states
    if not states.serves_state(state, numbers) or scan.z is not None or (scan.D is not None and scan.D.ndim != 1):
        return None
    dt = _steps(scan.dt, scan.dt_bias, scan.dt_softplus).clamp(*scan.dt_limit)
    c, b, x = (each.float() for each in (scan.C, scan.B, scan.hidden_states))
    out = states.scan(c, b, x, dt * scan.A.float(), dt, state, scan.D)
    return (out, state) if scan.return_final_states else out


def _first_step(step: Any) -> Any:
    """As the second Mamba's, with channels in place of heads, and no P."""
    takes = step.state.ndim == 3 and states.serves(step.hidden_states)
    if not takes or not states.serves_state(step.state, step.A.shape[-1]) or step.D is None:
        return None
    dt = _steps(step.dt, step.dt_bias, step.dt_softplus)
    x, dt, b, c = (each.unsqueeze(1) for each in (step.hidden_states, dt, step.B, step.C))
    return _passed(states.selective_scan(x, dt, step.A, b, c, step.state, step.D).squeeze(1), step.z)


def _first_scan(scan: Any) -> Any:
    """hidden_states, dt (B, channels, T), A (channels, N), B, C (B, N, T), D, delta_bias (channels); no state."""
    if scan.D is None or scan.B.ndim != 3 or not states.serves(scan.hidden_states):
        return None
    dt = _steps(scan.dt.transpose(1, 2), scan.delta_bias, scan.delta_softplus)
    x, b, c = (each.transpose(1, 2) for each in (scan.hidden_states, scan.B, scan.C))
    state = torch.zeros(len(x), *scan.A.shape)
    out = _passed(states.selective_scan(x, dt, scan.A, b, c, state, scan.D).transpose(1, 2), scan.z)
    return (out, state) if scan.return_last_state else out


def _passed(out: Tensor, gate: Tensor | None) -> Tensor:
    return out if gate is None else out * F.silu(gate)


_ALONG = {
    _delta_rule: Along(("query", "key", "value", "g", "beta"), 1, "initial_state", "output_final_state"),
    _second_scan: Along(("hidden_states", "dt", "B", "C", "z"), 1, "initial_states", "return_final_states"),
    _first_scan: Along(("hidden_states", "dt", "B", "C", "z"), 2, None, "return_last_state"),
}
OURS: dict[str, Callable[[Any], Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "causal_conv1d_update": _conv_step,
    "causal_conv1d_fn": _conv,
    "mamba2_selective_state_update": _second_step,
    "mamba2_chunk_scan": _second_scan,
    "mamba_selective_state_update": _first_step,
    "mamba_selective_scan": _first_scan,
}
"""By the names that transformers' modules call: functions that compute the same of the arguments, or return None."""


def take_recurrences(model: nn.Module, by: Callable[..., Any] | None = None) -> list[str]:
    """From now on the modules of this model compute recurrences by `OURS`, or all `by` one function that is given
    transformers' own and its arguments. Returns the names of the functions that they call.

    A module's own forward is run with other globals; the globals of transformers stay as they are.
    """
    taken = set[str]()
    for module in model.modules():
        function = inspect.unwrap(type(module).forward)
        found = [name for name in OURS if name in function.__code__.co_names and name in function.__globals__]
        if not found or not isinstance(function, FunctionType):
            continue
        ours = {name: partial(by or partial(_by, OURS[name]), function.__globals__[name]) for name in found}
        module.forward = MethodType(among(function, ours), module)
        taken.update(found)
    return sorted(taken)


_TOKENS = 6  # of the numbers by which norms are known


def take_gated_norms(model: nn.Module) -> None:
    """From now on norms with gates are computed by our kernel."""
    if library() is not None:
        take_norms(model, _look)


def _normed(
    norm: states.GatedNorm, module: nn.Module, otherwise: Callable[..., Tensor], *args: Tensor, **kwargs: Tensor
) -> Tensor:
    weight = module._parameters["weight"]
    if len(args) != 2 or kwargs or not isinstance(weight, Tensor):
        return otherwise(*args, **kwargs)
    if not all(map(states.serves, (*args, weight))) or args[0].shape != args[1].shape or not args[0].numel():
        return otherwise(*args)
    return norm(*args, weight)


def _look(module: nn.Module, size: int) -> Norm | None:
    """A norm that computes the same as the module; None where none here does."""
    if module._parameters.get("bias") is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, size, generator=generator) * torch.tensor([[1e-3], [0.1], [1.0], [3.0], [10.0], [30.0]])
    gate, weight = torch.randn(_TOKENS, size, generator=generator) * 3, torch.randn(size, generator=generator)
    return first_same(module, _candidates(module, size), {"weight": weight}, x, gate)


def _candidates(module: nn.Module, size: int) -> Iterator[Norm]:
    groups = [each for key, each in vars(module).items() if "group" in key and isinstance(each, int) and each > 0]
    fitting = [each for each in groups if size % each == 0]
    sizes = {size, *fitting, *(size // each for each in fitting)}
    for eps, of_group in product(epsilons(module), sorted(sizes)):
        for gate_first, sigmoid, rounds in product((False, True), repeat=3):
            yield partial(_normed, states.GatedNorm(eps, of_group, gate_first, sigmoid, rounds))
