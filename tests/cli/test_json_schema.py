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
