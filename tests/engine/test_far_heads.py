"""Heads that look far: measured as transformers attends, once for a model, and only where `auto` asks for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen import LLM, EvictionConfig
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.far_layers import FarPlaces, far_places
from h2o_flexgen.engine import far_heads
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.far_heads import head_scores, places_of, random_text
from h2o_flexgen.errors import PlanError, UsageError
from h2o_flexgen.models.families import spec_from_config
from tests.tiny import config_of, make_model, save

AUTO = EvictionConfig("auto", ratio=0.3)


@pytest.mark.parametrize("name", ["llama-gqa", "opt", "llama-gqa1"])
@pytest.mark.parametrize("policy", [{}, {"prefill_chunk": 16, "weights": {"disk": 1.0}}])
def test_scores_are_transformers_attention(name: str, policy: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(name, attn_implementation="eager")
    save(model, tmp_path)
    texts = torch.randint(3, model.config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(5))
    config = EngineConfig.of(tmp_path, dtype="float32", policy=policy or "auto", offload_dir=str(tmp_path / "offload"))
    found = head_scores(config, Engine, texts.tolist())
    with torch.no_grad():
        attended = model(texts.repeat(1, 3), output_attentions=True).attentions
    assert len(found) == len(attended)
    for layer, rows in enumerate(attended):
        paid = torch.zeros(rows.shape[:2])
        for at in range(13, 39):
            for back in (13, 26):
                if at >= back:
                    paid += rows[:, :, at, at - back] + rows[:, :, at, at - back + 1]
        by_head = (paid / 26).view(2, len(found[layer]), -1).amax(-1).mean(0)
        torch.testing.assert_close(torch.tensor(found[layer]), by_head, rtol=1e-4, atol=1e-5)


def test_places_are_few_and_have_their_share() -> None:
    spec = replace(_spec("llama-gqa"), num_layers=8)
    scores = {layer: [0.02, 0.01 * layer] for layer in range(8)} | {2: [0.9, 0.2], 6: [0.05, 0.15]}
    assert places_of(spec, scores) == FarPlaces(((2, 0), (2, 1)), (2,))
    assert places_of(spec, {layer: [0.01, 0.02] for layer in range(8)}) == FarPlaces((), ())
    assert places_of(spec, {layer: [0.1 + layer] for layer in range(8)}) == FarPlaces((7,), (7,)), "one head each"


def test_a_model_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_model("llama-gqa"), tmp_path)
    monkeypatch.setattr(far_heads, "LEAST", 0.0)
    with LLM(tmp_path, dtype="float32", eviction=AUTO) as llm:
        places = llm.config.eviction.far_layers
        assert places == far_places(llm.model.spec).places  # type: ignore[union-attr]
        assert len(places) == 1
        assert isinstance(places[0], tuple)
        llm.generate([[5, 6, 7] * 9], max_new_tokens=6, ignore_eos=True)
        assert llm.last_record.eviction["far_layers"] == [list(place) for place in places]  # type: ignore[union-attr]
    assert "is measured once" in caplog.text
    monkeypatch.setattr(far_heads, "head_scores", None)
    caplog.clear()
    with LLM(tmp_path, dtype="float32", eviction=replace(AUTO, recall="cpu")) as llm:
        assert llm.config.eviction.far_layers == (places[0][0],)
    assert not caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"eviction": EvictionConfig("auto")},
        {"eviction": EvictionConfig("h2o", ratio=0.3)},
        {"eviction": EvictionConfig("auto", ratio=0.3, budget_split="uniform")},
        {"eviction": EvictionConfig("auto", ratio=0.3, far_layers=(0,))},
        {"weights": "dummy"},
    ],
)
def test_no_other_run_measures(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(make_model("llama-gqa"), tmp_path)
    monkeypatch.setattr(far_heads, "head_scores", None)
    with LLM(tmp_path, dtype="float32", **{"eviction": AUTO, **settings}):
        pass


@pytest.mark.parametrize("error", [PlanError("no room for it"), OSError(28, "no room for it"), ValueError("no room")])
def test_a_run_goes_on_where_it_cannot_be_measured(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_model("llama-gqa"), tmp_path)

    def refused(*given: Any) -> None:
        raise error

    monkeypatch.setattr(far_heads, "head_scores", refused)
    with LLM(tmp_path, dtype="float32", eviction=AUTO) as llm:
        assert llm.config.eviction.far_layers is None
        assert len(llm.generate([[5, 6, 7]], max_new_tokens=2, ignore_eos=True)) == 1
    assert f"which KV heads look far is not known: {error}" in caplog.text


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("opt", {"eviction": EvictionConfig("auto", budget=9, rolling_positions=True)}),
        (
            "llama-gqa",
            {"eviction": EvictionConfig("auto", ratio=0.5, recall="cpu"), "policy": {"cache": {"disk": 1.0}}},
        ),
        ("mixtral", {"eviction": AUTO, "num_gpus": 2, "emulate_gpu": "1GiB"}),
    ],
)
def test_nothing_is_measured_for_what_is_refused(
    name: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_model(name), tmp_path)
    with pytest.raises(UsageError):
        LLM(tmp_path, dtype="float32", **settings)
    assert "is measured once" not in caplog.text


def test_engines_in_two_threads_measure_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(make_model("llama-gqa"), tmp_path)
    with ThreadPoolExecutor(2) as threads:
        opened = list(threads.map(lambda _: LLM(tmp_path, dtype="float32", eviction=AUTO), range(2)))
    for llm in opened:
        llm.close()
    assert caplog.text.count("is measured once") == 1
    assert "is not known" not in caplog.text


def test_random_text_fits_the_context() -> None:
    spec = _spec("llama-gqa")
    assert random_text(spec) == random_text(spec)
    assert 3 * len(random_text(spec)) < spec.max_positions
    assert max(random_text(spec)) < spec.vocab_size


def _spec(name: str) -> Any:
    return spec_from_config(config_of(name).to_dict(), name)
