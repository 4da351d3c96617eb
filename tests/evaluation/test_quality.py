"""The program `evaluate`: its rows, its files, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o_flexgen.config.far_layers import FarPlaces
from h2o_flexgen.config.reports.quality import QualityReport, QualityRow, RecallTally
from h2o_flexgen.errors import UsageError
from h2o_flexgen.evaluate import main
from h2o_flexgen.evaluation.far_layers import FarHeads, measure_layers
from h2o_flexgen.evaluation.quality import evaluate
from h2o_flexgen.evaluation.settings import EvaluationSettings
from h2o_flexgen.reporting.plots import check_plot, plot_quality
from h2o_flexgen.reporting.tables import quality_table


def test_cells_name_the_full_cache_once() -> None:
    cells = EvaluationSettings(policies=("full", "h2o", "local", "h2o"), ratios=(0.2, 0.5, 0.2)).cells
    assert [(cell.name, cell.ratio) for cell in cells] == [
        ("full", 1.0),
        ("h2o", 0.2),
        ("h2o", 0.5),
        ("local", 0.2),
        ("local", 0.5),
    ]


def test_layers_that_look_far(tiny: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """By random tokens, or by those of a text; what is found is kept for auto."""
    argv = ["--measure-layers", "--model", tiny, "--dtype", "float32"]
    for text in ([], ["--text", files[1], "--limit", "2", "--context", "40"]):
        assert main([*argv, *text]) == 0
        out, err = capsys.readouterr()
        data = json.loads(out.splitlines()[-1])
        layers = [layer for layer, _, _ in data["scores"]]
        assert sorted(set(layers)) == list(range(layers[-1] + 1))
        assert all(0 <= score < 1 for _, _, score in data["scores"])
        kept = Path(err.split("from now on, by ")[1].strip())
        assert json.loads(kept.read_text(encoding="utf-8"))["places"] == data["far_layers"]
        kept.unlink()
        measure_layers(EvaluationSettings(), tiny, {"weights": "dummy"})
        assert not kept.exists(), "random weights say nothing of the model's own"
    found = FarHeads("", {0: [0.05, 0.3], 1: [0.2, 0.0]}, FarPlaces(((0, 1),), (0,)))
    assert found.table().splitlines() == [
        "head    0.1  0.300  far",
        "head    1.0  0.200",
        "--budget-split far --far-layers 0.1",
    ]
    assert FarHeads("", {0: [0.05]}, FarPlaces((), ())).table() == "no head stands out"
    assert main([*argv, "--ratios", "0.1", "--continuation", "8"]) == 2
    assert "--ratios, --continuation with --measure-layers" in capsys.readouterr().err
    assert main([*argv, "--text", files[1], "--context", "100000"]) == 0, "as long as the model takes"
    capsys.readouterr()
    assert main([*argv, "--plot", "layers.png"]) == 2
    assert "--plot with --measure-layers" in capsys.readouterr().err
    assert main(["--output", "a.png", "--plot", "a.png"]) == 2
    assert "--output and --plot are both a.png" in capsys.readouterr().err


@pytest.mark.slow
def test_the_program_end_to_end(
    tiny: str, files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plot = tmp_path / "quality.json", tmp_path / "quality.png"
    argv = ["--model", tiny, "--dtype", "float32", "--recall", files[0], "--text", files[1], "--limit", "3"]
    argv += ["--policies", "full,h2o,local", "--ratios", "0.1,0.5", "--output", str(output), "--plot", str(plot)]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    data = json.loads(lines[-1])
    assert data == json.loads(output.read_text(encoding="utf-8"))
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = QualityReport.from_json(data)
    assert [(row.policy, row.ratio) for row in report.rows] == [
        ("full", 1.0),
        ("h2o", 0.1),
        ("h2o", 0.5),
        ("local", 0.1),
        ("local", 0.5),
    ]
    assert (report.windows, report.context, report.continuation) == (3, 96, 32)
    full, small, half = report.rows[:3]
    assert full.recall_accuracy == 1
    assert full.nll != small.nll
    assert small.kv_bytes < half.kv_bytes < full.kv_bytes
    assert [line.split("|")[1].strip() for line in lines[2:7]] == ["full", "h2o", "h2o", "local", "local"]
    assert len({len(line) for line in lines[:7]}) == 1
    assert max(map(len, lines[:-1])) <= 120
    assert err.count("perplexity") == 5


def test_questions_beyond_the_context_are_told_with_their_flag(
    tiny: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", tiny, "--text", files[1], "--limit", "3"]) == 2
    assert "name a file of shorter questions: --recall FILE" in capsys.readouterr().err


def test_files_are_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quality.json").write_text("{}")
    assert main(["--output", str(tmp_path / "quality.json")]) == 2
    assert main(["--plot", str(tmp_path / "no" / "such.png")]) == 2
    assert main(["--plot", str(tmp_path / "quality.txt")]) == 2
    out, err = capsys.readouterr()
    assert "quality.json exists" in err
    assert "add --overwrite" in err
    assert f"the folder {tmp_path / 'no'} is not there" in err
    assert "needed a name that ends in .png" in err
    assert out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nvme-mem", "5B"], "--nvme-mem is 5B"),
        (["--policies", "full,h3o"], "did you mean 'h2o'?"),
        (["--ratios", "0.2,1.5"], "--ratios is 1.5"),
        (["--ratios", "0.2,nan"], "--ratios is nan"),
        (["--policies", ","], "is empty"),
        (["--limit", "0"], "--limit is 0"),
        (["--recall", "/no/such/file.jsonl"], "--recall /no/such/file.jsonl"),
    ],
)
def test_flags_that_make_no_sense(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_ratio_that_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ratios", "a fifth"]) == 2
    assert "'a fifth' is not a number" in capsys.readouterr().err


def row(policy: str, ratio: float, nll: float, right: int = 3) -> QualityRow:
    return QualityRow(
        policy=policy,
        ratio=ratio,
        eviction={"name": policy, "budget": [8, 80], "heavy": 4, "recent": 4, "sinks": 0},
        recall=(RecallTally("once", right, 8, 0, 0), RecallTally("used", 4, 8, 3, 6, 1, 8)),
        nll=nll,
        scored_tokens=1000,
        kv_bytes=1 << 20,
        seconds=1.0,
    )


def report(*rows: QualityRow) -> QualityReport:
    return QualityReport(
        model="m",
        dtype="float32",
        device="cpu",
        recall_file="r",
        text_file="t",
        context=96,
        continuation=32,
        windows=3,
        rows=rows,
    )


@pytest.mark.slow
def test_rows_of_two_kinds_and_wild_perplexities(tmp_path: Path) -> None:
    wild = report(row("full", 1.0, 2.0), row("local", 0.1, 900.0), row("unheard-of", 0.003, 5.0))
    table = quality_table(wild)
    assert "2.7e+43" in table
    assert "|    44% |  38% |  50% |        12% |" in table
    plot_quality(wild, tmp_path / "wild.svg")
    plot_quality(report(row("full", 1.0, 2.0)), tmp_path / "full.png")
    assert QualityReport.from_json(json.loads(json.dumps(wild.to_json()))) == wild


def test_rows_are_checked() -> None:
    with pytest.raises(UsageError, match="more right answers than questions"):
        row("h2o", 0.2, 1.0, right=9)
    with pytest.raises(UsageError, match="nll is nan"):
        row("h2o", 0.2, float("nan"))
    with pytest.raises(UsageError, match="did you mean 'policy'"):
        QualityRow.from_json({"polciy": "h2o"})


def test_a_missing_matplotlib_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_flexgen.reporting.plots.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs matplotlib"):
        check_plot(Path("quality.png"))


def test_the_seed_reaches_the_random_policy(tiny: str, files: tuple[str, str]) -> None:
    settings = EvaluationSettings(("random",), (0.2,), *files, limit=2)
    found = [evaluate(settings, tiny, {"dtype": "float32", "seed": seed}).rows[0].nll for seed in (0, 1, 0)]
    assert found[0] == found[2] != found[1]
