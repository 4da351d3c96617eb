"""The table of what policies cost in decode steps."""

from __future__ import annotations

from benchmarks import eviction_cost


def test_the_table_divides_medians_by_those_of_h2o() -> None:
    records = [
        {"policy": "h2o", "batch": 8, "rates": [100.0, 200.0, 90.0]},
        {"policy": "tova", "batch": 8, "rates": [50.0]},
        {"policy": "h2o", "batch": 32, "rates": [400.0]},
        {"policy": "tova", "batch": 32, "rates": [300.0, 500.0]},
    ]
    rows = eviction_cost.table(records).splitlines()
    assert rows[2] == "| `h2o` | 100 | 1.00 | 400 | 1.00 |"
    assert rows[3] == "| `tova` | 50 | 0.50 | 400 | 1.00 |"
