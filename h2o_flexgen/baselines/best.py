"""The batch size at which a system is fastest, found by short runs, and the comparison at it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from h2o_flexgen.baselines.process import RunFailed
from h2o_flexgen.baselines.runner import Comparison, Runner, Say, compare
from h2o_flexgen.baselines.store import Measurement, Store, read, write
from h2o_flexgen.errors import UsageError

FIRST, LARGEST = 8, 512
RISING = 1.03
"""How much more a larger batch must bring to be worth trying the next."""
_FREE_SHARE = 0.8  # of free memory, that a larger batch may be expected to take where nothing caps it


@dataclass
class Search:
    """Batches tried for one system, in that order: batch, gen_throughput as projected to all tokens, or a reason.

    stopped   why it ended before its time, "" where it did not
    """

    tried: list[dict[str, Any]] = field(default_factory=list)
    stopped: str = ""

    @property
    def worked(self) -> dict[int, float]:
        """Projected tokens per second by batch size, of the runs that succeeded."""
        return {run["batch"]: run["gen_throughput"] for run in self.tried if "gen_throughput" in run}

    @property
    def best(self) -> int | None:
        """The fastest batch size; None where none worked."""
        return max(self.worked, key=self.worked.__getitem__, default=None)

    @property
    def reason(self) -> str:
        return next((str(run["failed"]) for run in reversed(self.tried) if "failed" in run), "nothing was tried")


def search(
    runner: Runner, name: str, say: Say, found: Search | None = None, keep: Callable[[], None] = lambda: None
) -> Search:
    """Tries the batch sizes of the settings, or doubles from FIRST (halves where that fails) up to LARGEST.

    Goes on from `found`, with time counted from now; `keep` is called after each try.
    """
    settings, found = runner.settings, found or Search()
    deadline = time.monotonic() + settings.search_time
    capped = settings.cpu_mem is not None and not runner.uncapped
    size = None if found.stopped else _next(found, settings.batch_sizes)
    while size is not None:
        memory = {run["batch"]: run["peak_rss_bytes"] for run in found.tried if "peak_rss_bytes" in run}
        found.stopped = _forbidden(size, memory, deadline, capped)
        if not found.stopped:
            tried = _try(runner, name, size)
            found.tried.append(tried)
            said = (
                "failed, {failed}" if "failed" in tried else "{gen_throughput:.4g} tokens/s, projected from a short run"
            )
            say(f"{name}, batch {size}: {said.format_map(tried)}")
        keep()
        size = None if found.stopped else _next(found, settings.batch_sizes)
    return found


def common(searches: dict[str, Search]) -> int | None:
    """The largest batch that worked for every system for which any did; else the smallest of their best. Or None."""
    working = [one.worked for one in searches.values() if one.worked]
    shared = set.intersection(*map(set, working)) if working else set()
    return max(shared, default=None) or min((one.best for one in searches.values() if one.best), default=None)


def smaller(found: Search) -> list[int]:
    """The batches below the best that worked, best first: for when the full length does not fit after all."""
    best = found.best or 0
    below = [size for size in found.worked if size < best]
    return sorted(below, key=lambda size: -found.worked[size])


def _try(runner: Runner, name: str, size: int) -> dict[str, Any]:
    gen_len = min(runner.settings.search_tokens, runner.settings.gen_len)
    try:
        run = runner.run(name, size, gen_len)
    except RunFailed as error:
        return {"batch": size, "failed": str(error), "out_of_memory": error.out_of_memory}
    speed = projected(run, gen_len, runner.settings.gen_len)
    return {"batch": size, "gen_throughput": speed, "peak_rss_bytes": run.peak_rss_bytes}


def projected(run: Measurement, short: int, gen_len: int) -> float:
    """Generated tokens per second that `gen_len` new tokens would have at the speed of a run of `short`."""
    step = run.decode_s / (short - 1) if short > 1 else 0.0
    return run.sequences * gen_len / (run.prefill_s + (gen_len - 1) * step)


def _next(found: Search, listed: Sequence[int]) -> int | None:
    """The size to try next, None where the search is over. Of those listed, none above one that was too large."""
    worked = found.worked
    if listed:
        done = {run["batch"] for run in found.tried}
        room = min((run["batch"] for run in found.tried if run.get("out_of_memory")), default=math.inf)
        return next((size for size in listed if size not in done and size < room), None)
    if not found.tried:
        return FIRST
    last = found.tried[-1]
    if not worked:
        # Only too little memory gets better with fewer sequences, but engines do not always say that it was that.
        return last["batch"] // 2 or None if last["batch"] <= FIRST else None
    if "failed" in last or last["batch"] < FIRST or last["batch"] >= LARGEST:
        return None
    before = max((speed for size, speed in worked.items() if size < last["batch"]), default=0.0)
    return last["batch"] * 2 if worked[last["batch"]] > RISING * before else None


def _forbidden(size: int, memory: dict[int, int], deadline: float, capped: bool) -> str:
    """Why a size is not to be tried: time is up, or it would take the machine's memory and nothing would stop it."""
    if memory and time.monotonic() > deadline:
        return "the time for the search was up"
    if capped or not memory:
        return ""
    known = sorted(memory)[-2:]
    largest = known[-1]
    slope = memory[largest] / largest
    if len(known) == 2:
        slope = max(0.0, (memory[largest] - memory[known[0]]) / (largest - known[0]))
    expected = memory[largest] + slope * (size - largest)
    free = psutil.virtual_memory().available
    return f"batch {size} could take all memory" if expected > _FREE_SHARE * free else ""


@dataclass
class Batches:
    """The searches in a folder's batches.json, by system, and the batch at which all are compared, once it is known."""

    path: Path
    settings: dict[str, Any]
    searches: dict[str, Search] = field(default_factory=dict)
    common: int | None = None

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any]) -> Batches:
        """The records of the folder. UsageError where it has other settings, or is not readable."""
        found = cls(folder / "batches.json", settings)
        if found.path.exists():
            data = read(found.path, settings)
            try:
                found.searches = {name: Search(**one) for name, one in data["systems"].items()}
                found.common = data["common"]
            except (KeyError, TypeError, AttributeError) as error:
                raise UsageError(f"{found.path} is not one of bench: {error!r}", "", "name another folder") from None
        return found

    def write(self) -> None:
        """The file, anew. StorageError where that is not possible."""
        systems = {name: asdict(found) for name, found in self.searches.items()}
        data = {"settings": self.settings, "common": self.common, "systems": systems}
        write(self.path, json.dumps(data, indent=1) + "\n")


def at_best(runner: Runner, folder: Path, say: Say) -> list[tuple[str, Comparison]]:
    """Compares at a common batch, and every system at its best where that differs; with only_best the latter alone.

    Searches and measurements that the folder holds already are taken from there.
    """
    settings, kept = runner.settings, runner.kept_settings
    names = [name for name in settings.systems if runner.missing(name) is None]
    batches = Batches.open(folder, kept)
    for name in names:
        found = batches.searches.setdefault(name, Search())
        known = len(found.tried)
        search(runner, name, say, found, batches.write)
        if found.best is None and len(found.tried) == known:
            say(f"{name}: no batch worked before (without its entry in {batches.path} it would be tried again)")
    if batches.common is None:
        batches.common = common(batches.searches)
        batches.write()
    searches = {name: batches.searches[name] for name in names}
    failed = {name: found.reason for name, found in searches.items() if found.best is None}
    best = {name: found.best for name, found in searches.items() if found.best is not None}
    equal = {name: size for name in best if (size := batches.common) in searches[name].worked and size is not None}
    parts = []
    if not settings.only_best:
        result = compare(runner, equal, Store.open(folder, kept), say, failed)
        for name in best.keys() - equal.keys():
            result.failed.setdefault(name, f"did not work at batch {batches.common}")
        parts.append(("equal", result))
    if settings.only_best or best != equal:
        below = {name: smaller(searches[name]) for name in best}
        parts.append(("best", compare(runner, best, Store.open(folder / "best", kept), say, failed, below)))
    for _, result in parts:
        result.tried = {name: list(found.tried) for name, found in batches.searches.items()}
    return parts
