from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h2o_flexgen.checkpoint import reader
from h2o_flexgen.errors import ModelError, StorageError
from h2o_flexgen.models.families import checkpoint_names
from tests.checkpoint.models import (
    CONFIG,
    SINGLE,
    Growth,
    droppable_pages,
    make_spec,
    open_tiny,
    read_all,
    weights,
    write_shards,
    write_single,
)
from tests.pairs import pairs

TOKENS = "model.decoder.embed_tokens.weight"


def _write(folder: Path, layout: str, tensors: dict[str, torch.Tensor]) -> None:
    if layout == "single":
        write_single(folder, tensors)
    elif layout == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        write_shards(folder, tensors, 3, binary=layout == "bin shards")


@pytest.mark.parametrize(
    ("layout", "prefix", "stored"),
    pairs(
        ["single", "shards", "bin", "bin shards"],
        ["model.decoder.", "decoder."],
        [torch.float16, torch.bfloat16, torch.float32],
    ),
)
def test_every_layout_gives_the_tensors_in_any_dtype(
    tmp_path: Path, layout: str, prefix: str, stored: torch.dtype
) -> None:
    spec = make_spec()
    _write(tmp_path, layout, weights(spec, prefix, stored))
    expected = dict(zip(checkpoint_names(spec), weights(spec, prefix, stored).values(), strict=True))
    with open_tiny(tmp_path, spec) as source:
        assert source.dtype == str(stored).removeprefix("torch.")
        assert not source.dummy
        for wanted in (torch.float16, torch.bfloat16, torch.float32):
            got = read_all(source, spec, wanted)
            assert all(torch.equal(got[name], expected[name].to(wanted)) for name in expected)
        for name, tensor in expected.items():
            place = source.location(name)
            assert place is not None
            with open(place.path, "rb") as file:
                file.seek(place.file_offset)
                raw = torch.frombuffer(bytearray(file.read(place.nbytes)), dtype=stored)
            assert torch.equal(raw.view(tensor.shape), tensor)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("variant", [{}, {"word_embed_proj_dim": 16, "do_layer_norm_before": False}])
def test_what_transformers_saves_is_read(tmp_path: Path, safe: bool, variant: dict[str, object]) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    model = OPTForCausalLM(OPTConfig(**(CONFIG | variant)))
    if safe:
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    else:
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")  # holds the tied lm_head.weight as well
    spec, state = make_spec(**variant), model.state_dict()
    with open_tiny(tmp_path, spec) as source:
        got = read_all(source, spec, torch.float32)
    assert all(torch.equal(got[name], state[options[0]]) for name, options in checkpoint_names(spec).items())


def test_an_untied_head_is_a_weight_of_its_own(tmp_path: Path) -> None:
    spec = make_spec(tie_word_embeddings=False)
    write_single(tmp_path, weights(spec))
    with open_tiny(tmp_path, spec) as source:
        got = read_all(source, spec, torch.float16)
    assert torch.equal(got["head.vocab"], weights(spec)["lm_head.weight"])


@pytest.mark.parametrize(
    ("layout", "head"),
    [*zip(["single", "shards", "bin", "bin shards"], ["lm_head.weight", "embed_out.weight"] * 2, strict=True)],
)
def test_a_tied_head_known_buffers_and_empty_tensors_are_left_alone(tmp_path: Path, layout: str, head: str) -> None:
    spec, tensors = make_spec(), weights(make_spec())
    tensors[head] = tensors[TOKENS].clone()
    tensors["decoder.version"] = torch.zeros(1, dtype=torch.float64)
    tensors["model.decoder.layers.1.shared.weight"] = torch.zeros(0, 32)
    _write(tmp_path, layout, tensors)
    with open_tiny(tmp_path, spec) as source:
        assert torch.equal(read_all(source, spec, torch.float16)["embed.tokens"], tensors[TOKENS])


def test_a_tied_head_of_another_shape(tmp_path: Path) -> None:
    write_single(tmp_path, weights(make_spec()) | {"lm_head.weight": torch.zeros(95, 32, dtype=torch.float16)})
    with pytest.raises(ModelError, match=r"lm_head.weight.*\(96, 32\).*\(95, 32\)"):
        open_tiny(tmp_path)


def test_a_tied_head_that_is_another_matrix_is_not_dropped_in_silence(tmp_path: Path) -> None:
    tensors, open_fds, before = weights(make_spec()), len(os.listdir("/proc/self/fd")), threading.active_count()
    tensors["lm_head.weight"] = tensors[TOKENS].clone()
    tensors["lm_head.weight"][95, 31] += 1
    write_single(tmp_path, tensors)
    with pytest.raises(ModelError, match="set tie_word_embeddings to false") as caught:
        open_tiny(tmp_path)
    assert caught.value.exit_code == 4
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (open_fds, before)
    open_tiny(tmp_path, make_spec(tie_word_embeddings=False)).close()


@pytest.mark.parametrize("layout", ["single", "bin shards"])
def test_a_tied_embedding_may_be_there_as_the_head_alone(tmp_path: Path, layout: str) -> None:
    spec, tensors = make_spec(), weights(make_spec())
    expected = tensors["lm_head.weight"] = tensors.pop(TOKENS)
    _write(tmp_path, layout, tensors)
    with open_tiny(tmp_path, spec) as source:
        assert torch.equal(read_all(source, spec, torch.float16)["embed.tokens"], expected)
        assert source.location("embed.tokens") is not None


def test_safetensors_are_preferred_and_bins_not_even_opened(tmp_path: Path) -> None:
    write_single(tmp_path, weights(make_spec()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    (tmp_path / "training_args.bin").write_bytes(b"nor this")
    (tmp_path / "consolidated.safetensors").write_bytes(b"nor this")
    open_tiny(tmp_path).close()


def test_links_into_a_blob_store_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(write_shards(blobs, weights(make_spec()))):
        blob = path.rename(blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    shutil.move(blobs / "model.safetensors.index.json", snapshot)
    open_tiny(snapshot).close()


def test_tensors_in_several_dtypes_and_at_odd_offsets(tmp_path: Path) -> None:
    spec = make_spec()
    tensors = weights(spec)
    tensors["model.decoder.final_layer_norm.weight"] = tensors["model.decoder.final_layer_norm.weight"].float()
    path = write_single(tmp_path, tensors)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" " * 3
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with open_tiny(tmp_path) as source:
        assert source.dtype == "float16"
        assert source.location("head.norm.weight") is None  # float32
        assert source.location("embed.tokens") is None  # starts on an odd byte
        for wanted in (torch.float16, torch.float32):
            got = read_all(source, spec, wanted)
            assert torch.equal(got["embed.tokens"], tensors["model.decoder.embed_tokens.weight"].to(wanted))
            assert torch.equal(got["head.norm.weight"], tensors["model.decoder.final_layer_norm.weight"].to(wanted))


def test_tensors_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK", 1 << 10)
    spec = make_spec(vocab_size=1001)
    write_single(tmp_path, weights(spec))
    with open_tiny(tmp_path, spec) as source:
        for dtype in (torch.float16, torch.float32):
            got = read_all(source, spec, dtype)
            assert torch.equal(got["embed.tokens"], weights(spec)["model.decoder.embed_tokens.weight"].to(dtype))


def test_many_threads_may_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK", 1 << 12)
    spec = make_spec(vocab_size=1001)
    write_single(tmp_path, weights(spec))
    before = threading.active_count()
    with open_tiny(tmp_path, spec) as source, ThreadPoolExecutor(6) as pool:
        expected = read_all(source, spec, torch.float32)
        results = list(pool.map(lambda _: read_all(source, spec, torch.float32), range(12)))
    assert all(torch.equal(result[name], expected[name]) for result in results for name in expected)
    assert threading.active_count() == before


def test_reading_needs_the_right_kind_of_tensor(tmp_path: Path) -> None:
    write_single(tmp_path, weights(make_spec()))
    source = open_tiny(tmp_path)
    for out in (torch.empty(32, 96), torch.empty(32, 96).t(), torch.empty(96, 32, dtype=torch.int16)):
        with pytest.raises(ValueError, match="contiguous float tensor of shape"):
            source.read_into("embed.tokens", out)
    source.close()
    source.close()
    with pytest.raises(ValueError, match="closed"):
        source.read_into("embed.tokens", torch.empty(96, 32))


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    path = write_single(tmp_path, weights(make_spec()))

    def fingerprint() -> str:
        with open_tiny(tmp_path) as source:
            return source.fingerprint

    first = fingerprint()
    assert fingerprint() == first
    os.utime(path, ns=(1, 1))
    assert fingerprint() != first


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("change", ["shrink", "replace", "overwrite"])
def test_a_file_that_changes_while_it_is_open(tmp_path: Path, change: str, dtype: torch.dtype) -> None:
    path = write_single(tmp_path, weights(make_spec()))
    with open_tiny(tmp_path) as source:
        if change == "shrink":
            os.truncate(path, 5000)
        elif change == "replace":
            copy = tmp_path / "copy"
            shutil.copy(path, copy)
            copy.rename(path)
        else:
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"x")
            os.utime(path, ns=(1, 1))
        with pytest.raises(ModelError, match="changed during the run") as caught:
            read_all(source, make_spec(), dtype)
    assert caught.value.exit_code == 4


def test_a_bin_file_that_shrinks(tmp_path: Path) -> None:
    torch.save(weights(make_spec()), tmp_path / "pytorch_model.bin")
    with open_tiny(tmp_path) as source:
        os.truncate(tmp_path / "pytorch_model.bin", 3000)
        with pytest.raises(ModelError, match="changed during the run"):
            read_all(source, make_spec(), torch.float32)


def test_a_failing_disk_is_asked_again_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_single(tmp_path, weights(make_spec()))
    preadv, left = os.preadv, 2

    def fail(*arguments: object) -> int:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(5, "Input/output error")
        return preadv(*arguments)  # type: ignore[arg-type]

    with open_tiny(tmp_path) as source:
        monkeypatch.setattr(os, "preadv", fail)
        source.read_into("embed.tokens", torch.empty(96, 32))
        left = 1000
        with pytest.raises(StorageError, match=r"tensor embed\.tokens") as caught:
            source.read_into("embed.tokens", torch.empty(96, 32))
    assert caught.value.exit_code == 6
    assert str(path) in str(caught.value)


@pytest.mark.slow
def test_loading_takes_one_chunk_beyond_the_destination(tmp_path: Path) -> None:
    """Converting 64 MiB into 128 MiB costs 128 MiB and a little, and leaves nothing in the page cache."""
    tokens = (64 << 20) // 2 // 1024
    spec = make_spec(vocab_size=tokens, hidden_size=1024, word_embed_proj_dim=1024, num_hidden_layers=1)
    shapes = {tensor.name: tensor.shape for group in spec.weight_groups for tensor in group.tensors}
    names = checkpoint_names(spec)
    save_file({names[name][0]: torch.zeros(shapes[name]).half() for name in names}, tmp_path / SINGLE)
    with (tmp_path / SINGLE).open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    out = torch.ones(tokens, 1024)
    with Growth() as opening:
        source = open_tiny(tmp_path, spec)
    with source, Growth() as reading:
        source.read_into("embed.tokens", out)
    assert opening.nbytes < 8 << 20
    assert reader.CHUNK // 2 < reading.nbytes < 2 * reader.CHUNK + (4 << 20)
    assert droppable_pages(str(tmp_path / SINGLE)) < 100
    assert float(out.abs().sum()) == 0
