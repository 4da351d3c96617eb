"""The program from requests to results, on a tiny model."""

from __future__ import annotations

import gc
import gzip
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from transformers.generation.logits_process import SequenceBiasLogitsProcessor

from h2o_flexgen import LLM, EvictionConfig, Prompt, SamplingParams
from h2o_flexgen.cli.progress import JobProgress
from h2o_flexgen.engine.requests.sequence import Fault, RequestOutput, Sequence
from h2o_flexgen.errors import UsageError
from h2o_flexgen.jobs.requests import Refused
from h2o_flexgen.jobs.source import Source
from tests.jobs.files import request, results, timeless, write
from tests.programs import Ran, write_talker

Batch = Callable[..., Ran]
CHAT = "/v1/chat/completions"


def test_requests_are_answered_as_the_engine_does(tmp_path: Path, model: Path, batch: Batch) -> None:
    """Greedy and seeded, several prompts and samples, stops and log-probabilities, in the order of the input."""
    prompts = ["abc", "a longer prompt", "Hello"]
    bodies = [
        {"prompt": "abc", "max_tokens": 5, "temperature": 0},
        {"prompt": prompts, "max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": False},
        {"prompt": "abc", "max_tokens": 3, "seed": 7, "n": 2},
        {"prompt": "abc", "temperature": 0, "n": 2, "max_tokens": 2},
        {"prompt": "ab", "echo": True, "max_tokens": 2, "temperature": 0},
        {"prompt": "", "max_tokens": 2, "temperature": 0},
        {"prompt": [4, 5, 6], "max_tokens": 2, "temperature": 0, "logit_bias": {"10": 100}},
    ]
    file = write(tmp_path / "in.jsonl", *(request(f"r{i}", body) for i, body in enumerate(bodies)))
    ran = batch("-i", file, "-o", tmp_path / "out.jsonl", "--model", model, "--ordered")
    assert ran.code == 0, ran.err
    found = results(tmp_path / "out.jsonl")
    assert list(found) == [f"r{i}" for i in range(len(bodies))]
    assert {line["response"]["status_code"] for line in found.values()} == {200}
    choices = [line["response"]["body"]["choices"] for line in found.values()]
    with LLM(str(model)) as llm:
        greedy = llm.generate(prompts, SamplingParams(max_new_tokens=4, logprobs=2))
        drawn = llm.generate(["abc"], do_sample=True, top_k=0, seed=7, num_return_sequences=2, max_new_tokens=3)
        short = llm.generate(["ab", ""], SamplingParams(max_new_tokens=2))
        long = llm.generate(["abc"], SamplingParams(max_new_tokens=5))
    assert [choice["text"] for choice in choices[1]] == [output.text for output in greedy]
    for choice, output in zip(choices[1], greedy, strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(output.token_ids)
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(output.logprobs, abs=1e-4)
        assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * len(output.token_ids)
    assert [choice["text"] for choice in choices[2]] == [output.text for output in drawn]
    assert [choice["text"] for choice in choices[3]] == [(long[0].text or "")[:2]] * 2
    assert choices[4][0]["text"] == "ab" + (short[0].text or "")
    assert choices[5][0]["text"] == short[1].text
    assert choices[0][0]["text"] == long[0].text
    made = len(long[0].token_ids)
    usage = {"prompt_tokens": 4, "completion_tokens": made, "total_tokens": 4 + made}
    assert found["r0"]["response"]["body"]["usage"] == usage


def test_flags_for_logprobs_and_samples_replace_the_defaults_of_bodies(tmp_path: Path, batch: Batch) -> None:
    talker, talk = write_talker(tmp_path / "model"), {"messages": [{"role": "user", "content": "Hello"}]}
    lines = [
        request("given", {"prompt": "Hello"}),
        request("own", {"prompt": "Hello", "logprobs": 1, "n": 1}),
        request("echo", {"prompt": "Hello", "echo": True}),
        request("talk", talk, url=CHAT),
        request("quiet", {**talk, "logprobs": False}, url=CHAT),
    ]
    flags = ("--logprobs", 2, "--do-sample", "--num-return-sequences", 3, "--gen-len", 2, "--model", talker)
    ran = batch("-i", write(tmp_path / "in.jsonl", *lines), "-o", tmp_path / "out.jsonl", *flags)
    assert ran.code == 0, ran.err
    found = {name: line["response"]["body"]["choices"] for name, line in results(tmp_path / "out.jsonl").items()}
    assert {name: len(choices) for name, choices in found.items()} == {
        "given": 3, "own": 1, "echo": 3, "talk": 3, "quiet": 3,
    }  # fmt: skip
    assert [len(top) for top in found["given"][2]["logprobs"]["top_logprobs"]] == [2, 2]
    assert [len(top) for top in found["own"][0]["logprobs"]["top_logprobs"]] == [1, 1]
    assert [len(each["top_logprobs"]) for each in found["talk"][2]["logprobs"]["content"]] == [2, 2]
    assert found["echo"][0]["logprobs"] is found["quiet"][0]["logprobs"] is None


def test_conversations_are_answered_as_the_engine_does(tmp_path: Path, batch: Batch) -> None:
    """Through the chat template, contents in parts too, with the likeliest tokens and theirs."""
    talker = write_talker(tmp_path / "model")
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 4, "logprobs": True},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": parts}], "max_tokens": 3, "n": 2},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
    ]
    lines = [request(f"r{i}", {"temperature": 0, **body}, url=CHAT) for i, body in enumerate(bodies)]
    ran = batch("-i", write(tmp_path / "in.jsonl", *lines), "-o", tmp_path / "out.jsonl", "--model", talker)
    assert ran.code == 3, "two are refused"
    found = [line["response"] for _, line in sorted(results(tmp_path / "out.jsonl").items())]
    with LLM(str(talker)) as llm:
        talks = ["[user]Hello[assistant]", "[system]S[user]Hello[assistant]", "[user]Hi[assistant]"]
        ids = [[4 + ord(letter) - 32 for letter in talk] for talk in talks]
        made = [
            llm.generate([each], SamplingParams(max_new_tokens=n, logprobs=2))[0]
            for each, n in zip(ids, (4, 3, 4), strict=True)
        ]
    for response, output, count in zip(found, made, (1, 2, 1), strict=False):
        texts = [choice["message"]["content"] for choice in response["body"]["choices"]]
        assert (response["status_code"], texts) == (200, [output.text] * count)
        assert response["body"]["usage"]["prompt_tokens"] == len(output.prompt_ids)
    assert found[1]["body"]["choices"][0]["logprobs"] is None
    for response, output, top in ((found[0], made[0], 0), (found[2], made[2], 2)):
        content = response["body"]["choices"][0]["logprobs"]["content"]
        assert "".join(each["token"] for each in content) == output.text
        assert [each["logprob"] for each in content] == pytest.approx(output.logprobs, abs=1e-4)
        assert [len(each["top_logprobs"]) for each in content] == [top] * len(output.token_ids)
    best = [each["top_logprobs"][0] for each in found[2]["body"]["choices"][0]["logprobs"]["content"]]
    assert "".join(each["token"] for each in best) == made[2].text, "greedy: the likeliest was taken"
    assert best[0]["bytes"] == list(best[0]["token"].encode())
    refused = [(each["status_code"], each["body"]["error"]["param"]) for each in found[3:]]
    assert refused == [(400, "messages"), (400, "top_logprobs")]


def test_prompts_are_scored_as_the_engine_does(tmp_path: Path, model: Path, batch: Batch) -> None:
    body = {"prompt": "some text", "echo": True, "max_tokens": 0, "logprobs": 1}
    file = write(tmp_path / "in.jsonl", request("r", body))
    assert batch("-i", file, "-o", tmp_path / "out.jsonl", "--model", model, "--hh-ratio", 0.5).code == 0
    (choice,) = results(tmp_path / "out.jsonl")["r"]["response"]["body"]["choices"]
    with LLM(str(model), eviction=EvictionConfig("h2o", ratio=0.5)) as llm:
        ids = llm.model.codec.encode("some text")  # type: ignore[union-attr]
        (score,) = llm.score([(ids[:1], ids[1:])])
    assert choice["text"] == "some text"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(score.token_logprobs, abs=1e-4)


def test_prefixes_of_another_job_are_found(tmp_path: Path, model: Path, batch: Batch) -> None:
    lines = [request(f"r{i}", {"prompt": f"{'the same header ' * 3}{i}", "max_tokens": 3, "seed": i}) for i in range(4)]
    file = write(tmp_path / "in.jsonl", *lines)
    flags = ("--model", model, "--dtype", "float32", "--hh-ratio", 0.5, "--json")
    assert batch("-i", file, "-o", tmp_path / "without.jsonl", *flags).code == 0
    for name in ("first", "second"):
        ran = batch("-i", file, "-o", tmp_path / name, *flags, "--prefix-dir", tmp_path / "prefixes")
        assert timeless(results(tmp_path / name)) == timeless(results(tmp_path / "without.jsonl"))
        found = json.loads(ran.out.splitlines()[-1])["prefixes"]
        assert (found["prompts"], found["from_disk"] > 0, found["found"] > 0) == (4, name == "second", name == "second")
        assert "tokens were found in the store" in ran.out
    (folder,) = (tmp_path / "prefixes").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700, "what prompts begin with is nobody else's business"


def test_spans_are_served_and_counted(tmp_path: Path, model: Path, batch: Batch) -> None:
    """In bodies of a batch file and in JSON lines, as the engine has them."""
    text, spans = "keep this, and the rest may go", [{"start": 0, "end": 4, "name": "a", "keep": True, "unit": "char"}]
    flags = ("--model", model, "--hh-ratio", 0.5, "--spans", "whitelist")
    lines = (request("r", {"prompt": text, "max_tokens": 3, "temperature": 0, "spans": spans}),)
    lines += (request("s", {"prompt": text, "spans": [{**spans[0], "end": 99}]}),)
    assert batch("-i", write(tmp_path / "in.jsonl", *lines), "-o", tmp_path / "out.jsonl", *flags).code == 3
    (choice,) = results(tmp_path / "out.jsonl")["r"]["response"]["body"]["choices"]
    refused = results(tmp_path / "out.jsonl")["s"]["response"]
    assert refused["status_code"] == 400
    assert "ends beyond the prompt, which has 30 characters" in refused["body"]["error"]["message"]
    plain = write(tmp_path / "plain.jsonl", json.dumps({"prompt": text, "spans": spans}))
    assert batch("-i", plain, "-o", tmp_path / "plain.out", *flags, "--gen-len", 3).code == 0
    line = json.loads((tmp_path / "plain.out").read_text())
    with LLM(str(model), eviction=EvictionConfig("h2o", ratio=0.5, spans="whitelist")) as llm:
        (output,) = llm.generate([Prompt(text, spans)], max_new_tokens=3)
    assert output.kept is not None
    assert output.kept["a"]["decode"] == output.kept["a"]["tokens"] > 0
    assert (choice["text"], choice["kept"]) == (line["text"], line["kept"]) == (output.text, output.kept)


def test_lines_of_prompts_fold_as_bodies_do(tmp_path: Path, model: Path, batch: Batch) -> None:
    flags = ("--model", model, "--dtype", "float32", "--gen-len", 6)

    def tokens(name: str, line: dict[str, object]) -> list[int]:
        file = write(tmp_path / f"{name}.jsonl", json.dumps({"prompt": [5, 9, 30, 12], **line}))
        batch("-i", file, "-o", tmp_path / f"{name}.out", *flags)
        (found,) = [json.loads(each) for each in (tmp_path / f"{name}.out").read_text().splitlines()]
        return found.get("token_ids") or [found["error"]["message"]]

    first, *_ = tokens("alone", {})
    assert tokens("folded", {"fold": {"trigger": first, "keep": [7, 8], "then": [9]}})[:4] == [first, 7, 8, 9]
    assert tokens("faulty", {"fold": {"trigger": first, "keep": []}}) == [
        "keep of a fold is empty. needed one token id or more"
    ]


def test_a_share_of_bytes_goes_with_requests_of_any_length(tmp_path: Path, model: Path, batch: Batch) -> None:
    prompts = ["a", "a prompt that is longer than all the tokens which a short sequence may hold"]
    lines = (request(p[:3], {"prompt": p, "max_tokens": 3, "temperature": 0}) for p in prompts)
    flags = ("--model", model, "--eviction", "h2o", "--kv-bytes", 0.2, "--ordered")
    ran = batch("-i", write(tmp_path / "in.jsonl", *lines), "-o", tmp_path / "out.jsonl", *flags)
    assert ran.code == 0, ran.err
    found = [line["response"]["body"]["choices"][0]["text"] for line in results(tmp_path / "out.jsonl").values()]
    with LLM(str(model), eviction=EvictionConfig("h2o", bytes=0.2)) as llm:
        assert found == [output.text for output in llm.generate(prompts, max_new_tokens=3)]


def test_a_share_of_tokens_beside_sinks_is_that_of_the_requests(tmp_path: Path, model: Path, batch: Batch) -> None:
    """A fifth of a request of few tokens has no room for them, and it alone is refused."""
    lines = [
        request("long", {"prompt": "abc" * 20, "max_tokens": 3}),
        request("short", {"prompt": "a", "max_tokens": 2}),
    ]
    flags = ("--model", model, "--eviction", "streaming", "--hh-ratio", 0.2)
    for count, code in ((1, 0), (2, 3)):
        out = tmp_path / f"{count}.jsonl"
        ran = batch("-i", write(tmp_path / f"in{count}.jsonl", *lines[:count]), "-o", out, *flags)
        assert ran.code == code, ran.err
        status = {name: line["response"]["status_code"] for name, line in results(out).items()}
        assert status == {"long": 200, **({"short": 400} if count == 2 else {})}


def test_a_job_goes_on_and_another_one_does_not(tmp_path: Path, model: Path, batch: Batch) -> None:
    """Settings that differ are named; a file that is no job's is left alone."""
    lines = [request(f"r{i}", {"prompt": "ab" * (i + 1), "max_tokens": 4}) for i in range(6)]
    file, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    same = ("-i", file, "-o", out, "--model", model)
    assert batch(*same, "--resume").code == 2
    assert batch(*same).code == 0
    whole, journal = out.read_bytes(), Path(f"{out}.journal").read_bytes()
    again = batch(*same)
    assert (again.code, again.record["before"], again.record["ok"]) == (0, 6, 0)
    assert out.read_bytes() == whole
    for flags, named in (
        (("--seed", 1), "seed"),
        (("--hh-ratio", 0.5), "eviction name"),
        (("--cache-bits", 8), "cache bits"),
        (("--temperature", 0.5), "sampling"),
        (("--dtype", "bfloat16"), "dtype"),
        (("--shard", "1/2"), "shard"),
    ):
        ran = batch(*same, *flags)
        assert ran.code == 2, flags
        assert f"was begun with {named}" in ran.err
    file.write_text(file.read_text() + "\n")
    assert "input file" in batch(*same).err
    assert out.read_bytes() == whole
    # Of a killed job: a torn line, and an entry that is half there.
    write(file, *lines)
    first = whole.index(b"\n") + 1
    out.write_bytes(whole[: first + 30])
    synced = journal.index(b"synced\n") + len(b"synced\n")
    Path(f"{out}.journal").write_bytes(journal[:synced] + journal[synced:].split(b"synced")[0][:-3])
    again = batch(*same)
    assert (again.code, again.record["before"]) == (0, 1)
    assert timeless(results(out)) == timeless(_parsed(whole))
    other = write(tmp_path / "mine.jsonl", "{}")
    assert "no journal" in batch("-i", file, "-o", other, "--model", model).err
    assert other.read_text() == "{}\n"
    assert batch("-i", file, "-o", other, "--model", model, "--overwrite").code == 0


def test_files_of_requests_are_never_written_over(tmp_path: Path, model: Path, batch: Batch) -> None:
    file = write(tmp_path / "in.jsonl", request("r", {"prompt": "a"}))
    (tmp_path / "link.jsonl").symlink_to(file)
    before = file.read_bytes()
    for flags in (("-o", file), ("-o", tmp_path / "link.jsonl"), ("-o", tmp_path / "out", "--error-file", file)):
        ran = batch("-i", file, *flags, "--model", model, "--overwrite")
        assert (ran.code, "is the file of requests" in ran.err) == (2, True), ran.err
    assert file.read_bytes() == before
    assert not (tmp_path / "out").exists()
    reads, writes = os.pipe()
    pipe = f"/dev/fd/{writes}"
    for path in ("-", pipe, "x" * 300):
        words = "File name too long" if path[0] == "x" else f"--output {path} is not a file"
        ran = batch("-i", file, "-o", path, "--model", model)
        assert (ran.code, words in ran.err) == (2, True), ran.err
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.txt"])
@pytest.mark.parametrize(
    ("data", "said"),
    [(gzip.compress(b'{"prompt": "a"}\n'), "is compressed by gzip"), ("{}\n".encode("utf-16"), "is UTF-16 text")],
    ids=["gzip", "utf-16"],
)
def test_what_has_no_lines_is_refused_as_a_whole(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=f"{name} {said}. needed lines in UTF-8"):
        Source(tmp_path / name)


def test_what_failed_is_told_and_run_again(tmp_path: Path, model: Path, batch: Batch) -> None:
    """By the model's other name, which the first command did not know; --strict runs nothing."""
    lines = [request(f"r{i}", {"prompt": "ab", "max_tokens": 2, "model": ["model", "gpt-4o"][i]}) for i in range(2)]
    file, out = write(tmp_path / "in.jsonl", *lines, "{"), tmp_path / "out.jsonl"
    same = ("-i", file, "-o", out, "--model", model)
    ran = batch(*same, "--strict")
    assert (ran.code, "line 2: model is 'gpt-4o'" in ran.err, "line 3: " in ran.err) == (2, True, True), ran.err
    assert not out.exists()
    ran = batch(*same)
    assert (ran.code, ran.record["ok"], ran.record["failed_in_all"]) == (3, 1, 2)
    assert "the first that failed: line 2: model is 'gpt-4o', and this job runs" in ran.err
    again = batch(*same, "--served-model-name", "gpt-4", "gpt-4o", "--retry-failed", "--ordered")
    assert (again.code, again.record["before"], again.record["ok"], again.record["failed"]) == (3, 1, 1, 1)
    assert again.record["first_failure"].startswith("line 3: the line is not JSON")
    assert [line["custom_id"] for line in map(json.loads, out.read_text().splitlines())] == ["r0", "r1", None]


def _parsed(data: bytes) -> dict[str, dict[str, object]]:
    return {line["custom_id"]: line for line in map(json.loads, data.decode().splitlines())}


def test_each_request_may_have_a_schema_of_its_own(tmp_path: Path, model: Path, batch: Batch) -> None:
    schemas = [{"enum": ["yes", "no"]}, {"type": "boolean"}, None, {"type": "string", "pattern": "^[ab]{2}$"}]
    bodies = [
        {"prompt": "abc", "max_tokens": 12, "response_format": each and {"type": "json_schema", "json_schema": each}}
        for each in (schema and {"schema": schema} for schema in schemas)
    ]
    file = write(tmp_path / "in.jsonl", *(request(f"r{i}", body) for i, body in enumerate(bodies)))
    ran = batch("-i", file, "-o", tmp_path / "out.jsonl", "--model", model)
    assert ran.code == 0, ran.err
    for number, schema in enumerate(schemas):
        (choice,) = results(tmp_path / "out.jsonl")[f"r{number}"]["response"]["body"]["choices"]
        if schema is not None:
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["text"]), schema)


def test_answers_that_are_written_are_forgotten(
    tmp_path: Path, model: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of all answers of a window would be gigabytes; so would a bias as long as the vocabulary for
    each of its requests."""
    alive = list[Counter[type]]()

    def finished(self: JobProgress, now: int, failed: int) -> None:
        if now in (4, 40):
            gc.collect()
            alive.append(Counter(type(each) for each in gc.get_objects()))

    monkeypatch.setattr(JobProgress, "finished", finished)
    bodies = [{"prompt": "abc", "logprobs": 2, "max_tokens": 2, "logit_bias": {i: 1}} for i in range(48)]
    file = write(tmp_path / "in.jsonl", *(request(f"r{i}", body) for i, body in enumerate(bodies)))
    assert batch("-i", file, "-o", tmp_path / "out.jsonl", "--model", model, "--gpu-batch-size", 4).code == 0
    first, last = alive  # there may be others, of other tests
    assert last[Sequence] <= first[Sequence] - 32
    assert last[RequestOutput] <= first[RequestOutput] + 8
    assert last[SequenceBiasLogitsProcessor] <= first[SequenceBiasLogitsProcessor] + 8


@pytest.mark.parametrize(
    ("fault", "status", "param"),
    [("response_format", 400, "response_format"), ("settings", 400, None), ("numbers", 500, None), (None, 500, None)],
)
def test_whose_fault_a_failed_sequence_is(fault: Fault | None, status: int, param: str | None) -> None:
    refused = Refused.of_output(RequestOutput(0, 0, [], [], None, "error", error="why", fault=fault))
    assert (refused.message, refused.status, refused.param) == ("why", status, param)


def test_files_whose_names_are_not_utf_8(tmp_path: Path, model: Path, batch: Batch) -> None:
    link, output = tmp_path / "m\udcff", tmp_path / "out\udcff.jsonl"
    link.symlink_to(model)
    file = write(tmp_path / "in\udcff.jsonl", request("r", {"prompt": "abc", "max_tokens": 2, "model": None}))
    ran = batch("-i", file, "-o", output, "--model", link)
    assert ran.code == 0, ran.err
    (line,) = results(output).values()
    assert line["response"]["body"]["model"] == str(tmp_path / "m?")
