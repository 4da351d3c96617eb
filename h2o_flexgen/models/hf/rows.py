"""Models whose sequences cannot be packed: each goes through the modules alone, with the caches that they make.

That is right for whatever transformers itself can run: attention of a module's own, positions and masks that follow
from a cache, caches of a kind of their own. Weights come unit by unit as for any other; budgets there are none.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from h2o_flexgen.config.model.modules import LayerSpec, ModuleSpec
from h2o_flexgen.config.model.tensors import LayerHeads
from h2o_flexgen.errors import ModelError, first_line
from h2o_flexgen.models.hf import record
from h2o_flexgen.models.hf.attention import Call, ModelRun, NotUnderstood
from h2o_flexgen.models.hf.build import build, quiet
from h2o_flexgen.models.hf.experts import Routing
from h2o_flexgen.models.hf.record import any_choice
from h2o_flexgen.models.hf.states import MixerCall
from h2o_flexgen.models.hf.units import Event, RecordedLayer, RecordedUnits

CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")
"""The names of caches, as arguments of a model and in its output."""


def row_arguments(model: nn.Module, ids: Tensor, cache: Any, seen: int, mask: bool = True) -> dict[str, Any]:
    """Of `model`'s forward, for the tokens `ids` (T,) of one sequence, which follow `seen` ones that `cache` has."""
    takes, count = inspect.signature(model.forward).parameters, ids.shape[0]
    given: dict[str, Any] = {"input_ids": ids[None], "use_cache": True, "return_dict": True}
    if cache is not None:
        given[next(name for name in CACHES if name in takes)] = cache
    if "position_ids" in takes:  # caches may count only what their first layer keeps, which may be nothing
        given["position_ids"] = torch.arange(seen, seen + count, device=ids.device)[None]
    if mask and "attention_mask" in takes:
        config = getattr(model, "config", None)
        attends = config is None or getattr(config.get_text_config(decoder=True), "num_attention_heads", None)
        length = seen + count if attends else count  # where nothing attends, a mask is of the new tokens
        given["attention_mask"] = torch.ones(1, length, dtype=torch.int64, device=ids.device)
    if "logits_to_keep" in takes:
        given["logits_to_keep"] = 1
    return given


def cache_of(made: Any) -> Any:
    """The cache in what a model gives back; None where it keeps none, and wants all tokens again in the next step."""
    return next((found for name in CACHES if (found := getattr(made, name, None)) is not None), None)


def spec_of_rows(config: Mapping[str, Any], name: str, why: str) -> ModuleSpec:
    """The ModuleSpec of a config.json whose sequences go through the modules one by one, and why they do. ModelError
    for what is not understood even so."""
    text = json.dumps(config, sort_keys=True)
    model, events, few = _recorded(text, name, record.TOKENS)
    more = _recorded(text, name, 2 * record.TOKENS)[2]
    timeline = RecordedRows(model, events, name)
    made, count = model.config.get_text_config(decoder=True), len(timeline.layers)
    if getattr(made, "sliding_window", None) == 0:  # without data that does not show
        raise NotUnderstood(f"{name} has a window of 0 tokens")
    heads = _heads(made, -(-max(0, more - few) // (record.TOKENS * count)))
    layers = tuple(LayerSpec(i, heads, 1.0, (), i) for i in range(count))
    spec = record.plain_spec(config, name, model, timeline, layers, heads)
    return replace(spec, alone=why)


def _heads(config: Any, numbers: int) -> LayerHeads:
    """Query heads, KV heads and their size, which have so many numbers for each token and layer."""
    heads = getattr(config, "num_attention_heads", 0) or 1
    size = max(1, -(-numbers // 2))
    return LayerHeads(heads, heads, size // heads) if not size % heads else LayerHeads(heads, 1, size)


def _recorded(text: str, name: str, tokens: int) -> tuple[PreTrainedModel, list[Event], int]:
    """The modules on meta, their calls in a forward of so many tokens, and the numbers in the caches that it leaves."""
    errors = list[Exception]()
    for mask in (False, True):  # some look at the numbers of a mask, which are not there; some need one
        model = build(text, name, alone=True)
        events = record.listen(model)
        paths = {id(module): path for path, module in model.named_modules()}
        given = row_arguments(model, torch.zeros(tokens, dtype=torch.int64, device="meta"), None, 0, mask)
        route = partial(_route, events, paths)
        run = ModelRun(partial(_call, model, given), _refuse, route, _refuse, given["input_ids"][0])
        try:
            with torch.inference_mode(), quiet():
                made = run.switch()
            return model, events, _numbers(cache_of(made), set())
        except ModelError:
            raise
        except Exception as error:
            errors.append(error)
    said = f"{type(errors[0]).__name__}: {first_line(errors[0])}"
    raise ModelError(f"{name}: {type(model).__name__} cannot be run without data: {said}") from errors[0]


def _call(model: nn.Module, given: dict[str, Any]) -> Any:
    with any_choice():
        return model(**given)


def _refuse(call: Call | MixerCall) -> Any:
    raise NotUnderstood(f"{type(call).__name__}: our attention or cache is asked, which was not given")


def _route(events: list[Event], paths: Mapping[int, str], routing: Routing) -> Tensor:
    events.append(Event("experts", paths[id(routing.module)], routing=routing))
    return torch.empty_like(routing.x)


def _numbers(held: Any, seen: set[int]) -> int:
    """In all tensors that something holds, each once."""
    if id(held) in seen or isinstance(held, nn.Module):
        return 0
    seen.add(id(held))
    if torch.is_tensor(held):
        return held.numel()
    inner = held.values() if isinstance(held, Mapping) else held if isinstance(held, list | tuple) else ()
    return sum(_numbers(each, seen) for each in (*inner, *getattr(held, "__dict__", {}).values()))


class RecordedRows(RecordedUnits):
    """The units of a run by rows. Layers are what lists hold, each cut in two where its weights are most even."""

    def __init__(self, model: PreTrainedModel, events: list[Event], name: str) -> None:
        super().__init__(model, events, name)
        within = tuple(f"{layer.path}." for layer in self.layers)
        for path, module in model.named_modules():  # what is not called itself, its parent may take tensors of
            parent = path.rpartition(".")[0]
            if path.startswith(within) and path not in self.first and parent in self.first and module._parameters:
                self.first[path], self._units[path] = self.first[parent], self._units[parent]
                self._around.add(path)

    def _find_layers(self) -> None:
        self._expert_paths = {each.path for each in self._events if each.routing is not None}
        lists = {path for path, module in self._model.named_modules() if isinstance(module, nn.ModuleList)}
        spans, stack = dict[str, tuple[int, int]](), list[tuple[str, int]]()
        for i, event in enumerate(self._events):
            if event.kind == "enter":
                stack.append((event.path, i))
            elif event.kind == "exit":
                path, start = stack.pop()
                if path.rpartition(".")[0] in lists and not any(each.rpartition(".")[0] in lists for each, _ in stack):
                    if path in spans:
                        raise self._refused(f"{path} is called more than once")
                    spans[path] = start, i
        paths = [path for path in spans if path in self._inner]
        self.layers = [RecordedLayer(path, spans[path][0], self._cut(*spans[path])) for path in paths]
        if not self.layers:
            raise self._refused("it has no list of layers")

    def _cut(self, start: int, stop: int) -> int:
        """The event of a layer's, from `start` to `stop`, behind which its second half begins."""
        events = self._events[start:stop]
        routed = [i for i, each in enumerate(events) if each.routing is not None]
        counts, own = Counter(each.path for each in self._events if each.kind == "enter"), dict[int, int]()
        open_at, within = list[tuple[str, int]](), list[tuple[int, bool]]()  # the places where it may be cut
        for i, each in enumerate(events):
            if each.kind == "enter":
                alone = not any(own[at] for _, at in open_at)  # a tensor of one unit is in no other
                if i and each.path in self._inner and counts[each.path] == 1:
                    within.append((i, alone and not (routed and i > routed[0])))
                own[i] = 0 if each.path in self._expert_paths else self._own(each.path)
                open_at.append((each.path, i))
            elif each.kind == "exit":
                open_at.pop()
        whole = sum(own.values())
        cuts = [i for i, fits in within[1:] if fits] or [i for i, _ in within[1:] if not routed or i <= routed[0]]
        places = {i: abs(whole - 2 * sum(size for at, size in own.items() if at < i)) for i in cuts}
        if not places:
            raise self._refused(f"{self._events[start].path} cannot be cut in two")
        return start + min(places, key=lambda i: (places[i], i)) - 1

    def _own(self, path: str) -> int:
        return sum(each.numel() for each in self._model.get_submodule(path)._parameters.values() if each is not None)
