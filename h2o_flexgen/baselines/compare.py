"""Runs systems in turn, repetition by repetition, and writes a record of every run."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h2o_flexgen.baselines.process import Finished, run_process
from h2o_flexgen.baselines.settings import BenchModel, BenchSettings
from h2o_flexgen.baselines.systems import SYSTEMS
from h2o_flexgen.baselines.work import Outcome, Work
from h2o_flexgen.config.rates import DERIVED, Rates
from h2o_flexgen.config.record import host_facts, package_version
from h2o_flexgen.errors import StorageError

Say = Callable[[str], None]
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Measurement(Rates):
    """One run of one system. Seconds, bytes, tokens per second; rates are None where no time was spent.

    peak_rss_bytes   of the whole process, imports and loading included, by the kernel's count
    process_s        from the start of the process to its end
    load_average     of the machine before the run: runs bring it to their threads, what is above is something else
    """

    system: str
    repetition: int
    date: str
    load_average: float
    prefill_s: float
    decode_s: float
    total_s: float
    load_s: float
    process_s: float
    peak_rss_bytes: int
    sequences: int
    prompt_tokens: int
    generated_tokens: int
    versions: dict[str, str]
    token_ids: list[list[int]] = field(repr=False)
    detail: dict[str, Any] = field(repr=False)

    def to_json(self, settings: BenchSettings) -> dict[str, Any]:
        """The record as it is written. Tokens only where they mean something: those of random weights do not."""
        data = dataclasses.asdict(self)
        detail = data.pop("detail")
        tokens = data.pop("token_ids")
        data.update((name, getattr(self, name)) for name in DERIVED)
        if settings.weights == "checkpoint":
            data["token_ids"] = tokens
        return {"bench_run": SCHEMA, **data, **environment(settings), "detail": detail}


@dataclass
class Comparison:
    """What came of it: measurements by system, in the order of repetitions, and why a system has none or too few."""

    settings: BenchSettings
    runs: dict[str, list[Measurement]]
    failed: dict[str, str]


def environment(settings: BenchSettings) -> dict[str, Any]:
    """What every record says about how it came to be."""
    return {"version": package_version(), "host": host_facts(), "settings": settings.to_json()}


def compare(
    settings: BenchSettings, model: BenchModel, prompts: Sequence[Sequence[int]], folder: Path, say: Say
) -> Comparison:
    """Runs each system once per repetition, A B C A B C, so that a machine's drift meets all of them.

    Records go to `folder` as they are made. A system that fails is not run again and is listed with its reason.
    """
    result = Comparison(settings, {name: [] for name in settings.systems}, {})
    for name in settings.systems:
        if SYSTEMS.get(name).adapter is None:
            result.failed[name] = SYSTEMS.get(name).says
    with tempfile.TemporaryDirectory(prefix="h2o_flexgen-bench-") as scratch:
        for name in settings.systems:
            _work(settings, name, model, prompts).write(Path(scratch) / name, model.config)
        for repetition in range(1, settings.repetitions + 1):
            for name in settings.systems:
                if name not in result.failed:
                    _run(result, name, repetition, Path(scratch) / name, folder, say)
    return result


def _work(settings: BenchSettings, name: str, model: BenchModel, prompts: Sequence[Sequence[int]]) -> Work:
    return Work(
        model=settings.model,
        folder=None if model.folder is None else str(model.folder),
        weights=settings.weights,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        seed=settings.seed,
        gen_len=settings.gen_len,
        prompts=[list(prompt) for prompt in prompts],
        options=SYSTEMS.get(name).options(settings.hh_ratio),
    )


def _run(result: Comparison, name: str, repetition: int, work: Path, folder: Path, say: Say) -> None:
    settings, label = result.settings, f"{name} {repetition}/{result.settings.repetitions}"
    date, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), os.getloadavg()[0]
    adapter = SYSTEMS.get(name).adapter
    if adapter is None:
        raise ValueError(f"{name} has no adapter")
    finished = run_process(adapter, [str(work)], settings.threads, settings.timeout)
    try:
        outcome = _outcome(finished, settings)
    except ValueError as error:
        result.failed[name] = f"in repetition {repetition}: {error}" if repetition > 1 else str(error)
        _write(folder / f"run-{repetition:02d}-{name}.stderr.txt", finished.errors)
        say(f"{label}: failed, {error}")
        return
    run = Measurement(
        system=name,
        repetition=repetition,
        date=date,
        load_average=load,
        prefill_s=outcome.prefill_s,
        decode_s=outcome.decode_s,
        total_s=outcome.total_s,
        load_s=outcome.load_s,
        process_s=finished.seconds,
        peak_rss_bytes=finished.peak_rss_bytes,
        sequences=settings.batch_size,
        prompt_tokens=settings.batch_size * settings.prompt_len,
        generated_tokens=settings.batch_size * settings.gen_len,
        versions=outcome.versions,
        token_ids=outcome.token_ids,
        detail=outcome.detail,
    )
    result.runs[name].append(run)
    _write(folder / f"run-{repetition:02d}-{name}.json", json.dumps(run.to_json(settings), indent=1) + "\n")
    say(f"{label}: prefill {run.prefill_s:.2f} s, decode {run.decode_s:.2f} s (load average before: {load:.1f})")


def _outcome(finished: Finished, settings: BenchSettings) -> Outcome:
    """What the adapter said; ValueError with a reason where it failed or did not do the work."""
    if finished.exit_code != 0:
        raise ValueError(finished.reason)
    outcome = Outcome.from_line(finished.last_line)
    lengths = [len(tokens) for tokens in outcome.token_ids]
    if lengths != [settings.gen_len] * settings.batch_size:
        raise ValueError(f"generated {sorted(set(lengths))} tokens for {len(lengths)} prompts, not what was asked")
    return outcome


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
