"""How long streams of text are scored. No torch, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from h2o_flexgen.config.checks import whole
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.flags import flag
from h2o_flexgen.config.reports.stream import POSITIONS, Positions
from h2o_flexgen.errors import UsageError
from h2o_flexgen.registry import suggestion


def _kinds(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _joined(kinds: Sequence[str]) -> str:
    return ",".join(kinds)


@dataclass(frozen=True)
class StreamSettings:
    """What `evaluate --stream` measures, besides its policies and its text. UsageError for what makes no sense."""

    stream: int | None = field(
        default=None,
        metadata=flag(
            "--stream",
            help="score streams of this many tokens, far beyond the model's context, instead of recall",
            metavar="N",
            unset="no streams",
        ),
    )
    budget: int | None = field(
        default=None,
        metadata=flag(
            "--kv-budget", help="KV budget of a stream, in tokens", metavar="N", unset="half the model's context"
        ),
    )
    positions: tuple[Positions, ...] = field(
        default=POSITIONS,
        metadata=flag(
            "--positions",
            help="kinds of positions: recomputed for each window, rolling within the cache, absolute past the context",
            metavar="A,B",
            parse=_kinds,
            show=_joined,
        ),
    )
    window: int = field(
        default=64, metadata=flag("--stream-window", help="scored tokens to a point of the curve", metavar="N")
    )
    streams: int = field(default=4, metadata=flag("--streams", help="parts of the text, a stream each", metavar="N"))

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

    def at(self, stream: int) -> StreamSettings:
        """The same for streams of another length."""
        return replace(self, stream=stream)
