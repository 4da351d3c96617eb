"""Finds the layers of a model that look far: its loss if one layer alone evicts half of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.errors import UsageError
from h2o_flexgen.evaluation.quality import Window, cut_windows, evicting, whole
from h2o_flexgen.evaluation.settings import EvaluationSettings, read_text
from h2o_flexgen.planning.llm import LLM

OUTSTANDING = 5
"""A layer looks far if its loss is more than this many times the median."""


class LayerLosses(NamedTuple):
    """Of each layer of `model` the mean square of what a scored token's log-probability changes by."""

    model: str
    losses: list[float]

    @property
    def far(self) -> list[int]:
        usual = OUTSTANDING * median(self.losses)
        return [layer for layer, loss in enumerate(self.losses) if loss > usual]

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "losses": self.losses, "far_layers": self.far}

    def table(self) -> str:
        """A line for each layer, and the flags that follow."""
        lines = [f"layer {i:3}  {loss:.5f}{'  far' * (i in self.far)}" for i, loss in enumerate(self.losses)]
        flags = f"--budget-split far --far-layers {','.join(map(str, self.far))}" if self.far else "no layer stands out"
        return "\n".join((*lines, flags))


def measure_layers(
    settings: EvaluationSettings,
    model: str = "demo",
    engine: Mapping[str, Any] | None = None,
    on_layer: Callable[[str], None] = lambda line: None,
) -> LayerLosses:
    """Scores the same windows of text with the full cache, and for each layer where H2O has half of its tokens there.

    UsageError for a model of fewer than three layers, among which none can stand out.
    """
    with evicting(model, engine, EvictionConfig()) as llm:
        pairs, count = cut_windows(llm, read_text(settings.text), settings).pairs, llm.model.spec.num_layers
        exact = _scored(llm, pairs)
    if count < 3:
        raise UsageError(f"{model} has {count} layers", "needed three to compare", "leave --measure-layers out")
    losses = []
    for layer in range(count):
        others = tuple(each for each in range(count) if each != layer)
        # All but half a layer of what full caches hold: the others, whose share that is, keep everything.
        eviction = EvictionConfig("h2o", (count - 0.5) / count, budget_split="far", far_layers=others)
        with evicting(model, engine, eviction) as llm:
            changes = [a - b for a, b in zip(_scored(llm, pairs), exact, strict=True)]
        losses.append(sum(change * change for change in changes) / len(changes))
        on_layer(f"layer {layer}: {losses[-1]:.5f}")
    return LayerLosses(model, losses)


def _scored(llm: LLM, pairs: list[Window]) -> list[float]:
    """The log-probabilities of all tokens that are scored."""
    return [logprob for score in whole(llm.score(pairs)) for logprob in score.token_logprobs]
