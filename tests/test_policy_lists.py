"""An eviction policy is a file, a registry line, a row in tests/policy_matrix.py and one in docs/policies.md."""

from __future__ import annotations

import re
from pathlib import Path

from h2o_flexgen.cache.eviction import EVICTION_POLICIES
from h2o_flexgen.config.splits import SPLITS
from tests.policy_matrix import LATER, POLICIES

ROOT = Path(__file__).parents[1]


def policy_rows(text: str) -> list[str]:
    """Names in backticks that start the rows of tables under a heading with "policies" in it."""
    rows, inside = [], False
    for line in text.splitlines():
        if line.startswith("#"):
            inside = "policies" in line.lower()
        match = re.match(r"\|\s*`([^`]+)`\s*\|", line)
        if inside and match:
            rows.append(match.group(1))
    return rows


def test_registry_and_budgets_and_matrix() -> None:
    names = EVICTION_POLICIES.names()
    assert set(SPLITS.names()) == set(names)
    assert sorted(row.name for row in (*POLICIES, *LATER)) == sorted(names)
    assert {policy.name for policy in map(EVICTION_POLICIES.get, names)} == set(names)


def test_every_policy_has_a_file_and_an_oracle() -> None:
    files = {path.stem for path in (ROOT / "h2o_flexgen/cache/eviction").glob("*.py")} - {"__init__", "base"}
    assert files >= set(EVICTION_POLICIES.names())
    assert len({row.oracle for row in (*POLICIES, *LATER)}) == len(POLICIES) + len(LATER)


def test_documented_rows() -> None:
    rows = policy_rows((ROOT / "docs/policies.md").read_text(encoding="utf-8"))
    assert sorted(rows) == sorted(EVICTION_POLICIES.names())


def test_the_reader_of_tables() -> None:
    text = "# A\n| `no` | x |\n## Eviction policies\n| name | keeps |\n|---|---|\n| `h2o` | both |\n|`full`| all |\n"
    text += "# B\n| `no` | x |\n"
    assert policy_rows(text) == ["h2o", "full"]
