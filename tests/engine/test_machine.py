"""What the machine gives and gets back."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from h2o_flexgen.engine.limits import devices


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_freed_memory_below_memory_in_use_goes_back_to_the_system() -> None:
    small = [torch.ones(32 << 8) for _ in range(2000)]  # 32 KiB each: from the heap, not pages of their own
    last = torch.ones(32 << 8)
    full = devices.rss()
    small.clear()
    devices.return_free_pages()
    assert devices.rss() < full - (40 << 20)
    assert last.sum() == 32 << 8


def test_a_library_without_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_malloc_trim", lambda: None)
    devices.return_free_pages()


GIB = 1 << 30
V2 = ("0::/a.slice/b.slice/c.scope", "", "memory.max", "memory.current", "max")
V1 = (
    "4:cpu,memory:/a.slice/b.slice/c.scope",
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    2**63 - 4096,
)


class Groups:
    """A made-up hierarchy of control groups that this process, of 1 GiB, is in; 64 GiB are available beside it."""

    def __init__(self, folder: Path, version: tuple[Any, ...], patch: pytest.MonkeyPatch) -> None:
        own, mount, self._limit, self._usage, self.unlimited = version
        self.root, self._cache = folder / "fs" / mount, "total_inactive_file" if mount else "inactive_file"
        (self.root / "a.slice" / "b.slice" / "c.scope").mkdir(parents=True)
        self.own = folder / "own"
        self.own.write_text(f"9:cpuset:/elsewhere\n{own}\n")
        patch.setattr(devices, "_CGROUPS", folder / "fs")
        patch.setattr(devices, "_OWN_CGROUPS", self.own)
        patch.setattr(devices, "rss", lambda: GIB)
        patch.setattr(devices.psutil, "virtual_memory", lambda: SimpleNamespace(available=63 * GIB))

    def put(self, name: str, limit: int | str, used: float = 0, cache: float = 0) -> None:
        (self.root / name / self._limit).write_text(f"{limit}\n")
        (self.root / name / self._usage).write_text(f"{int(used * GIB)}\n")
        active = self._cache.replace("inactive", "active")
        figures = f"anon 5\n{self._cache} {int(cache * GIB) - 4096}\n{active} 4096\n{self._cache}_too 7\n"
        (self.root / name / "memory.stat").write_text(figures)


@pytest.fixture(params=[V2, V1], ids=["v2", "v1"])
def groups(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(tmp_path, request.param, monkeypatch)


def test_a_limit_above_the_own_control_group_counts(groups: Groups) -> None:
    assert devices.cgroup_limit() is None
    assert devices.cgroup_room() is None
    assert devices.cpu_limit() == (int(0.9 * 64 * GIB), "90% of 64 GiB available")
    groups.put("a.slice/b.slice/c.scope", groups.unlimited)
    groups.put("a.slice/b.slice", 3 * GIB)
    groups.put("a.slice", 2 * GIB)
    assert devices.cgroup_limit() == 2 * GIB
    groups.put("", GIB)  # where a container mounts its own
    assert devices.cgroup_limit() == GIB
    assert devices.cpu_limit() == (int(0.9 * GIB), "90% of 1 GiB that the control group may use")


def test_what_others_in_the_control_group_use_is_theirs(groups: Groups) -> None:
    """8 GiB less 3 of page cache and this process's own: 4 are somebody else's."""
    groups.put("a.slice/b.slice/c.scope", 16 * GIB, used=8, cache=3)
    assert devices.cgroup_room() == 11 * GIB
    assert devices.cpu_limit() == (int(0.9 * 12 * GIB), "90% of 12 GiB that others in the control group leave")
    groups.put("a.slice", 20 * GIB, used=18, cache=0.5)
    assert devices.cgroup_limit() == 16 * GIB
    assert devices.cpu_limit().nbytes == int(0.9 * 3.5 * GIB), "the least that any of them leaves"
    groups.put("a.slice", 20 * GIB, used=21)
    assert devices.cpu_limit().nbytes == int(0.9 * GIB), "never less than is held"


def test_alone_in_a_control_group_all_of_it_may_be_used(groups: Groups) -> None:
    """However full of page cache it is; pages of files that are mapped are counted as cache and as the process's."""
    groups.put("a.slice/b.slice/c.scope", 16 * GIB, used=15.9, cache=15)
    assert devices.cpu_limit() == (int(0.9 * 16 * GIB), "90% of 16 GiB that the control group may use")


@pytest.mark.parametrize("own", [b"", b"\xff\xfe\n::\nnothing\n:", b"0::/../..\n4:memory:/../..\n", None])
def test_control_groups_that_make_no_sense_are_no_error(groups: Groups, own: bytes | None) -> None:
    """All that can be read is what is mounted."""
    groups.own.unlink()
    if own is not None:
        groups.own.write_bytes(own)
    groups.put("", "lots")
    assert devices.cgroup_limit() is None
    groups.put("", 16 * GIB, used=8)
    for path in groups.root.glob("memory.*"):
        if "limit" not in path.name and "max" not in path.name:
            path.write_bytes(b"inactive_file\ninactive_file x\n\xff\ntotal_inactive_file 1 2")
    assert devices.cgroup_limit() == devices.cgroup_room() == 16 * GIB
    for path in groups.root.glob("memory.*"):
        path.unlink()
        path.mkdir()
    assert devices.cgroup_limit() is None
