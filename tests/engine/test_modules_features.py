"""What a native family has, transformers' modules have too: each setting both ways, and the results are the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen import Prompt, Span
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.fold import Fold
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.sequence import RequestOutput
from tests.programs import CONFIG, write_model
from tests.tiny import make_model, prompts_of, save

CPU, DISK, GPU, MIXED = {"cpu": 1.0}, {"disk": 1.0}, {"gpu": 1.0}, {"cpu": 0.5, "disk": 0.5}
THREE = {"gpu": 0.3, "cpu": 0.3, "disk": 0.4}
H2O = EvictionConfig("h2o", ratio=0.4)
KINDS = ("llama-gqa", "qwen3", "olmoe")
BLOCK = {"gpu_batch_size": 2, "num_gpu_batches": 3}
HEADER, OTHER = prompts_of([36, 20], seed=3)
PROMPTS = [HEADER + tail[1:] for tail in prompts_of([4, 9, 7], seed=1)] + prompts_of([3, 40, 21, 12])
PROMPTS += [OTHER + tail[1:] for tail in prompts_of([5, 30], seed=2)]
NEW = [9, 2, 14, 5, 11, 1, 7, 12, 3]
"""Rows leave and others enter while blocks run."""

ENGINES: dict[str, dict[str, Any]] = {
    "one block": {"policy": {"gpu_batch_size": 9, "num_gpu_batches": 1}},
    "refills": {"policy": {"gpu_batch_size": 2, "num_gpu_batches": 1}},
    "refills and eviction": {"policy": BLOCK, "eviction": H2O},
    "prompts in parts": {"policy": {**BLOCK, "prefill_chunk": 16}},
    "prompts in parts and eviction": {"policy": {**BLOCK, "prefill_chunk": 16}, "eviction": H2O},
    "prefixes not shared": {"policy": BLOCK, "share_prefixes": False},
    "prefixes kept": {"policy": BLOCK, "prefix_mem": "64MiB", "eviction": H2O},
    "weights on disk": {"policy": {**BLOCK, "weights": DISK}},
    "weights on cpu and disk": {"policy": {**BLOCK, "weights": MIXED, "lookahead": 3}},
    "caches on disk": {"policy": {**BLOCK, "cache": DISK}, "eviction": H2O},
    "caches on cpu and disk, no overlap": {"policy": {**BLOCK, "cache": MIXED, "overlap": False}, "eviction": H2O},
    "gpu": {"policy": {**BLOCK, "weights": GPU, "cache": GPU}, "emulate_gpu": "1GiB"},
    "weights on three tiers": {"policy": {**BLOCK, "weights": THREE, "cache": GPU}, "emulate_gpu": "1GiB"},
    "caches on three tiers": {
        "policy": {**BLOCK, "weights": CPU, "cache": THREE},
        "emulate_gpu": "1GiB",
        "eviction": H2O,
    },
    "caches in 8 bits": {"policy": BLOCK, "cache_bits": 8, "eviction": H2O},
    "caches in 4 bits on disk": {"policy": {**BLOCK, "cache": DISK}, "cache_bits": 4},
    "caches in 8 and 4 bits": {"policy": BLOCK, "cache_bits": (8, 4)},
    "weights in 8 bits": {"policy": {**BLOCK, "weights": DISK}, "weight_bits": 8, "weight_group": 32},
    "weights in 4 bits": {"policy": BLOCK, "weight_bits": 4, "weight_group": 32, "weight_importance": False},
    "checksums": {"policy": {**BLOCK, "weights": DISK}, "verify": "always"},
    "trace": {"policy": BLOCK, "trace": True},
    "finite": {"policy": BLOCK, "check_finite": True},
    "the prompt stays": {"policy": BLOCK, "eviction": EvictionConfig("h2o", budget=50, keep_prompt=True)},
    "pyramid": {"policy": BLOCK, "eviction": EvictionConfig("pyramidkv", ratio=0.6)},
    "shares of the budget": {
        "policy": BLOCK,
        "eviction": EvictionConfig("h2o", ratio=0.4, sinks=2, recent_ratio=0.1),
    },
    "random eviction": {"policy": BLOCK, "eviction": EvictionConfig("random", ratio=0.4, seed=5), "seed": 5},
    "prompts read twice": {"policy": BLOCK, "eviction": EvictionConfig("kvzip+h2o", ratio=0.6)},
    "eviction in bursts": {"policy": BLOCK, "eviction": EvictionConfig("rkv", ratio=0.4)},
}
"""Settings of the engine."""


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda kind: str(save(make_model(kind), tmp_path_factory.mktemp(kind))))


def both(folder: str, offload: Path, run: Any, **settings: Any) -> list[tuple[Any, Engine]]:
    """What `run` gives of an engine by each way, and the engine, closed."""
    found = []
    for impl in ("native", "transformers"):
        with Engine(folder, dtype="float32", model_impl=impl, offload_dir=str(offload), **settings) as llm:
            found.append((run(llm), llm))
    return found


def same(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.error is None
        assert one.token_ids == other.token_ids
        assert (one.index, one.sample, one.finish_reason, one.text) == (
            other.index,
            other.sample,
            other.finish_reason,
            other.text,
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.mark.turns
@pytest.mark.parametrize(
    ("name", "kind"), [(name, KINDS[i % len(KINDS)]) for i, name in enumerate(ENGINES)], ids=lambda each: each
)
def test_settings_of_the_engine(name: str, kind: str, checkpoint_of, tmp_path: Path) -> None:
    params, scores = [SamplingParams(max_new_tokens=new, ignore_eos=True, logprobs=0) for new in NEW], []

    def run(llm: Engine) -> list[RequestOutput]:
        scores.append([score.logprob for score in llm.score([(PROMPTS[4][:30], PROMPTS[4][30:]), (HEADER, OTHER[:5])])])
        return llm.generate(PROMPTS, params)

    (ours, native), (theirs, modules) = both(checkpoint_of(kind), tmp_path, run, **ENGINES[name])
    packed = "cache_bits" in ENGINES[name]  # a last digit of a key may make another code of it there
    assert scores[1] == pytest.approx(scores[0], abs=0.1 if packed else 1e-3)
    if not packed:
        same(theirs, ours)
    one, other = native.last_record, modules.last_record
    assert one is not None
    assert other is not None
    assert other.computed_prompt_tokens == one.computed_prompt_tokens
    for field in ("kv_bytes", "sequences", "generated_tokens", "eviction", "quantization", "device"):
        assert getattr(other, field) == getattr(one, field), field
    if one.experts is not None:  # behind the last attention families compute the last tokens of prompts alone
        assert other.experts["read"] >= one.experts["read"]
    for shares in ("weights", "cache"):
        assert other.policy[shares].keys() == one.policy[shares].keys()
    links = {link for link, moved in one.bytes_moved.items() if moved and "disk" in link}
    assert {link for link, moved in other.bytes_moved.items() if moved and "disk" in link} == links


SAMPLINGS: dict[str, dict[str, Any]] = {
    "drawn": {"do_sample": True, "temperature": 1.3, "top_k": 20, "seed": 3},
    "drawn from the likeliest": {"do_sample": True, "top_p": 0.8, "min_p": 0.02, "seed": 4},
    "several answers": {"do_sample": True, "num_return_sequences": 3, "seed": 5},
    "penalties": {"repetition_penalty": 1.6, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "presence_penalty": 0.4},
    "the likeliest beside": {"logprobs": 4},
    "an end": {"eos_token_id": tuple(range(3, 20)), "ignore_eos": False},
    "biases": {"sequence_bias": (((9,), 3.0),), "suppress_tokens": (5, 6), "typical_p": 0.9, "do_sample": True},
}


@pytest.mark.turns
@pytest.mark.parametrize("name", SAMPLINGS)
def test_ways_to_choose_tokens(name: str, checkpoint_of, tmp_path: Path) -> None:
    settings = {"max_new_tokens": 8, "ignore_eos": True, "logprobs": 0, **SAMPLINGS[name]}
    found = both(
        checkpoint_of("qwen3"), tmp_path, lambda llm: llm.generate(PROMPTS, **settings), policy=BLOCK, eviction=H2O
    )
    same(found[1][0], found[0][0])
    for one, other in zip(found[0][0], found[1][0], strict=True):
        if one.top_logprobs is not None:
            assert [list(each) for each in other.top_logprobs] == [list(each) for each in one.top_logprobs]


@pytest.mark.turns
@pytest.mark.parametrize("kind", KINDS)
def test_scores_streams_and_tensors(kind: str, checkpoint_of, tmp_path: Path) -> None:
    """The ways to call an engine beside `generate`, eviction being active in all of them."""
    pairs = [(PROMPTS[i][:n], PROMPTS[i + 1][:7]) for i, n in enumerate((20, 3, 9))] + [([], PROMPTS[3])]
    ids = torch.tensor([[1] * 20 + PROMPTS[3] + PROMPTS[3][:1], PROMPTS[5] + PROMPTS[3][:3]])
    mask = torch.tensor([[0] * 20 + [1] * 4, [1] * 24])

    def run(llm: Engine) -> Any:
        scores = [(each.is_greedy, pytest.approx(each.logprob, abs=1e-3)) for each in llm.score(pairs)]
        streamed = sorted((out.index, out.token_ids) for out in llm.stream(PROMPTS, max_new_tokens=6, ignore_eos=True))
        return scores, streamed, llm.generate_ids(ids, mask, max_new_tokens=6, ignore_eos=True).tolist()

    (ours, _), (theirs, _) = both(checkpoint_of(kind), tmp_path, run, policy=BLOCK, eviction=H2O)
    assert theirs == ours


@pytest.mark.turns
@pytest.mark.parametrize("kind", KINDS)
def test_spans_and_folds(kind: str, checkpoint_of, tmp_path: Path) -> None:
    marked = [
        Prompt(ids, [Span(1, 3, "first", keep=True), Span(len(ids) - 3, len(ids) - 1, "last")])
        for ids in PROMPTS
        if len(ids) > 12
    ]
    for rule in ("whitelist", "fair", None):
        eviction = EvictionConfig("h2o", ratio=0.6, spans=rule)
        found = both(
            checkpoint_of(kind),
            tmp_path,
            lambda llm: llm.generate(marked, max_new_tokens=6, ignore_eos=True, logprobs=0),
            eviction=eviction,
        )
        same(found[1][0], found[0][0])
        assert [each.kept for each in found[1][0]] == [each.kept for each in found[0][0]]
    fold = Fold(trigger=5, keep=(5,))
    triggers = {"sequence_bias": (((5,), 2.0),), "fold": fold}
    found = both(
        checkpoint_of(kind),
        tmp_path,
        lambda llm: llm.generate(PROMPTS, max_new_tokens=12, ignore_eos=True, logprobs=0, **triggers),
    )
    same(found[1][0], found[0][0])


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a tokenizer."""
    return str(write_model(tmp_path_factory.mktemp("talker"), **LLAMA))


def test_texts_stops_and_schemas(talker: str, tmp_path: Path) -> None:
    texts = ["Once there was", "a", "Twice there was a cat that", "12"]
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {**schema, "required": ["n"]}}}
    for settings in (
        {"stop_strings": tuple("abcdefgh")},
        {"stop_strings": ("e",), "do_sample": True, "seed": 2},
        {"response_format": form, "max_new_tokens": 40},
        {"response_format": form, "max_new_tokens": 40, "do_sample": True, "seed": 2, "temperature": 2.0},
    ):
        found = both(
            talker,
            tmp_path,
            lambda llm, settings=settings: llm.generate(
                texts,
                **{"max_new_tokens": 12, "ignore_eos": "response_format" not in settings, "logprobs": 0, **settings},
            ),
            policy=BLOCK,
        )
        same(found[1][0], found[0][0])
    assert CONFIG["vocab_size"] == 99


def test_prefixes_in_a_folder_serve_both_ways(checkpoint_of, tmp_path: Path) -> None:
    """Modules and a family find what they themselves have left, and not what the other has: keys may be laid out
    otherwise."""
    kept: dict[str, Any] = {"prefix_dir": str(tmp_path / "kept"), "prefix_mem": "8MiB", "policy": BLOCK}
    counts = []

    def run(llm: Engine) -> list[RequestOutput]:
        outputs = llm.generate(PROMPTS, max_new_tokens=5, ignore_eos=True, logprobs=0)
        assert llm.prefixes is not None
        counts.append(llm.prefixes.counts.from_disk)
        return outputs

    for _ in range(2):
        found = both(checkpoint_of("qwen3"), tmp_path / "offload", run, **kept)
        same(found[1][0], found[0][0])
    assert counts[:1] == [0]
    assert all(counts[2:])
