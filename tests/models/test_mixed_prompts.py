"""Several prompts that go through a mixer in one call give the outputs and states that they give one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from h2o_flexgen.models.hf import mixers, states
from h2o_flexgen.models.hf.attention import ModelRun, current
from h2o_flexgen.models.hf.states import MixedTokens, MixerCall, States
from tests.models.test_mixers import KINDS, tiny

PLACES = 7


def _in_a_run(compute: Callable[[], Any]) -> Any:
    def never(*_: Any) -> Any:
        raise AssertionError("a mixer alone asks for nothing else")

    with torch.inference_mode():
        return ModelRun(compute, never, never, never, torch.zeros(1)).switch()


def _mixed(module: nn.Module, x: Tensor, make: Callable[[MixerCall], Iterator[MixedTokens]]) -> Tensor:
    """The output of a module for x (1, T, n), in the pieces that `make` makes of its call."""
    takes = inspect.signature(module.forward).parameters
    cache = next(each for each in ("cache", "cache_params", "past_key_values") if each in takes)

    def compute() -> Any:
        call = MixerCall(module, module.forward, (), {"hidden_states": x, cache: current().cache})
        return call.of(make(call))

    made: Tensor = _in_a_run(compute)
    return made


def _one_by_one(module: nn.Module, x: Tensor, lengths: list[int], behind: list[States]) -> tuple[Tensor, list[States]]:
    found = list[States]()

    def pieces(call: MixerCall) -> Iterator[MixedTokens]:
        start = 0
        for length, before in zip(lengths, behind, strict=True):
            piece = call.piece(start, length, {key: state.clone() for key, state in before.items()})
            yield piece
            found.append(piece.states.held())
            start += length

    return _mixed(module, x, pieces), found


def _at_once(
    module: nn.Module, x: Tensor, lengths: list[int], behind: list[States], places: list[int], views: States
) -> Tensor:
    def pieces(call: MixerCall) -> Iterator[MixedTokens]:
        yield call.prompts(0, list(zip(lengths, places, behind, strict=True)), views)

    return _mixed(module, x, pieces)


def _views(of: States) -> States:
    """Where the states of PLACES rows go, with numbers of others in them."""
    return {key: torch.randn(PLACES, *state.shape[1:]).to(state.dtype) for key, state in of.items()}


@contextmanager
def _counted(module: nn.Module) -> Iterator[list[int]]:
    """Within, the numbers of tokens of the module's calls."""
    counts, forward = list[int](), module.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts.append(next(each.shape[1] for each in (*args, *kwargs.values()) if torch.is_tensor(each)))
        return forward(*args, **kwargs)

    counting.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    module.forward = counting
    try:
        yield counts
    finally:
        module.forward = forward


@pytest.mark.parametrize("ours", [True, False], ids=["by kernels", "by transformers"])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_at_once_are_those_one_by_one(kind: str, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one token and of many, some behind others, in places that are neighbours or not; other places stay."""
    if not ours:
        monkeypatch.setattr(mixers.states, "library", lambda: None)
    model = tiny(kind, KINDS[kind][0])
    mixers.take_recurrences(model)
    module = next(iter(states.mixers(model).values()))
    lengths = [1, 2, 13, 3, 70]
    x = torch.randn(1, sum(lengths), 64)
    none: States = {}
    _, (shared,) = _one_by_one(module, torch.randn(1, 9, 64), [9], [none])
    for places in ([1, 2, 3, 4, 5], [6, 0, 3, 2, 4]):
        for behind in ([none] * 5, [none, shared, none, shared, shared]):
            wanted, ends = _one_by_one(module, x, lengths, behind)
            views = _views(shared)
            before = {key: view.clone() for key, view in views.items()}
            with _counted(module) as counts:
                found = _at_once(module, x, lengths, behind, places, views)
            assert counts == [x.shape[1]] or (kind == "mamba" and any(behind))
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * wanted.std().item())
            for key, view in views.items():
                for place, end in zip(places, ends, strict=True):
                    torch.testing.assert_close(view[place], end[key][0], rtol=1e-4, atol=1e-5)
                for place in set(range(PLACES)) - set(places):
                    assert torch.equal(view[place], before[key][place])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=PLACES), st.data())
def test_any_lengths_in_any_places(lengths: list[int], data: st.DataObject) -> None:
    places = data.draw(st.permutations(range(PLACES)))[: len(lengths)]
    model = tiny("qwen3_5_text", KINDS["qwen3_5_text"][0])
    mixers.take_recurrences(model)
    module = next(iter(states.mixers(model).values()))
    x = torch.randn(1, sum(lengths), 64)
    wanted, ends = _one_by_one(module, x, lengths, [{}] * len(lengths))
    views = _views(ends[0])
    found = _at_once(module, x, lengths, [{}] * len(lengths), list(places), views)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * wanted.std().item())
    for place, end in zip(places, ends, strict=False):
        for key, view in views.items():
            torch.testing.assert_close(view[place], end[key][0], rtol=1e-4, atol=1e-5)


class Own(nn.Module):
    """Adds to each token the one before it, by its cache, and does not say how."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, hidden_states: Tensor, cache: Any) -> Tensor:
        x = hidden_states.transpose(1, 2)
        if self.way == "convolves":
            return (
                x
                + cache.update_conv_state(nn.functional.pad(x, (1, 0)), 0, conv_kernel_size=2)[
                    ..., -1 - x.shape[2] : -1
                ]
            ).mT
        if self.way == "convolves what it is given":
            before = cache.layers[0].conv_states.get(0)
            known = torch.zeros_like(x[..., :1]) if before is None else before[..., -1:].clone()
            cache.update_conv_state(x, 0, conv_kernel_size=2)
            return (x + torch.cat([known, x[..., :-1]], -1)).mT
        state = cache.layers[0].recurrent_states.get(0)
        sums = x.cumsum(-1) if state is None else x.cumsum(-1) + state.unsqueeze(-1)
        cache.update_recurrent_state(sums[..., -1].contiguous(), 0)
        return sums.mT


@pytest.mark.parametrize("way", ["convolves", "convolves what it is given", "adds up"])
def test_modules_that_mix_tokens_by_themselves_get_prompts_one_by_one(way: str) -> None:
    module, lengths = Own(way), [3, 1, 5]
    x = torch.randn(1, 9, 4)
    for _ in range(2):
        wanted, ends = _one_by_one(module, x, lengths, [{}, {}, {}])
        views = _views(ends[0])
        with _counted(module) as counts:
            found = _at_once(module, x, lengths, [{}, {}, {}], [2, 0, 1], views)
        assert counts[-3:] == lengths
        assert torch.equal(found, wanted)
        for place, end in zip((2, 0, 1), ends, strict=True):
            for key, view in views.items():
                assert torch.equal(view[place], end[key][0])
    assert counts == lengths  # known by now
    states._APART.discard(Own)
