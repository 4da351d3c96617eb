"""Products as other processors make them: by AVX2 alone, and emulated by AVX-VNNI, AVX-512 and ARM's NEON.

Compiled with little optimisation, and of the sources alone that products need: seconds. What the kernels here are made
of is not compiled again. All of the suite runs on another tier by H2O_FLEXGEN_KERNELS.
"""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.kernels import layers, native
from h2o_flexgen.kernels.layers import linear
from h2o_flexgen.kernels.native import building, function, tiers
from tests.kernels import emulated
from tests.kernels.test_native_linear import check_rows, exactly, noise
from tests.kernels.test_packed_weights import EVERY, PACKINGS, id_of, multiplied, random_weight, rounded_in_spans
from tests.seeds import torch_generator

TIERS: dict[str, tuple[str, ...]] = (
    building.of_this_family()
    if building.IS_ARM
    else {
        "avx2": building.MACHINES["avx2"],
        "avxvnni": ("-march=x86-64-v3", "-DEMULATED_VNNI"),
        **emulated.TIERS,
    }
)
CONCERNED = ("whole", "few")
"""Sources in which tiers differ that multiply bytes otherwise; the others that products are made of:"""
COMMON = ("product", "several", "linear", "gemm", "exact", "fp8", "weights", "team")
SHARED = {"avxvnni": "avx2", "neondot": "neon", "avx512bw": "avx512vnni"}
"""Tiers that have the others of another one."""
ALL_THEIR_OWN = [tier for tier in TIERS if tier not in SHARED]
OWN = native.library()
pytestmark = pytest.mark.skipif(OWN is None or building.find_compiler() is None, reason="no kernels or no compiler")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """One for each tier; without simde AVX-512's and NEON's are missing."""
    folder, compiler = tmp_path_factory.mktemp("tiers"), building.find_compiler()
    assert compiler is not None

    def compiled(job: tuple[str, str]) -> None:
        tier, name = job
        flags = (*TIERS[tier], "-std=c11", "-Og", emulated.CALLED, "-fPIC", "-pthread", "-w", "-c")
        source = building.FOLDER / f"{name}.c"
        subprocess.run([compiler, *flags, source, "-o", folder / f"{tier}-{name}.o"], check=True, timeout=300)

    own = tiers.best_tier()
    found = {own.name: OWN} if own is not None and own.name in TIERS and own.name not in emulated.TIERS else {}
    made_of = {
        tier: [(tier, each) for each in CONCERNED] + [(SHARED.get(tier, tier), each) for each in COMMON]
        for tier in TIERS
        if tier not in found and (tier not in emulated.TIERS or emulated.why_not() is None)
    }
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compiled, {job: None for jobs in made_of.values() for job in jobs}))
    for tier, jobs in made_of.items():
        objects = [folder / f"{'-'.join(job)}.o" for job in jobs]
        made = folder / f"{tier}.so"
        command = [compiler, "-shared", "-pthread", "-Wl,-Bsymbolic,--no-undefined", *objects, "-o", made, "-lm"]
        subprocess.run(command, check=True, timeout=300)
        found[tier] = ctypes.CDLL(str(made))
    return found


@pytest.fixture(params=TIERS)
def tier(
    request: pytest.FixtureRequest, libraries: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Products are that tier's, and none is left to torch."""
    if request.param not in libraries:
        pytest.skip(f"{request.param} cannot be emulated: {emulated.why_not()}")
    monkeypatch.setattr(native, "library", lambda: libraries[request.param])
    monkeypatch.setattr(layers.F, "linear", None)
    monkeypatch.setattr(layers, "MOST_ROWS", 1 << 62)
    function.cache_clear()
    yield request.param
    function.cache_clear()


def test_whole_numbers_at_every_number_of_rows(tier: str) -> None:
    random = torch_generator()
    for count, packing in enumerate(PACKINGS):
        outs, ins = 67 if count % 8 == 0 else 17, 272 if packing.bits == 8 or packing.group == 16 else 288
        weight = random_weight(packing, (outs, ins), torch.bfloat16)
        x, values = torch.randn(max(EVERY), weight.shape[1], generator=random).bfloat16(), multiplied(weight)
        taken = x if weight.order is None else x[:, weight.order]
        unit = 3 * 2**-8
        if weight.whole:
            span, unit = function("span_of", "P", "i")(ctypes.byref(weight.place)), 2e-5
            taken = rounded_in_spans(taken, span)
        exact, size = taken.double() @ values, taken.double().abs() @ values.abs() + 1
        for rows in EVERY:
            found = linear(x[:rows], weight, wide=True).double()
            assert ((found - exact[:rows]).abs() <= unit * size[:rows]).all(), (id_of(packing), rows)


@pytest.mark.parametrize("packing", PACKINGS[::6], ids=id_of)
def test_rows_of_weights_that_share_places_of_a_cache(tier: str, packing: Packing) -> None:
    """Rows of a multiple of 1 KiB are turned from copies in whole panels, and where they lie in a part of one."""
    weight = random_weight(packing, (150, 2048), torch.bfloat16)
    x = torch.randn(37, 2048, generator=torch_generator()).bfloat16()
    values, taken = multiplied(weight), x if weight.order is None else x[:, weight.order]
    if weight.whole:
        taken = rounded_in_spans(taken, function("span_of", "P", "i")(ctypes.byref(weight.place)))
    unit = 2e-5 if weight.whole else 3 * 2**-8
    exact, size = taken.double() @ values, taken.double().abs() @ values.abs() + 1
    for rows in (4, 5, 37):
        found = linear(x[:rows], weight, wide=True).double()
        assert ((found - exact[:rows]).abs() <= unit * size[:rows]).all(), rows


@pytest.mark.parametrize(
    "packing", [Packing("int8", 32, "float16", "none"), Packing("int8", 16, "super", "none")], ids=id_of
)
@pytest.mark.parametrize(("low", "high"), [(-16, 16), (0, 31), (-32, 31), (-32, 32), (-33, 31), (30, 31), (-128, -70)])
def test_codes_of_a_byte_that_take_fewer_bits(tier: str, low: int, high: int, packing: Packing) -> None:
    """AVX2 adds more of them up in 16 bits: at their ends there is room, and beside codes that take all bits."""
    outs, ins = 130, 544
    weight = random_weight(packing, (outs, ins), torch.bfloat16)
    codes = weight.parts["codes"].view(torch.int8)
    codes[:, :512].clamp_(low, high)  # its ends mostly; the last inputs of a panel keep theirs, and all of
    codes[64:128, 256:] = torch.where(codes[64:128, 256:] > 0, high, low).to(torch.int8)
    codes[128:, ::7] = 127  # the last panel
    values = weight.in_order(torch.float32).double().t()
    span = function("span_of", "P", "i")(ctypes.byref(weight.place))
    for x in (torch.full((max(EVERY), ins), 1.5), torch.randn(max(EVERY), ins, generator=torch_generator())):
        taken = rounded_in_spans(x.bfloat16(), span)
        exact, size = taken @ values, taken.abs() @ values.abs() + 1
        for rows in EVERY:
            found = linear(x[:rows].bfloat16(), weight, wide=True).double()
            assert ((found - exact[:rows]).abs() <= 2e-5 * size[:rows]).all(), rows


@pytest.mark.parametrize("tier", ALL_THEIR_OWN, indirect=True)
@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (17, 33), (65, 194), (3, 770)])
def test_sixteen_bits_at_every_number_of_rows(tier: str, outs: int, ins: int) -> None:
    weight, bias, x = noise(outs, ins), noise(outs), noise(max(EVERY), ins)
    product = exactly(x, weight)
    for rows in EVERY:
        check_rows(linear(x[:rows], weight, bias, wide=True), product, bias)
        check_rows(linear(x[:rows], weight), product, None)


@pytest.mark.parametrize("tier", [] if building.IS_ARM else ["avx2"], indirect=True)
@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (17, 33), (65, 194), (50, 1030)])
def test_float32_at_every_number_of_rows(tier: str, outs: int, ins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies around rows of x, and behind weights, is not read: nan."""
    monkeypatch.setattr(layers, "_WIDE_ROWS", 1 << 62)
    random = torch_generator()
    x = torch.full((max(EVERY), 3 * ins), math.nan)[:, ins : 2 * ins]
    x.copy_(torch.randn(x.shape, generator=random))
    weight = torch.full((outs * ins + 70,), math.nan)[: outs * ins].view(outs, ins)
    weight.copy_(torch.randn(weight.shape, generator=random))
    bias, product = torch.randn(outs, generator=random), exactly(x, weight)
    for rows in EVERY:
        y = linear(x[:rows], weight, bias)
        check_rows(y, product, bias)
        assert torch.equal(linear(x[:rows], weight, bias, relu=True), y.clone().relu_())
        assert torch.equal(linear(x[:rows], weight, bias, onto=torch.ones_like(y)), y + 1)


@pytest.mark.parametrize("tier", ALL_THEIR_OWN, indirect=True)
@pytest.mark.parametrize("packing", PACKINGS[::4], ids=id_of)
def test_exact_products_at_every_number_of_rows(tier: str, packing: tuple[object, ...]) -> None:
    weight = random_weight(packing, (29, 288))
    x, values = torch.randn(max(EVERY), 288, generator=torch_generator()), weight.in_order(torch.float32).double().t()
    taken = (x if weight.order is None else x[:, weight.order]).double()
    whole = linear(x, weight)
    assert ((whole.double() - taken @ values).abs() <= 2**-20 * (taken.abs() @ values.abs() + 1)).all()
    for rows in EVERY:
        assert torch.equal(linear(x[:rows], weight), whole[:rows])


def test_every_tier_takes_the_same_weights(libraries: dict[str, ctypes.CDLL]) -> None:
    """In whole numbers; all others by the other kernels, which every tier has."""
    for packing in PACKINGS:
        place = ctypes.byref(random_weight(packing, (5, 416)).place)
        takes = {each: bool(library["takes_whole"](place)) for each, library in libraries.items()}
        best = tiers.best_tier()
        assert best is not None
        takes[best.name] = bool(function("takes_whole", "P", "i")(place))
        assert len(set(takes.values())) == 1, (id_of(packing), takes)


def test_every_tier_has_every_kernel() -> None:
    """What the package calls is defined in C for all tiers: outside of any #if, or within and in its #else as well."""
    root = Path(layers.__file__).parents[1]
    names = {
        name
        for path in root.rglob("*.py")
        for line in re.findall(r"\bfunction\((.*)", path.read_text(encoding="utf-8"))
        for name in re.findall(r'"([a-z][a-z_]{3,})"', line)
        if hasattr(OWN, name)
    }
    assert {"product", "attend_step", "next_slots", "prompt_attention", "quantise", "short_conv"} <= names
    where: dict[str, list[list[str]]] = {name: [] for name in names}
    for source in building.sources():
        branches: list[str] = []
        for line in source.read_text(encoding="utf-8").splitlines():
            if re.match(r"#\s*if", line):
                branches.append("if")
            elif re.match(r"#\s*el", line):
                branches[-1] = "else"
            elif re.match(r"#\s*endif", line):
                branches.pop()
            elif (found := re.match(r"(?!static|typedef)[a-z][\w *]*?\b(\w+)\(", line)) and found[1] in names:
                where[found[1]].append([*branches])
    for name, places in where.items():
        assert [] in places or {"if", "else"} <= {place[-1] for place in places}, f"{name}: {places}"
