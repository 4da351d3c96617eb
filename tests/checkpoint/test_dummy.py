from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from h2o_flexgen.checkpoint import source as sources
from h2o_flexgen.checkpoint.hub import ResolvedModel
from h2o_flexgen.checkpoint.opening import stored_spec
from h2o_flexgen.checkpoint.source import DummySource
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.schemes import MXFP4
from h2o_flexgen.quant import PackedWeight
from tests.checkpoint.models import make_spec, read_all
from tests.tiny import config_of


def test_the_same_seed_gives_the_same_weights() -> None:
    spec = make_spec()
    first, again, other = (read_all(DummySource(spec, "float16", seed), spec, torch.float16) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.tokens"], other["embed.tokens"])
    assert len({tensor.flatten()[:8].sum().item() for name, tensor in first.items() if name.endswith("q.weight")}) == 2


def test_a_tensor_does_not_depend_on_the_rest_of_the_model() -> None:
    small, large = make_spec(), make_spec(num_hidden_layers=9)
    name, one, other = "layers.1.mlp.up.weight", torch.empty(64, 32), torch.empty(64, 32)
    DummySource(small, "float32").read_into(name, one)
    DummySource(large, "float32").read_into(name, other)
    assert torch.equal(one, other)


def test_values_are_those_of_the_stored_dtype() -> None:
    spec = make_spec()
    source = DummySource(spec, "bfloat16", 3)
    stored, wide = read_all(source, spec, torch.bfloat16), read_all(source, spec, torch.float32)
    assert all(torch.equal(stored[name].float(), wide[name]) for name in stored)


def test_the_scale_is_sane() -> None:
    spec = make_spec(vocab_size=4000, hidden_size=2048, ffn_dim=256, word_embed_proj_dim=2048)
    got = read_all(DummySource(spec, "float32"), spec, torch.float32)  # more numbers than the pool has
    tokens = got["embed.tokens"]
    assert tokens.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(tokens.mean().item()) < 1e-4
    assert tokens.abs().max() < 0.2
    assert torch.unique(tokens[:, :4], dim=0).shape[0] == 4000
    assert torch.equal(got["layers.0.attn.norm.weight"], torch.ones(2048))
    assert torch.equal(got["layers.0.mlp.down.bias"], torch.zeros(2048))


def test_tensors_of_every_architecture() -> None:
    """Norms of whatever kind change nothing, biases of whatever kind are 0, all else is random."""
    arch = replace(make_spec().arch, post_norms=True, qk_norm=True, gated_mlp=True, tied_head=False)
    spec = replace(make_spec(), arch=arch)
    gemma = replace(spec, arch=replace(arch, norm="rmsnorm", norm_offset=1.0))
    for each, one in ((spec, 1.0), (gemma, 0.0)):
        for name, tensor in read_all(DummySource(each, "float32"), each, torch.float32).items():
            if "norm" in name and name.endswith("weight"):
                assert (tensor == one).all(), name
            elif name.endswith("bias"):
                assert (tensor == 0).all(), name
            else:
                assert tensor.std().item() == pytest.approx(0.02, rel=0.2), name
    assert DummySource(spec).fingerprint != DummySource(gemma).fingerprint


def test_it_says_what_it_is() -> None:
    spec = make_spec()
    source = DummySource(spec)
    assert source.dummy
    assert source.dtype == spec.dtype
    assert source.location("embed.tokens") is None
    marks = {
        DummySource(spec, "float16").fingerprint,
        DummySource(spec, "float16", 1).fingerprint,
        DummySource(spec, "bfloat16").fingerprint,
        DummySource(make_spec(vocab_size=97), "float16").fingerprint,
    }
    assert len(marks) == 4
    assert DummySource(spec, "float16").fingerprint in marks
    with pytest.raises(ModelError, match="int8"):
        DummySource(spec, "int8")
    with pytest.raises(ValueError, match="contiguous float tensor"):
        source.read_into("embed.tokens", torch.empty(3))


def test_it_is_copied_from_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fast as memory: no number is drawn, and few calls copy all of them."""
    spec = make_spec(vocab_size=32 << 10, hidden_size=1024, word_embed_proj_dim=1024, ffn_dim=64, num_hidden_layers=1)
    source = DummySource(spec, "float16")
    out, calls = torch.empty(32 << 10, 1024, dtype=torch.float16), []
    monkeypatch.setattr(torch.Tensor, "normal_", None)
    monkeypatch.setattr(sources, "copy", lambda to, what: calls.append(to.copy_(what)))
    source.read_into("embed.tokens", out)
    assert len(calls) <= 2 + out.numel() // sources._POOL
    assert sum(part.numel() for part in calls) == out.numel()


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Where config.json says so: random codes in the packed layout, and as large numbers as others."""
    config = {**config_of("gpt-oss", hidden_size=64, intermediate_size=64, head_dim=16).to_dict()}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = stored_spec(ResolvedModel("tiny", None, config, None, "builtin"))
    source, packed = DummySource(spec, "bfloat16"), dict(spec.packings)
    assert packed == dict.fromkeys((each.name for each in spec.multiplied["experts"]), MXFP4)
    name = "layers.1.mlp.experts.3.gate_up.weight"
    made, again, other = (PackedWeight.empty(MXFP4, (128, 64)) for _ in range(3))
    for out, key in ((made, name), (again, name), (other, name.replace("3", "4"))):
        source.read_into(key, out)
    assert torch.equal(made.expanded(), again.expanded())
    assert not torch.equal(made.expanded(), other.expanded())
    assert made.expanded().std().item() == pytest.approx(0.02, rel=0.2)
    with Engine(str(tmp_path), weights="dummy", dtype="float32") as llm:
        llm.generate([[5, 6, 7]], max_new_tokens=2, ignore_eos=True)
        assert llm.last_record.quantization["weights"] == {"format": "mxfp4", "bits": 4, "group": 32}
    with pytest.raises(ValueError, match="MXFP4"):
        DummySource(make_spec().with_bits(8, 64))
