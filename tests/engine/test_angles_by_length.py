"""Angles by length as transformers' generate has them: Phi-3 computes all keys anew when a sequence passes the original
context, others leave them as they are, and what a sequence may become changes nothing before that."""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.fold import Fold
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.self_test import way_by_test
from h2o_flexgen.errors import ContextLengthError, UsageError
from tests.checkpoint.gguf_files import SIZES, write_gguf
from tests.engine.test_modules import tiny
from tests.tiny import FAMILIES, make_model, prompts_of, save

ORIGINAL, NEW = 16, 12
LENGTHS = [1, 4, 5, 7, 15, 16, 17, 30]
"""The last token is only sampled: 4 + 12 stays below the original context, 5 + 12 at it; others cross it, or are above.
That of llama-dynamic is 32."""


@pytest.fixture(scope="module", params=["phi3-longrope", "llama-gqa", "llama-dynamic"])
def by_length(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, str]:
    """A model of each kind, and its folder. That of llama-gqa is longrope, too."""
    rope = {**FAMILIES["phi3-longrope"].settings["rope_parameters"], "original_max_position_embeddings": ORIGINAL}
    changes = {} if request.param == "llama-dynamic" else {"rope_parameters": rope}
    if request.param == "phi3-longrope":
        changes["original_max_position_embeddings"] = ORIGINAL
    model = make_model(request.param, **changes)
    folder = save(model, tmp_path_factory.mktemp(request.param))
    model.generation_config.eos_token_id = None
    return model, str(folder)


def expected(model: PreTrainedModel, prompt: list[int], new: int = NEW) -> list[int]:
    ids = torch.tensor([prompt])
    model(torch.tensor([[2]]), use_cache=False)  # dynamic angles start with a short sequence
    return model.generate(ids, max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def ids_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


SETTINGS = {"max_new_tokens": NEW, "ignore_eos": True}


@pytest.mark.turns
@pytest.mark.parametrize("block", [(1, 1), (3, 2), (8, 1)], ids=str)
def test_greedy_tokens_are_those_of_generate(block: tuple[int, int], by_length) -> None:
    model, folder = by_length
    prompts = prompts_of(LENGTHS)
    policy = {"gpu_batch_size": block[0], "num_gpu_batches": block[1]}
    with Engine(folder, dtype="float32", policy=policy) as llm:
        outputs = llm.generate(prompts, logprobs=0, **SETTINGS)
        record = llm.last_record
    assert ids_of(outputs) == [expected(model, prompt) for prompt in prompts]
    assert [output.prompt_ids for output in outputs] == prompts
    assert all(len(output.logprobs) == NEW for output in outputs)
    assert (record.sequences, record.prompt_tokens) == (len(prompts), sum(LENGTHS))
    assert record.generated_tokens == NEW * len(prompts)


@pytest.mark.turns
@pytest.mark.parametrize("eviction", [None, EvictionConfig("h2o", budget=8)], ids=["full", "h2o"])
def test_the_most_tokens_change_nothing(eviction: EvictionConfig | None, by_length) -> None:
    _, folder = by_length
    prompts = prompts_of(LENGTHS)
    with Engine(folder, dtype="float32", eviction=eviction or EvictionConfig()) as llm:
        most = ids_of(llm.generate(prompts, max_new_tokens=20, ignore_eos=True))
        for new in (1, 6, 11):
            fewer = ids_of(llm.generate(prompts, max_new_tokens=new, ignore_eos=True))
            assert fewer == [tokens[:new] for tokens in most]


@pytest.mark.turns
@pytest.mark.parametrize("name", ["full", "h2o", "streaming", "snapkv"])
def test_neighbours_change_nothing(name: str, by_length) -> None:
    _, folder = by_length
    eviction = EvictionConfig(name) if name == "full" else EvictionConfig(name, budget=8)
    prompts = prompts_of(LENGTHS)
    policy = {"gpu_batch_size": 3, "num_gpu_batches": 2}
    with Engine(folder, dtype="float32", eviction=eviction, policy=policy) as llm:
        together = ids_of(llm.generate(prompts, **SETTINGS))
    with Engine(folder, dtype="float32", eviction=eviction) as llm:
        assert together == [ids_of(llm.generate([prompt], **SETTINGS))[0] for prompt in prompts]


def test_samples_penalties_and_stops_go_on_across_it(by_length) -> None:
    """What a row has drawn, seen and told before its keys are computed anew counts after it."""
    model, folder = by_length
    prompt = prompts_of([10])[0]
    ids = torch.tensor([prompt])
    with Engine(folder, dtype="float32") as llm:
        penalised = {"max_new_tokens": NEW, "repetition_penalty": 1.7, "min_new_tokens": NEW, "eos_token_id": 96}
        told = model.generate(ids, do_sample=False, **penalised)
        assert torch.equal(llm.generate_ids(ids, **penalised), told)
        alone = llm.generate([prompt], do_sample=True, temperature=1.5, seed=3, **SETTINGS)[0].token_ids
        again = llm.generate([prompt], do_sample=True, temperature=1.5, seed=3, max_new_tokens=9, ignore_eos=True)
        assert again[0].token_ids == alone[:9]
        greedy = expected(model, prompt)
        eos = next(token for i, token in enumerate(greedy) if i >= 6 and token not in greedy[:i])
        [stopped] = llm.generate([prompt], max_new_tokens=NEW, eos_token_id=eos)
        assert stopped.token_ids == greedy[: greedy.index(eos) + 1]
        assert stopped.finish_reason == "stop"


def test_an_end_just_at_the_crossing(by_length) -> None:
    model, folder = by_length
    prompt = prompts_of([9])[0]
    greedy = expected(model, prompt)
    at = ORIGINAL + 1 - len(prompt)  # tokens with which the sequence has passed the original context
    with Engine(folder, dtype="float32") as llm:
        assert llm.generate([prompt], max_new_tokens=at, ignore_eos=True)[0].token_ids == greedy[:at]
        [stopped] = llm.generate([prompt], max_new_tokens=NEW, eos_token_id=greedy[at - 1])
    assert stopped.token_ids == greedy[: greedy.index(greedy[at - 1]) + 1]


def test_eviction_goes_on_as_after_a_prompt(by_length) -> None:
    """Phi-3: what is kept after the crossing is what a prompt of as many tokens leaves."""
    model, folder = by_length
    if model.config.model_type != "phi3":
        pytest.skip("leaves its keys as they are")
    prompt = prompts_of([9])[0]
    at = ORIGINAL + 1 - len(prompt)
    with Engine(folder, dtype="float32", eviction=EvictionConfig("h2o", budget=8)) as llm:
        [output] = llm.generate([prompt], max_new_tokens=20, ignore_eos=True)
        [rest] = llm.generate([prompt + output.token_ids[:at]], max_new_tokens=20 - at, ignore_eos=True)
    assert output.token_ids[at:] == rest.token_ids


def test_a_row_that_is_run_again_from_its_start_forgets_its_turn(by_length) -> None:
    _, folder = by_length
    with Engine(folder, dtype="float32") as llm:
        [row] = llm._reader().read([prompts_of([9])[0]], SamplingParams(**SETTINGS))
        before = (row.given_ids, row.steps, row.turn)
        row.token_ids.extend([5] * 8)
        if row.paused:
            row.take_turn()
            assert (row.steps, row.remaining, row.prompt_tokens) == (NEW - 8, NEW - 8, 9)
        row.restart()
    assert (row.prompt_ids, row.steps, row.turn) == before
    assert row.given_ids == row.prompt_ids


def test_the_plan_has_room_for_the_keys_that_are_computed_anew(by_length) -> None:
    """What does not fit is refused before any work, not when the sequence passes the original context."""
    model, folder = by_length
    plans = []
    with Engine(folder, dtype="float32") as llm:
        llm.on_plan = plans.append
        llm.generate(prompts_of([5]), max_new_tokens=40, ignore_eos=True)
    lengths = [(plan.request.workload.prompt_len, plan.request.workload.gen_len) for plan in plans]
    assert lengths == ([(17, 28)] * 2 if model.config.model_type == "phi3" else [(5, 40)])


def test_modules_of_transformers_have_the_trained_context(by_length) -> None:
    """Within it angles do not depend on the length; beyond, modules would take those of the longest row for all."""
    model, folder = by_length
    most = 32 if model.config.max_position_embeddings == 32 else ORIGINAL
    prompts = prompts_of([1, 4, most - NEW, 3])
    with Engine(folder, dtype="float32", model_impl="transformers") as llm:
        assert ids_of(llm.generate(prompts, **SETTINGS)) == [expected(model, prompt) for prompt in prompts]
        with pytest.raises(ContextLengthError, match=f"context of .* is {most} tokens"):
            llm.generate(prompts_of([most - NEW + 1]), **SETTINGS)


@pytest.mark.parametrize("told", [{"original_max_position_embeddings": ORIGINAL}, {}], ids=str)
def test_modules_have_the_context_that_yarn_stretches(told: dict[str, int], tmp_path: Path) -> None:
    """As the families have it, where max_position_embeddings is the one before."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, **told}
    model = make_model("llama-gqa", rope_parameters=rope, max_position_embeddings=ORIGINAL)
    model.generation_config.eos_token_id = None
    prompts = prompts_of([4, 4 * ORIGINAL - NEW])
    for impl in ("native", "transformers"):
        with Engine(str(save(model, tmp_path)), dtype="float32", model_impl=impl) as llm:
            assert llm.model.spec.max_positions == 4 * ORIGINAL
            assert ids_of(llm.generate(prompts, **SETTINGS)) == [expected(model, prompt) for prompt in prompts]


_BY_LENGTH = {
    "phimoe": {"rope_type": "longrope", "short_factor": [1.1] * 6, "long_factor": [3.0] * 6, "short_mscale": 1.3},
    "internlm3": {"rope_type": "dynamic", "factor": 6.0},
}


@pytest.mark.parametrize("kind", _BY_LENGTH)
def test_angles_of_types_without_a_family(kind: str, tmp_path: Path) -> None:
    """As their checkpoints have them, Phi-3.5-MoE's with scales of their own."""
    rope = {**_BY_LENGTH[kind], "rope_theta": 10000.0}
    if kind == "phimoe":
        rope |= {"long_mscale": 1.6, "original_max_position_embeddings": 2 * ORIGINAL}
    model = tiny(kind, rope_parameters=rope, max_position_embeddings=2 * ORIGINAL if kind == "internlm3" else 128)
    model.generation_config.eos_token_id = None
    prompts = prompts_of([1, 5, 2 * ORIGINAL - NEW, 3])
    with Engine(str(save(model, tmp_path)), dtype="float32") as llm:
        assert llm.model.spec.max_positions == 2 * ORIGINAL
        assert ids_of(llm.generate(prompts, **SETTINGS)) == [expected(model, prompt) for prompt in prompts]
    found = way_by_test(json.loads((tmp_path / "config.json").read_text()), Engine)
    assert found.how == "packed", found.why


def test_a_fold_that_would_come_back_is_refused(by_length) -> None:
    model, folder = by_length
    fold = Fold(trigger=5, keep=(5,))
    with Engine(folder, dtype="float32") as llm:
        if model.config.model_type != "phi3":
            pytest.skip("leaves its keys as they are")
        with pytest.raises(UsageError, match="computes all keys anew after 16 tokens"):
            llm.generate(prompts_of([9]), fold=fold, **SETTINGS)
        assert llm.generate(prompts_of([4]), fold=fold, **SETTINGS)


def test_gguf_of_phi3(tmp_path: Path) -> None:
    factors = {"short": np.linspace(1, 2, 8, dtype=np.float32), "long": np.linspace(2, 9, 8, dtype=np.float32)}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL}
    rope |= {f"{name}_factor": values.tolist() for name, values in factors.items()}
    model = make_model("phi3", **SIZES, rope_parameters=rope, original_max_position_embeddings=ORIGINAL)
    model.generation_config.eos_token_id = None

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
        stretch = model.config.max_position_embeddings / ORIGINAL
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(ORIGINAL)))

    tensors = {f"rope_factors_{name}.weight": values for name, values in factors.items()}
    file = write_gguf(tmp_path / "phi3.gguf", model, extra=extra, tensors=tensors)
    prompts = prompts_of(LENGTHS)
    with Engine(str(file), dtype="float32") as llm:
        assert ids_of(llm.generate(prompts, **SETTINGS)) == [expected(model, prompt) for prompt in prompts]
