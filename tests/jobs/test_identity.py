"""A job that goes on knows its model by content: where files lie, and when they were written, is no part of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from h2o_flexgen import LLM
from h2o_flexgen.checkpoint import content
from h2o_flexgen.checkpoint.gguf.config import config_of
from h2o_flexgen.checkpoint.gguf.header import read_header
from h2o_flexgen.checkpoint.gguf.source import GgufSource
from h2o_flexgen.checkpoint.reader import open_checkpoint
from h2o_flexgen.config.far_layers import FarPlaces, Place, keep_far_places
from h2o_flexgen.models.families import checkpoint_names, ignored_names, spec_from_config
from tests.checkpoint.gguf_files import tiny_model, write_gguf
from tests.jobs.files import request, results, write
from tests.programs import CONFIG, Ran, write_talker

Batch = Callable[..., Ran]


def touched(model: Path) -> Path:
    for file in model.iterdir():
        os.utime(file, (1, 1))
    return model


def copied(model: Path) -> Path:
    return Path(shutil.move(shutil.copytree(model, model.parent / "copy"), model.parent / "elsewhere"))


def linked(model: Path) -> Path:
    """As the hub's cache has it: links to files that are named by their digests."""
    folder = model.parent / "snapshot"
    (model.parent / "blobs").mkdir()
    folder.mkdir()
    for number, file in enumerate(model.iterdir()):
        shutil.copy(file, model.parent / "blobs" / f"{number}")
        (folder / file.name).symlink_to(f"../blobs/{number}")
    return folder


def in_shards(model: Path) -> Path:
    """The same tensors in two files, backwards."""
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors, reverse=True)
    (model / "model.safetensors").unlink()
    where = {}
    for part, few in enumerate((names[:5], names[5:]), 1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: tensors[name] for name in few}, model / file)
        where |= dict.fromkeys(few, file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return model


def marked(model: Path) -> Path:
    """By editors that begin files with a byte order mark."""
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        path = in_shards(model) / name if name.endswith("index.json") else model / name
        path.write_text(path.read_text(), encoding="utf-8-sig")
    return model


def written_again(model: Path) -> Path:
    """By another version of transformers, from another place; and files beside it that say nothing of the model."""
    config = json.loads((model / "config.json").read_text())
    config = {"_name_or_path": "/data/x", "transformers_version": "9.9", **dict(reversed(config.items()))}
    (model / "config.json").write_text(json.dumps(config, indent=3))
    (model / "README.md").write_text("read")
    return model


def edited(file: str, **changes: Any) -> Callable[[Path], Path]:
    def change(model: Path) -> Path:
        path = model / file
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(settings | changes))
        return model

    return change


def one_byte(model: Path) -> Path:
    """The last one of the weights."""
    with open(model / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    return model


def fine_tuned(model: Path) -> Path:
    """One matrix of the same shape, by a little; written at the same time, as far as the file says."""
    path = model / "model.safetensors"
    tensors, when = load_file(path), path.stat()
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name][0, 0] += 1e-4
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(when.st_atime_ns, when.st_mtime_ns))
    return model


def begun(tmp_path: Path, batch: Batch) -> tuple[Path, tuple[object, ...]]:
    """A model of its own, and a job with it of which half is done."""
    model = write_talker(tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": 2}')
    lines = [request(f"r{i}", {"prompt": "ab" * (i + 1), "max_tokens": 3, "temperature": 0}) for i in range(2)]
    del (named := json.loads(lines[1]))["body"]["model"]
    file, out = write(tmp_path / "in.jsonl", lines[0], json.dumps(named)), tmp_path / "out.jsonl"
    ran = batch("-i", file, "-o", out, "--model", model)
    assert ran.code == 0, ran.err
    return model, ("-i", file, "-o", out)


def _half_done(out: Path) -> None:
    """As if it had been killed after the first result."""
    journal = Path(f"{out}.journal")
    last, first = journal.read_bytes(), out.read_bytes().index(b"\n") + 1
    out.write_bytes(out.read_bytes()[:first])
    synced = last.index(b"synced\n") + len(b"synced\n")
    journal.write_bytes(last[:synced] + last[synced:].split(b"\n")[0] + b"\n")


@pytest.mark.parametrize("change", [touched, copied, linked, in_shards, marked, written_again])
def test_the_same_content_goes_on(tmp_path: Path, batch: Batch, change: Callable[[Path], Path]) -> None:
    model, flags = begun(tmp_path, batch)
    out = tmp_path / "out.jsonl"
    whole = results(out)
    _half_done(out)
    ran = batch(*flags, "--model", change(model), "--resume")
    assert (ran.code, ran.record["before"], ran.record["failed"]) == (0, 1, 0), ran.err
    assert results(out) == whole, "by the name that the model had when the job began"


@pytest.mark.parametrize("places", [(), ((0, 1), (2, 3))])
def test_a_job_looks_far_as_when_it_was_begun(
    tmp_path: Path, batch: Batch, places: tuple[Place, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this machine has measured by now."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, out = write_talker(tmp_path / "model"), tmp_path / "out.jsonl"
    with LLM(model) as llm:
        spec = llm.model.spec
    lines = [request(f"r{i}", {"prompt": "abcd" * (i + 9), "max_tokens": 9, "temperature": 0}) for i in range(3)]
    flags = ("--model", model, "--eviction", "auto", "--hh-ratio", 0.3)
    keep_far_places(spec, FarPlaces(places, (0,) if places else ()))
    first, whole = write(tmp_path / "in.jsonl", *lines), tmp_path / "whole.jsonl"
    ran = batch("-i", first, "-o", whole, *flags)
    assert ran.record["eviction"]["far_layers"] == [list(place) for place in places]
    assert batch("-i", first, "-o", out, *flags).code == 0
    _half_done(out)
    keep_far_places(spec, FarPlaces((1,), (1,)))
    ran = batch("-i", first, "-o", out, *flags)
    assert (ran.code, ran.record["before"], ran.record["ok"]) == (0, 1, 2), ran.err
    assert ran.record["eviction"]["far_layers"] == [list(place) for place in places]
    choices = [{i: line["response"]["body"]["choices"] for i, line in results(path).items()} for path in (out, whole)]
    assert choices[0] == choices[1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (one_byte, "checkpoint"),
        (fine_tuned, "checkpoint"),
        (edited("config.json", rms_norm_eps=1e-3), "config.json"),
        (edited("generation_config.json", eos_token_id=5), "generation_config.json"),
        (edited("tokenizer_config.json", chat_template="{{ messages[0].content }}"), "tokenizer"),
        (edited("added_tokens.json", added=9), "tokenizer"),
    ],
)
def test_another_model_of_that_name_does_not(
    tmp_path: Path, batch: Batch, change: Callable[[Path], Path], named: str
) -> None:
    model, flags = begun(tmp_path, batch)
    ran = batch(*flags, "--model", change(model))
    assert (ran.code, f"was begun with {named} " in ran.err) == (2, True), ran.err


def test_a_job_of_an_earlier_version_goes_by_names_and_times(tmp_path: Path, batch: Batch) -> None:
    model, flags = begun(tmp_path, batch)
    journal = Path(f"{tmp_path / 'out.jsonl'}.journal")
    first, _, rest = journal.read_bytes().partition(b"\n")
    header = json.loads(first)
    job = {key: value for key, value in header["job"].items() if "config.json" not in key and key != "tokenizer"}
    with open_checkpoint(str(model), (spec := spec_from_config(CONFIG, "x")), checkpoint_names(spec)) as source:
        job["checkpoint"] = source.fingerprint
    journal.write_bytes(json.dumps({**header, "job": job}).encode() + b"\n" + rest)
    again = batch(*flags, "--model", model)
    assert (again.code, again.record["before"]) == (0, 2), again.err
    assert "was begun with checkpoint" in batch(*flags, "--model", touched(model)).err


def test_of_a_large_checkpoint_every_tensor_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were one: a change of all of any matrix is seen, whichever stretches of it are read."""
    monkeypatch.setattr(content, "WHOLE", 0)
    monkeypatch.setattr(content, "_PIECE", 512)
    monkeypatch.setattr(content, "_STRETCH", 64)
    model = write_talker(tmp_path / "model")
    spec, path = spec_from_config(CONFIG, "x"), model / "model.safetensors"

    def found() -> str:
        with open_checkpoint(str(model), spec, checkpoint_names(spec), ignored_names(spec)) as source:
            return source.content()

    tensors, first = load_file(path), found()
    marks = {first}
    for name in tensors:
        save_file({**tensors, name: tensors[name] * 1.001}, path)
        marks.add(found())
    assert len(marks) == 1 + len(tensors)
    save_file(tensors, path)
    assert found() == first


def test_gguf_files_likewise(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_model("llama"))

    def found(path: Path) -> str:
        header = read_header(path)
        with GgufSource(header, spec_from_config(config_of(header), "tiny")) as source:
            return source.content()

    first = found(path)
    other = Path(shutil.copy(path, tmp_path / "b.gguf"))
    assert found(other) == first
    data = bytearray(other.read_bytes())
    data[read_header(other).tensors["blk.0.attn_q.weight"].offset] ^= 1
    other.write_bytes(data)
    assert found(other) != first


def test_stretches_are_where_runs_have_them() -> None:
    assert list(content._in_file([(100, 110), (50, 60), (200, 220)], [(0, 4), (8, 12), (19, 22)])) == [
        (100, 104),
        (108, 110),
        (50, 52),
        (59, 60),
        (200, 202),
    ]
    wanted = list(content._stretches(40 << 20, 16 << 10))
    assert [start >> 24 for start, _ in wanted] == [0, 1, 2]
    assert {stop - start for start, stop in wanted} == {16 << 10}
    assert list(content._stretches(100, 16 << 10)) == [(0, 100)]
