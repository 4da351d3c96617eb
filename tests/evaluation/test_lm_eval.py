"""The plug-in of the lm-evaluation-harness, by the harness itself: what it is told is what the engine says."""

from __future__ import annotations

import gc
import io
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import h2o_flexgen.lm_eval as launcher
from h2o_flexgen.errors import UsageError

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "h2o_flexgen/data/demo"
TASKS = ["h2o_recall", "h2o_recall_generate"]


def test_without_the_harness_its_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    assert launcher.main(["run"]) == 2
    assert "pip install 'h2o_flexgen[lm-eval]'" in capsys.readouterr().err


def test_help_for_a_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    assert launcher.main(["--help"]) == 0


def test_an_unknown_task_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert launcher.main(["run", "--model", "h2o_flexgen", "--model_args", "pretrained=demo", "--tasks", "none"]) == 2
    assert "Tasks not found: none" in capsys.readouterr().err


@pytest.fixture(scope="module")
def evaluated() -> Any:
    """The harness, its results of two questions of each task, and the model: H2O at 20 %."""
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from h2o_flexgen.evaluation.lm_eval import H2OFlexGenLM

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        lm = H2OFlexGenLM("demo", eviction="h2o", hh_ratio=0.2, dtype="float32", batch_size=4, device="cuda:0")
        manager = TaskManager(include_path=str(ROOT / "configs/lm-eval"))
        results = simple_evaluate(
            model=lm, tasks=TASKS, task_manager=manager, limit=2, log_samples=True, bootstrap_iters=0
        )
    yield lm, results
    lm.llm.close()


def test_a_model_that_is_let_go_of_leaves_its_memory() -> None:
    """Of a loop over policies, each with a model of its own."""
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    from h2o_flexgen.evaluation.lm_eval import H2OFlexGenLM

    there = weakref.ref(H2OFlexGenLM("demo").llm)
    gc.collect()
    assert there() is None


def _samples(evaluated: Any, task: str) -> list[tuple[dict[str, Any], Any]]:
    return [(each["doc"], each["resps"][0][0]) for each in evaluated[1]["samples"][task]]


@pytest.mark.slow
def test_its_answers_are_those_of_the_engine(evaluated: Any) -> None:
    lm, results = evaluated
    recalled, written = (_samples(evaluated, task) for task in TASKS)
    scores = lm.llm.score([(doc["prompt"], " " + doc["answer"]) for doc, _ in recalled])
    assert [each.logprob for each in scores] == pytest.approx([said[0] for _, said in recalled], abs=1e-4)
    assert [each.is_greedy for each in scores] == [said[1] for _, said in recalled]
    settings = {"max_new_tokens": 8, "stop_strings": [".", "\n"]}
    outputs = lm.llm.generate([doc["prompt"] for doc, _ in written], **settings)
    assert [output.text for output in outputs] == [said for _, said in written]
    assert results["config"]["eviction"]["name"] == "h2o"
    assert results["config"]["eviction_active_while_scoring"]


@pytest.mark.slow
def test_what_does_not_fit_is_cut_and_long_texts_go_in_windows(evaluated: Any) -> None:
    from lm_eval.api.instance import Instance

    lm, _ = evaluated
    ids = lm.tok_encode((DEMO / "heldout.txt").read_text(encoding="utf-8")[:9000], add_special_tokens=False)
    assert len(ids) > 2 * 60
    lm._spec, before = _short(lm._spec, 60), lm._spec
    try:
        text = lm._codec.decode(ids[:130])
        tokens = lm.tok_encode(text, add_special_tokens=False)
        (total,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
        ((cut, _),) = lm._loglikelihood_tokens([(None, ids[:200], ids[200:204])], disable_tqdm=True)
    finally:
        lm._spec = before
    # Windows of 59 tokens, each told by the one before it; the last looks back as far as it can.
    first, second = ([lm.prefix_token_id], tokens[:59]), (tokens[58:59], tokens[59:118])
    rest = len(tokens) - 118
    last = (tokens[-59 - 1 : -rest], tokens[-rest:])
    assert total == pytest.approx(sum(each.logprob for each in lm.llm.score([first, second, last])), rel=1e-5)
    assert cut == pytest.approx(lm.llm.score([(ids[144:200], ids[200:204])])[0].logprob, abs=1e-4)


def _short(spec: Any, positions: int) -> Any:
    import dataclasses

    return dataclasses.replace(spec, max_positions=positions)


@pytest.mark.slow
def test_with_the_full_cache_likelihoods_are_transformers() -> None:
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
    from lm_eval.api.instance import Instance

    from h2o_flexgen.evaluation.lm_eval import H2OFlexGenLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32"), AutoTokenizer.from_pretrained(DEMO)
    pairs = [("The children gather ", "wood, and"), ("", "The children"), ("Remember: the code", " of the")]
    lm = H2OFlexGenLM("demo", dtype="float32")
    said = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs], disable_tqdm=True)
    lm.llm.close()
    for (context, continuation), (logprob, greedy) in zip(pairs, said, strict=True):
        ids = tokenizer(context + continuation)["input_ids"]
        before = len(tokenizer(context.rstrip())["input_ids"])
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0, before - 1 : -1].log_softmax(-1)
        assert logprob == pytest.approx(rows.gather(1, torch.tensor(ids[before:])[:, None]).sum().item(), abs=1e-4)
        assert greedy == (rows.argmax(-1).tolist() == ids[before:])


def test_settings_of_a_task_that_ask_for_nothing_are_passed_over_and_others_refused() -> None:
    pytest.importorskip("lm_eval")
    from h2o_flexgen.evaluation.lm_eval import _sampling

    asked = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0}
    idle = {"num_beams": 1, "top_p": 1.0, "use_cache": True, "early_stopping": False, "guidance_scale": 1, "seed": None}
    assert _sampling({**asked, **idle}) == _sampling(asked)
    with pytest.raises(UsageError, match="num_beams=4"):
        _sampling({**asked, "num_beams": 4})
    with pytest.raises(UsageError, match="'num_beems' is not a generation setting"):
        _sampling({**asked, "num_beems": 1})


def test_eviction_is_asked_for_by_any_flag_of_it_but_spans() -> None:
    pytest.importorskip("lm_eval")
    from h2o_flexgen.evaluation.lm_eval import H2OFlexGenLM

    asked: dict[str, Any] = {"recall": "cpu", "recall_every": 2, "budget_split": "far", "far_layers": (0,)}
    lm = H2OFlexGenLM("demo", eviction="h2o", hh_ratio=0.2, **asked)
    lm.llm.close()
    assert asked.items() <= vars(lm.llm.config.eviction).items()
    with pytest.raises(UsageError, match="'spans'"):
        H2OFlexGenLM("demo", eviction="h2o", hh_ratio=0.2, spans="fair")
