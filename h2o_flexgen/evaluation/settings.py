"""What to measure: policies, ratios, questions and text. No torch, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from h2o_flexgen.config.checks import share, whole
from h2o_flexgen.config.eviction import SPLITS, EvictionConfig
from h2o_flexgen.config.flags import flag
from h2o_flexgen.errors import UsageError

T = TypeVar("T")


def _list_of(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A parser of comma-separated values."""

    def values(text: str) -> tuple[T, ...]:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())

    return values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number", "needed shares such as 0.1,0.2,0.5") from None


def _joined(values: tuple[object, ...]) -> str:
    return ",".join(str(value) for value in values)


@dataclass(frozen=True)
class EvaluationSettings:
    """What `evaluate` measures. Raises UsageError for values that make no sense."""

    policies: tuple[str, ...] = field(
        default=("full", "h2o", "local", "streaming", "heavy", "random"),
        metadata=flag(
            "--policies", help="eviction policies to measure", metavar="A,B", parse=_list_of(str), show=_joined
        ),
    )
    ratios: tuple[float, ...] = field(
        default=(0.1, 0.2, 0.5),
        metadata=flag(
            "--ratios",
            help="KV budgets as shares of prompt and generated tokens",
            metavar="R,R",
            parse=_list_of(_number),
            show=_joined,
        ),
    )
    recall: str | None = field(
        default=None,
        metadata=flag(
            "--recall", help='questions: .jsonl with {"prompt", "answer"}', metavar="FILE", unset="the demo's"
        ),
    )
    text: str | None = field(
        default=None,
        metadata=flag("--text", help="held-out text for the perplexity", metavar="FILE", unset="the demo's"),
    )
    context: int | None = field(
        default=None,
        metadata=flag(
            "--context",
            help="tokens prefilled and pruned before the scored ones",
            metavar="N",
            unset="768, or 3/4 of the model's context",
        ),
    )
    continuation: int | None = field(
        default=None,
        metadata=flag(
            "--continuation", help="tokens scored after each context", metavar="N", unset="a third of --context"
        ),
    )
    limit: int | None = field(
        default=None,
        metadata=flag(
            "--limit", help="most questions, and most windows of text", metavar="N", unset="all questions, 32 windows"
        ),
    )

    def __post_init__(self) -> None:
        if not self.policies or not self.ratios:
            raise UsageError("--policies or --ratios is empty", "needed at least one of each")
        for name in self.policies:
            SPLITS.get(name)
        for ratio in self.ratios:
            share(ratio, "--ratios")
        for name in ("context", "continuation", "limit"):
            if getattr(self, name) is not None:
                whole(getattr(self, name), f"--{name}", 1)

    @property
    def cells(self) -> tuple[EvictionConfig, ...]:
        """Every policy at every ratio, in the order given; the full cache once."""
        return tuple(
            EvictionConfig(name=name, ratio=ratio)
            for name in dict.fromkeys(self.policies)
            for ratio in ((1.0,) if name == "full" else dict.fromkeys(self.ratios))
        )
