"""Runs transformers' modules unit by unit: forwards stop where a unit begins, on weights that are there meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from greenlet import GreenletExit, getcurrent
from torch import Tensor, nn
from transformers.core_model_loading import build_glob_alternation

from h2o_flexgen.config.model.modules import ModuleSpec, ModuleTensor
from h2o_flexgen.errors import ModelError
from h2o_flexgen.kernels.experts import Gate
from h2o_flexgen.kernels.native.tiers import torch_widens
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.models.decoder import Decoder, as_one, local_name
from h2o_flexgen.models.hf.attention import Call, ModelRun
from h2o_flexgen.models.hf.build import Absent, Matrix, Packed, build, is_product, take_products
from h2o_flexgen.models.hf.experts import Routing, feed_forward, take_indexers
from h2o_flexgen.models.hf.fused import Joint, take_gates, take_norms, take_rotations
from h2o_flexgen.models.hf.mixers import take_gated_norms, take_recurrences
from h2o_flexgen.models.hf.record import arguments, heads_of
from h2o_flexgen.models.hf.rows import cache_of, row_arguments
from h2o_flexgen.models.hf.states import MixerCall, take_mixers

Places = list[tuple[dict[str, Any], str, tuple[str, ...], bool, bool]]
"""Of a unit's tensors: the dictionary of a module and the key in it, the bound name, or those of the pieces that it is
made of, whether a copy is put there, and whether the module multiplies by functions of torch that are slow here."""


class Forward:
    """One forward of packed tokens, unit by unit. `hidden` is what the unit that it has come to begins with."""

    def __init__(self, model: nn.Module, spec: ModuleSpec, ids: Tensor, positions: Tensor, last: Tensor) -> None:
        self._spec, self._unit = spec, 0
        self._attend: Callable[[Call], Tensor] | None = None
        self._mix: Callable[[MixerCall], Any] | None = None
        self._given = (model, ids, positions, last)
        self._run = ModelRun(self._compute, self._answer, self._route, self._keep, positions)
        self._made: Tensor | None = None  # what experts have answered, which the forward is still to be given
        self._routed = False
        self.routed = 0
        """Tokens that were last given to experts."""
        self.hidden: Tensor | None = None

    def _compute(self) -> Tensor:
        model, ids, positions, last = self._given
        given = arguments(model, self._run, ids, positions, last)
        logits: Tensor = model(**given).logits[0]
        return logits if "logits_to_keep" in given else logits[last]

    def _answer(self, call: Call) -> Tensor:
        """Attention, as it was when the modules were recorded."""
        spec, layer = self._spec, self._spec.units[self._unit].layer
        if layer is None or self._attend is None or not _alike(call, spec, layer):
            raise ModelError(f"{spec.name} attends in unit {self._unit} as it did not when it was looked at")
        attend, self._attend = self._attend, None
        return attend(call)

    def _keep(self, call: MixerCall) -> Any:
        """The output of a module that keeps states. ModelError where the unit was recorded without states."""
        if self._mix is None:
            raise ModelError(f"{self._spec.name} keeps states in unit {self._unit} as it did not when it was looked at")
        mix, self._mix = self._mix, None
        return mix(call)

    def _route(self, routing: Routing) -> Tensor:
        """Experts: the forward waits for what they make."""
        parent = self._run.parent
        made: Tensor = routing.x if parent is None else parent.switch(routing)
        return made

    def give(self, made: Tensor) -> None:
        """Gives the forward the experts' output (T, H) for the tokens that it waits with."""
        self._made = made

    def step(
        self,
        unit: int,
        attend: Callable[[Call], Tensor] | None = None,
        mix: Callable[[MixerCall], Any] | None = None,
    ) -> Tensor | Routing | None:
        """Computes `unit`, the one that the forward has come to; returns the logits (n, vocab) float32 of the last.
        A half with experts stops at their Routing, and returns that. `attend`, `mix`: answer the unit's one call."""
        if self._routed:
            self._routed = False
            came, self.hidden = self._run.switch(self._made)
            self._unit, self._made = came, None
        if unit != self._unit:
            raise RuntimeError(f"unit {unit} is to be computed, and the forward has come to {self._unit}")
        self._attend, self._mix = attend, mix
        found = self._run.switch()
        if isinstance(found, Routing):
            self._routed, self.routed = True, len(found.x)
            return found
        if self._attend is not None or self._mix is not None:
            raise ModelError(f"{self._spec.name} did not attend or keep states in unit {unit}")
        if self._run.dead:
            if unit != len(self._spec.starts):
                raise ModelError(f"{self._spec.name} ended in unit {unit}")
            return found.float()
        came, self.hidden = found
        if came != unit + 1:
            raise ModelError(f"{self._spec.name} came to unit {came} after unit {unit}")
        self._unit = came
        return None

    def close(self) -> None:
        """Ends a forward that is not wanted any further."""
        if not self._run.dead and self._run:
            self._run.throw(GreenletExit)


def _alike(call: Call, spec: ModuleSpec, layer: int) -> bool:
    """Whether a call of attention is that which was recorded of a layer."""
    own = spec.layers[layer]
    recorded = own.number, own.heads, own.scale, spec.windows[layer]
    same = (call.layer, heads_of(call), call.scale, call.window) == recorded
    return same and (call.window is None or call.chunked == spec.arch.chunked)


class RowForward(Forward):
    """One forward of a sequence by itself: of `ids` (T,), which follow `seen` tokens that `cache` knows. `cache` is
    afterwards what the modules have made of it; None: they keep nothing."""

    def __init__(self, model: nn.Module, spec: ModuleSpec, ids: Tensor, cache: Any, seen: int) -> None:
        super().__init__(model, spec, ids, ids, ids)
        self.cache, self._seen = cache, seen

    def _compute(self) -> Tensor:
        model, ids, _, _ = self._given
        made = model(**row_arguments(model, ids, self.cache, self._seen))
        self.cache = cache_of(made)
        logits: Tensor = made.logits[0, -1:]
        return logits


class ModuleDecoder(Decoder):
    """The modules of one model. Holds no weights: `bound` lends them those of a unit.

    Units are computed by the forwards that `start` makes; the methods of other models are not for this one.
    """

    def __init__(self, spec: ModuleSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec)
        self._modules_of: ModuleSpec = spec
        self._device = device
        model = build(spec.config, spec.name, dtype, alone=bool(spec.alone))
        if not spec.alone:
            take_recurrences(model)
            take_gated_norms(model)
            if dtype is torch.bfloat16 and device.type == "cpu":
                take_rotations(model)
        modules = dict(model.named_modules())
        for path in dict.fromkeys(spec.starts):
            numbers = frozenset(i for i, start in enumerate(spec.starts, 1) if start == path)
            modules[path].register_forward_pre_hook(_stop(numbers), with_kwargs=True)
        take_products(model, model.get_output_embeddings())
        if not spec.alone:
            take_mixers(model)
            take_indexers(model)
        self._joints = [list[Joint]() for _ in spec.units]
        self._places: list[Places] = [[] for _ in spec.units]
        self._fuse(model, modules, dtype if device.type == "cpu" else None)
        plan = model._get_dtype_plan(dtype)
        self._exact = build_glob_alternation(list(plan))[0] if plan else None
        self.exact: dict[str, list[tuple[dict[str, Any], str, bool]]] = {}
        """By canonical name where the tensors go that transformers keeps in float32 whatever the dtype, and whether as
        further rows of the one before: see `keep`."""
        groups = dict(spec.groups)
        for unit in spec.units:
            for each in groups[unit.weights]:  # not those of experts, which are computed elsewhere
                if each.name.startswith(f"{unit.name}."):
                    for parameter in (each.parameter, *each.also):
                        self._place(modules, unit.index, each, parameter)
        if spec.arch.tied_head:
            head = next(path for path, each in modules.items() if each is model.get_output_embeddings())
            self._place(modules, len(spec.units) - 1, spec.tensors["embed.tokens"], f"{head}.weight")
        for path, module in modules.items():
            for key, each in module._parameters.items():
                if torch.is_tensor(each):  # of what was not called
                    module._parameters[key] = Absent(f"{path}.{key}", device)
            for key, buffer in module._buffers.items():
                if torch.is_tensor(buffer):
                    module._buffers[key] = buffer.to(device)
        self._bounds = [_Bound(i, *each) for i, each in enumerate(zip(self._places, self._joints, strict=True))]
        self._model = model
        part = next((each.parameter for each in spec.tensors.values() if each.expert is not None), "")
        self._experts_module = modules.get(part.rpartition(".")[0])
        self._own_experts = spec.arch.experts is not None and spec.arch.experts.own
        if self._own_experts:
            self._gate = Gate("own")  # which no kernel knows

    def _expert(self, w: Mapping[str, Any], x: Tensor) -> Tensor:
        return feed_forward(self._experts_module, w, x) if self._own_experts else super()._expert(w, x)

    def _fuse(self, model: nn.Module, modules: Mapping[str, nn.Module], dtype: torch.dtype | None) -> None:
        """`dtype`: of the tensors to be normed, on a CPU."""
        spec, groups = self._modules_of, dict(self._modules_of.groups)
        for unit in spec.units:
            own = [each for each in groups[unit.weights] if each.product and each.name.startswith(f"{unit.name}.")]
            within = {each.parameter.rpartition(".")[0] for each in own}
            for paths in spec.joined:
                together = [modules[path] for path in paths if path in within]
                if len(together) > 1 and unit.kind != "head":
                    self._joints[unit.index].append(Joint(together))
        take_gates(model, chain(*self._joints), spec.starts)
        if dtype is torch.bfloat16:
            take_norms(model)

    def _place(self, modules: Mapping[str, nn.Module], unit: int, tensor: ModuleTensor, parameter: str) -> None:
        path, _, key = parameter.rpartition(".")
        module = modules[path]
        where: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
        where[key] = Absent(parameter, self._device)
        if self._exact is not None and self._exact.search(parameter):
            self.exact.setdefault(tensor.name, []).append((where, key, bool(tensor.piece and tensor.start)))
            return
        names: tuple[str, ...] = (local_name(tensor.name),)
        if tensor.start and tensor.piece:  # those before it have come
            names = (*self._places[unit].pop()[2], *names)
        slow = torch_widens() and not is_product(module)
        self._places[unit].append((where, key, names, tensor.resident, slow))

    def keep(self, name: str, tensor: Tensor) -> None:
        """One of the tensors in `exact`, float32, for good."""
        for where, key, follows in self.exact[name]:
            where[key] = torch.cat([where[key], tensor]) if follows else tensor

    def scale_of(self, layer: int) -> float:
        """The factor of the logits of a layer's attention."""
        return self._modules_of.layers[layer].scale or 1.0

    def rotary_of(self, layer: int) -> None:
        """Keys and queries come rotated."""

    def bound(self, unit: int, weights: Mapping[str, Any]) -> _Bound:
        """Within, the modules of a unit have their weights."""
        bound = self._bounds[unit]
        bound.weights = cast(dict[str, Any], weights)
        return bound

    def start(self, ids: Tensor, positions: Tensor, last: Tensor) -> Forward:
        """A forward of packed tokens (T,) at `positions` (T,), of which `last` (n,) want logits: at its first unit."""
        return Forward(self._model, self._modules_of, ids, positions, last)

    def start_alone(self, ids: Tensor, cache: Any, seen: int) -> RowForward:
        return RowForward(self._model, self._modules_of, ids, cache, seen)


class _Bound:
    """The modules of a unit with its weights, which are put in their places on entry. The tensors of places, unless
    copied, and the joined matrices are found once for each time that weights come, and kept with them."""

    def __init__(self, unit: int, places: Places, joints: list[Joint]) -> None:
        self._key, self._joints = f"given in unit {unit}", joints
        self._own = [(where, key, where[key]) for where, key, _, copied, _ in places if not copied]
        self._copied = [(where, key, names) for where, key, names, copied, _ in places if copied]
        self._names = [(names, slow) for _, _, names, copied, slow in places if not copied]
        self.weights: dict[str, Any] = {}

    def __enter__(self) -> None:
        weights, joints = self.weights, self._joints
        found = weights.get(self._key)
        if found is None:
            given = [_given(weights, *each) for each in self._names]
            self._place(given)
            found = weights[self._key] = given, [joint.look() for joint in joints]
        else:
            self._place(found[0])
        for where, key, names in self._copied:
            where[key] = _given(weights, names).clone()
        for joint, joined in zip(joints, found[1], strict=True):
            joint.joined = joined

    def _place(self, given: Sequence[Any]) -> None:
        for (where, key, _), each in zip(self._own, given, strict=True):
            where[key] = each

    def __exit__(self, *_: object) -> None:
        for joint in self._joints:
            joint.joined = None
        for where, key, absent in self._own:
            where[key] = absent


def _given(weights: Mapping[str, Any], names: tuple[str, ...], slow: bool = False) -> Any:
    weight = weights[names[0]] if len(names) == 1 else _whole(weights, names)
    if isinstance(weight, PackedWeight):
        return Packed(weight)
    slow = slow and weight.is_cpu and weight.dim() == 2 and weight.dtype is torch.bfloat16
    return weight.as_subclass(Matrix) if slow else weight


def _whole(weights: Mapping[str, Any], names: tuple[str, ...]) -> Tensor:
    """Pieces of one tensor as that: without a copy where they adjoin, once for each time that the weights come."""
    key = f"{names[0]} and others"
    if key not in weights:
        parts = [weights[name] for name in names]
        joined = as_one(parts)
        cast(dict[str, Any], weights)[key] = torch.cat(parts) if joined is None else joined
    found: Tensor = weights[key]
    return found


def _stop(units: frozenset[int]) -> Callable[..., None]:
    """A hook that stops a forward at a call that begins one of these units, if that is the next."""

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        run = getcurrent()
        if isinstance(run, ModelRun) and run.unit + 1 in units and run.parent is not None:
            run.unit += 1
            hidden = next((each for each in (*args, *kwargs.values()) if torch.is_tensor(each)), None)
            run.parent.switch((run.unit, hidden))

    return stop
