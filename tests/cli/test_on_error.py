"""`run --on-error skip` and `generate(on_error="skip")`: prompts that cannot be run have errors for answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen import LLM, Prompt, SamplingParams
from h2o_flexgen.engine.limits.plan import Plan, by_rule
from h2o_flexgen.errors import ContextLengthError, PlanError, UsageError
from h2o_flexgen.schedule.request import PlanRequest
from tests.programs import Run, answers, write_talker

LONG = "too long " * 20
FLAGS = ("--gen-len", 3, "--dtype", "float32")
SPAN = {"start": 0, "end": 99, "name": "a"}


def test_others_are_run_as_if_it_were_not_there(model: Path) -> None:
    """Whatever is wrong with one: length, token ids, a span, its settings, a kind that is no prompt."""
    bad: list[Any] = [LONG, [4, 5000], [-1], ["x"], None, 7, Prompt("abc", [SPAN])]
    drawn = SamplingParams(max_new_tokens=3, do_sample=True, seed=3, num_return_sequences=2)
    prompts, params = ["abc", "", "Hello"], [SamplingParams(max_new_tokens=3, logprobs=0)] * 2 + [drawn]
    with LLM(str(model), dtype="float32") as llm:
        wanted = llm.generate(prompts, params)
        for each in bad:
            with pytest.raises(UsageError):
                llm.generate(["abc", each], max_new_tokens=3)
            found = llm.generate([*prompts, each], [*params, drawn], on_error="skip")
            assert found[:4] == wanted
            for sample, output in enumerate(found[4:]):
                assert (output.index, output.sample, output.token_ids, output.text) == (3, sample, [], "")
                assert output.finish_reason == "error"
                assert output.error
                assert output.error.startswith("prompt 3"), output.error
        first, *_ = llm.generate([LONG, *prompts], [drawn, *params], on_error="skip")
        assert "the context of" in (first.error or "")
        beyond = SamplingParams(max_new_tokens=3, sequence_bias={(5000,): 1.0})
        two = llm.generate(["a", "b"], [beyond, params[0]], on_error="skip")
        assert [each.error is None for each in two] == [False, True]
        assert [each.index for each in llm.stream([LONG, "a", LONG], max_new_tokens=1, on_error="skip")] == [0, 2, 1]
        with pytest.raises(ContextLengthError):
            llm.generate(["abc", LONG], max_new_tokens=3)
        with pytest.raises(ContextLengthError, match='--on-error skip, on_error="skip"'):
            llm.generate(["abc", LONG], max_new_tokens=3)
        assert llm.generate([LONG], max_new_tokens=3, on_error="skip")[0].error == first.error
        with pytest.raises(UsageError, match="on_error is 'no'"):
            llm.generate(["a"], on_error="no")


def test_lines_that_cannot_be_used_have_errors(tmp_path: Path, model: Path, run: Run) -> None:
    lines = [
        b'{"prompt": "abc"}',
        b"{",
        b'{"prompt": []}',
        b"\xff",
        b'"a\0"',
        b"",
        json.dumps({"prompt": LONG}).encode(),
        b'{"prompt": [4, 99999]}',
        b'{"prompt": "ab", "response_format": {"type": "x"}}',
        b'{"prompt": "ab", "spans": [{"start": 5, "end": 1}]}',
        b'{"messages": "no"}',
        b'{"messages": [{"role": "user", "content": "a model without a template"}]}',
        b'{"prompt": ""}',
        b'"Hello"',
    ]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(b"\n".join(lines))
    same = ("--model", model, "--prompts", file, *FLAGS)
    refused = run(*same, "--output", out)
    assert (refused.code, out.exists(), "UTF-8" in refused.err) == (2, False, True)
    ran = run(*same, "--output", out, "--on-error", "skip")
    assert ran.code == 3, ran.err
    found = sorted(answers(out), key=lambda answer: answer["index"])
    assert [answer["index"] for answer in found] == list(range(13))
    assert [answer["index"] for answer in found if "error" not in answer] == [0, 11, 12]
    for answer in found[1:11]:
        assert (answer["finish_reason"], answer["token_ids"]) == ("error", [])
        assert answer["error"].removeprefix(f"prompt {answer['index']} ") in ran.err
    assert found[1]["error"].startswith("line 2 is not JSON")
    assert found[3]["error"].startswith("line 4 is not UTF-8 text")
    assert found[5]["prompt"] == LONG
    assert "10 of 13 sequences ended in an error" in ran.err
    alone = tmp_path / "alone.jsonl"
    file.write_bytes(b"\n".join(lines[-2:] + lines[:1]))
    assert run(*same, "--output", alone).code == 0
    texts = [answer["text"] for answer in sorted(answers(alone), key=lambda answer: answer["index"])]
    assert texts == [found[11]["text"], found[12]["text"], found[0]["text"]]
    assert run(*same, "--output", alone, "--overwrite", "--on-error", "skip").code == 0


def test_conversations_likewise(tmp_path: Path, run: Run) -> None:
    talker = write_talker(tmp_path / "model")
    lines = ['{"messages": [{"role": "user"}]}', "[4, 5]", '"Hi"', json.dumps({"prompt": LONG})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    same = ("--model", talker, "--prompts", tmp_path / "in.jsonl", "--chat", *FLAGS)
    assert run(*same, "--output", tmp_path / "out.jsonl").code == 2
    ran = run(*same, "--output", tmp_path / "out.jsonl", "--on-error", "skip")
    assert ran.code == 3, ran.err
    found = sorted(answers(tmp_path / "out.jsonl"), key=lambda answer: answer["index"])
    assert ["error" in answer for answer in found] == [True, True, False, True]
    with LLM(str(talker), dtype="float32") as llm:
        talks: list[Any] = [[{"role": "user"}], "Hi", 5]
        with pytest.raises(UsageError):
            llm.chat(talks, max_new_tokens=3)
        made = llm.chat(talks, max_new_tokens=3, on_error="skip")
    assert [output.error is None for output in made] == [False, True, False]
    assert made[1].text == found[2]["text"]


def test_on_stdout_and_where_all_are_bad(tmp_path: Path, model: Path, run: Run) -> None:
    ran = run("--model", model, "--prompt", LONG, "--prompt", "abc", *FLAGS, "--on-error", "skip")
    assert (ran.code, "--- 0 (error)" in ran.out, "--- 1 (length)" in ran.out) == (3, True, True), ran.err
    assert "prompt 0: has 181 tokens, with 3 to be generated 184 in all" in ran.err
    ran = run("--model", model, "--prompt", LONG, *FLAGS, "--on-error", "skip")
    assert (ran.code, ran.record["sequences"]) == (3, 0), ran.err


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_read(tmp_path: Path) -> None:
    """Tokenizers take hundreds of bytes for each character."""
    talker, far = write_talker(tmp_path / "model"), "x" * 100_000
    with LLM(str(talker), dtype="float32") as llm:
        codec, read = llm.model.codec, list[int]()
        assert codec is not None
        for name in ("encode", "encode_bare"):
            encode = getattr(codec, name)
            setattr(codec, name, lambda text, encode=encode: read.append(len(text)) or encode(text))
        calls: list[Any] = [lambda: llm.generate([far]), lambda: llm.chat([far]), lambda: llm.score([("a", far)])]
        for call in calls:
            with pytest.raises(ContextLengthError, match=r"at least 10\d\d tokens.* is 128 tokens"):
                call()
        assert max(read) == 1024


def test_a_prompt_beyond_memory_is_skipped_too(model: Path) -> None:
    """Within the context, and with a plan that needs more than there is; not where nothing fits."""
    prompts: list[list[int]] = [[5] * (3 + i % 4) for i in range(40)]
    prompts[7], prompts[20], least = [5] * 120, [5] * 60, 50

    def planner(request: PlanRequest) -> Plan:
        if request.workload.prompt_len > least:
            raise PlanError("the plan needs 3 GiB on the cpu tier, and its cap is 2 GiB:\ncpu   a table of it")
        return by_rule(request)

    with LLM(str(model), dtype="float32") as llm:
        whole = llm.generate(prompts, max_new_tokens=3, num_return_sequences=2, do_sample=True)
        llm.planner = planner
        with pytest.raises(PlanError):
            llm.generate(prompts, max_new_tokens=3)
        found = llm.generate(prompts, max_new_tokens=3, num_return_sequences=2, do_sample=True, on_error="skip")
        assert [each.index for each in found if each.error] == [7, 7, 20, 20]
        assert {each.error for each in found} == {None, "the plan needs 3 GiB on the cpu tier, and its cap is 2 GiB"}
        assert [each for each in found if not each.error] == [each for each in whole if each.index not in (7, 20)]
        least = 2
        with pytest.raises(PlanError):
            llm.generate(prompts, max_new_tokens=3, on_error="skip")
