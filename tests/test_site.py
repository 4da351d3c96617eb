"""The documentation is a site that builds without a network and loads nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOADED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)="(?:https?:)?//[^"]*"')
"""Elements that make a browser ask another machine; a canonical link does not."""


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    config = pytest.importorskip("mkdocs.config")
    build = pytest.importorskip("mkdocs.commands.build")
    pytest.importorskip("material")
    settings = config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    build.build(settings)
    pages = {str(path.relative_to(tmp_path / "site")): path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    named = {name.removesuffix(".html") for name in pages}
    assert named >= {"index", "tutorial", "overnight", "migrating", "reports", "reference/commands"}
    assert {name for name, text in pages.items() if LOADED.search(text)} == set()
    assert "--record-scores" in pages["reference/commands.html"]
    assert "LLM.generate" in pages["reference/python.html"]
    assert "row by row" in pages["reference/types.html"]
