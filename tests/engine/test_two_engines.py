"""Engines of one process: each plans with what the others leave."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.memory.pinned import PinnedPool
from tests.memory.fake_cuda import FakeDevice
from tests.programs import write_model

MIB = 1 << 20
PROCESS = 100 * MIB
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
NEW = 3
WORK = Workload(5, NEW, 3)
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.2 MiB of weights."""
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": 4}
    return write_model(tmp_path_factory.mktemp("larger") / "model", **sizes)


@pytest.fixture
def open_llm(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Engines of a process that holds 100 MiB beside what they place."""
    opened: list[Engine] = []

    def measured() -> int:
        return PROCESS + sum(used(llm) for llm in opened)

    def make(**settings: Any) -> Engine:
        opened.append(Engine(str(model), offload_dir=str(tmp_path / "offload"), **settings))
        return opened[-1]

    monkeypatch.setattr(devices, "before_placement", measured)
    return make


def used(llm: Engine) -> int:
    """Bytes in the memory tiers of an engine."""
    stages = () if llm._loaded is None else llm._loaded.stages
    return sum(tier.used for tier in {tier for each in stages for tier in (each.tiers.cpu, each.tiers.compute)})


def baseline(llm: Engine) -> int:
    return llm.plan(WORK).request.baseline


@pytest.mark.parametrize("settings", [{}, {"emulate_gpu": "64MiB"}, {"emulate_gpu": "64MiB", "num_gpus": 2}], ids=str)
def test_what_another_engine_holds_is_counted(settings: dict[str, Any], open_llm: Callable[..., Engine]) -> None:
    with open_llm() as second:
        with open_llm(**settings) as first:
            assert baseline(second) == PROCESS
            first.generate(PROMPTS, **SETTINGS)
            assert used(first) > 3 * MIB
            assert baseline(second) == PROCESS + used(first)
            assert baseline(first) == PROCESS, "its own weights are what it plans for"
            third = open_llm()
            assert baseline(third) == PROCESS + used(first), "there before the third was: counted once"
        with third:
            assert baseline(second) == baseline(third) == PROCESS, "what is closed holds nothing"


def test_caches_and_spare_memory_count_while_a_stream_goes_on(open_llm: Callable[..., Engine]) -> None:
    with open_llm(policy={"gpu_batch_size": 1, "num_gpu_batches": 1}) as first, open_llm() as second:
        stream = first.stream(PROMPTS, **SETTINGS)
        next(stream)
        during = baseline(second)
        assert len(list(stream)) == len(PROMPTS) - 1
        assert during > baseline(second) == PROCESS + used(first)


def test_a_cap_that_holds_one_model_streams_the_other(open_llm: Callable[..., Engine]) -> None:
    cap = 106 * MIB
    with open_llm(cpu_mem=cap) as first, open_llm(cpu_mem=cap) as second:
        assert second.plan(WORK).policy.weights == {"cpu": 1.0}
        expected = [output.token_ids for output in first.generate(PROMPTS, **SETTINGS)]
        assert first.last_plan.policy.weights == {"cpu": 1.0}
        assert [output.token_ids for output in second.generate(PROMPTS, **SETTINGS)] == expected
        assert second.last_plan.policy.weights["disk"] > 0
        assert PROCESS + used(first) + second._loaded.peaks()["cpu"] <= cap


def test_a_gpu_is_shared_too(open_llm: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose memory is the host's: what is held there is held on it."""
    with open_llm() as first:
        first.generate(PROMPTS, **SETTINGS)
        monkeypatch.setattr(devices, "open_gpu", lambda _: PinnedPool(FakeDevice()))
        with open_llm() as second:
            caps = second._caps()
        assert caps.gpu == devices.gpu_limit(FakeDevice(), None).nbytes - used(first)
        assert caps.why["gpu"].endswith("that other engines hold")


def test_relative_paths_stay_where_they_were(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever folder the process goes to between the calls."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(model.parent)
    how: dict[str, Any] = {"policy": {"weights": {"disk": 1.0}, "cache": {"disk": 1.0}}, "prefix_dir": "prefixes"}
    with Engine("model", offload_dir="offload", **how) as llm:
        monkeypatch.chdir(tmp_path / "elsewhere")
        llm.generate(PROMPTS, **SETTINGS)
        assert (model.parent / "offload" / "lock").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_engine_that_is_let_go_of_leaves_no_open_files(model: Path) -> None:
    def there() -> list[str]:
        gc.collect()
        return [found for each in Path("/proc/self/fd").iterdir() if (found := readlink(each)).startswith(str(model))]

    llm = Engine(str(model))
    llm.generate(PROMPTS, **SETTINGS)
    assert there()
    del llm
    assert not there()


def test_an_engine_that_is_let_go_of_leaves_neither_threads_nor_a_folder(model: Path, tmp_path: Path) -> None:
    def threads() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in before]

    before = threading.enumerate()
    llm = Engine(str(model), offload_dir=str(tmp_path), policy={"weights": {"disk": 1.0}, "cache": {"disk": 1.0}})
    llm.generate(PROMPTS, **SETTINGS)
    assert threads()
    assert list(tmp_path.glob("run-*"))
    del llm
    gc.collect()
    for thread in threads():
        thread.join(20)
    assert not threads()
    gc.collect()
    assert not list(tmp_path.glob("run-*"))


def readlink(path: Path) -> str:
    """Where it points; nothing for what has gone meanwhile."""
    return os.readlink(path) if path.is_symlink() else ""
