"""What a run had to compute, read and move: worked out by hand, and against what caches and counters saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.schedule.work import CountedWork, PhaseWork
from tests.engine.compare import History
from tests.tiny import make_model, prompts_of, save

LAYERS, HIDDEN, FFN, VOCAB, SIZE = 3, 32, 56, 97, 4
MATRICES = {"attn": 4 * HIDDEN * HIDDEN, "mlp": 2 * HIDDEN * FFN, "head": HIDDEN * VOCAB}
"""Numbers in the matrices of each unit of the tiny OPT."""
TOKEN = 2 * HIDDEN * SIZE
"""Bytes of a key and a value in one layer."""
PROMPT, NEW, ROWS = 24, 9, 4
CPU, DISK, GPU = {"cpu": 1.0}, {"disk": 1.0}, {"gpu": 1.0}
POLICY: dict[str, Any] = {"weights": CPU, "cache": CPU, "hidden": CPU, "gpu_batch_size": ROWS, "num_gpu_batches": 1}


def _run(folder: str, new: int = NEW, count: int = ROWS, budget: int | None = 10, **settings: Any) -> Engine:
    """An engine, closed, that has run equal prompts; `settings` beside those of POLICY, and emulate_gpu."""
    gpu = settings.pop("emulate_gpu", None)
    eviction = EvictionConfig() if budget is None else EvictionConfig("h2o", budget=budget)
    policy = {**POLICY, **settings}
    settings = {"eviction": eviction, "policy": policy, "emulate_gpu": gpu, "share_prefixes": False}
    with Engine(folder, dtype="float32", **settings) as llm:
        llm.generate(prompts_of([PROMPT] * count), max_new_tokens=new, ignore_eos=True)
    return llm


def test_products_by_hand(checkpoint) -> None:
    work = _run(checkpoint()[1]).last_work
    tokens, steps = ROWS * PROMPT, NEW - 1
    assert dict(work.prefill.products) == {
        ("embed", tokens): 1,
        ("attn", tokens): LAYERS,
        ("mlp", tokens): LAYERS - 1,
        ("mlp", ROWS): 1,  # behind the last attention: the last token of each prompt
        ("head", ROWS): 1,
    }
    assert dict(work.decode.products) == {
        ("embed", ROWS): steps,
        ("attn", ROWS): LAYERS * steps,
        ("mlp", ROWS): LAYERS * steps,
        ("head", ROWS): steps,
    }
    assert (work.prefill.steps, work.decode.steps) == (1, steps)


def test_bytes_and_flops_by_hand(checkpoint) -> None:
    llm = _run(checkpoint()[1])
    spec, work, steps = llm.model.spec, llm.last_work, NEW - 1
    numbers = LAYERS * (MATRICES["attn"] + MATRICES["mlp"]) + MATRICES["head"]
    assert work.decode.weight_bytes(spec, "float32") == steps * numbers * SIZE
    assert work.decode.product_flops(spec) == steps * 2 * ROWS * numbers
    held = 11  # ten that the budget keeps, and the newest
    assert work.decode.cache_bytes(spec, "float32") == {"cpu": steps * LAYERS * ROWS * held * TOKEN}
    assert work.decode.attention_flops(spec) == steps * LAYERS * ROWS * held * 4 * HIDDEN
    assert work.prefill.attention_flops(spec) == LAYERS * ROWS * PROMPT * PROMPT * 4 * HIDDEN
    everywhere = 2 * ROWS * PROMPT * LAYERS * (MATRICES["attn"] + MATRICES["mlp"]) + 2 * ROWS * MATRICES["head"]
    behind = 2 * ROWS * (PROMPT - 1) * MATRICES["mlp"]
    assert work.prefill.product_flops(spec) == everywhere - behind
    assert llm.last_record.flops == work.flops(spec)


def test_the_full_cache_grows(checkpoint) -> None:
    llm = _run(checkpoint()[1], budget=None)
    held = sum(PROMPT + step for step in range(1, NEW))
    assert llm.last_work.decode.cache_bytes(llm.model.spec, "float32") == {"cpu": LAYERS * ROWS * held * TOKEN}
    assert llm.last_work.decode.attention_flops(llm.model.spec) == LAYERS * ROWS * held * 4 * HIDDEN


def test_prompts_in_chunks_read_the_weights_for_each(checkpoint) -> None:
    prefill = _run(checkpoint()[1], prefill_chunk=PROMPT).last_work.prefill
    assert prefill.products["attn", PROMPT] == ROWS * LAYERS
    assert prefill.products["mlp", PROMPT] == ROWS * (LAYERS - 1)


@pytest.mark.parametrize(("name", "changes"), [("qwen2-moe", {"decoder_sparse_step": 2}), ("qwen3-moe", {})])
def test_layers_with_and_without_experts(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """FLOPs as torch counts them in transformers' model; matrices as they are listed, experts once for both batches."""
    model = make_model(name, **changes)
    model.set_experts_implementation("eager")  # of others torch counts nothing
    llm = _run(str(save(model, tmp_path)), new=2, count=2, budget=None, gpu_batch_size=1, num_gpu_batches=2)
    spec, prompt = llm.model.spec, torch.tensor(prompts_of([PROMPT]))
    assert {bool(unit.experts) for unit in spec.units if unit.kind == "mlp"} == {False, True}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        cache = model(prompt, logits_to_keep=1, use_cache=True).past_key_values
    last = sum(counter.get_flop_counts()[f"{type(model).__name__}.model.layers.{LAYERS - 1}.mlp"].values())
    prefill = counter.get_total_flops() - last * (PROMPT - 1) / PROMPT  # only the last token goes through that
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(prompt[:, -1:], past_key_values=cache, logits_to_keep=1)
    assert llm.last_record.flops == pytest.approx(2 * (prefill + counter.get_total_flops()))
    expected = 0.0
    for key, group in spec.groups_by_key.items():
        numbers = sum(each.numel for each in group.tensors if len(each.shape) == 2 and each.name != "embed.tokens")
        expected += SIZE * numbers * (spec.chosen_share(2) if ".experts." in key else 2)
    assert llm.last_work.decode.weight_bytes(spec, "float32") == pytest.approx(expected)


@pytest.mark.parametrize("batches", [1, 3])
def test_streamed_weights_move_once_per_step_and_block(batches: int, checkpoint) -> None:
    """However many GPU batches share the step; each of them reads them from memory."""
    llm = _run(checkpoint()[1], count=2 * ROWS * batches, num_gpu_batches=batches, weights=DISK)
    spec, blocks, steps = llm.model.spec, 2, NEW - 1
    whole = spec.weight_bytes("float32")
    moved = [work.moved["disk->cpu", "weights"] for work in (llm.last_work.prefill, llm.last_work.decode)]
    assert moved == [blocks * whole, blocks * steps * whole]
    assert llm.last_work.decode.products["attn", ROWS] == blocks * batches * steps * LAYERS
    # The engine reads the tied embedding once more at the start of a block, and whole pages.
    assert 1 <= llm.last_record.bytes_moved["disk->cpu"] / sum(moved) < 1.5


def test_caches_and_hidden_states_that_live_elsewhere(checkpoint) -> None:
    llm = _run(checkpoint()[1], count=2 * ROWS, num_gpu_batches=2, weights=GPU, emulate_gpu="1GiB")
    work, rows, steps = llm.last_work, 2 * ROWS, NEW - 1
    kept = 10 * TOKEN * LAYERS * rows
    early, late = 2 * LAYERS - 1, 2
    hidden = {
        "prefill": (early * rows * PROMPT + late * rows) * HIDDEN * SIZE,
        "decode": steps * (early + late) * rows * HIDDEN * SIZE,
    }
    assert dict(work.prefill.moved) == {
        ("gpu->cpu", "cache"): kept,
        ("gpu->cpu", "hidden"): hidden["prefill"],
        ("cpu->gpu", "hidden"): hidden["prefill"],
    }
    assert dict(work.decode.moved) == {
        ("cpu->gpu", "cache"): steps * kept,
        ("gpu->cpu", "cache"): (steps - 1) * rows * LAYERS * TOKEN,  # what the last step adds nobody wants
        ("gpu->cpu", "hidden"): hidden["decode"],
        ("cpu->gpu", "hidden"): hidden["decode"],
    }
    assert work.decode.cache_bytes(llm.model.spec, "float32") == {"gpu": steps * LAYERS * rows * 11 * TOKEN}


def test_attention_beside_the_gpu_reads_host_memory(checkpoint) -> None:
    llm = _run(checkpoint()[1], weights=GPU, hidden=GPU, cpu_cache_compute=True, emulate_gpu="1GiB")
    assert set(llm.last_work.decode.cache_bytes(llm.model.spec, "float32")) == {"cpu"}
    assert not any(what == "cache" for _, what in llm.last_work.decode.moved)
    resources = llm.last_record.roofline["decode"]["resources"]
    assert resources["memory reads of the cpu"]["bytes"].keys() == {"cache"}
    assert resources["memory reads"]["bytes"].keys() == {"weights"}


@pytest.mark.parametrize("budget", [None, 9])
@pytest.mark.parametrize("batches", [1, 2])
def test_what_caches_held_when_rows_come_and_go(budget: int | None, batches: int, checkpoint, history: History) -> None:
    """Ragged prompts and answers, more than there are places: counted in another way, by the caches themselves."""
    lengths = [23, 40, 12, 33, 31, 8, 19, 27, 5, 40, 14, 3]
    new = [20, 3, 9, 1, 31, 2, 14, 5, 24, 4, 7, 38]
    eviction = EvictionConfig() if budget is None else EvictionConfig("h2o", budget=budget)
    policy = {**POLICY, "num_gpu_batches": batches, "gpu_batch_size": 3}
    params = [SamplingParams(max_new_tokens=each, ignore_eos=True) for each in new]
    with Engine(checkpoint()[1], dtype="float32", eviction=eviction, policy=policy, share_prefixes=False) as llm:
        llm.generate(prompts_of(lengths), params)
    work = llm.last_work
    seen = 0
    for (_, row), kept in history.items():
        seen += sum(len(heads[0]) + 1 for heads in kept[: new[row] - 1])  # kept after the step before, and the new one
    assert _both(work, lambda phase: sum(phase.cache_tokens.values())) == pytest.approx(seen)
    decoded = sum(each - 1 for each in new)
    attn = _both(work, lambda phase: sum(n * c for (kind, n), c in phase.products.items() if kind == "attn"))
    assert attn == pytest.approx(LAYERS * (sum(lengths) + decoded))
    assert _both(work, lambda phase: sum(n * c for (kind, n), c in phase.products.items() if kind == "head")) == (
        pytest.approx(sum(new))
    )
    pairs = _both(work, lambda phase: sum(phase.prompt_pairs.values()))
    assert pairs == pytest.approx(sum(length**2 for length in lengths))
    for phase in (work.prefill, work.decode):
        assert min([*phase.cache_tokens.values(), *phase.cache_calls.values(), *phase.products.values()]) >= 0


def _both(work: CountedWork, amount: Any) -> float:
    phases: list[PhaseWork] = [work.prefill, work.decode]
    return sum(amount(phase) for phase in phases)


def test_a_window_bounds_what_is_read(checkpoint) -> None:
    """Gemma's local layers see 12 tokens, whatever the cache; the keys of their prompts' queries likewise."""
    with Engine(checkpoint("gemma3")[1], dtype="float32", policy=POLICY, share_prefixes=False) as llm:
        llm.generate(prompts_of([PROMPT] * ROWS), max_new_tokens=NEW, ignore_eos=True)
        spec = llm.model.spec
    windows = [spec.arch.window_of(layer) for layer in range(spec.num_layers)]
    tokens, local = llm.last_work.decode.cache_tokens, windows.count(12)
    assert local > 0
    assert tokens[12, "cpu"] == local * (NEW - 1) * ROWS * 12
    assert tokens[None, "cpu"] == windows.count(None) * ROWS * sum(PROMPT + step for step in range(1, NEW))
    assert llm.last_work.prefill.prompt_pairs[12, 12] == ROWS * PROMPT * 12


def test_one_token_each_is_all_prefill(checkpoint) -> None:
    llm = _run(checkpoint()[1], new=1)
    assert llm.last_work.decode.steps == 0
    assert not llm.last_work.decode.products
    assert llm.last_record.roofline["decode"]["resources"] == {}


DEPENDENCY = [
    ("full", {}),
    ("h2o", {"budget": 10}),
    ("rkv", {"budget": 12}),
    ("snapkv", {"budget": 20}),
    ("streaming", {"budget": 30}),
]


@pytest.mark.parametrize(("name", "changes"), DEPENDENCY, ids=[name for name, _ in DEPENDENCY])
def test_dependency_is_what_queries_had_before_them(
    name: str, changes: dict[str, Any], checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, attend = list[int](), KVCache.attend

    def counted(cache: KVCache, *args: Any, **kwargs: Any) -> Tensor:
        held.extend(len(cache.kept(row, 0)) + 1 for row in range(cache.shape.batch))
        return attend(cache, *args, **kwargs)

    monkeypatch.setattr(KVCache, "attend", counted)
    lengths, new = (24, 9, 1), 20
    with Engine(checkpoint()[1], dtype="float32", eviction=EvictionConfig(name, **changes), policy=POLICY) as llm:
        llm.generate(prompts_of(lengths), max_new_tokens=new, ignore_eos=True)
    assert llm.last_record is not None
    assert llm.last_record.dependency == pytest.approx(sum(lengths) + sum(held) / LAYERS)
    if name == "full":
        assert llm.last_record.dependency == sum(length * new + new * (new - 1) // 2 for length in lengths)


def test_dependency_of_a_score(checkpoint) -> None:
    with Engine(checkpoint()[1], dtype="float32", policy=POLICY) as llm:
        llm.score([([5, 6, 7], [8, 9])])
    assert llm.last_record is not None
    assert llm.last_record.dependency == 3 + 4
