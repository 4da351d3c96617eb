"""Every system's best batch: searched once, kept in the folder of the comparison, then compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from h2o_flexgen.baselines.batches import Search, common, search, smaller
from h2o_flexgen.baselines.compare import Comparison, Say, compare
from h2o_flexgen.baselines.runner import Runner
from h2o_flexgen.baselines.store import Store, read, write
from h2o_flexgen.errors import UsageError


@dataclass
class Batches:
    """The searches in a folder's batches.json, by system, and the batch at which all are compared, once it is known."""

    path: Path
    settings: dict[str, Any]
    searches: dict[str, Search] = field(default_factory=dict)
    common: int | None = None

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any]) -> Batches:
        """What the folder holds. UsageError where it has other settings, or is not readable."""
        found = cls(folder / "batches.json", settings)
        if found.path.exists():
            data = read(found.path, settings)
            try:
                found.searches = {name: Search(**one) for name, one in data["systems"].items()}
                found.common = data["common"]
            except (KeyError, TypeError, AttributeError) as error:
                raise UsageError(f"{found.path} is not one of bench: {error!r}", "", "name another folder") from None
        return found

    def keep(self, name: str, found: Search) -> None:
        """A search as far as it is."""
        self.searches[name] = found
        self.write()

    def write(self) -> None:
        """The file, anew. StorageError where that is not possible."""
        systems = {name: asdict(found) for name, found in self.searches.items()}
        data = {"settings": self.settings, "common": self.common, "systems": systems}
        write(self.path, json.dumps(data, indent=1) + "\n")


def at_best(runner: Runner, folder: Path, say: Say) -> list[tuple[str, Comparison]]:
    """Compares at a common batch, and every system at its best where that differs, or with only_best nothing else.

    What is searched or measured already in the folder is taken from there.
    """
    settings, kept = runner.settings, runner.kept_settings
    names = [name for name in settings.systems if runner.missing(name) is None]
    batches = Batches.open(folder, kept)
    for name in names:
        found = batches.searches.get(name, Search())
        known = len(found.tried)
        search(runner, name, say, found, partial(batches.keep, name))
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
