"""`h2o_flexgen.ray.Predictor`: as a function, and as actors of a real local Ray cluster, one of them killed."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.errors import UsageError
from h2o_flexgen.ray import COLUMNS, Predictor

PROMPTS = ["abc", "a longer prompt", "Hello", "xyz"]


@pytest.fixture(scope="module")
def predictor(model: Path) -> Any:
    made = Predictor(str(model), max_new_tokens=5)
    yield made
    made.close()


def test_a_batch_gets_its_answers_as_the_engine_gives_them(model: Path, predictor: Predictor) -> None:
    found = predictor({"prompt": np.array(PROMPTS, dtype=object), "name": np.arange(4)})
    assert [*found] == ["prompt", "name", *COLUMNS]
    with LLM(str(model)) as llm:
        expected = llm.generate(PROMPTS, SamplingParams(max_new_tokens=5))
    assert list(found["generated_text"]) == [output.text for output in expected]
    assert list(found["generated_tokens"]) == [output.token_ids for output in expected]
    assert list(found["error"]) == [None] * 4
    ids = np.empty(1, dtype=object)
    ids[0] = np.array(expected[0].prompt_ids)
    assert list(predictor({"prompt": ids})["generated_tokens"]) == [expected[0].token_ids]


def test_a_row_that_cannot_be_run_leaves_its_neighbours_alone(predictor: Predictor) -> None:
    forms = [None, json.dumps({"type": "json_schema", "json_schema": {"schema": {"enum": ["ab"]}}}), "{", '{"type": 3}']
    found = predictor({"prompt": ["abc", "de", "f", "g"], "response_format": forms})
    assert [error is None for error in found["error"]] == [True, True, False, False]
    assert found["finish_reason"][2] == "error"
    assert found["generated_text"][1] == '"ab"'
    far = predictor({"prompt": ["x" * 500, "abc"]})
    assert [far["error"][1], "500" in far["error"][0] or "501" in far["error"][0]] == [None, True]


def test_what_is_sampled_does_not_depend_on_the_division(model: Path) -> None:
    made = Predictor(str(model), sampling={"max_new_tokens": 6, "do_sample": True}, seed=3)
    whole = list(made({"prompt": PROMPTS})["generated_text"])
    parts = [made({"prompt": PROMPTS[i : i + 2]})["generated_text"] for i in (2, 0)]
    assert whole == [*parts[1], *parts[0]]
    seeded = made({"prompt": ["abc"] * 3, "seed": np.array([1, 2, 1])})["generated_text"]
    assert seeded[0] == seeded[2]
    made.close()


def test_settings_and_data_that_make_no_sense(model: Path, predictor: Predictor) -> None:
    with pytest.raises(UsageError, match="has no key 'max_new_tokns'"):
        Predictor(str(model), max_new_tokns=3)
    with pytest.raises(UsageError, match="one answer"):
        Predictor(str(model), do_sample=True, num_return_sequences=2)
    with pytest.raises(UsageError, match="no column 'prompt'"):
        predictor({"text": ["a"]})
    with pytest.raises(UsageError, match="'error' already"):
        predictor({"prompt": ["a"], "error": [None]})


class Killed(Predictor):
    """Ends its own process in the first batch that any actor gets, once."""

    def __init__(self, flag: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._flag = Path(flag)

    def __call__(self, batch: Any) -> dict[str, Any]:
        try:
            self._flag.touch(exist_ok=False)
        except FileExistsError:
            return {**super().__call__(batch), "worker": np.array([os.getpid()] * len(batch["prompt"]))}
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


@pytest.fixture
def limit() -> Iterator[Callable[[int], int]]:
    """Raises TimeoutError in so many seconds: a cluster that waits for something would do so for ever."""

    def expire(number: int, frame: object) -> None:
        raise TimeoutError("Ray did not get ready in time")

    before = signal.signal(signal.SIGALRM, expire)
    yield signal.alarm
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_two_actors_of_a_cluster_one_of_them_killed(tmp_path: Path, model: Path, limit: Callable[[int], int]) -> None:
    ray = pytest.importorskip("ray")
    place, here = f"/tmp/ray-{os.getpid()}", {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}}
    limit(90)
    try:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=place, logging_level="ERROR", runtime_env=here)
    except (TimeoutError, ray.exceptions.RayError, RuntimeError, OSError) as error:
        pytest.skip(f"a local cluster does not start here: {error}")
    limit(240)
    try:
        prompts = [f"prompt {number}" for number in range(24)]
        data = ray.data.from_items([{"id": number, "prompt": prompt} for number, prompt in enumerate(prompts)])
        settings = {"model": str(model), "max_new_tokens": 4, "flag": str(tmp_path / "killed")}
        # Less than a processor each: what reads the data needs one, too.
        answered = data.map_batches(Killed, fn_constructor_kwargs=settings, batch_size=2, concurrency=2, num_cpus=0.5)
        rows = sorted(answered.take_all(), key=lambda row: row["id"])
    finally:
        limit(0)
        ray.shutdown()
        shutil.rmtree(place, ignore_errors=True)
    assert (tmp_path / "killed").exists()
    with LLM(str(model)) as llm:
        expected = [output.text for output in llm.generate(prompts, SamplingParams(max_new_tokens=4))]
    assert [row["generated_text"] for row in rows] == expected


def test_the_documented_lines_run_on_data_of_one_batch(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Ray's dataset replaced by one that calls the class itself; what it is given is what Ray's takes."""
    ray = pytest.importorskip("ray")

    written: dict[str, Any] = {}

    class Answers:
        def __init__(self, columns: dict[str, Any]) -> None:
            self.columns = columns

        def map_batches(self, made: Any, **settings: Any) -> Answers:
            inspect.signature(ray.data.Dataset.map_batches).bind(self, made, **settings)
            predictor = made(**{**settings["fn_constructor_kwargs"], "max_new_tokens": 3})
            try:
                return Answers(predictor(self.columns))
            finally:
                predictor.close()

        def write_parquet(self, folder: str) -> None:
            written[folder] = self.columns

    monkeypatch.setattr(ray.data, "read_parquet", lambda path: Answers({"prompt": ["abc", "de"]}))
    text = (Path(__file__).parents[2] / "docs/ray.md").read_text(encoding="utf-8")
    (block,) = re.findall("```python\n(.*?)```", text, re.DOTALL)
    exec(compile(block.replace("facebook/opt-6.7b", str(model)), "ray.md", "exec"), {})
    assert list(written["answers"]["error"]) == [None, None]
