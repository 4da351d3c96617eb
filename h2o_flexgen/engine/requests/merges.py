"""The merges of a vocabulary that comes without them: every way to make a token of two others.

The merges of a large vocabulary take seconds to find: they are kept in the user's cache folder, by its content.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from h2o_flexgen.folders import cached, whole_file

log = logging.getLogger(__name__)

_LARGE = 1 << 16
"""Tokens of a vocabulary whose merges are kept."""
_VERSION = 1


def merges_of(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of `tokens`, no two of which are equal, that make up a token, in the order of its score, highest first.

    Of equal scores the pair with the longest first half goes first, then the one with the longest second half.
    """
    kept = _kept(tokens, scores) if len(tokens) >= _LARGE else None
    pairs = None if kept is None else _read(kept, len(tokens))
    if pairs is None:
        pairs = _pairs(tokens, scores)
        if kept is not None:
            _write(kept, pairs)
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
        if pairs.dtype == np.int32 and pairs.shape == (len(pairs), 2) and ((pairs >= 0) & (pairs < count)).all():
            return pairs
        log.warning("%s cannot be used: merges are looked for again", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError) as error:
        log.warning("%s cannot be read (%s): merges are looked for again", path, error)
    return None


def _write(path: Path, pairs: NDArray[np.int32]) -> None:
    """A run goes on without the file."""
    try:
        with whole_file(path) as temporary, temporary.open("wb") as file:
            np.save(file, pairs)
    except OSError as error:
        log.debug("merges are not kept in %s: %s", path.parent, error)


def _pairs(tokens: list[str], scores: list[float]) -> NDArray[np.int32]:
    """The merges as numbers of tokens, (n, 2)."""
    numbers = {token: number for number, token in enumerate(tokens)}
    ways = [
        (first, second, made)
        for token, made in numbers.items()
        for cut in range(1, len(token))
        if (first := numbers.get(token[:cut], -1)) >= 0 and (second := numbers.get(token[cut:], -1)) >= 0
    ]
    found = np.array(ways, np.int32).reshape(-1, 3)
    left, right, whole = found.T
    lengths = np.array([len(token) for token in tokens], np.int64)
    order = np.lexsort((whole, -lengths[right], -lengths[left], -np.asarray(scores, np.float64)[whole]))
    return found[order, :2]
