"""The record of a run: the numbers behind the table it prints, and the JSON object on its last line."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from h2o_flexgen.config.checks import Checked, KeptAsJson, Natural, Seconds, known_keys, plain
from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.errors import UsageError
from h2o_flexgen.processor import processor_name

RATES = ("gen_throughput", "total_token_throughput", "prefill_throughput", "decode_throughput")
"""Keys of a record that are computed from others."""

_NESTED: dict[str, tuple[str, ...]] = {
    "eviction": ("name", "budget", "heavy", "recent", "sinks"),
    "policy": ("gpu_batch_size", "num_gpu_batches", "weights", "cache", "hidden"),
    "peak_bytes": ("gpu", "cpu", "disk", "rss"),
    "bound": ("phase", "resource", "seconds"),
}
"""Keys that a nested object must have; it may have more."""
_LATER = {"kept", "recall", "dependency", "shared", "quantization", "experts"}
"""Keys that records of earlier versions lack."""


def version_of(package: str) -> str | None:
    """The version that is installed; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_version() -> str:
    return version_of("h2o_flexgen") or "unknown"


def host_facts() -> dict[str, Any]:
    """The machine of the run, without a host name: CPU model, usable cores, memory in bytes, system, Python."""
    return {
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def eviction_entry(name: str, budgets: Sequence[Budget]) -> dict[str, Any]:
    """The `eviction` object of a record: tokens per sequence, [smallest, largest] where sequences differ.

    heavy, recent and sinks add up to the budget, or where less is `kept_of_prompt`, to that.
    """
    entry = {
        "name": name,
        "budget": span_of(budget.total for budget in budgets),
        "heavy": span_of(budget.heavy for budget in budgets),
        "recent": span_of(budget.recent for budget in budgets),
        "sinks": span_of(budget.sinks for budget in budgets),
    }
    if any(budget.prompt is not None for budget in budgets):
        entry["kept_of_prompt"] = span_of(budget.after_prompt for budget in budgets)
    return entry


def span_of(values: Iterable[float]) -> float | list[float]:
    """The one value that all are, or [least, most]; 0 of none."""
    ordered = sorted(values) or [0]
    return ordered[0] if ordered[0] == ordered[-1] else [ordered[0], ordered[-1]]


def utc_now() -> str:
    """The time to the second, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class Throughput:
    """Mixin of everything that is timed, ours and the peers': tokens per second, None where no time was spent."""

    sequences: int
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float
    decode_s: float

    @property
    def gen_throughput(self) -> float | None:
        """Generated tokens per second of prefill and decode together (FlexGen's definition)."""
        return _rate(self.generated_tokens, self.prefill_s + self.decode_s)

    @property
    def total_token_throughput(self) -> float | None:
        """Prompt and generated tokens per second of prefill and decode together (vLLM's definition)."""
        return _rate(self.prompt_tokens + self.generated_tokens, self.prefill_s + self.decode_s)

    @property
    def prefill_throughput(self) -> float | None:
        """Prompt tokens per second of prefill."""
        return _rate(self.prompt_tokens, self.prefill_s)

    @property
    def decode_throughput(self) -> float | None:
        """Generated tokens per second of decode; the first of each sequence is prefill's."""
        return _rate(max(0, self.generated_tokens - self.sequences), self.decode_s)


def _rate(count: int, seconds: float) -> float | None:
    """`count` per second, None where that says nothing: no time, or too little to divide by."""
    rate = count / seconds if seconds > 0 else math.inf
    return rate if math.isfinite(rate) else None


@dataclass(frozen=True, kw_only=True)
class Report(KeptAsJson):
    """The frame of every report: when, where and on which model."""

    version: str = field(default_factory=package_version)
    date: str = field(default_factory=utc_now)
    """ISO 8601, UTC."""
    host: dict[str, Any] = field(default_factory=host_facts)
    model: str
    dtype: str
    device: str


@dataclass(frozen=True, kw_only=True)
class RunRecord(Report, Throughput, Checked):
    """A run, the bytes that it moved and its speed, predicted and measured: seconds, bytes, tokens per second.

    Everything is a plain JSON value; a number that is not finite, an unknown key or a negative count raises UsageError.
    Rates are properties, None where no time was spent.
    """

    DERIVED = RATES
    weights: Literal["checkpoint", "dummy"]
    quantization: dict[str, Any] | None = None
    """`weights` {format, bits, group} and `cache` {bits, group}, each None where that is not packed; None: neither is.
    Bits of weights of several kinds are the mean per number, with scales, and their group is None."""
    experts: dict[str, int] | None = None
    """Of a mixture: `count` in a layer, `active` chosen per token, and in all passes over blocks `read` of the `of`
    that computing with all of them would have read, each once per layer and pass. None: the model has no experts."""
    eviction: dict[str, Any]
    policy: dict[str, Any]
    prompt_len: Natural
    """Of the longest prompt."""
    gen_len: Natural
    """Asked for, of the sequence that asked for most."""
    sequences: Natural
    prompt_tokens: Natural
    generated_tokens: Natural
    load_s: Seconds
    prefill_s: Seconds
    decode_s: Seconds
    total_s: Seconds
    bytes_moved: dict[str, int]
    """By link: "disk->cpu" and so on."""
    bandwidth: dict[str, float | None]
    """Bytes per second of each link while it was busy."""
    flops: Natural
    """Matmul FLOPs of prefill and decode together."""
    peak_bytes: dict[str, int | None]
    kv_bytes: Natural
    """Of keys and values in the largest block, with what packing cost the newest tokens."""
    state_bytes: Natural = 0
    """Of states in the largest block, which short convolutions and recurrences keep of each row."""
    computed_prompt_tokens: int | None = None
    """`prompt_tokens`, but what prompts of a block begin with in common is counted once, as it was computed."""
    bound: dict[str, Any] | None = None
    """The phase that took longest, the resource that was busy longest and for how long."""
    roofline: dict[str, Any] | None = None
    """By phase: the work to be computed, read and moved, the time that it takes at known rates, and the share of the
    measured time that this is. None where no engine of ours counted; docs/roofline.md explains the keys."""
    predicted: dict[str, Any] | None = None
    """Seconds, tokens per second and bytes under the names above, as the cost model expected them of the longest
    lengths of the call, and whose rates these come from."""
    least_bytes_moved: dict[str, int] | None = None
    """By link: the fewest bytes that any schedule with blocks of this size must move within the same caps."""
    projected: bool = False
    """The times come from a simulation, not from a clock."""
    kept: dict[str, dict[str, float]] | None = None
    """By the name of a span of prompts its `tokens`, and how many of these caches held at the end of `prefill` and of
    `decode`: the mean over sequences, layers and KV heads. None: no prompt had spans."""
    recall: dict[str, Any] | None = None
    """With `--recall`: the `tier` behind caches; `recalled`, tokens that came back over all layers and KV heads, of
    `looks` through waiting tokens, in every `every`th step of a row; `written_bytes` of keys and values to the tier and
    `read_bytes` from it, on disk of whole pages, and both `planned`, beside the `most` that may be read, of which the
    engine's later calls plan the share that its earlier ones have read; `hit_rate`, in one look of 8, the attention
    that kept tokens have, by the index, of what as many could have at most. None: evicted tokens were lost."""
    dependency: float | None = None
    """LightThinker's "Dep" (arXiv 2502.15589): over all tokens generated or scored the sum of the tokens held for the
    query that each comes from, itself included, the mean over layers. None where no engine of ours counted."""
    shared: dict[str, Any] | None = None
    """Who had the cores meanwhile: `cores.CoreCount.shared`. None where the system does not say."""
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, plain(getattr(self, item.name), item.name, "RunRecord"))
        super().__post_init__()
        for name, keys in _NESTED.items():
            nested = getattr(self, name)
            if nested is None and name == "bound":
                continue
            missing = [key for key in keys if key not in nested] if isinstance(nested, dict) else list(keys)
            if missing:
                raise UsageError(f"{name} of a RunRecord lacks {', '.join(missing)}", f"found {nested!r}")

    def to_line(self) -> str:
        return json.dumps(self.to_json(), allow_nan=False)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The record of `to_json`; unknown or missing keys, and rates that do not follow, raise UsageError."""
        if isinstance(data, Mapping):
            missing = [
                name for item in dataclasses.fields(cls) if (name := item.name) not in data and name not in _LATER
            ]
            if missing:
                raise UsageError(f"RunRecord lacks the keys {', '.join(missing)}")
        record = cls(**known_keys(data, cls, derived=RATES))
        for name in RATES:
            stored, computed = data.get(name), getattr(record, name)
            if name in data and stored != computed and not (stored and computed and math.isclose(stored, computed)):
                raise UsageError(f"{name} is {stored!r}", f"its tokens and seconds give {computed!r}")
        return record
