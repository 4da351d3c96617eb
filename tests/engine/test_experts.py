"""Mixtures of experts through the engine: on disk, in several tiers, stored in other ways; and what is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.kernels.packed import PackedWeight
from h2o_flexgen.models.schemes import MXFP4
from tests.seeds import torch_generator
from tests.tiny import decided, make_model, prompts_of, save, transformers_greedy

LENGTHS, NEW = [5, 9, 9, 17, 1, 30], 8
MIXTURES = ["mixtral", "olmoe", "qwen2-moe", "qwen3-moe", "granite-moe", "gpt-oss"]
MIXTURES += ["glm4-moe", "dots1", "hy-v3", "minimax-m2", "ernie4.5-moe"]
PLACES: list[dict[str, Any]] = [
    {"weights": {"disk": 1.0}},
    {"weights": {"cpu": 0.5, "disk": 0.5}, "hidden": {"disk": 1.0}, "cache": {"cpu": 0.5, "disk": 0.5}},
    {"weights": {"gpu": 0.2, "cpu": 0.4, "disk": 0.4}, "hidden": {"cpu": 1.0}, "cache": {"cpu": 1.0}},
]


def greedy(folder: str | Path, prompts: list[list[int]], batches: int = 3, **settings: Any) -> list[list[int]]:
    policy = {"gpu_batch_size": 2, "num_gpu_batches": batches, **settings.pop("policy", {})}
    with Engine(str(folder), dtype="float32", policy=policy, **settings) as llm:
        return [output.token_ids for output in llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True)]


@pytest.mark.turns
@pytest.mark.parametrize(("name", "place"), [(name, PLACES[i % 3]) for i, name in enumerate(MIXTURES)])
def test_experts_elsewhere_give_the_tokens_of_transformers(name: str, place: dict, checkpoint, tmp_path: Path) -> None:
    model, folder = checkpoint(name)
    prompts, expected = decided(prompts_of(LENGTHS), lambda _, prompt: transformers_greedy(model, prompt, NEW)[0])
    # What two of them begin with in common is computed once.
    prompts[3], expected[3] = prompts[5][:17], transformers_greedy(model, prompts[5][:17], NEW)[0]
    gpu = {"emulate_gpu": "1GiB"} if "gpu" in place["weights"] else {}
    assert greedy(folder, prompts, policy=place, offload_dir=str(tmp_path), **gpu) == expected


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("name", ["glm4-moe", "hy-v3"])
def test_no_shared_experts_are_what_transformers_makes_of_them(name: str, impl: str, tmp_path: Path) -> None:
    """An MLP of no numbers, or one as large as those of dense layers."""
    model = make_model(name, n_shared_experts=0, num_shared_experts=0)
    save(model, tmp_path / "model")
    prompts, expected = decided(prompts_of([5, 9]), lambda _, prompt: transformers_greedy(model, prompt, NEW)[0])
    for place in PLACES[:2]:
        place = {"weights": place["weights"]}
        how: dict[str, Any] = {"offload_dir": str(tmp_path), "model_impl": impl, "policy": place}
        assert greedy(tmp_path / "model", prompts, **how) == expected


@pytest.mark.parametrize(
    ("lengths", "batches", "slots"),
    # an eighth of them is computed in a tick; two rows choose few experts, but 40 tokens of prompts choose all
    [(LENGTHS * 4, 4, 18), ([20, 20], 1, 18), ([17, 17], 1, 4)],
)
def test_several_experts_that_are_read_share_a_tick(
    lengths: list[int], batches: int, slots: int, tmp_path: Path
) -> None:
    model = make_model("olmoe", num_local_experts=36, num_experts=36, num_experts_per_tok=8)
    save(model, tmp_path / "model")
    prompts, expected = decided(prompts_of(lengths), lambda _, prompt: transformers_greedy(model, prompt, NEW)[0])
    policy = {"gpu_batch_size": 6, "num_gpu_batches": batches, "weights": {"disk": 1.0}}
    with Engine(str(tmp_path / "model"), dtype="float32", policy=policy, offload_dir=str(tmp_path / "offload")) as llm:
        found = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
        assert llm.last_plan.expert_slots == slots
    assert [output.token_ids for output in found] == expected


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "granite-moe"])
def test_experts_in_one_tensor_as_transformers_keeps_them(name: str, checkpoint, tmp_path: Path) -> None:
    model, folder = checkpoint(name)
    save(model, tmp_path, save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in load_file(tmp_path / "model.safetensors"))
    prompts = prompts_of([9, 5])
    assert greedy(tmp_path, prompts) == greedy(folder, prompts)


def write_mxfp4(folder: Path) -> torch.nn.Module:
    """A tiny gpt-oss as the hub has it, its experts in MXFP4; the model is what transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    model, generator = make_model("gpt-oss", **sizes), torch_generator(9)
    folder.mkdir(exist_ok=True)
    state = dict(model.state_dict())
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        count, ins, outs = state[name].shape
        blocks = torch.randint(0, 256, (count, outs, ins // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, (count, outs, ins // 32), generator=generator, dtype=torch.uint8)
        state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        del state[name]
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return model


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_mxfp4_experts_are_what_transformers_expands_them_to(impl: str, tmp_path: Path) -> None:
    model = write_mxfp4(tmp_path)
    prompts, expected = decided(prompts_of([9, 5]), lambda _, prompt: transformers_greedy(model, prompt, NEW)[0])
    for place in ({}, {"weights": {"disk": 1.0}}):
        offload = str(tmp_path / "offload")
        assert greedy(tmp_path, prompts, policy=place, offload_dir=offload, model_impl=impl) == expected


@pytest.mark.parametrize("plain", ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj", "layers.2."])
def test_experts_of_which_part_is_in_mxfp4(plain: str, tmp_path: Path) -> None:
    model = write_mxfp4(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        if plain in name and name.endswith(("gate_up_proj", "down_proj")):
            del state[f"{name}_blocks"], state[f"{name}_scales"]
            state[name] = tensor.contiguous()
    save_file(state, tmp_path / "model.safetensors")
    prompts, expected = decided(prompts_of([9, 5]), lambda _, prompt: transformers_greedy(model, prompt, NEW)[0])
    for place in ({}, {"weights": {"disk": 1.0}}):
        assert greedy(tmp_path, prompts, policy=place, offload_dir=str(tmp_path / "offload")) == expected
    with Engine(str(tmp_path), policy={"gpu_batch_size": 2}) as llm:  # the kernels' dtype
        assert len(llm.generate(prompts, max_new_tokens=2, ignore_eos=True)) == 2


def test_what_is_not_packed_beside_mxfp4_experts_can_be(tmp_path: Path) -> None:
    """Experts keep their codes, other matrices get 8 bits; from memory and from disk alike."""
    write_mxfp4(tmp_path / "model")
    tokens = []
    for place in ({}, {"weights": {"disk": 1.0}}):
        settings = {"dtype": "float32", "weight_bits": 8, "policy": place, "offload_dir": str(tmp_path / "offload")}
        with Engine(str(tmp_path / "model"), **settings) as llm:
            tokens.append([output.token_ids for output in llm.generate(prompts_of([9, 5]), max_new_tokens=2)])
            spec, stored, source = llm.model.spec, llm.model.stored, llm.model.source
            packings, experts = dict(spec.packings), {each.name for each in spec.multiplied["experts"]}
            assert {packings[name] for name in experts} == {MXFP4}
            assert {packings[name].levels for name in packings.keys() - experts} == {"int8"}
            assert {"head.vocab", "layers.1.attn.o.weight"} <= packings.keys()
            shapes = {each.name: each.shape for group in spec.weight_groups for each in group.tensors}
            for name in packings:
                out = PackedWeight.empty(packings[name], shapes[name])
                source.read_into(name, out)
                as_stored = PackedWeight.empty(MXFP4, shapes[name]) if name in experts else torch.empty(shapes[name])
                stored.read_into(name, as_stored)
                if isinstance(as_stored, PackedWeight):
                    assert all(torch.equal(out.parts[part], as_stored.parts[part]) for part in out.parts)
                else:
                    assert (out.expanded() - as_stored).abs().max() <= as_stored.abs().max() / 250
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", ["olmoe", "gpt-oss"])
def test_only_chosen_experts_are_read(name: str, tmp_path: Path) -> None:
    """Of a sequence of one token, in 16 experts of which each token chooses 2; and of many, each once in a pass."""
    changes = {"num_local_experts": 16, "num_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 512}
    save(make_model(name, hidden_size=128, head_dim=32, **changes), tmp_path / "model")
    place = {"gpu_batch_size": 1, "num_gpu_batches": 1, "weights": {"disk": 1.0}}
    with Engine(str(tmp_path / "model"), dtype="float32", policy=place, offload_dir=str(tmp_path / "offload")) as llm:
        spec = llm.model.spec
        groups = {group.key: group.buffer_bytes("float32") for group in spec.weight_groups}
        experts = sum(nbytes for key, nbytes in groups.items() if ".experts." in key)
        shared = sum(groups.values()) - experts
        steps = 5
        tokens = llm.generate([[3]], max_new_tokens=steps, ignore_eos=True)[0].token_ids
        assert llm.last_record.bytes_moved["disk->cpu"] <= 1.1 * steps * (shared + experts * 2 / 16)
        layers = spec.num_layers
        said = {"count": 16, "active": 2, "read": 2 * layers * steps, "of": 16 * layers * steps}
        assert llm.last_record.experts == said
    # Those that are used come to lie in memory, where there is room for half of all.
    half = {**place, "weights": {"cpu": 0.6, "disk": 0.4}}
    with Engine(str(tmp_path / "model"), dtype="float32", policy=half, offload_dir=str(tmp_path / "offload")) as llm:
        found, moved = [], []
        for _ in range(2):
            found.append(llm.generate([[3]], max_new_tokens=steps, ignore_eos=True)[0].token_ids)
            moved.append(llm.last_record.bytes_moved.get("disk->cpu", 0))
        assert found == [tokens, tokens]
        assert moved[1] < moved[0] / 2
    many = {**place, "gpu_batch_size": 4, "num_gpu_batches": 3}
    with Engine(str(tmp_path / "model"), dtype="float32", policy=many, offload_dir=str(tmp_path / "offload")) as llm:
        llm.generate(prompts_of([40] * 12), max_new_tokens=2, ignore_eos=True)
        assert llm.last_record.bytes_moved["disk->cpu"] <= 2 * (shared + experts) + groups["embed"]
