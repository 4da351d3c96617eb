"""Finds the layers, and the KV heads, of a model that look far: its loss if one alone evicts half of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.far_layers import FarPlaces, Place, keep_far_places
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import UsageError
from h2o_flexgen.evaluation.quality import Window, cut_windows, evicting, whole
from h2o_flexgen.evaluation.settings import EvaluationSettings, read_text
from h2o_flexgen.planning.llm import LLM

OUTSTANDING = 5
"""A layer looks far if its loss is more than this many times the median."""
LOOKED_INTO = 4
"""The heads of one of so many layers are measured."""
FEW = 10
"""One of so many heads looks far,"""
FEW_LAYERS = 7
"""and of so many layers, where all heads of a layer keep equally many tokens."""


class LayerLosses(NamedTuple):
    """Of each layer of `model`, and of some of its `heads` in all, the mean square of what a scored token's
    log-probability changes by."""

    model: str
    losses: list[float]
    by_head: Mapping[tuple[int, int], float] = {}
    heads: int = 0

    @property
    def far(self) -> list[Place]:
        if self.by_head:
            worst = sorted(self.by_head, key=lambda place: -self.by_head[place])
            return sorted(worst[: max(1, self.heads // FEW)])
        usual = OUTSTANDING * median(self.losses)
        return [layer for layer, loss in enumerate(self.losses) if loss > usual]

    @property
    def places(self) -> FarPlaces:
        """Heads or layers that look far, and layers alone."""
        if not self.by_head:
            return FarPlaces(tuple(self.far), tuple(layer for layer in self.far if isinstance(layer, int)))
        layers = sorted(range(len(self.losses)), key=lambda layer: -self.losses[layer])
        return FarPlaces(tuple(self.far), tuple(sorted(layers[: max(1, len(layers) // FEW_LAYERS)])))

    def to_json(self) -> dict[str, Any]:
        by_head = [[*place, loss] for place, loss in self.by_head.items()]
        return {"model": self.model, "losses": self.losses, "losses_by_head": by_head, "far_layers": self.far}

    def table(self) -> str:
        """A line for each layer and head, and the flags that follow."""
        far = self.far
        lines = [f"layer {i:3}  {loss:.5f}{'  far' * (i in far)}" for i, loss in enumerate(self.losses)]
        for place, loss in sorted(self.by_head.items()):
            lines.append(f"head {shown(place):>6}  {loss:.5f}{'  far' * (place in far)}")
        named = ",".join(map(shown, far))
        return "\n".join((*lines, f"--budget-split far --far-layers {named}" if far else "no layer stands out"))


def shown(place: Place) -> str:
    """As `--far-layers` names it."""
    return str(place) if isinstance(place, int) else "{}.{}".format(*place)


def measure_layers(
    settings: EvaluationSettings,
    model: str = "demo",
    engine: Mapping[str, Any] | None = None,
    on_layer: Callable[[str], None] = lambda line: None,
) -> LayerLosses:
    """Scores the same windows of text with the full cache, and for each layer where H2O has half of its tokens there;
    then for each head of the layers that lost most, where a layer has several. `auto` is told later, but for windows.

    UsageError for a model of fewer than three layers, among which none can stand out.
    """
    with evicting(model, engine, EvictionConfig()) as llm:
        spec = llm.model.spec
        pairs, count = cut_windows(llm, read_text(settings.text), settings), spec.num_layers
        exact = _scored(llm, pairs)
    if count < 3:
        raise UsageError(f"{model} has {count} layers", "needed three to compare", "leave --measure-layers out")

    def loss(place: Place, others: tuple[Place, ...], places: int) -> float:
        # All but half a layer, or a head, of what full caches hold: the others, whose share that is, keep everything.
        eviction = EvictionConfig("h2o", (places - 0.5) / places, budget_split="far", far_layers=others)
        with evicting(model, engine, eviction) as llm:
            changes = [a - b for a, b in zip(_scored(llm, pairs), exact, strict=True)]
        found = sum(change * change for change in changes) / len(changes)
        on_layer(f"{'layer' if isinstance(place, int) else 'head'} {shown(place)}: {found:.5f}")
        return found

    layers = range(count)
    losses = [loss(layer, tuple(each for each in layers if each != layer), count) for layer in layers]
    heads = {spec.heads_of(layer).keys for layer in layers if spec.attends(layer)}
    if len(heads) > 1 or max(heads) == 1 or any(spec.windows):
        return _kept(LayerLosses(model, losses), spec, on_layer)
    each = range(max(heads))
    worst = sorted((i for i in layers if spec.attends(i)), key=lambda i: -losses[i])[: -(-count // LOOKED_INTO)]
    by_head = dict[tuple[int, int], float]()
    for layer in worst:
        for head in each:
            others: list[Place] = [i for i in layers if i != layer]
            others += [(layer, other) for other in each if other != head]
            by_head[layer, head] = loss((layer, head), tuple(others), count * len(each))
    return _kept(LayerLosses(model, losses, by_head, count * len(each)), spec, on_layer)


def _kept(found: LayerLosses, spec: ModelSpec, tell: Callable[[str], None]) -> LayerLosses:
    if not any(spec.windows) and found.far:
        try:
            tell(f"--eviction auto gives them more from now on: {keep_far_places(spec, found.places)}")
        except OSError as error:
            tell(f"not kept for --eviction auto: {error}")
    return found


def _scored(llm: LLM, pairs: list[Window]) -> list[float]:
    """The log-probabilities of all tokens that are scored."""
    return [logprob for score in whole(llm.score(pairs)) for logprob in score.token_logprobs]
