"""What is said of Triton where it can and cannot be used. Needs no Triton."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from importlib import metadata, util
from types import SimpleNamespace

import pytest
import torch

from h2o_flexgen.kernels import triton_available
from h2o_flexgen.kernels.triton_available import interpreting, serves, why_not

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Triton as if installed in some version, or not (None); the interpreter is not asked for."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("H2O_FLEXGEN_TRITON", raising=False)

    def install(version: str | None) -> None:
        monkeypatch.setattr(util, "find_spec", lambda name: None if version is None else object())
        monkeypatch.setattr(metadata, "version", lambda name: version)
        forget()

    yield install
    forget()


def forget() -> None:
    for kept in (triton_available._missing, triton_available._serves, triton_available._failing):
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()


def test_missing_or_old(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(None)
    assert "not installed" in why_not("cuda")
    assert why_not("cpu") is not None
    installed("3.5.1")
    assert "3.5.1 is installed, needed 3.6" in why_not("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "needed 3.6" in why_not("cpu")


def test_devices(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("3.10.0+git")
    assert "a cpu device" in why_not("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in why_not("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "7.5, needed 8.0" in why_not("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_available, "_failing", lambda device: None)
    assert why_not("cuda") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_kernel_that_fails_is_found_out(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("3.10.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "cannot run the kernel quantise here: " in why_not("cuda")
    assert not serves(CUDA)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"quantise": RuntimeError("no C compiler\nat all")}, "the kernel quantise here: RuntimeError: no C compiler"),
        ({"dequantise": ValueError()}, "the kernel dequantise here: ValueError: no message"),
        ({"dequantise": 0.1}, "quantise and dequantise give wrong numbers"),
        ({}, None),
    ],
)
def test_which_kernel_fails(wrong, why, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(name: str, *args, bits: int):
        if isinstance(found := wrong.get(name, 0.0), Exception):
            raise found
        return args[0] + found

    kernels = SimpleNamespace(**{name: partial(kernel, name) for name in ("quantise", "dequantise")})
    monkeypatch.setitem(sys.modules, "h2o_flexgen.kernels.triton_quant", kernels)
    monkeypatch.setattr("h2o_flexgen.kernels.triton_quant", kernels, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    said = triton_available._failing.__wrapped__(CPU)
    assert said is None if why is None else why in said


def test_the_switch(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU Triton serves unless it is refused; in host memory, if the interpreter and the engine are both told."""
    installed("3.10.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_available, "_failing", lambda device: None)
    assert serves(CUDA)
    assert not serves(CPU)
    monkeypatch.setenv("H2O_FLEXGEN_TRITON", "1")
    assert serves(CUDA)
    assert not serves(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert serves(CPU)
    monkeypatch.setenv("H2O_FLEXGEN_TRITON", "0")
    assert why_not("cuda") == why_not("cpu") == "H2O_FLEXGEN_TRITON is 0"
    assert not serves(CUDA)
    assert not serves(CPU)
    monkeypatch.delenv("H2O_FLEXGEN_TRITON")
    assert not serves(CPU)


def test_the_interpreter_takes_any_device(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("3.6.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert interpreting()
    assert why_not("cpu") is None


@pytest.mark.slow
def test_asking_imports_no_triton() -> None:
    code = (
        "import sys; from h2o_flexgen.kernels.triton_available import why_not; why_not('cuda'); "
        "import h2o_flexgen.kernels, h2o_flexgen.quant; print('triton' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"
