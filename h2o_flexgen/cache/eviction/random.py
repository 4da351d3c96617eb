"""Recent tokens and a random choice of the others: H2O with a score that has no meaning."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import base

_MASK = 0xFFFFFFFF


def _mix(value: Any) -> Any:
    """A bijection of 32-bit integers, of one or of a tensor, whose every output bit depends on every input bit
    (xor-shift, multiply, twice). Both factors are below 2^31, so that no product leaves int64."""
    value = (value ^ (value >> 16)) * 0x7FEB352D & _MASK
    value = (value ^ (value >> 15)) * 0x045D9F3B & _MASK
    return value ^ (value >> 16)


def _absorb(state: Any, part: Any) -> Any:
    return _mix((part + state + 0x9E3779B9) & _MASK)


def uniform(seed: int, tokens: base.Tokens) -> Tensor:
    """A number in [0, 1) for each token, float32: a hash of (seed, layer, sequence, KV head, position).

    It depends on nothing else: neither on the other sequences of a GPU batch nor on where the cache lives.
    """
    parts = (seed & _MASK, seed >> 32 & _MASK, tokens.layer, tokens.row_ids, tokens.heads, tokens.positions)
    hashed: Any = reduce(_absorb, parts, 0)
    # The upper 24 bits: as many as a float32 holds exactly.
    return (hashed >> 8).to(torch.float32) / (1 << 24)


class RandomPolicy(base.RankedPolicy):
    """The score of a token is a hash of where it stands."""

    name = "random"

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        return base.PromptScores(uniform(self.seed, rows.tokens))

    def new_scores(self, tokens: base.Tokens, keys: Tensor | None) -> Tensor:
        return uniform(self.seed, tokens)
