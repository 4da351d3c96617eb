"""Headers of safetensors files that are none, that contradict their files, or that are damaged at random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.errors import ModelError
from tests.checkpoint.models import SINGLE, make_spec, open_tiny, raw_safetensors, weights, write_single
from tests.checkpoint.refusals import TOKENS, refused
from tests.seeds import python_random

Header = dict[str, Any]
pytestmark = pytest.mark.usefixtures("no_weight_memory")


def edited_header(path: Path, edit: Callable[[Header], object]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    raw_safetensors(path, header, data[8 + length :])


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ((1 << 40).to_bytes(8, "little") + b"{}", f"is not a safetensors file: header length {1 << 40}"),
        ((2).to_bytes(8, "little") + b"[]", "is not a safetensors file"),
        ((5000).to_bytes(8, "little") + b'{"a":', "is truncated: expected at least 5008 bytes, found 13"),
        (b"\x01\x00", "is truncated: expected at least"),
        ((9).to_bytes(8, "little") + b'{"a": tru', "the header is not valid JSON"),
        ((200_000).to_bytes(8, "little") + b'{"a":' + b"[" * 199_995, "the header is not valid JSON"),
        ((14).to_bytes(8, "little") + b'{"a":1, "a":2}', "the header is not valid JSON (a key occurs twice)"),
        ((7).to_bytes(8, "little") + b'{"\xff":1}', "the header is not valid JSON"),
    ],
)
def test_headers_that_are_none(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    assert fault in refused(tmp_path)


def _set(key: str, value: object) -> Callable[[Header], object]:
    return lambda header: header[TOKENS].__setitem__(key, value)


def _shift(header: Header) -> None:
    for info in header.values():
        if "data_offsets" in info:
            info["data_offsets"] = [end + 8 for end in info["data_offsets"]]


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        (_set("data_offsets", [0, 6144]), "overlaps"),
        (_set("data_offsets", [1 << 40, (1 << 40) + 6144]), "is truncated: expected"),
        (_set("data_offsets", [6144, 0]), "offsets that run backwards"),
        (_set("data_offsets", [-2, 6142]), "broken header record"),
        (_set("data_offsets", [0, 6143]), "needs 6144 bytes, its offsets hold 6143"),
        (_set("data_offsets", [0.0, 6144.0]), "broken header record"),
        (_set("shape", [97, 32]), "needs 6208 bytes, its offsets hold 6144"),
        (_set("shape", [True, 3072]), "broken header record"),
        (_set("shape", [1 << 70]), "broken header record"),
        (_set("dtype", 3), "broken header record"),
        (_set("dtype", "F4"), "expected dtype float16, bfloat16, float32, found F4"),
        (_set("extra", 1), "broken header record"),
        (lambda header: header.__setitem__(TOKENS, "text"), "broken header record"),
        (_shift, "a hole of 8 bytes before tensor"),
    ],
)
def test_headers_with_wrong_records(tmp_path: Path, edit: Callable[[Header], object], fault: str) -> None:
    edited_header(write_single(tmp_path, weights(make_spec())), edit)
    assert fault in refused(tmp_path)


def test_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    path = write_single(tmp_path, weights(make_spec()))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"more")
    assert f"has bytes after its last tensor: expected {size} bytes, found {size + 4}" in refused(tmp_path)


@pytest.mark.slow
def test_headers_with_random_damage_never_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = write_single(tmp_path, weights(make_spec()))
    data, chance, accepted = path.read_bytes(), python_random(2), 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(3000)] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            open_tiny(tmp_path).close()
            accepted += 1
        except ModelError:
            continue
    assert accepted < 30
