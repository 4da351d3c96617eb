"""Caches kept by the Triton decode step and, apart, by torch, compared after every step."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.triton_device import DEVICE  # isort: skip  (before Triton is imported)

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.cache.fused import slot_rules
from h2o_flexgen.cache.lengths import CacheLengths, slots_needed
from h2o_flexgen.cache.slots import ScoredSlots
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.kernels.triton_decode import TritonAttend
from h2o_flexgen.kernels.types import KeysValues, Logits
from tests.oracles import attention as reference
from tests.policy_matrix import POLICIES, PolicyRow
from tests.seeds import torch_generator

Row = tuple[int, Budget]
CLOSE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def keeps(total: int, recent: int, sinks: int = 0) -> Budget:
    return Budget(total, total - recent - sinks, recent, sinks, full=False)


def holds(total: int) -> Budget:
    return Budget(total, 0, total, 0, full=True)


def copies(*tensors: Tensor) -> tuple[Tensor, ...]:
    """On the device under test."""
    return tuple(x.clone().to(DEVICE) for x in tensors)


class Pair:
    """A cache of `rows` of (prompt, budget) with random contents, kept by the kernel and, apart, by torch."""

    def __init__(
        self,
        rows: list[Row],
        *,
        kv_heads: int = 2,
        group: int = 1,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        splits: int | None = None,
        counts: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        """`counts`: the kernel counts its steps on the device."""
        self.random = torch_generator(len(rows) + dim)
        budgets = [budget for _, budget in rows]
        capacity = slots_needed(budgets)
        self.size, self.heads = (len(rows), kv_heads, capacity, dim), kv_heads * group
        self.lengths = CacheLengths(budgets, capacity, torch.device("cpu"), window)
        policy = make_policy(PolicyRow("h2o", POLICIES[1].oracle).eviction())
        self.slots = ScoredSlots(self.lengths, policy, kv_heads, capacity, 0, range(len(rows)))
        for index, (prompt, budget) in enumerate(rows):
            self.lengths.fill(index, prompt)
            self.slots.fill(slice(index, index + 1), prompt, budget, torch.rand(1, kv_heads, prompt))
        self.lengths.start()
        self.slots.start(rolling=False)
        self.seen_k, self.seen_v = self.draw(*self.size, dtype=dtype), self.draw(*self.size, dtype=dtype)
        self.k, self.v = copies(self.seen_k, self.seen_v)
        self.state = copies(*self.slots.ranking)
        self.kernel = TritonAttend(
            slot_rules(self.lengths, ranked=True),
            self.size,
            DEVICE,
            window=window,
            ranking=self.state,
            adds=True,
            splits=splits,
        )
        self.kernel.attach(self.k, self.v)
        self.dtype, self.window, self.scale, self.soft_cap = dtype, window, 0.3, soft_cap
        self.count = torch.zeros(self.size[:2], dtype=torch.int64, device=DEVICE) if counts else None

    def draw(self, *size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=self.random).to(dtype)

    def new(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, kv_heads, _, dim = self.size
        q, k, v = (self.draw(rows, n, dim, dtype=self.dtype) for n in (self.heads, kv_heads, kv_heads))
        return q, k, v

    def step(self) -> None:
        """One step of both, compared."""
        q, k, v = self.new()
        number = self.lengths.step if self.count is None else self.count
        out = self.kernel.step(number, copies(q, k, v), Logits(self.scale, self.soft_cap)).cpu()
        flat, (rows, kv_heads, capacity, dim) = self.slots.allocate(), self.size
        for held, one in ((self.seen_k, k), (self.seen_v, v)):
            held.view(-1, dim).index_copy_(0, flat, one.reshape(-1, dim))
        assert torch.equal(self.kernel.used.cpu(), (flat % capacity).view(rows, kv_heads))
        valid = self.valid()
        exact = reference.decode_attention(q, self.seen_k, self.seen_v, Logits(self.scale, self.soft_cap), valid, True)
        close = CLOSE[self.dtype]
        torch.testing.assert_close(out, exact.out, atol=close, rtol=close)
        score, pos, free = (part.cpu() for part in self.state)
        expected = self.slots.score + exact.row
        assert torch.equal(score == torch.inf, expected == torch.inf)
        # What lies in slots that nobody reads any more is of no interest; there is none as yet that had a token.
        torch.testing.assert_close(score, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(pos, self.slots._pos)
        # With the same scores, to the bit, the same slot goes.
        self.slots.score.copy_(score)
        self.slots.evict(None, self.lengths.length, lambda: KeysValues(self.seen_k, self.seen_v))
        assert torch.equal(free, self.slots._free)
        self.lengths.tick()
        assert self.count is None or (self.count == self.lengths.step).all()

    def valid(self) -> Tensor:
        """Slots that the query sees, by the positions in them."""
        rows, kv_heads, capacity, _ = self.size
        valid = torch.zeros(rows, kv_heads, capacity, dtype=torch.bool)
        limits = zip(self.lengths.held, self.lengths.limits, self.lengths.next_pos, strict=True)
        for row, (held, limit, now) in enumerate(limits):
            count = min(held + self.lengths.step + 1, limit)
            first = 0 if self.window is None else now + 1 - self.window
            valid[row, :, :count] = self.slots._pos[row, :, :count] >= first
        return valid

    def check_contents(self) -> None:
        assert torch.equal(self.k.cpu(), self.seen_k)
        assert torch.equal(self.v.cpu(), self.seen_v)
