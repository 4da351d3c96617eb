"""Types whose modules attend by themselves, packed: beside transformers' probabilities, far beyond 256 positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from tests.seeds import torch_generator

_FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
_BLOOM = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}
_MPT = {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 128, "max_seq_len": 512}
_NEO = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128, "max_position_embeddings": 512}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("falcon", _FALCON),
    "falcon, 40B": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, RW": ("falcon", {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon, one KV head, ALiBi": ("falcon", {**_FALCON, "alibi": True}),
    "bloom": ("bloom", _BLOOM),
    "bloom, six heads": ("bloom", {**_BLOOM, "hidden_size": 96, "n_head": 6}),
    "mpt": ("mpt", _MPT),
    "mpt, six heads": ("mpt", {**_MPT, "d_model": 96, "n_heads": 6}),
    "gpt_neo": ("gpt_neo", {**_NEO, "attention_types": [[["global", "local"], 1]], "window_size": 64}),
    "xglm": ("xglm", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96, "vocab_size": 128}),
}
BIASED = [name for name in KINDS if KINDS[name][0] in ("bloom", "mpt") or "RW" in name or "ALiBi" in name]


def saved(name: str, folder: Path) -> Any:
    """A tiny model whose weights are large enough for the attention to differ from the mean."""
    kind, sizes = KINDS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32).eval()
    for each in model.parameters():
        if each.dim() > 1:
            each.data.mul_(4)
    model.save_pretrained(folder)
    return model


def prompts() -> list[list[int]]:
    generator = torch_generator(4)
    return [torch.randint(3, 120, (length,), generator=generator).tolist() for length in (400, 5, 90, 280)]


@pytest.mark.parametrize("name", KINDS)
def test_probabilities_are_transformers(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 2}
    with Engine(str(tmp_path), dtype="float32", policy=policy) as llm:
        assert isinstance(llm.model.spec, ModuleSpec)
        assert not llm.model.spec.alone
        assert (llm.model.spec.arch.positions == "biases") == (name in BIASED)
        outputs = llm.generate(prompts(), max_new_tokens=8, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts(), outputs, strict=True):
        with torch.no_grad():
            likely = model(torch.tensor([prompt + output.token_ids])).logits[0].log_softmax(-1)
        wanted = [float(likely[len(prompt) - 1 + i, token]) for i, token in enumerate(output.token_ids)]
        assert output.logprobs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", ["bloom", "gpt_neo"])
def test_budgets_do_not_depend_on_neighbours(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    found = []
    for size, count in ((1, 1), (2, 2)):
        policy = {"gpu_batch_size": size, "num_gpu_batches": count}
        eviction = EvictionConfig("h2o", ratio=0.3)
        with Engine(str(tmp_path), dtype="float32", policy=policy, eviction=eviction) as llm:
            found.append([out.token_ids for out in llm.generate(prompts(), max_new_tokens=8, ignore_eos=True)])
    assert found[0] == found[1]


def test_products_of_a_class_of_its_own_may_be_packed(tmp_path: Path) -> None:
    """Falcon's are no `nn.Linear`s."""
    saved("falcon", tmp_path)
    found = []
    for bits in (16, 8):
        with Engine(str(tmp_path), dtype="float32", weight_bits=bits) as llm:
            found.append(llm.score([(prompts()[1], prompts()[1])])[0].logprob)
            packed = len(llm.model.spec.packings)
    assert found[0] == pytest.approx(found[1], abs=0.5)
    assert packed > 2  # tables besides


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cache_bits": 8}, "cache_bits is 8, and keys of .* have biases by distance"),
        ({"eviction": EvictionConfig("h2o", bytes=0.3)}, "--kv-bytes is given, and keys of .* have biases by distance"),
        (
            {"eviction": EvictionConfig("h2o", ratio=0.3, recall="cpu")},
            "--recall cpu is given, and keys of .* have biases",
        ),
        ({"eviction": EvictionConfig("knorm", ratio=0.3)}, "the eviction policy is knorm .* with biases by distance"),
        (
            {"eviction": EvictionConfig("keydiff", ratio=0.3)},
            "the eviction policy is keydiff .* with biases by distance",
        ),
        ({"eviction": EvictionConfig("rkv", ratio=0.3)}, "the eviction policy is rkv .* with biases by distance"),
    ],
)
def test_what_biases_in_keys_cannot_have_is_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    saved("bloom", tmp_path)
    with pytest.raises(UsageError, match=said):
        Engine(str(tmp_path), dtype="float32", **settings)
