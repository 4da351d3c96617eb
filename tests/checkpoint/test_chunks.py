"""Spans of rows read in chunks: in any order and size, over small gaps, and nothing that is not asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.checkpoint import reader as checkpoint_reader
from h2o_flexgen.checkpoint.binding import FileTensor, merged, tensor_in
from h2o_flexgen.checkpoint.files import CheckpointFile, Problems
from h2o_flexgen.checkpoint.reader import ChunkReader, requests_for
from h2o_flexgen.checkpoint.tables import safetensors_table
from h2o_flexgen.models.stored import Stored
from tests.checkpoint.models import SINGLE, raw_safetensors
from tests.seeds import torch_generator

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    SPANS.filter(lambda spans: any(start < stop for start, stop in spans)),
    st.sampled_from([(), (1,), (3,), (90,), (700,)]),
    st.sampled_from([torch.float16, torch.float32]),
    st.sampled_from([1 << 8, 1 << 12, checkpoint_reader.CHUNK]),
    st.integers(0, 3),
)
def test_any_spans_read_as_numpy_indexes(
    spans: Sequence[tuple[int, int]], width: tuple[int, ...], dtype: torch.dtype, chunk: int, shift: int
) -> None:
    """In any order, overlapping, empty, at any offset of the file, in chunks of any size."""
    whole = torch.randn(40, *width, generator=torch_generator(0)).to(dtype)
    rows = np.concatenate([np.arange(start, stop) for start, stop in spans])
    expected = whole.numpy()[rows]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / SINGLE
        data = whole.numpy().tobytes()
        info = {"dtype": "F16" if dtype == torch.float16 else "F32", "shape": list(whole.shape)}
        raw_safetensors(path, {"x": info | {"data_offsets": [0, len(data)]}}, data, shift)
        patch.setattr(checkpoint_reader, "CHUNK", chunk)
        file, reader = CheckpointFile(str(path)), ChunkReader()
        table = safetensors_table(file, Problems())
        assert table is not None
        assert table["x"].offset % 4 == shift
        part = tensor_in(table["x"], Stored("x", tuple(spans), 40), expected.shape)
        assert part.nbytes == expected.nbytes
        got = bytearray(part.nbytes)
        for start, data in reader.stream(part, "x"):
            got[start : start + len(data)] = data.numpy().tobytes()
        reader.close()
        file.close()
    assert bytes(got) == expected.tobytes()


@given(SPANS)
def test_merging_keeps_the_rows_and_their_order(spans: Sequence[tuple[int, int]]) -> None:
    def rows(spans: Sequence[tuple[int, int]]) -> list[int]:
        return [row for start, stop in spans for row in range(start, stop)]

    found = merged(spans)
    assert rows(found) == rows(spans)
    assert all(start < stop for start, stop in found)
    assert all(one[1] != other[0] for one, other in pairwise(found))


def test_small_gaps_are_read_over_and_large_ones_left_out() -> None:
    heads = [(start, start + 256) for start in range(1000, 1000 + 768 * 40, 768)]
    (request,) = requests_for(heads)
    assert (request.offset, request.stop) == (heads[0][0], heads[-1][1])
    far = [(start, start + 65536) for start in range(0, 3 * 65536 * 8, 3 * 65536)]
    assert [(request.offset, request.stop) for request in requests_for(far)] == far
    assert len(requests_for([(5000, 5100), (0, 100)])) == 2


def test_what_is_read_of_a_span_is_what_it_holds(tmp_path: Path) -> None:
    """Of a large fused tensor only the part that is asked for is read."""
    (tmp_path / "x").write_bytes(bytes(1 << 20))
    file, reader, asked = CheckpointFile(str(tmp_path / "x")), ChunkReader(), []
    read = file.read
    file.read = lambda out, at, offset, nbytes, name: (  # type: ignore[method-assign]
        asked.append(nbytes),
        read(out, at, offset, nbytes, name),
    )
    runs = tuple((start, start + 32768) for start in range(0, 1 << 20, 1 << 17))
    for _ in reader.stream(FileTensor(file, runs, "float16", (8, 16384)), "x"):
        pass
    assert sum(asked) == 8 * 32768
    reader.close()
    file.close()
