"""A page: sections of texts, figures and tables, put into one HTML file with its style, its scripts and its data.

A figure's content is data for `assets/page.js`, which draws it by Apache ECharts (`assets/echarts.min.js`, built by
`scripts/chart_library.sh`). Everything that comes from records is escaped: texts and tables by the template, data as
JSON in which `<`, `>` and `&` are written as escapes. The page's policy allows its own style and scripts, by their
hashes, and forbids every load.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h2o_flexgen.config.reports.record import package_version, utc_now

ASSETS = Path(__file__).with_name("assets")
LIBRARY = "6.1.0"
"""The version of the chart library."""


@dataclass(frozen=True)
class Figure:
    """A figure: the drawing that `kind` in page.js makes of `data`, under `title`; `label` describes it in words."""

    kind: str
    title: str
    label: str
    data: Mapping[str, Any]
    wide: bool = False
    height: float | None = None
    """In rem."""


def line_figure(
    title: str, x: Any, y: Any, lines: Sequence[Mapping[str, Any]], label: str = "", *, wide: bool = False
) -> Figure:
    """Lines over an axis; the label names them where nothing else is said of them."""
    label = label or f"{title}: {', '.join(line['name'] for line in lines)}."
    return Figure("lines", title, label, {"x": x, "y": y, "lines": lines}, wide, height=22)


@dataclass(frozen=True)
class Table:
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def long(self) -> list[bool]:
        """Of each column whether it is set as text, from left to right: one of its cells is long."""
        return [any(len(cell) > 40 for cell in column) for column in zip(self.head, *self.rows, strict=True)]


@dataclass(frozen=True)
class Passage:
    """Figures side by side and the tables below them, about one thing."""

    title: str = ""
    texts: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Chapter:
    """A section of the page; `name` is its anchor."""

    name: str
    title: str
    texts: Sequence[str]
    parts: Sequence[Passage] = field(default_factory=tuple)


def render(title: str, sections: Sequence[Chapter]) -> str:
    shown = [figure for section in sections for part in section.parts for figure in part.figures]
    figures = dict[str, Any]()
    for number, figure in enumerate(shown, 1):
        name = f"figure-{number}"  # as the template calls it, which counts them too
        figures[name] = {"name": name, "kind": figure.kind, "height": figure.height, **figure.data}
    texts = {name: asset(name) for name in ("page.css", "page.js", "echarts.min.js")}
    scripts = " ".join(hashed(texts[name]) for name in ("echarts.min.js", "page.js"))
    plain = {"style": texts["page.css"], "charts": texts["echarts.min.js"], "script": texts["page.js"]}
    return filled(
        "page.html",
        {**plain, "data": _as_data(figures)},
        title=title,
        sections=sections,
        hashes={"scripts": scripts, "style": hashed(texts["page.css"])},
        version=package_version(),
        made=utc_now(),
        library=LIBRARY,
    )


def filled(template: str, plain: Mapping[str, str], **texts: Any) -> str:
    """A template of the assets with its `texts` escaped, and what is `plain` as it is."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined
    )
    trusted = {name: jinja2.utils.markupsafe.Markup(text) for name, text in plain.items()}
    return environment.get_template(template).render(**trusted, **texts)


def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def hashed(text: str) -> str:
    """Of an inline script or style, as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _as_data(value: Any) -> str:
    """JSON that ends no script element and opens no comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
