"""Chrome trace files read back: the timelines in them, and why the compute waited."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from h2o_flexgen.errors import UsageError
from h2o_flexgen.schedule.timeline import COUNTER, MEASURED, PREDICTED, Level, Row, Timeline


@dataclass(frozen=True)
class TraceFile:
    """The timelines in a trace file: a measured one, a simulated one, or both."""

    source: str
    measured: Timeline | None
    predicted: Timeline | None


class Stall(NamedTuple):
    """A time in which nothing was computed, and what was waited for."""

    start: float
    end: float
    cause: str


def trace_of(data: Mapping[str, Any], source: str) -> TraceFile:
    """The trace in a parsed file: complete events by process and thread, and counters of memory.

    A process called "predicted" is a simulation, the first other one is the run. UsageError for events that are none.
    """
    events = data.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UsageError(f"{source}: traceEvents is not a list of events", "needed Chrome trace JSON")
    other = data.get("otherData")
    caps = other.get("caps", {}) if isinstance(other, dict) else {}
    names, rows, levels = dict[Any, str](), dict[Any, list[Row]](), dict[Any, list[Level]]()
    for number, event in enumerate(events):
        try:
            _take(event, names, rows, levels)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{source}: event {number} is not of a trace: {error!r}", f"found {event!r:.200}"
            ) from None
    timelines = {
        names.get(pid, MEASURED): Timeline(
            tuple(sorted(rows[pid], key=lambda row: row.start)), tuple(levels.get(pid, ())), caps
        )
        for pid in rows
    }
    predicted = timelines.pop(PREDICTED, None)
    return TraceFile(source, next(iter(timelines.values()), None), predicted)


def _take(
    event: Mapping[str, Any], names: dict[Any, str], rows: dict[Any, list[Row]], levels: dict[Any, list[Level]]
) -> None:
    kind, pid = event["ph"], event.get("pid", 1)
    if kind == "M" and event["name"] == "process_name":
        names[pid] = str(event["args"]["name"])
    elif kind == "M" and event["name"] == "thread_name":
        names[pid, event["tid"]] = str(event["args"]["name"])
    elif kind == "X":
        start, resource = float(event["ts"]) / 1e6, names.get((pid, event["tid"]), f"thread {event['tid']}")
        row = Row(str(event["name"]), start, start + float(event["dur"]) / 1e6, resource)
        rows.setdefault(pid, []).append(row)
    elif kind == "C" and str(event["name"]).startswith(COUNTER):
        tier, nbytes = str(event["name"]).removeprefix(COUNTER), int(event["args"]["bytes"])
        levels.setdefault(pid, []).append(Level(float(event["ts"]) / 1e6, tier, nbytes))


def is_compute(resource: str) -> bool:
    """Whether a lane computes: that of a stage, or the host's attention; all others are links."""
    return "->" not in resource


def stalls(timeline: Timeline) -> list[Stall]:
    """Gaps in which no stage computed, in order, each with its cause.

    A gap is laid to the transfer that ended last before computing went on, if one ended in the gap: the task after it
    waited for that. Otherwise the computing thread did something that no row tells.
    """
    computed = sorted((row for row in timeline.rows if is_compute(row.resource)), key=lambda row: row.start)
    moved = sorted((row for row in timeline.rows if not is_compute(row.resource)), key=lambda row: row.end)
    ends = [row.end for row in moved]
    found, until = list[Stall](), computed[0].end if computed else 0.0
    for row in computed:
        if row.start > until:
            # Its end is seen a little after the thread that waited goes on, or before.
            slack = 0.05 * (row.start - until)
            inside = moved[bisect_left(ends, until) : bisect_right(ends, row.start + slack)]
            found.append(Stall(until, row.start, _cause(inside[-1] if inside else None)))
        until = max(until, row.end)
    return found


def _cause(last: Row | None) -> str:
    if last is None:
        return "no transfer ended meanwhile: choosing tokens, bookkeeping"
    return f"waiting for {last.resource}: {KINDS[kind_of(last)]}"


KINDS = ("attention", "MLP", "embedding and head", "weights", "KV cache", "hidden states", "experts", "other")
_WORDS = {"weights": 3, "cache": 4, "hidden": 5, "expert": 6, ".attn": 0, ".mlp": 1, "embed": 2, "head": 2}


def kind_of(row: Row) -> int:
    """Which of KINDS a row is, by the words of its task; on a link a group's own name stands for its weights."""
    kind = next((kind for word, kind in _WORDS.items() if word in row.task.lower()), len(KINDS) - 1)
    return 3 if kind not in (3, 4, 5, 6) and not is_compute(row.resource) else kind


def thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most about `most` rows of one lane: neighbours that start within one window are joined, and say how many."""
    if len(rows) <= most:
        return list(rows)
    start, end = rows[0].start, max(row.end for row in rows)
    window = (end - start) / most or 1.0
    joined = dict[int, list[Row]]()
    for row in rows:
        joined.setdefault(int((row.start - start) / window), []).append(row)
    return [
        each[0]
        if len(each) == 1
        else Row(
            f"{len(each)} tasks from {each[0].task}", each[0].start, max(row.end for row in each), each[0].resource
        )
        for each in joined.values()
    ]
