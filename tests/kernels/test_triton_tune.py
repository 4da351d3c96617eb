"""The choice among configurations, and that trying them out leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from triton.runtime.errors import OutOfResources

from h2o_flexgen.kernels import triton_tune
from h2o_flexgen.kernels.triton_tune import Config, fastest
from tests.kernels.triton_pair import Pair, keeps

CONFIGS = [Config(64, 4, 2), Config(128, 4, 2), Config(32, 8, 3)]


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    triton_tune.forget()
    yield
    triton_tune.forget()


def test_the_fastest_is_taken_and_remembered() -> None:
    asked: list[Config] = []
    times = dict(zip(CONFIGS, (3.0, 1.0, 2.0), strict=True))

    def clock(call) -> float:
        call()
        return times[asked[-1]]

    assert fastest("kind", CONFIGS, asked.append, clock) == CONFIGS[1]
    assert fastest("kind", CONFIGS, asked.append, clock) == CONFIGS[1]
    assert asked == CONFIGS
    assert fastest("another", CONFIGS[:1], asked.append, clock) == CONFIGS[0]


def test_what_does_not_fit_is_left_out() -> None:
    def run(config: Config) -> None:
        if config.block > 32:
            raise OutOfResources(2, 1, "shared memory")

    def clock(call) -> float:
        call()
        return 1.0

    assert fastest("kind", CONFIGS, run, clock) == CONFIGS[2]
    with pytest.raises(OutOfResources):
        fastest("another", CONFIGS[:2], run, clock)


def test_without_memory_to_measure_with_it_is_the_first() -> None:
    def clock(call) -> float:
        raise torch.OutOfMemoryError("256 MiB")

    assert fastest("kind", CONFIGS, lambda config: None, clock) == CONFIGS[0]


@pytest.mark.parametrize("splits", [1, 2])
def test_trying_out_changes_nothing(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def twice(call) -> float:
        call()
        call()
        tried.append(call)
        return float(len(tried))

    monkeypatch.setattr(triton_tune, "_milliseconds", twice)
    pair = Pair([(30, keeps(20, 6)), (9, keeps(20, 6))], kv_heads=1, group=2, splits=splits)
    pair.kernel._tune = True
    for _ in range(3):
        pair.step()
    pair.check_contents()
    assert len(tried) == 5, f"the candidates, once, on {DEVICE}"
