"""How fast runs were: bars of what ran the same work, and curves against batch, budget, bits and lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from h2o_flexgen.config.reports.record import Throughput
from h2o_flexgen.pages.page import Chapter, Figure, Passage, Table, line_figure
from h2o_flexgen.pages.reading import NUMBERS, Json, Material, Run, model_name, number_in, object_in

RATES = {"gen_throughput": "end to end", "decode_throughput": "decode", "prefill_throughput": "prefill"}
"""Rates of a record, and what they are called."""
UNKNOWN = "?"


class SameWork(NamedTuple):
    """The work and the machine that runs must share to be compared."""

    model: str
    weights: str
    dtype: str
    device: str
    prompt: str
    new: str
    machine: str


@dataclass(frozen=True)
class PlottedRun:
    """A run as it is plotted: its work, who ran it, and the settings that a curve can go along; None where unknown."""

    work: SameWork
    system: str
    batch: float | None
    budget: float | None
    """Share of the sequence that a cache holds, 0 to 1."""
    bits: float | None
    rates: Mapping[str, float | None]
    predicted: Mapping[str, float | None]
    source: str


@dataclass(frozen=True)
class Spread:
    """A rate that was measured `count` times."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        return cls(median(known), min(known), max(known), len(known)) if known else None

    def __str__(self) -> str:
        ends = f" ({rate_text(self.low)} to {rate_text(self.high)})" if self.count > 1 else ""
        return rate_text(self.median) + ends


def measured(run: Run) -> PlottedRun:
    """A run's settings and rates, from what its record holds."""
    record: Json = run.record or {}
    data, settings, source = run.data, object_in(run.data, "settings", run.source), run.source
    host = object_in(data, "host", source) or object_in(record, "host", source)
    detail = record or object_in(data, "detail", source)

    def said(name: str) -> str:
        value = detail.get(name, settings.get(name, data.get(name)))
        return UNKNOWN if value in (None, "auto") else model_name(value)

    machine = f"{host.get('cores', UNKNOWN)} cores of {host['cpu']}" if "cpu" in host else UNKNOWN
    work = SameWork(
        said("model"), said("weights"), said("dtype"), said("device"), said("prompt_len"), said("gen_len"), machine
    )
    policy = object_in(record, "policy", source)
    size, count = (number_in(policy, name, source) for name in ("gpu_batch_size", "num_gpu_batches"))
    batch = size * count if size and count else number_in(data, "sequences", source)
    timed = Throughput()
    vars(timed).update({name: number_in(data, name, source) or 0.0 for name in NUMBERS})
    predicted = object_in(record, "predicted", source)
    same = all(predicted.get(name) == data.get(name) for name in ("prompt_tokens", "generated_tokens"))
    return PlottedRun(
        work=work,
        system=run.system,
        batch=batch,
        budget=_share(record, run),
        bits=_bits(record, run),
        rates={name: getattr(timed, name) for name in RATES},
        predicted={name: number_in(predicted, name, source) if same else None for name in RATES},
        source=source,
    )


def _share(record: Json, run: Run) -> float | None:
    """The budget as a share of the sequence, the middle of a span."""
    share = object_in(record, "eviction", run.source).get("share_of_sequence")
    if isinstance(share, list) and share:
        share = sum(share) / len(share)
    return min(1.0, float(share)) if isinstance(share, int | float) else None


def _bits(record: Json, run: Run) -> float | None:
    if not record:
        return None
    weights = object_in(record, "quantization", run.source).get("weights") or {}
    bits = weights.get("bits", 32 if record.get("dtype") == "float32" else 16)
    return float(bits) if isinstance(bits, int | float) else None


def called(run: PlottedRun, *, budget: bool = True, bits: bool = True) -> str:
    """The name of a run among others: its system or policy, with budget and bits where they say something."""
    words = [run.system]
    if budget and run.budget is not None and run.system != "full" and run.budget < 1:
        words.append(f"{run.budget:.0%}".replace("%", " %"))
    if bits and run.bits not in (None, 16.0, 32.0):
        words.append(f"{run.bits:.3g} bits")
    return " ".join(words)


def section(material: Material) -> Chapter:
    runs = _on_known_devices([measured(run) for run in material.runs])
    parts = [*_comparisons(runs), *_curves(runs), *(_summary(each.source, each.data) for each in material.summaries)]
    texts = [
        "Generated tokens per second: end to end is over prefill and decode together, decode over decode alone; "
        "prefill counts prompt tokens. A bar is the median, its whisker reaches from the least run to the most."
    ]
    return Chapter("throughput", "Throughput", texts, parts)


def _on_known_devices(runs: Sequence[PlottedRun]) -> list[PlottedRun]:
    """The runs; one that does not say its device is taken to have had that of others with the same work."""
    known = {run.work._replace(device=UNKNOWN): run.work.device for run in runs if run.work.device != UNKNOWN}
    return [replace(run, work=run.work._replace(device=known.get(run.work, run.work.device))) for run in runs]


def _comparisons(runs: Sequence[PlottedRun]) -> Iterable[Passage]:
    groups: dict[tuple[SameWork, Any], dict[str, list[PlottedRun]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        groups[run.work, run.batch][called(run)].append(run)
    # Most systems first; then what was measured most often.
    order = sorted(groups.items(), key=lambda item: (-len(item[1]), -sum(map(len, item[1].values()))))
    for (work, batch), systems in order[:_MOST]:
        rows = "unknown batch" if batch is None else f"{batch:g} sequence{'s' * (batch != 1)} at once"
        title = f"{work.model}, {work.prompt} + {work.new} tokens, {rows}"
        spreads = {
            name: {system: Spread.of(run.rates[name] for run in runs) for system, runs in systems.items()}
            for name in RATES
        }
        yield Passage(title, [_settings(work)], list(_bars(spreads)), [_table(systems)])
    if len(order) > _MOST:
        yield Passage("", [f"{len(order) - _MOST} more settings are left out here; the curves below have all."])


_MOST = 12
"""Settings whose bars are shown."""


def _settings(work: SameWork) -> str:
    kind = "random weights" if work.weights == "dummy" else f"weights: {work.weights}"
    return f"{work.model} in {work.dtype}, {kind}, device {work.device}, on {work.machine}."


def _bars(rates: Mapping[str, Mapping[str, Spread | None]]) -> Iterable[Figure]:
    """A figure for each of RATES that any system has."""
    for name, systems in rates.items():
        bars: list[Json] = [
            {"name": system, "colour": colour, **asdict(spread)}
            for colour, (system, spread) in enumerate(systems.items())
            if spread is not None
        ]
        if bars:
            said = "; ".join(f"{bar['name']} {rate_text(bar['median'])}" for bar in bars)
            label = f"{RATES[name]}, tokens per second: {said}."
            drawn = {"unit": "tokens/s", "bars": bars}
            yield Figure("bars", RATES[name], label, drawn, height=4.5 + 2.6 * len(bars))


def _table(systems: Mapping[str, Sequence[PlottedRun]]) -> Table:
    head = ["run", "runs", *(f"{what}, tokens/s" for what in RATES.values()), "predicted", "measured / predicted"]
    rows = []
    for system, runs in systems.items():
        spreads = [Spread.of(run.rates[name] for run in runs) for name in RATES]
        spreads.append(Spread.of(run.predicted["gen_throughput"] for run in runs))
        ratios = [
            real / plan
            for run in runs
            if (real := run.rates["gen_throughput"]) and (plan := run.predicted["gen_throughput"])
        ]
        cells = [str(spread or "-") for spread in spreads]
        rows.append([system, str(len(runs)), *cells, f"{median(ratios):.2f}" if ratios else "-"])
    return Table("Median (least to most), tokens per second; predicted: end to end, by the cost model", head, rows)


def rate_text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _number(text: str) -> float | None:
    return float(text) if text.isdigit() else None


Place = Callable[[PlottedRun], float | None]
ALONG: dict[str, tuple[str, Place]] = {
    "batch": ("sequences at once", lambda run: run.batch),
    "budget": ("KV budget, share of the sequence", lambda run: run.budget),
    "bits": ("bits per weight", lambda run: run.bits),
    "prompt": ("prompt tokens", lambda run: _number(run.work.prompt)),
    "new": ("new tokens", lambda run: _number(run.work.new)),
}
"""Settings that a curve can go along: the name of the axis, and where a run is on it."""


def _curves(runs: Sequence[PlottedRun]) -> Iterable[Passage]:
    figures = [figure for along in ALONG for figure in _curves_along(along, runs)]
    if figures:
        text = "Medians of the runs at a point, whiskers from least to most; dashed is what the cost model predicted."
        yield Passage("Throughput against settings", [text], figures)


def _curves_along(along: str, runs: Sequence[PlottedRun]) -> Iterable[Figure]:
    """A figure for each work that was measured at several places, with a line for each of the other settings."""
    axis, place = ALONG[along]
    figures: dict[SameWork, dict[str, dict[float, list[PlottedRun]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for run in runs:
        at = place(run)
        if at is None:
            continue
        work = run.work._replace(**({along: "any"} if along in ("prompt", "new") else {}))
        words = [called(run, budget=along != "budget", bits=along != "bits")]
        if along != "batch" and run.batch is not None and along != "budget":
            words.append(f"batch {run.batch:g}")
        figures[work][", ".join(words)][at].append(run)
    for work, lines in figures.items():
        curves = {name: points for name, points in lines.items() if len(points) > 1}
        if not curves:
            continue
        if along == "budget" and "full" in lines:
            curves["full"] = lines["full"]
        yield _curve(along, axis, work, curves)


def _curve(along: str, axis: str, work: SameWork, curves: Mapping[str, Mapping[float, Sequence[PlottedRun]]]) -> Figure:
    lines: list[Json] = []
    for colour, (name, points) in enumerate(curves.items()):
        drawn, expected = [], []
        for at, runs in sorted(points.items()):
            rate = Spread.of(run.rates["gen_throughput"] for run in runs)
            plan = Spread.of(run.predicted["gen_throughput"] for run in runs)
            drawn += [[at, rate.median, rate.low, rate.high]] if rate else []
            expected += [[at, plan.median]] if plan else []
        lines.append({"name": name, "points": drawn, "colour": colour})
        if len(expected) > 1:
            lines.append({"name": f"{name}, predicted", "points": expected, "colour": colour, "dashed": True})
    lengths = [f"{work.prompt} + {work.new} tokens"] if along not in ("prompt", "new") else []
    title = ", ".join([f"against {axis}: {work.model}", *lengths, *([work.dtype] if work.dtype != "?" else [])])
    shares = along == "budget"
    x = {"name": axis, "log": 0 if shares else 2, "form": "percent" if shares else "number"}
    y = {"name": "generated tokens/s", "log": 0 if shares else 2, **({"min": 0} if shares else {})}
    label = f"End to end throughput {title}: {', '.join(line['name'] for line in lines)}."
    return line_figure(title, x, y, lines, label)


def _summary(source: str, data: Json) -> Passage:
    """Bars of a summary of bench, which has medians and ends instead of runs."""
    settings = object_in(data, "settings", source)
    systems = object_in(data, "systems", source)
    spreads = {name: {system: _kept(one, name) for system, one in systems.items()} for name in RATES}
    rows = []
    for system, one in systems.items():
        cells = [str(each[system] or "-") for each in spreads.values()]
        rows.append([system, str(one.get("repetitions", "?")), str(one.get("batch", "?")), *cells])
    lengths = f"{settings.get('prompt_len', '?')} + {settings.get('gen_len', '?')} tokens"
    host = object_in(data, "host", source)
    texts = [
        f"{settings.get('model', '?')} in {settings.get('dtype', '?')}, {settings.get('weights', '?')} weights, on "
        f"{host.get('cores', '?')} cores of {host.get('cpu', '?')}; from {source}."
    ]
    head = ["system", "repetitions", "batch", *(f"{what}, tokens/s" for what in RATES.values())]
    return Passage(
        f"{settings.get('model', '?')}, {lengths}",
        texts,
        list(_bars(spreads)),
        [Table("Median (least to most)", head, rows)],
    )


def _kept(system: Json, name: str) -> Spread | None:
    each = system.get(name)
    if not isinstance(each, dict) or not {"median", "min", "max"} <= each.keys():
        return None
    return Spread(each["median"], each["min"], each["max"], system.get("repetitions", 1))
