"""Memory of one block that serves the next."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.memory.pinned import Pin, PinnedPool
from h2o_flexgen.memory.tiers import BufferPool, HostMemory, Tier
from tests.memory.fake_cuda import FakeDevice
from tests.memory.test_tiers import resident

MIB = 1 << 20


def filled(tier: Tier, nbytes: int) -> int:
    """Allocates, writes and releases; the address that it was at."""
    with tier.allocate(nbytes, "kv cache") as buffer:
        buffer.tensor.fill_(7)
        return buffer.tensor.data_ptr()


def test_memory_that_was_given_back_serves_the_next_buffer_of_its_size() -> None:
    tier = Tier("cpu", None, HostMemory())
    with tier.keeping():
        place = filled(tier, 5 * MIB + 1)
        assert (tier.used, tier.peak) == (0, 5 * MIB + 4096), "what waits is not in use"
        assert tier.held == 5 * MIB + 4096, "but held"
        again = tier.allocate(5 * MIB + 1, "kv cache")
        assert again.tensor.data_ptr() == place
        assert int(again.tensor.sum()) == 0, "buffers are zeroed"
        other = tier.allocate(5 * MIB + 1, "kv cache")
        assert other.tensor.data_ptr() != place, "one buffer at a time"
    tier.close()


def test_what_waits_never_adds_to_the_peak() -> None:
    tier = Tier("cpu", None, HostMemory())
    empty = resident()
    with tier.keeping():
        filled(tier, 64 * MIB)
        assert resident() - empty > 60 * MIB
        with tier.allocate(30 * MIB, "hidden states") as half:
            half.tensor.fill_(1)
            assert resident() - empty < 40 * MIB, "64 + 30 MiB would be more than there ever was"
        with tier.allocate(40 * MIB, "hidden states") as more:
            more.tensor.fill_(1)
            assert resident() - empty < 70 * MIB
        assert tier.peak == 64 * MIB
    assert resident() - empty < 10 * MIB, "afterwards everything is the system's again"


def test_what_waits_stays_within_a_capacity_that_was_lowered() -> None:
    tier = Tier("cpu", 64 * MIB, HostMemory())
    with tier.keeping():
        filled(tier, 64 * MIB)
    tier.capacity = 48 * MIB
    empty = resident()
    with tier.keeping():
        filled(tier, 40 * MIB)
        assert resident() - empty > 36 * MIB
        with tier.allocate(20 * MIB, "hidden states") as other:
            other.tensor.fill_(1)
            assert resident() - empty < 30 * MIB, "40 + 20 MiB are less than there ever was, and more than there may be"


def test_several_sizes_wait_side_by_side() -> None:
    tier = Tier("cpu", None, HostMemory())
    sizes = [4096, 8192, 8192, 12288]
    with tier.keeping():
        buffers = [tier.allocate(size, "kv cache") for size in sizes]
        places = {(buffer.nbytes, buffer.tensor.data_ptr()) for buffer in buffers}
        for buffer in buffers:
            buffer.close()
        again = [tier.allocate(size, "kv cache") for size in reversed(sizes)]
        assert {(buffer.nbytes, buffer.tensor.data_ptr()) for buffer in again} == places
        for buffer in again:
            buffer.close()


def test_outside_of_it_nothing_waits() -> None:
    pool, memory = BufferPool(), HostMemory()
    allocation = memory.allocate(4096)
    assert not pool.put(4096, allocation)
    pool.open()
    assert pool.put(4096, allocation)
    assert not pool.put(0, memory.allocate(0)), "nothing is worth nothing"
    assert pool.nbytes == 4096
    assert pool.take(8192) is None
    pool.close()
    assert pool.nbytes == 0
    assert pool.take(4096) is None


def test_an_error_within_gives_everything_back() -> None:
    tier = Tier("cpu", None, HostMemory())
    empty = resident()

    def fails() -> None:
        with tier.keeping():
            filled(tier, 32 * MIB)
            raise RuntimeError("a block failed")

    with pytest.raises(RuntimeError, match="block"):
        fails()
    assert resident() - empty < 8 * MIB
    filled(tier, 32 * MIB)
    assert resident() - empty < 8 * MIB, "and nothing waits any more"


# ---- page locks


class Counted(FakeDevice):
    """How often anything was locked."""

    locks = 0

    def lock(self, tensor: torch.Tensor) -> bool:
        self.locks += 1
        return super().lock(tensor)


def locked_tier(limit: int | None = None, **device: int) -> tuple[Counted, PinnedPool, Tier]:
    made = Counted(**device)
    pool = PinnedPool(made, limit)
    return made, pool, Tier("cpu", None, HostMemory(), pool)


def test_memory_that_waits_stays_locked() -> None:
    device, pool, tier = locked_tier()
    with tier.keeping():
        for _ in range(3):
            with tier.allocate(MIB, "kv cache") as cache, tier.allocate(8192, "queries", Pin.FIRST) as queries:
                assert device.locked(cache.tensor)
                assert device.locked(queries.tensor)
        assert device.locks == 2, "once each, whatever the number of blocks"
        assert pool.locked == MIB + 8192
    assert pool.locked == 0
    assert not device._locked, "before the system has the pages back"
    filled(tier, MIB)
    assert device.locks == 3
    assert not device._locked


def test_a_lock_is_the_kind_that_is_asked_for() -> None:
    """Room is kept for buffers that come first, so that it has to be known which they are."""
    device, pool, tier = locked_tier(limit=3 * MIB)
    pool.keep(2 * MIB)
    with tier.keeping():
        tier.allocate(MIB, "weights").close()
        with tier.allocate(MIB, "staging", Pin.FIRST), tier.allocate(MIB, "staging", Pin.FIRST):
            assert pool.locked == 2 * MIB
        with tier.allocate(MIB, "caches that no GPU copies", Pin.NEVER) as cache:
            assert not device.locked(cache.tensor)
    assert not device._locked


def test_what_waits_gives_way_to_what_is_used() -> None:
    """As if it had been unlocked at once: no buffer stays pageable for memory that nobody uses."""
    device, pool, tier = locked_tier(limit=10 * MIB)
    with tier.keeping():
        with tier.allocate(8 * MIB, "kv cache"), tier.allocate(8 * MIB, "hidden", Pin.NEVER):
            assert pool.locked == 8 * MIB
        with tier.allocate(4 * MIB, "kv cache") as other:
            assert device.locked(other.tensor)
            assert (pool.locked, pool.pageable) == (4 * MIB, 0)


def test_what_waits_gives_way_before_a_refusal_counts() -> None:
    device, pool, tier = locked_tier(lockable=10 * MIB)
    with tier.keeping():
        with tier.allocate(8 * MIB, "kv cache"), tier.allocate(8 * MIB, "hidden", Pin.NEVER):
            pass
        with tier.allocate(4 * MIB, "kv cache") as other:
            assert device.locked(other.tensor)
        assert pool.limit is None, "the system has not said no"
    tier.allocate(12 * MIB, "kv cache")
    assert pool.limit == pool.locked == 0
    tier.close()
    assert pool.pageable == 0


def test_what_was_pageable_is_tried_again() -> None:
    device, pool, tier = locked_tier(limit=8 * MIB)
    with tier.keeping():
        first = tier.allocate(8 * MIB, "weights")
        tier.allocate(4 * MIB, "kv cache").close()
        assert (pool.locked, pool.pageable) == (8 * MIB, 0), "nobody wants what waits to be locked"
        first.close()
        with tier.allocate(4 * MIB, "kv cache") as cache:
            assert device.locked(cache.tensor)
            assert pool.pageable == 0
