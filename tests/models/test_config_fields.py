"""Every field of a family's config class in transformers that is a number, a switch or an activation is heeded, or
refused: with another value our logits are transformers' again, or there is a ModelError. Nothing is silently another
model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch

from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.decoder import Decoder
from tests.models.reference import TOKENS, Reference
from tests.models.test_decoder import causal_attention
from tests.tiny import FAMILIES, config_of

pytestmark = pytest.mark.usefixtures("no_gradients")

NAMES = {row.family: name for name, row in reversed(FAMILIES.items())}
"""A row of tests/tiny.py for each family."""
SIZES = ("vocab_size", "num_hidden_layers", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
"""Fields that change what a text is, or which the tests of sizes have."""


ALIKE = {"num_experts": ("num_local_experts",)}
"""Other words that rows of tests/tiny.py have for a field."""


def variations(name: str) -> Iterator[tuple[str, Any]]:
    """One field of the config each, with another value."""
    config = config_of(name)
    for field in fields(type(config)):
        value, kind = getattr(config, field.name, None), str(field.type)
        if field.name in SIZES or field.name.startswith("_"):
            continue
        if isinstance(value, bool) or (value is None and "bool" in kind):
            yield field.name, not value
        elif isinstance(value, int):
            yield field.name, value + 1
            yield field.name, 2 * value
        elif isinstance(value, float) or (value is None and "float" in kind):
            yield field.name, 3 * (value or 0.2) + 0.02
            yield field.name, (value or 0.0) + 0.9
        elif isinstance(value, str) and "act" in field.name:
            yield field.name, "gelu"
        if "None" in kind and value is not None:
            yield field.name, None


def logits_of(ref: Reference) -> torch.Tensor:
    """Ours, (TOKENS, vocab)."""
    decoder = Decoder(ref.spec)
    hidden = decoder.embed(ref.weights(ref.spec.units[0].weights), ref.tokens, torch.arange(TOKENS))
    for layer in range(ref.spec.num_layers):
        w = ref.weights(f"layers.{layer}.attn")
        decoder.attn(w, hidden, partial(causal_attention, decoder, layer, w.get("sinks")))
        ref.mlp(decoder, layer, hidden)
    return decoder.head(ref.weights(ref.spec.units[-1].weights), hidden)


def outcome(name: str, field: str, value: Any) -> str:
    """ "same", "refused", "not made" by transformers itself, or what is wrong."""
    try:
        ref = Reference(name, **{key: value for key in (field, *ALIKE.get(field, ()))})
    except ModelError:
        return "refused"
    except Exception:
        return "not made"
    try:
        off = float((logits_of(ref) - ref.logits).abs().max() / ref.logits.std())
    except Exception as error:
        return repr(error)
    return "same" if off < 1e-3 else f"off by {off:.2g}"


@pytest.mark.slow
@pytest.mark.parametrize("family", NAMES)
def test_every_field_is_heeded_or_refused(family: str) -> None:
    name = NAMES[family]
    found = {(field, str(value)): outcome(name, field, value) for field, value in variations(name)}
    wrong = {key: what for key, what in found.items() if what not in ("same", "refused", "not made")}
    assert not wrong
    assert sum(what == "same" for what in found.values()) > len(found) // 3
