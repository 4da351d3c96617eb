"""The ModelSpec of a model of transformers, from a run of its modules on meta: without data, weights or arithmetic."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config
from transformers import PreTrainedModel

from h2o_flexgen.config.model.arch import Activation, ArchSpec, ExpertSpec
from h2o_flexgen.config.model.modules import LayerSpec, Matrices, ModuleSpec
from h2o_flexgen.config.model.spec import Product
from h2o_flexgen.config.model.tensors import LayerHeads, StateSpec
from h2o_flexgen.errors import ModelError, first_line
from h2o_flexgen.kernels.native import library
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.hf.attention import Call, ModelRun, NotUnderstood
from h2o_flexgen.models.hf.build import Alive, Marked, activations, apart, build, is_product, quiet
from h2o_flexgen.models.hf.experts import ExpertForm, Routing, form_of, settings_of, take_indexers
from h2o_flexgen.models.hf.fused import SharedInputs, side_by_side
from h2o_flexgen.models.hf.mixers import take_recurrences
from h2o_flexgen.models.hf.states import MixerCall, take_mixers
from h2o_flexgen.models.hf.units import Event, Mixing, RecordedUnits, weight_groups

TOKENS = 4
"""Of the recorded run."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx")
_WIDE = 512
"""Further tokens of a second call of a mixer, which shows what its memory grows by: whole chunks of torch."""
_UNBOUNDED = 1 << 20
_INNER = ("attn", "mixer", "mlp")


def record(model: PreTrainedModel, name: str, ours: bool = False) -> Marked:
    """The events of a forward of TOKENS tokens. Leaves the model on meta. ModelError where that cannot be run."""
    events, seen = listen(model), set[type[nn.Module]]()

    def attend(call: Call) -> Tensor:
        if call.window is not None and call.window < 1:
            raise NotUnderstood(f"layer {call.layer} has a window of {call.window} tokens")
        events.append(Event("attend", call=apart(call._replace(choice=None))))
        return torch.empty(call.q.shape, device="meta", dtype=call.q.dtype)

    def route(routing: Routing) -> Tensor:
        events.append(Event("experts", paths[id(routing.module)], routing=apart(routing)))
        return torch.empty_like(routing.x)

    def mix(call: MixerCall) -> Any:
        with events.inside(call.tokens):
            made, mixing = _mixed(call)
        if type(call.module) not in seen:
            seen.add(type(call.module))
            with events.inside(TOKENS + _WIDE, listed=False):
                _mixed(call.wide(TOKENS + _WIDE))
        events.append(Event("states", paths[id(call.module)], mixing=mixing))
        return made

    if ours:  # else recurrences are transformers' own
        take_recurrences(model, events.alive.recurrence)
    take_mixers(model)
    take_indexers(model)
    paths = {id(module): path for path, module in model.named_modules()}
    numbers = torch.zeros(2, TOKENS, dtype=torch.int64, device="meta")
    last = torch.zeros(1, dtype=torch.int64, device="meta")
    given = (numbers[0], numbers[1], last)

    def forward() -> None:
        with any_choice():
            model(**arguments(model, run, *given))

    run = ModelRun(forward, attend, route, mix, numbers[1])
    try:
        with torch.no_grad(), quiet(), events.alive:  # in inference mode nothing tells whether tensors have changed
            run.switch()
            run.cache.end()
    except ModelError as error:
        raise ModelError(f"{name}: {error.found}", error.needed, error.change) from None
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise ModelError(f"{name}: {type(model).__name__} cannot be run on packed prompts: {said}") from error
    return events


def _mixed(call: MixerCall) -> tuple[Any, Mixing]:
    """The output of a mixer for all tokens of a prompt, and the states that it keeps."""
    piece = call.piece(0, call.tokens, {})
    made, states = call.of([piece]), piece.states
    if states.layer is None:
        raise NotUnderstood(f"{type(call.module).__name__} does not ask for the states that it keeps")
    found = (StateSpec(*key, tuple(x.shape[1:]), x.dtype == torch.float32) for key, x in states.held().items())
    return made, Mixing(states.layer, tuple(found))


def any_choice() -> Any:
    """Within, numbers that are not there count as not zero. Each greenlet has its own."""
    return _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


def listen(model: PreTrainedModel) -> Marked:
    """Puts a model on meta, and lists the calls of its modules from now on."""
    events = Marked(Alive())
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: events.append(Event("enter", path)))
        module.register_forward_hook(lambda *_, path=path: events.append(Event("exit", path)))
    nn.Module.to(model, "meta")
    return events


def arguments(model: nn.Module, run: ModelRun, ids: Tensor, positions: Tensor, last: Tensor) -> dict[str, Any]:
    """Of `model`'s forward, for packed tokens (T,) at `positions` (T,), of which `last` (n,) want logits."""
    takes = inspect.signature(model.forward).parameters
    cache = next((name for name in ("cache", "past_key_values", "cache_params") if name in takes), None)
    if cache is None:
        raise ModelError(f"{type(model).__name__} takes no cache")
    given: dict[str, Any] = {"input_ids": ids[None], cache: run.cache, "use_cache": True, "return_dict": True}
    if _takes_positions(model):
        given["position_ids"] = positions[None]
    if "logits_to_keep" in takes:
        given["logits_to_keep"] = last
    return given


def heads_of(call: Call) -> LayerHeads:
    return LayerHeads(call.q.shape[1], call.k.shape[1], call.q.shape[2], call.joint)


def _layers_of(timeline: RecordedUnits, heads: LayerHeads, name: str) -> tuple[LayerSpec, ...]:
    """The attention and states of each layer, and whose keys it reads. `heads`: of layers that do not attend."""
    found, owners = list[LayerSpec](), dict[int, int]()
    for number, layer in enumerate(timeline.layers):
        call, source = layer.call, number
        if call is not None and call.reads:
            source = owners.get(layer.number, number)
            owner = timeline.layers[source].call
            seen = None if owner is None or source == number else (owner.window, owner.chunked, heads_of(owner)[1:])
            if seen != (call.window, call.chunked, heads_of(call)[1:]):
                raise ModelError(f"{name}: layer {number} sees other keys than layer {layer.number}, whose they are")
        elif layer.number in owners:
            raise ModelError(f"{name}: two of its layers fill cache {layer.number}")
        else:
            owners[layer.number] = number
        states = () if layer.mixing is None else layer.mixing.states
        own, scale = (heads, None) if call is None else (heads_of(call), call.scale)
        found.append(LayerSpec(layer.number, own, scale, states, source))
    return tuple(found)


def _covering(heads: Sequence[LayerHeads]) -> LayerHeads:
    """Such that no layer's queries, keys or values have more numbers; the smallest where no layer attends."""
    if not heads:
        return LayerHeads(1, 1, 2)
    largest = max(heads, key=lambda each: (each.queries * each.dim, each.keys))
    keys = max(each.keys * each.dim for each in heads)
    enough = (n for n in range(1, largest.queries) if not largest.queries % n and n * largest.dim >= keys)
    return largest._replace(keys=next(enough, largest.queries))


def spec_of(config: Mapping[str, Any], name: str) -> ModuleSpec:
    """The ModuleSpec of a config.json. ModelError where the modules do what is not understood."""
    return _recorded(json.dumps(config, sort_keys=True), name, library() is not None)


@lru_cache(maxsize=1)  # one engine after another asks for the same model's
def _recorded(text: str, name: str, ours: bool) -> ModuleSpec:
    """`ours`: recurrences are our kernels'."""
    # In 16 bits it is seen which states and other numbers stay in 32.
    model, config = build(text, name, torch.bfloat16), json.loads(text)
    shared = SharedInputs(model)
    events = record(model, name, ours)
    timeline = RecordedUnits(model, events, name)
    calls, heads = timeline.calls, _covering([heads_of(call) for call in timeline.calls])
    by_distance = bool(calls) and all(call.by_distance for call in calls)
    if calls and not by_distance and not _takes_positions(model):
        raise ModelError(f"{type(model).__name__} takes no positions")
    if len({call.chunked for call in calls if call.window is not None}) > 1:
        raise ModelError(f"{name}: some of its layers have windows, and some chunks", "needed either in all")
    layers = _layers_of(timeline, heads, name)
    windows = [None if layer.call is None else layer.call.window for layer in timeline.layers]
    tables = [module for path, module in model.named_modules() if timeline.first.get(path) == 0]
    learned = sum(isinstance(module, nn.Embedding) for module in tables) > 1
    windowed = tuple(layer for layer, window in enumerate(windows) if window is not None)
    spec = plain_spec(config, name, model, timeline, layers, heads)
    arch = replace(
        spec.arch,
        positions="biases" if by_distance else "learned" if learned else "rotary",
        window=max((window for window in windows if window is not None), default=None),
        window_layers=None if len(windowed) == len(windows) or not windowed else windowed,
        own_windows=tuple(windows) if len({*windows} - {None}) > 1 else (),
        chunked=any(each.chunked for each in calls),
        sinks=any(each.sinks is not None for each in calls),
        attention_cap=next((each.soft_cap for each in calls if each.soft_cap), None),
    )
    return replace(
        spec,
        arch=arch,
        groups=side_by_side(spec.groups, shared.joined),
        joined=shared.joined,
        activations=activations(events, timeline.begins, TOKENS),
    )


def plain_spec(
    config: Mapping[str, Any],
    name: str,
    model: PreTrainedModel,
    timeline: RecordedUnits,
    layers: tuple[LayerSpec, ...],
    heads: LayerHeads,
) -> ModuleSpec:
    """The fields of a ModuleSpec that modules show for packed sequences and row by row alike."""
    groups, tied = weight_groups(model, timeline, name)
    experts, activation = experts_of(timeline, name, model)
    matrices = matrices_of(model, timeline)
    head = dict(matrices)["head"][-1][0]
    made = model.config.get_text_config(decoder=True)
    inner = [each.out_features for kind, products in matrices if kind in _INNER for each, _ in products]
    return ModuleSpec(
        name=name,
        vocab_size=head.out_features,
        hidden_size=head.in_features,
        ffn_size=max(inner, default=1),
        num_layers=len(layers),
        num_heads=heads.queries,
        num_kv_heads=heads.keys,
        head_dim=heads.dim,
        embed_dim=head.in_features,
        max_positions=context(made),
        arch=ArchSpec(
            family=str(config["model_type"]),
            norm="rmsnorm",
            positions="rotary",
            gated_mlp=True,
            tied_head=tied,
            whole_ends=True,
            activation=activation,
            experts=experts,
        ),
        **_beside(ConfigReader(config, name), made),
        config=json.dumps(config, sort_keys=True),
        groups=groups,
        layers=layers,
        halves=tuple(timeline.halves),
        matrices=matrices,
        starts=tuple(timeline.starts),
    )


def context(config: Any) -> int:
    """The longest sequence, with YaRN the stretched one; where angles change with the length, the longest before they
    do."""
    found = [n for key in _LENGTHS if isinstance(n := getattr(config, key, None), int)][:1]
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))):
        if each.get("rope_type") == "longrope":
            found.append(int(each["original_max_position_embeddings"]))
        if each.get("rope_type") == "yarn" and found:  # its configs have the context before stretching, or after
            original = each.get("original_max_position_embeddings") or found[0]
            found[0] = max(found[0], int(original * (each.get("factor") or 1)))
    return min(found, default=_UNBOUNDED)


def _takes_positions(model: nn.Module) -> bool:
    takes = inspect.signature(model.forward).parameters
    return "position_ids" in takes or any(each.kind is each.VAR_KEYWORD for each in takes.values())


def _beside(read: ConfigReader, config: Any) -> dict[str, Any]:
    """The fields of a ModelSpec that no module shows."""
    tokens = read.special_tokens(*(_token(config, each) for each in ("bos_token_id", "eos_token_id", "pad_token_id")))
    # Configs of several parts name the dtype of each.
    return {"dtype": read.dtype(read.section("text_config").dtype("float32")), **tokens}


def _token(config: Any, key: str) -> int | None:
    value = getattr(config, key, None)
    return value[0] if isinstance(value, list) else value


def experts_of(timeline: RecordedUnits, name: str, model: PreTrainedModel) -> tuple[ExpertSpec | None, Activation]:
    """The experts of the layers, which are to be alike, and their activation."""
    found, settings = dict[int, tuple[ExpertForm, int]](), list[dict[str, Any]]()
    for unit, (_, routing) in timeline.routings.items():
        layer = timeline.halves[unit - 1].layer
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
    if active < 1:
        raise ModelError(f"{name}: {type(model).__name__} has experts, of which tokens choose none", "needed some")
    dense = tuple(layer for layer in range(len(timeline.layers)) if layer not in found)
    spec = ExpertSpec(form.count, active, form.ffn, bias=form.bias, clamp=form.clamp, own=form.own, dense=dense)
    return spec, form.activation


def matrices_of(model: PreTrainedModel, timeline: RecordedUnits) -> Matrices:
    """The products of the units of each kind, and how many of each a unit has in the mean; of experts, too."""
    kinds = ["embed", *(half.products for half in timeline.halves), "head"]
    made: dict[str, Counter[Product]] = {kind: Counter() for kind in kinds}
    for path in timeline.first:  # in the order of their calls
        module = model.get_submodule(path)
        scaled = module is model.get_output_embeddings() and isinstance(module, nn.Linear)  # of a kind of its own
        if is_product(module) or scaled:
            sizes = module._parameters["weight"].shape  # type: ignore[union-attr]
            product = Product(*(sizes if isinstance(module, nn.Linear) else reversed(sizes)))
            for unit in timeline.units_of(path):
                made[kinds[unit]][product] += 1
    for _, routing in list(timeline.routings.values())[:1]:
        form = form_of(routing.module)
        shapes = [part.shape for part in form.parts if len(part.shape) == 2]
        wide, hidden = sum(outs for outs, _ in shapes[:-1]), shapes[0][1]
        made["router"][Product(form.count, hidden)] += kinds.count("router")
        made["experts"] = Counter((Product(wide, hidden), Product(*shapes[-1])))
    units = Counter([*kinds, "experts"])
    return tuple(
        (kind, tuple((product, count / units[kind]) for product, count in products.items()))
        for kind, products in made.items()
    )
