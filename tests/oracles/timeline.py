"""How busy the resources of a timeline were, from its rows alone."""

from __future__ import annotations

from h2o_flexgen.schedule.timeline import Timeline


def span(timeline: Timeline) -> float:
    """Seconds from the first start to the last end."""
    return max((row.end for row in timeline.rows), default=0.0) - timeline.start


def busy(timeline: Timeline, resource: str) -> float:
    """Seconds in which `resource` did anything; rows that overlap on it count once. 0 for an unknown one."""
    return sum(end - start for start, end in _intervals(timeline, resource))


def overlap(timeline: Timeline) -> float:
    """Share of the span in which at least two resources were busy at once, 0 to 1."""
    intervals = [each for resource in timeline.resources for each in _intervals(timeline, resource)]
    edges = sorted(edge for start, end in intervals for edge in ((start, 1), (end, -1)))
    together, running, since = 0.0, 0, 0.0
    for at, change in edges:
        if running > 1:
            together += at - since
        running, since = running + change, at
    return together / span(timeline) if span(timeline) > 0 else 0.0


def _intervals(timeline: Timeline, resource: str) -> list[tuple[float, float]]:
    """When `resource` was busy: disjoint and ascending."""
    merged: list[tuple[float, float]] = []
    for row in sorted((row for row in timeline.rows if row.resource == resource), key=lambda row: row.start):
        if merged and row.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], row.end))
        else:
            merged.append((row.start, row.end))
    return merged
