"""`run --json-schema FILE`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests.programs import Run, answers

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}


def test_answers_are_as_the_schema_in_a_file_says(tmp_path: Path, run: Run) -> None:
    path, output = tmp_path / "person.json", tmp_path / "answers.jsonl"
    path.write_text(json.dumps(SCHEMA))
    ran = run("--prompt", "Who?", "--prompt", "And?", "--gen-len", 60, "--json-schema", path, "--output", output)
    assert ran.code == 0, ran.err
    for answer in answers(output):
        jsonschema.validate(json.loads(answer["text"]), SCHEMA)


def test_lines_have_forms_of_their_own(tmp_path: Path, run: Run) -> None:
    """As bodies of a batch file have them; they go before the flag."""
    path, output, prompts = tmp_path / "person.json", tmp_path / "answers.jsonl", tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(SCHEMA))
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    lines = [{"prompt": "a", **own} for own in ({"response_format": form}, {}, {"response_format": {"type": "text"}})]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run("--prompts", prompts, "--gen-len", 60, "--json-schema", path, "--output", output).code == 0
    texts = [answer["text"] for answer in sorted(answers(output), key=lambda answer: answer["index"])]
    assert json.loads(texts[0]) in ("yes", "no")
    jsonschema.validate(json.loads(texts[1]), SCHEMA)
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(texts[2])
    prompts.write_text('{"prompt": "a", "response_format": {"type": "xml"}}')
    ran = run("--prompts", prompts)
    assert (ran.code, "line 1 has a response_format that cannot be served" in ran.err) == (2, True), ran.err


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"not": {}}', "person.json: the schema at # has 'not'"), ("{", "is not JSON"), ("[]", "the schema at # is []")],
)
def test_files_that_hold_no_schema(tmp_path: Path, run: Run, text: str, words: str) -> None:
    path = tmp_path / "person.json"
    path.write_text(text)
    ran = run("--prompt", "Who?", "--json-schema", path)
    assert (ran.code, words in ran.err) == (2, True), ran.err


def test_a_file_that_is_not_there_and_random_prompts(tmp_path: Path, run: Run) -> None:
    ran = run("--prompt", "Who?", "--json-schema", tmp_path / "none.json")
    assert (ran.code, "needed a readable file" in ran.err) == (2, True), ran.err
    path = tmp_path / "person.json"
    path.write_text("{}")
    ran = run("--prompt-len", 8, "--json-schema", path)
    assert (ran.code, "random prompts are for measuring" in ran.err) == (2, True), ran.err
