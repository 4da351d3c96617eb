"""Headers of GGUF files: as the `gguf` package reads them, and refused with a clear error where they are damaged."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from h2o_flexgen.checkpoint.gguf.config import config_of
from h2o_flexgen.checkpoint.gguf.header import read_header
from h2o_flexgen.checkpoint.gguf.source import GgufSource
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import H2OFlexGenError, ModelError
from h2o_flexgen.models.families import spec_from_config
from tests.checkpoint.gguf_files import Kind, in_kind, tiny_model, write_gguf

Pair = tuple[str, int, bytes]
"""A key, the type of its value, and the bytes of that."""
Row = tuple[str, tuple[int, ...], int, int]
"""A tensor: name, dimensions from the innermost on, type and offset."""

STRING, ARRAY, UINT32 = 8, 9, 4
PLAIN: tuple[Row, ...] = (("a", (8, 2), 0, 0), ("b", (32,), 8, 64))


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> Pair:
    return key, kind, value


ARCHITECTURE = pair("general.architecture", STRING, text("llama"))


def header(pairs: tuple[Pair, ...] = (ARCHITECTURE,), rows: tuple[Row, ...] = PLAIN, **changes: Any) -> bytes:
    """The bytes of a file with room for the weights of PLAIN."""
    start = {"magic": b"GGUF", "version": 3, "tensors": len(rows), "keys": len(pairs), "room": 128, **changes}
    data = start["magic"] + struct.pack("<IQQ", start["version"], start["tensors"], start["keys"])
    for key, kind, value in pairs:
        data += text(key) + struct.pack("<I", kind) + value
    for name, shape, kind, offset in rows:
        data += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return data + bytes(-len(data) % 32) + bytes(start["room"])


def array(kind: int, count: int, values: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + values


def written(folder: Path, data: bytes, name: str = "x.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_a_header_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "\u2581b", "", "\U0001f600"])
        writer.add_token_scores([0.0, -1.5, 2.0, 3.0])
        writer.add_key_value("x.flags", [True, False], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.BOOL)
        for number, kind in enumerate(("UINT8", "INT8", "UINT16", "INT16", "INT32", "UINT64", "INT64", "FLOAT64")):
            writer.add_key_value(f"x.{kind}", number, gguf.GGUFValueType[kind])

    path = write_gguf(tmp_path / "x.gguf", tiny_model("llama"), in_kind(Kind.Q4_0), extra=extra)
    found, other = read_header(path), gguf.GGUFReader(str(path))
    wanted = {key: field.contents() for key, field in other.fields.items() if not key.startswith("GGUF.")}
    mine = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in found.metadata.items()}
    assert mine == wanted
    assert {name: (each.offset, each.nbytes, each.kind, each.shape) for name, each in found.tensors.items()} == {
        each.name: (each.data_offset, each.n_bytes, each.tensor_type.name, tuple(each.shape.tolist()[::-1]))
        for each in other.tensors
    }


def test_a_plain_file_is_fine(tmp_path: Path) -> None:
    assert set(read_header(written(tmp_path, header())).tensors) == {"a", "b"}
    assert set(read_header(written(tmp_path, header(version=2))).tensors) == {"a", "b"}


FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "web page": (b"<!DOCTYPE html><html>", "is a web page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\nsize 5\n", "Git LFS pointer"),
    "magic": (header(magic=b"GGML"), "is not a GGUF file"),
    "version 1": (header(version=1), "GGUF version 1"),
    "version 4": (header(version=4), "GGUF version 4"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "tensor count": (header(tensors=1 << 60), "claims 1152921504606846976 tensors"),
    "key count": (header(keys=1 << 60), "claims 2 tensors and 1152921504606846976 keys"),
    "cut in the header": (header()[:100], "is truncated"),
    "cut in the weights": (header(room=80), "is truncated: tensor 'b' ends at byte"),
    "key length": (header((pair("x" * 9, UINT32, b"\0\0\0\0"),)).replace(text("x" * 9)[:8], b"\xff" * 8), "truncated"),
    "same key": (header((ARCHITECTURE, ARCHITECTURE)), "'general.architecture' twice"),
    "empty key": (header((pair("", UINT32, b"\0\0\0\0"),)), "the key ''"),
    "key bytes": (header((pair("k", UINT32, b"\0\0\0\0"),)).replace(text("k"), text(b"\xff")), "a key that is not UTF"),
    "text": (header((pair("k", STRING, text(b"\xc3")),)), "the value of 'k' that is not UTF-8"),
    "text length": (header((pair("k", STRING, struct.pack("<Q", 1 << 63)),)), "is truncated"),
    "kind of value": (header((pair("k", 13, b""),)), "unknown type 13"),
    "bool": (header((pair("k", 7, b"\x02"),)), "neither true nor false"),
    "bools": (header((pair("k", ARRAY, array(7, 2, b"\x01\x02")),)), "neither true nor false"),
    "not finite": (header((pair("k", 6, struct.pack("<f", float("nan"))),)), "not finite"),
    "array of arrays": (header((pair("k", ARRAY, array(ARRAY, 1, array(UINT32, 0, b""))),)), "an array of arrays"),
    "array type": (header((pair("k", ARRAY, array(99, 1, b"")),)), "unknown type 99"),
    "array length": (header((pair("k", ARRAY, array(UINT32, 1 << 62, b"")),)), "is truncated"),
    "texts length": (header((pair("k", ARRAY, array(STRING, 1 << 62, b"")),)), "claims 4611686018427387904 strings"),
    "alignment": (header((pair("general.alignment", UINT32, struct.pack("<I", 33)),)), "an alignment of 33"),
    "alignment 0": (header((pair("general.alignment", UINT32, bytes(4)),)), "an alignment of 0"),
    "path": (header(rows=(("../a", (8,), 0, 0),)), "has a path separator"),
    "same tensor": (header(rows=(("a", (8,), 0, 0), ("a", (8,), 0, 32))), "tensor 'a' twice"),
    "dimensions": (header(rows=(("a", (1,) * 5, 0, 0),)), "of 5 dimensions"),
    "no dimension": (header(rows=(("a", (), 0, 0),)), "of 0 dimensions"),
    "zero": (header(rows=(("a", (8, 0), 0, 0),)), "of shape (0, 8)"),
    "absurd shape": (header(rows=(("a", (1 << 63, 1 << 63), 0, 0),)), "has tensor 'a' of shape"),
    "unknown type": (header(rows=(("a", (8,), 77, 0),)), "of the unknown type 77"),
    "removed type": (header(rows=(("a", (256,), 31, 0),)), "of type Q4_0_4_4, which ggml no longer has"),
    "another type": (header(rows=(("a", (256,), 41, 0),)), "of type Q1_0; those read are F32, F16"),
    "half a block": (header(rows=(("a", (40,), 2, 0),)), "rows of 40 numbers, needed a multiple of 32 for Q4_0"),
    "hole": (header(rows=(("a", (8,), 0, 0), ("b", (8,), 0, 64))), "a hole between it and tensor 'a'"),
    "overlap": (header(rows=(("a", (16,), 0, 0), ("b", (8,), 0, 32))), "it overlaps tensor 'a'"),
    "unaligned": (header(rows=(("a", (8,), 0, 8),)), "at byte"),
    "far away": (header(rows=(("a", (8,), 0, (1 << 64) - 32),)), "has tensor 'a' of shape"),
    "split": (header((ARCHITECTURE, pair("split.count", 2, struct.pack("<H", 2)))), "one of 2 files"),
    "another part": (header((ARCHITECTURE, pair("split.no", 2, struct.pack("<H", 1)))), "is part 1 of its model"),
    "split.count is text": (header((ARCHITECTURE, pair("split.count", STRING, text("2")))), "one of 2 files"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_refused(fault: str, tmp_path: Path) -> None:
    data, message = FAULTS[fault]
    path, before = written(tmp_path, data), len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert message in str(caught.value)
    assert "x.gguf" in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before


def parts(folder: Path, change: Callable[[int, list[Pair]], None] = lambda number, pairs: None) -> Path:
    """A model in three files; gives the second."""
    for number in range(3):
        pairs = [ARCHITECTURE] if number == 0 else []
        pairs += [("split.no", 2, struct.pack("<H", number)), ("split.count", 2, struct.pack("<H", 3))]
        pairs.append(("split.tensors.count", 5, struct.pack("<i", 3)))
        change(number, pairs)
        data = header(tuple(pairs), ((f"t{number}", (8,), 0, 0),))
        written(folder, data, f"m-{number + 1:05d}-of-00003.gguf")
    return folder / "m-00002-of-00003.gguf"


def test_a_split_model_is_read_whole(tmp_path: Path) -> None:
    found = read_header(parts(tmp_path))
    assert [(name, tensor.part) for name, tensor in found.tensors.items()] == [("t0", 0), ("t1", 1), ("t2", 2)]
    assert found.metadata["general.architecture"] == "llama"
    assert len(found.parts) == 3


def test_a_split_model_must_be_whole(tmp_path: Path) -> None:
    path = parts(tmp_path)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-00003-of-00003\.gguf cannot be opened"):
        read_header(path)


def test_parts_of_a_split_model_must_belong_together(tmp_path: Path) -> None:
    def shuffle(number: int, pairs: list[Pair]) -> None:
        pairs[-3] = ("split.no", 2, struct.pack("<H", 0))

    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is part 0 of its model, by its name 1"):
        read_header(parts(tmp_path, shuffle))


def whole_file(folder: Path) -> bytes:
    """A small model with a tokenizer, to be damaged."""

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab", "\u2581"])
        writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -0.5, -3.0])
        writer.add_token_types([2, 3, 3, 1, 1, 1, 1])

    return write_gguf(folder / "whole.gguf", tiny_model("llama"), in_kind(Kind.Q8_0), extra=extra).read_bytes()


def opened(path: Path) -> None:
    """All that is done with a file before its weights are read, and the reading of one tensor."""
    found = read_header(path)
    spec = spec_from_config(config_of(found), "fuzzed")
    TextCodec.of_gguf(found.metadata, found.path)
    GgufSource(found, spec).close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return whole_file(tmp_path_factory.mktemp("gguf"))


MOST = 6000
"""Bytes of a header that are damaged: all of it, and some of the weights."""
EDGES = st.sampled_from([0, 1, 2, 7, 8, 31, 32, 127, 255, 256, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1])


@given(
    edits=st.lists(st.tuples(st.integers(0, MOST), st.one_of(EDGES, st.integers(0, 255)), st.sampled_from([1, 4, 8]))),
    cut=st.one_of(st.none(), st.integers(0, MOST)),
    more=st.binary(max_size=12),
    at=st.integers(0, MOST),
)
@example(edits=[], cut=None, more=b"", at=0)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_our_error(
    edits: list[tuple[int, int, int]], cut: int | None, more: bytes, at: int, whole: bytes, tmp_path: Path
) -> None:
    data = bytearray(whole)
    for place, value, width in edits:
        data[place : place + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    data[at:at] = more
    path = written(tmp_path, bytes(data[:cut]))
    with contextlib.suppress(H2OFlexGenError):
        opened(path)
