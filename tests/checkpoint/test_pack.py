"""Weights packed for the disk: bytes and checksums, what later runs reuse, and what packing takes meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from h2o_flexgen.checkpoint import pack
from h2o_flexgen.checkpoint.pack import PackedUnit, ensure_packed
from h2o_flexgen.checkpoint.source import DummySource
from h2o_flexgen.memory.copies import checksum
from h2o_flexgen.memory.handle import packed_layout
from h2o_flexgen.memory.rundir import OffloadDir
from tests.checkpoint.models import Growth, droppable_pages, make_spec, open_tiny, read_all, weights, write_single
from tests.checkpoint.packing import GROUPS, SPEC, contents, packed_folder, unit_files
from tests.memory.conftest import without_direct


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_packed_weights_are_the_weights(tmp_path: Path, offload: OffloadDir, dtype: str) -> None:
    write_single(tmp_path, weights(SPEC))
    with open_tiny(tmp_path) as source:
        units = ensure_packed(GROUPS, source, dtype, offload)
        expected = read_all(source, SPEC, getattr(torch, dtype))
    found = contents(units)
    assert list(units) == [group.key for group in GROUPS]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for group in GROUPS:
        unit = units[group.key]
        assert unit.layout == packed_layout(group, dtype)
        (extent,) = unit.extents
        assert (extent.file_offset, extent.buffer_offset, extent.nbytes) == (0, 0, unit.layout.nbytes)
        assert os.path.getsize(extent.path) == unit.layout.nbytes
        assert oct(os.stat(extent.path).st_mode & 0o777) == "0o600"
    assert unit_files(offload) == ["manifest.json", *(f"unit-{number:04d}.bin" for number in range(1, 6))]


def test_gaps_between_tensors_are_zeros(offload: OffloadDir) -> None:
    units = ensure_packed(GROUPS, DummySource(SPEC), "float16", offload)
    for unit in units.values():
        data = bytearray(Path(unit.extents[0].path).read_bytes())
        for slot in unit.layout.slots:
            data[slot.offset : slot.offset + slot.nbytes] = bytes(slot.nbytes)
        assert not any(data)


def test_later_runs_reuse_and_add(offload: OffloadDir) -> None:
    source, calls = DummySource(SPEC), []
    first = ensure_packed(GROUPS[1:3], source, "float16", offload)
    times = {path: path.stat().st_mtime_ns for path in packed_folder(offload).glob("unit-*")}
    again = ensure_packed(GROUPS, source, "float16", offload, lambda done, total: calls.append((done, total)))
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert {key: again[key] for key in first} == first
    assert len(unit_files(offload)) == 1 + len(GROUPS)
    total = sum(packed_layout(group, "float16").nbytes for group in GROUPS if group.key not in first)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    calls.clear()
    assert ensure_packed(GROUPS, source, "float16", offload, lambda *call: calls.append(call)) == again
    assert not calls


def test_another_content_or_dtype_gets_a_folder_of_its_own(offload: OffloadDir) -> None:
    for source, dtype in ((DummySource(SPEC), "float16"), (DummySource(SPEC, seed=1), "float16")):
        ensure_packed(GROUPS[:1], source, dtype, offload)
    ensure_packed(GROUPS[:1], DummySource(SPEC), "float32", offload)
    assert len(list(offload.path.glob("packed-*"))) == 3


def test_the_checksum_is_of_the_files_bytes(offload: OffloadDir) -> None:
    for unit in ensure_packed(GROUPS, DummySource(SPEC), "float32", offload).values():
        data = torch.frombuffer(bytearray(Path(unit.extents[0].path).read_bytes()), dtype=torch.uint8)
        assert checksum((data,)) == unit.checksum


def test_two_packings_at_once_wait_for_each_other(offload: OffloadDir) -> None:
    results: list[dict[str, PackedUnit]] = []

    def run() -> None:
        with OffloadDir(offload.path) as mine:
            results.append(ensure_packed(GROUPS, DummySource(SPEC), "float16", mine))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result == results[0] for result in results)
    assert len(results) == 4
    assert len(unit_files(offload)) == 1 + len(GROUPS)


@pytest.mark.slow
def test_memory_is_one_unit(offload: OffloadDir) -> None:
    """Packing layers of 16 MiB takes one of them, and the page cache keeps none of what was written."""
    spec = make_spec(hidden_size=1024, ffn_dim=4096, word_embed_proj_dim=1024, num_hidden_layers=4)
    source = DummySource(spec, "float16")
    ensure_packed(spec.weight_groups[:1], source, "float16", offload)
    with Growth() as taken:
        units = ensure_packed(spec.weight_groups, source, "float16", offload)
    largest = max(unit.layout.nbytes for unit in units.values())
    assert largest >= 16 << 20
    assert largest - (1 << 20) < taken.nbytes < largest + (6 << 20)
    assert sum(droppable_pages(unit.extents[0].path) for unit in units.values()) < 100


def test_the_page_cache_stays_empty_without_direct_writes(offload: OffloadDir, monkeypatch: pytest.MonkeyPatch) -> None:
    without_direct(monkeypatch)
    spec = make_spec(hidden_size=512, ffn_dim=2048, word_embed_proj_dim=512)
    units = ensure_packed(spec.weight_groups, DummySource(spec), "float16", offload)
    assert sum(droppable_pages(unit.extents[0].path) for unit in units.values()) < 100
    contents(units)


def test_progress_is_fine_grained(offload: OffloadDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_STEP", 4096)
    calls: list[int] = []
    ensure_packed(GROUPS[:1], DummySource(SPEC), "float32", offload, lambda done, _: calls.append(done))
    assert calls == list(range(4096, calls[-1] + 1, 4096))
