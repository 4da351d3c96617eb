"""`h2o-flexgen`: the programs under one name, and what each of them prints last."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import h2o_flexgen
from h2o_flexgen.__main__ import PROGRAMS, main
from h2o_flexgen.baselines.settings import SYSTEMS, System
from h2o_flexgen.calibration import checkup, measure
from h2o_flexgen.config.flags import called
from h2o_flexgen.units import MIB
from tests import programs
from tests.programs import Child, on_a_terminal

PACKAGE = Path(h2o_flexgen.__file__).parent


def test_every_program_has_a_row() -> None:
    """A program is a module with a `main` and nothing above it; `lm_eval` is the harness's own."""
    modules = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.glob("*.py")}
    having = {name for name, tree in modules.items() if "main" in {getattr(node, "name", "") for node in tree.body}}
    assert having == {*PROGRAMS, "__main__", "lm_eval"}


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_the_programs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(PROGRAMS)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"h2o-flexgen {h2o_flexgen.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rum", "--model", "demo"], "'rum' is not a program"),
        (["Run"], "did you mean 'run'?"),
        (["quantise"], f"needed one of {', '.join(PROGRAMS)}"),
        (["--model", "demo"], "the program's name comes before --model"),
    ],
)
def test_an_unknown_program_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) <= 3


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_programs_are_named_as_they_were_called(
    program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the usage line, and where a mistake leads to the help."""
    for path, name in (
        ("/venv/bin/h2o-flexgen", f"h2o-flexgen {program}"),
        (str(PACKAGE / "__main__.py"), f"python -m h2o_flexgen {program}"),
        (str(PACKAGE / f"{program}.py"), f"python -m h2o_flexgen.{program}"),
    ):
        monkeypatch.setattr(sys, "argv", [path])
        assert called(program) == name
        assert main([program, "--help"]) == 0
        assert f"usage: {name} " in capsys.readouterr().out
        assert main([program, "--no-such-flag"]) == 2
        assert f"  {name} --help lists the flags\n" in capsys.readouterr().err


def test_answers_need_no_torch() -> None:
    program = (
        "import sys; from h2o_flexgen.__main__ import main; "
        "codes = [main(words.split()) for words in ('--help', '--version', 'rum', 'run --help')]; "
        "heavy = {'torch', 'numpy', 'transformers', 'tqdm'} & set(sys.modules); "
        "sys.exit(f'{codes} {heavy}' if heavy or codes != [0, 0, 2, 0] else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_can_be_called() -> None:
    command = [sys.executable, "-m", "h2o_flexgen", "search", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m h2o_flexgen search ")


def test_an_installation_makes_the_command() -> None:
    setup = (PACKAGE.parent / "setup.py").read_text(encoding="utf-8")
    (entry,) = [line for line in setup.splitlines() if "console_scripts" in line]
    name, _, target = entry.split('"')[3].partition(" = ")
    module, _, function = target.partition(":")
    assert name == called_by_a_script(name)
    assert getattr(import_module(module), function) is main


def called_by_a_script(name: str) -> str:
    """The first word of what `called` says in a process started by an executable of this name."""
    program = f"import sys; sys.argv[0] = '/bin/{name}'; from h2o_flexgen.config.flags import called; print(called())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_a_signal_while_a_program_is_imported_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_flexgen.__main__.import_module", lambda name: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(programs, "main", main)
    with Child(tmp_path, "search") as child:
        ran = child.wait()
    assert (ran.code, ran.err) == (130, "interrupted\n")


ENDING = sorted(PROGRAMS.keys() - {"serve"})
"""Programs that come to an end by themselves."""


@pytest.fixture
def commands(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[list[Any], str]]:
    """By program: what makes it run within a second, and words of its last table."""
    whole = measure.Calibration.__init__

    def small(self: measure.Calibration, *args: Any, **settings: Any) -> None:
        whole(self, *args, **{"file_bytes": 2 * MIB, "arena_bytes": 2 * MIB, **settings})

    monkeypatch.setattr(measure.Calibration, "__init__", small)
    for name, nbytes in (("_COPIED", MIB), ("_FILE", 2 * MIB), ("_UNIT", MIB // 4)):
        monkeypatch.setattr(checkup, name, nbytes)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("h2o_flexgen.demo.demo_prompts", lambda: ["one prompt", "another"])
    monkeypatch.setattr("h2o_flexgen.demo._questions", lambda: [])
    theirs = System("tests.baselines.fake", "pretends", lambda ratio: {})
    monkeypatch.setitem(SYSTEMS._items, "theirs", theirs)
    (tmp_path / "recall.jsonl").write_text('{"prompt": "a question", "answer": "b"}\n')
    (tmp_path / "text.txt").write_text("some text to be scored " * 20)
    (tmp_path / "lines.txt").write_text("abc\nde\n")
    job = ["-i", tmp_path / "lines.txt", "-o", tmp_path / "answers.jsonl", "--format", "text", "--overwrite"]
    quality = PACKAGE.parent / "docs/demo/quality.json"
    lengths = ["--prompt-len", 8, "--gen-len", 4]
    evaluated = ["--recall", tmp_path / "recall.jsonl", "--text", tmp_path / "text.txt", "--context", 20, "--limit", 1]
    return {
        "run": (["--model", model, "--prompt", "abc", "-n", 3], ">>> "),
        "batch": (["--model", model, *job, "-n", 3], "2 requests in "),
        "doctor": ([], "limits"),
        "demo": (["--model", model, "--gen-len", 3], "time, prefill and decode"),
        "search": (["--model", "opt-125m", "--hardware", "t4", "--num-prompts", 4, *lengths], "cpu   in all"),
        "calibrate": (["--model", model, "--budget-s", 0.01], "TFLOP/s by rows"),
        "evaluate": (["--model", model, "--policies", "full,h2o", "--ratios", 0.5, *evaluated], "perplexity"),
        "report": ([quality, "-o", tmp_path / "page.html", "--overwrite"], "to be opened in a browser"),
        "bench": (["--systems", "theirs", "-r", 1, "-b", 2, *lengths, "--output-dir", tmp_path / "out"], "theirs"),
    }


@pytest.mark.turns
@pytest.mark.parametrize("program", ENDING)
def test_a_terminal_gets_the_json_only_when_asked(
    program: str, commands: dict[str, tuple[list[Any], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, words = commands[program]
    monkeypatch.setattr(programs, "main", lambda argv: main([program, *argv]))
    code, seen = on_a_terminal(tmp_path, 100, *arguments, stream=1)
    assert code == 0, seen
    assert words in seen
    assert '{"' not in seen
    code, seen = on_a_terminal(tmp_path, 100, *arguments, "--json", stream=1)
    assert code == 0, seen
    assert json.loads(seen.splitlines()[-1])


@pytest.mark.turns
@pytest.mark.parametrize("program", ENDING)
def test_without_json_the_table_is_the_last_there_is(
    program: str, commands: dict[str, tuple[list[Any], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = commands[program]
    assert main([program, *map(str, arguments), "--no-json"]) == 0
    out = capsys.readouterr().out
    assert words in out
    assert '{"' not in out
    assert not out.endswith("\n\n")


def test_quiet_search_is_for_scripts(
    commands: dict[str, tuple[list[Any], str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints nothing but the JSON object, so on a terminal too that is what was asked for."""
    monkeypatch.setattr(programs, "main", lambda argv: main(["search", *argv]))
    code, seen = on_a_terminal(tmp_path, 100, *commands["search"][0], "--quiet", stream=1)
    assert code == 0
    assert json.loads(seen)


def test_the_quickstart_ends_with_its_table_and_a_page() -> None:
    script = (PACKAGE.parent / "scripts/quickstart.sh").read_text(encoding="utf-8")
    table, page = script.splitlines()[-2:]
    assert table == 'python -m h2o_flexgen.demo --no-json "$@"'
    assert page.startswith("exec python -m h2o_flexgen.run ")
    assert " --report report.html " in page
