"""The same tokens wherever weights, cache and hidden states live and however the block is cut; bytes as planned."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.limits import devices
from h2o_flexgen.errors import PlanError
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import HostMemory, Ledger
from h2o_flexgen.reporting.run_report import run_report
from tests.policy_matrix import POLICIES, PolicyRow
from tests.tiny import prompts_of

pytestmark = pytest.mark.usefixtures("rewriting")

LENGTHS = [23, 40, 12, 40, 31, 8, 19]
NEW = 9  # more than the steps after which a cache on disk is rewritten
SETTINGS: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}

CPU, DISK, MIXED = {"cpu": 1.0}, {"disk": 1.0}, {"cpu": 0.5, "disk": 0.5}
GPU, THREE = {"gpu": 1.0}, {"gpu": 0.3, "cpu": 0.3, "disk": 0.4}

ON_CPU: dict[str, dict[str, Any]] = {
    "all-cpu": {"weights": CPU, "cache": CPU, "hidden": CPU},
    "all-disk": {"weights": DISK, "cache": DISK, "hidden": DISK},
    "weights-disk": {"weights": DISK, "cache": CPU, "hidden": CPU},
    "weights-mixed": {"weights": MIXED, "cache": CPU, "hidden": CPU},
    "cache-disk": {"weights": CPU, "cache": DISK, "hidden": CPU},
    "cache-mixed": {"weights": CPU, "cache": MIXED, "hidden": CPU},
    "hidden-disk": {"weights": CPU, "cache": CPU, "hidden": DISK},
    "deep-lookahead": {"weights": DISK, "cache": DISK, "hidden": CPU, "lookahead": 3},
    "no-overlap": {"weights": DISK, "cache": DISK, "hidden": DISK, "overlap": False},
}
ON_GPU: dict[str, dict[str, Any]] = {
    "all-gpu": {"weights": GPU, "cache": GPU, "hidden": GPU},
    "all-cpu": {"weights": CPU, "cache": CPU, "hidden": CPU},
    "all-disk": {"weights": DISK, "cache": DISK, "hidden": DISK},
    "three-tiers": {"weights": THREE, "cache": THREE, "hidden": THREE},
    "cpu-cache-compute": {"weights": CPU, "cache": CPU, "hidden": GPU, "cpu_cache_compute": True},
}
SHAPES = [(7, 1), (3, 1), (2, 2), (1, 7), (3, 3)]


@pytest.fixture(scope="module")
def expected(checkpoint) -> dict[str, list[list[int]]]:
    """Tokens of every policy with everything resident, one prompt at a time."""
    folder, tokens = checkpoint("opt")[1], {}
    for row in POLICIES:
        eviction = row.eviction()
        one = {"gpu_batch_size": 1}
        with Engine(folder, dtype="float32", eviction=eviction, policy=one, seed=eviction.seed) as llm:
            tokens[row.name] = [o.token_ids for o in llm.generate(prompts_of(LENGTHS), **SETTINGS)]
    return tokens


def _tokens(folder: str, policy: dict[str, Any], shape: tuple[int, int], eviction: EvictionConfig, **engine: Any):
    block = {"gpu_batch_size": shape[0], "num_gpu_batches": shape[1]}
    with Engine(
        folder, dtype="float32", eviction=eviction, policy={**policy, **block}, seed=eviction.seed, **engine
    ) as llm:
        tokens = [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **SETTINGS)]
        record = llm.last_record
    assert record is not None
    return tokens, record


@pytest.mark.turns
@pytest.mark.parametrize(
    ("placement", "shape"),
    [
        pytest.param(placement, shape, id=f"{placement}-{shape}")
        for i, placement in enumerate(ON_CPU)
        for j, shape in enumerate(SHAPES)
        if j == i % len(SHAPES) or (placement, shape) == ("all-disk", (3, 3))
    ],
)
def test_cpu_and_disk_placements(placement: str, shape: tuple[int, int], checkpoint, expected) -> None:
    eviction = EvictionConfig("h2o", ratio=0.3)
    tokens, record = _tokens(checkpoint("opt")[1], ON_CPU[placement], shape, eviction)
    assert tokens == expected["h2o"]
    asked = {**ON_CPU[placement], **({"hidden": CPU} if shape[1] == 1 else {})}  # one batch alone is never parked
    for kind in ("weights", "cache", "hidden"):
        assert set(record.policy[kind]) <= set(asked[kind])
    assert any("never parked" in text for text in record.warnings) == (asked["hidden"] != ON_CPU[placement]["hidden"])


@pytest.mark.turns
@pytest.mark.parametrize(
    ("placement", "shape"),
    [
        pytest.param(placement, shape, id=f"{placement}-{shape}")
        for i, placement in enumerate(ON_GPU)
        for j, shape in enumerate([(3, 1), (2, 2), (3, 3)])
        if placement == "cpu-cache-compute" or (i + j) % 3 == 1
    ],
)
def test_emulated_gpu_placements(placement: str, shape: tuple[int, int], checkpoint, expected) -> None:
    eviction = EvictionConfig("h2o", ratio=0.3)
    tokens, record = _tokens(checkpoint("opt")[1], ON_GPU[placement], shape, eviction, emulate_gpu="1GiB")
    assert tokens == expected["h2o"]
    assert record.device == "emulated gpu"
    if placement == "cpu-cache-compute":
        # Prompts cross, and q, k, v and the answer of decode steps; where there is nothing else to compute meanwhile
        # not even these: an emulated gpu shares the host's memory.
        layers, width = 3, 32 * 4
        prompts = sum(LENGTHS) * layers * (2 * width + 4 * 4)  # K, V and a sum for each of four heads
        queries = NEW * len(LENGTHS) * layers * 3 * width
        assert prompts <= record.bytes_moved["gpu->cpu"] <= prompts + (queries if shape[1] > 1 else 0)
    elif placement != "all-gpu":
        assert record.bytes_moved["cpu->gpu"] > 0


@pytest.mark.turns
@pytest.mark.parametrize(
    ("policy", "placement", "gpu"),
    [
        pytest.param(row, *(("all-disk", None), ("three-tiers", "1GiB"))[i % 2], id=row.name)
        for i, row in enumerate(POLICIES)
    ],
)
def test_every_policy(policy: PolicyRow, placement: str, gpu: str | None, checkpoint, expected) -> None:
    """Long enough that moving caches are rewritten; shorter runs of every policy on every tier: test_matrix.py."""
    placements = ON_CPU if gpu is None else ON_GPU
    tokens, _ = _tokens(checkpoint("opt")[1], placements[placement], (2, 3), policy.eviction(), emulate_gpu=gpu)
    assert tokens == expected[policy.name]


@pytest.mark.slow
def test_weights_are_read_once_per_step_and_block(checkpoint) -> None:
    """Bytes counted equal the plan: every group once per step, the tied vocabulary once more at the start."""
    folder = checkpoint("opt")[1]
    policy = {"weights": DISK, "cache": CPU, "hidden": CPU}
    for shape, blocks in (((7, 1), 1), ((2, 4), 1), ((2, 2), 2), ((7, 1), 1)):
        _, record = _tokens(folder, policy, shape, EvictionConfig())
        with Engine(folder, dtype="float32") as llm:
            groups = {group.key: group.nbytes("float32") for group in llm.model.spec.weight_groups}
        expected = sum(size * (NEW + 1 if key == "vocab" else NEW) for key, size in groups.items())
        assert record.bytes_moved["disk->cpu"] == pytest.approx(blocks * expected, rel=0.02)


def test_h2o_takes_a_fifth_of_the_kv_memory(checkpoint) -> None:
    folder = checkpoint("opt")[1]
    full = _tokens(folder, ON_CPU["all-cpu"], (7, 1), EvictionConfig())[1].kv_bytes
    h2o = _tokens(folder, ON_CPU["all-cpu"], (7, 1), EvictionConfig("h2o", ratio=0.2))[1].kv_bytes
    assert h2o / full == pytest.approx(0.2, abs=0.03)  # one slot more than a fifth of 60


def test_nothing_is_left_behind(checkpoint, tmp_path: Path) -> None:
    before = Counter(thread.name for thread in threading.enumerate())
    offload = tmp_path / "offload"
    for close_early in (False, True):
        llm = Engine(checkpoint("opt")[1], dtype="float32", policy=ON_CPU["all-disk"], offload_dir=str(offload))
        stream = llm.stream(prompts_of(LENGTHS), **SETTINGS)
        next(stream)
        if not close_early:
            list(stream)
        stream.close()
        llm.close()
        assert Counter(thread.name for thread in threading.enumerate()) == before
        assert [path.name for path in offload.iterdir() if path.name.startswith("run-")] == []


def test_interrupted_run_leaves_nothing_behind_and_can_go_on(checkpoint, tmp_path: Path, monkeypatch) -> None:
    offload = tmp_path / "offload"
    with Engine(checkpoint("opt")[1], dtype="float32", policy=ON_CPU["all-disk"], offload_dir=str(offload)) as llm:
        expected = [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **SETTINGS)]
        calls = 0

        def interrupt(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 20:
                raise KeyboardInterrupt

        mlp = llm._decoder.mlp
        monkeypatch.setattr(llm._decoder, "mlp", lambda w, h: interrupt() or mlp(w, h))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts_of(LENGTHS), **SETTINGS)
        assert [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **SETTINGS)] == expected
    assert [path for path in offload.glob("run-*")] == []


@pytest.mark.parametrize(
    ("caps", "policy", "flag"),
    [
        ({"emulate_gpu": "1MiB"}, ON_GPU["all-gpu"], "--emulate-gpu 18MiB"),
        ({"emulate_gpu": "1MiB"}, ON_GPU["three-tiers"], "--emulate-gpu "),
        ({"cpu_mem": "1MiB"}, ON_CPU["all-cpu"], "--cpu-mem "),
        ({"cpu_mem": "1MiB"}, {}, "--cpu-mem "),
        ({"disk_mem": "1MiB"}, ON_CPU["all-disk"], "--nvme-mem "),
    ],
    ids=["gpu", "three-tiers", "cpu", "by-rule", "disk"],
)
def test_a_plan_that_does_not_fit_is_refused_before_anything_is_allocated(
    caps: dict[str, Any], policy: dict[str, Any], flag: str, checkpoint, tmp_path: Path, monkeypatch
) -> None:
    """No byte is counted, allocated, read or written, no file reserved, no offload folder made. One that fits does all
    of these."""
    offload, done = tmp_path / "offload", set[str]()

    def noting(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def noted(*given: Any, **named: Any) -> Any:
            done.add(name)
            return whole(*given, **named)

        monkeypatch.setattr(owner, name, noted)

    for name in ("preadv", "pwritev", "posix_fallocate"):
        noting(os, name)
    for owner, name in ((Ledger, "charge"), (HostMemory, "allocate"), (OffloadDir, "__init__")):
        noting(owner, name)
    settings: dict[str, Any] = {"dtype": "float32", "offload_dir": str(offload)}
    with Engine(checkpoint("opt")[1], **settings, **caps, policy=policy and {**policy, "gpu_batch_size": 40}) as llm:
        done.clear()
        with pytest.raises(PlanError, match=r"on the \w+ tier, and its cap is") as caught:
            llm.generate(prompts_of([100] * 40), **SETTINGS)
        assert f"give {flag}" in str(caught.value)
        assert (done, llm._loaded, offload.exists()) == (set(), None, False)
    with Engine(checkpoint("opt")[1], **settings, policy=ON_CPU["all-disk"]) as llm:
        llm.generate(prompts_of(LENGTHS[:2]), **SETTINGS)
    assert done == {"preadv", "pwritev", "posix_fallocate", "charge", "allocate", "__init__"}


def test_a_peak_above_the_cap_is_told_with_both(checkpoint, monkeypatch) -> None:
    """A warning of the record names what was measured and the cap; there is none at the cap, nor of what the process
    had used before there was the engine."""
    peak = 16 << 30
    monkeypatch.setattr(devices, "peak_rss", lambda: peak)
    for before, after, told in (
        (1, 16, []),
        (1, 17, ["peak resident memory of 17 GiB is above the cap of 16 GiB"]),
        (17, 17, []),
        (17, 18, ["peak resident memory of 18 GiB is above the cap of 16 GiB"]),
    ):
        peak = before << 30
        with Engine(checkpoint("opt")[1], dtype="float32", cpu_mem="16GiB") as llm:
            peak = after << 30
            llm.generate(prompts_of([5]), max_new_tokens=2)
            record = llm.last_record
            assert [text.partition(":")[0] for text in record.warnings if "resident" in text] == told
            assert record.peak_bytes["rss"] == peak
            assert all(text in run_report(record) for text in told)


def test_the_peak_is_not_that_of_who_started_the_process() -> None:
    child = "from h2o_flexgen.engine.limits.devices import peak_rss; print(peak_rss())"
    parent = f"import subprocess, sys; held = bytearray(1 << 30); subprocess.run([sys.executable, '-c', {child!r}])"
    peak = int(subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, check=True).stdout)
    assert 10 << 20 < peak < 1 << 30


def test_weights_stay_where_they_are_while_caches_fit_beside_them(checkpoint) -> None:
    with Engine(checkpoint("opt")[1], dtype="float32", emulate_gpu="1500KiB") as llm:
        expected = [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **SETTINGS)]
        loaded = llm._loaded
        llm.generate(prompts_of(LENGTHS[:2]), **SETTINGS)
        llm.score([(prompt, [5, 6]) for prompt in prompts_of(LENGTHS)])
        assert [output.token_ids for output in llm.generate(prompts_of(LENGTHS), **SETTINGS)] == expected
        assert llm._loaded is loaded


def test_the_rule_places_as_much_as_fits_on_the_fastest_tier(checkpoint) -> None:
    folder = checkpoint("opt")[1]
    with Engine(folder, dtype="float32", emulate_gpu="1GiB") as llm:
        llm.generate(prompts_of(LENGTHS * 4), **SETTINGS)
        assert llm.last_record.policy["weights"] == {"gpu": 1.0}
        whole = llm.last_plan.footprint.total("gpu")
    with Engine(folder, dtype="float32", emulate_gpu=f"{whole - 30000}B") as llm:
        llm.generate(prompts_of(LENGTHS * 4), **SETTINGS)
        weights = llm.last_record.policy["weights"]
        assert 0 < weights["gpu"] < 1
        assert weights["gpu"] + weights["cpu"] == pytest.approx(1)
        assert llm.last_record.peak_bytes["gpu"] <= whole - 30000
