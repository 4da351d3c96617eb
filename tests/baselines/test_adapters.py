"""The adapters, in this process: the same tokens from the same weights, and clocks that add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.baselines import own, transformers
from h2o_flexgen.baselines.work import Outcome, Work
from tests.tiny import make_opt, prompts_of, save

NEW = 12


@pytest.fixture
def work(tmp_path: Path):
    """A folder with work on a tiny checkpoint, in float32."""
    model = make_opt()
    checkpoint = save(model, tmp_path / "checkpoint")

    def make(**changes: Any) -> str:
        settings: dict[str, Any] = {"weights": "checkpoint", "folder": str(checkpoint), "options": {}}
        settings |= changes
        name = str(len(list(tmp_path.iterdir())))
        Work(
            model=str(checkpoint),
            dtype="float32",
            device="cpu",
            threads=1,
            seed=0,
            gen_len=NEW,
            prompts=prompts_of([24, 24, 24]),
            **settings,
        ).write(tmp_path / name, model.config.to_dict())
        return str(tmp_path / name)

    return make


def _outcome(adapter: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> Outcome:
    assert adapter.main(folder) == 0
    return Outcome.from_line(capsys.readouterr().out.splitlines()[-1])


def test_both_give_the_same_tokens(work, capsys) -> None:
    ours, theirs = (_outcome(adapter, work(), capsys) for adapter in (own, transformers))
    assert ours.token_ids == theirs.token_ids
    assert [len(tokens) for tokens in theirs.token_ids] == [NEW] * 3
    for outcome in (ours, theirs):
        assert outcome.prefill_s > 0
        assert outcome.decode_s > 0
        assert outcome.prefill_s + outcome.decode_s == pytest.approx(outcome.total_s, rel=0.5)
        assert "torch" in outcome.versions
    assert theirs.detail["attention"] == "sdpa"
    assert theirs.detail["threads"] == 1


def test_an_eos_of_the_model_ends_nothing(work, capsys, monkeypatch) -> None:
    tokens = _outcome(transformers, work(), capsys).token_ids
    folder = Work.read(Path(work())).folder
    assert folder is not None
    config = Path(folder) / "generation_config.json"
    config.write_text(config.read_text().replace('"eos_token_id": 2', f'"eos_token_id": {tokens[0][3]}'))
    assert f'"eos_token_id": {tokens[0][3]}' in config.read_text()
    assert _outcome(transformers, work(), capsys).token_ids == tokens


def test_the_own_adapter_takes_an_eviction(work, capsys) -> None:
    outcome = _outcome(own, work(options={"name": "h2o", "ratio": 0.25}), capsys)
    assert outcome.detail["eviction"]["name"] == "h2o"
    assert outcome.detail["eviction"]["budget"] == 9


@pytest.mark.parametrize("adapter", [own, transformers])
def test_random_weights(adapter: Any, work, capsys) -> None:
    outcome = _outcome(adapter, work(weights="dummy", folder=None), capsys)
    assert [len(tokens) for tokens in outcome.token_ids] == [NEW] * 3


def test_what_is_no_outcome() -> None:
    with pytest.raises(ValueError, match="not the outcome"):
        Outcome.from_line('{"prefill_s": 1}')
    with pytest.raises(ValueError):
        Outcome.from_line("Segmentation fault")
