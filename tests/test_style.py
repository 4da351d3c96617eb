"""Habits that a parser can check: files, functions and signatures of a size one can read, and names that say which."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "h2o_flexgen"
FILES = sorted(PACKAGE.rglob("*.py"))

FILE_LINES, FUNCTION_LINES, PARAMETERS = 500, 60, 10

LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
MANY_PARAMETERS: dict[str, str] = {}
"""Exceptions: "folder/file.py" or "folder/file.py:Class.function", and the reason."""

PROGRAM_FOLDERS = {"cli"}
"""Where the programs' shared code writes to the terminal."""

VAGUE = re.compile(r"(?:^|[.:;] )(?:What|Those|Nothing|Whatever)\b|[:;] (?:what|those|nothing|whatever)\b")
C_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All of a file, walked once for all who ask."""
    return list(ast.walk(tree_of(path)))


def named(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods, with the classes and functions that they are in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        scoped = isinstance(child, Function | ast.ClassDef)
        yield from named(child, f"{prefix}{child.name}." if scoped else prefix)


@cache
def functions() -> list[tuple[str, Function]]:
    """All of the package, as "folder/file.py:Class.function"."""
    return [
        (f"{path.relative_to(PACKAGE)}:{name}", function) for path in FILES for name, function in named(tree_of(path))
    ]


def parameters(function: Function) -> int:
    """How many a caller has to know of: all but self and cls."""
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return len([arg for arg in every if arg.arg not in ("self", "cls")])


def prints(nodes: Iterable[ast.AST]) -> list[int]:
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_the_files_are_found() -> None:
    assert len(FILES) > 50
    assert len(functions()) > 300


def test_a_file_is_an_idea() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    long = {name: lines for name, lines in lengths.items() if lines > FILE_LINES}
    assert set(long) == set(LONG_FILES), f"over {FILE_LINES} lines: {long}"


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "training"])
def test_so_is_a_file_beside_the_package(folder: str) -> None:
    files = (ROOT / folder).rglob("*.py")
    long = {path.name: lines for path in files if (lines := len(path.read_text().splitlines())) > FILE_LINES}
    assert not long, f"over {FILE_LINES} lines: {long}"


def test_records_name_no_folder_of_somebody() -> None:
    """Whoever reads them has none of it, and whoever made them need not tell. `results/local` is not committed."""
    records = [path for path in (ROOT / "results").rglob("*.json*") if "local" not in path.parts]
    assert records
    telling = [path.name for path in records if re.search(r'"/(root|home|tmp|work|data)/', path.read_text())]
    assert not telling, f"absolute paths in {telling}"


def test_a_function_fits_a_screen() -> None:
    long = {name: lines for name, f in functions() if (lines := (f.end_lineno or 0) - f.lineno + 1) > FUNCTION_LINES}
    assert set(long) == set(LONG_FUNCTIONS), f"over {FUNCTION_LINES} lines: {long}"


def test_a_signature_fits_a_head() -> None:
    many = {name: count for name, function in functions() if (count := parameters(function)) > PARAMETERS}
    assert set(many) == set(MANY_PARAMETERS), f"over {PARAMETERS} parameters: {many}"


def test_assertions_prints_and_names() -> None:
    wrong = []
    for path in FILES:
        nodes, where = nodes_of(path), path.relative_to(PACKAGE)
        bare = [node.lineno for node in nodes if isinstance(node, ast.Assert) and node.msg is None]
        if bare:
            wrong.append(f"{where}: assert without a message in lines {bare}")
        if "Policy" in [node.name for node in nodes if isinstance(node, ast.ClassDef)]:
            wrong.append(f"{where}: an OffloadPolicy or an EvictionPolicy? Never a bare Policy")
        if len(where.parts) > 1 and where.parts[0] not in PROGRAM_FOLDERS and prints(nodes):
            wrong.append(f"{where}: print in the library, in lines {prints(nodes)}")
    assert not wrong, "\n".join(wrong)


def test_no_class_name_stands_for_two_things() -> None:
    files = [
        path for folder in ("h2o_flexgen", "benchmarks", "training") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    where: dict[str, list[str]] = {}
    for path in files:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(where) > 200
    twice = {name: paths for name, paths in where.items() if len(paths) > 1}
    assert not twice, twice


# Counted apart: policies and model families have files of their own; jobs, their service, pages, suites and the doctor
# are programs.
COUNTED_APART = {"eviction", "jobs", "batch", "serve", "ray", "pages", "suites", "report", "doctor", "checkup"}
MAKES = re.compile(r"^(FAMILY|FAMILIES) = |^def spec_from_config\(read", re.MULTILINE)
MODELS = {f"models/{path.name}": path.read_text(encoding="utf-8") for path in PACKAGE.glob("models/*.py")}
FAMILIES = {name for name, text in MODELS.items() if MAKES.search(text)}


def test_the_package_has_fewer_than_236_files() -> None:
    counted = [
        path
        for path in FILES
        if not COUNTED_APART & {*path.relative_to(PACKAGE).with_suffix("").parts}
        and str(path.relative_to(PACKAGE)) not in FAMILIES
        and len(tree_of(path).body) > 1  # more than the docstring of a folder
    ]
    assert len(counted) < 236


def test_every_file_says_what_it_is() -> None:
    silent = [str(path.relative_to(PACKAGE)) for path in FILES if not ast.get_docstring(tree_of(path))]
    assert not silent, f"no docstring: {silent}"


def test_annotations_are_not_evaluated() -> None:
    """`from __future__ import annotations` everywhere that anything is defined."""
    missing = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(isinstance(node, Function | ast.ClassDef) for node in nodes_of(path))
        and "from __future__ import annotations" not in path.read_text(encoding="utf-8")
    ]
    assert not missing, f"without the import: {missing}"


def without_a_subject(path: Path) -> list[int]:
    """The lines of docstrings and comments in which a sentence or a clause begins with a word that names nothing."""
    code = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        constants = [node.value for node in nodes_of(path) if isinstance(node, ast.Expr)]
        texts = [(each.lineno, str(each.value)) for each in constants if isinstance(each, ast.Constant)]
        tokens = tokenize.generate_tokens(io.StringIO(code).readline)
        texts += [(token.start[0], token.string[1:]) for token in tokens if token.type == tokenize.COMMENT]
    else:
        texts = [(code.count("\n", 0, found.start()) + 1, found[1]) for found in C_COMMENT.finditer(code)]
    return [line for line, text in texts if VAGUE.search(" ".join(text.split()))]


def test_sentences_name_their_subject() -> None:
    others = [path for room in ("benchmarks", "training") for path in (ROOT / room).rglob("*.py")]
    native = [path for path in (PACKAGE / "kernels" / "native").iterdir() if path.suffix in (".c", ".h")]
    files = (*FILES, *others, *native)
    vague = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in without_a_subject(path)]
    assert not vague, f"What, those or nothing is the subject: {vague}"


def test_exceptions_have_reasons() -> None:
    for reason in (*LONG_FILES.values(), *LONG_FUNCTIONS.values(), *MANY_PARAMETERS.values()):
        assert len(reason.split()) > 3, reason


def test_the_checks_see_what_they_are_for() -> None:
    tree = ast.parse("class A:\n    def f(self, a, *, b, c=1):\n        def g(x): print(x)\n        assert a\n")
    assert [(name, parameters(function)) for name, function in named(tree)] == [("A.f", 3), ("A.f.g", 1)]
    assert prints(ast.walk(tree)) == [3]
    assert VAGUE.search("Where it lies. Those of it")
    assert not VAGUE.search("It says what it is, and nothing else")
