"""The list of tests that the fast tier leaves out."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import LONG


def test_each_is_there() -> None:
    root = Path(__file__).parents[1]
    for name in LONG:
        file, *path = name.split("::")
        found = {each.name for each in ast.walk(ast.parse((root / file).read_text())) if hasattr(each, "name")}
        assert found.issuperset(path), name
