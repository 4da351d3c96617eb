"""Models of transformers' modules are calibrated by a short one of their kind, which keeps to the memory that there
is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from h2o_flexgen.calibration import Calibration, bench, calibrate, ticks
from h2o_flexgen.calibration.stored import profile_key
from h2o_flexgen.calibration.ticks import PROMPTS, short_plan
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import UNIT_KINDS, Curve
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.execution.passes import Passes
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.models.hf.shrink import shrunk
from h2o_flexgen.units import GIB, MIB
from tests.cost.machines import model_of, profile, ticking

CPU = torch.device("cpu")
HYBRID = {
    **{"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 96, "head_dim": 16, "num_attention_heads": 4},
    **{"num_experts": 24, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "max_position_embeddings": 512,
}


def shape(name: str, **changes: Any) -> ModelSpec:
    config = known_config(name) or {}
    inner = {"text_config": {**config["text_config"], **changes}} if "text_config" in config else changes
    return spec_from_config({**config, **inner}, name, "auto")


@pytest.fixture(scope="module")
def hybrid() -> ModelSpec:
    return shape("qwen3.6-35b-a3b", **HYBRID)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "qwen3-30b-a3b", "opt-175b"])
def test_a_short_model_keeps_to_its_room(name: str) -> None:
    """Of any size: a layer of the first has 3 GiB in float32, and one of the last 7 GiB."""
    spec = shape(name, **({"num_hidden_layers": 8} if name == "qwen3.6-35b-a3b" else {}))
    for room in (GIB, 384 * MIB):
        plan = short_plan(spec, "float32", "cpu", room)
        assert plan.footprint.total("cpu") <= room
        held = sum(group.buffer_bytes("float32") for group in plan.request.spec.weight_groups)
        assert held <= plan.footprint.total("cpu")
    assert spec.dtype == ("bfloat16" if "qwen" in name else "float16"), "of parts as their own config has it"


def test_its_first_layers_are_of_all_kinds_and_as_wide(hybrid: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the hybrid's layers keep states, the fourth attends; of its experts there are fewer."""
    monkeypatch.setattr(ticks, "largest_cache", lambda: 1)  # which layers are to leave
    short = short_plan(hybrid, "float32", "cpu", GIB).request.spec
    assert isinstance(short, ModuleSpec)
    assert [short.attends(layer) for layer in range(short.num_layers)] == [False, False, False, True]
    assert (short.products("mixer"), short.products("attn")) == (hybrid.products("mixer"), hybrid.products("attn"))
    assert short.products("experts") == hybrid.products("experts")
    assert short.arch.experts is not None
    assert short.arch.experts.count == 16


def test_infinities_as_transformers_writes_them() -> None:
    """As in a Granite 4's config.json."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 96, "num_attention_heads": 4}
    heads = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "num_local_experts": 0}
    config = CONFIG_MAPPING["granitemoehybrid"](**sizes, **heads, layer_types=["mamba", "attention"])
    written = json.loads(config.to_json_string(use_diff=False))
    assert written["time_step_limit"][1] == {"__float__": "Infinity"}
    spec = spec_from_config(written, "granite", "auto")
    assert short_plan(spec, "float32", "cpu", GIB).request.spec.num_layers
    assert shrunk(written).time_step_limit[1] == math.inf


def test_memory_that_is_free_counts_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "cgroup_room", lambda: 3 * GIB)
    assert bench.free_memory() <= 3 * GIB
    assert bench.free_memory(2 * GIB) < 2 * GIB, "what the process has is of it"
    assert bench.free_memory(1) == 0
    assert bench.arena_size(0) == 16 * MIB


def test_ticks_of_steps_and_of_prompts(hybrid: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ticks, "largest_cache", lambda: 1)
    monkeypatch.setattr(ticks, "ROWS", (1, 3))
    sizes: dict[str, Any] = {"budget_s": 0.01, "file_bytes": 2 * MIB, "arena_bytes": 2 * MIB}
    found = calibrate(Calibration(hybrid.with_bits(4, 32), "float32", CPU, tmp_path, **sizes))
    rates = found.compute["cpu"]
    assert set(rates.prompt_tick_s) == set(rates.tick_s) == set(UNIT_KINDS)
    assert all(curve.points[0][0] == PROMPTS[0] for curve in rates.prompt_tick_s.values())
    assert HardwareProfile.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize("kind", ["mamba2", "nemotron_h"])
def test_layers_of_one_half_and_experts_of_their_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mamba has no MLP halves, and a Nemotron's experts have no gates."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ticks, "ROWS", (1, 3))
    sizes: dict[str, Any] = {"budget_s": 0.01, "file_bytes": 2 * MIB, "arena_bytes": 2 * MIB}
    config = shrunk(CONFIG_MAPPING[kind]().to_dict()).to_json_string(use_diff=False)
    spec = spec_from_config(json.loads(config), kind, "auto")
    rates = calibrate(Calibration(spec, "float32", CPU, tmp_path, **sizes)).compute["cpu"]
    assert {kind for kind, curve in rates.tick_s.items() if max(curve.points)[1] > 1e-7} >= {"attn", "head"}
    assert (spec.arch.experts is not None) == bool(rates.experts)


def test_profiles_of_modules_have_keys_of_their_own() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
    config = {**(known_config("granite-3.1-8b") or {}), **sizes, "num_attention_heads": 4, "num_key_value_heads": 2}
    native, modules = (spec_from_config(config, "it", impl) for impl in ("native", "transformers"))
    alike = replace(native, ffn_size=modules.ffn_size, arch=modules.arch)
    keys = {profile_key(spec, "float32", CPU) for spec in (alike, modules, modules.with_bits(4, 64))}
    assert len(keys) == 3, "and by bits, which short models have too"
    assert all(spec.packings for spec in ticks._modules(modules.with_bits(8, 32), "float32"))


def test_prompts_cost_by_their_number_and_length() -> None:
    """Twice 1.5 s a unit for two prompts of 24 tokens, whatever a step of them takes."""
    curve = Curve(((24, 1.5),))
    rates = replace(ticking(), prompt_tick_s=dict.fromkeys(UNIT_KINDS, curve))
    terms = {
        (term.phase, term.name.partition(":")[0]): term.value
        for term in model_of(OffloadPolicy(2, 1), machine=profile(rates), workload=Workload(24, 8)).terms()
        if "overhead" in term.name
    }
    assert terms["prefill", "attn"] == terms["prefill", "mlp"] == 2 * 2 * 1.5  # two layers
    assert terms["decode", "attn"] == 2 * 1.0


def test_all_tokens_of_prompts_reach_the_last_experts(
    hybrid: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As plans and records count them."""
    config = known_config("qwen3.6-35b-a3b") or {}
    text = {**config["text_config"], **HYBRID, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text}))
    routed: dict[str, list[int]] = {}
    route = Passes.route

    def noted(passes: Passes, gpu_batch: Any, unit: Any, weights: Any) -> Any:
        found = route(passes, gpu_batch, unit, weights)
        routed.setdefault(unit.name, []).append(sum(len(each.x) for each in found))
        return found

    monkeypatch.setattr(Passes, "route", noted)
    with Engine(str(tmp_path), weights="dummy", dtype="float32") as llm:
        llm.generate([[1] * 9, [2] * 9], max_new_tokens=3, ignore_eos=True)
        plan = llm.last_plan
    assert plan is not None
    spec = plan.request.spec
    costs = model_of(plan.policy, spec=spec, workload=Workload(9, 3))
    last = spec.units[-2]
    assert routed[last.name] == [costs.mixture_tokens(step, last) for step in range(3)] == [18, 2, 2]
