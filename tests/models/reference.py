"""What goes into and comes out of transformers' own modules, caught while a tiny model runs."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from h2o_flexgen.kernels.experts import Choices
from h2o_flexgen.models.decoder import Decoder, bind
from h2o_flexgen.models.families import checkpoint_names, spec_from_config
from h2o_flexgen.models.stored import Stored
from tests.seeds import torch_generator
from tests.tiny import VOCAB, make_model

TOKENS = 23
"""Longer than the windows of tests.tiny, and than the context of its row for long sequences."""


class Reference:
    """A tiny model, one prompt, and every module's first input and its output while it ran: (TOKENS, width)."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
        """changes: of the row's settings. ModelError where our reading refuses them."""
        self.model: PreTrainedModel = make_model(name, **changes).to(dtype)
        self.tokens = torch.randint(3, VOCAB, (TOKENS,), generator=torch_generator(1))
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for path, module in self.model.named_modules():
            module.register_forward_hook(partial(self._keep, path), with_kwargs=True)
        with torch.no_grad():
            self.logits = self.model(self.tokens.unsqueeze(0), use_cache=False).logits[0]
        self.spec = spec_from_config(self.model.config.to_dict(), name)
        self.state = self.model.state_dict()
        self.names = checkpoint_names(self.spec)

    def _keep(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        first = args[0] if args else kwargs.get("hidden_states")
        output = output[0] if isinstance(output, tuple) else output
        for kept, tensor in ((self.inputs, first), (self.outputs, output)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                kept[path] = tensor.flatten(0, -2).clone()

    def stored(self, canonical: str) -> Stored:
        """Where the state_dict has a canonical tensor."""
        places = [Stored(place) if isinstance(place, str) else place for place in self.names[canonical]]
        return next(place for place in places if place.name in self.state)

    def module(self, canonical: str) -> str:
        """The path of the module that owns a canonical tensor."""
        return self.stored(canonical).name.rpartition(".")[0]

    def layer(self, index: int) -> str:
        """The path of a decoder layer."""
        path = self.module(f"layers.{index}.attn.o.weight").split(".")
        return ".".join(path[: path.index("layers") + 2])

    def weights(self, key: str, fused: bool = False) -> dict[str, Tensor]:
        """A weight group, bound; `fused`: its tensors lie back to back in one buffer, else apart."""
        tensors = {t.name: self._tensor(t.name) for t in self.spec.groups_by_key[key].tensors}
        for tensor in self.spec.groups_by_key[key].tensors:
            assert tensors[tensor.name].shape == tensor.shape, tensor.name
        if fused:
            buffer = torch.cat([t.flatten() for t in tensors.values()])
            parts = buffer.split([t.numel() for t in tensors.values()])
            tensors = {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}
        return bind(tensors)

    def mlp(self, decoder: Decoder, layer: int, hidden: Tensor, fused: bool = False) -> None:
        """The MLP half of a layer, in place, expert by expert where it has any."""
        unit = next(unit for unit in self.spec.units if (unit.kind, unit.layer) == ("mlp", layer))
        w = self.weights(unit.weights, fused)
        if not unit.experts:
            decoder.mlp(w, hidden)
            return
        routed = decoder.route(w, hidden)
        out = torch.zeros_like(hidden) if routed.shared is None else routed.shared
        choices = Choices.of(routed.experts, routed.shares)
        for place, number in enumerate(choices.numbers):
            w = self.weights(unit.experts[number], fused)
            decoder.add_experts(routed.x, out, choices, range(place, place + 1), [w], most=2)
        decoder.add_mixture(hidden, out)

    def _tensor(self, canonical: str) -> Tensor:
        place = self.stored(canonical)
        whole = self.state[place.name]
        whole = whole.view(place.rows, *place.shape[2:]) if place.shape else whole
        spans = place.spans or ((0, len(whole)),)
        rows = torch.cat([whole[start:stop] for start, stop in spans])
        return rows.t().contiguous() if place.transposed else rows


@cache
def reference(name: str) -> Reference:
    return Reference(name)
