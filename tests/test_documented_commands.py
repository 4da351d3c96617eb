"""Every command in the README and in docs/ runs: as it stands, with smaller values, or up to where its work starts.

Scripts are run by bash in a copy of the tree whose Python only notes what it is asked to do; what they ask of a program
of this project is then given to that program.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import shutil
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
from huggingface_hub import constants

from h2o_flexgen.__main__ import PROGRAMS
from h2o_flexgen.calibration import checkup, measure
from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.units import MIB
from tests.checkpoint.resolving import COMMIT
from tests.programs import write_model
from tests.script_tree import PYTHON, Tree

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

SMALLER = {"--gen-len", "--limit", "--context", "--recall", "--text", "--budget-s", "--num-prompts", "--json"}
"""Flags that a command may get beside those of the document, to take less time."""

AS_DOCUMENTED = "run as documented"
STARTED = "up to the start of its work"
SCRIPT = "by bash, its programs up to the start of their work"

COMMANDS: dict[str, str] = {
    "source .venv/bin/activate": "made by setup_env.sh",
    "./scripts/quickstart.sh": SCRIPT,
    "./scripts/test.sh": SCRIPT,
    "./scripts/test.sh fast": SCRIPT,
    "h2o-flexgen run --model demo": "h2o-flexgen run --model demo --gen-len 2",
    "python -m h2o_flexgen.run --hh-ratio 0.2 --report run.html": (
        "python -m h2o_flexgen.run --hh-ratio 0.2 --report run.html --gen-len 2 --num-prompts 1"
    ),
    "h2o-flexgen run --hh-ratio 0.2 --record-scores scores.json --trace trace.json --report run.html": (
        "h2o-flexgen run --hh-ratio 0.2 --record-scores scores.json --trace trace.json --report run.html --gen-len 2"
    ),
    "h2o-flexgen report results/2026-11-22-offload-peers/16+128 docs/demo/quality.json -o report.html": STARTED,
    "h2o-flexgen run --json-schema person.json": AS_DOCUMENTED,
    "h2o-flexgen doctor": "h2o-flexgen doctor --json",
    "python -m h2o_flexgen.run --model demo --weight-bits 4": (
        "python -m h2o_flexgen.run --model demo --weight-bits 4 --gen-len 2"
    ),
    "python -m h2o_flexgen.run --model demo --cache-bits 8 --hh-ratio 0.2": (
        "python -m h2o_flexgen.run --model demo --cache-bits 8 --hh-ratio 0.2 --gen-len 2"
    ),
    "python -m h2o_flexgen.run --model facebook/opt-6.7b --hh-ratio 0.2 --prompts prompts.txt --output answers.jsonl": (
        AS_DOCUMENTED
    ),
    "python -m h2o_flexgen.run --model opt-30b --hh-ratio 0.2": AS_DOCUMENTED,
    "python -m h2o_flexgen.evaluate --policies full,h2o,local --ratios 0.2": (
        "python -m h2o_flexgen.evaluate --policies full,h2o,local --ratios 0.2 --limit 1 --context 16 "
        "--recall recall.jsonl --text text.txt"
    ),
    "python -m h2o_flexgen.evaluate --suite configs/eval/demo.json --output-dir quality": STARTED,
    "python -m h2o_flexgen.batch -i requests.jsonl -o results.jsonl --model facebook/opt-6.7b "
    "--hh-ratio 0.2": AS_DOCUMENTED,
    "python -m h2o_flexgen.batch -i requests.jsonl -o results.jsonl --model facebook/opt-6.7b "
    "--hh-ratio 0.2 --ray 2": STARTED,
    "python -m h2o_flexgen.batch -i requests.jsonl -o results.jsonl --model demo "
    "--prefix-dir ~/.cache/h2o_flexgen/prefixes": STARTED,
    "python -m h2o_flexgen.batch --plan requests.jsonl --sample 50 --model demo": STARTED,
    "python -m h2o_flexgen.serve --model facebook/opt-6.7b --hh-ratio 0.2": STARTED,
    "python -m h2o_flexgen.serve --model facebook/opt-6.7b --hh-ratio 0.2 --port 8000 --data-dir ~/batches": STARTED,
    "python -m benchmarks.runs --vary eviction=h2o,tova": STARTED,
    "python -m benchmarks.runs --vary gen-len=32,64": STARTED,
    "scripts/eviction_lab.sh FOLDER": SCRIPT,
    "python -m h2o_flexgen.lm_eval run --model h2o_flexgen --model_args pretrained=demo,eviction=h2o,hh_ratio=0.2 "
    "--tasks h2o_recall,h2o_recall_generate --include_path configs/lm-eval": "tests/evaluation/test_lm_eval.py runs it",
    "evaluate --ratios 0.2 --context 384 --continuation 128 --limit 24": STARTED,
    "scripts/prefixes.sh": SCRIPT,
    "python -m benchmarks.jobs ray": STARTED,
    "python -m benchmarks.overnight": STARTED,
    "python -m benchmarks.processors --kernels avx2,native --bits 4,8 --batches 1,8,32": STARTED,
    "python -m h2o_flexgen.batch -i requests.jsonl -o results.jsonl --model allenai/OLMoE-1B-7B-0924-Instruct "
    "--weight-bits 4 --hh-ratio 0.2 --cache-bits 4 --cpu-mem 6GiB": (
        "python -m h2o_flexgen.batch -i requests.jsonl -o results.jsonl --model facebook/opt-6.7b "
        "--weight-bits 4 --hh-ratio 0.2 --cache-bits 4 --cpu-mem 6GiB"
    ),
    "python -m h2o_flexgen.calibrate --model olmoe-1b-7b --weight-bits 4": STARTED,
    "python -m h2o_flexgen.bench --systems h2o,full,transformers": STARTED,
    "python -m h2o_flexgen.bench --systems h2o,full,transformers,flexgen --model opt-1.3b --batch-size 8 "
    "--prompt-len 256 --gen-len 32 --repetitions 5": STARTED,
    "bench --systems h2o,full,transformers,accelerate,airllm,flexgen,deepspeed,kvpress": STARTED,
    "bench --systems full,llamacpp --weight-bits 4 --model qwen2.5-0.5b": STARTED,
    "python -m h2o_flexgen.calibrate": STARTED,
    "python -m h2o_flexgen.calibrate --model M": "python -m h2o_flexgen.calibrate --model opt-30b --budget-s 0.01",
    "python -m h2o_flexgen.search --hardware t4": STARTED,
    "python -m h2o_flexgen.search --model opt-30b --hardware t4-16gb --gpu-mem 16 --cpu-mem 208 --prompt-len 512 "
    "--gen-len 32 --hh-ratio 0.2": (
        "python -m h2o_flexgen.search --model opt-125m --hardware t4-16gb --gpu-mem 1 --cpu-mem 4 --prompt-len 64 "
        "--gen-len 8 --hh-ratio 0.2 --num-prompts 8"
    ),
    "python -m h2o_flexgen.search --model opt-6.7b --weight-bits 4 --cpu-mem 6GiB --device cpu --gpu-batch-size 4 "
    "--num-gpu-batches 1": STARTED,
    "search --output FILE": STARTED,
    "python -m training.demo": STARTED,
    "python -m training.sums": STARTED,
    "python -m training.questions facts.jsonl": STARTED,
    "./scripts/guarantees.sh": SCRIPT,
    "pytest tests/engine/test_matrix.py": STARTED,
    "pytest tests/engine/test_modules_neighbours.py": STARTED,
    "pytest tests/engine/test_placements.py tests/memory/test_tiers.py": STARTED,
    "pytest tests/jobs/test_kills.py tests/jobs/test_journal.py tests/serve/test_batches.py": STARTED,
    "pytest tests/jobs/test_identity.py tests/jobs/test_idle.py tests/jobs/test_batch.py": STARTED,
    "pytest -m gpu": STARTED,
    "pytest -m gpu tests/gpu/test_stages.py": STARTED,
    "BATCHES=8 scripts/compare_decode.sh --systems h2o,transformers,static --repetitions 3": SCRIPT,
    "BATCHES=8 scripts/compare_latency.sh": SCRIPT,
    "CHECK= SYSTEMS=h2o,accelerate PROMPT_LEN=16 GEN_LEN=128 BATCHES=48 REPETITIONS=5 scripts/compare_offload.sh "
    "--batch-of h2o=192": SCRIPT,
    "CHECK= SYSTEMS=accelerate,h2o PROMPT_LEN=128 GEN_LEN=32 BATCHES=40 REPETITIONS=5 scripts/compare_offload.sh "
    "--batch-of h2o=128 --reference h2o": SCRIPT,
    "scripts/compare_throughput.sh": SCRIPT,
    "scripts/compare_latency.sh": SCRIPT,
    "scripts/compare_offload.sh": SCRIPT,
    "scripts/compare_decode.sh": SCRIPT,
    "scripts/compare_decode.sh --systems h2o,full,transformers,flexgen": SCRIPT,
    "scripts/compare_decode.sh --systems h2o,transformers,accelerate,deepspeed,kvpress --reference h2o": SCRIPT,
    "scripts/demo_quality.sh": SCRIPT,
    "scripts/gpu_check.sh": SCRIPT,
    "scripts/gpu_check.sh --readme": SCRIPT,
    "scripts/gpu_check.sh --wheels wheels --dry-run": SCRIPT,
    "scripts/gpu_check.sh --wheels wheels --sections cost": SCRIPT,
    "scripts/gpu_check.sh --wheels wheels --sections kernels,decode,tests": SCRIPT,
    "scripts/gpu_check.sh --wheels wheels --sections paper --only opt-30b": SCRIPT,
    "scripts/gpu_check.sh --wheels wheels --sections paper --only opt-6.7b": SCRIPT,
    "scripts/build_wheel.sh": SCRIPT,
    "scripts/gpu_wheels.sh wheels": SCRIPT,
    "scripts/paper_table.sh": SCRIPT,
    "scripts/peer_env.sh all": SCRIPT,
    "scripts/pictures.sh": SCRIPT,
    "scripts/peer_env.sh deepspeed": SCRIPT,
    "scripts/peer_env.sh llamacpp": SCRIPT,
    "scripts/long_prompt.sh qwen2.5-0.5b 2": SCRIPT,
    "scripts/scaling.sh batch stream prompt generated budget": SCRIPT,
    "scripts/scaling.sh long": SCRIPT,
    "scripts/shared_cores.sh": SCRIPT,
    "scripts/shared_prefix.sh": SCRIPT,
    "scripts/stream_perplexity.sh": SCRIPT,
}
"""How each documented command is tested: one of the words above, or the smaller command that is run in its place."""

ASK_NO_PROGRAM = {"scripts/build_wheel.sh", "scripts/gpu_wheels.sh", "scripts/peer_env.sh"}
"""Scripts that call nothing of this project: pip alone."""

WITHOUT_FLAGS = {"benchmarks.paper_table": 0}
"""How many arguments take the programs that have no parser."""

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")

FLAGS_OF_OTHERS = {"--hh-all", "--hh-long-seq"}
"""Of the original H2O code, which docs/eviction.md compares ours with."""


# What the documents say


def fenced(text: str, language: str) -> list[str]:
    """The blocks of code in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """What stands between backticks, blocks of code left out; a span that a line ends in goes on in the next."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def braces(text: str) -> list[str]:
    """`a{b,c}d` is abd and acd, as bash has it."""
    found = re.fullmatch(r"(.*?)\{(.*?)\}(.*)", text)
    return [f"{found[1]}{part}{found[3]}" for part in found[2].split(",")] if found else [text]


def is_command(span: str) -> bool:
    """Whether a shell would run it: a program, a script, or pytest; `bench --systems x` means our bench."""
    bare = re.sub(r"^([A-Z_]+=\S* )*", "", span)
    return bool(
        re.match(r"(python -m|h2o-flexgen|pytest) \S", bare)
        or re.fullmatch(r"(\./)?scripts/\S+\.sh( .*)?", bare)
        or re.match(rf"({'|'.join(PROGRAMS)}) --", bare)
    )


def commands(text: str) -> Iterator[str]:
    """The commands of a document: each line of its bash blocks, and each span that is one, also in their comments."""
    inline = spans(text)
    for block in fenced(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            command, *comment = re.split(r"(?:^|\s)#", line, maxsplit=1)
            inline += spans(" ".join(comment))
            if command.strip():
                yield " ".join(command.split())
    for span in inline:
        yield from filter(is_command, braces(span))


def documented() -> dict[str, str]:
    """Where each command stands first."""
    found: dict[str, str] = {}
    for document in DOCUMENTS:
        for command in commands(document.read_text(encoding="utf-8")):
            found.setdefault(command, document.name)
    return found


def test_every_documented_command_has_a_row() -> None:
    found = documented()
    assert {command: found[command] for command in found.keys() - COMMANDS.keys()} == {}
    assert COMMANDS.keys() - found.keys() == set()


def test_commands_are_found_wherever_they_stand() -> None:
    block = "```bash\nfoo \\\n  -z  # or `python -m a.b`\n# no\n```"
    text = f"Say `A=1 scripts/x.sh\n--y` or\n{block}\n`scripts/{{p,q}}.sh` `x.sh`"
    assert sorted(commands(text)) == ["A=1 scripts/x.sh --y", "foo -z", "python -m a.b", "scripts/p.sh", "scripts/q.sh"]


# Programs, in this process


class Started(Exception):
    """A program has understood its flags, and its work would begin."""


def split(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables that a command sets, and its words."""
    words, variables = shlex.split(command), {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, words


def program(words: list[str]) -> tuple[str, list[str]]:
    """The module that a command calls, and its arguments."""
    if words[:2] == ["python", "-m"]:
        return words[2], words[3:]
    if words[0] == "h2o-flexgen":
        return "h2o_flexgen.__main__", words[1:]
    return ("pytest" if words[0] == "pytest" else f"h2o_flexgen.{words[0]}"), words[1:]


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def call(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exit code of a program that is called by its name."""
    found = import_module(module)
    monkeypatch.setattr(sys, "argv", [str(found.__file__), *arguments])
    return found.main(arguments) if inspect.signature(found.main).parameters else found.main()


@contextmanager
def stopping_at_work() -> Iterator[None]:
    """Within it programs raise Started: ours where all their settings are checked, others where flags are parsed."""
    parsed, checked = ArgumentParser.parse_args, Parser.parsed

    def parse(self: ArgumentParser, *arguments: Any, **options: Any) -> Any:
        found = parsed(self, *arguments, **options)
        if not isinstance(self, Parser):
            raise Started
        return found

    @contextmanager
    def check(self: Parser, *arguments: Any, **options: Any) -> Iterator[Any]:
        with checked(self, *arguments, **options) as args:
            yield args
        raise Started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_args", parse)
        patch.setattr(Parser, "parsed", check)
        yield


def start(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, config: pytest.Config) -> None:
    """Fails unless the program understands its arguments. A command behind `--` is a program's, too."""
    if module == "pytest":
        asks_pytest(arguments, config)
        return
    if module in WITHOUT_FLAGS:
        assert len(arguments) == WITHOUT_FLAGS[module]
        return
    if "--" in arguments:
        behind = arguments[arguments.index("--") + 1 :]
        start(*program(behind), monkeypatch, config)
    with stopping_at_work(), pytest.raises(Started):
        pytest.fail(f"{module} {shlex.join(arguments)} ended with {call(module, arguments, monkeypatch)}")


def asks_pytest(arguments: list[str], config: pytest.Config) -> None:
    """Flags that pytest knows with this project's settings, files that are there, markers that are registered."""
    known, unknown = config._parser.parse_known_and_unknown_args(arguments)
    assert unknown == []
    assert [path for path in known.file_or_dir if not (ROOT / path).exists()] == []
    markers = {line.partition(":")[0] for line in config.getini("markers")}
    assert set(re.findall(r"\w+", known.markexpr)) - {"not", "and", "or"} <= markers


# Scripts, in a copy of the tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    root = tmp_path_factory.mktemp("tree")
    for name in ("configs", "h2o_flexgen", "setup.py", "constraints.txt"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("wheels", "home", "stub"):
        (root / name).mkdir()
    (root / "stub/python").write_text(PYTHON)
    (root / "stub/python").chmod(0o755)
    return Tree(root)


def by(how: str) -> list[str]:
    return [command for command, value in COMMANDS.items() if value == how]


@pytest.mark.parametrize("command", by(SCRIPT))
def test_a_script(
    command: str, tree: Tree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Its variables are its own, it comes to its end, and each program that it calls understands what it is told."""
    variables, (script, *_) = split(command)
    text = (ROOT / script).read_text(encoding="utf-8")
    assert [name for name in variables if not re.search(rf"\$\{{?{name}\b", text)] == []
    done = tree.run(command)
    assert done.returncode == 0, done.stderr
    asked = list(tree.programs())
    assert asked or script in ASK_NO_PROGRAM
    assert tree.asked
    monkeypatch.chdir(tree.root)
    for module, arguments in asked:
        start(module, arguments, monkeypatch, pytestconfig)


def slow_if(command: str, part: str) -> Any:
    """A case of `command`, slow where `part` is in it."""
    return pytest.param(command, marks=pytest.mark.slow if part in command else ())


@pytest.mark.parametrize("command", [slow_if(command, "training") for command in by(STARTED)])
def test_a_command_that_takes_long(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("H2O_FLEXGEN_HARDWARE", "t4-16gb")  # as this machine is not calibrated
    start(*program(split(command)[1]), monkeypatch, pytestconfig)


# Commands that run to their end


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with prompts, and a cache where the models of the README are tiny."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for repo in ("facebook/opt-6.7b", "facebook/opt-30b"):
        base = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
        (base / "refs").mkdir(parents=True)
        (base / "refs/main").write_text(COMMIT)
        (base / "snapshots").mkdir()
        write_model(base / "snapshots" / COMMIT, max_position_embeddings=2048)
    (tmp_path / "prompts.txt").write_text("The capital of France is\nTwo and two are\n")
    asked = {"method": "POST", "url": "/v1/completions", "body": {"model": "facebook/opt-6.7b", "prompt": "A word"}}
    (tmp_path / "requests.jsonl").write_text(json.dumps({"custom_id": "one", **asked}) + "\n")
    (tmp_path / "person.json").write_text('{"type": "boolean"}')
    (tmp_path / "recall.jsonl").write_text('{"prompt": "The code is 12. Again, the code is", "answer": "12"}\n')
    (tmp_path / "text.txt").write_text("A sentence that is read and scored. " * 9)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration writes a few MiB only, and so does the doctor."""
    whole = measure.Calibration.__init__

    def small(self: measure.Calibration, *args: Any, **settings: Any) -> None:
        whole(self, *args, **{"file_bytes": 2 * MIB, "arena_bytes": 2 * MIB, **settings})

    monkeypatch.setattr(measure.Calibration, "__init__", small)
    for name, nbytes in (("_COPIED", MIB), ("_FILE", 2 * MIB), ("_UNIT", MIB // 4)):
        monkeypatch.setattr(checkup, name, nbytes)


RUN = {
    command: command if how == AS_DOCUMENTED else how
    for command, how in COMMANDS.items()
    if how == AS_DOCUMENTED or how.startswith(("python -m", "h2o-flexgen"))
}


@pytest.mark.parametrize("command", [slow_if(command, "calibrate") for command in RUN])
def test_a_command_runs(
    command: str, hub: Path, brief: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, small = split(command)[1], split(RUN[command])[1]
    assert program(words)[0] == program(small)[0]
    assert flags(words) <= flags(small) <= flags(words) | SMALLER
    code = call(*program(small), monkeypatch)
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.endswith("}\n"), "the JSON line"
    if "--output" in words:
        assert len((hub / words[words.index("--output") + 1]).read_text().splitlines()) == 2


def test_the_environment_is_where_scripts_make_it(tree: Tree) -> None:
    """By `source .venv/bin/activate`, which the standard library puts into every environment."""
    shutil.rmtree(tree.root / ".venv", ignore_errors=True)
    tree.run("scripts/quickstart.sh")
    assert ["python", "-m", "venv", ".venv"] in tree.asked


def test_the_python_of_the_readme(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every block, with the shipped model in place of the large one; others try what needs a cluster or a service."""
    blocks = [block for document in DOCUMENTS for block in fenced(document.read_text(encoding="utf-8"), "python")]
    blocks = [block for block in blocks if "import ray\n" not in block and "import OpenAI\n" not in block]
    assert blocks
    for block in blocks:
        code = textwrap.dedent(block).replace('"facebook/opt-6.7b"', '"demo"').replace("=32", "=4")
        namespace: dict[str, Any] = {}
        exec(compile(ast.parse(code), "README.md", "exec"), namespace)
        assert capsys.readouterr().out.strip()
        assert len(namespace.get("scores", [0])) == 1


# Flags and variables that stand alone


def known_flags() -> set[str]:
    """Of all programs, scripts and benchmarks."""
    sources = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "training").rglob("*.py"), *(ROOT / "scripts").glob("*")]
    known = {flag for path in sources for flag in re.findall(r"--[a-z][\w-]*", path.read_text(encoding="utf-8"))}
    for name in PROGRAMS:
        known |= flags_of(f"h2o_flexgen.{name}")
    return known


def flags_of(module: str) -> set[str]:
    """What the parser of a program takes."""
    seen: set[str] = set()

    def note(self: ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        seen.update(self._option_string_actions)
        raise Started

    main = import_module(module).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_args", note)
        with pytest.raises(Started):
            main([])
    return seen


def test_every_flag_is_some_programs() -> None:
    known = known_flags() | FLAGS_OF_OTHERS
    for document in DOCUMENTS:
        named = {flag for span in spans(document.read_text(encoding="utf-8")) for flag in FLAG.findall(span)}
        assert named - known == set(), document.name


def test_every_variable_is_read_somewhere() -> None:
    """By a script or the package; H2O_FLEXGEN_ and a flag in capitals is that flag."""
    folders = ("h2o_flexgen", "scripts", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".c")]
    words = {word for path in files for word in re.findall(r"[A-Z][A-Z0-9_]+", path.read_text(encoding="utf-8"))}
    words |= {"H2O_FLEXGEN_" + flag[2:].replace("-", "_").upper() for flag in flags_of("h2o_flexgen.run")}
    for document in DOCUMENTS:
        text = spans(document.read_text(encoding="utf-8"))
        named = {name for span in text for name in re.findall(r"(?:^| )([A-Z][A-Z0-9_]+)=", span)}
        assert named - words == set(), document.name
