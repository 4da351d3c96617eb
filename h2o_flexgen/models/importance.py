"""Which inputs of a matrix matter: how large each is in the mean of its squares, over some tokens.

A rounding error of a weight reaches the output in proportion to its input. Scales that are searched for with these
means as weights (`quant.weights.pack`) keep the error of the output small rather than that of the weights. They are the
diagonal of the Hessian of GPTQ (Frantar et al. 2022, arXiv 2210.17323), and a small part of its work.

Random tokens serve nearly as well as text: which inputs are large is the model's own doing more than its prompt's. With
them no text is needed, and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import WeightGroup
from h2o_flexgen.kernels import linear, prefill_attention
from h2o_flexgen.models.decoder import Attention, Decoder, bind
from h2o_flexgen.models.rotary import rotate_both

_TEXTS, _LENGTH = 4, 256
"""More tokens made no difference."""

Read = Callable[[WeightGroup], dict[str, Tensor]]
"""The tensors of a group in the dtype and on the device that are computed with, each in memory of its own."""


def random_tokens(spec: ModelSpec) -> Tensor:
    """Token ids (n, S) to measure with, always the same for a model; each row starts as a text does."""
    size, generator = (_TEXTS, min(_LENGTH, spec.max_positions)), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab_size, size, generator=generator)
    tokens[:, 0] = min(spec.bos_token_id, spec.vocab_size - 1)
    return tokens


def importance(spec: ModelSpec, read: Read, tokens: Tensor) -> dict[str, Tensor]:
    """The mean of the squares of each input, (ins) float32, of every matrix of the layers, by canonical name.
    The model has no experts.

    tokens (n, S): token ids of n texts, where they are computed. One unit is read at a time, in the order of
    computation.
    """
    seen: dict[int, str] = {}
    found: dict[str, Tensor] = {}

    def observed(x: Tensor, weight: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        name = seen.get(id(weight))
        if name is not None:
            found[name] = x.float().square().mean(0)
        return linear(x, weight, bias, **how)

    decoder, (n, length) = Decoder(spec, observed), tokens.shape
    positions = torch.arange(length, device=tokens.device).repeat(n)
    hidden = torch.empty(0)
    for unit in spec.units[:-1]:
        tensors = read(spec.groups_by_key[unit.weights])
        seen = {id(tensor): name for name, tensor in tensors.items() if unit.layer is not None}
        weights = bind(tensors)
        if unit.layer is None:
            hidden = decoder.embed(weights, tokens.flatten(), positions)
        elif unit.kind == "attn":
            decoder.attn(weights, hidden, _attention(decoder, unit.layer, positions, n))
        else:
            decoder.mlp(weights, hidden)
    return found


def _attention(decoder: Decoder, layer: int, positions: Tensor, n: int) -> Attention:
    """Causal attention of n texts of one length to themselves."""
    rotary, window = decoder.rotary_of(layer), decoder.spec.arch.window_of(layer)
    length = len(positions) // n

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rotary is not None:
            q, k = rotate_both(q, k, rotary.angles(positions, torch.full_like(positions, length), q.dtype))
        q, k, v = (each.unflatten(0, (n, length)).transpose(1, 2) for each in (q, k, v))
        return prefill_attention(q, k, v, decoder.scale, False, window=window).out.transpose(1, 2).flatten(0, 1)

    return attend
