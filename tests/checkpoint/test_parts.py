"""Tensors of a model that are rows of larger tensors in its checkpoint."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h2o_flexgen.checkpoint.pack import ensure_packed
from h2o_flexgen.checkpoint.reader import CheckpointSource, open_checkpoint
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.memory.copies import CopyEngine
from h2o_flexgen.memory.handle import direct_layout, views
from h2o_flexgen.memory.rundir import OffloadDir
from h2o_flexgen.models.families import checkpoint_names, ignored_names
from h2o_flexgen.models.stored import Stored
from tests.checkpoint.models import make_spec, read_all, weights, write_shards, write_single

SPEC = make_spec()
FUSED = "model.decoder.layers.0.self_attn.qkv_proj.weight"
Names = dict[str, tuple[str | Stored, ...]]


def spans_for(spec: ModelSpec, layout: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Of q, k and v: one after the other ("blocks"), or per head one after the other ("heads")."""
    size, head = spec.hidden_size, spec.head_dim
    if layout == "blocks":
        return tuple(((part * size, (part + 1) * size),) for part in range(3))
    starts = [range(part * head, 3 * size, 3 * head) for part in range(3)]
    return tuple(tuple((start, start + head) for start in part) for part in starts)


def fused(spec: ModelSpec, layout: str) -> tuple[Names, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Names and tensors of a checkpoint with fused q, k, v, and the canonical tensors that it holds."""
    stored = weights(spec)
    expected = {name: stored[options[0]] for name, options in checkpoint_names(spec).items()}  # type: ignore[index]
    names: Names = {**checkpoint_names(spec)}
    for layer in range(spec.num_layers):
        for kind in ("weight", "bias"):
            canonical = [f"layers.{layer}.attn.{part}.{kind}" for part in "qkv"]
            fused_name = f"model.decoder.layers.{layer}.self_attn.qkv_proj.{kind}"
            rows = 3 * spec.hidden_size
            whole = torch.empty(rows, *expected[canonical[0]].shape[1:], dtype=torch.float16)
            for name, spans in zip(canonical, spans_for(spec, layout), strict=True):
                whole[[row for start, stop in spans for row in range(start, stop)]] = expected[name]
                del stored[names[name][0]]  # type: ignore[arg-type]
                names[name] = (Stored(fused_name, spans, rows), *names[name])
            stored[fused_name] = whole
    return names, stored, expected


def open_fused(folder: Path, names: Names, spec: ModelSpec = SPEC) -> CheckpointSource:
    return open_checkpoint(folder, spec, names, ignored_names(spec))


def refused(folder: Path, names: Names) -> str:
    open_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ModelError) as caught:
        open_fused(folder, names).close()
    assert caught.value.exit_code == 4
    assert len(os.listdir("/proc/self/fd")) == open_fds
    return str(caught.value)


def write(folder: Path, files: str, tensors: dict[str, torch.Tensor]) -> None:
    if files == "single":
        write_single(folder, tensors)
    elif files == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        write_shards(folder, tensors, 3, binary=files == "bin shards")


@pytest.mark.parametrize("files", ["single", "shards", "bin", "bin shards"])
@pytest.mark.parametrize("layout", ["blocks", "heads"])
def test_fused_projections_come_apart(tmp_path: Path, files: str, layout: str) -> None:
    names, stored, expected = fused(SPEC, layout)
    write(tmp_path, files, stored)
    with open_fused(tmp_path, names) as source:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            got = read_all(source, SPEC, dtype)
            assert all(torch.equal(got[name], expected[name].to(dtype)) for name in expected)
        for name, tensor in expected.items():
            place = source.location(name)
            if layout == "heads" and re.search(r"\.[qkv]\.(weight|bias)$", name):
                assert place is None
                continue
            assert place is not None
            raw = Path(place.path).read_bytes()[place.file_offset : place.file_offset + place.nbytes]
            assert raw == tensor.numpy().tobytes()


def test_a_checkpoint_may_keep_them_apart_all_the_same(tmp_path: Path) -> None:
    names, _, expected = fused(SPEC, "heads")
    write_single(tmp_path, weights(SPEC))
    with open_fused(tmp_path, names) as source:
        got = read_all(source, SPEC, torch.float16)
        assert source.location("layers.0.attn.k.weight") is not None
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_blocks_are_read_in_place_from_disk(tmp_path: Path) -> None:
    names, stored, expected = fused(SPEC, "blocks")
    write_shards(tmp_path, stored, 2)
    with open_fused(tmp_path, names) as source, CopyEngine() as copies:
        for group in SPEC.weight_groups:
            locations = {tensor.name: source.location(tensor.name) for tensor in group.tensors}
            layout, extents = direct_layout(group, "float16", locations)  # type: ignore[arg-type]
            buffer = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
            copies.read_extents(extents, buffer).wait()
            assert all(torch.equal(view, expected[name]) for name, view in views(layout, buffer).items())


def test_heads_are_packed_once_and_anew_where_the_rows_are_others(tmp_path: Path) -> None:
    names, stored, expected = fused(SPEC, "heads")
    write_single(tmp_path, stored)
    other, _, _ = fused(SPEC, "blocks")
    group = SPEC.groups_by_key["layers.1.attn"]
    with OffloadDir(tmp_path / "offload") as offload, CopyEngine() as copies:
        paths = []
        for rows in (names, other, names):
            with open_fused(tmp_path, rows) as source:
                (unit,) = ensure_packed([group], source, "float16", offload).values()
            paths.append(unit.extents[0].path)
        assert paths[0] == paths[2] != paths[1]
        buffer = torch.empty(unit.layout.nbytes, dtype=torch.uint8)
        copies.read_extents(unit.extents, buffer, digest=unit.checksum).wait()
    assert all(torch.equal(view, expected[name]) for name, view in views(unit.layout, buffer).items())


def test_wrong_rows_are_reported_once(tmp_path: Path) -> None:
    names, stored, _ = fused(SPEC, "heads")
    stored[FUSED] = stored[FUSED][:64].clone()
    stored[FUSED.replace("weight", "bias")] = torch.zeros(96, dtype=torch.int8)
    write_single(tmp_path, stored)
    message = refused(tmp_path, names)
    assert f"tensor {FUSED!r}: expected shape (96, 32) from config.json, found (64, 32)" in message
    assert "qkv_proj.bias': expected dtype float16, bfloat16, float32, found int8" in message
    assert "2 problems" in message


@pytest.mark.parametrize("files", ["single", "bin shards"])
def test_a_missing_tensor_is_reported_once_with_its_parts(tmp_path: Path, files: str) -> None:
    names, stored, _ = fused(SPEC, "blocks")
    del stored[FUSED]
    write(tmp_path, files, stored)
    message = refused(tmp_path, names)
    parts = ", ".join(f"layers.0.attn.{part}.weight" for part in "qkv")
    assert f"tensor {FUSED!r} ({parts}) is missing" in message
    assert "one problem" in message


def test_a_missing_shard_excuses_the_parts_it_would_hold(tmp_path: Path) -> None:
    names, stored, _ = fused(SPEC, "blocks")
    write_shards(tmp_path, stored, 3)[1].unlink()
    message = refused(tmp_path, names)
    assert "model-00002-of-00003.safetensors is missing" in message
    assert "one problem" in message


def test_a_tensor_in_two_shards_is_reported_once(tmp_path: Path) -> None:
    names, stored, _ = fused(SPEC, "heads")
    paths = write_shards(tmp_path, stored)
    held = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    (other,) = {path.name for path in paths} - {held[FUSED]}
    save_file({name: stored[name] for name in stored if held[name] == other or name == FUSED}, tmp_path / other)
    message = refused(tmp_path, names)
    assert f"tensor {FUSED!r} is in {paths[0].name} and in {paths[1].name}" in message
    assert "one problem" in message


def test_fused_and_apart_at_the_same_time(tmp_path: Path) -> None:
    names, stored, _ = fused(SPEC, "blocks")
    apart = FUSED.replace("qkv", "q")
    write_single(tmp_path, stored | {apart: weights(SPEC)[apart]})
    assert re.search(r"'[\w.]+' and '[\w.]+' are both layers\.0\.attn\.q\.weight$", refused(tmp_path, names))


def test_rows_that_nothing_uses(tmp_path: Path) -> None:
    names, stored, _ = fused(SPEC, "blocks")
    names["layers.0.attn.k.weight"] = (Stored(FUSED, ((0, 16), (80, 96)), 112),)
    for part, spans in (("q", ((0, 32),)), ("v", ((48, 80),))):
        names[f"layers.0.attn.{part}.weight"] = (Stored(FUSED, spans, 112),)
    stored[FUSED] = torch.zeros(112, 32).half()
    write_single(tmp_path, stored)
    message = refused(tmp_path, names)
    assert f"tensor {FUSED!r}: rows 32 to 47, 96 to 111 are not part of this model" in message
    assert "one problem" in message


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        (Stored(FUSED, ((0, 31),), 96), "has 32 rows, the spans of .* hold 31"),
        (Stored(FUSED, ((80, 112),), 96), "do not lie within the 96"),
        (Stored(FUSED, ((32, 0), (0, 64)), 96), "do not lie within"),
        (Stored(FUSED, ((0, 32),), 64), "in two shapes"),
        (Stored(FUSED), "in two shapes"),
    ],
)
def test_names_that_cannot_be(tmp_path: Path, option: Stored, fault: str) -> None:
    names, stored, _ = fused(SPEC, "blocks")
    write_single(tmp_path, stored)
    names["layers.0.attn.k.weight"] = (option,)
    with pytest.raises(ValueError, match=fault):
        open_fused(tmp_path, names)
    names["layers.0.attn.k.weight"] = (Stored(FUSED, ((0, 32),), 96), Stored(FUSED, ((32, 64),), 96))
    with pytest.raises(ValueError, match="two different selections"):
        open_fused(tmp_path, names)


QUANTISED = {
    "qweight": torch.zeros(4, 32, dtype=torch.int32),
    "qzeros": torch.zeros(1, 4, dtype=torch.int32),
    "scales": torch.zeros(1, 32).half(),
    "g_idx": torch.zeros(32, dtype=torch.int32),
}


def test_quantised_checkpoints_are_called_so(tmp_path: Path) -> None:
    stored = weights(SPEC)
    for name in [name for name in stored if re.search(r"(proj|fc\d)\.weight$", name)]:
        del stored[name]
        stored |= {name.removesuffix("weight") + ending: value.clone() for ending, value in QUANTISED.items()}
    write_shards(tmp_path, stored)
    message = refused(tmp_path, {**checkpoint_names(SPEC)})
    assert re.search(r"tensor '[\w.]+' and 47 more are of quantised weights, which are not read", message)
    assert "use the model's checkpoint in float16, bfloat16, float32" in message
    assert "one problem" in message


@pytest.mark.parametrize("ending", ["weight_scale", "weight_scale_inv", "SCB", "weight.quant_state.bitsandbytes__nf4"])
def test_scales_beside_a_weight_are_quantisation_too(tmp_path: Path, ending: str) -> None:
    name = f"model.decoder.layers.0.fc1.{ending}"
    write_single(tmp_path, weights(SPEC) | {name: torch.zeros(1)})
    assert f"tensor {name!r} is of quantised weights" in refused(tmp_path, {**checkpoint_names(SPEC)})
