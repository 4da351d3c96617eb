"""Eviction oracles that hold their keys and values in fewer bits: rounded when they come in, and looked at so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from h2o_flexgen.config.model.packing import CacheBits
from h2o_flexgen.quant import dequantise, quantise
from tests.oracles.eviction import EvictionOracle, Vector


def rounded(vectors: Sequence[Vector], bits: int, twice: bool = False) -> list[list[float]]:
    """The numbers that are left of each vector once it has been rotated and packed. twice: what that costs it is packed
    as well."""
    rotation = walsh(len(vectors[0]))
    turned = (torch.tensor(vectors, dtype=torch.float64) @ rotation).float()
    left = dequantise(quantise(turned, bits), torch.float32, bits)
    if twice:
        left = left.double() + dequantise(quantise(turned - left, bits), torch.float32, bits)
    numbers: list[list[float]] = (left.double() @ rotation).tolist()
    return numbers


@cache
def walsh(size: int) -> torch.Tensor:
    """The matrix of the transform of `size` numbers: entry (i, j) of a block has the sign of the parity of i & j."""
    block = size & -size
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    one = torch.tensor(signs, dtype=torch.float64)
    return torch.block_diag(*[one * block**-0.5] * (size // block))


def channel_scales(queries: Sequence[Sequence[Vector]], keys: Sequence[Vector]) -> list[float]:
    """By which each number of keys is multiplied before all: (S, group, d) and (S, d)."""
    heads = [head for query in queries for head in query]
    exponents = []
    for channel in range(len(keys[0])):
        asked = math.sqrt(sum(head[channel] ** 2 for head in heads) / len(heads))
        held = math.sqrt(sum(key[channel] ** 2 for key in keys) / len(keys))
        exponents.append(math.log2(math.sqrt(asked / held)))
    return [2.0 ** round(each - sum(exponents) / len(exponents)) for each in exponents]


@cache
def rounding(
    oracle: type[EvictionOracle], bits: CacheBits, scaled: bool = False, newest: int = 0, centred: bool = False
) -> type[EvictionOracle]:
    """`oracle` with a cache of `bits`. Prompts attend to exact keys; what stays of them is rounded. A new token is
    rounded before any query sees it, its own included. What rounding costs one of the `newest` is rounded, too, and
    added. scaled: keys by channel before all. centred: less their mean before that; the first token is as the newest.
    """
    if bits == 16:
        return oracle
    each = bits if isinstance(bits, tuple) else (bits, bits)

    class Rounding(oracle):  # type: ignore[misc, valid-type]
        def prompt(
            self, queries: Sequence[Sequence[Vector]], keys: Sequence[Vector], values: Sequence[Vector]
        ) -> list[list[list[float]]]:
            outputs: list[list[list[float]]] = super().prompt(queries, keys, values)
            asked = [[self.rotate(head, i) for head in query] for i, query in enumerate(queries)]
            some = keys[1:] if centred else []
            means = [sum(numbers) / len(some) for numbers in zip(*some, strict=True)] or [0.0] * len(keys[0])
            self.mean = torch.tensor(means, dtype=torch.bfloat16).tolist()
            last = [[x - m for x, m in zip(key, self.mean, strict=True)] for key in keys[-64:]]
            self.by = channel_scales(asked[-64:], last) if scaled else [1.0] * len(keys[0])
            known = len(keys) if len(self.keys) == len(keys) else self.budget.latest
            self.recent = len(keys) - min(newest, known)
            self.exact = dict(enumerate(zip(keys, values, strict=True)))
            self.round([p for p in self.keys if p >= self.recent or (centred and p == 0)], twice=True)
            self.round([p for p in self.keys if p < self.recent])
            return outputs

        def round(self, positions: Sequence[int], twice: bool = False) -> None:
            positions = [p for p in positions if p or twice or not centred]
            if positions:
                keys, values = zip(*(self.exact[p] for p in positions), strict=True)
                found = self.scaled(keys, twice), rounded(values, each[1], twice)
                for p, key, value in zip(positions, *found, strict=True):
                    self.keys[p], self.values[p] = key, value

        def scaled(self, keys: Sequence[Vector], twice: bool) -> list[list[float]]:
            by = list(zip(self.by, self.mean, strict=True))
            held = rounded([[(x - m) * s for x, (s, m) in zip(key, by, strict=True)] for key in keys], each[0], twice)
            return [[x / s + m for x, (s, m) in zip(key, by, strict=True)] for key in held]

        def step(self, queries: Sequence[Vector], key: Vector, value: Vector) -> list[list[float]]:
            self.raw = self.exact[self.length] = key, value
            key, value = self.scaled([key], newest > 0)[0], rounded([value], each[1], newest > 0)[0]
            self.round([p for p in self.keys if self.recent <= p <= self.length - newest])
            self.recent = max(self.recent, self.length - newest + 1)
            output: list[list[float]] = super().step(queries, key, value)
            return output

    return Rounding
