"""Every decoder of transformers, tiny: packed or row by row it gives transformers' own tokens, or it is refused.

A twentieth of them runs in the fast tier. `python -m tests.engine.test_modules_sweep TYPE ...` says what is found of
single types.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.self_test import prompts_of, way_by_test
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.hf.build import model_types
from h2o_flexgen.models.hf.shrink import VOCAB, random_model, shrunk
from h2o_flexgen.models.hf.trusted import HIGHEST, LOWEST, REFUSED, ROWS, SINCE, TRUSTED, release

DECODERS = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LISTED = sorted(kind for kind in (TRUSTED | set(ROWS)) & model_types() if release() >= SINCE.get(kind, release()))
"""Some are not in the lowest release."""


def tiers(kinds: list[str]) -> list[Any]:
    """One in twenty of them in the fast tier."""
    return [pytest.param(kind, marks=() if i % 20 == 0 else pytest.mark.slow) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("kind", tiers(LISTED))
def test_a_listed_type_gives_transformers_tokens(kind: str) -> None:
    """From memory and disk, in two shapes of a block."""
    found = way_by_test({"model_type": kind}, Engine)
    assert found.how == ("packed" if kind in TRUSTED else "rows"), found.why


@pytest.mark.parametrize("kind", tiers([kind for kind in LISTED if kind in TRUSTED]))
def test_budgets_hold_in_every_packed_type(kind: str, tmp_path: Path) -> None:
    """With H2O at half a sequence's tokens are its own, from memory and disk, in two shapes of a block."""
    random_model(shrunk({"model_type": kind})).save_pretrained(tmp_path)
    found = []
    for shape, tier in (((2, 2), "cpu"), ((1, 3), "disk")):
        policy = {"gpu_batch_size": shape[0], "num_gpu_batches": shape[1], "weights": {tier: 1.0}}
        how: dict[str, Any] = {"dtype": "float32", "model_impl": "transformers", "policy": policy}
        with Engine(str(tmp_path), eviction=EvictionConfig("h2o", ratio=0.5), offload_dir=str(tmp_path), **how) as llm:
            outputs = llm.generate(prompts_of(VOCAB), max_new_tokens=6, ignore_eos=True)
        found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]
    assert all(len(tokens) == 6 for tokens in found[0])


@pytest.mark.parametrize("kind", tiers(sorted(REFUSED)))
def test_a_refused_type_says_why(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ModelError, match=re.escape(REFUSED[kind])):
        Engine(str(tmp_path), weights="dummy", model_impl="transformers")


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(DECODERS - TRUSTED - set(ROWS) - set(REFUSED)))
def test_a_type_that_is_not_listed_is_tested_first(kind: str) -> None:
    """What is found is one of three, and of what does not run a reason is told."""
    found = way_by_test({"model_type": kind}, Engine)
    assert found.why or found.how == "packed"


def test_what_looks_at_later_tokens_is_refused() -> None:
    found = way_by_test({"model_type": "gemma3_text", "use_bidirectional_attention": True}, Engine)
    assert found.how == "refused"
    assert "no decoder" in found.why


def test_a_type_is_in_one_list_alone() -> None:
    assert not TRUSTED & set(ROWS)
    assert not (TRUSTED | set(ROWS)) & set(REFUSED)
    assert set(SINCE) <= TRUSTED | set(ROWS)
    assert LOWEST <= HIGHEST == max(SINCE.values())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write(" | ".join((name, *way_by_test({"model_type": name}, Engine))) + "\n")
        sys.stdout.flush()
