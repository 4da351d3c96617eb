"""Perplexity along streams: what is scored, under which positions, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from h2o_flexgen.config.reports.quality import StreamReport, StreamRow
from h2o_flexgen.errors import UsageError
from h2o_flexgen.evaluate import main
from h2o_flexgen.evaluation.settings import EvaluationSettings, StreamSettings
from h2o_flexgen.evaluation.stream import cut_streams, evaluate_streams
from h2o_flexgen.planning.llm import LLM
from h2o_flexgen.reporting.plots import plot_stream
from h2o_flexgen.reporting.tables import stream_table
from tests.evaluation.conftest import random_words, write_tokenizer
from tests.tiny import make_model, save

CONTEXT = 32
EXACT = {"dtype": "float32"}


@pytest.fixture(scope="module")
def rotary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A rotary model with a context of 32, and its tokenizer."""
    folder = save(make_model("llama-gqa", max_position_embeddings=CONTEXT), tmp_path_factory.mktemp("rotary"))
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of 300 tokens."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(random_words(300, 3), encoding="utf-8")
    return str(file)


def measure(model: str, text: str | None, policies: tuple[str, ...], **changes: object) -> StreamReport:
    settings = StreamSettings(**{"stream": 100, "window": 10, "budget": 12, "streams": 2, **changes})  # type: ignore[arg-type]
    return evaluate_streams(settings, EvaluationSettings(policies=policies, text=text, context=8), model, EXACT)


def test_streams_are_whole_windows_of_different_parts(rotary: str, text: str) -> None:
    with LLM(rotary) as llm:
        assert llm.model.codec is not None
        ids = llm.model.codec.encode(Path(text).read_text(encoding="utf-8"))
        streams = cut_streams(llm, Path(text).read_text(encoding="utf-8"), StreamSettings(stream=99, window=10), 8)
    assert (streams.prompt, streams.length) == (8, 98)
    assert [context + rest for context, rest in streams.pairs] == [ids[:1] + ids[at + 1 :][:97] for at in (0, 97, 194)]
    assert {(len(context), len(rest)) for context, rest in streams.pairs} == {(8, 90)}


@pytest.mark.slow
def test_absolute_positions_go_on_as_in_a_model_of_a_longer_context(rotary: str, text: str) -> None:
    found = measure(rotary, text, ("full", "h2o"), streams=1)
    assert [(row.policy, row.positions) for row in found.rows] == [
        ("full", "recomputed"),
        ("h2o", "rolling"),
        ("full", "absolute"),
        ("h2o", "absolute"),
    ]
    assert (found.context, found.prompt, found.length, found.streams) == (CONTEXT, 8, 98, 1)
    model = LlamaForCausalLM.from_pretrained(rotary, max_position_embeddings=200, dtype=torch.float32)
    with LLM(rotary) as llm:
        context, rest = cut_streams(llm, Path(text).read_text(), StreamSettings(stream=98, window=10, streams=1), 8)[0][
            0
        ]
    with torch.no_grad():
        logprobs = model(torch.tensor([context + rest])).logits[0, 7:-1].log_softmax(-1)
    expected = -logprobs[torch.arange(90), torch.tensor(rest)].view(9, 10).mean(1)
    fresh, rolling, full, _ = found.rows
    assert list(full.nll) == pytest.approx(expected.tolist(), abs=1e-4)
    assert (full.eviction["budget"], rolling.eviction["budget"]) == (98, 12)
    assert rolling.nll[0] != full.nll[0]
    assert rolling.kv_bytes < full.kv_bytes
    ids, nll = context + rest, 0.0
    with torch.no_grad():
        last = model(torch.tensor([ids[:1] + ids[98 - 31 :]])).logits[0, 21:-1].log_softmax(-1)
    for at, token in enumerate(ids[88:]):
        nll -= float(last[at, token]) / 10
    assert fresh.nll[0] == pytest.approx(full.nll[0], abs=1e-4)
    assert fresh.nll[-1] == pytest.approx(nll, abs=1e-4)
    assert fresh.nll[-1] != pytest.approx(full.nll[-1], abs=1e-3)


@pytest.mark.slow
def test_only_distances_count(rotary: str, text: str) -> None:
    """A window without gaps has the same distances either way; behind sinks, rolling positions close the gap."""
    found = measure(rotary, text, ("local", "streaming"), budget=28)
    local, streaming, local_absolute, streaming_absolute = (row.nll for row in found.rows)
    assert local == pytest.approx(local_absolute, abs=1e-4)
    assert streaming[:2] == pytest.approx(streaming_absolute[:2], abs=1e-4)
    assert abs(streaming[-1] - streaming_absolute[-1]) > 1e-3


def test_the_program_end_to_end(rotary: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "stream.json", tmp_path / "stream.png"
    argv = ["--model", rotary, "--dtype", "float32", "--text", text, "--stream", "140", "--streams", "2"]
    argv += ["--policies", "streaming,local", "--positions", "rolling", "--stream-window", "20"]
    assert main([*argv, "--output", str(output), "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out.splitlines()[-1])
    assert data == json.loads(output.read_text(encoding="utf-8"))
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = StreamReport.from_json(data)
    assert json.loads(json.dumps(report.to_json())) == data
    assert [(row.policy, row.eviction["budget"], len(row.nll)) for row in report.rows] == [
        ("streaming", CONTEXT // 2, 6),
        ("local", CONTEXT // 2, 6),
    ]
    assert report.starts() == [20, 40, 60, 80, 100, 120]
    assert "4.375 times the model's context of 32" in " ".join(out.split())
    assert err.count("rolling positions: perplexity") == 2
    assert "| streaming | rolling   |" in out


@pytest.mark.slow
def test_the_shipped_model_streams_on_while_its_sink_is_kept() -> None:
    settings = StreamSettings(stream=320, window=64, streams=1, budget=96, positions=("recomputed", "rolling"))
    found = evaluate_streams(
        settings, EvaluationSettings(policies=("full", "local", "streaming", "h2o")), "demo-stream"
    )
    fresh, local, streaming, h2o = (found.between(row, 256, 320) or 0.0 for row in found.rows)
    assert (found.text_file, found.context) == ("heldout.txt", 256)
    assert local > 100 * fresh
    assert 0.9 * fresh < streaming < 1.1 * fresh
    assert 0.9 * fresh < h2o < 1.2 * fresh


def test_a_rotary_model_is_needed(tiny: str, text: str) -> None:
    with pytest.raises(UsageError, match="learned a table of positions"):
        measure(tiny, text, ("local",))


def test_scaled_positions_are_not_stretched_further(text: str, tmp_path: Path) -> None:
    model = str(save(make_model("llama-linear"), tmp_path))
    write_tokenizer(tmp_path)
    with pytest.raises(UsageError, match=r"scaled to its context \(linear\)"):
        measure(model, text, ("local",))
    assert measure(model, text, ("local",), positions=("rolling",), streams=1).streams == 1


def test_a_text_that_is_too_short(rotary: str, text: str) -> None:
    with pytest.raises(UsageError, match="the text has 300 tokens"):
        measure(rotary, text, ("local",), stream=1000)


def test_random_weights_have_no_perplexity(rotary: str, text: str) -> None:
    settings = EvaluationSettings(policies=("local",), text=text)
    with pytest.raises(UsageError, match="random ones have no perplexity"):
        evaluate_streams(StreamSettings(stream=100), settings, rotary, {"weights": "dummy"})


def test_the_text_beside_the_model_is_the_default(rotary: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(rotary, tmp_path / "model"))
    (model / "heldout.txt").write_text(random_words(150, 9), encoding="utf-8")
    found = measure(str(model), None, ("local",), positions=("rolling",))
    assert (found.text_file, found.streams) == ("heldout.txt", 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stream", "100", "--ratios", "0.1"], "--ratios with --stream"),
        (["--streams", "2"], "--streams without --stream"),
        (["--stream", "0"], "--stream is 0"),
        (["--stream", "70", "--model", "demo"], "learned a table of positions"),
        (
            ["--stream", "250", "--stream-window", "100", "--model", "ROTARY", "--text", "TEXT"],
            "less than the model's context of 32",
        ),
        (["--stream", "100", "--positions", "rollin"], "did you mean 'rolling'"),
        (["--stream", "100", "--positions", ","], "--positions is empty"),
    ],
)
def test_flags_that_make_no_sense(
    argv: list[str], message: str, rotary: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = {"ROTARY": rotary, "TEXT": text}
    assert main([here.get(word, word) for word in argv]) == 2
    assert message in capsys.readouterr().err


def test_a_stream_shorter_than_a_window() -> None:
    with pytest.raises(UsageError, match="is not longer than 8 tokens of prompt and a window of 64"):
        StreamSettings(stream=70).rounded(8)


def row(policy: str, positions: str, *nll: float) -> StreamRow:
    eviction = {"name": policy, "budget": 64, "heavy": 0, "recent": 60, "sinks": 4}
    return StreamRow(policy=policy, positions=positions, eviction=eviction, nll=nll, kv_bytes=1 << 20, seconds=1.0)  # type: ignore[arg-type]


def report(*rows: StreamRow) -> StreamReport:
    return StreamReport(
        model="m",
        dtype="float32",
        device="cpu",
        text_file="t",
        context=30,
        prompt=10,
        length=50,
        window=10,
        streams=3,
        rows=rows,
    )


def test_wild_perplexities_are_shown(tmp_path: Path) -> None:
    wild = report(row("local", "rolling", 0.0, 0.0, 900.0, 900.0), row("unheard-of", "absolute", 1.0, 1.0, 2.0, 4.0))
    table = stream_table(wild)
    assert "| local      | rolling   |     64 |    1 MiB |      1.00 | 2.7e+43 | 2.7e+43 |" in table
    assert "|      2.72 |   20.09 |   20.09 |" in table
    plot_stream(wild, tmp_path / "wild.svg")


def test_rows_are_checked() -> None:
    with pytest.raises(UsageError, match="needed finite numbers"):
        row("local", "rolling", 1.0, float("nan"))
    with pytest.raises(UsageError, match="needed one of recomputed, rolling, absolute"):
        row("local", "relative", 1.0)
