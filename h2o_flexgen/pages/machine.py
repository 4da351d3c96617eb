"""The machine in runs: the schedule as a timeline, memory over time, and where each phase stands on the roofline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from h2o_flexgen.pages.page import Chapter, Figure, Passage, Table, line_figure
from h2o_flexgen.pages.reading import Json, Material, Run, number_in, object_in
from h2o_flexgen.pages.throughput import called, measured
from h2o_flexgen.pages.traces import KINDS, Stall, TraceFile, kind_of, stalls, thinned
from h2o_flexgen.reporting.run_report import ARITHMETIC
from h2o_flexgen.schedule.timeline import Level, Timeline
from h2o_flexgen.units import format_bytes, format_rate, format_seconds

MOST_TASKS = 120_000
"""Tasks of a timeline that the page keeps one by one."""
MOST_STALLS = 400
MOST_LEVELS = 4_000
LEAST_STALL = 1e-3
"""Of the span: shorter gaps are not marked, but are counted."""
LOOSE = 20
"""Caps of so many times what was used are not drawn: they would flatten everything else."""


def schedule(material: Material) -> Chapter:
    parts = [part for trace in material.traces for part in _timeline(trace, len(material.traces) > 1)]
    text = (
        "Computing, and copies over each link, by time. Predicted: the schedule of the plan on the clock of the cost "
        "model, first block, decode steps that repeat left out; measured: the run. Red dashes: no computing."
    )
    return Chapter("schedule", "Schedule", [text], parts)


def _timeline(trace: TraceFile, several: bool) -> Iterator[Passage]:
    shown = (
        ("predicted", trace.predicted, "a prediction: give the run a calibrated machine"),
        ("measured", trace.measured, "a measurement"),
    )
    there = [(name, timeline) for name, timeline, _ in shown if timeline is not None and timeline.rows]
    if not there:
        return
    total = sum(len(timeline.rows) for _, timeline in there)
    names, causes, lanes = dict[str, int](), dict[str, int](), list[Json]()
    gaps = {name: stalls(timeline) for name, timeline in there}
    for name, timeline in there:
        share = max(1_000, MOST_TASKS * len(timeline.rows) // total)
        lanes += _lanes(name, timeline, share, gaps[name], names, causes)
    kept = sum(len(lane["rows"]) for lane in lanes)
    texts = [
        "Zoom with the buttons, the slider, ctrl and wheel, or the keys + - and arrows; bars narrower than two pixels "
        "are drawn together, and part again as you zoom in."
    ]
    if kept < total:
        texts.append(f"{total:,} tasks were traced; neighbours were joined to {kept:,}.")
    texts += [f"Not in this trace: {missing}." for name, _, missing in shown if name not in dict(there)]
    span = max(timeline.span for _, timeline in there)
    label = "; ".join(f"{name}: {_busy(timeline)}" for name, timeline in there if timeline.span)
    figure = Figure(
        "timeline",
        f"Timeline of {trace.source}" if several else "Timeline",
        f"Timeline of {len(lanes)} lanes. {label}.",
        {"lanes": lanes, "names": list(names), "kinds": KINDS, "causes": list(causes), "span": span},
        wide=True,
        height=7 + 2.4 * len(lanes),
    )
    yield Passage("", texts, [figure], [_stall_table(name, timeline, gaps[name]) for name, timeline in there])


def _busy(timeline: Timeline) -> str:
    shares = [f"{each} busy for {timeline.busy(each) / timeline.span:.0%}" for each in timeline.resources]
    return f"{format_seconds(timeline.span)}, {', '.join(shares)}"


def _lanes(
    name: str, timeline: Timeline, most: int, gaps: Sequence[Stall], names: dict[str, int], causes: dict[str, int]
) -> Iterator[Json]:
    """A lane per resource; rows are [start, length, kind, name], in whole microseconds and indices."""
    by_resource = defaultdict(list)
    for row in timeline.rows:
        by_resource[row.resource].append(row)
    begun = timeline.start
    long = sorted(
        (gap for gap in gaps if gap.end - gap.start >= LEAST_STALL * timeline.span), key=lambda gap: gap.start - gap.end
    )

    def micro(start: float, end: float) -> list[int]:
        """Start and length; ends are rounded as starts are, so that tasks that follow at once do not overlap."""
        first, last = round((start - begun) * 1e6), round((end - begun) * 1e6)
        return [first, last - first]

    for resource in sorted(by_resource, key=lambda each: ("->" in each, each)):
        rows = thinned(by_resource[resource], max(100, most * len(by_resource[resource]) // len(timeline.rows)))
        yield {
            "name": f"{name}: {resource}",
            "process": name,
            "resource": resource,
            "rows": [
                [*micro(row.start, row.end), kind_of(row), names.setdefault(row.task, len(names))] for row in rows
            ],
            "stalls": [
                [*micro(gap.start, gap.end), causes.setdefault(gap.cause, len(causes))]
                for gap in sorted(long[:MOST_STALLS])
            ]
            if resource == "compute"
            else [],
        }


def _stall_table(name: str, timeline: Timeline, gaps: Sequence[Stall]) -> Table:
    lasted = defaultdict[str, list[float]](list)
    for gap in gaps:
        lasted[gap.cause].append(gap.end - gap.start)
    totals = {cause: sum(seconds) for cause, seconds in lasted.items()}
    rows = [
        [cause, f"{len(lasted[cause]):,}", format_seconds(total), f"{total / timeline.span:.1%}"]
        for cause, total in sorted(totals.items(), key=lambda item: -item[1])
    ]
    idle = format_seconds(sum(totals.values()))
    return Table(
        f"{name}: why nothing was computed, {idle} of {format_seconds(timeline.span)}",
        ["cause", "times", "seconds", "of the run"],
        rows or [["it never waited", "0", "0 s", "0 %"]],
    )


def memory(material: Material) -> Chapter:
    parts = [part for trace in material.traces for part in _memory_over_time(trace)]
    peaks = _peaks(material.runs)
    texts = ["Bytes in use on each tier, and resident in the process, which is what a cap on host memory holds for."]
    if not parts:
        texts.append("Over time: not in these records; run --trace FILE or run --report FILE records it.")
    return Chapter("memory", "Memory", texts, [*parts, *([Passage(tables=[peaks])] if peaks else [])])


def _memory_over_time(trace: TraceFile) -> Iterator[Passage]:
    timeline = trace.measured
    if timeline is None or not timeline.memory:
        return
    lines, most = list[Json](), dict[str, int]()
    for level in timeline.memory:
        most[level.tier] = max(level.nbytes, most.get(level.tier, 0))
    for colour, tier in enumerate(most):
        levels = [level for level in timeline.memory if level.tier == tier]
        points = [[max(0.0, level.at - timeline.start), level.nbytes] for level in _thin_levels(levels)]
        points.append([timeline.span, points[-1][1]])
        lines.append({"name": tier, "points": points, "step": True, "plain": True, "colour": colour})
        cap = timeline.caps.get(tier)
        if isinstance(cap, int | float) and 0 < cap < LOOSE * most[tier]:
            edge = [[0, cap], [timeline.span, cap]]
            lines.append({"name": f"{tier}, cap", "points": edge, "dashed": True, "plain": True, "colour": colour})
    said = ", ".join(f"{tier} at most {format_bytes(nbytes)}" for tier, nbytes in most.items())
    x, y = {"name": "seconds since the first task", "min": 0}, {"name": "bytes", "form": "bytes", "min": 0}
    figure = line_figure(f"Memory over time, {trace.source}", x, y, lines, f"Memory over time: {said}.", wide=True)
    loose = [
        f"{tier} {format_bytes(cap)}"
        for tier, cap in timeline.caps.items()
        if tier in most and cap >= LOOSE * max(1, most[tier])
    ]
    texts = [f"Caps more than {LOOSE} times what was used are not drawn: {', '.join(loose)}."] if loose else []
    yield Passage("", texts, [figure])


def _thin_levels(levels: Sequence[Level]) -> list[Level]:
    """At most about MOST_LEVELS, of each window the highest, so that no peak is lost."""
    step = -(-len(levels) // MOST_LEVELS)
    return [max(levels[at : at + step], key=lambda level: level.nbytes) for at in range(0, len(levels), step)]


def _peaks(runs: Sequence[Run]) -> Table | None:
    """The most that runs of a kind ever held."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for run in runs:
        record, each = run.record or {}, measured(run)
        peaks = record.get("peak_bytes", run.data.get("peak_bytes"))
        peaks = peaks if isinstance(peaks, dict) else {"rss": peaks}
        name = f"{each.work.model}, {called(each)}" + ("" if each.batch is None else f", batch {each.batch:g}")
        for tier, nbytes in {**peaks, "kv": number_in(record, "kv_bytes", run.source)}.items():
            if isinstance(nbytes, int | float):
                found[name][tier] = max(nbytes, found[name].get(tier, 0))
    if not found:
        return None
    tiers = {"gpu": "gpu tier", "cpu": "cpu tier", "disk": "disk tier", "rss": "process", "kv": "KV cache of a block"}
    rows = [
        [name, *(format_bytes(peaks[tier]) if tier in peaks else "-" for tier in tiers)]
        for name, peaks in found.items()
    ]
    return Table("Peaks, the most of all runs", ["run", *tiers.values()], rows)


_MOST_ROWS = 60


def roofline(material: Material) -> Chapter:
    """Where the phases of runs stand under the roof of the machine's rates, as far as work was counted."""
    machines = defaultdict(list)
    for run in material.runs:
        if run.record and run.record.get("roofline"):
            machines[_rates(run.record, run.source)].append((run, run.record))
    parts = [part for rates, runs in machines.items() for part in _roof(dict(rates), runs)]
    text = (
        "Each phase at its FLOPs per byte read from memory and its FLOPs per second, under rates that were measured on "
        "the machine: the slope is memory, the level is arithmetic. A point far below the roof was held up by "
        "something else."
    )
    return Chapter("roofline", "Roofline", [text], parts)


def _phases(record: Json, source: str) -> Iterator[tuple[str, Json, Json]]:
    for phase, each in object_in(record, "roofline", source).items():
        if isinstance(each, dict) and isinstance(each.get("resources"), dict) and each.get("measured_s"):
            yield phase, each, each["resources"]


def _rates(record: Json, source: str) -> tuple[tuple[str, float], ...]:
    """Of memory and arithmetic, as far as the record has them."""
    found = dict[str, float]()
    for _, _, resources in _phases(record, source):
        for name in ("memory reads", ARITHMETIC):
            rate = resources.get(name, {}).get("rate")
            if rate:
                found[name] = max(rate, found.get(name, 0.0))
    return tuple(sorted((name, float(f"{rate:.3g}")) for name, rate in found.items()))


def _roof(rates: Mapping[str, float], runs: Sequence[tuple[Run, Json]]) -> Iterator[Passage]:
    memory_rate, top = rates.get("memory reads"), rates.get(ARITHMETIC)
    if not memory_rate or not top:
        return
    points: dict[str, list[list[float]]] = defaultdict(list)
    rows = []
    for run, record in runs:
        for phase, each, resources in _phases(record, run.source):
            work = [
                sum(resources.get(name, {}).get(unit, {}).values())
                for name, unit in ((ARITHMETIC, "flops"), ("memory reads", "bytes"))
            ]
            if not all(work):
                continue
            name, flops = f"{phase}, {called(measured(run))}", work[0] / each["measured_s"]
            points[name].append([work[0] / work[1], flops])
            bound = each.get("bound") or {}
            achieved = f"{each['achieved']:.0%}" if isinstance(each.get("achieved"), float) else "-"
            rates_of = [f"{work[0] / work[1]:.3g}", f"{flops / 1e9:.3g} GFLOP/s"]
            rows.append([name, *rates_of, str(bound.get("resource", "-")), achieved])
    if not points:
        return
    at = [point[0] for each in points.values() for point in each]
    low, high, ridge = min(*at, top / memory_rate) / 3, max(*at, top / memory_rate) * 3, top / memory_rate
    edge = [[low, low * memory_rate], [ridge, top], [high, top]]
    lines: list[Json] = [{"name": "roof", "plain": True, "colour": 7, "points": edge}]
    for colour, (name, marks) in enumerate(points.items()):
        lines.append({"name": name, "points": marks, "scatter": True, "colour": colour})
    title = f"Memory {format_rate(memory_rate)}, arithmetic {top / 1e9:.3g} GFLOP/s"
    label = f"Roofline with {sum(map(len, points.values()))} points: {', '.join(points)}."
    x, y = {"name": "FLOPs per byte read", "log": 10}, {"name": "FLOP/s", "log": 10}
    figure = line_figure(title, x, y, lines, label, wide=True)
    seen = [list(row) for row in dict.fromkeys(map(tuple, rows))][:_MOST_ROWS]
    head = ["phase, run", "FLOPs/byte", "achieved", "bound by", "of the bound"]
    yield Passage(figures=[figure], tables=[Table("Phases", head, seen)])
