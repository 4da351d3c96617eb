"""Hardware profiles: curves, rates, what is refused, and that JSON gives back what it was given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_flexgen.config.hardware.profile import HardwareProfile, misfits
from h2o_flexgen.config.hardware.rates import UNIT_KINDS, ComputeRates, Curve, GemmShape, LinkRate
from h2o_flexgen.errors import UsageError
from tests.cost.machines import TINY, profile, rates

PROFILES = sorted((Path(__file__).parents[2] / "configs" / "hardware").glob("*.json"))


def test_a_curve_is_straight_in_logarithms_and_flat_outside() -> None:
    curve = Curve(((10, 2), (1000, 200), (4000, 200)))
    assert [curve.at(x) for x in (1, 10, 100, 1000, 2000, 9999)] == pytest.approx([2, 2, 20, 200, 200, 200])


def test_a_time_grows_with_the_work_beyond_the_last_point() -> None:
    curve = Curve(((10, 2), (1000, 200)))
    assert [curve.time_at(x) for x in (1, 100, 1000, 5000)] == pytest.approx([2, 20, 200, 1000])


POINT = st.tuples(st.floats(1e-6, 1e12), st.floats(1e-9, 1e15))


@given(st.lists(POINT, min_size=1, max_size=6, unique_by=lambda point: point[0]), st.floats(1e-7, 1e13))
def test_a_curve_stays_between_its_neighbours(points: list[tuple[float, float]], x: float) -> None:
    curve = Curve(tuple(sorted(points)))
    values = [y for _, y in points]
    assert min(values) * (1 - 1e-9) <= curve.at(x) <= max(values) * (1 + 1e-9)
    assert all(curve.at(at) == pytest.approx(y) for at, y in points)


@pytest.mark.parametrize(
    "points", [(), ((0, 1),), ((1, -1),), ((1, 1), (1, 2)), ((2, 1), (1, 1)), ((1, float("nan")),)]
)
def test_impossible_curves(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(UsageError, match="curve"):
        Curve(points)


def test_links() -> None:
    link = LinkRate(1e9, 1e-3)
    assert link.seconds(2e9) == pytest.approx(2.001)
    assert link.seconds(0) == 0
    for wrong in ({"bytes_per_s": 0}, {"bytes_per_s": True}, {"bytes_per_s": 1.0, "latency_s": -1}):
        with pytest.raises(UsageError):
            LinkRate(**wrong)


def test_products_as_measured_else_by_the_general_rate_and_no_faster_than_memory() -> None:
    measured = GemmShape(400, 100, Curve(((1, 1e-3), (64, 2e-3))))
    found = rates(gemm_flops=Curve(((1, 1e9),)), memory_bytes_per_s=1e6, shapes=(measured,))
    assert found.gemm_seconds(1, 400, 100, 2) == pytest.approx(1e-3)
    assert found.gemm_seconds(128, 400, 100, 2) == pytest.approx(4e-3)
    assert found.gemm_seconds(1, 300, 100, 2) == pytest.approx(300 * 100 * 2 / 1e6)
    assert found.gemm_seconds(10_000, 300, 100, 2) == pytest.approx(2 * 10_000 * 300 * 100 / 1e9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes_per_s": 0}, "memory_bytes_per_s is 0"),
        ({"decode_attention": {"plain": Curve(((1, 1),))}}, r"decode_attention has \['plain'\]"),
        ({"tick_s": {"attn": 1.0}}, "tick_s has .*needed embed, attn, mlp, head"),
        ({"tick_s": dict.fromkeys(UNIT_KINDS, -1.0)}, "tick_s is -1.0"),
        ({"sample_s": float("nan")}, "sample_s is nan"),
        ({"fresh_bytes_per_s": 0}, "fresh_bytes_per_s is 0"),
    ],
)
def test_rates_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rates(**changes)


def test_disturbance_is_named_and_never_a_help() -> None:
    profile(slowdown={"compute": {"disk->cpu": 1.0}, "disk->cpu": {"cpu->disk": 2}})
    with pytest.raises(UsageError, match=r"slowdown names disk->moon\. needed names among compute"):
        profile(slowdown={"compute": {"disk->moon": 1.0}})
    with pytest.raises(UsageError, match=r"of compute by disk->cpu is 0\.9"):
        profile(slowdown={"compute": {"disk->cpu": 0.9}})


def whole() -> HardwareProfile:
    shape = GemmShape(4, 8, Curve(((1, 1e-6), (2, 1.5e-6))))
    return profile(
        rates(shapes=(shape,)),
        slowdown={"compute": {"disk->cpu": 1.25}},
        memory={"cpu": 1 << 34},
        host={"cpu": "a processor", "cores": 2},
        sources={"links.disk->cpu": "measured"},
    )


def test_json_gives_back_what_it_was_given(tmp_path: Path) -> None:
    text = json.dumps(whole().to_json(), allow_nan=False)
    assert HardwareProfile.from_json(json.loads(text)) == whole()
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    assert HardwareProfile.load(path) == whole()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("links"), "lacks the keys links"),
        (lambda data: data.update(lincs={}), "no key 'lincs'.*links"),
        (lambda data: data["compute"]["cpu"].pop("tick_s"), "lacks the keys tick_s"),
        (lambda data: data["links"]["disk->cpu"].update(bytes_per_s="fast"), "bytes_per_s is 'fast'"),
        (lambda data: data["compute"]["cpu"].update(gemm_flops=[[1, 0]]), "curve"),
        (lambda data: data["compute"]["cpu"].update(gemm_flops=3), "not a hardware profile"),
        (lambda data: data.update(compute=[]), "not a hardware profile"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, change: Any, message: str) -> None:
    data = whole().to_json()
    change(data)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        HardwareProfile.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_one_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello", encoding="utf-8")
    (tmp_path / "deep").write_text("[" * 100_000, encoding="utf-8")
    for name in ("absent", "text", "deep"):
        with pytest.raises(UsageError, match="is not a hardware profile"):
            HardwareProfile.load(tmp_path / name)


def test_what_a_profile_lacks_is_named() -> None:
    found = replace(profile(), name="tiny", links={"disk->cpu": LinkRate(1.0)}, compute={"cpu": rates()})
    with pytest.raises(UsageError, match=r"tiny has no link cpu->gpu\. found disk->cpu"):
        found.link("cpu->gpu")
    with pytest.raises(UsageError, match=r"tiny has no rates of the gpu\. found cpu"):
        found.rates("gpu")
    assert isinstance(found.rates("cpu"), ComputeRates)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_shipped_profiles_load_and_say_where_their_figures_come_from(path: Path) -> None:
    found = HardwareProfile.load(path)
    assert HardwareProfile.from_json(found.to_json()) == found
    assert found.sources


def test_profiles_without_rates_of_packed_weights_are_as_before() -> None:
    """Old ones load, and what has none is written as old programs read it."""
    plain = profile().to_json()
    assert all("packed" not in each for each in plain["compute"].values())
    assert HardwareProfile.from_json(plain) == profile()
    measured = profile(rates(packed={"4": Curve(((1, 0.8), (64, 1.1))), "8": Curve(((1, 0.9),))}))
    text = json.dumps(measured.to_json())
    assert json.loads(text)["compute"]["cpu"]["packed"] == {"4": [[1, 0.8], [64, 1.1]], "8": [[1, 0.9]]}
    assert HardwareProfile.from_json(json.loads(text)) == measured
    with pytest.raises(UsageError, match=r"packed has \['5'\]"):
        rates(packed={"5": Curve(((1, 1),))})


def test_what_is_assumed_of_packed_weights_is_told() -> None:
    measured = profile(rates(packed={"4": Curve(((1, 0.8),)), "8": Curve(((1, 0.9),))}))
    packed = TINY.with_bits(4, 64)
    assert misfits(profile(), TINY, "float16") == misfits(measured, packed, "float16") == []
    (said,) = misfits(profile(), packed, "float16")
    assert said == "the rates of test do not say how long products of packed weights take: it is assumed"


@pytest.mark.parametrize("points", [(), ((1, 0),), ((0, 1),), ((1, float("inf")),)], ids=str)
def test_a_curve_is_of_positive_numbers(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(UsageError, match="needed at least one, of positive numbers"):
        Curve(points)
