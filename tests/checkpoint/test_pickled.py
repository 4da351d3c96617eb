from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_flexgen.errors import ModelError
from tests.checkpoint.models import make_spec, open_tiny, read_all, weights
from tests.seeds import python_random

BIN = "pytorch_model.bin"


class _Touch:
    """Pickles as a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_tiny(folder)
    assert caught.value.exit_code == 4
    return str(caught.value)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_never_runs(tmp_path: Path, legacy: bool) -> None:
    evil = weights(make_spec()) | {"code": _Touch(tmp_path / "hacked")}
    torch.save(evil, tmp_path / BIN, _use_new_zipfile_serialization=not legacy)
    message = refused(tmp_path)
    assert not (tmp_path / "hacked").exists()
    if not legacy:
        assert "could run code when loaded, so it is refused" in message
        assert "safetensors" in message


def test_a_bare_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / BIN).write_bytes(pickle.dumps(_Touch(tmp_path / "hacked")))
    assert "not an archive of torch 1.6 or later" in refused(tmp_path)
    assert not (tmp_path / "hacked").exists()


def test_what_is_not_a_state_dict_is_refused(tmp_path: Path) -> None:
    for thing in ({"state_dict": weights(make_spec())}, [torch.zeros(3)], {"a": torch.zeros(3).to_sparse()}):
        torch.save(thing, tmp_path / BIN)
        assert "is not a flat dictionary of dense tensors" in refused(tmp_path)


def test_a_tensor_that_is_stored_transposed_is_refused(tmp_path: Path) -> None:
    tensors = weights(make_spec())
    name = "model.decoder.embed_tokens.weight"
    tensors[name] = tensors[name].t().contiguous().t()
    torch.save(tensors, tmp_path / BIN)
    assert f"tensor {name!r} is not stored row by row" in refused(tmp_path)


def test_views_of_one_storage_are_found(tmp_path: Path) -> None:
    spec, tensors = make_spec(), weights(make_spec())
    q, k = (f"model.decoder.layers.0.self_attn.{part}_proj.weight" for part in "qk")
    both = torch.cat((tensors[q], tensors[k]))
    torch.save(tensors | {q: both[:32], k: both[32:]}, tmp_path / BIN)
    with open_tiny(tmp_path, spec) as source:
        got = read_all(source, spec, torch.float16)
    assert torch.equal(got["layers.0.attn.q.weight"], tensors[q])
    assert torch.equal(got["layers.0.attn.k.weight"], tensors[k])


def test_parameters_and_empty_buffers_are_fine(tmp_path: Path) -> None:
    spec = make_spec()
    tensors: dict[str, torch.Tensor] = {
        name: torch.nn.Parameter(value, requires_grad=False) for name, value in weights(spec).items()
    }
    tensors["decoder.version"] = torch.zeros(0)
    torch.save(tensors, tmp_path / BIN)
    with open_tiny(tmp_path, spec) as source:
        got = read_all(source, spec, torch.float16)
    assert torch.equal(got["embed.tokens"], weights(spec)["model.decoder.embed_tokens.weight"])


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    torch.save(weights(make_spec()), tmp_path / "plain")
    plain, packed = zipfile.ZipFile(tmp_path / "plain"), zipfile.ZipFile(tmp_path / BIN, "w", zipfile.ZIP_DEFLATED)
    with plain, packed:
        for info in plain.infolist():
            packed.writestr(info.filename, plain.read(info))
    assert "its tensors are compressed" in refused(tmp_path)


def test_a_fault_without_a_message_is_named_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> object:
        raise EOFError

    torch.save(weights(make_spec()), tmp_path / BIN)
    monkeypatch.setattr(torch, "load", fail)
    assert f"{BIN} cannot be read: EOFError" in refused(tmp_path)


@pytest.mark.slow
def test_random_damage_never_crashes(tmp_path: Path) -> None:
    spec, chance, accepted = make_spec(), python_random(3), 0
    torch.save(weights(spec), tmp_path / BIN)
    data = (tmp_path / BIN).read_bytes()
    for _ in range(100):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.choice([chance.randrange(5000), chance.randrange(-6000, 0)])] = chance.randrange(256)
        (tmp_path / BIN).write_bytes(damaged)
        try:
            with open_tiny(tmp_path, spec) as source:
                read_all(source, spec, torch.float16)
            accepted += 1
        except ModelError:
            continue
    assert accepted < 75  # much of the head and tail is padding and sizes that nobody reads


def test_a_truncated_file_names_the_sizes(tmp_path: Path) -> None:
    torch.save(weights(make_spec()), tmp_path / BIN)
    os.truncate(tmp_path / BIN, 20_000)
    spec = make_spec()
    message = refused(tmp_path)
    assert f"expected more than {spec.weight_bytes('float16')} bytes" in message
    assert "found 20000" in message
    assert "download again" in message
