"""What is said of Triton where it can and cannot be used. Needs no Triton."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata, util

import pytest
import torch

from h2o_flexgen.kernels import triton_available
from h2o_flexgen.kernels.triton_available import available, interpreting, why_not


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Triton as if installed in some version, or not (None); the interpreter is not asked for."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def install(version: str | None) -> None:
        monkeypatch.setattr(util, "find_spec", lambda name: None if version is None else object())
        monkeypatch.setattr(metadata, "version", lambda name: version)
        triton_available._missing.cache_clear()

    yield install
    triton_available._missing.cache_clear()


def test_missing_or_old(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(None)
    assert "not installed" in why_not("cuda")
    assert not available("cpu")
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
    assert why_not("cuda") is None


def test_the_interpreter_takes_any_device(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("3.6.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert interpreting()
    assert available("cpu")


def test_asking_imports_no_triton() -> None:
    code = (
        "import sys; from h2o_flexgen.kernels.triton_available import why_not; why_not('cuda'); "
        "import h2o_flexgen.kernels, h2o_flexgen.quant; print('triton' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"
