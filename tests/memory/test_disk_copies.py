"""Copies between disk and memory: data, checksums, and the errors of files and file systems."""

from __future__ import annotations

import errno
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h2o_flexgen.config.model.tensors import TensorSpec, WeightGroup
from h2o_flexgen.errors import ModelError, StorageError
from h2o_flexgen.memory.copies import CopyEngine, checksum
from h2o_flexgen.memory.handle import Extent, Location, direct_layout, views
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import DiskTier, Tiers
from tests.memory.buffers import padded, random_bytes, whole
from tests.memory.conftest import PWRITEV, Faulty, in_chunks, without_direct


def safetensors_locations(path: Path) -> dict[str, Location]:
    with path.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    return {
        name: Location(
            str(path), 8 + size + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


@pytest.mark.parametrize("direct", [True, False])
def test_weights_straight_out_of_safetensors(tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 8192)
    if not direct:
        without_direct(monkeypatch)
    shapes = {"b.weight": (300, 77), "a.weight": (64, 64), "z.bias": (5,), "m.weight": (1000, 3), "unused": (9000,)}
    saved = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(saved, tmp_path / "model.safetensors")
    names = [name for name in shapes if name != "unused"]
    group = WeightGroup("layers.0.attn", tuple(TensorSpec(name, shapes[name]) for name in names))
    layout, extents = direct_layout(group, "bfloat16", safetensors_locations(tmp_path / "model.safetensors"))
    assert len(extents) == 2, "the gap of the unused tensor is not read"
    buffer = padded(layout.nbytes)
    with CopyEngine() as engine:
        ticket = engine.read_extents(extents, buffer)
        ticket.wait()
        assert ticket.nbytes == sum(saved[name].nbytes for name in names)
        assert engine.bytes_moved == {"disk->cpu": ticket.nbytes}
        assert 0 < engine.busy_seconds["disk->cpu"] <= ticket.seconds
    for name, tensor in views(layout, buffer).items():
        assert torch.equal(tensor, saved[name])


def test_a_short_first_read_never_passes_for_the_whole(
    payload: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th call fails, for every n, once and for good: right bytes or an error, nothing between."""
    in_chunks(monkeypatch, 65536)
    path, data = payload
    for forever in (False, True):
        for short in (None, 0, 700, 4096):
            failing = 1
            while True:
                calls = Faulty(lambda n, f=failing, e=forever: n >= f if e else n == f, short=short)  # type: ignore[misc]
                out = padded(len(data))
                calls.install(monkeypatch)
                with CopyEngine() as engine:
                    ticket = engine.read_extents(whole(path, len(data)), out)
                    engine.drain()
                    if ticket.error is None:
                        assert out[: len(data)].numpy().tobytes() == data
                    else:
                        assert forever
                        assert isinstance(ticket.error, StorageError)
                        assert "layers.0.attn" in str(ticket.error)
                if calls.calls < failing:
                    break
                failing += 1
            assert failing > 3


def test_checksums(payload: tuple[str, bytes]) -> None:
    path, data = payload
    spans = (Extent(path, 4096, 5000, 0, "layers.7.mlp"), Extent(path, 40960, 100, 8192, "b"))
    good = padded(12288)
    with CopyEngine() as engine:
        engine.read_extents(spans, good).wait()
        digest = checksum((good[:5000], good[8192:8292]))
        engine.read_extents(spans, padded(12288), digest=digest).wait()
        with open(path, "r+b") as stream:
            stream.seek(4096 + 4999)
            stream.write(bytes([data[4096 + 4999] ^ 1]))
    with CopyEngine() as engine:
        ticket = engine.read_extents(spans, padded(12288), digest=digest)
        for _ in range(2):
            with pytest.raises(StorageError, match=r"layers\.7\.mlp.*bit flip") as flipped:
                ticket.wait()
        assert path in str(flipped.value)
        assert flipped.value.exit_code == 6


def test_a_checkpoint_that_shrinks_or_is_replaced(payload: tuple[str, bytes]) -> None:
    path, data = payload
    with CopyEngine() as engine:
        engine.watch([path])
        engine.read_extents(whole(path, len(data)), padded(len(data))).wait()
        os.truncate(path, 8192)
        with pytest.raises(ModelError, match="changed during the run") as changed:
            engine.read_extents(whole(path, len(data)), padded(len(data))).wait()
        assert changed.value.exit_code == 4
        with pytest.raises(ModelError, match="changed during the run"):
            engine.read_extents(whole(path, 4096), padded(4096)).wait()
    with CopyEngine() as engine:
        engine.watch([path], ours=True)
        Path(path + ".new").write_bytes(bytes(8192))
        os.replace(path + ".new", path)
        with pytest.raises(StorageError, match="replaced"):
            engine.read_extents(whole(path, 8192), padded(8192)).wait()


def test_a_missing_file_surfaces_at_wait(tmp_path: Path) -> None:
    with CopyEngine() as engine:
        ticket = engine.read_extents(whole(str(tmp_path / "gone"), 10), padded(10))
        with pytest.raises(ModelError, match="gone"):
            ticket.wait()
        assert ticket.issued()
        assert isinstance(ticket.error, ModelError)


def test_regions_round_trip_and_remember_their_digest(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 65536)
    region = tiers.disk.allocate(300_000, "kv cache")
    data, out = random_bytes(299_999), padded(299_999)[:299_999]
    with CopyEngine() as engine:
        written = engine.write(region, data)
        read = engine.read_region(region, out, after=written)
        read.wait()
        assert written.issued()
        assert torch.equal(out, data)
        assert engine.bytes_moved == {"cpu->disk": 299_999, "disk->cpu": 299_999}

        matrix = torch.randn(10, 33)
        part = region.part(8192, 8192)
        again = torch.empty_like(matrix)
        engine.read_region(part, again, after=engine.write(part, matrix)).wait()
        assert torch.equal(matrix, again)
        with pytest.raises(StorageError, match=r"kv cache.*bit flip"):
            engine.read_region(region, out).wait()  # the part's write went behind the whole region's back
        with pytest.raises(ValueError, match="do not fit"):
            engine.write(part, random_bytes(8193))


def test_a_flipped_bit_in_a_region_is_found(tiers: Tiers) -> None:
    region = tiers.disk.allocate(20_000, "kv cache")
    data = random_bytes(20_000)
    with CopyEngine() as engine:
        engine.write(region, data).wait()
        with open(region.file.path, "r+b") as stream:
            stream.seek(12_345)
            stream.write(bytes([int(data[12_345]) ^ 64]))
        with pytest.raises(StorageError, match="bit flip"):
            engine.read_region(region, torch.empty_like(data)).wait()


class FullDisk:
    """Has no space from the n-th write on."""

    def __init__(self, failing: int) -> None:
        self.failing, self.calls = failing, 0

    def pwritev(self, fd: int, views: list[memoryview], offset: int) -> int:
        self.calls += 1
        if self.calls >= self.failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return PWRITEV(fd, views, offset)


def test_a_disk_that_fills_up_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 8192)
    data = random_bytes(50_000)
    failing = 1
    while True:
        calls = FullDisk(failing)
        monkeypatch.setattr(os, "pwritev", calls.pwritev)
        with OffloadDir(tmp_path / "off") as folder, CopyEngine() as engine:
            tier = DiskTier(None, folder)
            region = tier.allocate(50_000, "kv cache")
            ticket = engine.write(region, data)
            read = engine.read_region(region, padded(50_000)[:50_000], after=ticket)
            engine.drain()
            if calls.calls < failing:
                read.wait()
                break
            for dependent in (ticket, read):
                with pytest.raises(StorageError, match="No space left"):
                    dependent.wait()
            tier.close()
        failing += 1
    assert failing == 1 + 7
