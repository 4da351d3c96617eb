"""Copies from tier to tier, one and many, and what the engine of copies refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.tiers import Tiers, make_tiers
from h2o_flexgen.memory.transfers import Ticket
from tests.memory.buffers import padded, random_bytes, whole
from tests.memory.conftest import in_chunks


def test_copies_between_tiers(tiers: Tiers) -> None:
    assert tiers.gpu is not None
    up = tiers.gpu.allocate(3 * (4 << 20) + 5, "weights").tensor
    source = torch.randint(0, 256, up.shape, dtype=torch.uint8)
    rows = []
    with CopyEngine(trace=lambda *row: rows.append(row)) as engine:
        first = engine.copy(up, source, "cpu->gpu", label="load layers.0.mlp")
        down = torch.empty_like(source)
        engine.copy(down, up, "gpu->cpu", after=first).wait()
        assert torch.equal(down, source)
        converted, transposed = torch.empty(4, 3), torch.arange(12.0).view(3, 4).t()
        engine.copy(converted, transposed, "cpu->gpu").wait()
        assert torch.equal(converted, transposed)
        halves = torch.empty(4, 3, dtype=torch.bfloat16)
        engine.copy(halves, converted, "cpu->gpu").wait()
        assert torch.equal(halves, converted.bfloat16())
        with pytest.raises(ValueError, match="cannot copy"):
            engine.copy(converted, transposed.t(), "cpu->gpu")
        assert engine.bytes_moved == {"cpu->gpu": up.numel() + 48 + 24, "gpu->cpu": up.numel()}
    assert [(row[0], row[3]) for row in rows][:2] == [("load layers.0.mlp", "cpu->gpu"), ("gpu->cpu", "gpu->cpu")]
    assert all(start <= end for _, start, end, _ in rows)
    assert rows[0][2] <= rows[1][1], "what comes after starts after"


def test_inference_tensors_may_be_targets() -> None:
    with torch.inference_mode():
        dst, src = torch.empty(4, 3), torch.arange(12.0).view(3, 4).t()
    with CopyEngine() as engine:
        engine.copy(dst, src, "cpu->gpu").wait()
    assert bool((dst == src).all())


def test_many_tickets_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, 65536)
    data = random_bytes(1 << 20)
    (tmp_path / "f").write_bytes(data.numpy().tobytes())
    path = str(tmp_path / "f")
    outs = []
    with CopyEngine() as engine:
        previous: Ticket | None = None
        for number in range(60):
            out, up = padded(1 << 20), padded(1 << 20)
            read = engine.read_extents(whole(path, 1 << 20), out, after=previous if number % 3 == 0 else None)
            previous = engine.copy(up, out, "cpu->gpu", after=read)
            outs.append(up)
        engine.drain()
        assert engine.bytes_moved == {"disk->cpu": 60 << 20, "cpu->gpu": 60 << 20}
    assert all(torch.equal(out, data) for out in outs)


def test_empty_transfers(payload: tuple[str, bytes]) -> None:
    with CopyEngine() as engine:
        engine.read_extents((), padded(0)).wait()
        engine.copy(torch.empty(0), torch.empty(0), "cpu->gpu").wait()


def test_wrong_arguments(payload: tuple[str, bytes]) -> None:
    with CopyEngine() as engine:
        with pytest.raises(ValueError, match="does not fit"):
            engine.read_extents(whole(payload[0], 4097), padded(4096))
        with pytest.raises(ValueError, match="flat uint8"):
            engine.read_extents(whole(payload[0], 4096), torch.zeros(4096))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_copies() -> None:
    with make_tiers(None, None, None, False, None, device=torch.device("cuda")) as tiers, CopyEngine() as engine:
        up, source = tiers.compute.allocate(1 << 20, "weights").tensor, tiers.cpu.allocate(1 << 20, "weights").tensor
        source.random_(0, 256)
        first = engine.copy(up, source, "cpu->gpu")
        down = torch.empty_like(source)
        engine.copy(down, up, "gpu->cpu", after=first).wait()
        assert torch.equal(down, source)
