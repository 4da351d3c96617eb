"""What the engine really has alive while it computes, against the formulas that say how much that may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen import LLM, EvictionConfig, OffloadPolicy
from h2o_flexgen.engine.execution import attention
from h2o_flexgen.kernels import torch_attention
from tests.pairs import pairs
from tests.tiny import FAMILIES, make_model, prompts_of, save

COUNTED = ("hidden states", "cache records", "prompt K and V of one layer", "token positions", "workspace")
"""The items of a footprint that are made by operations, not taken from a tier."""


class Live(TorchDispatchMode):
    """The most bytes that were alive at once in tensors that operations have made."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._listed = 0  # bytes of all that `_live` has, of which some may be gone
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._foreign: set[int] = set()  # made elsewhere: weights, caches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (storage for storage, _ in storages((args, kwargs.values() if kwargs else ())))
        self._foreign.update(key for key in given if key not in self._live)
        result = func(*args, **(kwargs or {}))
        made = {key: x for key, x in storages((result,)) if key not in self._live and key not in self._foreign}
        self._live.update((key, (StorageWeakRef(x), x.nbytes())) for key, x in made.items())
        self._listed += sum(x.nbytes() for x in made.values())
        if self._listed > self.peak:  # only then more can be alive than ever before
            for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
                self._listed -= self._live.pop(key)[1]
            self.peak = max(self.peak, self._listed)
        return result


def storages(values: Iterable[Any]) -> Iterator[tuple[int, torch.UntypedStorage]]:
    """Those of the tensors among `values` and in lists of these, by their addresses."""
    for x in values:
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            yield storage._cdata, storage
        elif isinstance(x, Iterable) and not isinstance(x, str):
            yield from storages(x)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            model = make_model(name, hidden_size=64, max_position_embeddings=512)
            made[name] = save(model, tmp_path_factory.mktemp(name))
        return made[name]

    return make


LONG, MANY = [160] * 4, [8] * 32


WORK: dict[str, tuple[list[int], int, int, str, bool]] = {
    "in one piece": (LONG, 0, 2048, "float32", False),
    "in parts": (LONG, 0, 64, "float32", False),
    "shared and in parts": (LONG, 100, 48, "bfloat16", False),
    "one": ([400], 0, 2048, "bfloat16", False),
    "short": (MANY, 0, 64, "float32", False),
    "native parts": (LONG, 100, 48, "bfloat16", True),
    "native": ([400], 0, 2048, "bfloat16", True),
    "native short": (MANY, 0, 64, "bfloat16", True),
}
"""Lengths of prompts, how much of them is shared, tokens of a part, dtype, whether prompts are attended to in C."""


def possible(name: str, work: str, mode: str) -> bool:
    """Learned positions do not roll; in C prompts are attended to alike, but for windows and shared heads."""
    rolls = mode != "rolling" or FAMILIES[name].family != "opt"
    return rolls and (not WORK[work][-1] or name in ("opt", "gemma3"))


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "work", "mode"),
    pairs(["opt", "gemma3", "pythia", "olmoe"], WORK, ["full", "h2o", "rolling"], where=possible),
)
def test_what_is_alive_was_allowed(
    name: str, work: str, mode: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, shared, chunk, dtype, native = WORK[work]
    if not native:
        monkeypatch.setattr(attention, "prefill_attention", torch_attention.prefill_attention)
    eviction = EvictionConfig() if mode == "full" else EvictionConfig("h2o", 0.3, rolling_positions=mode == "rolling")
    prompts = prompts_of(lengths)
    prompts = [prompts[0][:shared] + prompt[shared:] for prompt in prompts]
    policy = OffloadPolicy(len(prompts), prefill_chunk=chunk)
    with LLM(str(folder_of(name)), dtype=dtype, eviction=eviction, policy=policy) as llm, Live() as live:
        llm.generate(prompts, max_new_tokens=16 if lengths is MANY else 4, ignore_eos=True)
        assert llm.last_plan is not None
        allowed = sum(item.nbytes for item in llm.last_plan.footprint.items if item.what in COUNTED)
    assert live.peak <= allowed
    if not native:  # which takes less than torch's operations, for which there must be room
        assert live.peak > 0.25 * allowed
