"""How long a job will take: ranges that hold on jobs whose times are made up, and what `--plan` prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from h2o_flexgen.jobs import forecast as module
from h2o_flexgen.jobs.forecast import Forecast, Meter, Pace, Percentiles, ToCome, seconds_text
from tests.jobs.files import results, write
from tests.programs import Ran

SLOTS = 8
TRUE = Pace(prompt=0.001, step=0.02, token=0.002, request=0.001)


class Clock:
    """Stands still until a made-up job moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def made_up(
    job: Forecast, requests: list[tuple[ToCome, int]], clock: Clock, told: Callable[[], None], joining: int = 1
) -> float:
    """Runs requests of these lengths in a block of SLOTS rows, at the true pace, of which so many are free before
    others join. Seconds."""
    begun, waiting, rows = clock.now, list(enumerate(requests)), list[list[int]]()
    prompts = new = 0
    meter, in_all = job.meter, sum(row.most for row, _ in requests)
    meter("generating", 0, in_all)
    while waiting or rows:
        for _ in range(SLOTS - len(rows) if len(rows) <= SLOTS - joining else 0):
            if not waiting:
                break
            line, (row, length) = waiting.pop(0)
            rows.append([line, length])
            prompts += row.prompt
            clock.now += TRUE.prompt * row.prompt
            meter("prefill", prompts, 0)
        clock.now += TRUE.step + TRUE.token * len(rows)
        new += len(rows)
        meter("generating", new, in_all)
        for row_ in rows:
            row_[1] -= 1
        for line, _ in [row_ for row_ in rows if not row_[1]]:
            clock.now += TRUE.request
            job.finish(line, [requests[line][1]])
            told()
        rows = [row_ for row_ in rows if row_[1]]
    return clock.now - begun


@pytest.mark.parametrize(("known", "joining"), [("sample", 1), ("sample", SLOTS), ("plan", 1), ("nothing", 3)])
def test_ranges_hold_and_narrow(monkeypatch: pytest.MonkeyPatch, known: str, joining: int) -> None:
    clock, random = Clock(), np.random.default_rng(3)
    monkeypatch.setattr(module, "time", clock)
    inside = at_half = 0
    for trial in range(6):
        requests = [(ToCome(int(random.integers(5, 60)), 60), int(random.integers(3, 61))) for _ in range(150)]
        job = Forecast(len(requests), SLOTS)
        for line, (row, _) in enumerate(requests):
            job.expect(line, [row])
        off = float(np.exp(0.1 * random.standard_normal()))
        if known == "plan":
            seconds = {"prefill_s": 0.001 * 4800, "decode_s": 0.02 * 1.8 * 19 * 59}
            job.pace = Pace.of_plan({"prompt_tokens": 4800, "generated_tokens": 9000, **seconds}, 60, SLOTS)
        if known == "sample":
            job.pace = Pace(off * TRUE.prompt, off * TRUE.step, off * TRUE.token, TRUE.request, spread=0.17)
            job.lengths = [(length, row.most) for row, length in requests[::3]]
        begun = clock.now

        def told(job: Forecast = job, begun: float = begun) -> None:
            job.note(clock.now - begun)

        if known != "nothing":
            told()
        took = made_up(job, requests, clock, told, joining)
        half = job.halfway(took)
        assert job.first is not None
        assert half is not None
        inside += job.first.low <= took <= job.first.high
        assert job.first.high / job.first.low < 2
        assert half.high / half.low < 1.3
        assert half.high - half.low < job.first.high - job.first.low, "it narrows"
        assert 0.85 * took < half.middle < 1.15 * took, trial
        at_half += half.low <= took <= half.high
        assert job.left(took) == Percentiles(0, 0, 0)
    assert at_half >= 4
    # A plan without a sample takes answers to be as long as they may, and all take blocks to be nearly full at first.
    assert inside >= (4 if known != "plan" and joining < SLOTS else 0)


def test_the_pace_is_found_out_from_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, random = Clock(), np.random.default_rng(5)
    monkeypatch.setattr(module, "time", clock)
    requests = [(ToCome(int(random.integers(5, 60)), 40), int(random.integers(3, 41))) for _ in range(60)]
    job = Forecast(60, SLOTS)
    for line, (row, _) in enumerate(requests):
        job.expect(line, [row])
    made_up(job, requests, clock, lambda: None)
    found = job.meter.pace(60)
    assert found is not None
    assert (found.prompt, found.step, found.token) == pytest.approx((TRUE.prompt, TRUE.step, TRUE.token), rel=0.1)
    assert Meter().pace(1) is None


def test_ranges_are_said_for_people() -> None:
    for told, text in ((Percentiles(2.2, 3, 4.4), "2.2 to 4.4 s"), (Percentiles(90, 200, 700), "1.5 to 11.7 min"),
                       (Percentiles(4e4, 5e4, 8e4), "11 to 22 h")):  # fmt: skip
        assert seconds_text(told) == text


def test_what_a_plan_says(tmp_path: Path, model: Path, batch: Callable[..., Ran]) -> None:
    lines = [json.dumps({"prompt": "x" * (5 + n % 20)}) for n in range(60)] + [json.dumps({"prompt": "y" * 200})]
    path = write(tmp_path / "in.jsonl", *lines)
    flags = ("--model", model, "--gen-len", 20, "--dtype", "float32", "--no-calibrate")
    ran = batch("--plan", path, *flags)
    said = ran.record["plan"]
    assert ran.code == 0
    assert "time: not known here" in ran.out
    assert said["requests"] == 60
    assert said["seconds"] is None
    assert said["prompt_tokens"] == sum(1 + 5 + n % 20 for n in range(60))
    assert 0 < said["memory"]["cpu"]["low"] <= said["memory"]["cpu"]["high"] <= said["memory"]["cpu"]["cap"]
    assert not list(tmp_path.glob("*.journal")), "nothing was written"
    sampled = batch("--plan", path, "--sample", 40, *flags).record["plan"]
    assert 0 < sampled["seconds"]["low"] < sampled["seconds"]["high"]
    assert sampled["new_tokens"]["high"] <= 60 * 20
    plain, out = tmp_path / "plain.jsonl", tmp_path / "out.jsonl"
    batch("-i", path, "-o", plain, *flags)
    ran = batch("-i", path, "-o", out, "--sample", 40, *flags)
    assert results(out, "line") == results(plain, "line"), "a sample changes no answer"
    assert ran.record["forecast"].keys() == {"first", "half", "measured"}
    assert "expected: " in ran.err
    for arguments in (("-i", path), ("-o", out), (), ("--plan", path, "-i", path), ("--plan", path, "--sample", -1)):
        assert batch(*arguments, *flags).code == 2
