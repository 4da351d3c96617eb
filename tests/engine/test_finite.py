"""Numbers that stop being finite end their own sequence, and `check_finite` says in which unit it began."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from h2o_flexgen.engine.engine import Engine
from tests.tiny import make_opt, prompts_of, save

BAD_TOKEN = 50


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("model.decoder.layers.1.self_attn.k_proj.weight", "layers.1.attn"),
        ("model.decoder.layers.2.fc1.weight", "layers.2.mlp"),
        ("lm_head.weight", "head"),
    ],
)
def test_the_unit_where_it_began_is_named(name: str, unit: str, tmp_path: Path) -> None:
    model = make_opt("opt-untied")
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = float("nan")
    save(model, tmp_path)
    with Engine(str(tmp_path), dtype="float32", check_finite=True) as llm:
        outputs = llm.generate(prompts_of([5, 9]), max_new_tokens=4)
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert all(output.error.endswith(f"in unit {unit}") for output in outputs)


def test_one_bad_embedding_ends_the_sequences_that_hold_it(tmp_path: Path) -> None:
    model = make_opt("opt-untied")
    good = [[2, 5, 7, 9], [2, 6, 8]]
    with Engine(str(save(model, tmp_path / "good")), dtype="float32") as llm:
        expected = [output.token_ids for output in llm.generate(good, max_new_tokens=3, ignore_eos=True)]
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD_TOKEN] = float("nan")
    assert not any(BAD_TOKEN in tokens for tokens in expected)
    with Engine(str(save(model, tmp_path / "bad")), dtype="float32", check_finite=True) as llm:
        outputs = llm.generate([good[0], [2, BAD_TOKEN, 4], good[1]], max_new_tokens=3, ignore_eos=True)
    assert outputs[1].error.endswith("in unit embed")
    assert outputs[1].fault == "numbers"
    assert [outputs[0].token_ids, outputs[2].token_ids] == expected


def test_no_unit_is_named_where_settings_ended_a_sequence(tmp_path: Path) -> None:
    with Engine(str(save(make_opt("opt-untied"), tmp_path)), dtype="float32", check_finite=True) as llm:
        none = {(token,): -math.inf for token in range(llm.model.spec.vocab_size)}
        output = llm.generate([[2, 5]], max_new_tokens=2, sequence_bias=none)[0]
    assert (output.error, output.fault) == ("its settings forbid every token", "settings")
