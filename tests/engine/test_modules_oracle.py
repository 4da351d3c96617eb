"""transformers' modules under eviction against the slow oracle: what each layer and head keeps after every step, and
the probabilities of tokens. The oracle has transformers' attention read what is kept, and nothing of the engine."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from h2o_flexgen import Prompt, Span
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.known import known_config
from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.models.hf.shrink import random_model, shrunk
from tests.engine.compare import CLOSE, History, assert_engine_equals_oracle, assert_outputs_equal
from tests.engine.test_modules import TYPES, VOCAB, WINDOWED, tiny
from tests.oracles.model import OracleRun, oracle_generate
from tests.oracles.spans import with_spans
from tests.policy_matrix import LATER, POLICIES, THEN_H2O
from tests.tiny import TooCloseToCall, decided, prompts_of

KINDS: dict[str, dict[str, Any]] = {
    "olmo": {"clip_qkv": 0.9},
    "helium": {"head_dim": 12},
    "gemma2": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "gemma4_text": {},
    "qwen3_5_text": {
        **{"num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
}
"""And what is changed from the sizes that other tests take."""
SHARING = {"head_dim": 16, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": VOCAB, **WINDOWED}
APART = {"olmo": KINDS["olmo"], "gpt_oss": {}, "gemma3n_text": SHARING, "qwen3_5_text": KINDS["qwen3_5_text"]}
"""Models whose layers have several KV heads: plain ones, sinks and windows, layers that read others' caches, states."""
SPARSE = {
    "deepseek_v32": {**TYPES["deepseek_v3"], "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16},
    **{kind: KINDS[kind] for kind in ("gemma2", "gpt_oss")},
}
"""Layers with indexers, which choose more tokens than there are, and layers with windows."""
_FEW = {**SPARSE["deepseek_v32"], "index_topk": 4, "index_n_heads": 16}
CHOOSING = {
    "deepseek_v32, few": _FEW,
    "glm_moe_dsa, few": {**_FEW, "index_topk": 13, "indexer_types": ["full", "shared", "full"]},
}
"""Indexers that choose fewer tokens than most rows keep, and in the second for two layers."""
ROWS = {row.name: row for row in (*POLICIES, *LATER, *THEN_H2O)}
NAMES = ("h2o", "snapkv", "snapkv+h2o", "streaming")
MODULES = {"model_impl": "transformers"}


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory):
    @cache
    def make(kind: str) -> tuple[PreTrainedModel, str]:
        sizes = {**SPARSE, **CHOOSING, **KINDS, **APART}[kind]
        model, folder = tiny(kind.partition(",")[0], **sizes), tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(folder)
        spec = spec_from_config(json.loads((folder / "config.json").read_text()), kind, "transformers")
        if isinstance(spec, ModuleSpec) and spec.alone:
            pytest.skip("its sequences go through the modules one by one, without budgets")
        return model, str(folder)

    return make


@pytest.mark.turns
@pytest.mark.parametrize("kind", APART)
def test_heads_that_look_far_keep_more(kind: str, checkpoint_of, history: History) -> None:
    model = checkpoint_of(kind)
    heads, last = model[0].config.num_key_value_heads, 3 if kind == "qwen3_5_text" else 0
    changes = {"budget": 6, "budget_split": "far", "far_layers": ((1, 1), (last, 0)), "kv_heads": heads}
    changes["cacheless"] = {"qwen3_5_text": (0, 2), "gemma3n_text": (2,)}.get(kind, ())
    assert_engine_equals_oracle(model, ROWS["h2o"], [17, 26, 9, 22], 7, history, places=MODULES, **changes)
    assert len(history[1, 0][-1][0]) < len(history[1, 0][-1][1])


@pytest.mark.turns
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_equals_the_oracle(kind: str, name: str, checkpoint_of, history: History) -> None:
    """In ragged GPU batches and alone."""
    assert_engine_equals_oracle(checkpoint_of(kind), ROWS[name], [17, 26, 9, 22], 7, history, places=MODULES)


@pytest.mark.parametrize("kind", SPARSE)
def test_a_fifth_of_sparse_layers_equals_the_oracle(kind: str, checkpoint_of, history: History) -> None:
    assert_engine_equals_oracle(checkpoint_of(kind), ROWS["h2o"], [17, 26], 5, history, places=MODULES, ratio=0.2)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["h2o", "streaming"])
@pytest.mark.parametrize("kind", CHOOSING)
def test_what_indexers_choose_of_what_is_kept_equals_the_oracle(
    kind: str, name: str, checkpoint_of, history: History
) -> None:
    """Scores count what was chosen alone, of rows that keep more than is chosen beside one that does not."""
    row, lengths = ROWS[name], [17, 26, 9, 22]
    assert_engine_equals_oracle(checkpoint_of(kind), row, lengths, 7, history, places=MODULES, ratio=0.5)


def test_glm_flash_on_disk_equals_transformers_and_the_oracle(tmp_path: Path, history: History) -> None:
    """The shape of GLM-4.7-Flash made tiny, by what `auto` takes for it: whole, a fifth of it, and in 4 bits."""
    model = random_model(shrunk({**(known_config("glm-4.7-flash") or {}), "torch_dtype": "float32"}))
    model.save_pretrained(tmp_path)
    disk = {"weights": {"disk": 1.0}, "cache": {"disk": 1.0}}
    places = {"policy": {"gpu_batch_size": 3, **disk}, "offload_dir": str(tmp_path)}
    checkpoint, lengths = (model, str(tmp_path)), [17, 26]
    assert_engine_equals_oracle(checkpoint, ROWS["full"], lengths, 5, history, places=places)
    assert_engine_equals_oracle(checkpoint, ROWS["h2o"], lengths, 5, history, places=places, ratio=0.2)
    prompts, settings = prompts_of(lengths), {"max_new_tokens": 5, "ignore_eos": True, "logprobs": 0}
    found = []
    for bits, where in ((16, disk), (4, disk), (4, {})):
        policy = {"gpu_batch_size": 1, "num_gpu_batches": 2, **where}
        eviction = EvictionConfig("h2o", ratio=0.5)
        how = {"policy": policy, "cache_bits": bits, "eviction": eviction, "offload_dir": str(tmp_path)}
        with Engine(str(tmp_path), dtype="float32", **how) as llm:
            assert isinstance(llm.model.spec, ModuleSpec)
            found.append([(each.token_ids, each.logprobs) for each in llm.generate(prompts, **settings)])
    plain, packed, again = found
    assert [ids for ids, _ in packed] == [ids for ids, _ in again]
    for (_, exact), (_, rounded), (_, same) in zip(plain, packed, again, strict=True):
        assert rounded[0] == pytest.approx(exact[0], abs=1e-3), "prompts attend to what is not rounded yet"
        assert rounded == pytest.approx(same, abs=1e-3)


SPANS = {23: ((2, 4), (9, 12)), 40: ((30, 33),), 12: ()}


@pytest.mark.turns
@pytest.mark.parametrize(
    ("policy", "rule"), [("h2o", "whitelist"), ("h2o", "fair"), ("streaming", "whitelist"), ("snapkv", "fair")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_spans_equal_the_oracle(kind: str, policy: str, rule: str, checkpoint_of, history: History) -> None:
    (model, folder), row, new = checkpoint_of(kind), ROWS[policy], 5
    eviction, oracle = row.eviction(ratio=0.6, spans=rule), with_spans(row.oracle, rule)

    def answer(row_id: int, prompt: list[int]) -> OracleRun:
        run = oracle_generate(model, prompt, new, oracle, eviction, row_id, SPANS[len(prompt)])
        if run.closest <= CLOSE:
            raise TooCloseToCall(f"{run.closest} between two scores or logits")
        return run

    prompts, runs = decided(prompts_of(list(SPANS)), answer)
    marked = [Prompt(ids, [Span(a, b, f"at {a}", keep=True) for a, b in SPANS[len(ids)]]) for ids in prompts]
    history.clear()
    with Engine(folder, dtype="float32", eviction=eviction, **MODULES) as llm:
        outputs = llm.generate(marked, max_new_tokens=new, ignore_eos=True, logprobs=0)
    for i, (run, output) in enumerate(zip(runs, outputs, strict=True)):
        assert_outputs_equal(run, output, history, i, 1e-3)
