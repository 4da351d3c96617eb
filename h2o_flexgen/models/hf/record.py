"""The ModelSpec of a model of transformers, from a run of its modules on meta: without data, weights or arithmetic."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from transformers import PreTrainedModel

from h2o_flexgen.config.model.arch import Activation, ArchSpec, ExpertSpec
from h2o_flexgen.config.model.modules import ModuleSpec, ModuleTensor
from h2o_flexgen.config.model.spec import LayerHeads, Product
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.hf.attention import Call, ModelRun
from h2o_flexgen.models.hf.build import build, is_product, quiet
from h2o_flexgen.models.hf.experts import ExpertForm, Routing, form_of, settings_of
from h2o_flexgen.models.hf.fused import SharedInputs, side_by_side

TOKENS = 4
"""Of the recorded run."""
SMALL = 1 << 22
"""Numbers that a tensor may have which is used by several units, and is copied for them."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
_UNBOUNDED = 1 << 20


class Event(NamedTuple):
    """What happened: the call of the module `path` began ("enter") or ended ("exit"), attention was asked for, or
    experts were."""

    kind: str
    path: str = ""
    call: Call | None = None
    routing: Routing | None = None


def record(model: PreTrainedModel, name: str) -> list[Event]:
    """The calls of a forward of TOKENS tokens. Leaves the model on meta. ModelError where that cannot be run."""
    events = listen(model)

    def attend(call: Call) -> Tensor:
        events.append(Event("attend", call=call))
        return torch.empty(call.q.shape, device="meta", dtype=call.q.dtype)

    def route(routing: Routing) -> Tensor:
        events.append(Event("experts", paths[id(routing.module)], routing=routing))
        return torch.empty_like(routing.x)

    paths = {id(module): path for path, module in model.named_modules()}
    numbers = torch.zeros(2, TOKENS, dtype=torch.int64, device="meta")
    last = torch.zeros(1, dtype=torch.int64, device="meta")
    given = (numbers[0], numbers[1], last)

    def forward() -> None:
        with any_choice():
            model(**arguments(model, run, *given))

    run = ModelRun(forward, attend, route, numbers[1])
    try:
        with torch.no_grad(), quiet():  # in inference mode nothing tells whether tensors have changed
            run.switch()
            run.cache.end()
    except ModelError as error:
        raise ModelError(f"{name}: {error.found}", error.needed, error.change) from None
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0][:200]
        raise ModelError(
            f"{name}: {type(model).__name__} cannot be run on packed prompts: {type(error).__name__}: {line}"
        ) from error
    return events


def any_choice() -> Any:
    """Within, what depends on which numbers are not zero takes all of them for such, where there are no numbers. Each
    greenlet has its own."""
    return _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


def listen(model: PreTrainedModel) -> list[Event]:
    """Puts a model on meta, and lists the calls of its modules from now on."""
    events: list[Event] = []
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: events.append(Event("enter", path)))
        module.register_forward_hook(lambda *_, path=path: events.append(Event("exit", path)))
    nn.Module.to(model, "meta")
    return events


def arguments(model: nn.Module, run: ModelRun, ids: Tensor, positions: Tensor, last: Tensor) -> dict[str, Any]:
    """Of `model`'s forward, for packed tokens (T,) at `positions` (T,), of which `last` (n,) want logits."""
    takes = inspect.signature(model.forward).parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    cache = next((name for name in ("cache", "past_key_values") if name in takes), None)
    if cache is None or not ("position_ids" in takes or open_ended):
        raise ModelError(f"{type(model).__name__} takes no {'cache' if cache is None else 'positions'}")
    given: dict[str, Any] = {
        "input_ids": ids[None],
        "position_ids": positions[None],
        cache: run.cache,
        "use_cache": True,
        "return_dict": True,
    }
    if "logits_to_keep" in takes:
        given["logits_to_keep"] = last
    return given


class RecordedUnits:
    """The units of a recorded run, and in which of them each module was called.

    `layers`: the paths of the layers; `calls`: of each its attention; `routings`: by layer those of experts, and the
    path of these; `starts`: the module whose call begins each unit but the first. What a layer computes once its
    experts have answered belongs to the unit behind.
    """

    def __init__(self, model: PreTrainedModel, events: list[Event], name: str) -> None:
        self._model, self._events, self._name = model, events, name
        lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
        self._inner = {path for path, module in model.named_modules() if any(True for _ in module.parameters())}
        self.layers: list[str] = []
        self.calls: list[Call] = []
        ends: dict[str, int] = {}  # of what attends in each layer
        stack: list[str] = []
        for i, event in enumerate(events):
            if event.kind == "enter":
                stack.append(event.path)
            elif event.kind == "exit":
                stack.pop()
            elif event.call is not None:
                outer = [path for path in stack if path.rpartition(".")[0] in lists]
                if len(outer) != 1 or outer[0] == stack[-1]:
                    raise self._refused("attention is not in one layer of a list")
                if outer[0] in ends:
                    raise self._refused(f"{outer[0]} attends more than once")
                child = stack[stack.index(outer[0]) + 1]
                ends[outer[0]] = next(j for j in range(i, len(events)) if events[j] == Event("exit", child))
                self.layers.append(outer[0])
                self.calls.append(event.call)
        if not self.layers:
            raise self._refused("no layer attends by the attention interface")
        self.starts: list[str] = []
        self.routings: dict[int, tuple[str, Routing]] = {}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self._walk(ends)

    def _refused(self, why: str) -> ModelError:
        return ModelError(f"{self._name}: {type(self._model).__name__} is not understood: {why}")

    def _walk(self, ends: Mapping[str, int]) -> None:
        """Which unit each call is in. A unit begins with the first module that has parameters."""
        unit, layer, entered, routed = 0, -1, Counter[str](), False
        for i, (kind, path, _, routing) in enumerate(self._events):
            if routing is not None:
                if unit != 2 * layer + 2 or layer in self.routings:
                    raise self._refused(f"{path} is not in the second half of a layer, or called again")
                self.routings[layer], routed = (path, routing), True
            if kind == "enter":
                entered[path] += 1
                after = layer >= 0 and i > ends[self.layers[layer]]
                if layer + 1 < len(self.layers) and path == self.layers[layer + 1]:
                    if unit != 2 * layer + 2:
                        raise self._refused(f"nothing follows attention in {self.layers[layer]}")
                    layer, unit, routed = layer + 1, 2 * layer + 3, False
                    self.starts.append(path)
                elif after and path in self._inner:
                    inside = path.startswith(f"{self.layers[layer]}.")
                    if unit == (2 * layer + 1 if inside else 2 * len(self.layers)):
                        unit, routed = unit + 1, False
                        self.starts.append(path)
                    elif not inside and unit < 2 * len(self.layers):
                        raise self._refused(f"{path} is called between layers")
                self.first.setdefault(path, unit + routed)
                self.last[path] = unit + routed
            elif kind == "exit":
                self.last[path] = unit + routed
        if unit != 2 * len(self.layers) + 1:
            raise self._refused("there is no output head behind its layers")
        twice = [path for path in self.starts if entered[path] > 1]
        if twice or len(set(self.layers)) < len(self.layers):
            raise self._refused(f"{(twice or self.layers)[0]} is called more than once")
        parts = [path.split(".") for path in self.first]
        self._around = {".".join(part[:end]) for part in parts for end in range(len(part) + 1)}

    def uses(self, path: str) -> bool:
        """Whether the module at `path`, or one in it, is called."""
        return path in self._around

    def unit_of(self, path: str) -> int | None:
        """The unit that uses what the module at `path` holds itself; None: there are several, or nobody knows, as other
        methods of it are called."""
        first = self.first.get(path)
        return first if first == self.last.get(path) else None


def _check_angles(config: Any, name: str) -> None:
    """ModelError for rotary angles that depend on how long a sequence is: modules take the longest of all that go
    through them together."""
    rope = getattr(config, "rope_parameters", None) or {}
    for fields in (rope, *(each for each in rope.values() if isinstance(each, Mapping))):
        kind = str(fields.get("rope_type"))
        if kind == "longrope" or "dynamic" in kind:
            found = f"{name}: rope_type is {kind}, whose angles depend on the length of each sequence"
            raise ModelError(found, "needed a model with a family of its own here, or another rope_type")


def heads_of(call: Call) -> LayerHeads:
    """Those of a call of attention."""
    return LayerHeads(call.q.shape[1], call.k.shape[1], call.q.shape[2], call.joint)


def _sources(calls: Sequence[Call], name: str) -> tuple[int, ...]:
    """Of each layer the one whose cache it reads."""
    for layer, call in enumerate(calls):
        owner = calls[call.layer] if call.layer <= layer else call
        if owner.reads or (call.layer != layer and not call.reads):
            raise ModelError(f"{name}: its layers do not fill caches of their own in order")
        if (owner.window, owner.chunked, heads_of(owner)[1:]) != (call.window, call.chunked, heads_of(call)[1:]):
            raise ModelError(f"{name}: layer {layer} sees other keys than layer {call.layer}, whose they are")
    return tuple(call.layer for call in calls)


def _covering(heads: Sequence[LayerHeads]) -> LayerHeads:
    """Such that no layer's queries, keys or values have more numbers."""
    largest = max(heads, key=lambda each: (each.queries * each.dim, each.keys))
    keys = max(each.keys * each.dim for each in heads)
    enough = (n for n in range(1, largest.queries) if not largest.queries % n and n * largest.dim >= keys)
    return largest._replace(keys=next(enough, largest.queries))


def spec_of(config: Mapping[str, Any], name: str) -> ModuleSpec:
    """The ModuleSpec of a config.json. ModelError where the modules do what is not understood."""
    text = json.dumps(config, sort_keys=True)
    model = build(text, name)
    _check_angles(model.config.get_text_config(decoder=True), name)
    shared = SharedInputs(model)
    timeline = RecordedUnits(model, record(model, name), name)
    groups, tied = weight_groups(model, timeline, name)
    made, read = model.config.get_text_config(decoder=True), ConfigReader(config, name)
    heads = tuple(map(heads_of, timeline.calls))
    largest = _covering(heads)
    sources, windows = _sources(timeline.calls, name), [other.window for other in timeline.calls]
    sizes = {window for window in windows if window is not None}
    if len(sizes) > 1:
        raise ModelError(f"{name}: its layers have windows of {sorted(sizes)} tokens", "needed one size")
    chunked = {other.chunked for other in timeline.calls if other.window is not None} or {False}
    if len(chunked) > 1:
        raise ModelError(f"{name}: some of its layers have windows, and some chunks", "needed either in all")
    experts, activation = experts_of(timeline, name, model)
    matrices = matrices_of(model, timeline)
    tables = [module for path, module in model.named_modules() if timeline.first.get(path) == 0]
    learned = sum(isinstance(module, nn.Embedding) for module in tables) > 1
    head = dict(matrices)["head"][-1]
    layers = tuple(layer for layer, window in enumerate(windows) if window is not None)
    return ModuleSpec(
        name=name,
        vocab_size=head.out_features,
        hidden_size=head.in_features,
        ffn_size=max(each.out_features for kind in ("attn", "mlp") for each in dict(matrices)[kind]),
        num_layers=len(timeline.layers),
        num_heads=largest.queries,
        num_kv_heads=largest.keys,
        head_dim=largest.dim,
        embed_dim=head.in_features,
        max_positions=positions_of(made),
        arch=ArchSpec(
            family=str(config["model_type"]),
            norm="rmsnorm",
            positions="learned" if learned else "rotary",
            window=sizes.pop() if sizes else None,
            window_layers=None if len(layers) == len(windows) or not layers else layers,
            chunked=chunked.pop(),
            gated_mlp=True,
            tied_head=tied,
            activation=activation,
            experts=experts,
        ),
        **read_beside(read, made),
        config=text,
        groups=side_by_side(groups, shared.joined),
        joined=shared.joined,
        matrices=matrices,
        heads=heads,
        sources=sources,
        scales=tuple(each.scale for each in timeline.calls),
        starts=tuple(timeline.starts),
    )


def positions_of(config: Any) -> int:
    """The most positions that a model was trained with."""
    return next((n for key in _LENGTHS if isinstance(n := getattr(config, key, None), int)), _UNBOUNDED)


def read_beside(read: ConfigReader, config: Any) -> dict[str, Any]:
    """The fields of a ModelSpec that no module shows."""
    tokens = read.special_tokens(*(_token(config, each) for each in ("bos_token_id", "eos_token_id", "pad_token_id")))
    return {"dtype": read.dtype("float32"), **tokens}


def _token(config: Any, key: str) -> int | None:
    value = getattr(config, key, None)
    return value[0] if isinstance(value, list) else value


def unit_name(unit: int, layers: int) -> str:
    """The name of a unit by its index, which canonical names begin with."""
    if unit == 0:
        return "embed"
    if unit > 2 * layers:
        return "head"
    return f"layers.{(unit - 1) // 2}.{'attn' if unit % 2 else 'mlp'}"


def weight_groups(
    model: PreTrainedModel, timeline: RecordedUnits, name: str
) -> tuple[tuple[tuple[str, tuple[ModuleTensor, ...]], ...], bool]:
    """The weight groups, and whether the output head is the token embedding."""
    layers = len(timeline.layers)
    found: dict[str, list[ModuleTensor]] = {unit_name(unit, layers): [] for unit in range(2 * layers + 2)}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{name}: {type(model).__name__} has no output head that it tells")
    seen: dict[int, str] = {}
    tied = False
    expert_paths = {path: layer for layer, (path, _) in timeline.routings.items()}
    routers = {routing.module.num_experts for _, routing in timeline.routings.values()}
    # The token embedding first: a head that is tied to it may come before.
    for path, module in sorted(model.named_modules(), key=lambda each: each[1] is not embedding):
        if path in expert_paths:
            _add_experts(found, expert_paths[path], path, module)
            continue
        if not timeline.uses(path):
            continue  # never called: its tensors stay without numbers, and using one is an error
        for key, tensor in _tensors(module):
            parameter = f"{path}.{key}" if path else key
            if id(tensor) in seen:
                if module is head and key == "weight" and seen[id(tensor)] == "embed.tokens":
                    tied = True
                    continue
                if _also(found, seen[id(tensor)], unit_name(timeline.unit_of(path) or 0, layers), parameter):
                    continue
                raise ModelError(f"{name}: {parameter} is tied to {seen[id(tensor)]}, which is not understood")
            if not tensor.dtype.is_floating_point or tensor.dim() > 4:
                raise ModelError(f"{name}: {parameter} is {tensor.dtype} of {tuple(tensor.shape)}: not understood")
            unit = timeline.unit_of(path)
            resident = unit is None
            if resident and tensor.numel() > SMALL:
                raise ModelError(f"{name}: {parameter} is large, and no single unit's")
            unit_key = unit_name(unit or 0, layers)
            canonical = f"{unit_key}.{_within(timeline, unit, parameter)}"
            if module is embedding and key == "weight":
                canonical = "embed.tokens"
            elif module is head and key in ("weight", "bias"):
                canonical = "head.vocab" if key == "weight" else "head.vocab_bias"
            turned = is_product(module) and not isinstance(module, nn.Linear) and key == "weight"
            shape = tuple(reversed(tensor.shape)) if turned else tuple(tensor.shape)
            matrix = is_product(module) and key == "weight" and shape[0] not in routers
            seen[id(tensor)] = canonical
            found[unit_key].append(ModuleTensor(canonical, parameter, shape, matrix, turned, resident))
    if "embed.tokens" not in seen.values() or not (tied or "head.vocab" in seen.values()):
        raise ModelError(f"{name}: {type(model).__name__} keeps its token embedding or head elsewhere")
    if tied:
        vocab = ("vocab", (*found.pop("embed"), *found.pop("head")))
        return (vocab, *((key, tuple(each)) for key, each in found.items())), True
    return tuple((key, tuple(each)) for key, each in found.items()), False


def _also(found: dict[str, list[ModuleTensor]], name: str, unit: str, parameter: str) -> bool:
    """Notes that a tensor has another place in the same unit; False where it is in another."""
    for i, each in enumerate(found[unit]):
        if each.name == name:
            found[unit][i] = each._replace(also=(*each.also, parameter))
            return True
    return False


def experts_of(timeline: RecordedUnits, name: str, model: PreTrainedModel) -> tuple[ExpertSpec | None, Activation]:
    """The experts of the layers, which are to be alike, and their activation."""
    found, settings = dict[int, tuple[ExpertForm, int]](), list[dict[str, Any]]()
    for layer, (_, routing) in timeline.routings.items():
        try:
            found[layer] = (form_of(routing.module), routing.experts.shape[-1])
        except ModelError as error:
            raise ModelError(f"{name}: {error.found}") from None
        settings.append(settings_of(routing.module))
    if not found:
        return None, "relu"
    if len(set(found.values())) > 1 or any(each != settings[0] for each in settings):
        raise ModelError(f"{name}: {type(model).__name__} has layers with experts of different kinds")
    form, active = next(iter(found.values()))
    dense = tuple(layer for layer in range(len(timeline.layers)) if layer not in found)
    spec = ExpertSpec(form.count, active, form.ffn, bias=form.bias, clamp=form.clamp, own=form.own, dense=dense)
    return spec, form.activation


def _add_experts(found: dict[str, list[ModuleTensor]], layer: int, path: str, module: nn.Module) -> None:
    """A group for each expert of a layer, behind that of its half."""
    form = form_of(module)
    others = {key: found.pop(key) for key in list(found)[list(found).index(f"layers.{layer}.mlp") + 1 :]}
    for expert in range(form.count):
        key = f"layers.{layer}.mlp.experts.{expert}"
        found[key] = [
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
    found.update(others)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What a module itself keeps in a checkpoint: parameters, and buffers that are saved."""
    kept = [(key, each) for key, each in module._parameters.items() if each is not None]
    saved = [key for key in module._buffers if key not in module._non_persistent_buffers_set]
    return [*kept, *((key, each) for key in saved if (each := module._buffers[key]) is not None)]


def _within(timeline: RecordedUnits, unit: int | None, parameter: str) -> str:
    """The name of a parameter, without that of its layer where it is of a unit of that."""
    layer = ((unit or 0) - 1) // 2
    if not 0 <= layer < len(timeline.layers):
        return parameter
    return parameter.removeprefix(f"{timeline.layers[layer]}.")


def matrices_of(model: PreTrainedModel, timeline: RecordedUnits) -> tuple[tuple[str, tuple[Product, ...]], ...]:
    """The products of the first layer's halves, and of the outer units; of experts and their routers, too."""
    units = {0: "embed", 1: "attn", 2: "mlp", 2 * len(timeline.layers) + 1: "head"}
    if timeline.routings:
        layer = next(iter(timeline.routings))
        dense = next((each for each in range(len(timeline.layers)) if each not in timeline.routings), None)
        units.pop(2)
        units |= {2 * layer + 2: "router"} | ({} if dense is None else {2 * dense + 2: "mlp"})
    made: dict[str, list[Product]] = {kind: [] for kind in units.values()}
    for path in timeline.first:  # in the order of their calls
        module, kind = model.get_submodule(path), units.get(timeline.first[path])
        if kind is not None and is_product(module):
            first, second = module._parameters["weight"].shape  # type: ignore[union-attr]
            made[kind].append(Product(first, second) if isinstance(module, nn.Linear) else Product(second, first))
    for _, routing in list(timeline.routings.values())[:1]:
        form = form_of(routing.module)
        shapes = [part.shape for part in form.parts if len(part.shape) == 2]
        wide, hidden = sum(outs for outs, _ in shapes[:-1]), shapes[0][1]
        made["router"].append(Product(form.count, hidden))
        made["experts"] = [Product(wide, hidden), Product(*shapes[-1])]
        made.setdefault("mlp", made["experts"])
    return tuple((kind, tuple(products)) for kind, products in made.items())
