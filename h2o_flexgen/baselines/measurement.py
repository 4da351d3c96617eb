"""What one run of one system measured, and the record of it."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass, field
from typing import Any

from h2o_flexgen.baselines.origin import KEYS
from h2o_flexgen.config.reports.record import DERIVED, Throughput

SCHEMA = 2
_ADDED = ("shared", "peak_cgroup_bytes", "disk_read_bytes", "process_read_bytes", "bytes_moved")  # since the first


@dataclass(frozen=True, kw_only=True)
class Measurement(Throughput):
    """One run of one system. Seconds, bytes, tokens per second; rates are None where no time was spent.

    date                of its start, ISO 8601
    peak_rss_bytes      of the whole process, imports and loading included, by the kernel's count
    peak_cgroup_bytes   of its control group, page cache included; None where there was no cap
    disk_read_bytes     while it generated, by the kernel's count; None where the system's process did not say
    process_read_bytes  from its start to its end; None where the kernel, or a record of before, does not say
    bytes_moved         between tiers while it generated, where the system counts that
    process_s           from the start of the process to its end
    load_average        of the machine before the run: runs bring it to their threads, what is above is something else
    shared              who had the cores while it generated, as `cores.CoreCount` says it; None in older records
    token_ids           a list per sequence; empty in a record that was read again and is of random weights
    origin              version, commit and host, as `origin` gives them
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
    peak_cgroup_bytes: int | None
    disk_read_bytes: int | None
    process_read_bytes: int | None
    bytes_moved: dict[str, int] | None
    shared: dict[str, Any] | None = None
    sequences: int
    prompt_tokens: int
    generated_tokens: int
    versions: dict[str, str]
    token_ids: list[list[int]] = field(repr=False)
    detail: dict[str, Any] = field(repr=False)
    origin: dict[str, Any] = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """The peak of the control group where there was one, else of resident memory."""
        return self.peak_rss_bytes if self.peak_cgroup_bytes is None else self.peak_cgroup_bytes

    @property
    def ended(self) -> datetime.datetime:
        """When its process had ended."""
        return datetime.datetime.fromisoformat(self.date) + datetime.timedelta(seconds=self.process_s)

    def to_json(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The record as it is written. Tokens only where they mean something: those of random weights do not."""
        data = dataclasses.asdict(self)
        detail, tokens, origin = (data.pop(name) for name in ("detail", "token_ids", "origin"))
        data.update((name, getattr(self, name)) for name in ("peak_bytes", *DERIVED))
        if settings["weights"] == "checkpoint":
            data["token_ids"] = tokens
        return {"bench_run": SCHEMA, **data, **origin, "settings": settings, "detail": detail}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        """What `to_json` made a record of; ValueError where something is missing."""
        origin = {key: data[key] for key in KEYS if key in data}
        known = {**dict.fromkeys(_ADDED), **data, "token_ids": data.get("token_ids", []), "origin": origin}
        names = [item.name for item in dataclasses.fields(cls)]
        missing = [name for name in names if name not in known]
        if missing:
            raise ValueError(f"has no {', '.join(missing)}")
        return cls(**{name: known[name] for name in names})
