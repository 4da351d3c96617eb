from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.errors import PlanError, StorageError
from h2o_flexgen.memory import tiers as places
from h2o_flexgen.memory.pinned import PinnedPool
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.memory.tiers import DiskTier, HostMemory, Ledger, Tier, make_tiers
from tests.memory.fake_cuda import FakeDevice

MIB = 1 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_ledger_keeps_its_capacity() -> None:
    ledger = Ledger("cpu", 10 * MIB)
    ledger.charge(4 * MIB, "weights")
    ledger.charge(5 * MIB, "kv cache")
    with pytest.raises(PlanError) as refused:
        ledger.charge(2 * MIB, "hidden states")
    for words in ("hidden states", "2 MiB", "cpu tier", "1 MiB free of 10 MiB", "11 MiB", "--cpu-mem"):
        assert words in str(refused.value)
    assert ledger.used == 9 * MIB, "a refused charge counts nothing"
    ledger.refund(4 * MIB, "weights")
    ledger.charge(2 * MIB, "hidden states")
    assert ledger.items == {"kv cache": 5 * MIB, "hidden states": 2 * MIB}
    assert (ledger.used, ledger.peak, ledger.capacity) == (7 * MIB, 9 * MIB, 10 * MIB)


def test_a_ledger_refuses_nonsense() -> None:
    ledger = Ledger("cpu", None)
    ledger.charge(5, "a")
    for bad in (6, -1):
        with pytest.raises(ValueError, match="cannot refund"):
            ledger.refund(bad, "a")
    with pytest.raises(ValueError, match="cannot charge"):
        ledger.charge(-1, "a")
    with pytest.raises(ValueError, match="negative"):
        Ledger("cpu", -1)


def test_capacity_holds_under_threads() -> None:
    ledger = Ledger("cpu", 100)
    refused = []

    def worker() -> None:
        for _ in range(300):
            try:
                ledger.charge(30, "x")
                ledger.refund(30, "x")
            except PlanError:
                refused.append(1)

    threads = [threading.Thread(target=worker) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.used == 0
    assert ledger.peak <= 100


def test_buffers_are_aligned_zeroed_and_counted_in_pages() -> None:
    tier = Tier("cpu", 3 * 4096, HostMemory())
    buffer = tier.allocate(5000, "weights")
    assert buffer.tensor.shape == (5000,)
    assert buffer.tensor.dtype == torch.uint8
    assert buffer.tensor.data_ptr() % 4096 == 0
    assert int(buffer.tensor.sum()) == 0
    assert tier.used == 8192
    with pytest.raises(PlanError):
        tier.allocate(4097, "more")
    with tier.allocate(4096, "more"):
        assert tier.used == tier.capacity
    buffer.close()
    buffer.close()
    assert (tier.used, tier.peak) == (0, 3 * 4096)
    with pytest.raises(RuntimeError, match="weights was released"):
        _ = buffer.tensor


def test_release_returns_the_memory_even_while_a_view_lives() -> None:
    tier = Tier("cpu", None, HostMemory())
    buffer = tier.allocate(64 * MIB, "weights")
    view = buffer.tensor[4096:].view(torch.float32)
    view.fill_(1.0)
    full = resident()
    buffer.close()
    assert full - resident() > 60 * MIB
    assert float(view[-1]) == 0.0, "a stale view reads zeros and does not crash"


def test_empty_buffer() -> None:
    tier = Tier("cpu", 0, HostMemory())
    with tier.allocate(0, "nothing") as buffer:
        assert buffer.tensor.numel() == 0


def test_a_refused_allocation_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    tier = Tier("cpu", None, HostMemory())
    monkeypatch.setattr(places.mmap, "mmap", refuse)
    with pytest.raises(PlanError, match="refused 1 MiB of host memory"):
        tier.allocate(MIB, "weights")
    assert tier.used == 0


def test_page_locking_beside_a_gpu() -> None:
    device = FakeDevice(lockable=MIB)
    tier = Tier("cpu", None, HostMemory(), PinnedPool(device))
    buffer = tier.allocate(MIB, "weights")
    assert device.locked(buffer.tensor)
    with tier.allocate(MIB, "weights") as pageable:
        assert not device.locked(pageable.tensor)
    tensor = buffer.tensor
    buffer.close()
    assert not device.locked(tensor)


def test_make_tiers_on_a_cpu() -> None:
    with make_tiers(None, 8 * MIB, None, False, None, device=torch.device("cpu")) as tiers:
        assert tiers.gpu is None
        assert tiers.compute is tiers.cpu is tiers.memory("cpu")
        assert tiers.device == torch.device("cpu")
        buffer = tiers.cpu.allocate(MIB, "weights")
        assert tiers.peaks() == {"cpu": MIB, "disk": 0}
        for name in ("gpu", "disk"):
            with pytest.raises(PlanError, match=f"no {name} memory tier"):
                tiers.memory(name)
        with pytest.raises(PlanError, match="no offload folder"):
            tiers.disk.allocate(1, "kv cache")
    with pytest.raises(RuntimeError, match="weights was released"):
        _ = buffer.tensor
    assert tiers.cpu.used == 0


def test_an_emulated_gpu_has_its_own_capacity() -> None:
    with make_tiers(2 * MIB, 8 * MIB, None, True, None, device=torch.device("cpu")) as tiers:
        assert tiers.emulated
        assert tiers.gpu is not None
        assert tiers.compute is tiers.gpu
        assert tiers.device == torch.device("cpu")
        tiers.gpu.allocate(2 * MIB, "weights")
        with pytest.raises(PlanError, match="--gpu-mem"):
            tiers.gpu.allocate(1, "kv cache")
        assert tiers.cpu.used == 0


def test_disk_regions_are_preallocated_counted_and_removed(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    with OffloadDir(tmp_path / "off") as folder, make_tiers(None, None, 4 * MIB, False, folder, device=cpu) as tiers:
        region = tiers.disk.allocate(3 * MIB - 100, "kv cache")
        info = os.stat(region.file.path)
        assert info.st_size == 3 * MIB
        assert info.st_blocks * 512 >= 3 * MIB, "blocks are reserved before the work starts"
        assert tiers.disk.items == {"kv cache": 3 * MIB}
        with pytest.raises(PlanError, match="disk tier"):
            tiers.disk.allocate(2 * MIB, "hidden states")
        assert tiers.disk.used == 3 * MIB
        part = region.part(MIB, 5000)
        assert (part.offset, part.nbytes) == (MIB, 5000)
        part.close()
        assert os.path.exists(region.file.path), "a part owns nothing"
        for offset, nbytes in ((1, 10), (3 * MIB, 1), (-4096, 10), (0, 4 * MIB)):
            with pytest.raises(ValueError, match="are not part"):
                region.part(offset, nbytes)
        region.close()
        region.close()
        assert not os.path.exists(region.file.path)
        assert tiers.disk.used == 0


def test_a_full_disk_is_found_before_the_work(tmp_path: Path) -> None:
    def full_disk(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with OffloadDir(tmp_path / "off") as folder:
        tier = DiskTier(None, folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full_disk)
            with pytest.raises(StorageError, match="No space left") as full:
                tier.allocate(MIB, "kv cache")
        assert full.value.exit_code == 6
        assert tier.used == 0
        assert sorted(os.listdir(folder.run_path)) == ["lock"], "no half-made file stays"
        with pytest.raises(StorageError, match="free"):
            DiskTier(None, folder).allocate(1 << 60, "kv cache")


def test_a_file_size_limit_is_a_storage_error(tmp_path: Path) -> None:
    with OffloadDir(tmp_path / "off") as folder:
        tier = DiskTier(None, folder)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        try:
            with pytest.raises(StorageError, match="kv cache needs 2 MiB"):
                tier.allocate(2 * MIB, "kv cache")
            tier.allocate(MIB, "kv cache").close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tier() -> None:
    with make_tiers(MIB, MIB, None, False, None, device=torch.device("cuda")) as tiers:
        assert tiers.compute.allocate(MIB, "weights").tensor.is_cuda
        with pytest.raises(PlanError):
            tiers.compute.allocate(1, "weights")
        assert tiers.cpu.allocate(MIB, "weights").tensor.is_pinned()
