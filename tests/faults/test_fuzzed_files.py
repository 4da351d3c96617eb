"""JSON files with anything in them: indices, policies, profiles, schemas, and config.json of each family; GGUF files
with other bytes in them. Our errors, never others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h2o_flexgen.checkpoint.files import Problems
from h2o_flexgen.checkpoint.gguf.blocks import FORMATS
from h2o_flexgen.checkpoint.gguf.header import read_header
from h2o_flexgen.checkpoint.shards import find_shards
from h2o_flexgen.config.hardware.profile import HardwareProfile, find_profile
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.response_format import ResponseFormat
from h2o_flexgen.errors import H2OFlexGenError
from tests.checkpoint.gguf_files import Kind, tiny_model, write_gguf
from tests.checkpoint.test_gguf_blocks import random_blocks
from tests.programs import Run
from tests.tiny import FAMILIES, make_model, save

NUMBERS = st.one_of(st.integers(), st.sampled_from([-1, 0, 1, 2, 2**31, 2**63, 10**30]), st.floats())
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["../x", "a\0b", "\ud800"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)


def shards(value: Any, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))
    problems = Problems()
    if find_shards(str(folder), problems) is None:
        assert problems.texts
    with contextlib.suppress(H2OFlexGenError):
        problems.raise_any(str(folder))


def profile(value: Any, folder: Path) -> None:
    (folder / "profile.json").write_text(json.dumps(value))
    HardwareProfile.load(folder / "profile.json")


READERS: dict[str, tuple[Callable[[Any, Path], object], dict[str, Any]]] = {
    "index": (shards, {"metadata": {"total_size": 8}, "weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}),
    "policy": (lambda value, folder: OffloadPolicy.from_json(value), OffloadPolicy().to_json()),
    "profile": (profile, find_profile("t4").to_json()),
    "schema": (
        lambda value, folder: ResponseFormat.of_schema(value),
        {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "^a$"}, "b": {"enum": [1, "x"]}},
            "required": ["a"],
            "oneOf": [{"type": "string"}, {"type": "integer", "minimum": 3}],
            "items": {"prefixItems": [{"const": 3}]},
        },
    ),
}


def paths(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every part of a JSON value is."""
    within = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(path for key, part in within for path in paths(part, (*before, key)))]


def changed(value: Any, path: tuple[Any, ...], how: str, other: Any) -> Any:
    """`value` with the part at `path` replaced by `other`, taken out, or put beside itself under another name."""
    if not path:
        return other
    copy = json.loads(json.dumps(value))
    part = copy
    for key in path[:-1]:
        part = part[key]
    if how == "removed":
        del part[path[-1]]
    elif how == "renamed" and isinstance(part, dict):
        part[str(other)] = part.pop(path[-1])
    else:
        part[path[-1]] = other
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_is_taken_or_our_error(kind: str, tmp_path: Path, data: st.DataObject) -> None:
    read, whole = READERS[kind]
    value = whole
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths(value)))
        value = changed(value, path, data.draw(st.sampled_from(["replaced", "removed", "renamed"])), data.draw(VALUES))
        if not isinstance(value, dict):
            break
    with contextlib.suppress(H2OFlexGenError):
        read(value, tmp_path)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family."""
    rows = {row.family: name for name, row in FAMILIES.items()}
    return {family: save(make_model(name), tmp_path_factory.mktemp(family)) for family, name in rows.items()}


SIZES = st.sampled_from([2, 7, 1000, 10**6, 10**9, 10**15, 10**400])


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_config_with_anything_in_it_runs_or_is_refused_in_one_message(
    families: dict[str, Path], run: Run, data: st.DataObject
) -> None:
    """0; 3 where numbers then grow beyond what is finite; 2 or 5 where a context or a plan is too small; else 4."""
    folder = families[data.draw(st.sampled_from(sorted(families)))]
    written = (folder / "config.json").read_text()
    config = json.loads(written)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(paths(config)[1:]))
        how = data.draw(st.sampled_from(["replaced", "removed", "renamed"]))
        config = changed(config, path, how, data.draw(st.one_of(VALUES, SIZES)))
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": [3, 4, 5]}))
    try:
        (folder / "config.json").write_text(json.dumps(config))
        ran = run("--model", folder, "--prompts", prompts, "--gen-len", 2, "--no-calibrate", "--quiet")
    finally:
        (folder / "config.json").write_text(written)
    assert ran.code in (0, 2, 3, 4, 5), ran.err
    assert "Traceback" not in ran.err
    assert ran.err.count("error: ") == (ran.code in (2, 4, 5)), ran.err


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """GGUF files of tiny models whose matrices are blocks of one kind, and where each one's header ends."""
    found = {}
    for kind in ("IQ4_XS", "MXFP4", "Q2_K", "IQ2_XS"):

        def random(name: str, values: np.ndarray, kind: str = kind) -> tuple[np.ndarray, Kind]:
            made = random_blocks(kind, len(values), 256 // FORMATS[kind].numbers, len(name))
            return made.reshape(len(values), -1), Kind[kind]

        sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
        path = write_gguf(tmp_path_factory.mktemp(kind) / "model.gguf", make_model("llama", **sizes), random)
        found[kind] = path, min(tensor.offset for tensor in read_header(path).tensors.values())
    path = write_gguf(tmp_path_factory.mktemp("gpt") / "model.gguf", tiny_model("gpt-oss"))
    return {**found, "gpt-oss": (path, min(tensor.offset for tensor in read_header(path).tensors.values()))}


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_gguf_file_with_other_bytes_runs_or_is_refused_in_one_message(
    blocks: dict[str, tuple[Path, int]], run: Run, tmp_path: Path, data: st.DataObject
) -> None:
    """0; 3 where numbers are then not finite; 2 or 5 where a context or a plan is too small; else 4."""
    whole, header = blocks[data.draw(st.sampled_from(sorted(blocks)))]
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.one_of(st.integers(0, header - 1), st.integers(0, len(content) - 1)))
        content[place] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 127, 128, 255])))
    if data.draw(st.integers(0, 5)) == 0:
        del content[data.draw(st.integers(0, len(content))) :]
    path, prompts = tmp_path / "model.gguf", tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    prompts.write_text(json.dumps({"prompt": [3, 4, 5]}))
    ran = run("--model", path, "--prompts", prompts, "--gen-len", 2, "--no-calibrate", "--quiet")
    assert ran.code in (0, 2, 3, 4, 5), ran.err
    assert "Traceback" not in ran.err
    assert ran.err.count("error: ") == (ran.code in (2, 4, 5)), ran.err
