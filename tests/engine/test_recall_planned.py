"""What recall moves is planned from what the engine's earlier calls have moved, within a tenth."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.recall import RecallTier
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.folders import cached

FILE = cached() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(__file__).parents[2] / "h2o_flexgen" / "data"
REAL = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason=f"scripts/real_model.sh has not put {FILE} there"),
]


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize(("model", "length"), [("demo", 200), pytest.param(str(FILE), 400, marks=REAL)])
def test_bytes_that_recall_moves_are_planned_within_a_tenth(
    model: str, length: int, tier: RecallTier, tmp_path: Path
) -> None:
    """Of another kind of text, of lengths and a batch that the first call has not seen."""
    eviction = EvictionConfig("h2o", ratio=0.1, recall=tier)
    texts = [(DATA / name / "heldout.txt").read_text(encoding="utf-8") for name in ("demo", "demo-stream")]
    with LLM(model, eviction=eviction, offload_dir=str(tmp_path)) as llm:
        prose, mixed = (llm.model.codec.encode(text[len(text) // 2 :]) for text in texts)
        several = [prose[2000 : 2000 + length // 2], mixed[5000 : 5000 + 3 * length // 4]]
        for prompts, new in (([prose[:length]], 32), ([mixed[: 2 * length]], 24), (several, 40)):
            llm.generate(prompts, SamplingParams(new, ignore_eos=True))
            recall = llm.last_record.recall
            planned = recall["planned"]
            assert recall["written_bytes"] == planned["written"]
            if new == 32:  # as many as may: too many
                assert 0.6 < recall["read_bytes"] / planned["read"] < 1
                share = recall["read_bytes"] / planned["most"]
                assert llm.plan(Workload(length, new)).request.recalled == share
            else:
                assert recall["read_bytes"] == pytest.approx(planned["read"], rel=0.1)
