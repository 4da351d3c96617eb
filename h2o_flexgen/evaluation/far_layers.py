"""The layers and KV heads of a model that look far, measured on purpose and shown: `evaluate --measure-layers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.far_layers import FarPlaces, Place, keep_far_places
from h2o_flexgen.engine.far_heads import LEAST, PERIOD, Scores, head_scores, places_of, random_text
from h2o_flexgen.errors import UsageError
from h2o_flexgen.evaluation.quality import encoded, evicting
from h2o_flexgen.evaluation.settings import EvaluationSettings, read_text, spread
from h2o_flexgen.planning.llm import LLM

READS = {"text", "context", "limit"}
"""The fields of EvaluationSettings that it reads."""


class FarHeads(NamedTuple):
    """The scores of a model's KV heads, and the places that look far."""

    model: str
    scores: Scores
    places: FarPlaces

    def to_json(self) -> dict[str, Any]:
        scores = [[layer, head, each] for layer, heads in self.scores.items() for head, each in enumerate(heads)]
        layers = {"far_layers": self.places.places, "far_layers_with_recall": self.places.layers}
        return {"model": self.model, "scores": scores, **layers}

    def table(self) -> str:
        """A line for each head that has its share, or is the first of its model, and the flags that follow."""
        named, far = ",".join(map(shown, self.places.places)), set(self.places.places)
        lines = [
            f"head {shown((layer, head)):>6}  {score:.3f}{'  far' * (layer in far or (layer, head) in far)}"
            for layer, heads in self.scores.items()
            for head, score in enumerate(heads)
            if score >= LEAST
        ]
        return "\n".join((*lines, f"--budget-split far --far-layers {named}" if named else "no head stands out"))


def shown(place: Place) -> str:
    """As `--far-layers` names it."""
    return str(place) if isinstance(place, int) else "{}.{}".format(*place)


def measure_layers(
    settings: EvaluationSettings,
    model: str = "demo",
    engine: Mapping[str, Any] | None = None,
    on_kept: Callable[[str], None] = lambda line: None,
) -> FarHeads:
    """Measures by random tokens, or by `context` tokens each at `limit` places of a text, one by default. The result is
    kept for `auto`, unless windows tell, or weights are random. UsageError for a text that is too short."""
    with evicting(model, engine, EvictionConfig()) as llm:
        spec, config, known = llm.model.spec, llm.config, not llm.model.dummy
        texts = [random_text(spec)] if settings.text is None else _texts(llm, read_text(settings.text), settings)
    scores = head_scores(config, LLM, texts)
    found = FarHeads(model, scores, places_of(spec, scores))
    if known and not any(spec.windows):
        try:
            on_kept(f"--eviction auto knows from now on, by {keep_far_places(spec, found.places)}")
        except OSError as error:
            on_kept(f"not kept for --eviction auto: {error}")
    return found


def _texts(llm: LLM, text: str, settings: EvaluationSettings) -> list[list[int]]:
    length = min(settings.context or PERIOD, len(random_text(llm.model.spec)))
    _, body = encoded(llm, text)
    if len(body) < length:
        raise UsageError(f"the text has {len(body)} tokens", f"needed {length}", "give a longer text, or --context")
    starts = range(0, len(body) - length + 1, length)
    return [body[at : at + length] for at in spread(starts, settings.limit or 1)]
