"""`h2o_flexgen.ray.Predictor`: as a function, and as actors of a real local Ray cluster, one of them killed."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import pickle
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.cli.batch.arguments import parse_batch
from h2o_flexgen.cli.batch.job import ClusterJob, JobActor, share_of
from h2o_flexgen.errors import UsageError
from h2o_flexgen.jobs.journal import OK, JobResults
from h2o_flexgen.jobs.source import Source
from h2o_flexgen.ray import COLUMNS, Predictor
from tests.jobs.files import request, results, timeless, write
from tests.programs import Ran, until

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


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """TimeoutError after so many seconds: a cluster that waits for something would do so for ever."""

    def expire(number: int, frame: object) -> None:
        raise TimeoutError("Ray did not get ready in time")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two processors and several processes on this machine."""
    ray = pytest.importorskip("ray")
    place, here = f"/tmp/ray-{os.getpid()}", {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}}
    try:
        with limit(90):
            ray.init(num_cpus=2, include_dashboard=False, _temp_dir=place, logging_level="ERROR", runtime_env=here)
    except (TimeoutError, ray.exceptions.RayError, RuntimeError, OSError) as error:
        pytest.skip(f"a local cluster does not start here: {error}")
    yield ray
    ray.shutdown()
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.slow
def test_an_actor_of_a_cluster_that_is_killed(tmp_path: Path, model: Path, cluster: Any) -> None:
    """It is started anew, and its batches are run again. Several actors: the test of a job."""
    prompts = [f"prompt {number}" for number in range(12)]
    data = cluster.data.from_items([{"id": number, "prompt": prompt} for number, prompt in enumerate(prompts)])
    settings = {"model": str(model), "max_new_tokens": 4, "flag": str(tmp_path / "killed")}
    with limit(540):
        # Less than a processor: what reads the data needs one, too.
        answered = data.map_batches(Killed, fn_constructor_kwargs=settings, batch_size=2, concurrency=1, num_cpus=0.5)
        rows = sorted(answered.take_all(), key=lambda row: row["id"])
    assert (tmp_path / "killed").exists()
    with LLM(str(model)) as llm:
        expected = [output.text for output in llm.generate(prompts, SamplingParams(max_new_tokens=4))]
    assert [row["generated_text"] for row in rows] == expected


@pytest.mark.slow
def test_a_job_over_two_actors_one_of_them_killed(
    tmp_path: Path, model: Path, cluster: Any, batch: Callable[..., Ran]
) -> None:
    """Its results are those of one process; it goes on with what one process began, and one process with it."""
    bodies = [{"prompt": f"p {number}", "max_tokens": 20, "n": 1 + number % 2} for number in range(70)]
    lines = [request(f"r{number}", body) for number, body in enumerate(bodies)]
    lines[7], lines[9] = "{", request("r9", {"prompt": "a", "max_tokns": 2})
    file, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    same = ("-i", file, "--model", model, "--hh-ratio", 0.5, "--gpu-batch-size", 4)
    killed, left = list[int](), list[int]()

    def kill() -> None:
        until(lambda: out.exists() and out.read_bytes().count(b"\n") > 4, 500)
        actors = [each for each in psutil.Process().children(recursive=True) if "JobActor" in " ".join(each.cmdline())]
        killed.extend(each.pid for each in actors)
        left.append(70 - out.read_bytes().count(b"\n"))
        actors[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with limit(540):
        ran = batch(*same, "-o", out, "--ray", 2, "--at-risk", 0.1)
    killer.join()
    assert ran.code == 3, ran.err
    assert len(killed) >= 2, "more where a busy machine starts one anew"
    assert left[0] > 0
    assert (ran.record["ok"], ran.record["failed"], ran.record["model"]) == (68, 2, str(model))
    assert batch(*same, "-o", tmp_path / "whole.jsonl").code == 3
    wanted = timeless(results(tmp_path / "whole.jsonl", "id"))
    assert timeless(results(out, "id")) == wanted
    again = batch(*same, "-o", out, "--ray", 2, "--resume")
    assert (again.code, again.record["before"], again.record["ok"]) == (3, 70, 0)
    ran = batch("-i", file, "--model", model, "-o", tmp_path / "other.jsonl", "--ray", 3)
    assert (ran.code, "the cluster has 2 processors" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("nodes", "actors", "gpus", "share"),
    [
        ([{"CPU": 2}], 1, 0, (2, 0, 1)),
        ([{"CPU": 2}], 2, 0, (1, 0, 0.5)),
        ([{"CPU": 8}, {"CPU": 4}, {}], 3, 0, (4, 0, 0.5)),
        ([{"CPU": 16, "GPU": 1}, {"CPU": 8, "GPU": 2}], 3, 1, (4, 1, 0.5)),
        ([{"CPU": 2}], 3, 0, None),
        ([{"CPU": 8, "GPU": 1}], 2, 1, None),
    ],
)
def test_actors_get_equal_shares_of_the_machines(
    nodes: list[dict[str, float]], actors: int, gpus: int, share: tuple[int, int, float] | None
) -> None:
    if share is None:
        with pytest.raises(UsageError, match="processors"):
            share_of(nodes, actors, gpus)
    else:
        assert share_of(nodes, actors, gpus) == share


def test_tokens_of_requests_that_are_computed_twice_count_once(tmp_path: Path, model: Path) -> None:
    """Of a batch that a lost actor had finished in part: whichever of its requests are done, the others count."""
    pytest.importorskip("pyarrow")
    bodies = [{"prompt": "a" * (i + 1), "max_tokens": 2} for i in range(3)]
    file = write(tmp_path / "in.jsonl", *(request(f"r{i}", body) for i, body in enumerate(bodies)))
    arguments = parse_batch(["-i", str(file), "-o", str(tmp_path / "out"), "--model", str(model)])
    source = Source(file)
    scan, records = source.scan(), [pickle.dumps(tuple(record)) for record in source.records()]
    actor = JobActor(arguments, "openai", frozenset(), {}, 1.0)
    table = actor({"record": [SimpleNamespace(as_py=lambda data=data: data) for data in records]})
    with JobResults(tmp_path / "out") as kept:
        kept.begin({}, scan.lines)
        first = table.column("line")[0].as_py()
        kept.state[first] = OK
        job = ClusterJob(arguments, source, scan, kept, lambda summary: None)
        job._take(table)
        again = (job.summary.ok, job.summary.prompt_tokens)
        job._take(table)
    assert again == (job.summary.ok, job.summary.prompt_tokens) == (2, sum(2 + i for i in range(3)) - (1 + first))
    assert job.record["model"] == str(model)


def test_a_machine_without_ray(
    tmp_path: Path, model: Path, batch: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else found(name, *rest))
    file = write(tmp_path / "in.jsonl", request("r", {"prompt": "abc"}))
    ran = batch("-i", file, "-o", tmp_path / "out.jsonl", "--model", model, "--ray", 2)
    assert (ran.code, "pip install 'h2o_flexgen[ray]'" in ran.err) == (2, True)
    assert not (tmp_path / "out.jsonl").exists()
    assert batch("-i", file, "-o", tmp_path / "out.jsonl", "--model", model, "--ray", 0).code == 2


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
