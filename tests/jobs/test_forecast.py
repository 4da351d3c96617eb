"""How long a job will take: ranges that hold on jobs whose times are made up, and what `--plan` prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from h2o_flexgen.jobs import forecast as module
from h2o_flexgen.jobs.forecast import (
    OF_SAMPLE,
    Forecast,
    Lengths,
    Meter,
    Pace,
    Percentiles,
    block_steps,
    seconds_text,
)
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


@dataclass
class Running:
    """A sequence that ends after so many tokens."""

    prompt_tokens: int
    max_new_tokens: int
    length: int
    token_ids: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return len(self.token_ids) == self.length


def drawn(random: np.random.Generator, count: int, most: int) -> list[Running]:
    """Half of them end early, as forms do, the others run on."""
    ends = random.integers(1, 8, count), random.integers(8, most + 1, count)
    return [Running(int(random.integers(5, 60)), most, int(ends[i % 2][i])) for i in range(count)]


def made_up(job: Forecast, requests: list[Running], clock: Clock, told: Callable[[], None], true: Pace = TRUE) -> float:
    """Runs requests in a block of the job's slots, at the true pace, which others join once a quarter is free. Seconds.

    Progress is told as the engine does: a sequence that is finished counts all that it might have had.
    """
    begun, waiting, rows = clock.now, list(enumerate(requests)), list[tuple[int, Running]]()
    prompts, over, slots = 0, 0, job.slots
    meter, in_all = job.meter, sum(row.max_new_tokens for row in requests)
    for line, row in waiting:
        job.expect(line, [row])
    while waiting or rows:
        meter("generating", over + sum(len(row.token_ids) for _, row in rows), in_all)
        for _ in range(slots - len(rows) if 4 * len(rows) <= 3 * slots else 0):
            if waiting:
                rows.append(waiting.pop(0))
                prompts += rows[-1][1].prompt_tokens
                clock.now += true.prompt * rows[-1][1].prompt_tokens
                meter("prefill", prompts, 0)
        clock.now += true.step + true.token * len(rows)
        for _, row in rows:
            row.token_ids.append(0)
        for line, row in [each for each in rows if each[1].finished]:
            over += row.max_new_tokens
            clock.now += true.request
            job.end(row, row.max_new_tokens - row.length)
            job.finish(line)
            told()
        rows = [each for each in rows if not each[1].finished]
    return clock.now - begun


@pytest.mark.turns
@pytest.mark.parametrize("known", ["sample", "plan", "nothing"])
def test_ranges_hold_and_narrow(monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    clock, random = Clock(), np.random.default_rng(3)
    monkeypatch.setattr(module, "time", clock)
    inside = at_half = 0
    for trial in range(5):
        requests = drawn(random, 240, 40)
        job = Forecast(len(requests), SLOTS)
        for line, row in enumerate(requests):
            job.expect(line, [row])
        off = float(np.exp(0.1 * random.standard_normal()))
        if known == "plan":
            predicted = {"prompt_tokens": 240 * 32, "generated_tokens": 240 * 40, "prefill_s": 7.7}
            job.pace = Pace.of_plan({**predicted, "decode_s": 30 * 39 * 0.036}, 40, SLOTS)
        if known == "sample":
            job.pace = Pace(off * TRUE.prompt, off * TRUE.step, off * TRUE.token, TRUE.request, spread=0.17)
            for row in requests[::3]:
                job.lengths.add(row.length, row.max_new_tokens)
        begun = clock.now

        def told(job: Forecast = job, begun: float = begun) -> None:
            job.note(clock.now - begun)

        if known != "nothing":
            told()
        took = made_up(job, requests, clock, told)
        half = job.halfway(took)
        assert job.first is not None
        assert half is not None
        inside += job.first.low <= took <= job.first.high
        assert job.first.high / job.first.low < 2
        assert half.high / half.low < 1.3
        assert half.high - half.low < job.first.high - job.first.low, "it narrows"
        assert 0.9 * took < half.middle < 1.1 * took, trial
        at_half += half.low <= took <= half.high
        assert job.left(took) == Percentiles(0, 0, 0)
    assert at_half >= 4
    # A plan without a sample takes answers to be as long as they may.
    assert inside >= (4 if known != "plan" else 0)


def test_requests_that_are_not_read_yet_are_like_all_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's longest run first: at its end only short ones are known that wait. And it takes time to read one."""
    clock, random = Clock(), np.random.default_rng(7)
    monkeypatch.setattr(module, "time", clock)
    job, begun, told = Forecast(400, SLOTS), clock.now, list[tuple[float, Percentiles | None]]()

    def tell() -> None:
        told.append((clock.now - begun, job.left(clock.now - begun)))

    for window in range(1, 5):
        most = sorted((int(each) for each in random.integers(1, 41, 100)), reverse=True)
        clock.now += 100 * 0.02
        job.read(100 * window, 100 * 0.02)
        made_up(job, [Running(20, each, each) for each in most], clock, tell)
    took = clock.now - begun
    for elapsed, left in told[40:360]:
        assert left is not None
        assert elapsed + left.middle == pytest.approx(took, rel=0.1)


def test_a_block_that_ends_at_once_after_few_steps_is_no_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first twenty of its answers are told while the others are finished, too."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    for length in (3, 9):
        job, begun = Forecast(2048, 256), clock.now
        clock.now += 60  # weights are loaded
        requests = [Running(20, length, length) for _ in range(job.requests)]
        made_up(job, requests, clock, lambda job=job, begun=begun: job.note(clock.now - begun))  # type: ignore[misc]
        assert job.first is not None
        assert job.first.middle == pytest.approx(clock.now - begun, rel=0.2)


def test_the_pace_is_found_out_from_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, random = Clock(), np.random.default_rng(5)
    monkeypatch.setattr(module, "time", clock)
    job = Forecast(60, SLOTS)
    made_up(job, drawn(random, 60, 40), clock, lambda: None)
    found = job.meter.pace(60)
    assert found is not None
    assert (found.prompt, found.step, found.token) == pytest.approx((TRUE.prompt, TRUE.step, TRUE.token), rel=0.1)
    assert Meter().pace(1) is None


def test_a_sample_tells_how_long_blocks_of_few_rows_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block but the last is full to its end: from its steps alone, seconds of a step and of its tokens cannot be
    told apart."""
    clock, true = Clock(), replace(TRUE, step=0.0, token=0.004)
    monkeypatch.setattr(module, "time", clock)

    def alike(count: int) -> list[Running]:
        return [Running(20, 40, 40 - (i % SLOTS == 0)) for i in range(count)]

    sample, job = Forecast(12, SLOTS), Forecast(4 * SLOTS + 1, SLOTS)
    made_up(sample, alike(12), clock, lambda: None, true)
    found = sample.meter.pace(12)
    assert found is not None
    job.pace, job.lengths = replace(found, spread=OF_SAMPLE), sample.answers
    job.meter.learn(sample.meter)
    begun = clock.now
    took = made_up(job, alike(job.requests), clock, lambda: job.note(clock.now - begun), true)
    half = job.halfway(took)
    assert half is not None
    assert half.low <= took <= half.high
    assert half.middle == pytest.approx(took, rel=0.02)


def test_lengths_of_answers_that_were_cut_or_are_under_way() -> None:
    """A third of answers end after 3 tokens, the others after 40: neither what cut some of them nor what has come of
    others makes these shorter."""
    lengths, random = Lengths(), np.random.default_rng(1)
    for i in range(600):
        lengths.add(min(3 if i % 3 == 0 else 40, 10 if i % 2 else 50), 10 if i % 2 else 50)
    got, most = np.array([0, 0, 2, 3, 39]), np.array([50, 8, 50, 50, 50])
    means = lengths.drawn(np.repeat(got, 20), np.repeat(most, 20), random).reshape(-1, 5, 20).mean((0, 2))
    assert means == pytest.approx([(3 + 2 * 40) / 3, (3 + 2 * 8) / 3, (3 + 2 * 40) / 3, 40, 40], rel=0.05)
    assert Lengths().drawn(got, most, random)[0].tolist() == most.tolist()


@pytest.mark.parametrize(("running", "places", "count"), [(0, 8, 40), (8, 8, 200), (5, 16, 7), (3, 1, 0), (0, 1, 9)])
def test_steps_of_a_block_are_those_of_its_schedule(running: int, places: int, count: int) -> None:
    """Beside a loop over steps."""
    random = np.random.default_rng(2)
    first = random.integers(1, 30, (2, running))
    rest = np.maximum(random.integers(1, 30, (2, count)) * random.integers(0, 2, count), 1)
    for draw, told in enumerate(block_steps(first.astype(float), rest.astype(float), places, 1.0)):
        block, queue, steps, idle = [*map(int, first[draw])], [*map(int, rest[draw])], 0, 0
        size = max(places, running)
        block += [0] * (size - running)
        begins = True
        while any(left > 0 for left in block) or queue:
            done = sum(left <= 0 for left in block)
            idle += done
            if begins or idle >= size or 4 * done >= size:
                block = [queue.pop(0) if left <= 0 and queue else left for left in block]
                idle, begins = 0, False
            block, steps = [left - 1 for left in block], steps + 1
        assert told == pytest.approx(steps, rel=0.05, abs=2)


def test_ranges_are_said_for_people() -> None:
    for told, text in ((Percentiles(2.2, 3, 4.4), "2.2 to 4.4 s"), (Percentiles(90, 200, 700), "1.5 to 11.7 min"),
                       (Percentiles(4e4, 5e4, 8e4), "11 to 22 h")):  # fmt: skip
        assert seconds_text(told) == text


def test_what_a_plan_says(
    tmp_path: Path, model: Path, batch: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # other tests may have calibrated this machine
    learnt, learn = list[Pace | None](), Meter.learn
    monkeypatch.setattr(Meter, "learn", lambda self, other: (learnt.append(other.pace(1)), learn(self, other)))
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
    assert len(learnt) == 2
    assert None not in learnt, "a job goes on with the steps of its sample"
    assert results(out, "line") == results(plain, "line"), "a sample changes no answer"
    assert ran.record["forecast"].keys() == {"first", "half", "measured"}
    assert "expected: " in ran.err
    one = batch("--plan", write(tmp_path / "one.jsonl", lines[0]), *flags)
    assert one.out.startswith("1 request, 6 prompt tokens, ")
    assert batch("--plan", tmp_path, *flags).err.startswith(f"error: {tmp_path} is not a file\n")
    for arguments in (("-i", path), ("-o", out), (), ("--plan", path, "-i", path), ("--plan", path, "--sample", -1)):
        assert batch(*arguments, *flags).code == 2
