"""How each eviction policy divides its budget, and what it looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import Registry

LayerSplit = Literal["uniform", "global", "far", "pyramid"]


class Share(NamedTuple):
    """Counts of tokens, of one of which the most recent tokens are a part."""

    total: int
    """The budget."""
    rest: int
    """Of it, what is left beside the sinks."""
    kept: int
    """Of the budget, what may be kept of the prompt."""
    prompt: int
    """Tokens of the prompt."""


class Split(NamedTuple):
    """How an eviction policy divides its budget."""

    recent: Callable[[Share], int]
    """The most recent tokens, which stay, unless given; the rest beside them and the sinks is chosen by score."""
    sinks: int = 0
    """Unless given."""
    takes_sinks: bool = True
    takes_recent: bool = True
    least_recent: int = 0
    prompt_only: bool = False
    """Whether it prunes the prompt and nothing else: the answer's tokens are added to what is kept of it."""
    column_sums: bool = False
    """Whether it must know how much attention each of the prompt's tokens has received."""
    queries: Literal["none", "last", "all"] = "none"
    """Which queries of the prompt it looks at: no more than LAST_QUERIES, or a tenth of them, are the last."""
    replays: bool = False
    """Whether prompts are computed twice in one pass, and what the second adds is forgotten."""
    numbers: int = 1
    """Kept for each slot, float32."""
    burst: Callable[[int], int] | None = None
    """How many of a budget's tokens go at once; None: one."""
    early: bool = False
    """Whether the prompt is pruned to what a burst leaves."""
    looks_back: int = 0
    """Queries that are kept of each row, the last ones."""
    layers: LayerSplit = "uniform"
    """How layers share the budget, unless asked for."""


def _half(share: Share) -> int:
    return share.rest - share.rest // 2


def _all(share: Share) -> int:
    return share.rest


def _none(share: Share) -> int:
    return 0


def _window(share: Share) -> int:
    """The window whose queries score the prompt."""
    return max(1, min(32, share.total // 2))


def _proxies(share: Share) -> int:
    """A tenth of the prompt, at most half of what is kept of it."""
    return max(1, min(-(-share.prompt // 10), share.kept // 2))


def _steady(share: Share) -> int:
    """Of a budget so small that three tenths of it are few, no more than these."""
    return min(10, 3 * share.total // 10)


def _few(share: Share) -> int:
    return min(10, share.total // 2)


def _last(count: int) -> Callable[[Share], int]:
    """So many tokens, or a quarter of the budget."""
    return lambda share: min(count, share.total // 4)


def _every(count: int) -> Callable[[int], int]:
    """Bursts of `count` tokens, or a quarter of the budget."""
    return lambda total: min(count, total // 4)


SPLITS: Registry[Split] = Registry("eviction policy")
SPLITS.register("full", Split(_all, takes_sinks=False, takes_recent=False))
SPLITS.register("h2o", Split(_half, column_sums=True))
SPLITS.register("streaming", Split(_all, sinks=4, takes_recent=False))
SPLITS.register("local", Split(_all, takes_sinks=False, takes_recent=False))
SPLITS.register("heavy", Split(_none, takes_recent=False, column_sums=True))
SPLITS.register("random", Split(_half))
SPLITS.register("tova", Split(_none, queries="last"))
SPLITS.register("snapkv", Split(_window, least_recent=1, prompt_only=True, queries="last"))
SPLITS.register("pyramidkv", Split(_window, least_recent=1, prompt_only=True, queries="last", layers="pyramid"))
SPLITS.register("keydiff", Split(_none))
SPLITS.register("knorm", Split(_none))
SPLITS.register("expected_attention", Split(_none, sinks=4, prompt_only=True, queries="all"))
SPLITS.register("nacl", Split(_proxies, takes_recent=False, least_recent=1, prompt_only=True, queries="last"))
SPLITS.register("kvzip", Split(_none, sinks=4, prompt_only=True, queries="all", replays=True))
SPLITS.register("defensivekv", Split(_window, least_recent=1, prompt_only=True, queries="last"))
SPLITS.register("roco", Split(_steady, takes_recent=False, queries="all", numbers=2))
SPLITS.register("scissorhands", Split(_few, queries="last", burst=lambda total: total // 2))
SPLITS.register("rkv", Split(_last(8), queries="last", burst=_every(128), early=True, looks_back=8))
SPLITS.register("vase", Split(_last(64), queries="last", burst=_every(64), early=True, looks_back=64))
SPLITS.register("snapkv_decode", Split(_last(32), queries="last", burst=_every(64), early=True, looks_back=32))
SPLITS.register("h2o_mean", Split(_half, column_sums=True))
SPLITS.register("inertiakv", Split(_half, column_sums=True, queries="last"))

REFUSED = {
    "adakv": ("its heads keep different numbers of tokens by what a text is, here they are planned before", "snapkv"),
    "rpc": ("its cache grows with the answer, and here a budget is kept", "snapkv_decode"),
    "kvzap": ("it asks a small network that was trained beside the model", "kvzip"),
}
"""Policies that do not fit caches of fixed size: why, and what comes nearest."""

AUTO, CHOSEN = "auto", ("h2o", "far")
"""A name for the policy and the split of layers that docs/eviction.md chooses from its tables."""

THEN_H2O = "+h2o"
"""Behind the name of a policy that prunes the prompt only: H2O goes on with what it has kept."""


def split_of(name: str) -> Split:
    """How the policy called `name` divides its budget; UsageError for an unknown one."""
    first = base_of(name)
    if isinstance(first, str) and first in REFUSED:
        why, nearest = REFUSED[first]
        raise UsageError(f"--eviction {first} is not offered", why, f"--eviction {nearest}")
    split = SPLITS.get(first)
    if first == name:
        return split
    if not split.prompt_only:
        fitting = (each for each in SPLITS.names() if SPLITS.get(each).prompt_only)
        raise UsageError(
            f"--eviction {name}: {first} evicts in decode steps itself",
            f"needed one of {', '.join(fitting)} before {THEN_H2O}",
            f"--eviction {first}",
        )
    return Split(_half, sinks=split.sinks, queries=split.queries, replays=split.replays, layers=split.layers)


def base_of(name: str) -> str:
    """The policy that prunes the prompt, where H2O goes on with it; else `name` itself."""
    return name.removesuffix(THEN_H2O) if isinstance(name, str) else name
