"""Packings cut short, torn, tampered with or refused by the disk: what is whole is kept, the rest is made anew."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from h2o_flexgen.checkpoint.pack import discard, ensure_packed
from h2o_flexgen.checkpoint.source import DummySource
from h2o_flexgen.errors import ModelError, StorageError
from h2o_flexgen.memory.handle import packed_layout
from h2o_flexgen.memory.rundir import OffloadDir
from tests.checkpoint.models import open_tiny, weights, write_single
from tests.checkpoint.packing import GROUPS, SPEC, contents, packed_folder, unit_files


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
    for name in ("unit-0003.bin", "unit-0004.bin.tmp", "manifest.json.tmp", ".unit-0005.bin.7.tmp"):
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


def test_a_disk_without_room_is_refused_before_writing(offload: OffloadDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadDir, "free_bytes", lambda self: 1 << 20)
    with pytest.raises(StorageError, match="packing 5 weight groups as float16 needs") as caught:
        ensure_packed(GROUPS, DummySource(SPEC), "float16", offload)
    assert caught.value.exit_code == 6
    assert unit_files(offload) == []


@pytest.mark.parametrize("call", ["pwritev", "fsync", "replace"])
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
    assert unit_files(offload) == []
