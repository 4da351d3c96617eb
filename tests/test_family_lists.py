"""A model family is part of one file, a registry line, rows in tests/tiny.py and a README mention: the same names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from h2o_flexgen.models import families
from tests import tiny

ROOT = Path(__file__).parents[1]
REGISTERED = families.FAMILIES.names()


def test_every_family_is_tested_and_every_test_is_of_a_family() -> None:
    assert {row.family for row in tiny.FAMILIES.values()} == set(REGISTERED)


@pytest.mark.parametrize("family", REGISTERED)
def test_a_family_is_made_in_one_file_and_has_a_readme_mention(family: str) -> None:
    made = re.compile(rf'(\bLlamaLike\(\s*|\bfamily=)"{family}"')
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "h2o_flexgen/models").glob("*.py")]
    assert sum(bool(made.search(text)) for text in files) == 1
    assert f"`{family}`" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_specs_say_which_family_they_are_of(name: str) -> None:
    """What the registry is asked by, once a config.json has been read."""
    config = tiny.config_of(name).to_dict()
    spec = families.spec_from_config({**config, "model_type": tiny.FAMILIES[name].family}, name)
    assert spec.arch.family == tiny.FAMILIES[name].family


ASKING = {
    "baselines/flexgen.py": "FlexGen runs OPT models only",
    "baselines/random_gguf.py": "llama.cpp knows families by names of its own",
    "checkpoint/gguf/architectures.py": "a GGUF file has an architecture, and the config made of it a family",
    "checkpoint/gguf/config.py": "the same, of architectures that transformers' modules compute",
    "engine/requests/tokenizer.py": "transformers overrules tokenizer_config.json by model_type, and so must we",
}
"""Modules outside h2o_flexgen/models that ask which family a model is of, and the reason."""


def test_nothing_else_asks_which_family_a_model_is_of() -> None:
    asks = re.compile(r"\.family\b|\bmodel_type\b")
    package = ROOT / "h2o_flexgen"
    others = [path for path in package.rglob("*.py") if "models" not in path.relative_to(package).parts]
    found = {str(path.relative_to(package)) for path in others if asks.search(path.read_text(encoding="utf-8"))}
    assert found == set(ASKING)
