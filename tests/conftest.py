"""Settings for all tests: one thread (the models are tiny, and runs share cores), no network."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton reads when it is imported, by whomever

torch.set_num_threads(1)

# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A run on a server tells whether a commit is good, so it must tell the same twice; every other run looks for new cases.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _private_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may use or fill the user's own offload folder, plan on what was measured here, or measure unasked."""
    monkeypatch.setenv("H2O_FLEXGEN_OFFLOAD_DIR", str(tmp_path_factory.getbasetemp() / "offload"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("H2O_FLEXGEN_CALIBRATE", "false")
