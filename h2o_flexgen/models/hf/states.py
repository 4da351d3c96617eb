"""States that transformers' modules keep of each sequence in place of keys and values (short convolutions, delta rules,
state space models), and the calls of these modules: "mixers".

A mixer is called for all decode rows at once, then for prompts: for several in one call where its convolutions and
recurrences go through functions that `mixers` takes, which then begin anew with each prompt; else for one by one.
`MixerCall.of` is the one place where that is done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from h2o_flexgen.models.hf.attention import ModelRun, NotUnderstood, current

Kind = Literal["conv", "recurrent"]
KEPT: tuple[Kind, ...] = ("conv", "recurrent")
"""The kinds of states."""
_CALLS = frozenset(f"{verb}_{kind}_state" for verb in ("update", "get") for kind in KEPT)
_CALLS |= {"conv_states", "recurrent_states"}
Key = tuple[Kind, int]
"""A kind of states, and the number of the state among those of its layer."""
States = dict[Key, Tensor]


class RowStates(LinearAttentionLayer):
    """The states of some rows (rows, ...) that a mixer finds in its cache, or none yet.

    Given states are written to in place. `layer`: the one that the mixer has asked for, by its own number.
    """

    def __init__(self, given: dict[Key, Tensor]) -> None:
        super().__init__(8)
        self.layer: int | None = None
        self.given = dict(given)
        for (kind, number), state in self.given.items():
            getattr(self, f"{kind}_states")[number] = state
            getattr(self, f"is_{kind}_states_initialized")[number] = True
            if kind == "conv":
                self.conv_kernel_size[number] = state.shape[-1]
            self.has_previous_state[number] = True

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """As transformers has it, but for what prepares for its compiler, which takes seconds to import."""
        if conv_states is not None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_kernel_size[state_idx] = size
            self.conv_states[state_idx] = conv_states.new_zeros(*conv_states.shape[:-1], size)
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            self.recurrent_states[state_idx] = torch.zeros_like(recurrent_states)
            self.is_recurrent_states_initialized[state_idx] = True

    def held(self) -> dict[Key, Tensor]:
        found: dict[Key, Tensor] = {}
        for kind in KEPT:
            states: dict[int, Tensor | None] = getattr(self, f"{kind}_states")
            found.update({(kind, number): state for number, state in states.items() if state is not None})
        return found


class NotTogether(Exception):
    """A mixer does with several prompts in one call what is not known to be right for each."""


class PromptRow(NamedTuple):
    """The last `length` tokens of a prompt, from `start` on among those of a call. Their states go to `place`; `behind`
    are the states of the tokens before them, (1, *shape), if there are any."""

    start: int
    length: int
    place: int
    behind: States


class PromptStates(RowStates):
    """The states of prompts that go through a mixer one behind the other, as if they were one that begins.

    views: of all places, (places, *shape), which the states of the prompts are written to.
    """

    def __init__(self, prompts: Sequence[PromptRow], views: States) -> None:
        super().__init__({})
        self.prompts, self._views = prompts, views
        self.tokens = prompts[-1].start + prompts[-1].length
        device = next(iter(views.values())).device
        self._start, self._length, self._place = torch.tensor([row[:3] for row in prompts], device=device).unbind(1)
        self._mixing = list[tuple[Tensor, Tensor]]()  # what convolutions are still to be given, and what is before it
        self._begun: Tensor | None = None
        self._done = set[Key]()

    def keep(self, prompt: PromptRow, states: States) -> None:
        """Stores a prompt's states (1, *shape)."""
        kept = {key: view.shape[1:] for key, view in self._views.items()}
        if kept != {key: x.shape[1:] for key, x in states.items()}:
            raise RuntimeError(f"states are {[(key, tuple(x.shape)) for key, x in states.items()]}")
        for key, view in self._views.items():
            view[prompt.place].copy_(states[key][0])

    def check(self) -> None:
        """NotTogether where the call has not settled all states."""
        if self._mixing or self._done != self._views.keys():
            raise NotTogether

    def _view(self, key: Key) -> Tensor:
        if key not in self._views or key in self._done:
            raise NotTogether
        return self._views[key]

    def _before(self, key: Key, states: Tensor) -> Tensor:
        """`states` (n, *shape), set to those before each prompt's tokens: zeros where it begins."""
        states.zero_()
        for i, prompt in enumerate(self.prompts):
            if prompt.behind:
                states[i].copy_(prompt.behind[key][0])
        return states

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Keeps the last tokens of each prompt in `conv_states` (1, channels, T), which `convolved` is to be given."""
        view = self._view(("conv", state_idx))
        channels, held = view.shape[1:]
        if conv_states.shape != (1, channels, self.tokens):
            raise NotTogether
        before = self._before(("conv", state_idx), conv_states.new_empty(len(self.prompts), channels, held))
        at = self._length[:, None] + torch.arange(held, device=view.device)  # in the tokens before, then a prompt's own
        own = conv_states[0].t()[(self._start[:, None] + at - held).clamp(min=0)].transpose(1, 2)
        old = before.gather(2, at.clamp(max=held - 1)[:, None].expand_as(before))
        view[self._place] = torch.where((at < held)[:, None], old, own).to(view.dtype)
        self._mixing.append((conv_states, before))
        self._done.add(("conv", state_idx))
        return conv_states

    def convolved(self, x: Tensor, taps: int, by: Callable[[Tensor], Tensor]) -> Tensor:
        """The causal convolution `by` of each prompt in x (1, channels, T): of all as of one prompt, then anew of the
        first tokens of each, which see others."""
        before = next((before for given, before in self._mixing if given is x), None)
        few = taps - 1
        if before is None or before.shape[2] < few:
            raise NotTogether
        self._mixing = [each for each in self._mixing if each[0] is not x]
        out = by(x)
        if out.shape != x.shape:
            raise NotTogether
        if few:
            within = torch.arange(few, device=x.device)
            at = self._start[:, None] + within
            first = x[0].t()[at.clamp(max=self.tokens - 1)].transpose(1, 2)
            mixed = by(torch.cat([before[..., before.shape[2] - few :], first], 2))[..., few:].transpose(1, 2)
            own = within < self._length[:, None]
            out[0].t()[at[own]] = mixed[own]
        return out

    def begun(self) -> Tensor:
        """The recurrent states (n, *shape) before the tokens of each prompt, float32, to be updated in place."""
        key: Key = ("recurrent", 0)
        view, places = self._view(key), [prompt.place for prompt in self.prompts]
        joined = places == list(range(places[0], places[0] + len(places)))
        if view.dtype is torch.float32 and joined:
            states = view[places[0] : places[-1] + 1]
        else:
            states = torch.empty(len(places), *view.shape[1:], device=view.device)
        self._begun = self._before(key, states)
        return states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keeps the states of `begun`."""
        view = self._view(("recurrent", state_idx))
        if recurrent_states is not self._begun or state_idx:
            raise NotTogether
        if recurrent_states.data_ptr() != view[self.prompts[0].place].data_ptr():
            view[self._place] = recurrent_states.to(view.dtype)
        self._done.add(("recurrent", state_idx))
        return recurrent_states


def together() -> PromptStates | None:
    """The states of the prompts that go through a mixer in one call at present."""
    run = getcurrent()
    states = run.cache.layers.states if isinstance(run, ModelRun) else None
    return states if isinstance(states, PromptStates) else None


class MixedTokens(NamedTuple):
    """`length` tokens of a part from `start` on, which go through a mixer together: a prompt's, with PromptStates those
    of several, one after the other, or, if `decode`, one of each row. `states` are theirs."""

    start: int
    length: int
    decode: bool
    states: RowStates


_NO_STATES = RowStates({})


@dataclass
class MixerCall:
    """A call of a mixer with the tokens of a part, as its modules make it."""

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        given = (each for each in (*self.args, *self.kwargs.values()) if torch.is_tensor(each))
        hidden = next((each for each in given if each.dim() == 3 and each.shape[0] == 1), None)
        if hidden is None:
            raise NotUnderstood(f"{type(self.module).__name__} keeps states of other than packed tokens")
        self.tokens = hidden.shape[1]

    def _is_of_tokens(self, x: Tensor) -> bool:
        return x.dim() > 1 and x.shape[:2] == (1, self.tokens)

    def wide(self, tokens: int) -> MixerCall:
        """The same call with so many tokens, of which nothing is known but the sizes."""

        def widened(x: Tensor) -> Tensor:
            return x.new_empty(1, tokens, *x.shape[2:]) if self._is_of_tokens(x) else x

        return replace(self, args=each_tensor(widened, self.args), kwargs=each_tensor(widened, self.kwargs))

    @staticmethod
    def piece(start: int, length: int, states: States, *, decode: bool = False) -> MixedTokens:
        """A piece of the call's tokens, of rows that go on with these states, or begin."""
        return MixedTokens(start, length, decode, RowStates(states))

    @staticmethod
    def prompts(start: int, prompts: Sequence[tuple[int, int, States]], views: States) -> MixedTokens:
        """A piece of the call's tokens from `start` on: of each prompt its length, the place in `views` for its states,
        and `PromptRow.behind`."""
        starts = accumulate((length for length, _, _ in prompts), initial=0)
        states = PromptStates([PromptRow(at, *prompt) for at, prompt in zip(starts, prompts, strict=False)], views)
        return MixedTokens(start, states.tokens, False, states)

    def of(self, pieces: Iterable[MixedTokens]) -> Any:
        """The mixer's output for all tokens, from transformers' own functions piece by piece. The next piece is asked
        for when one is done."""
        done, outs = list[MixedTokens](), list[Any]()
        for piece in pieces:
            done.append(piece._replace(states=_NO_STATES))  # a prompt's are its row's from now on
            states = piece.states
            outs.append(self._prompts(piece, states) if isinstance(states, PromptStates) else self._mixed(piece))
        if sum(piece.length for piece in done) != self.tokens:
            raise RuntimeError(f"{[piece[:2] for piece in done]} are not all of {self.tokens} tokens")
        return _joined(outs, [piece._replace(decode=False) for piece in done])

    def _prompts(self, piece: MixedTokens, states: PromptStates) -> Any:
        """Of several prompts: in one call, or, for modules of which that is not known to be right, one by one."""
        kind: Any = type(self.module)
        behind = any(prompt.behind for prompt in states.prompts)
        if len(states.prompts) > 1 and kind not in _APART and not (behind and _begins_anew(kind)):
            try:
                made = self._in(piece)
                states.check()
                return made
            except NotTogether:
                _APART.add(kind)
        outs, pieces = list[Any](), list[MixedTokens]()
        for prompt in states.prompts:
            own = {key: state.clone() for key, state in prompt.behind.items()}
            pieces.append(self.piece(piece.start + prompt.start, prompt.length, own))
            outs.append(self._mixed(pieces[-1]))
            states.keep(prompt, pieces[-1].states.held())
        return _joined(outs, pieces)

    def _mixed(self, piece: MixedTokens) -> Any:
        """Of a prompt, or of decode rows."""
        steps, kind = [piece], type(self.module)
        if piece.states.given and not piece.decode:
            if _begins_anew(kind):
                steps = [piece._replace(start=piece.start + i, length=1) for i in range(piece.length)]
            elif piece.length == 1 and kind not in _APART:
                return self._lone(piece)
        return _joined([self._in(step) for step in steps], steps)

    def _lone(self, piece: MixedTokens) -> Any:
        """Of a prompt's token behind others, which, given their states, would pass for one that is decoded."""
        states = piece.states.given
        behind = {key: state.clone() for key, state in states.items()}
        try:
            return self._in(piece._replace(states=PromptStates([PromptRow(0, 1, 0, behind)], states)))
        except NotTogether:
            _APART.add(type(self.module))
            for key, state in states.items():
                state.copy_(behind[key])
            return self._in(piece)

    def _in(self, piece: MixedTokens) -> Any:
        """The module's result for a piece, with its states in the cache."""
        layers = current().cache.layers
        layers.states = piece.states
        try:
            return self._made(piece)
        finally:
            layers.states = None

    def _made(self, piece: MixedTokens) -> Any:
        """Of what arguments have of a piece: (1, length, ...), or (length, 1, ...) of decode rows."""

        def cut(x: Tensor) -> Tensor:
            part = x.narrow(1, piece.start, piece.length) if self._is_of_tokens(x) else x
            return part.transpose(0, 1) if piece.decode and part is not x else part

        return self.forward(*each_tensor(cut, self.args), **each_tensor(cut, self.kwargs))


def each_tensor(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    """An argument with what `change` makes of each tensor in it."""
    if torch.is_tensor(x):
        return change(x)
    if isinstance(x, dict):
        return {key: each_tensor(change, each) for key, each in x.items()}
    return type(x)(each_tensor(change, each) for each in x) if type(x) in (tuple, list) else x


def _joined(outs: Sequence[Any], pieces: Sequence[MixedTokens]) -> Any:
    if torch.is_tensor(outs[0]):
        parts = [out.transpose(0, 1) if piece.decode else out for out, piece in zip(outs, pieces, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    if isinstance(outs[0], tuple | list):
        return type(outs[0])(_joined(each, pieces) for each in zip(*outs, strict=True))
    return outs[0]


_APART = set[type[nn.Module]]()
"""Modules that take prompts one by one."""


def _begins_anew(kind: Any) -> bool:
    """Whether several tokens begin without a state: the first Mamba's scan takes none, and gets them one by one."""
    return "mamba_selective_scan" in named(kind)


@cache
def named(kind: Any) -> frozenset[str]:
    """The names of globals and attributes in the methods that this class of modules defines; none in torch's."""
    if kind.__module__.startswith("torch."):
        return frozenset()
    functions = (inspect.unwrap(each) for each in vars(kind).values() if callable(each))
    codes = (getattr(each, "__code__", None) for each in functions)
    return frozenset(name for code in codes if code is not None for name in code.co_names)


def mixers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that ask a cache for states, by path; of those within each other the outermost."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        kind: Any = type(module)
        if not _CALLS.isdisjoint(named(kind)) and not any(path.startswith(f"{other}.") for other in found):
            found[path] = module
    return found


def take_mixers(model: nn.Module) -> None:
    """From now on a mixer's calls are those that the run says, see `ModelRun.mix`."""
    for module in mixers(model).values():
        module.forward = partial(_mix, module, module.forward)


def _mix(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return current().mix(MixerCall(module, forward, args, kwargs))
