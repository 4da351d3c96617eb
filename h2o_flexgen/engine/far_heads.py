"""Measures which KV heads of a model look far, by one prompt of random tokens that come again.

There such heads attend to where the token stood before, or to the token that followed it: the echo and induction heads
of Tang et al. 2024, "RazorAttention", arXiv 2407.15891. Others have no use for random tokens far back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor

from h2o_flexgen.cache.eviction import EVICTION_POLICIES, base
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.far_layers import FarPlaces, Place, far_places, fault_of, keep_far_places
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.splits import SPLITS, Split
from h2o_flexgen.config.workload import asks_for_far_layers
from h2o_flexgen.engine.limits.devices import return_free_pages
from h2o_flexgen.engine.limits.plan import forget
from h2o_flexgen.engine.model import Model, for_model
from h2o_flexgen.errors import H2OFlexGenError, first_line

log = logging.getLogger(__name__)

PERIOD, TIMES = 512, 3
"""Tokens after which the text comes again, and how often it stands there."""
FEW = 8
"""One of so many heads looks far, or of layers,"""
LEAST = 0.1
"""if at least this share of its attention goes there."""
_REPEATS = "repeats"
_LENT, _ONE = Lock(), Lock()

Scores = dict[int, list[float]]
"""By layer, of each KV head: the share of attention that goes to earlier places of the token and of those behind them,
the mean over queries, of the query head that has most."""


class RepeatsPolicy(base.RankedPolicy):
    """Adds to `found` what prompts of texts that come again after `period` tokens show."""

    name = _REPEATS
    asks: ClassVar[Any] = "all"

    def __init__(self, period: int, found: dict[int, list[Tensor]]) -> None:
        super().__init__()
        self._period, self._found = period, found

    def prompt_scores(self, prompts: base.AttendedPrompts, rows: base.PromptRows) -> base.PromptScores:
        count = prompts.length - self._period
        total = torch.zeros((), device=prompts.k.device)
        for at, shares in base.attention_rows(prompts, count, rows.window):
            for back in range(self._period, prompts.length, self._period):
                earlier = at - back
                both = torch.stack([earlier, earlier + 1], -1).clamp_(min=0).expand(*shares.shape[:-1], 2)
                paid = shares.gather(-1, both).sum(-1).masked_fill_(earlier < 0, 0.0)
                total = total + paid.sum(-1)
        self._found.setdefault(rows.tokens.layer, []).extend((total / count).amax(-1).cpu().unbind())
        return base.PromptScores(torch.ones(len(prompts.k), prompts.k.shape[1], prompts.length, device=total.device))


@contextmanager
def _watched(period: int) -> Iterator[dict[int, list[Tensor]]]:
    """Within it the policy _REPEATS exists, and adds to this."""
    found: dict[int, list[Tensor]] = {}
    split = Split(lambda share: 0, takes_recent=False, queries="all")
    policy = EVICTION_POLICIES.lent(_REPEATS, lambda seed: RepeatsPolicy(period, found))
    with _LENT, SPLITS.lent(_REPEATS, split), policy:
        yield found


def random_text(spec: ModelSpec) -> list[int]:
    """Token ids, always the same, of which a context has room for several times as many."""
    length = min(PERIOD, (spec.max_positions - 2) // TIMES)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, spec.vocab_size, (max(1, length),), generator=generator).tolist()


def head_scores(config: EngineConfig, make: Callable[..., Any], texts: Sequence[Sequence[int]]) -> Scores:
    """Of a model as `config` runs it: the mean over `texts`, token ids of one length each. make: the class Engine."""
    settings: Mapping[str, Any] = {item.name: getattr(config, item.name) for item in fields(config) if item.init}
    alone = {"prefix_mem": None, "prefix_dir": None, "prefix_disk": None, "trace": False, "record_scores": False}
    with _watched(len(texts[0])) as found:
        less = EvictionConfig(_REPEATS, budget=TIMES * len(texts[0]) - 1)  # or the policy would not be asked
        with make(**{**settings, **alone, "eviction": less}) as engine:
            pairs = [([*text] * TIMES, [text[0]]) for text in texts]
            failed = next((score.error for score in engine.score(pairs) if score.error is not None), None)
        if failed is not None:
            raise H2OFlexGenError(failed, "needed one prompt of repeated tokens")
        return {layer: torch.stack(each).mean(0).tolist() for layer, each in sorted(found.items())}


def places_of(spec: ModelSpec, scores: Scores) -> FarPlaces:
    """The heads that look far, or the layers of a model whose heads cannot differ, and the layers alone."""
    by_layer: dict[Place, float] = {layer: max(heads) for layer, heads in scores.items()}
    by_head: dict[Place, float] = {(i, head): each for i, heads in scores.items() for head, each in enumerate(heads)}
    apart = len(by_head) > len(by_layer) and not any(fault_of(spec, place) for place in by_head)
    layers = tuple(layer for layer in _largest(by_layer) if isinstance(layer, int))
    return FarPlaces(_largest(by_head) if apart else layers, layers)


def _largest(scores: Mapping[Place, float]) -> tuple[Place, ...]:
    best = sorted(scores, key=lambda place: -scores[place])[: max(1, len(scores) // FEW)]
    return tuple(sorted(place for place in best if scores[place] >= LEAST))


def know_far_heads(config: EngineConfig, model: Model, compute_tier: str, make: Callable[..., Any]) -> None:
    """Measures a model once where `config` needs it, and keeps what was found; a warning says why it cannot be.
    UsageError for what the model would refuse afterwards."""
    spec = model.spec
    if model.dummy or not asks_for_far_layers(config.eviction, spec):
        return
    for_model(replace(config, eviction=replace(config.eviction, budget_split="uniform")), spec, compute_tier)
    with _ONE:  # or threads that open one model each measure it
        if far_places(spec) is not None:
            return
        text = random_text(spec)
        log.warning("%s: which KV heads look far is measured once, by %d random tokens", spec.name, TIMES * len(text))
        try:
            keep_far_places(spec, places_of(spec, head_scores(config, make, [text])))
        except Exception as error:  # whatever it is, the run can do without
            log.warning("which KV heads look far is not known: %s", first_line(error))
    forget()
    return_free_pages()  # which would count as the process's own beside what the run may use
