"""Plans of models of transformers' modules: the bytes that are predicted are those that a run holds and moves."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.cost.candidate import place
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.cost.simulate import simulate
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.state.kv_store import CacheMaker
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.models.hf.shrink import shrunk
from tests.cost.machines import model_of, on, profile
from tests.cost.test_against_engine import BATCHES, CASES, NEW, PROMPT, ROWS
from tests.engine.test_modules import SIZES, TYPES, tiny
from tests.tiny import prompts_of

KINDS: dict[str, dict[str, Any]] = {
    "olmo": {},
    "gemma2": {},
    "deepseek_v3": {"first_k_dense_replace": 3},
    "gpt2": {},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        tiny(kind, **KINDS[kind]).save_pretrained(folder)
        return folder

    return make


@pytest.mark.turns
@pytest.mark.parametrize(("case", "kind"), list(zip(CASES, cycle(KINDS), strict=False)))
def test_a_run_is_the_simulated_one(case: str, kind: str, folder_of) -> None:
    placement, gpu = CASES[case]
    here = {"gpu": 1.0} if gpu else {"cpu": 1.0}
    policy = {
        **placement,
        "hidden": here,
        "cpu_cache_compute": False,
        "gpu_batch_size": ROWS,
        "num_gpu_batches": BATCHES,
    }
    settings: dict[str, Any] = {"dtype": "bfloat16", "eviction": EvictionConfig("h2o", ratio=0.3), "trace": True}
    with Engine(str(folder_of(kind)), policy=policy, emulate_gpu=gpu, model_impl="transformers", **settings) as llm:
        llm.generate(prompts_of([PROMPT] * ROWS * BATCHES), max_new_tokens=NEW, ignore_eos=True)
        record, plan, ran = llm.last_record, llm.last_plan, llm.timeline
    assert record is not None
    assert plan is not None
    found = simulate(CostModel(replace(plan.request, profile=profile()), plan.policy, plan.placement), steps=NEW)
    assert found.bytes_moved == {link: nbytes for link, nbytes in record.bytes_moved.items() if nbytes}
    assert Counter(row.resource for row in ran.rows) == Counter(row.resource for row in found.timeline.rows)
    for tier, peak in record.peak_bytes.items():
        if tier != "rss" and peak is not None:
            assert peak <= plan.footprint.total(tier), tier


@pytest.mark.turns
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [16, 8])
def test_caches_and_weights_take_what_was_planned(
    kind: str, bits: int, folder_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values: the tensors of caches themselves, in whole pages; weights: what their tier holds."""
    made: dict[Any, int] = {}
    make = CacheMaker.make

    def noted(self: CacheMaker, layer: int, gpu_batch: int, rows: Any) -> Any:
        found = make(self, layer, gpu_batch, rows)
        made[layer, gpu_batch] = sum({id(x): x.nbytes for x in found.shape.buffers(torch.bfloat16)}.values())
        return found

    monkeypatch.setattr(CacheMaker, "make", noted)
    settings: dict[str, Any] = {"dtype": "bfloat16", "eviction": EvictionConfig("h2o", ratio=0.3), "cache_bits": bits}
    policy = {"gpu_batch_size": ROWS, "num_gpu_batches": BATCHES}
    with Engine(str(folder_of(kind)), policy=policy, model_impl="transformers", **settings) as llm:
        llm.generate(prompts_of([PROMPT] * ROWS * BATCHES), max_new_tokens=NEW, ignore_eos=True)
        plan, record = llm.last_plan, llm.last_record
        assert llm._loaded is not None
        held = dict(llm._loaded.stages[0].tiers.cpu.items)
    assert plan is not None
    assert record is not None
    planned = {item.what: item.nbytes for item in plan.footprint.items if item.tier == "cpu"}
    assert len(made) == 3 * BATCHES
    assert sum(made.values()) <= planned["KV cache"] <= sum(-(-nbytes // 4096) * 4096 for nbytes in made.values())
    weights = sum(nbytes for what, nbytes in held.items() if "weight" in what)
    assert weights == planned["weights"]


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["longcat_flash", "deepseek_v3", "qwen3_5_moe", "zamba2", "bloom", "gemma3n_text"])
def test_the_products_of_units_are_their_matrices(kind: str) -> None:
    """In the mean over the units of a kind, which may differ: LongCat's attention follows a dense MLP in every second,
    and Zamba's layers share one that is read at each place."""
    spec = spec_from_config(json.loads(shrunk({"model_type": kind}).to_json_string()), kind, "transformers")
    assert isinstance(spec, ModuleSpec)
    routers = spec.arch.experts.count * spec.hidden_size if spec.arch.experts else 0
    counted, held = Counter[str](), Counter[str]()
    for unit in spec.units:
        own = [each for each in dict(spec.groups)[unit.weights] if each.name.startswith(f"{unit.name}.")]
        head = spec.vocab_size * spec.embed_dim if unit.kind == "head" and spec.arch.tied_head else 0
        held[unit.products] += sum(prod(each.shape) for each in own if each.product) + head
        held[unit.products] += routers if unit.experts else 0
        calls = spec.product_calls(unit.products, 3)
        counted[unit.products] += sum(times * a * b for (a, b), rows, times in calls if rows == 3)
    assert dict(counted) == pytest.approx(dict(held))


def test_long_schedules_are_told_by_fewer_layers() -> None:
    """As of any model: a search simulates these, where all would take long."""
    sizes = {**SIZES, **TYPES["deepseek_v3"], "num_hidden_layers": 12}
    config = AutoConfig.for_model("deepseek_v3", **sizes).to_json_string()
    spec = spec_from_config(json.loads(config), "twelve", "transformers")
    policy = OffloadPolicy(1, 64, **on(weights="disk"))
    whole = place(model_of(policy, spec=spec).request, policy)
    few = whole.shrunk
    assert few is not None
    assert few.request.spec.num_layers == 8
    assert few.placement.weights.keys() < whole.placement.weights.keys()
    assert whole.seconds == pytest.approx(whole.prediction.total_s / whole.prediction.sequences, rel=0.05)
