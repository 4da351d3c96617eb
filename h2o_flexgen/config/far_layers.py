"""The layers and KV heads of a model that look far, as `engine.far_heads` has measured them on this machine. No torch.

Few heads look far (DuoAttention, arXiv 2410.10819).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path, PurePath
from typing import NamedTuple

from h2o_flexgen.config.checks import whole
from h2o_flexgen.config.eviction import far_place
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.folders import cached, whole_file

log = logging.getLogger(__name__)

Place = int | tuple[int, int]
"""A layer, or a layer and one of its KV heads."""


class FarPlaces(NamedTuple):
    """The layers or heads that look far, and the layers that do where all heads of one keep equally many tokens."""

    places: tuple[Place, ...]
    layers: tuple[int, ...]


def far_places(spec: ModelSpec) -> FarPlaces | None:
    """Places of a model of this name and shape; None where none was measured, or with a warning where they are damaged
    or another model's."""
    path = _kept_file(spec)
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        places = tuple(far_place(each, "needed layers, or layers and KV heads") for each in data["places"])
        found = FarPlaces(places, tuple(whole(each, "a layer", 0) for each in data["layers"]))
        faults = [fault for place in (*found.places, *found.layers) if (fault := fault_of(spec, place))]
        if faults:
            raise ValueError(f"{spec.name} has {faults[0]}")
        return found
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        log.warning("%s cannot be used: %s", path, error)
        return None


def keep_far_places(spec: ModelSpec, found: FarPlaces) -> Path:
    """For later runs with a model of this name and shape; returns the file. OSError where it cannot be written."""
    path = _kept_file(spec)
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps({"model": spec.name, **found._asdict()}) + "\n", encoding="utf-8")
    return path


def _kept_file(spec: ModelSpec) -> Path:
    name = (PurePath(spec.name).name or spec.name).lower().replace(" ", "-").replace("_", "-")
    shape = (
        spec.num_layers,
        spec.hidden_size,
        spec.vocab_size,
        [tuple(spec.heads_of(i)) for i in range(spec.num_layers)],
    )
    digest = hashlib.sha256(repr((name, shape)).encode()).hexdigest()
    return cached("far", f"{re.sub('[^a-z0-9.-]', '-', name)[:64]}-{digest[:12]}.json")


def fault_of(spec: ModelSpec, place: Place) -> str | None:
    """The layers or heads that a model has, if this layer, or head of a layer, is not among them; else None."""
    layer = place if isinstance(place, int) else place[0]
    if layer >= spec.num_layers:
        return f"{spec.num_layers} layers, from 0"
    if isinstance(place, int):
        return None
    if not spec.attends(layer) or spec.arch.chunk_of(layer) is not None:
        return "no heads there that may keep different numbers of tokens"
    heads = {spec.heads_of(each).keys for each in range(spec.num_layers) if spec.attends(each)}
    if len(heads) > 1:
        return "layers of different numbers of KV heads"
    return None if place[1] < min(heads) else f"KV heads 0 to {min(heads) - 1} in each layer"
