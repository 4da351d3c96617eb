"""RunRecord: the keys of the design, rates in one place, strict JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.reports.record import RunRecord, eviction_entry, host_facts
from h2o_flexgen.errors import UsageError

KEYS = [
    *("model", "dtype", "device", "weights", "eviction", "policy", "sequences", "prompt_tokens", "generated_tokens"),
    *("load_s", "prefill_s", "decode_s", "total_s"),
    *("gen_throughput", "total_token_throughput", "prefill_throughput", "decode_throughput"),
    *("bytes_moved", "bandwidth", "flops", "peak_bytes", "kv_bytes", "bound", "predicted", "projected", "warnings"),
]
ADDED = ["computed_prompt_tokens", "least_bytes_moved", "roofline", "version", "date", "host", "prompt_len", "gen_len"]
ADDED += ["kept", "recall", "dependency", "shared", "quantization", "experts", "state_bytes"]


def record(**changes: Any) -> RunRecord:
    values: dict[str, Any] = {
        "model": "opt-125m",
        "dtype": "float32",
        "device": "cpu",
        "weights": "dummy",
        "eviction": eviction_entry("h2o", [EvictionConfig("h2o", 0.2).resolve(512, 32)]),
        "policy": OffloadPolicy(4, 2).to_json(),
        "prompt_len": 512,
        "gen_len": 32,
        "sequences": 8,
        "prompt_tokens": 4096,
        "generated_tokens": 256,
        "load_s": 1.5,
        "prefill_s": 4.0,
        "decode_s": 12.0,
        "total_s": 17.5,
        "bytes_moved": {"disk->cpu": 10**9},
        "bandwidth": {"disk->cpu": 1e9},
        "flops": 10**12,
        "peak_bytes": {"gpu": None, "cpu": 10, "disk": 20, "rss": 30},
        "kv_bytes": 5,
        "bound": {"phase": "decode", "resource": "disk->cpu", "seconds": 11.0},
        "predicted": {"decode_s": 11.5},
    }
    return RunRecord(**(values | changes))


def test_the_keys_are_those_of_the_design() -> None:
    assert sorted(record().to_json()) == sorted(KEYS + ADDED)


def test_the_rates() -> None:
    data = record().to_json()
    assert data["gen_throughput"] == 256 / 16
    assert data["total_token_throughput"] == (4096 + 256) / 16
    assert data["prefill_throughput"] == 1024
    assert data["decode_throughput"] == (256 - 8) / 12


def test_no_time_gives_no_rate() -> None:
    data = record(prefill_s=0, decode_s=0.0, generated_tokens=8).to_json()
    for name in ("gen_throughput", "total_token_throughput", "prefill_throughput", "decode_throughput"):
        assert data[name] is None
    assert record(decode_s=5e-324).decode_throughput is None
    assert record(generated_tokens=0).decode_throughput == 0


def test_json_round_trip() -> None:
    first = record(warnings=["slow disk"], projected=True, bound=None, predicted=None)
    line = first.to_line()
    assert "\n" not in line
    assert RunRecord.from_json(json.loads(line)) == first


def test_records_from_before_who_had_the_cores_was_counted() -> None:
    data = record().to_json()
    del data["shared"]
    assert RunRecord.from_json(data).shared is None


def test_values_are_made_plain() -> None:
    numpy = pytest.importorskip("numpy")
    data = record(flops=numpy.int64(7), load_s=numpy.float32(0.5), warnings=("a",)).to_json()
    assert (type(data["flops"]), type(data["load_s"]), data["warnings"]) == (int, float, ["a"])
    eviction = {"name": "h2o", "budget": [20, 30], "heavy": 10, "recent": (10, 20), "sinks": 0}
    assert record(eviction=eviction).eviction["recent"] == [10, 20]


def test_a_record_cannot_be_changed_through_its_json() -> None:
    first = record()
    first.to_json()["policy"]["weights"]["cpu"] = 7
    assert first.policy["weights"] == {"cpu": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_s": math.nan}, "decode_s of a RunRecord is nan"),
        ({"bandwidth": {"disk->cpu": math.inf}}, "bandwidth.disk->cpu of a RunRecord is inf"),
        ({"predicted": {"steps": [1.0, math.nan]}}, r"predicted.steps\[1\] of a RunRecord is nan"),
        ({"model": object()}, "model of a RunRecord is a object"),
        ({"weights": "random"}, "weights is 'random'"),
        ({"decode_s": -1}, "decode_s is -1"),
        ({"load_s": None}, "load_s is None"),
        ({"generated_tokens": -1}, "generated_tokens is -1"),
        ({"projected": 1}, "projected is 1"),
        ({"eviction": {"name": "h2o"}}, "eviction of a RunRecord lacks budget, heavy, recent, sinks"),
        ({"peak_bytes": {}}, "peak_bytes of a RunRecord lacks gpu, cpu, disk, rss"),
        ({"bound": {"phase": "decode"}}, "bound of a RunRecord lacks resource, seconds"),
        ({"policy": None}, "policy of a RunRecord lacks gpu_batch_size"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        record(**changes)


def test_foreign_json_is_refused() -> None:
    data = record().to_json()
    with pytest.raises(UsageError, match="no key 'gen_thruput'"):
        RunRecord.from_json(data | {"gen_thruput": 1})
    with pytest.raises(UsageError, match="lacks the keys kv_bytes"):
        RunRecord.from_json({key: value for key, value in data.items() if key != "kv_bytes"})
    with pytest.raises(UsageError, match="lacks the keys version, date"):
        RunRecord.from_json({key: value for key, value in data.items() if key not in ("version", "date")})
    with pytest.raises(UsageError, match=r"gen_throughput is 99. its tokens and seconds give 16.0"):
        RunRecord.from_json(data | {"gen_throughput": 99})
    with pytest.raises(UsageError, match="needed a JSON object"):
        RunRecord.from_json([])  # type: ignore[arg-type]


def test_the_range_of_budgets() -> None:
    config = EvictionConfig("h2o", 0.2)
    entry = eviction_entry("h2o", [config.resolve(length, 10) for length in (90, 40, 190)])
    assert entry == {"name": "h2o", "budget": [10, 40], "heavy": [5, 20], "recent": [5, 20], "sinks": 0}
    assert eviction_entry("h2o", []) == {"name": "h2o", "budget": 0, "heavy": 0, "recent": 0, "sinks": 0}


def test_host_facts_are_plain() -> None:
    facts = host_facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 0
