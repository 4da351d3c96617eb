"""Which instructions kernels have, as H2O_FLEXGEN_KERNELS says; 16 bits are kept whatever they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from h2o_flexgen.config.model.tensors import computed_dtype
from h2o_flexgen.engine.limits.devices import cpu_has_bfloat16
from h2o_flexgen.errors import UsageError
from h2o_flexgen.kernels import layers, native, torch_attention
from h2o_flexgen.kernels.native import has_matrix_unit, tiers
from h2o_flexgen.kernels.native.building import IS_ARM
from h2o_flexgen.kernels.types import Logits
from h2o_flexgen.models.hf.attention import Absorbed

ROOT = Path(__file__).parents[2]
COMPILED = getattr(native.library(), "_name", None)
V3 = "avx2 fma f16c bmi1 bmi2"
ZEN4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni avx512_bf16"
GRAVITON = "fp asimd evtstrm aes crc32 atomics fphp asimdhp asimddp"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What is kept of the processor and the switch is forgotten before and after."""
    monkeypatch.delenv(tiers.SWITCH, raising=False)
    kept = tiers.wanted, tiers.cpu_flags
    for each in kept:
        each.cache_clear()
    yield monkeypatch
    for each in kept:
        each.cache_clear()


@pytest.mark.parametrize(
    ("flags", "switch", "best", "compiled"),
    [
        (ZEN4, None, "avx512", "=native"),
        (ZEN4, "native", "avx512", "=native"),
        (f"{ZEN4} amx_bf16", "avx2", "avx2", "-march=x86-64-v3"),
        (ZEN4, "avxvnni", "avxvnni", "-DEMULATED_VNNI"),
        (f"{V3} avx_vnni", "avxvnni", "avxvnni", "-mavxvnni"),
        (f"{V3} avx_vnni", None, "avxvnni", "=native"),
        (ZEN4, "avx512vnni", "avx512vnni", "-mavx512vnni"),
        (ZEN4.replace(" avx512_bf16", ""), None, "avx512vnni", "=native"),
        (ZEN4.replace(" avx512_vnni avx512_bf16", ""), None, "avx512bw", "=native"),
        (f"{V3} avx512f avx512cd", None, "avx2", "=native"),
        (ZEN4, "avx512bw", "avx512bw", "-march=x86-64-v4"),
        (V3, None, "avx2", "=native"),
        ("sse4_2", None, None, "=native"),
        ("fp asimd crc32", None, "neon", "=native"),
        (GRAVITON, None, "neondot", "=native"),
        (GRAVITON, "neon", "neon", "-march=armv8-a"),
        (GRAVITON, "neondot", "neondot", "-march=armv8.2-a+dotprod"),
    ],
)
def test_what_is_computed_with(
    asked: pytest.MonkeyPatch, flags: str, switch: str | None, best: str | None, compiled: str
) -> None:
    asked.setattr(tiers, "of_the_processor", lambda: frozenset(flags.split()))
    asked.setattr(tiers, "has_slow_bfloat16", lambda: False)
    if switch is not None:
        asked.setenv(tiers.SWITCH, switch)
    found = tiers.best_tier()
    assert (None if found is None else found.name) == best
    assert compiled in " ".join(tiers.machine_flags())
    assert cpu_has_bfloat16() == (best == "avx512")
    assert not has_matrix_unit() or switch is None
    for stored in ("float16", "bfloat16"):
        assert computed_dtype("auto", stored, on_gpu=False) == "bfloat16"
        assert computed_dtype("float32", stored, on_gpu=False) == "float32"
    assert computed_dtype("auto", "float32", on_gpu=False) == "float32"


@pytest.mark.parametrize("switch", [None, "avx512"])
def test_intels_pairs_of_bfloat16_are_taken_where_they_are_asked_for(
    asked: pytest.MonkeyPatch, switch: str | None
) -> None:
    """They are slower than float32's instructions; torch's products with a matrix unit are not concerned."""
    asked.setattr(tiers, "of_the_processor", lambda: frozenset(f"{ZEN4} amx_bf16".split()))
    asked.setattr(tiers, "has_slow_bfloat16", lambda: True)
    if switch is not None:
        asked.setenv(tiers.SWITCH, switch)
    found = tiers.best_tier()
    assert found is not None
    assert found.name == (switch or "avx512vnni")
    assert ("-mno-avx512bf16" in tiers.machine_flags()) == (switch is None)
    assert cpu_has_bfloat16()


@pytest.mark.parametrize(("switch", "message"), [("avx3", "needed native, avx2"), ("avx512", "lacks avx512_bf16")])
def test_what_is_not_there(asked: pytest.MonkeyPatch, switch: str, message: str) -> None:
    asked.setattr(tiers, "of_the_processor", lambda: frozenset(V3.split()))
    asked.setenv(tiers.SWITCH, switch)
    with pytest.raises(UsageError, match=message):
        tiers.cpu_flags()


def test_torch_multiplies_what_it_is_slow_at_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded once, at the end: as float64 would be."""
    monkeypatch.setattr(layers, "library", lambda: None)
    for module in (layers, torch_attention):
        monkeypatch.setattr(module, "torch_widens", lambda: True)
    monkeypatch.setattr(layers, "_EXPANDED", 100)
    x, w, bias = (torch.randn(shape).bfloat16() for shape in ((9, 40), (7, 40), (7,)))
    exact = torch.nn.functional.linear(x.double(), w.double(), bias.double())
    found = layers.linear(x, w, bias)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-3)
    relu = layers.linear(x, w, bias, relu=True)
    assert torch.equal(relu, found.relu())
    q, k = (torch.randn(1, 2, 5, 16).bfloat16() for _ in range(2))
    out = torch_attention.prefill_attention(q, k, k, Logits(0.25), True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), k.double(), is_causal=True, scale=0.25
    )
    torch.testing.assert_close(out.out.double(), expected, rtol=2**-6, atol=2**-6)


def test_latents_take_matrices_in_as_other_products_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bfloat16 numbers in float32 where torch is slow at them, rounded once."""
    monkeypatch.setattr(torch_attention, "torch_widens", lambda: True)
    keys, values, q, mixed = (torch.randn(2, *shape).bfloat16() for shape in ((6, 8), (5, 8), (3, 9), (3, 11)))
    absorbed, multiply = Absorbed(keys, values), torch.matmul
    with monkeypatch.context() as patch:
        patch.setattr(torch, "matmul", lambda a, b: multiply(a, b) if a.dtype is torch.float32 else None)
        asked, value = absorbed.query(q.unsqueeze(0)), absorbed.value(mixed.transpose(0, 1))
    inner = multiply(q[..., :6].double(), keys.double()).bfloat16()
    torch.testing.assert_close(asked, torch.cat([inner, q[..., 6:]], -1).transpose(0, 1))
    expected = multiply(mixed[..., :8].double(), values.double().transpose(1, 2)).bfloat16()
    torch.testing.assert_close(value, expected.transpose(0, 1))


@pytest.fixture
def elsewhere(asked: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine without a compiler, and the folder in which a wheel would have its libraries there."""
    asked.setattr(native, "_compiler", lambda: None)
    asked.setattr(tiers, "LIBRARIES", tmp_path)
    asked.setattr(native, "LIBRARIES", tmp_path)
    kept = native.library, native.why_not, tiers.shipped
    for each in kept:
        each.cache_clear()
    yield tmp_path
    for each in kept:
        each.cache_clear()


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_without_a_compiler_the_best_of_those_that_are_shipped_is_loaded(elsewhere: Path) -> None:
    library = native.library()
    assert library is None
    assert native.what_computes() == "torch, which is slower: no C compiler was found"
    assert not native.must_compile()
    best = tiers.best_tier()
    assert best is not None
    native.library.cache_clear(), native.why_not.cache_clear(), tiers.shipped.cache_clear()
    shutil.copy(COMPILED, elsewhere / "kernels-avx2.so")
    shutil.copy(COMPILED, elsewhere / f"kernels-{best.name}.so")
    library = native.library()
    assert library is not None
    assert Path(library._name).name == f"kernels-{best.name}.so"
    assert native.what_computes() == f"{best.title}, shipped"
    assert native.why_not() is None
    assert not native.must_compile()


@pytest.mark.slow
def test_one_command_makes_a_wheel_with_kernels(tmp_path: Path) -> None:
    """By a compiler that has nothing to do; offline, with the setuptools that is there."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nfor last; do [ "$before" = -o ] && : >"$last"; before=$last; done\n')
    compiler.chmod(0o755)
    tree = tmp_path / "tree"
    for name in ("h2o_flexgen", "configs", "scripts"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    env = {**os.environ, "CC": str(compiler), "PIP_WHEEL_FLAGS": "--no-build-isolation -qq"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    subprocess.run([tree / "scripts/build_wheel.sh", tmp_path / "made"], env=env, check=True)
    (wheel,) = (tmp_path / "made").glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as files:
        libraries = {Path(name).name for name in files.namelist() if name.endswith(".so")}
    names = ("neon", "neondot") if IS_ARM else ("avx2", "avxvnni", "avx512bw", "avx512vnni", "avx512")
    assert libraries == {f"kernels-{name}.so" for name in names}
