from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from h2o_flexgen.checkpoint import pack
from h2o_flexgen.checkpoint.dummy import DummySource
from h2o_flexgen.checkpoint.pack import PackedUnit, discard, ensure_packed
from h2o_flexgen.errors import ModelError, StorageError
from h2o_flexgen.memory.copies import CopyEngine, checksum
from h2o_flexgen.memory.disk import DirectFile
from h2o_flexgen.memory.handle import packed_layout, views
from h2o_flexgen.memory.rundir import OffloadDir
from tests.checkpoint.models import droppable_pages, make_spec, open_tiny, read_all, weights, write_single

SPEC = make_spec()
GROUPS = SPEC.weight_groups


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[OffloadDir]:
    with OffloadDir(tmp_path / "offload") as folder:
        yield folder


def packed_folder(offload: OffloadDir) -> Path:
    (folder,) = offload.path.glob("packed-*")
    return folder


def unit_files(offload: OffloadDir) -> list[str]:
    return sorted(path.name for path in packed_folder(offload).iterdir() if path.name != "lock")


def contents(units: dict[str, PackedUnit]) -> dict[str, torch.Tensor]:
    """Every tensor of the units, read as the engine reads them."""
    found = {}
    with CopyEngine() as copies:
        for unit in units.values():
            buffer = torch.full((unit.layout.nbytes,), 255, dtype=torch.uint8)
            copies.read_extents(unit.extents, buffer, digest=unit.checksum).wait()
            found |= {name: view.clone() for name, view in views(unit.layout, buffer).items()}
    return found


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


def test_an_interrupted_packing_keeps_what_it_finished(offload: OffloadDir) -> None:
    source = DummySource(SPEC)
    sizes = [packed_layout(group, "float16").nbytes for group in GROUPS]

    def interrupt(done: int, total: int) -> None:
        assert total == sum(sizes)
        if done > sizes[0] + sizes[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_packed(GROUPS, source, "float16", offload, interrupt)
    assert unit_files(offload) == ["manifest.json", "unit-0001.bin", "unit-0002.bin"]
    calls: list[int] = []
    units = ensure_packed(GROUPS, source, "float16", offload, lambda done, total: calls.append(total))
    assert set(calls) == {sum(sizes[2:])}
    assert len(contents(units)) == sum(len(group.tensors) for group in GROUPS)


def test_a_run_that_was_killed_leaves_no_rubbish(offload: OffloadDir) -> None:
    ensure_packed(GROUPS[:2], DummySource(SPEC), "float16", offload)
    folder = packed_folder(offload)
    for name in ("unit-0003.bin", "unit-0004.bin.tmp", "manifest.json.tmp"):
        (folder / name).write_bytes(b"torn")
    (folder / "mine.txt").write_text("not ours to touch")
    units = ensure_packed(GROUPS[:3], DummySource(SPEC), "float16", offload)
    assert unit_files(offload) == ["manifest.json", "mine.txt", *(f"unit-000{number}.bin" for number in (1, 2, 3))]
    contents(units)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"{}", b'{"units": 3}', b"\xff", b'{"version": 1, "units": {"vocab": {"file": "../x"}}}']
)
def test_a_torn_manifest_is_made_anew(offload: OffloadDir, text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    before = ensure_packed(GROUPS[:2], DummySource(SPEC), "float16", offload)
    (packed_folder(offload) / "manifest.json").write_bytes(text)
    with caplog.at_level("WARNING"):
        after = ensure_packed(GROUPS[:2], DummySource(SPEC), "float16", offload)
    assert "manifest.json cannot be used" in caplog.text
    assert after == before
    contents(after)


def test_a_manifest_that_points_elsewhere_is_not_believed(offload: OffloadDir, tmp_path: Path) -> None:
    ensure_packed(GROUPS[:1], DummySource(SPEC), "float16", offload)
    path = packed_folder(offload) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["units"]["vocab"]["file"] = f"../../{tmp_path.name}/victim.bin"
    path.write_text(json.dumps(manifest))
    (tmp_path / "victim.bin").write_bytes(b"mine")
    (unit,) = ensure_packed(GROUPS[:1], DummySource(SPEC), "float16", offload).values()
    assert Path(unit.extents[0].path).parent == packed_folder(offload)
    assert (tmp_path / "victim.bin").read_bytes() == b"mine"


@pytest.mark.parametrize("damage", ["remove", "cut", "layout", "link"])
def test_a_damaged_unit_is_packed_again(
    offload: OffloadDir, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = DummySource(SPEC)
    before = ensure_packed(GROUPS, source, "float16", offload)
    victim = Path(before["layers.0.mlp"].extents[0].path)
    if damage == "remove":
        victim.unlink()
    elif damage == "cut":
        os.truncate(victim, 4096)
    elif damage == "link":
        victim.rename(tmp_path / "elsewhere")
        victim.symlink_to(tmp_path / "elsewhere")
    else:
        path = packed_folder(offload) / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["units"]["layers.0.mlp"]["slots"][0][3] = 64
        path.write_text(json.dumps(manifest))
    with caplog.at_level("WARNING"):
        after = ensure_packed(GROUPS, source, "float16", offload)
    assert "packed again" in caplog.text
    assert {key for key in after if after[key] != before[key]} == {"layers.0.mlp"}
    assert not victim.exists()
    assert len(unit_files(offload)) == 1 + len(GROUPS)
    contents(after)


def test_a_flipped_bit_is_found_at_the_first_read_and_can_be_cured(offload: OffloadDir) -> None:
    source = DummySource(SPEC)
    units = ensure_packed(GROUPS, source, "float16", offload)
    unit = units["layers.1.attn"]
    with open(unit.extents[0].path, "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(StorageError):
        contents(units)
    discard(unit)
    contents(ensure_packed(GROUPS, source, "float16", offload))


def test_the_checksum_is_of_the_files_bytes(offload: OffloadDir) -> None:
    for unit in ensure_packed(GROUPS, DummySource(SPEC), "float32", offload).values():
        data = torch.frombuffer(bytearray(Path(unit.extents[0].path).read_bytes()), dtype=torch.uint8)
        assert checksum((data,)) == unit.checksum


def test_a_disk_without_room_is_refused_before_writing(offload: OffloadDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadDir, "free_bytes", lambda self: 1 << 20)
    with pytest.raises(StorageError, match="packing 5 weight groups as float16 needs") as caught:
        ensure_packed(GROUPS, DummySource(SPEC), "float16", offload)
    assert caught.value.exit_code == 6
    assert unit_files(offload) == []


@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename"])
@pytest.mark.parametrize("error", [28, 5])
def test_whatever_call_fails_the_folder_stays_usable(
    offload: OffloadDir, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """Fail at the n-th call, for every n, until a packing gets through."""
    real, source, failures = getattr(os, call), DummySource(SPEC), 0
    for number in range(100):
        left = number

        def fail(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left == -1 or (left < 0 and call == "pwritev"):  # writes are tried again
                raise OSError(error, os.strerror(error))
            return real(*arguments, **options)

        monkeypatch.setattr(os, call, fail)
        try:
            units = ensure_packed(GROUPS, source, "float16", offload)
            break
        except StorageError:
            failures += 1
            assert not [name for name in unit_files(offload) if name.endswith(".tmp")]
        finally:
            monkeypatch.setattr(os, call, real)
    assert failures >= 2
    contents(units)


def test_a_source_that_changes_stops_the_packing(tmp_path: Path, offload: OffloadDir) -> None:
    path = write_single(tmp_path, weights(SPEC))
    with open_tiny(tmp_path) as source:
        os.truncate(path, 20_000)
        with pytest.raises(ModelError, match="changed during the run"):
            ensure_packed(GROUPS, source, "float32", offload)
    assert "unit-0001.bin.tmp" not in unit_files(offload)


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


def test_memory_is_one_unit(tmp_path: Path) -> None:
    """Packing layers of 16 MiB takes one of them, and the page cache keeps none of what was written."""
    script = textwrap.dedent("""
        import resource, sys, torch
        from h2o_flexgen.checkpoint import pack
        from h2o_flexgen.checkpoint.dummy import DummySource
        from h2o_flexgen.memory.rundir import OffloadDir
        from tests.checkpoint.models import droppable_pages, make_spec
        spec = make_spec(hidden_size=1024, ffn_dim=4096, word_embed_proj_dim=1024, num_hidden_layers=4)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        source = DummySource(spec, "float16")
        with OffloadDir(sys.argv[1]) as folder:
            pack.ensure_packed(spec.weight_groups[:1], source, "float16", folder)
            before = peak()
            units = pack.ensure_packed(spec.weight_groups, source, "float16", folder)
            print(max(unit.layout.nbytes for unit in units.values()), peak() - before)
            print(sum(droppable_pages(unit.extents[0].path) for unit in units.values()))
    """)
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "offload")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path.cwd(),
    )
    largest, taken, cached = map(int, run.stdout.split())
    assert largest >= 16 << 20
    assert taken < largest + (6 << 20)
    assert cached < 100


def test_the_page_cache_stays_empty_without_direct_writes(offload: OffloadDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "DirectFile", partial(DirectFile, direct=False))
    spec = make_spec(hidden_size=512, ffn_dim=2048, word_embed_proj_dim=512)
    units = ensure_packed(spec.weight_groups, DummySource(spec), "float16", offload)
    assert sum(droppable_pages(unit.extents[0].path) for unit in units.values()) < 100
    contents(units)


def test_progress_is_fine_grained(offload: OffloadDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_STEP", 4096)
    calls: list[int] = []
    ensure_packed(GROUPS[:1], DummySource(SPEC), "float32", offload, lambda done, _: calls.append(done))
    assert calls == list(range(4096, calls[-1] + 1, 4096))
