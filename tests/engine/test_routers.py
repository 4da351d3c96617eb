"""DeepSeek's router: choices that hang on float32, groups, names on the hub, layers behind the last one."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h2o_flexgen.config.model.arch import ExpertSpec
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.models import decoder
from h2o_flexgen.models.decoder import choose
from tests.seeds import torch_generator
from tests.tiny import prompts_of

NEW = 6


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("name", ["glm4-moe", "minimax-m2"])
def test_the_bias_of_the_choice_stays_in_float32(name: str, where: str, checkpoint, monkeypatch) -> None:
    """Whatever is computed with: published ones lie close together, far from 0."""
    model, folder = checkpoint(name)
    seen: list[torch.Tensor] = []

    def watched(logits: torch.Tensor, mixture: ExpertSpec, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(bias.clone())
        return choose(logits, mixture, bias)

    monkeypatch.setattr(decoder, "choose", watched)
    with Engine(folder, dtype="bfloat16", policy={"weights": {where: 1.0}}) as llm:
        llm.generate(prompts_of([5]), max_new_tokens=1, ignore_eos=True)
    kept = [buffer for key, buffer in model.named_buffers() if key.endswith("correction_bias")]
    assert len(seen) == len(kept)
    for ours, theirs in zip(seen, kept, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, theirs.bfloat16().float())


def test_groups_by_the_definition() -> None:
    generator = torch_generator(3)
    logits, bias = torch.randn(50, 12, generator=generator), torch.randn(12, generator=generator)
    mixture = ExpertSpec(
        12, 3, 8, router="each", choice_bias=True, groups=4, active_groups=2, scale=2.5, normalised=True
    )
    experts, shares = choose(logits, mixture, bias)
    for row, chosen, weights in zip(logits.sigmoid(), experts.tolist(), shares, strict=True):
        wanted = (row + bias).tolist()
        sums = [sum(sorted(wanted[g * 3 : g * 3 + 3])[1:]) for g in range(4)]
        groups = sorted(range(4), key=lambda g: -sums[g])[:2]
        allowed = [e for g in groups for e in range(g * 3, g * 3 + 3)]
        best = sorted(allowed, key=lambda e: -wanted[e])[:3]
        assert set(chosen) == set(best)
        expected = row[chosen] / row[chosen].sum() * 2.5
        torch.testing.assert_close(weights, expected)


HUB = {
    "glm4-moe": [],
    "hy-v3": [
        (r"mlp\.gate\.weight$", "mlp.router.gate.weight"),
        (r"mlp\.e_score_correction_bias$", "mlp.expert_bias"),
        (r"mlp\.shared_experts\.", "mlp.shared_mlp."),
    ],
    "minimax-m2": [
        (r"\.mlp\.gate\.", ".block_sparse_moe.gate."),
        (r"\.mlp\.e_score", ".block_sparse_moe.e_score"),
        (r"\.mlp\.experts\.(\d+)\.gate_proj\.", r".block_sparse_moe.experts.\1.w1."),
        (r"\.mlp\.experts\.(\d+)\.down_proj\.", r".block_sparse_moe.experts.\1.w2."),
        (r"\.mlp\.experts\.(\d+)\.up_proj\.", r".block_sparse_moe.experts.\1.w3."),
    ],
}
"""How names of modules become those of the published files."""


@pytest.mark.parametrize("name", HUB)
def test_files_as_the_hub_has_them(name: str, checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Expert by expert, under older names, with two layers behind the last one that predict more tokens, and one that
    config.json does not know."""
    model, folder = checkpoint(name)
    tensors = {}
    for key, tensor in model.state_dict().items():
        if key.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                base = key.removesuffix("gate_up_proj")
                tensors[f"{base}{number}.gate_proj.weight"], tensors[f"{base}{number}.up_proj.weight"] = gate, up
        elif key.endswith("experts.down_proj"):
            base = key.removesuffix("down_proj")
            tensors |= {f"{base}{number}.down_proj.weight": down for number, down in enumerate(tensor)}
        else:
            tensors[key] = tensor
    for pattern, stored in HUB[name]:
        tensors = {re.sub(pattern, stored, key): tensor for key, tensor in tensors.items()}
    behind = model.config.num_hidden_layers
    for layer in range(behind, behind + 3):
        tensors[f"model.layers.{layer}.eh_proj.weight"] = torch.ones(3, 3)
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("num_mtp_layers", "num_nextn_predict_layers")}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 2}))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")
    caplog.set_level(logging.INFO)
    settings = {"max_new_tokens": NEW, "ignore_eos": True}
    with Engine(folder, dtype="float32") as one, Engine(str(tmp_path), dtype="float32") as other:
        first, second = (llm.generate(prompts_of([9, 4]), **settings) for llm in (one, other))
    assert [output.token_ids for output in first] == [output.token_ids for output in second]
    assert "layers 3 and 4 of the checkpoint are not read: more tokens are predicted there" in caplog.text
    assert "layer 5 of the checkpoint is not read: config.json has num_hidden_layers 3" in caplog.text
