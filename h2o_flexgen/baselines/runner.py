"""One run of one system at one batch size, in its environment and under the cap; what came of it."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from h2o_flexgen.baselines.measurement import Measurement
from h2o_flexgen.baselines.memcap import cap_command, cap_problem, read_report
from h2o_flexgen.baselines.origin import origin
from h2o_flexgen.baselines.process import Finished, RunFailed, run_process
from h2o_flexgen.baselines.settings import BenchModel, BenchSettings
from h2o_flexgen.baselines.systems import SYSTEMS, System
from h2o_flexgen.baselines.work import Outcome, Work

Prompts = Callable[[int], Sequence[Sequence[int]]]
"""From a batch size to that many prompts, the first ones the same for every size."""


class Runner:
    """Runs systems on one model.

    `scratch` is a folder for the systems' files, `work` one for what they are asked. The attribute `uncapped` says why
    --cpu-mem does not hold, None where it does or there is none.
    """

    def __init__(self, settings: BenchSettings, model: BenchModel, prompts: Prompts, scratch: Path, work: Path) -> None:
        self.settings, self._model, self._prompts = settings, model, prompts
        self._files = scratch / settings.model_name
        self._work = work / "work"
        self._prepared: set[tuple[str, int]] = set()
        self.uncapped = cap_problem() if settings.cpu_mem is not None else None

    @property
    def kept_settings(self) -> dict[str, Any]:
        """The settings as every record has them, and whether --cpu-mem holds, None where there is none."""
        enforced = None if self.settings.cpu_mem is None else self.uncapped is None
        return {**self.settings.to_json(), "cap_enforced": enforced}

    def missing(self, name: str) -> str | None:
        """Why a system cannot be run at all; None where it can."""
        system = SYSTEMS.get(name)
        if system.python(Path(self.settings.peers)) is None:
            return f"not installed: scripts/peer_env.sh {system.environment}"
        return None

    def prepare(self, name: str, batch: int, gen_len: int) -> bool:
        """Has a system make what its runs use, which may take minutes. False where there was nothing to do.

        RunFailed where it fails.
        """
        system = SYSTEMS.get(name)
        # Files of others serve every batch; ours may have to calibrate for a large one and not for a small one.
        wanted = (name, batch if system.own else 0)
        if not system.prepares or wanted in self._prepared:
            return False
        folder, _ = self._ask(name, batch, gen_len)
        self._finish(system, [str(folder), "prepare"], capped=None)
        self._prepared.add(wanted)
        return True

    def run(self, name: str, batch: int, gen_len: int, repetition: int = 1) -> Measurement:
        """Runs a system on `batch` prompts for `gen_len` new tokens. RunFailed where that gives no measurement."""
        self.prepare(name, batch, gen_len)
        system = SYSTEMS.get(name)
        folder, scratch = self._ask(name, batch, gen_len)
        came_from = origin()
        date, load = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), os.getloadavg()[0]
        report = None if self.settings.cpu_mem is None or self.uncapped else folder / "memcap.json"
        finished = self._finish(system, [str(folder)], report, scratch)
        outcome = _outcome(finished, batch, gen_len)
        return Measurement(
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
            peak_cgroup_bytes=None if report is None else read_report(report).get("peak_bytes"),
            disk_read_bytes=outcome.disk_read_bytes,
            process_read_bytes=finished.read_bytes,
            bytes_moved=outcome.bytes_moved,
            shared=outcome.shared,
            sequences=batch,
            prompt_tokens=batch * self.settings.prompt_len,
            generated_tokens=batch * gen_len,
            versions=outcome.versions,
            token_ids=outcome.token_ids,
            detail=outcome.detail,
            origin=came_from,
        )

    def _ask(self, name: str, batch: int, gen_len: int) -> tuple[Path, Path]:
        """Writes down what a system is to do: (the folder of that, the one for its files)."""
        settings, checkpoint, system = self.settings, self._model.folder, SYSTEMS.get(name)
        folder, scratch = self._work / name, self._files / system.scratch
        scratch.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        work = Work(
            model=settings.model,
            folder=None if checkpoint is None else str(checkpoint.resolve()),
            weights=settings.weights,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            seed=settings.seed,
            gen_len=gen_len,
            prompts=[list(prompt) for prompt in self._prompts(batch)],
            options=system.options(settings.hh_ratio),
            cpu_mem=settings.cpu_mem,
            gpu_mem=settings.gpu_mem,
            scratch=str(scratch.resolve()),
            plan=settings.plan if system.own else "rule",
            room_len=settings.gen_len,
        )
        work.write(folder, self._model.config)
        return folder, scratch

    def _finish(self, system: System, arguments: list[str], capped: Path | None, *cold: Path) -> Finished:
        """Runs the adapter to its end, under the cap where there is a file to report to. RunFailed where it failed."""
        prefix: list[str] = []
        if capped is not None and self.settings.cpu_mem is not None:
            files = [path for path in (*cold, self._model.folder) if path is not None]
            prefix = cap_command(self.settings.cpu_mem, files, capped)
        python = system.python(Path(self.settings.peers)) or ""
        settings = self.settings
        finished = run_process(
            system.adapter, arguments, settings.threads, settings.timeout, python, prefix, own=system.own
        )
        return finished.checked()


def _outcome(finished: Finished, batch: int, gen_len: int) -> Outcome:
    """What the adapter said; RunFailed where it did not do the work."""
    try:
        outcome = Outcome.from_line(finished.last_line)
    except ValueError as error:
        raise RunFailed(str(error), errors=finished.errors) from None
    lengths = [len(tokens) for tokens in outcome.token_ids]
    if lengths != [gen_len] * batch:
        reason = f"generated {sorted(set(lengths))} tokens for {len(lengths)} prompts, not what was asked"
        raise RunFailed(reason, errors=finished.errors)
    return outcome
