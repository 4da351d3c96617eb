"""Settings for all tests: seeds, no network, one thread (models are tiny) unless OMP_NUM_THREADS says otherwise."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import h2o_flexgen  # noqa: F401, I001  # before torch, so that its threads wait as they do for users

import pytest
import torch
from hypothesis import settings
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton reads when it is imported, by whomever

from h2o_flexgen.folders import cached
from h2o_flexgen.kernels import native
from tests.kernels import emulated
from tests.seeds import SEED, moved
from tests.turns import left_out

# What watches torch's operations is told of each by torch's compiler otherwise, whose import takes seconds.
TorchDispatchMode._should_skip_dynamo = classmethod(lambda cls: False)

# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A run on a server tells whether a commit is good, so it must tell the same twice; every other run looks for new cases.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI") and not SEED:
    settings.load_profile("ci")


LONG = frozenset(Path(__file__).with_name("long.txt").read_text().split())
"""Tests, and files of them, with a case of more than a fifth of a second on two cores of a Zen 3 (--durations=0)."""

gc.disable()  # until all tests are collected, of which none is garbage


def pytest_collection_finish() -> None:
    """Thousands of tests and modules stay until the end: no later collection looks through them again."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="one case of each test, and none of those marked slow")
    parser.addoption("--quick", action="store_true", help="with --fast: none of those in long.txt")
    parser.addoption("--whole", action="store_true", help="of tests/engine/test_guarantees.py all cases")
    parser.addoption("--tokens", help="a file in which that keeps tokens, to hold another run's against them")
    parser.addoption("--slow-part", default="0/1", help="K/N: of slow tests each N-th, of turns' cases a quarter")


@pytest.hookimpl(trylast=True)  # of those that -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The fast tier: the products of parameters do not run, the first case of each test is kept, or of those that are
    quick. Else all tests, or a part of the slow ones and of the cases that take turns."""
    if not config.option.fast:
        left = left_out(items, *map(int, config.option.slow_part.split("/")))
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
        return
    first: dict[str, pytest.Item] = {}
    long = LONG if config.option.quick else frozenset[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if item.get_closest_marker("slow") is None and long.isdisjoint((name, name.partition("::")[0])):
            first.setdefault(name, item)
    kept = list(first.values())
    config.hook.pytest_deselected(items=list(set(items).difference(kept)))
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    emulated.take_what_is_asked_for()
    if not hasattr(config, "workerinput"):
        native.library()  # by one process, before workers ask for it all at once
    if SEED and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(SEED)


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """What a test draws depends on its name and on SEED, not on the tests before it."""
    seed = moved(zlib.crc32(request.node.nodeid.encode()))
    # Without a GPU torch.manual_seed notes each seed, with the stack, for one that may come: that takes longer.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Programs that tests start find the kernels that this machine has compiled before: none compiles them again."""
    if native.library() is not None:
        folder = tmp_path_factory.getbasetemp() / "cache" / "h2o_flexgen"
        folder.mkdir(parents=True)
        (folder / "native").symlink_to(cached("native"))


@pytest.fixture(autouse=True)
def _private_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may use or fill the user's own offload folder, plan on what was measured here, or measure unasked."""
    monkeypatch.setenv("H2O_FLEXGEN_OFFLOAD_DIR", str(tmp_path_factory.getbasetemp() / "offload"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("H2O_FLEXGEN_CALIBRATE", "false")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Skips without playwright or Debian's chromium: `apt-get install chromium` and `pip install playwright`."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as running:
        # In a container root has no sandbox; the pages are the tests' own.
        opened = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()
