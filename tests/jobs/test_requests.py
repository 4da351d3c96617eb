"""What lines ask for and what is answered, by tables: no model, and an engine that echoes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.response_format import ResponseFormat
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.requests.reader import SAMPLE_BITS, Request
from h2o_flexgen.engine.requests.sequence import RequestOutput, Sequence
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import ContextLengthError, PlanError, UsageError
from h2o_flexgen.jobs.job import Job, bounded
from h2o_flexgen.jobs.journal import JobResults
from h2o_flexgen.jobs.openai import OpenAIFormat
from h2o_flexgen.jobs.plain import PlainFormat
from h2o_flexgen.jobs.requests import Refused, RequestFormat
from h2o_flexgen.jobs.source import Record, Source
from h2o_flexgen.schedule.request import PlanRequest
from tests.engine import tokenizer_folders as folders
from tests.jobs.files import request, results, write
from tests.jobs.refused import BODY, CONTEXT, REFUSED, a
from tests.seeds import moved


def openai(**settings: Any) -> OpenAIFormat:
    given = {"codec": None, "eos": (2,), "seed": 0, "sampling": {}, "created": 1, "job": "f" * 64, **settings}
    return OpenAIFormat("some/model", **given)


class Echo:
    """An engine without a model: the answer to a prompt is its first tokens. `fits`: the tokens that fit at once."""

    def __init__(self, fits: int = 1 << 40, fails: str = "") -> None:
        self.fits, self.fails, self.calls, self.planner = fits, fails, list[int](), lambda request: None

    def read(self, request: Request) -> list[Sequence]:
        ids = [ord(c) for c in request.prompt] if isinstance(request.prompt, str) else list(request.prompt)
        if len(ids) > CONTEXT:
            raise ContextLengthError("too long")
        if 13 in ids:
            raise UsageError("an unlucky token")
        rows = []
        for sample in range(request.params.num_return_sequences):
            number = request.number << SAMPLE_BITS | sample
            rows.append(
                Sequence(
                    request.index, sample, number, ids or [1], request.params, Budget(9, 0, 0, 0, True), frozenset()
                )
            )
        return rows

    def run(self, rows: list[Sequence]) -> Iterator[tuple[Sequence, RequestOutput]]:
        self.calls.append(len(rows))
        if sum(len(row.prompt_ids) for row in rows) > self.fits:
            raise PlanError("it does not fit")
        for row in sorted(rows, key=lambda row: hash((row.row_id, 3))):
            row.token_ids = row.prompt_ids[: row.params.max_new_tokens]
            text = "".join(map(chr, row.token_ids))
            row.finish_reason = "error" if self.fails and self.fails in text else "length"
            row.error = "the model produced logits that are not finite" if row.finish_reason == "error" else None
            yield row, RequestOutput.of(row, text)

    def plan(self, workload: Any) -> Any:
        if self.fits < 1:
            raise PlanError("nothing fits")


def answered(
    folder: Path,
    lines: list[str] | list[bytes],
    engine: Echo | None = None,
    form: RequestFormat | None = None,
    **job: Any,
) -> list[dict[str, Any]]:
    """The results of a job of these lines."""
    file = folder / "in.jsonl"
    file.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    source = Source(file, "openai" if form is None else getattr(form, "kind", "openai"))
    scan = source.scan()
    made = openai(doubled=scan.doubled) if form is None else form
    with JobResults(folder / "out", overwrite=True) as kept:
        kept.begin({}, scan.lines)
        Job(engine or Echo(), source, made, kept, scan.requests, **job).run()
    return [json.loads(line) for line in (folder / "out").read_text().split("\n")[:-1]]


def test_lines_that_cannot_be_served_say_why_and_no_other_suffers(tmp_path: Path) -> None:
    """In every place where readers look for an error; each between two lines that are answered."""
    lines = [line for each in REFUSED for line in (each[0], request(f"good {each[1]}", BODY))]
    unique = [line.replace('"good', f'"{i} good') if isinstance(line, str) else line for i, line in enumerate(lines)]
    # Several are called "a": only the first may be.
    named = [line.replace('"a"', f'"a{i}"', 1) if isinstance(line, str) else line for i, line in enumerate(unique)]
    found = answered(tmp_path, named)
    assert len(found) == len(named)
    by_line = {int(each["id"][-8:], 16): each for each in found}
    for number, (line, status, code, param) in enumerate(REFUSED):
        bad, good = by_line[2 * number + 1], by_line[2 * number + 2]
        assert good["response"]["status_code"] == 200, str(line)[:200]
        assert good["error"] is None
        said = bad["response"]["body"]["error"]
        assert (bad["response"]["status_code"], said["code"], said["param"]) == (status, code, param), str(line)[:200]
        assert bad["error"] == {"code": code, "message": said["message"]}
        assert bad["custom_id"] is not None or f"line {2 * number + 1}: " in said["message"]
        assert len(said["message"]) < 400


def test_bom_blank_lines_and_the_end_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\xef\xbb\xbf" + a("1").encode() + b"\n\n  \r\n" + a("2").encode())
    assert [record.line for record in Source(tmp_path / "in", "openai").records()] == [1, 4]
    found = answered(tmp_path, [b"\xef\xbb\xbf" + a("1").encode(), b"", b" \r", a("2").encode() + b"\r"])
    assert {each["custom_id"]: each["response"]["status_code"] for each in found} == {"1": 200, "2": 200}
    assert answered(tmp_path, []) == []


def test_of_equal_names_the_first_is_answered(tmp_path: Path) -> None:
    found = answered(tmp_path, [a("x"), a("y"), a("x"), a("x", prompt=None)])
    assert sorted((each["custom_id"], each["response"]["status_code"]) for each in found) == [
        ("x", 200), ("x", 400), ("x", 400), ("y", 200)
    ]  # fmt: skip
    assert {each["error"]["code"] for each in found if each["error"]} == {"duplicate_custom_id"}


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"max_new_tokens": 16, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}),
    ({"temperature": 0}, {"do_sample": False, "num_return_sequences": 1}),
    ({"temperature": 1e-320}, {"do_sample": False}),
    ({"temperature": 0, "n": 3, "top_p": 0.5}, {"do_sample": False, "num_return_sequences": 1}),
    ({"n": 3, "top_p": 0.5, "top_k": -1}, {"num_return_sequences": 3, "top_p": 0.5, "top_k": 0}),
    ({"seed": -1}, {"seed": 2**63 - 1}),
    ({"stop": "x"}, {"stop_strings": ("x",)}),
    ({"stop": None, "user": "u", "stream": False}, {"stop_strings": ()}),
    ({"logprobs": 0}, {"logprobs": 0}),
    ({"min_tokens": 3, "repetition_penalty": 1.5}, {"min_new_tokens": 3, "repetition_penalty": 1.5}),
    (
        {"model": None, "presence_penalty": 1, "frequency_penalty": -0.5},
        {"presence_penalty": 1.0, "frequency_penalty": -0.5},
    ),
    ({"ignore_eos": True}, {"ignore_eos": True, "eos_token_id": None}),
    ({"stop_token_ids": [7]}, {"ignore_eos": False, "eos_token_id": (2, 7)}),
    ({"stop_token_ids": [7], "ignore_eos": True}, {"ignore_eos": False, "eos_token_id": (7,)}),
    ({"logit_bias": {"5": -100}}, {"sequence_bias": (((5,), -100.0),)}),
]


@pytest.mark.parametrize(("body", "wanted"), SETTINGS, ids=[str(body) for body, _ in SETTINGS])
def test_settings_are_the_services(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    asked = openai().asked(Record(3, a(**body).encode()))
    assert {name: getattr(asked.params, name) for name in wanted} == wanted


def test_flags_replace_the_services_defaults_and_bodies_replace_flags() -> None:
    form = openai(sampling={"max_new_tokens": 9, "temperature": 0.5, "top_k": 3})
    params = form.asked(Record(1, a().encode())).params
    assert (params.max_new_tokens, params.temperature, params.top_k) == (9, 0.5, 3)
    params = form.asked(Record(1, a(max_tokens=4, temperature=0).encode())).params
    assert (params.max_new_tokens, params.do_sample) == (4, False)


def test_a_model_goes_by_its_names_and_those_it_is_served_by() -> None:
    form = openai(served=("gpt-4o", "other"))
    for name in ("some/model", "model", "gpt-4o", "other"):
        assert form.asked(Record(1, a(model=name).encode())).body["model"] == name
    with pytest.raises(Refused, match="--served-model-name"):
        form.asked(Record(1, a(model="gpt-4").encode()))


def test_seeds_are_those_of_the_line_and_nothing_else() -> None:
    first, other = (openai(seed=seed).asked(Record(3, a().encode())).params.seed for seed in (0, 1))
    assert first != other
    assert first == openai().asked(Record(3, a("b", prompt="xyz").encode())).params.seed
    assert first != openai().asked(Record(4, a().encode())).params.seed
    assert openai().asked(Record(4, a(seed=5).encode())).params.seed == 5


def test_a_window_is_no_limit(tmp_path: Path) -> None:
    """Requests of several sequences, over windows smaller than they are."""
    lines = [a(str(i), n=3, prompt=["ab", "c" * (1 + i)]) for i in range(7)]
    engine = Echo()
    found = answered(tmp_path, lines, engine, window_rows=10)
    assert engine.calls == [12, 12, 12, 6]
    assert {each["custom_id"] for each in found} == {str(i) for i in range(7)}
    for each in found:
        choices = each["response"]["body"]["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        assert [choice["text"] for choice in choices] == ["ab"] * 3 + ["c" * (1 + int(each["custom_id"]))] * 3


def test_what_does_not_fit_together_is_run_apart(tmp_path: Path) -> None:
    """And what does not fit alone is the only one to fail."""
    lines = [a(str(n), prompt="x" * n, max_tokens=2) for n in (3, 30, 5, 9, 1, 2)]
    found = answered(tmp_path, lines, Echo(fits=10))
    assert {each["custom_id"]: each["response"]["status_code"] for each in found} == {
        "3": 200, "30": 500, "5": 200, "9": 200, "1": 200, "2": 200
    }  # fmt: skip
    with pytest.raises(PlanError):
        answered(tmp_path, lines, Echo(fits=0))


def test_a_sequence_that_fails_fails_its_request_alone(tmp_path: Path) -> None:
    found = answered(
        tmp_path, [a("1", prompt="bad"), a("2", prompt=["fine", "bad"]), a("3", prompt="fine")], Echo(fails="b")
    )
    assert {each["custom_id"]: each["response"]["status_code"] for each in found} == {"1": 500, "2": 500, "3": 200}


PLAIN = PlainFormat("jsonl", "m", None, 0, SamplingParams(max_new_tokens=3), id_column="id")


def test_plain_json_lines(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "abcd", "id": 7, "more": [1]}',
        '"text"',
        '{"prompt": [1, 2]}',
        "{",
        "3",
        '{"prompt": 3}',
        '{"messages": [1]}',
        '{"prompt": "a", "response_format": {"type": "xml"}}',
        '{"prompt": "a", "response_format": {"type": "json_object"}}',
    ]
    found = {each["line"]: each for each in answered(tmp_path, lines, form=PLAIN)}
    assert (found[1]["text"], found[1]["id"], found[1]["finish_reason"]) == ("abc", 7, "length")
    assert [found[line].get("text") for line in (2, 3)] == ["tex", "\x01\x02"]
    assert all("error" in found[line] for line in (4, 5, 6, 7, 8))
    assert "response_format is" in found[8]["error"]["message"]
    assert PLAIN.asked(Record(9, lines[-1].encode())).params.response_format == ResponseFormat()


def test_lines_of_text(tmp_path: Path) -> None:
    form = PlainFormat("text", "m", None, 0, SamplingParams(max_new_tokens=3))
    lines = [b"one\r", b"", b"a \xe2\x80\xa8 b", b"\xff", b"a\0b", b'{"prompt": 1}']
    found = {each["line"]: each for each in answered(tmp_path, lines, form=form)}
    assert {line: each.get("text") for line, each in found.items()} == {
        1: "one",
        3: "a \u2028",
        4: None,
        5: None,
        6: '{"p',
    }


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.txt", "x", "text"),
        ("a.jsonl", "", "jsonl"),
        ("a.jsonl", '\n{"prompt": "x\n\n{"prompt": "x"}\n', "jsonl"),
        ("a.jsonl", f"\xff\n{{\n{a()}", "openai"),
        ("a.jsonl", a(), "openai"),
        ("a.jsonl", "{", "openai"),
        ("a.jsonl", '{"prompt": "x"}', "jsonl"),
        ("a.jsonl", '"x"', "jsonl"),
        ("a.jsonl", '{"messages": []}', "jsonl"),
    ],
)
def test_formats_are_found_out(tmp_path: Path, name: str, text: str, kind: str) -> None:
    """By the first line that can be read: what stands before it is an error of its own."""
    (tmp_path / name).write_text(text, encoding="latin-1")
    assert Source(tmp_path / name).format == kind


def test_prompts_of_json_lines_may_have_another_name(tmp_path: Path) -> None:
    """Lines without `prompt` were taken for requests of OpenAI's, all of which lack a custom_id."""
    file = write(tmp_path / "in.jsonl", '{"question": "abcd", "key": "a"}', '{"question": "xyz", "key": "b"}')
    assert Source(file, columns=("question", "key")).format == "jsonl"
    assert Source(file).format == Source(file, columns=("prompt", "key")).format == "openai"
    form = OpenAIFormat("m", None, (), 0, {}, 0, "")
    with pytest.raises(Refused, match=r"custom_id is missing.* in \['key', 'question'\] is for --prompt-column"):
        form.asked(next(Source(file).records()))


def test_a_fault_is_where_it_is_in_its_line(tmp_path: Path) -> None:
    """Python counts the end of the line, too: it spoke of line 2 of a line."""
    source = Source(write(tmp_path / "in.jsonl", '"x"', '{"prompt": "a",', "5"))
    form = PlainFormat("jsonl", "m", None, 0, SamplingParams())
    _, torn, number = source.records()
    with pytest.raises(Refused, match=r"^the line is not JSON \(.*: column 16\)$"):
        form.asked(torn)
    with pytest.raises(Refused, match=r"^the line is no JSON object and no text$"):
        form.asked(number)


def test_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    questions = arrow.array([b"abcd", None, b"xyz", b"\xff\xfe"]).view(arrow.string())  # the last is not UTF-8
    table = arrow.table({"question": questions, "key": ["a", "b", "c", "d"], "other": [1, 2, 3, 4]})
    parquet.write_table(table, tmp_path / "in.parquet")
    source = Source(tmp_path / "in.parquet", columns=("question", "key"))
    assert (source.format, source.scan().requests) == ("parquet", 4)
    form = PlainFormat("parquet", "m", None, 0, SamplingParams(max_new_tokens=3), "question", "key")
    with JobResults(tmp_path / "out") as kept:
        kept.begin({}, 4)
        Job(Echo(), source, form, kept, 4).run()
    found = results(tmp_path / "out", "id")
    assert [found[key].get("text") for key in "abc"] == ["abc", None, "xyz"]
    assert found["d"]["line"] == 4
    assert found["d"]["error"] == {"code": "invalid_line", "message": "the row is not UTF-8 text"}
    with pytest.raises(UsageError, match="no column 'prompt'"):
        Source(tmp_path / "in.parquet", columns=("prompt",)).scan()
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "in.parquet").read_bytes()[:-9])
    with pytest.raises(UsageError, match="cannot be read as Parquet"):
        Source(tmp_path / "torn.parquet").scan()
    data = bytearray((tmp_path / "in.parquet").read_bytes())
    data[4:60] = bytes(56)
    (tmp_path / "damaged.parquet").write_bytes(data)
    with pytest.raises(UsageError, match="cannot be read as Parquet behind row 0"):
        list(Source(tmp_path / "damaged.parquet", columns=("question",)).records())


def test_shards_share_the_requests_out(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", *(a(str(i % 5)) for i in range(7)))
    parts = [Source(file, "openai", shard=(i, 3)) for i in (1, 2, 3)]
    assert [[record.line for record in part.records()] for part in parts] == [[1, 4, 7], [2, 5], [3, 6]]
    assert [part.scan().requests for part in parts] == [3, 2, 2]
    assert {part.scan().doubled for part in parts} == {frozenset({6, 7})}, "of the whole file"


def test_a_file_that_is_written_to_meanwhile(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", a("1"), a("2"))
    source, scanned = Source(file, "openai"), Source(file, "openai")
    records = source.records()
    assert (next(records).line, scanned.scan().lines) == (1, 2)
    write(file, a("1"), a("2"), a("3"))
    for left in (records, scanned.records()):
        with pytest.raises(UsageError, match="written to"):
            list(left)


def test_lines_at_random_never_end_a_job(tmp_path: Path) -> None:
    """Good lines with bytes changed, taken out, doubled, and values replaced: each line has one result."""
    source = random.Random(moved(11))
    values = [None, True, 0, -1, 1e9, "", "x", [], {}, [[]], "\ud800", 2**70, [None], {"a": "b"}]
    bodies = [body for body, _ in SETTINGS] + [{"prompt": ["a", "b"]}, {"echo": True, "max_tokens": 0, "logprobs": 1}]
    lines: list[bytes] = []
    for number in range(600):
        line = json.loads(a(str(number), **source.choice(bodies)))
        if source.random() < 0.5:
            where = source.choice([line, line["body"]])
            where[source.choice([*where, "max_completion_tokens", "messages"])] = source.choice(values)
        if source.random() < 0.2:
            line["url"] = "/v1/chat/completions"
        data = bytearray(json.dumps(line).encode())
        for _ in range(source.choice([0, 0, 1, 3])):
            at = source.randrange(len(data))
            data[at : at + source.randrange(3)] = bytes(source.randrange(256) for _ in range(source.randrange(3)))
        lines.append(bytes(data).replace(b"\n", b"") or b"{")
    found = answered(tmp_path, lines)
    assert sorted(int(each["id"][-8:], 16) for each in found) == [
        number for number, line in enumerate(lines, 1) if line.strip()
    ]
    assert len({each["response"]["status_code"] for each in found}) >= 2


def test_a_block_is_a_small_share_of_a_job_unless_something_moves() -> None:
    class Planned:
        moves = False

    seen: list[int] = []

    def planner(request: Any) -> Any:
        seen.append(request.workload.num_sequences)
        return Planned()

    request = PlanRequest(None, Workload(4, 4, 5000), None, "float32", None, "cpu")  # type: ignore[arg-type]
    bounded(planner, 10_000)(request)
    bounded(planner, 100)(request)
    bounded(planner, 100, 0.02)(request)
    Planned.moves = True
    bounded(planner, 10_000)(request)
    assert seen == [200, 32, 2, 200, 5000]


def test_the_formats_keep_their_word() -> None:
    """A refusal is an exception of its own; any other would end the job."""
    with pytest.raises(Refused):
        openai().asked(Record(1, None))
    with pytest.raises(Refused):
        PLAIN.asked(Record(1, None))


@pytest.mark.parametrize("made", [folders.byte_level, folders.metaspace])
def test_tokens_that_are_no_characters_are_told_by_their_bytes(tmp_path: Path, made: Any) -> None:
    """Which clients join; as texts they would all be the same."""
    folder = folders.plain(made, "llama", chat_template=folders.TEMPLATE)(tmp_path / "model")
    codec = TextCodec.open(folder)
    assert codec is not None
    before, text = codec.encode("The dog"), " the 🦊."
    ids = codec.encode("The dog" + text)[len(before) :]
    fox = codec.encode_bare("🦊")[-4:]
    top = [{token: -0.5, fox[1]: -2.0, fox[2]: -3.0, codec.encode(" dog")[-1]: -4.0} for token in ids]
    output = RequestOutput(0, 0, before, ids, text, "length", [-0.5] * len(ids), top)
    form = openai(codec=codec)
    talk = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 4}
    lines = request("a", {"prompt": "The dog", "logprobs": 4}), request("a", talk, url="/v1/chat/completions")
    (plain,), (chat,) = (
        form.answer(record, form.asked(record), [[output]])["response"]["body"]["choices"]
        for record in (Record(number, line.encode()) for number, line in enumerate(lines))
    )
    told, content = plain["logprobs"], chat["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content) == text.encode()
    for i, token in enumerate(ids):
        known, near = top[i], told["top_logprobs"][i]
        assert list(near.values()) == [known[each] for each in known], "none took the place of another"
        assert near[told["tokens"][i]] == known[token]
        assert [each["logprob"] for each in content[i]["top_logprobs"]] == list(known.values())
        assert content[i]["token"] == content[i]["top_logprobs"][0]["token"]
    assert told["tokens"][-2] == "bytes:\\x8a"
    assert content[-2]["token"] == "\\x8a"
    assert told["text_offset"][-1] == len(text) - 1


def test_errors_name_the_fields_of_a_body() -> None:
    for found, told, param in (
        ("min_new_tokens=5 is larger than max_new_tokens=2", "min_tokens=5 is larger than max_tokens=2", "min_tokens"),
        ("sequence_bias holds token id 9", "logit_bias holds token id 9", "logit_bias"),
        ("prompt is 'min_new_tokens'", "prompt is 'min_new_tokens'", None),
    ):
        why = Refused(found).by_field()
        assert (why.message, why.param) == (told, param)
