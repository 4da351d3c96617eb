"""The merges of a vocabulary that comes without them: every way to make a token of two others.

Those of a large vocabulary take a second to find: they are kept in the user's cache folder by its content.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from h2o_flexgen.folders import cached

log = logging.getLogger(__name__)

_BASE = 0x9E3779B97F4A7C15
"""Odd, so that it has an inverse modulo 2 ** 64."""
_SIEVE_BITS = 22
_LARGE = 1 << 16
"""Tokens of a vocabulary whose merges are kept."""
_VERSION = 1


class _Hashes:
    """Hashes of all stretches of a text, two multiplications each: of text s the sum of s[j] * _BASE ** j."""

    def __init__(self, text: str) -> None:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64) + np.uint64(1)
        powers = _powers(_BASE, len(points))
        self._sums = np.concatenate([np.zeros(1, np.uint64), np.add.accumulate(points * powers[:-1])])
        self._shifts = _powers(pow(_BASE, -1, 1 << 64), len(points))

    def of(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Of the stretches [start, stop)."""
        hashes: NDArray[np.uint64] = (self._sums[stop] - self._sums[start]) * self._shifts[start]
        return hashes


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """base ** 0 to base ** count, modulo 2 ** 64."""
    factors = np.full(count + 1, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


class _Index:
    """Finds tokens by their hashes: a sieve of one bit of memory traffic for most that are not tokens, then a
    search."""

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]
        self._sieve = np.zeros(1 << _SIEVE_BITS, bool)
        self._sieve[self._slots(hashes)] = True

    def maybe(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """False for those that belong to no token."""
        found: NDArray[np.bool_] = self._sieve[self._slots(hashes)]
        return found

    def find(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The numbers of the tokens, -1 for none."""
        place = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        return np.where(self._sorted[place] == hashes, self._order[place], -1)

    @staticmethod
    def _slots(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return hashes >> np.uint64(64 - _SIEVE_BITS)


def merges_of(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of `tokens`, no two of which are equal, that make up a token: those of the highest score first.

    Of those with the same score, the pair with the longest first half goes first, then that with the longest second.
    """
    kept = _kept(tokens, scores) if len(tokens) >= _LARGE else None
    if kept is None:
        return _texts(tokens, _pairs(tokens, scores))
    pairs = _read(kept, len(tokens))
    if pairs is None:
        pairs = _pairs(tokens, scores)
        _write(kept, pairs)
    return _texts(tokens, pairs)


def _texts(tokens: list[str], pairs: NDArray[np.int32]) -> list[tuple[str, str]]:
    return [(tokens[a], tokens[b]) for a, b in zip(*pairs.T.tolist(), strict=True)] if len(pairs) else []


def _kept(tokens: list[str], scores: list[float]) -> Path:
    """Where the merges of a vocabulary are kept, by all that they follow from."""
    lengths, numbers = np.array([len(token) for token in tokens]), np.asarray(scores, np.float64)
    digest = hashlib.sha256("".join(tokens).encode("utf-8", "surrogatepass"))
    digest.update(lengths.tobytes() + numbers.tobytes())
    return cached("merges", f"{_VERSION}-{digest.hexdigest()[:32]}.npy")


def _read(path: Path, count: int) -> NDArray[np.int32] | None:
    """Pairs of numbers of `count` tokens; None where there are none, or not as they were left."""
    try:
        pairs = np.load(path, allow_pickle=False)
        if (
            pairs.dtype == np.int32
            and pairs.ndim == 2
            and pairs.shape[1] == 2
            and ((pairs >= 0) & (pairs < count)).all()
        ):
            return pairs
        log.warning("%s cannot be used: merges are looked for again", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError) as error:
        log.warning("%s cannot be read (%s): merges are looked for again", path, error)
    return None


def _write(path: Path, pairs: NDArray[np.int32]) -> None:
    """A file that is complete or not there; a run goes on without it."""
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with temporary.open("wb") as file:
            np.save(file, pairs)
        temporary.replace(path)
    except OSError as error:
        log.debug("merges are not kept in %s: %s", path.parent, error)
        temporary.unlink(missing_ok=True)


def _pairs(tokens: list[str], scores: list[float]) -> NDArray[np.int32]:
    """The merges as numbers of tokens, (n, 2).

    A vocabulary of 260,000 tokens has two million ways to cut one: halves are looked up by hash, all at once.
    """
    if not tokens:
        return np.empty((0, 2), np.int32)
    lengths = np.array([len(token) for token in tokens])
    stops = np.cumsum(lengths)
    starts = stops - lengths
    hashes = _Hashes("".join(tokens))
    index = _Index(hashes.of(starts, stops))
    ways = np.maximum(lengths - 1, 0)
    whole = np.repeat(np.arange(len(tokens)), ways)
    # The cuts of a token are 1, 2, ... of its characters.
    cut = np.arange(len(whole)) - np.repeat(np.cumsum(ways) - ways, ways) + 1
    middle = starts[whole] + cut
    first, second = hashes.of(starts[whole], middle), hashes.of(middle, stops[whole])
    likely = np.flatnonzero(index.maybe(first) & index.maybe(second))
    left, right = index.find(first[likely]), index.find(second[likely])
    both = (left >= 0) & (right >= 0)
    left, right, whole = left[both], right[both], whole[likely][both]
    order = np.lexsort((whole, -lengths[right], -lengths[left], -np.asarray(scores, np.float64)[whole]))
    found = zip(left[order].tolist(), right[order].tolist(), whole[order].tolist(), strict=True)
    # Two texts may have the same hash, if somebody looked for them.
    same = [(a, b) for a, b, made in found if tokens[a] + tokens[b] == tokens[made]]
    return np.array(same, np.int32).reshape(-1, 2)
