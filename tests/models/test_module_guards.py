"""What transformers' modules may ask of attention and of their cache: anything else is refused, by tiny modules that
ask for it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.hf.attention import NAME, Call, ModelRun, NotUnderstood, current
from h2o_flexgen.models.hf.record import arguments, record, spec_of

TOKENS = 4


class Attends(nn.Module):
    """Attention of 4 heads over 2 of 8 numbers, asked for in its own way."""

    layer_idx = 0
    config = SimpleNamespace()

    def __init__(self, ask: Callable[[Attends, Any, Tensor, Tensor, Tensor], Any], **settings: Any) -> None:
        super().__init__()
        self.ask = ask
        for key, value in settings.items():
            setattr(self, key, value)

    def forward(self) -> Any:
        q, k = torch.randn(1, 4, TOKENS, 8), torch.randn(1, 2, TOKENS, 8)
        return self.ask(self, AttentionInterface()[NAME], q, k, torch.randn(1, 2, TOKENS, 8))


def gives(module: Attends, attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **more: Any) -> Any:
    """As modules do: keys and values through the cache, and attention to what it gives back."""
    k, v = current().cache.update(k, v, module.layer_idx)
    return attend(module, q, k, v, mask, **more)


def run(module: Attends) -> list[Call]:
    """Its calls of our attention."""
    calls = list[Call]()

    def answer(call: Call) -> Tensor:
        calls.append(call)
        return torch.zeros(call.q.shape)

    ModelRun(module.forward, answer, lambda routing: routing.x, lambda call: None, torch.arange(TOKENS)).switch()
    return calls


def test_what_modules_ask_for_as_a_rule_is_answered() -> None:
    (call,) = run(Attends(lambda *given: gives(*given, scaling=0.5, sliding_window=3, dropout=0.0, is_causal=None)))
    assert (call.layer, call.scale, call.window) == (0, 0.5, 3)
    assert (call.q.shape, call.k.shape) == ((TOKENS, 4, 8), (TOKENS, 2, 8))


def _twice(module: Attends, attend: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Fills its cache, and attends by itself; so does the next layer."""
    current().cache.update(k, v, 0)
    current().cache.update(k, v, 1)


REFUSED: dict[str, tuple[Attends, str]] = {
    "argument": (Attends(lambda *given: gives(*given, position_bias=torch.zeros(1))), "takes position_bias"),
    "mask": (Attends(lambda *given: gives(*given, mask=torch.zeros(1, 1, TOKENS, TOKENS))), "mask of its own"),
    "both ways": (Attends(lambda *given: gives(*given, is_causal=False)), "not causal"),
    "both ways by itself": (Attends(gives, is_causal=False), "not causal"),
    "keys of nobody": (Attends(lambda module, attend, *qkv: attend(module, *qkv)), "no layer has given"),
    "other keys": (Attends(lambda m, attend, *qkv: gives(m, lambda m, q, k, v, _: attend(m, q, k + 1, v), *qkv)),
                   "other keys or values"),
    "several sequences": (Attends(lambda m, attend, *qkv: gives(m, attend, *(x.expand(2, -1, -1, -1) for x in qkv))),
                          "is of queries, keys and values"),
    "kind of layer": (Attends(gives, config=SimpleNamespace(layer_types=["compressed"])), "'compressed'"),
    "updates alone": (Attends(_twice), "attention is not ours"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name: str) -> None:
    module, message = REFUSED[name]
    with pytest.raises(NotUnderstood, match=message):
        run(module)


def tiny() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM._from_config(config, attn_implementation=NAME)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_fills_its_cache_and_attends_itself_is_seen(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one, too, behind which no other would tell."""
    theirs = modeling_llama.LlamaAttention.forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx != layer:
            return theirs(self, hidden_states, *args, **kwargs)
        k = self.k_proj(hidden_states).view(1, TOKENS, 2, -1).transpose(1, 2)
        current().cache.update(k, k, self.layer_idx)
        return hidden_states, None

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(ModelError, match=f"layer {layer} fills its cache, and attention is not ours"):
        record(tiny(), "llama")


@pytest.mark.parametrize("what", ["conv_state", "recurrent_state"])
def test_a_module_that_keeps_what_no_cache_of_ours_has_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = modeling_llama.LlamaMLP.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        getattr(current().cache, f"update_{what}")(x, 0)
        made: Tensor = theirs(self, x)
        return made

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(ModelError):
        record(tiny(), "llama")


def test_a_model_without_positions_or_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCache(nn.Module):
        def forward(self, input_ids: Tensor, position_ids: Tensor) -> None: ...

    ids = torch.arange(TOKENS)
    waiting = ModelRun(lambda: None, lambda call: call.q, lambda routing: routing.x, lambda call: None, ids)
    with pytest.raises(ModelError, match="takes no cache"):
        arguments(NoCache(), waiting, ids, ids, ids[-1:])
    theirs = LlamaForCausalLM.forward

    def forward(self: Any, input_ids: Tensor, past_key_values: Any, use_cache: bool, return_dict: bool) -> Any:
        return theirs(self, input_ids, past_key_values=past_key_values, use_cache=use_cache)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(ModelError, match="takes no positions"):
        spec_of(tiny().config.to_dict(), "llama")
