"""What to measure: policies, ratios, questions, text, and how long streams are.

No torch, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from h2o_flexgen.config.checks import share, whole
from h2o_flexgen.config.eviction import SPLITS, EvictionConfig
from h2o_flexgen.config.flags import between_commas, option, with_commas
from h2o_flexgen.config.reports.quality import POSITIONS, Positions
from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion


def _ratios(text: str) -> tuple[float, ...]:
    ratios = []
    for word in between_commas(text):
        try:
            ratios.append(float(word))
        except ValueError:
            raise UsageError(f"{word!r} is not a number", "needed shares such as 0.1,0.2,0.5") from None
    return tuple(ratios)


@dataclass(frozen=True)
class EvaluationSettings:
    """What `evaluate` measures. Raises UsageError for values that make no sense."""

    policies: tuple[str, ...] = option(
        ("full", "h2o", "local", "streaming", "heavy", "random"),
        "--policies",
        help="eviction policies to measure",
        metavar="A,B",
        parse=between_commas,
        show=with_commas,
    )
    ratios: tuple[float, ...] = option(
        (0.1, 0.2, 0.5),
        "--ratios",
        help="KV budgets as shares of prompt and generated tokens",
        metavar="R,R",
        parse=_ratios,
        show=with_commas,
    )
    recall: str | None = option(
        None, "--recall", help='questions: .jsonl with {"prompt", "answer"}', metavar="FILE", unset="the demo's"
    )
    text: str | None = option(
        None, "--text", help="held-out text for the perplexity", metavar="FILE", unset="the demo's"
    )
    context: int | None = option(
        None,
        "--context",
        help="tokens prefilled and pruned before the scored ones",
        metavar="N",
        unset="768, or 3/4 of the model's context",
    )
    continuation: int | None = option(
        None, "--continuation", help="tokens scored after each context", metavar="N", unset="a third of --context"
    )
    limit: int | None = option(
        None,
        "--limit",
        help="most questions, and most windows of text",
        metavar="N",
        unset="all questions, 32 windows",
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


@dataclass(frozen=True)
class StreamSettings:
    """What `evaluate --stream` measures, besides its policies and its text. UsageError for what makes no sense."""

    stream: int | None = option(
        None,
        "--stream",
        help="score streams of this many tokens, far beyond the model's context, instead of recall",
        metavar="N",
        unset="no streams",
    )
    budget: int | None = option(
        None, "--kv-budget", help="KV budget of a stream, in tokens", metavar="N", unset="half the model's context"
    )
    positions: tuple[Positions, ...] = option(
        POSITIONS,
        "--positions",
        help="kinds of positions: recomputed for each window, rolling within the cache, absolute past the context",
        metavar="A,B",
        parse=between_commas,
        show=with_commas,
    )
    window: int = option(64, "--stream-window", help="scored tokens to a point of the curve", metavar="N")
    streams: int = option(4, "--streams", help="parts of the text, a stream each", metavar="N")

    def __post_init__(self) -> None:
        for name, label in (("stream", "--stream"), ("budget", "--kv-budget")):
            if getattr(self, name) is not None:
                whole(getattr(self, name), label, 1)
        whole(self.window, "--stream-window", 1)
        whole(self.streams, "--streams", 1)
        if not self.positions:
            raise UsageError("--positions is empty", f"needed some of {', '.join(POSITIONS)}")
        for kind in self.positions:
            if kind not in POSITIONS:
                raise UsageError(
                    f"--positions names {kind!r}", f"needed some of {', '.join(POSITIONS)}", suggestion(kind, POSITIONS)
                )

    def cells(self, policies: Sequence[str], context: int) -> Iterator[tuple[Positions, EvictionConfig]]:
        """Every policy with every kind of positions, for a model of `context` tokens.

        The full cache is recomputed or has absolute positions: it grows beyond any context. UsageError where a window
        leaves no room to recompute what precedes it.
        """
        if "recomputed" in self.positions and self.window >= context:
            raise UsageError(
                f"--stream-window {self.window} with recomputed positions",
                f"needed less than the model's context of {context} tokens",
                "lower it, or name other --positions",
            )
        budget = max(1, context // 2) if self.budget is None else self.budget
        for kind in dict.fromkeys(self.positions):
            for name in dict.fromkeys(policies):
                if name == "full" and kind != "rolling":
                    yield kind, EvictionConfig()
                elif name != "full" and kind != "recomputed":
                    yield kind, EvictionConfig(name=name, budget=budget, rolling_positions=kind == "rolling")

    def rounded(self, prompt: int) -> int:
        """Length of a stream, cut to whole windows after its `prompt`. UsageError where there is not one."""
        length = 0 if self.stream is None else self.stream
        windows = (length - prompt) // self.window
        if windows < 1:
            raise UsageError(
                f"--stream {length} is not longer than {prompt} tokens of prompt and a window of {self.window}",
                change="raise it, or lower --context or --stream-window",
            )
        return prompt + windows * self.window
