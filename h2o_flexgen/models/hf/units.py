"""The units of a recorded run of a model's modules: where each begins, and what its layers keep."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from h2o_flexgen.config.model.modules import HalfSpec, half_names
from h2o_flexgen.config.model.tensors import StateSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.hf.attention import Call
from h2o_flexgen.models.hf.experts import Routing


class Mixing(NamedTuple):
    """What a mixer keeps: `layer` is its own number of it."""

    layer: int
    states: tuple[StateSpec, ...]


class Event(NamedTuple):
    """What happened: the call of the module `path` began ("enter") or ended ("exit"), attention was asked for, experts
    were, or states."""

    kind: str
    path: str = ""
    call: Call | None = None
    routing: Routing | None = None
    mixing: Mixing | None = None


class RecordedLayer:
    """A layer as the run has shown it: what it attends with and keeps, and the event behind which all that is done."""

    def __init__(self, path: str, end: int = 0) -> None:
        self.path, self.end = path, end
        self.call: Call | None = None
        self.mixing: Mixing | None = None

    @property
    def products(self) -> Literal["attn", "mixer"]:
        """The kind of those of its first half."""
        return "mixer" if self.call is None and self.mixing is not None else "attn"

    @property
    def number(self) -> int:
        """By which the modules know it in their cache."""
        held = self.call or self.mixing
        if held is None:
            raise RuntimeError(f"{self.path} holds nothing")
        return held.layer


class RecordedUnits:
    """The units of a recorded run, and in which of them each module was called.

    `layers`: those that hold something of a row. `halves`: the units between the embedding and the head; `routings`: by
    unit those of experts, and the path of these; `starts`: the module whose call begins each unit but the first. What a
    layer computes once its experts have answered belongs to the unit behind.
    """

    def __init__(self, model: PreTrainedModel, events: list[Event], name: str) -> None:
        self._model, self._events, self._name = model, events, name
        self._inner = {path for path, module in model.named_modules() if any(True for _ in module.parameters())}
        self.layers: list[RecordedLayer] = []
        self._find_layers()
        if not self.layers:
            raise self._refused("no layer attends by the attention interface, or keeps states")
        self._walk()

    @property
    def calls(self) -> list[Call]:
        """Of attention, in order."""
        return [layer.call for layer in self.layers if layer.call is not None]

    @property
    def names(self) -> list[str]:
        """Of the units, which canonical names begin with."""
        return ["embed", *half_names(tuple(self.halves)), "head"]

    def _refused(self, why: str) -> ModelError:
        return ModelError(f"{self._name}: {type(self._model).__name__} is not understood: {why}")

    def _find_layers(self) -> None:
        """The layers that attend or mix. Attention that a mixer does itself is not understood."""
        lists = {path for path, module in self._model.named_modules() if isinstance(module, nn.ModuleList)}
        found: dict[str, RecordedLayer] = {}
        stack: list[str] = []
        for i, event in enumerate(self._events):
            if event.kind == "enter":
                stack.append(event.path)
            elif event.kind == "exit":
                stack.pop()
            elif event.call is not None or event.mixing is not None:
                what = "attends" if event.mixing is None else "keeps states"
                outer = [path for path in stack if path.rpartition(".")[0] in lists]
                if len(outer) != 1 or outer[0] == stack[-1]:
                    raise self._refused(f"what {what} is not in one layer of a list")
                layer = found.setdefault(outer[0], RecordedLayer(outer[0]))
                if (layer.mixing if event.mixing is not None else layer.call) is not None:
                    raise self._refused(f"{outer[0]} {what} more than once")
                layer.call, layer.mixing = event.call or layer.call, event.mixing or layer.mixing
                if layer.call is not None and layer.mixing is not None and layer.call.layer != layer.mixing.layer:
                    raise self._refused(f"{outer[0]} keeps states of another layer")
                child = stack[stack.index(outer[0]) + 1]
                layer.end = next(j for j in range(i, len(self._events)) if self._events[j] == Event("exit", child))
        self.layers = list(found.values())

    def _walk(self) -> None:
        """Which unit each call is in. A unit begins with the first module that has parameters."""
        self.halves: list[HalfSpec] = []
        self.starts: list[str] = []
        self.routings: dict[int, tuple[str, Routing]] = {}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        lists = {layer.path.rpartition(".")[0] for layer in self.layers}
        behind = max(i for i, each in enumerate(self._events) if each.path.rpartition(".")[0] in lists)
        entered, routed, inside = Counter[str](), False, ""
        for i, (kind, path, _, routing, _) in enumerate(self._events):
            if routing is not None:
                if not self.halves or self.halves[-1].kind != "mlp" or len(self.halves) in self.routings:
                    raise self._refused(f"{path} is not in the second half of a layer, or called again")
                self.routings[len(self.halves)], routed = (path, routing), True
            elif kind == "enter":
                entered[path] += 1
                if path.rpartition(".")[0] in lists:
                    inside = path
                if self._begins(i, path, inside, i > behind):
                    self.starts.append(path)
                    routed = False
                self.first.setdefault(path, len(self.starts) + routed)
            if kind in ("enter", "exit"):
                self.last[path] = len(self.starts) + routed
        if len(self.starts) != len(self.halves) + 1:
            raise self._refused("there is no output head behind its layers")
        for number in self.routings:
            self.halves[number - 1] = self.halves[number - 1]._replace(products="router")
        twice = [path for path in self.starts if entered[path] > 1]
        if twice:
            raise self._refused(f"{twice[0]} is called more than once")
        parts = [path.split(".") for path in self.first]
        self._around = {".".join(part[:end]) for part in parts for end in range(len(part) + 1)}

    def _begins(self, i: int, path: str, inside: str, behind: bool) -> bool:
        """Whether a unit begins with the call of the module at `path`, which is a half unless it is `behind` all
        layers. `inside`: the last layer that was called, which it may be itself."""
        number = self.halves[-1].layer if self.halves else -1
        following = number + 1 < len(self.layers) and path == self.layers[number + 1].path
        if following:
            self.halves.append(HalfSpec("attn", number + 1, self.layers[number + 1].products))
        elif not inside:
            return False
        elif path == inside:
            if number < 0:
                raise self._refused(f"{path} comes before all layers that attend or keep states")
            self.halves.append(HalfSpec("mlp", number, "mlp"))
        elif path not in self._inner:
            return False
        elif path.startswith(f"{inside}."):
            done = inside == self.layers[number].path and i > self.layers[number].end
            if not done or self.halves[-1].kind == "mlp":
                return False
            self.halves.append(HalfSpec("mlp", number, "mlp"))
        elif not behind:
            raise self._refused(f"{path} is called between layers")
        else:
            return len(self.starts) == len(self.halves)
        return True

    def uses(self, path: str) -> bool:
        """Whether the module at `path`, or one in it, is called."""
        return path in self._around

    def unit_of(self, path: str) -> int | None:
        """The unit that uses what the module at `path` holds itself; None: there are several, or nobody knows, as other
        methods of it are called."""
        first = self.first.get(path)
        return first if first == self.last.get(path) else None
