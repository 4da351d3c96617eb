"""A hook of mkdocs: the reference, made of the programs' flags, the public names' docstrings and the types of models.

Pictures among the results come with the site; links to other files of the project, which it has not, become plain text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import re
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_PICTURE = re.compile(r"!\[([^]]*)\]\(\.\./(results/[^)]+\.png)\)")
_OUTSIDE = re.compile(r"(?<!!)\[([^]]*)\]\(\.\./[^)]*\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the three pages, which are never on disk."""
    from mkdocs.structure.files import File

    for name, page in {"commands": commands, "python": python, "types": types}.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    for name in sorted({name for path in ROOT.glob("docs/*.md") for _, name in _PICTURE.findall(path.read_text())}):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page whose links lead to nothing but the site."""
    return _OUTSIDE.sub(r"\1", _PICTURE.sub(r"![\1](\2)", markdown))


def commands() -> str:
    """What each program says to --help."""
    from h2o_flexgen.__main__ import PROGRAMS, main

    parts = ["# Command line", "", "Each program is `h2o-flexgen NAME` and `python -m h2o_flexgen.NAME`."]
    for name, text in PROGRAMS.items():
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            main([name, "--help"])
        parts += ["", f"## {name}", "", f"{text[0].upper()}{text[1:]}.", "", "```text", said.getvalue().rstrip(), "```"]
    return "\n".join(parts) + "\n"


def python() -> str:
    """The public names of the package: signatures and docstrings."""
    package = import_module("h2o_flexgen")
    parts = ["# Python", "", "`from h2o_flexgen import ...`"]
    for name in sorted(set(package.__all__) - {"__version__"}):
        parts += _described(name, getattr(package, name))
    return "\n".join(parts) + "\n"


def types() -> str:
    """How each type of model runs by transformers' modules."""
    from h2o_flexgen.models.hf.trusted import REFUSED, ROWS, TRUSTED

    found = {kind: "packed" for kind in TRUSTED}
    found |= {kind: f"row by row: it has {why}" for kind, why in ROWS.items()}
    found |= {kind: f"refused: {why}" for kind, why in REFUSED.items()}
    head = ["# Model types", "", "By [transformers' modules](../modules.md), as compared with transformers.", ""]
    rows = [f"| `{kind}` | {how} |" for kind, how in sorted(found.items())]
    return "\n".join([*head, "| `model_type` | how it runs |", "|---|---|", *rows]) + "\n"


def _described(name: str, thing: Any) -> list[str]:
    parts = ["", f"## {name}", "", "```text", inspect.getdoc(thing) or "", "```"]
    if dataclasses.is_dataclass(thing):
        fields = [item for item in dataclasses.fields(thing) if not item.name.startswith("_")]
        parts += [
            "",
            "| field | type |",
            "|---|---|",
            *(f"| `{item.name}` | `{_type(item.type)}` |" for item in fields),
        ]
    for member, value in inspect.getmembers(thing, lambda each: inspect.isfunction(each) or isinstance(each, property)):
        text = inspect.getdoc(value)
        if member.startswith("_") or not text:
            continue
        shown = member if isinstance(value, property) else f"{member}{inspect.signature(value)}"
        parts += ["", f"### {name}.{member}", "", "```python", shown, "```", "", "```text", text, "```"]
    return parts


def _type(kind: Any) -> str:
    return str(kind).replace("|", "\\|")
