"""Who may import whom, read from the syntax of every file; and what must answer without torch."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from tests.test_style import nodes_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "h2o_flexgen"

OPEN_TO_ALL = {"errors", "units", "registry", "huge", "openmp", "cores", "folders", "processor"}
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "schedule": {"config"},
    "cost": {"schedule", "config"},
    "reporting": {"schedule", "config"},
    "pages": {"reporting", "schedule", "config"},
    "kernels": {"config"},  # the layouts of packed matrices, which plans count with
    "quant": {"kernels", "config"},
    "memory": {"quant", "config"},
    "cache": {"memory", "quant", "kernels", "config"},
    "models": {"kernels", "quant", "config"},
    "checkpoint": {"models", "memory", "quant", "config"},
    # The prompt's attention runs over groups of rows, which only the engine knows: it calls the kernel itself.
    "engine": {"schedule", "checkpoint", "models", "cache", "memory", "kernels", "config"},
    # A tick is one of the executor walking a schedule, less what cost says of it; a token's cost is the sampler's.
    "calibration": {"cost", "engine", "schedule", "checkpoint", "models", "cache", "memory", "kernels", "config"},
    "planning": {"engine", "cost", "calibration", "schedule", "config"},
    "evaluation": {"planning", "engine", "cache", "config"},
    "ray": {"planning", "engine", "config"},
    "jobs": {"planning", "engine", "schedule", "config"},
    "baselines": {"planning", "engine", "schedule", "config"},
}
ONLY_AS_TYPES = {"models": {"cache"}}
"""May be imported for annotations, under TYPE_CHECKING."""
PROGRAM_PACKAGES = {"cli"}
"""What the programs share counts as a program: it may import anything, and only programs may import it."""


ENGINE = (
    {"engine"},
    {"execution"},
    {"sampling", "metrics"},
    {"state", "far_heads"},
    {"model"},
    {"batching", "limits", "self_test"},
    {"requests"},
)
"""The rooms of the engine from top to bottom: each may import those below it, and none beside or above it."""

BESIDE = {"benchmarks": {"tests"}, "training": set[str]()}
"""Folders beside the package that import it: what else of the repository each may import. A dry run of the GPU checks
needs Triton's interpreter as the tests set it up."""


class Import(NamedTuple):
    """One import of our own package: `target` is the package or module directly below h2o_flexgen."""

    file: str
    line: int
    source: str
    target: str
    only_type: bool


def _part(module: str) -> str | None:
    """`cache` for h2o_flexgen.cache.eviction, `` for h2o_flexgen itself, None for other people's modules."""
    names = module.split(".")
    return None if names[0] != "h2o_flexgen" else names[1] if len(names) > 1 else ""


def _targets(node: ast.Import | ast.ImportFrom, folder: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [part for alias in node.names if (part := _part(alias.name)) is not None]
    module = node.module or ""
    if node.level:
        module = ".".join(["h2o_flexgen", *folder[: len(folder) + 1 - node.level], *filter(None, [module])])
    part = _part(module)
    if part == "":  # from h2o_flexgen import x: x is what counts
        return [alias.name for alias in node.names]
    return [] if part is None else [part]


def _type_checking(nodes: Sequence[ast.AST]) -> set[ast.AST]:
    """Every node inside `if TYPE_CHECKING:`."""
    blocks = [node for node in nodes if isinstance(node, ast.If)]
    return {
        inner
        for block in blocks
        if getattr(block.test, "id", getattr(block.test, "attr", "")) == "TYPE_CHECKING"
        for statement in block.body
        for inner in ast.walk(statement)
    }


def imports_of(path: Path) -> Iterator[Import]:
    relative = path.relative_to(PACKAGE)
    source = relative.parts[0] if len(relative.parts) > 1 else relative.stem
    nodes = nodes_of(path)
    types = _type_checking(nodes)
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in _targets(node, relative.parts[:-1]):
                yield Import(str(relative), node.lineno, source, target, node in types)


@cache
def all_imports() -> list[Import]:
    return [found for path in sorted(PACKAGE.rglob("*.py")) for found in imports_of(path)]


PACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
PROGRAMS = {path.stem for path in PACKAGE.glob("*.py")} - OPEN_TO_ALL - {"__init__"}


def _forbidden(found: Import) -> bool:
    source, target = found.source, found.target
    if target in OPEN_TO_ALL or target == source:
        return False
    if source in PROGRAMS:
        return target in PROGRAMS
    if source in PROGRAM_PACKAGES:
        return target in PROGRAMS
    if source == "__init__":  # the facade: lazy names of any library package
        return target in PROGRAMS | PROGRAM_PACKAGES
    if found.only_type and target in ONLY_AS_TYPES.get(source, set()):
        return False
    return target not in ALLOWED.get(source, set())


def test_every_package_has_its_place() -> None:
    known = set(ALLOWED) | PROGRAM_PACKAGES
    assert known >= PACKAGES, f"add {PACKAGES - known} to ALLOWED, with what they may import"
    assert {"config", "engine", "cli"} <= PACKAGES
    assert "run" in PROGRAMS


def test_the_arrows_have_one_direction() -> None:
    wrong = [f"{f.file}:{f.line} imports {f.target or 'the package'}" for f in all_imports() if _forbidden(f)]
    assert not wrong, "\n".join(wrong)


def _engine_room(names: Sequence[str]) -> str:
    """The part of the engine that h2o_flexgen.engine.`names` lies in."""
    return names[2] if names[:2] == ["h2o_flexgen", "engine"] and len(names) > 2 else ""


def test_the_rooms_of_the_engine_have_one_direction() -> None:
    rank = {room: level for level, rooms in enumerate(ENGINE) for room in rooms}
    wrong, seen = [], 0
    for path in sorted((PACKAGE / "engine").rglob("*.py")):
        source = _engine_room([*path.relative_to(ROOT).with_suffix("").parts])
        if source == "__init__":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                target = _engine_room(
                    [*node.module.split("."), *([node.names[0].name] if node.module == "h2o_flexgen.engine" else [])]
                )
                seen += bool(target)
                if target and target != source and rank[target] <= rank[source]:
                    wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} imports {node.module}")
    assert seen > 50, "the imports were not found"
    assert not wrong, "\n".join(wrong)


def test_no_module_of_the_package_imports_itself_in_a_circle() -> None:
    """Imports for annotations alone count too: two modules that name each other are one idea."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {name: _imported(path, names) - {name} for name, path in names.items() if name != "h2o_flexgen"}
    done: set[str] = set()
    for start in graph:
        _refuse_circle(graph, start, [], done)


def _imported(path: Path, names: Mapping[str, Path]) -> set[str]:
    nodes = nodes_of(path)
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
            plain |= inner or {node.module}
    return plain & (names.keys() - {"h2o_flexgen"})


def _refuse_circle(graph: Mapping[str, set[str]], name: str, way: list[str], done: set[str]) -> None:
    assert name not in way, f"a circle: {' -> '.join([*way[way.index(name) :], name])}"
    if name in done:
        return
    for target in sorted(graph.get(name, ())):
        _refuse_circle(graph, target, [*way, name], done)
    done.add(name)


def test_nothing_imports_a_program() -> None:
    libraries = [f for f in all_imports() if f.source in PACKAGES - PROGRAM_PACKAGES]
    assert len(libraries) > 50, "the imports were not found"
    wrong = [f"{f.file}:{f.line}" for f in libraries if f.target in PROGRAMS | PROGRAM_PACKAGES]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_what_is_beside_the_package() -> None:
    """Benchmarks and training import the package, and neither the package nor one another's modules import them."""
    wrong = []
    for folder, allowed in {"h2o_flexgen": set[str](), **BESIDE}.items():
        forbidden = {*BESIDE, "scripts", "tests"} - {folder, *allowed}
        for path in (ROOT / folder).rglob("*.py"):
            wrong += [f"{path} imports {name}" for name in sorted(_roots(path) & forbidden)]
    assert not wrong, "\n".join(wrong)
    assert {"h2o_flexgen", "benchmarks"} <= _roots(ROOT / "benchmarks" / "runs.py")


def _roots(path: Path) -> set[str]:
    """The first names of all modules that a file imports absolutely."""
    nodes = nodes_of(path)
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names = [*plain, *(node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level)]
    return {name.partition(".")[0] for name in names}


def test_the_reader_of_imports_sees_them_all() -> None:
    """Relative, aliased, deferred and type-only imports."""
    text = (
        "from __future__ import annotations\n"
        "import h2o_flexgen.cache.slots as s\nfrom h2o_flexgen import engine, cli\nfrom .. import run\n"
        "from ..memory.disk import x\nfrom .executor import y\nimport torch\n"
        "if TYPE_CHECKING:\n    from h2o_flexgen.kernels import z\n"
        "def f():\n    from h2o_flexgen.models import decoder\n"
    )
    tree = ast.parse(text)
    every = list(ast.walk(tree))
    nodes = [node for node in every if isinstance(node, ast.Import | ast.ImportFrom)]
    found = {target for node in nodes for target in _targets(node, ("engine",))}
    assert found == {"cache", "engine", "cli", "run", "memory", "kernels", "models"}
    typed = [node for node in nodes if node in _type_checking(every)]
    assert [_targets(node, ("engine",)) for node in typed] == [["kernels"]]


def _python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


HEAVY = "{'torch', 'transformers', 'matplotlib', 'numpy'} & set(sys.modules)"


def test_light_packages_load_no_torch() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in ("config", "schedule", "cost", "reporting", "pages")
        for path in sorted((PACKAGE / name).rglob("*.py"))
        if path.stem != "__init__"
    ]
    lines = ["import sys, h2o_flexgen, h2o_flexgen.config, h2o_flexgen.schedule"]
    lines += [f"import {module}" for module in modules]
    run = _python("\n".join([*lines, f"print(sorted({HEAVY}))"]))
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_help_loads_no_torch() -> None:
    """Of any program, one after another in one process: what one of them loads stays loaded."""
    code = f"""
import runpy, sys
for program in {sorted(PROGRAMS)}:
    sys.argv = [program, "--help"]
    try:
        runpy.run_module(f"h2o_flexgen.{{program}}", run_name="__main__")
    except SystemExit as stop:
        print(program, stop.code, sorted({HEAVY}), file=sys.stderr)
"""
    run = _python(code)
    assert run.stderr.splitlines() == [f"{program} 0 []" for program in sorted(PROGRAMS)], run.stderr
    for program in PROGRAMS:
        assert f"python -m h2o_flexgen.{program}".removesuffix(".__main__") in run.stdout


REFUSALS = [
    ("run", "--model", "./nowhere"),
    ("run", "--model", "nobody/nothing"),
    ("run", "--model", "{folder}/unknown"),
    ("run", "--model", "{folder}/hollow"),
    ("run", "--model", "{folder}/deeper"),
    ("run", "--model", "{folder}/bloom.gguf"),
    ("run", "--model", "{folder}/bloom.gguf", "--model-impl", "transformers"),
    ("run", "--model", "{folder}/llama.gguf", "--model-impl", "transformers"),
    ("run", "--model", "{folder}/adapter.gguf"),
    ("run", "--model", "{folder}/hollow", "--model-impl", "transformers"),
    ("evaluate", "--model", "{folder}/deeper"),
    ("run", "--prompts", "./nowhere"),
    ("run", "--output", "{folder}/there"),
    ("run", "--hh-ratio", "2"),
    ("batch", "-i", "./nowhere", "-o", "{folder}/results.jsonl"),
    ("batch", "-i", "{folder}/there", "-o", "{folder}/results.jsonl", "--model", "./nowhere"),
    ("evaluate", "--model", "./nowhere"),
    ("evaluate", "--text", "./nowhere"),
    ("demo", "--model", "./nowhere"),
    ("calibrate", "--model", "./nowhere"),
    ("search", "--model", "./nowhere"),
    ("bench", "--model", "./nowhere"),
    ("report", "./nowhere"),
]


def test_what_is_refused_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    """torch takes seconds to import. One process for all: the first that loads it is named."""
    shipped = PACKAGE / "data" / "demo" / "config.json"
    shutil.copytree(shipped.parent, tmp_path / "deeper")
    more = {**json.loads(shipped.read_text()), "num_hidden_layers": 99}
    (tmp_path / "deeper" / "config.json").write_text(json.dumps(more))
    for name, config in (("unknown", '{"model_type": "nothing_known"}'), ("hollow", shipped.read_text())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "there").write_text("{}\n")
    for name in ("bloom", "llama", "adapter"):
        writer = gguf.GGUFWriter(str(tmp_path / f"{name}.gguf"), "llama" if name == "adapter" else name)
        writer.add_type("adapter" if name == "adapter" else "model")
        writer.add_layer_norm_rms_eps(1e-5)
        for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
            writer.add_uint32(f"{writer.arch}.{key}", 1)
        writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    refusals = [[word.format(folder=tmp_path) for word in words] for words in REFUSALS]
    code = f"""
import importlib, sys
for program, *words in {refusals}:
    code = importlib.import_module(f"h2o_flexgen.{{program}}").main(words)
    print(program, *words, code in (2, 4), "torch" in sys.modules)
"""
    run = _python(code)
    assert run.stdout.splitlines() == [f"{' '.join(words)} True False" for words in refusals], run.stderr
    assert run.stderr.count("llama.gguf is a GGUF file") == 1
    assert run.stderr.count("is of the architecture 'bloom', which is not supported") == 2
    assert all(len(block.splitlines()) < 24 for block in run.stderr.split("error: ")), "one screen each"
