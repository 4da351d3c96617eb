"""Where answers go: files that are never lost or overwritten unasked, pipes, devices, stdout."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from h2o_flexgen.cli.answers import AnswerFile
from h2o_flexgen.errors import UsageError
from tests.programs import Child, Run, answers

ONE = {"index": 0, "text": "eins\u2028zwei"}


def test_a_line_is_in_the_file_at_once_and_one_line_for_everybody(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with AnswerFile(path, overwrite=False) as file:
        file.write(ONE)
        assert len(path.read_text().splitlines()) == 1
        assert answers(path) == [ONE]


def test_an_existing_file_is_left_alone(tmp_path: Path, model: Path, run: Run) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("precious")
    ran = run("--model", model, "--prompt", "abc", "-o", path)
    assert (ran.code, ran.out) == (2, "")
    assert f"--output {path} exists" in ran.err
    assert "add --overwrite" in ran.err
    assert path.read_text() == "precious"


def test_overwriting_replaces_when_all_is_done_and_keeps_the_mode(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("old")
    path.chmod(0o600)
    with AnswerFile(path, overwrite=True) as file:
        file.write(ONE)
        assert path.read_text() == "old"
    assert answers(path) == [ONE]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


def test_overwriting_through_a_link_replaces_the_file_and_not_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path = tmp_path / "real" / "a.jsonl"
    path.write_text("old")
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with AnswerFile(link, overwrite=True) as file:
        file.write(ONE)
    assert link.is_symlink()
    assert answers(path) == [ONE]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_run_without_answers_leaves_no_file(tmp_path: Path, overwrite: bool) -> None:
    with pytest.raises(ValueError, match="out of order"), AnswerFile(tmp_path / "a.jsonl", overwrite):
        raise ValueError("out of order")
    assert list(tmp_path.iterdir()) == []


def test_devices_are_written_to_and_never_replaced(model: Path, run: Run) -> None:
    """As root, replacing /dev/null by a file of answers would break the whole machine."""
    for flags in ((), ("--overwrite",)):
        assert run("--model", model, "--prompt", "abc", "-o", "/dev/null", *flags).code == 0
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_named_pipe_is_written_to(tmp_path: Path, model: Path, run: Run) -> None:
    pipe, lines = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: lines.extend(pipe.read_text().splitlines()))
    reader.start()
    assert run("--model", model, "--prompt", "abc", "--prompt", "de", "-o", pipe).code == 0
    reader.join(10)
    assert {json.loads(line)["prompt"] for line in lines} == {"abc", "de"}


def test_a_pipe_without_a_path_is_written_to() -> None:
    """As `-o >(gzip > a.gz)` makes them: /dev/fd/N leads to pipe:[M], which no folder has."""
    reader, writer = os.pipe()
    with AnswerFile(Path(f"/dev/fd/{writer}"), overwrite=False) as file:
        file.write(ONE)
    os.close(writer)
    with open(reader) as lines:
        assert [json.loads(line) for line in lines] == [ONE]


def test_stdout_by_its_path_keeps_what_else_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """`-o /dev/stdout > out.txt`: replacing out.txt would lose the record, which goes there too."""
    for overwrite in (False, True):
        with AnswerFile(Path("/dev/stdout"), overwrite) as file:
            file.write(ONE)
        os.write(1, b"record\n")
        answer, record = capfd.readouterr().out.splitlines()
        assert (json.loads(answer), record) == (ONE, "record")


def test_places_that_cannot_be_written(tmp_path: Path, model: Path, run: Run) -> None:
    for path, words in (
        (tmp_path, "this is a folder"),
        (tmp_path / "none" / "a.jsonl", f"the folder {tmp_path / 'none'} is not there"),
        (tmp_path / ("x" * 300), "File name too long"),
        (Path("/proc/answers.jsonl"), "--output /proc/answers.jsonl: "),
    ):
        for flags in ((), ("--overwrite",)):
            ran = run("--model", model, "--prompt", "abc", "-o", path, *flags)
            assert (ran.code, ran.out) == (2, ""), ran.err
            assert words in ran.err
            assert ("make the folder first" in ran.err) == (path.name == "a.jsonl")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else for a while")
def test_a_folder_of_somebody_else_as_another_user(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("old")
    path.chmod(0o444)
    os.seteuid(65534)
    try:
        for target in (path, tmp_path / "new.jsonl"):
            with pytest.raises(UsageError, match="Permission denied"):
                AnswerFile(target, overwrite=True)
    finally:
        os.seteuid(0)


def test_answers_as_json_on_stdout(model: Path, run: Run) -> None:
    ran = run("--model", model, "--prompt", "abc", "--prompt", "de", "-o", "-", "--logprobs", 2, "-n", 3, "-q")
    *lines, record = map(json.loads, ran.out.splitlines())
    assert record["sequences"] == 2
    for line in lines:
        assert set(line) == {
            "index", "sample", "prompt", "text", "token_ids", "finish_reason", "logprobs", "top_logprobs",
        }  # fmt: skip
        assert [max(step, key=step.get) for step in line["top_logprobs"]] == [str(t) for t in line["token_ids"]]
        assert [max(step.values()) for step in line["top_logprobs"]] == line["logprobs"]


def test_what_is_kept_of_spans_is_told(tmp_path: Path, model: Path, run: Run) -> None:
    span = {"start": 0, "end": 4, "name": "a", "keep": True, "unit": "char"}
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "keep this, not that", "spans": [span]}) + '\n"abc"')
    flags = ("--model", model, "--prompts", prompts, "--hh-ratio", 0.5, "-n", 3)
    ran = run(*flags, "--spans", "whitelist", "-o", "-")
    marked, plain, record = map(json.loads, ran.out.splitlines())
    if marked["index"]:
        marked, plain = plain, marked
    assert marked["kept"]["a"] == record["kept"]["a"]
    assert marked["kept"]["a"]["decode"] == marked["kept"]["a"]["tokens"]
    assert "kept" not in plain
    assert run(*flags, "--spans", "some").code == 2
    prompts.write_text(json.dumps({"prompt": "abc", "spans": [span, span]}))
    assert "overlap" in run(*flags).err


def test_text_on_stdout_is_followed_by_the_record(model: Path, run: Run) -> None:
    ran = run("--model", model, "--prompt", "abc", "-n", 3, "--ignore-eos")
    name, prompt, text, record = ran.out.splitlines()
    assert (name, prompt, text[:4]) == ("--- 0 (length)", "abc", ">>> ")
    assert json.loads(record) == ran.record
    assert "\x1b" not in ran.out + ran.err
    assert "\r" not in ran.err


def test_token_ids_are_shown_where_there_is_no_tokenizer(tmp_path: Path, own_model: Path, run: Run) -> None:
    (own_model / "tokenizer.json").unlink()
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": [2, 5, 6]}\n')
    ran = run("--model", own_model, "--prompts", prompts, "-n", 3)
    assert ran.out.splitlines()[1] == "[2, 5, 6]"
    assert ">>> token ids [" in ran.out
    ran = run("--model", own_model, "--prompt", "abc")
    assert ran.code == 2
    assert "this model has no tokenizer" in ran.err


def test_random_prompts_print_the_report_and_the_record_alone(model: Path, run: Run) -> None:
    ran = run("--model", model, "--prompt-len", 9, "--num-prompts", 3)
    assert len(ran.out.splitlines()) == 1
    assert ran.record["sequences"] == 3
    assert "model       " in ran.err


def test_dummy_weights_show_no_text(tmp_path: Path, model: Path, run: Run) -> None:
    output = tmp_path / "a.jsonl"
    arguments = ("--model", model, "--weights", "dummy", "--prompt", "abc", "-n", 3)
    ran = run(*arguments)
    assert len(ran.out.splitlines()) == 1
    assert ran.record["weights"] == "dummy"
    assert "note: the weights are random numbers, so no text is shown" in ran.err
    assert run(*arguments, "-o", output).code == 0
    (answer,) = answers(output)
    assert (answer["text"], answer["weights"]) == (None, "dummy")


def test_quiet_is_quiet(model: Path, run: Run) -> None:
    ran = run("--model", model, "--prompt", "abc", "-q")
    assert ran.err == ""
    assert ran.record["sequences"] == 1


@pytest.mark.parametrize("files", [False, True])
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, model: Path, files: bool) -> None:
    """`| head -1`; with --output the answers are whole nevertheless, and other files are written."""
    output, page, trace = (tmp_path / name for name in ("a.jsonl", "page.html", "trace.json"))
    read, write = os.pipe()
    os.close(read)
    flags = ("-o", str(output), "--report", str(page), "--trace", str(trace)) if files else ()
    with Child(tmp_path, "--model", model, "--prompt", "abc", *flags, before=lambda: os.dup2(write, 1)) as child:
        os.close(write)
        ran = child.wait()
    assert ran.code == 0
    assert "Traceback" not in ran.err
    assert "BrokenPipe" not in ran.err
    if files:
        assert len(answers(output)) == 1
        assert page.stat().st_size > 0
        assert json.loads(trace.read_text())["traceEvents"]


def test_sequences_that_failed_show_whoever_reads(tmp_path: Path, model: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "a.jsonl"
    prompts.write_text("abc\n" + 500 * "abc " + "\n")
    read, write = os.pipe()
    os.close(read)
    flags = ("--model", model, "--prompts", prompts, "--on-error", "skip", "-o", output)
    with Child(tmp_path, *flags, before=lambda: os.dup2(write, 1)) as child:
        os.close(write)
        ran = child.wait()
    assert ran.code == 3
    assert len(answers(output)) == 2


def test_finished_with_the_eos(tmp_path: Path, model: Path, run: Run) -> None:
    output = tmp_path / "a.jsonl"
    settings = ("--model", model, "--prompt", "abc", "-n", 12, "--ignore-eos")
    free = run(*settings, "-o", output)
    (answer,) = answers(output)
    assert free.code == 0
    stop = answer["text"][4:6]
    stopped = run(*settings, "--stop", stop)
    assert stopped.out.startswith("--- 0 (stop)\nabc\n>>> ")
    assert stopped.record["generated_tokens"] < 12
