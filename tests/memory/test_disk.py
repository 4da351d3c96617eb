from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h2o_flexgen.errors import ModelError, StorageError
from h2o_flexgen.memory.disk import RETRIES, DirectFile, host_view
from h2o_flexgen.memory.tiers import HostMemory
from tests.memory.conftest import PREADV, Faulty, without_direct

SHM = Path("/dev/shm")


def aligned(nbytes: int, lead: int = 0) -> torch.Tensor:
    """`nbytes` bytes of 0xAA that start `lead` bytes behind a page boundary."""
    tensor = HostMemory().allocate(nbytes + lead).tensor[lead:]
    return tensor.fill_(0xAA)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


@pytest.fixture(params=["direct", "buffered"])
def file(
    request: pytest.FixtureRequest, payload: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[DirectFile]:
    if request.param != "direct":
        without_direct(monkeypatch)
    opened = DirectFile.open(payload[0])
    if request.param == "direct" and not opened.direct:
        pytest.skip("no O_DIRECT here")
    yield opened
    opened.close()
    opened.close()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_span_to_any_place(file: DirectFile, payload: tuple[str, bytes], data: st.DataObject) -> None:
    """Alignment is a matter of speed, never of content; memory outside the given view is never touched."""
    whole = payload[1]
    offset = data.draw(st.integers(0, len(whole)))
    nbytes = data.draw(st.integers(0, len(whole) - offset))
    lead = data.draw(st.sampled_from((0, 0, 8, 4095)))
    same = data.draw(st.booleans())
    at = (offset - lead) % 4096 if same else data.draw(st.integers(0, 5000))
    room = data.draw(st.sampled_from((0, 1, 4096)))
    canvas = aligned(lead + at + nbytes + room + 4096)
    out = canvas[lead : lead + at + nbytes + room]
    file.read(host_view(out), at, offset, nbytes, "t")
    assert as_bytes(out[at : at + nbytes]) == whole[offset : offset + nbytes]
    assert set(as_bytes(canvas[:lead])) <= {0xAA}
    assert set(as_bytes(canvas[lead + at + nbytes + room :])) <= {0xAA}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("lead", "nbytes"), [(0, 8192), (0, 10000), (8, 8192), (8, (1 << 20) + 77), (0, 0), (0, 5)])
def test_writes_come_back(
    tmp_path: Path, direct: bool, lead: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        without_direct(monkeypatch)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    file = DirectFile(str(tmp_path / "f"), fd, writable=True)
    data = aligned(nbytes, lead).random_(0, 256)
    file.write(host_view(data), 0, 4096, nbytes, "t")
    out = aligned(nbytes)
    file.read(host_view(out), 0, 4096, nbytes, "t")
    assert torch.equal(out, data)
    with pytest.raises(ValueError, match="start on a page"):
        file.write(host_view(data), 0, 100, 0, "t")
    file.close()


@pytest.mark.skipif(not SHM.is_dir(), reason="needs a tmpfs")
def test_a_file_system_in_memory(payload: tuple[str, bytes]) -> None:
    path = SHM / f"h2o-test-{os.getpid()}"
    shutil.copyfile(payload[0], path)
    try:
        file = DirectFile.open(str(path))
        out = aligned(len(payload[1]))
        file.read(host_view(out), 0, 0, out.numel(), "t")
        assert as_bytes(out) == payload[1]
        file.close()
    finally:
        path.unlink()


class NoDirect:
    """A file system that takes the O_DIRECT flag and then refuses every read with it."""

    def __init__(self) -> None:
        self.file: DirectFile | None = None
        self.refused = 0

    def preadv(self, fd: int, views: list[memoryview], offset: int) -> int:
        if self.file is not None and self.file.direct:
            self.refused += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        return PREADV(fd, views, offset)


def test_direct_io_refused_at_the_first_read(payload: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = NoDirect()
    monkeypatch.setattr(os, "preadv", calls.preadv)
    file = calls.file = DirectFile.open(payload[0])
    out = aligned(len(payload[1]))
    file.read(host_view(out), 0, 0, out.numel(), "t")
    assert as_bytes(out) == payload[1]
    assert not file.direct
    assert calls.refused <= 1
    file.close()


def test_buffered_reads_do_not_fill_the_page_cache(payload: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    without_direct(monkeypatch)
    path, data = payload
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)
    file = DirectFile.open(path)
    out = aligned(len(data))
    assert _cached_pages(path) > 0  # just written
    file.read(host_view(out), 0, 0, out.numel(), "t")
    assert _cached_pages(path) == 0
    file.close()


def _cached_pages(path: str) -> int:
    """Pages of a file that the kernel holds: asking by a read would begin to read them."""
    with open(path, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    first, held = ctypes.c_char.from_buffer(mapped), (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(ctypes.addressof(first))
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(mapped)), held) == 0
    del first, address
    mapped.close()
    return sum(page & 1 for page in held)


@pytest.mark.parametrize("short", [None, 0, 1, 1000, 4096, 5000])
@pytest.mark.parametrize("direct", [True, False])
def test_one_failing_read_is_retried_wherever_it_happens(
    payload: tuple[str, bytes], short: int | None, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        without_direct(monkeypatch)
    path, data = payload
    failing = 1
    while True:
        calls = Faulty(lambda n, failing=failing: n == failing, short=short)  # type: ignore[misc]
        calls.install(monkeypatch)
        file = DirectFile.open(path)
        out = aligned(len(data))
        file.read(host_view(out), 0, 0, out.numel(), "t")
        file.close()
        assert as_bytes(out) == data
        if calls.calls < failing:
            break
        failing += 1
    assert failing > 1


@pytest.mark.parametrize("short", [None, 0])
def test_a_read_that_keeps_failing_names_everything(
    payload: tuple[str, bytes], short: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_direct(monkeypatch)
    path, data = payload
    calls = Faulty(lambda n: n > 1, short=short)
    calls.install(monkeypatch)
    file = DirectFile.open(path)
    out = host_view(aligned(len(data)))
    file.read(out, 0, 0, 4096, "t")
    with pytest.raises(StorageError) as failed:
        file.read(out, 4096, 4096, 8192, "layers.3.attn.q.weight")
    file.close()
    assert failed.value.exit_code == 6
    for words in ("layers.3.attn.q.weight", path, "byte 4096", "after 3 retries"):
        assert words in str(failed.value)
    assert calls.calls == 2 + RETRIES


def test_other_errors_are_not_retried(payload: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Faulty(lambda _: True, error=errno.EACCES)
    calls.install(monkeypatch)
    file = DirectFile.open(payload[0])
    with pytest.raises(StorageError, match="Permission denied"):
        file.read(host_view(aligned(4096)), 0, 0, 4096, "t")
    assert calls.calls == 1
    file.close()


@pytest.mark.parametrize("short", [None, 0, 1, 4096])
def test_one_failing_write_is_retried(tmp_path: Path, short: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    data = aligned(5 * 4096 + 17).random_(0, 256)
    failing = 1
    while True:
        calls = Faulty(lambda n, failing=failing: n == failing, short=short)  # type: ignore[misc]
        fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        calls.install(monkeypatch)
        file = DirectFile(str(tmp_path / "f"), fd, writable=True)
        file.write(host_view(data), 0, 0, data.numel(), "t")
        file.close()
        assert (tmp_path / "f").read_bytes()[: data.numel()] == as_bytes(data)
        if calls.calls < failing:
            break
        failing += 1
    assert failing > 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up(tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Faulty(lambda _: True, error=error)
    calls.install(monkeypatch)
    file = DirectFile(str(tmp_path / "f"), os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT))
    with pytest.raises(StorageError, match="kv cache: byte 0 of") as full:
        file.write(host_view(aligned(4096)), 0, 0, 4096, "kv cache")
    assert full.value.exit_code == 6
    assert calls.calls == 1
    file.close()


def truncate(path: str) -> None:
    os.truncate(path, 5000)


def replace(path: str) -> None:
    shutil.copyfile(path, path + ".new")
    os.replace(path + ".new", path)


def overwrite(path: str) -> None:
    with open(path, "r+b") as stream:
        stream.write(b"other bytes")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(
    ("change", "words"), [(truncate, "4.88 KiB"), (replace, "replaced"), (overwrite, "overwritten")]
)
def test_a_file_that_changes_is_noticed(payload: tuple[str, bytes], change: object, words: str, ours: bool) -> None:
    path, data = payload
    file = DirectFile.open(path, ours=ours)
    file.check()
    assert callable(change)
    change(path)
    with pytest.raises(StorageError if ours else ModelError, match=words) as changed:
        file.check()
    assert changed.value.exit_code == (6 if ours else 4)
    if change is truncate:
        with pytest.raises(StorageError if ours else ModelError, match="changed during the run"):
            file.read(host_view(aligned(len(data))), 0, 0, len(data), "t")
    file.close()


def test_a_removed_file_is_still_whole(payload: tuple[str, bytes]) -> None:
    path, data = payload
    file = DirectFile.open(path)
    os.unlink(path)
    out = aligned(len(data))
    file.read(host_view(out), 0, 0, len(data), "t")
    file.check()
    assert as_bytes(out) == data
    file.close()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        DirectFile.open(str(tmp_path / "no"))
    with pytest.raises(StorageError, match="No such file"):
        DirectFile.open(str(tmp_path / "no"), ours=True)


def test_links_to_the_users_files_are_followed(payload: tuple[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(payload[0])  # as in the cache of the hub
    file = DirectFile.open(str(tmp_path / "model.safetensors"))
    file.check()
    file.close()


def test_host_view_refuses_what_has_no_bytes_in_a_row() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        host_view(torch.zeros(4, 4).t())
    view = host_view(torch.zeros(3, 2, dtype=torch.bfloat16))
    assert len(view.view) == 12
