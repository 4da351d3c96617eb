"""The units of a recorded run of a model's modules: where each begins, what its layers keep, what weights it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from h2o_flexgen.config.model.modules import HalfSpec, ModuleTensor, half_names
from h2o_flexgen.config.model.tensors import StateSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.hf.attention import Call
from h2o_flexgen.models.hf.build import is_product
from h2o_flexgen.models.hf.experts import Routing, form_of
from h2o_flexgen.models.hf.fused import Groups
from h2o_flexgen.models.hf.names import pieces
from h2o_flexgen.models.hf.states import mixers

SMALL = 1 << 22
"""Numbers that a tensor may have which is used by several units at once, and is copied for them."""


class Mixing(NamedTuple):
    """The states that a mixer keeps; `layer`: the number by which it asks for them."""

    layer: int
    states: tuple[StateSpec, ...]


class Event(NamedTuple):
    """The call of the module `path` began ("enter") or ended ("exit"), or attention, experts or states were asked."""

    kind: str
    path: str = ""
    call: Call | None = None
    routing: Routing | None = None
    mixing: Mixing | None = None


class RecordedLayer:
    """A layer as the run has shown it: its `call` of attention and its states, the event by which it begins, and the
    event behind which both are done. A module that is called several times is as many layers."""

    def __init__(self, path: str, begin: int, end: int = 0) -> None:
        self.path, self.begin, self.end = path, begin, end
        self.call: Call | None = None
        self.mixing: Mixing | None = None

    @property
    def products(self) -> Literal["attn", "mixer"]:
        """The kind of the products of its first half."""
        return "mixer" if self.call is None and self.mixing is not None else "attn"

    @property
    def number(self) -> int:
        """The number by which the modules know it in their cache."""
        held = self.call or self.mixing
        if held is None:
            raise RuntimeError(f"{self.path} holds nothing")
        return held.layer


class RecordedUnits:
    """The units of a recorded run, and in which of them each module was called.

    `layers`: the layers that hold something of a row. `halves`: the units between the embedding and the head;
    `routings`: by unit the path of its experts, and their routing; `starts`: the module whose call begins each unit but
    the first, and `begins` the events of these calls. A layer's operations behind its experts belong to the next unit.
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
        found: dict[int, RecordedLayer] = {}
        stack: list[str] = []
        begun: list[int] = []
        for i, event in enumerate(self._events):
            if event.kind == "enter":
                stack.append(event.path)
                begun.append(i)
            elif event.kind == "exit":
                stack.pop()
                begun.pop()
            elif event.call is not None or event.mixing is not None:
                what = "attends" if event.mixing is None else "keeps states"
                outer = [path for path in stack if path.rpartition(".")[0] in lists]
                if not self._in_a_layer(outer, stack, event):
                    raise self._refused(f"what {what} is not in one layer of a list")
                begin = begun[stack.index(outer[0])]
                if len(outer) > 1 and begin in found:
                    begin = begun[-1]  # a layer attends again: its second attention is a layer of its own
                layer = found.setdefault(begin, RecordedLayer(outer[0], begin))
                if (layer.mixing if event.mixing is not None else layer.call) is not None:
                    raise self._refused(f"{outer[0]} {what} more than once")
                layer.call, layer.mixing = event.call or layer.call, event.mixing or layer.mixing
                if layer.call is not None and layer.mixing is not None and layer.call.layer != layer.mixing.layer:
                    raise self._refused(f"{outer[0]} keeps states of another layer")
                child = stack[stack.index(outer[0]) + 1]
                layer.end = next(j for j in range(i, len(self._events)) if self._events[j] == Event("exit", child))
        self.layers = list(found.values())

    @staticmethod
    def _in_a_layer(outer: list[str], stack: list[str], event: Event) -> bool:
        """Whether what attends or mixes is in a layer, or is attention in a list of a layer's own. `outer`: of the
        modules under way those that are in lists."""
        if len(outer) == 2 and event.mixing is None:
            return stack[-2:] == outer and outer[1].rpartition(".")[0].rpartition(".")[0] == outer[0]
        return len(outer) == 1 and outer[0] != stack[-1]

    def _walk(self) -> None:
        """Which unit each call is in. A unit begins with the first module that has parameters."""
        self.halves: list[HalfSpec] = []
        self.starts: list[str] = []
        self.begins: list[int] = []
        self.routings: dict[int, tuple[str, Routing]] = {}
        self.first: dict[str, int] = {}
        self._units: dict[str, tuple[int, ...]] = {}
        stack: list[int] = []  # the units in which the calls that are under way began
        lists = {layer.path.rpartition(".")[0] for layer in self.layers}
        behind = max(i for i, each in enumerate(self._events) if each.path.rpartition(".")[0] in lists)
        routed, inside = False, ""
        for i, (kind, path, _, routing, _) in enumerate(self._events):
            if routing is not None:
                if not self.halves or self.halves[-1].kind != "mlp" or len(self.halves) in self.routings:
                    raise self._refused(f"{path} is not in the second half of a layer, or called again")
                self.routings[len(self.halves)], routed = (path, routing), True
            elif kind == "enter":
                if path.rpartition(".")[0] in lists:
                    inside = path
                if self._begins(i, path, inside, i > behind):
                    before = self._events[self.begins[-1] + 1 if self.begins else 0 : i]
                    if any(each.kind == "enter" and each.path == path for each in before):
                        raise self._refused(f"{path} is called more than once")
                    self.starts.append(path)
                    self.begins.append(i)
                    routed = False
                stack.append(len(self.starts) + routed)
                self.first.setdefault(path, stack[-1])
            elif kind == "exit":
                begun, known = stack.pop(), self._units.get(path)
                if begun != len(self.starts) + routed or known == ():
                    self._units[path] = ()
                elif known is None or begun not in known:
                    self._units[path] = (*(known or ()), begun)
        if len(self.starts) != len(self.halves) + 1:
            raise self._refused("there is no output head behind its layers")
        for number in self.routings:
            self.halves[number - 1] = self.halves[number - 1]._replace(products="router")
        parts = [path.split(".") for path in self.first]
        self._around = {".".join(part[:end]) for part in parts for end in range(len(part) + 1)}

    def _begins(self, i: int, path: str, inside: str, behind: bool) -> bool:
        """Whether a unit begins with the call of the module at `path`, which is a half unless it is `behind` all
        layers. `inside`: the last layer that was called, which it may be itself."""
        number = self.halves[-1].layer if self.halves else -1
        following = number + 1 < len(self.layers) and i == self.layers[number + 1].begin
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
        elif number + 1 < len(self.layers) and self.layers[number + 1].path.startswith(f"{path}."):
            return False  # the list of the next layer is in it
        elif not behind:
            raise self._refused(f"{path} is called between layers")
        else:
            return len(self.starts) == len(self.halves)
        return True

    def uses(self, path: str) -> bool:
        """Whether the module at `path`, or one in it, is called."""
        return path in self._around

    def units_of(self, path: str) -> tuple[int, ...]:
        """The units that use what the module at `path` holds itself; none where a call of it is in several, or nobody
        knows, as other methods of it are called."""
        return self._units.get(path, ())


def weight_groups(model: PreTrainedModel, timeline: RecordedUnits, name: str) -> tuple[Groups, bool]:
    """The weight groups, and whether the output head is the token embedding."""
    if model.get_output_embeddings() is None:
        raise ModelError(f"{name}: {type(model).__name__} has no output head that it tells")
    inside, groups = _used_unseen(model, timeline), _Groups(model, timeline, name)
    routed: dict[str, list[int]] = {}
    for unit, (path, _) in timeline.routings.items():
        routed.setdefault(path, []).append(unit)
    # The token embedding first: a head that is tied to it may come before.
    embedding = model.get_input_embeddings()
    for path, module in sorted(model.named_modules(), key=lambda each: each[1] is not embedding):
        called = inside.get(path, path)
        for unit in routed.get(path, ()):
            groups.add_experts(unit, path, module)
        own = path not in routed or hasattr(module, "expert_form")  # tensors beside those of experts
        if own and timeline.uses(called):  # others are never called: using a tensor of them is an error
            parts = {part.parameter for part in form_of(module).parts} if path in routed else set[str]()
            for key, tensor in ((key, tensor) for key, tensor in _tensors(module) if key not in parts):
                for unit_or_none in timeline.units_of(called) or (None,):
                    groups.add(unit_or_none, path, key, tensor, called == path)
    return groups.made()


class _Groups:
    """Weight groups while they are made. A tensor that several units use is in the group of each."""

    def __init__(self, model: PreTrainedModel, timeline: RecordedUnits, name: str) -> None:
        self._model, self._timeline, self._name, self._tied = model, timeline, name, False
        self._names, self._pieces = timeline.names, pieces(model)
        self._found: dict[str, list[ModuleTensor]] = {unit: [] for unit in self._names}
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        self._routers = {routing.module.num_experts for _, routing in timeline.routings.values()}
        self._seen: dict[int, dict[str, str]] = {}  # by the id of a tensor, and by group, what it is called there
        self._paths: dict[int, list[str]] = {}  # by the id of a tensor, all its names
        for path, module in model.named_modules():
            for key, tensor in _tensors(module):
                self._paths.setdefault(id(tensor), []).append(f"{path}.{key}" if path else key)

    def add(self, unit: int | None, path: str, key: str, tensor: Tensor, called: bool) -> None:
        """A tensor of the module at `path` to the group of a unit; None: of several at once. `called`: whether the
        module is, and not its tensors taken by another."""
        module, group = self._model.get_submodule(path), self._names[unit or 0]
        parameter, known = f"{path}.{key}" if path else key, self._seen.setdefault(id(tensor), {})
        if module is self._head and key == "weight" and "embed.tokens" in known.values():
            self._tied = True
            return
        if group in known:
            found = self._found[group]
            for i, each in enumerate(found):
                if each.name == known[group] and parameter not in (each.parameter, *each.also):
                    found[i] = each._replace(also=(*each.also, parameter))  # another place in the same unit
            return
        if "embed.tokens" in known.values():
            raise ModelError(f"{self._name}: {parameter} is tied to embed.tokens, which is not understood")
        if not tensor.dtype.is_floating_point or tensor.dim() > 4:
            raise ModelError(f"{self._name}: {parameter} is {tensor.dtype} of {tuple(tensor.shape)}: not understood")
        resident = unit is None
        if resident and tensor.numel() > SMALL:
            raise ModelError(f"{self._name}: {parameter} is large, and no single unit's")
        canonical = f"{group}.{_within(self._timeline, unit, parameter)}"
        if module is self._embedding and key == "weight" and not known:
            canonical = "embed.tokens"
        elif module is self._head and key in ("weight", "bias"):
            canonical = "head.vocab" if key == "weight" else "head.vocab_bias"
        turned = is_product(module) and not isinstance(module, nn.Linear) and key == "weight"
        shape = tuple(reversed(tensor.shape)) if turned else tuple(tensor.shape)
        matrix = is_product(module) and key == "weight" and shape[0] not in self._routers and called
        known[group] = canonical
        if parameter in self._pieces and not (matrix or resident):
            self._found[group].extend(_pieces(canonical, parameter, shape, self._pieces[parameter]))
            return
        others = () if canonical == "embed.tokens" else self._paths[id(tensor)]
        tied = tuple(each for each in others if each != parameter)
        self._found[group].append(ModuleTensor(canonical, parameter, shape, matrix, turned, resident, tied=tied))

    def add_experts(self, unit: int, path: str, module: nn.Module) -> None:
        """A group for each expert of a layer, behind that of its half."""
        form, half = form_of(module), self._names[unit]
        others = {key: self._found.pop(key) for key in list(self._found)[list(self._found).index(half) + 1 :]}
        for expert in range(form.count):
            key = f"{half}.experts.{expert}"
            self._found[key] = [
                ModuleTensor(
                    f"{key}.{part.name}",
                    f"{path}.{part.parameter}",
                    part.shape,
                    len(part.shape) == 2,
                    part.transposed,
                    expert=expert,
                    start=part.start,
                    rows=part.rows,
                )
                for part in form.parts
            ]
        self._found.update(others)

    def made(self) -> tuple[Groups, bool]:
        """As `weight_groups` returns them."""
        names = {name for groups in self._seen.values() for name in groups.values()}
        if "embed.tokens" not in names or not (self._tied or "head.vocab" in names):
            raise ModelError(f"{self._name}: {type(self._model).__name__} keeps its token embedding or head elsewhere")
        found = {key: tuple(each) for key, each in self._found.items()}
        if self._tied:
            found = {"vocab": (*found.pop("embed"), *found.pop("head")), **found}
        return tuple(found.items()), self._tied


def _pieces(
    canonical: str, parameter: str, shape: tuple[int, ...], parts: Sequence[tuple[str, int]]
) -> Iterator[ModuleTensor]:
    """A tensor for each piece of a parameter of `shape`: names and rows."""
    start = 0
    for i, (piece, rows) in enumerate(parts):
        own = (rows, *shape[1:])
        yield ModuleTensor(f"{canonical}.{i}", parameter, own, start=start, rows=shape[0], piece=piece)
        start += rows


def _used_unseen(model: PreTrainedModel, timeline: RecordedUnits) -> dict[str, str]:
    """The modules within mixers that are not called, and the mixer of each: it takes their tensors itself."""
    return {
        f"{mixer}.{path}" if path else mixer: mixer
        for mixer, module in mixers(model).items()
        for path, _ in module.named_modules()
        if f"{mixer}.{path}" not in timeline.first
    }


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors that a module itself keeps in a checkpoint: parameters, and buffers that are saved."""
    kept = [(key, each) for key, each in module._parameters.items() if each is not None]
    saved = [key for key in module._buffers if key not in module._non_persistent_buffers_set]
    return [*kept, *((key, each) for key in saved if (each := module._buffers[key]) is not None)]


def _within(timeline: RecordedUnits, unit: int | None, parameter: str) -> str:
    """The name of a parameter, without that of its layer where it is of a unit of that."""
    if not 0 < (unit or 0) <= len(timeline.halves):
        return parameter
    start = timeline.starts[(unit or 0) - 1]
    layer = next((each.path for each in timeline.layers if f"{start}.".startswith(f"{each.path}.")), start)
    return parameter.removeprefix(f"{layer}.")
