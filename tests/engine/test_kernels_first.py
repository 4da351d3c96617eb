"""No compiler runs while anything is measured: kernels are built before weights are loaded, and before calibrating."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from h2o_flexgen.calibration import measure
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.kernels import native
from h2o_flexgen.kernels.native import building
from tests.tiny import prompts_of

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason=f"no native kernels: {native.why_not()}")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where kernels go: a machine on which none has been built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path / "h2o_flexgen" / "native"
    native.library.cache_clear()  # what a test made of it is its own


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes no time: its objects are empty, and what it links is this machine's library."""
    library = native.library()
    assert library is not None

    def run(command: list[str], *_: object, **__: object) -> None:
        output = Path(command[command.index("-o") + 1])
        shutil.copy(library._name, output) if "-shared" in command else output.touch()

    monkeypatch.setattr(building, "_run", run)


def _built(folder: Path) -> set[str]:
    return {path.name.rsplit("-", 1)[0] for path in folder.glob("*.so")}


def test_all_sources_of_a_folder_are_built(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the compiler, into one library: two small ones. The kernels' own were built before the first test."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.h").write_text("int one(void);\n")
    (folder / "one.c").write_text('#include "one.h"\nint one(void) { return 1; }\n')
    (folder / "two.c").write_text('#include "one.h"\nint two(void) { return one() + one(); }\n')
    monkeypatch.setattr(building, "FOLDER", folder)
    library = native.library()
    assert library is not None
    assert library.two() == 2
    assert _built(fresh) == {"kernels"}


def test_the_kernels_are_built() -> None:
    library = native.library()
    assert library is not None
    assert Path(library._name).name == native._target().name, "of these very sources"


def test_kernels_are_there_when_weights_are_loaded(checkpoint, quick: None, fresh: Path) -> None:
    seen = list[tuple[str, set[str]]]()
    with Engine(checkpoint()[1], dtype="bfloat16") as llm:
        llm.on_progress = lambda what, done, total: seen.append((what, _built(fresh)))
        llm.generate(prompts_of([5]), max_new_tokens=2)
    assert seen.pop(0) == ("compiling kernels", set())
    assert seen
    assert all(there == {"kernels"} for _, there in seen)


def test_kernels_are_there_before_anything_is_measured(
    quick: None, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        pass

    def begin(*_: object) -> None:
        assert _built(fresh) == {"kernels"}
        raise Begun

    monkeypatch.setattr(measure, "CalibrationRun", begin)
    with pytest.raises(Begun):
        measure.calibrate(None)


def test_without_native_kernels_nothing_is_built(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: "not today")
    assert native.library() is None
    assert not fresh.exists()
