"""`run --chat`: prompts and messages through the model's chat template, answers with what was asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.cli.arguments import parse_arguments
from h2o_flexgen.config.prompt import Prompt
from h2o_flexgen.errors import UsageError
from h2o_flexgen.jobs.openai import OpenAIFormat
from h2o_flexgen.jobs.plain import PlainFormat
from h2o_flexgen.jobs.source import Record
from tests.programs import Run, answers, write_talker


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talker(tmp_path_factory.mktemp("talker") / "model")


def test_a_folder_whose_name_is_not_utf_8(tmp_path: Path, talker: Path, model: Path, run: Run) -> None:
    """The libraries of tokenizers take UTF-8 alone; where one has to read the folder itself, a link serves."""
    for place, named in ((model, "\udcff"), (talker, "talks\udcff")):
        (tmp_path / named).symlink_to(place)
    assert completed(tmp_path, run, model, "a") == completed(tmp_path, run, tmp_path / "\udcff", "a")
    ran = run("--model", tmp_path / "talks\udcff", "--chat", "--prompt", "a")
    assert (ran.code, "not UTF-8" in ran.err, "name it by a link" in ran.err) == (4, True, True)


def asked(tmp_path: Path, run: Run, *arguments: object) -> list[tuple[object, str]]:
    """What each answer says was asked, and its text, in the order of the prompts."""
    output = tmp_path / "answers.jsonl"
    ran = run("-o", output, "--overwrite", "-n", 4, *arguments)
    assert ran.code == 0, ran.err
    lines = sorted(answers(output), key=lambda line: line["index"])
    return [(line.get("messages", line.get("prompt")), line["text"]) for line in lines]


def completed(tmp_path: Path, run: Run, model: Path, *texts: str) -> list[str]:
    """The answers to prompts that are the rendered text already. The tokenizer adds BOS to them, the template none."""
    ids = [[4 + ord(letter) - 32 for letter in text] for text in texts]
    path = tmp_path / "rendered.jsonl"
    path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in ids))
    return [text for _, text in asked(tmp_path, run, "--model", model, "--prompts", path)]


def test_each_prompt_is_what_a_user_says(tmp_path: Path, talker: Path, run: Run) -> None:
    told = asked(tmp_path, run, "--model", talker, "--chat", "--prompt", "Hi", "--prompt", "You")
    assert [what for what, _ in told] == [[{"role": "user", "content": text}] for text in ("Hi", "You")]
    expected = completed(tmp_path, run, talker, "[user]Hi[assistant]", "[user]You[assistant]")
    assert [text for _, text in told] == expected


def test_messages_are_a_conversation_with_and_without_the_flag(tmp_path: Path, talker: Path, run: Run) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": own}) + '\n{"prompt": "b"}\n"c"\n')
    told = asked(tmp_path, run, "--model", talker, "--prompts", path)
    assert [what for what, _ in told] == [own, "b", "c"]
    told = asked(tmp_path, run, "--model", talker, "--prompts", path, "--chat", "--system", "S")
    users = [[{"role": "system", "content": "S"}, {"role": "user", "content": text}] for text in "bc"]
    assert [what for what, _ in told] == [own, *users]
    rendered = ["[system]own[user]a[assistant]", *(f"[system]S[user]{text}[assistant]" for text in "bc")]
    assert [text for _, text in told] == completed(tmp_path, run, talker, *rendered)


def test_parts_and_template_arguments_are_the_same_everywhere(tmp_path: Path, run: Run) -> None:
    folder = write_talker(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    quick = "{% if enable_thinking is defined and not enable_thinking %}[quick]{% endif %}"
    path.write_text(json.dumps({**settings, "chat_template": quick + settings["chat_template"]}))
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    talk = {"messages": [{"role": "user", "content": parts}], "chat_template_kwargs": {"enable_thinking": False}}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(talk) + "\n")
    with LLM(str(folder)) as llm:
        codec = llm.model.codec
        assert codec is not None
        answer = llm.chat([talk["messages"]], max_new_tokens=4, chat_template_kwargs=talk["chat_template_kwargs"])[0]
    assert answer.prompt_ids == codec.encode_bare("[quick][user]Hi[assistant]")
    for flags in ((), ("--chat",)):
        told = asked(tmp_path, run, "--model", folder, "--prompts", prompts, *flags)
        assert [text for _, text in told] == [answer.text]
    record = Record(1, json.dumps(talk).encode())
    plain = PlainFormat("jsonl", "m", codec, 0, SamplingParams()).asked(record)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": talk}
    batch = OpenAIFormat("m", codec, (2,), 0, {}, 1, "f" * 64).asked(Record(1, json.dumps(line).encode()))
    for each in (plain, batch):
        assert [prompt.content for prompt in each.prompts if isinstance(prompt, Prompt)] == [answer.prompt_ids]
    prompts.write_text(json.dumps({**talk, "chat_template_kwargs": {"tokenize": True}}) + "\n")
    ran = run("--model", folder, "--prompts", prompts)
    assert ran.code == 2
    assert "chat_template_kwargs of it has tokenize" in ran.err


def test_on_a_terminal_the_last_message_stands_before_its_answer(talker: Path, run: Run) -> None:
    ran = run("--model", talker, "--chat", "--prompt", "Hi", "--system", "S", "-n", 2)
    assert ran.out.splitlines()[:2] == ["--- 0 (length)", "Hi"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": []}', "line 1 has no messages"),
        ('{"messages": "Hi"}', "line 1 has messages that are not a list"),
        ('{"messages": [{"role": "user"}]}', "line 1 message 0 of it has no content that is text"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 1 holds half a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "a"}], "prompt": "b"}', "line 1 has both a prompt and messages"),
    ],
)
def test_messages_that_cannot_be_used(tmp_path: Path, talker: Path, run: Run, line: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    ran = run("--model", talker, "--prompts", path)
    assert ran.code == 2
    assert words in ran.err
    assert '{"messages": [{"role": ..., "content": ...}]}' in ran.err


def test_token_ids_are_no_conversation(tmp_path: Path, talker: Path, run: Run) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [5, 6]}')
    ran = run("--model", talker, "--prompts", path, "--chat")
    assert (ran.code, "prompt 0 is token ids, and --chat is given" in ran.err) == (2, True)


def test_a_model_without_a_template(model: Path, run: Run) -> None:
    ran = run("--model", model, "--chat", "--prompt", "Hi")
    assert ran.code == 2
    assert f"error: {model} has no chat template" in ran.err
    assert "run without --chat" in ran.err


def test_nothing_to_answer(model: Path, run: Run) -> None:
    ran = run("--model", model, "--chat")
    assert (ran.code, "--chat is given, and there is nothing to answer" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--system", "S"), "--system is given without --chat"),
        (("--chat", "--prompt-len", "9"), "--chat and --prompt-len are given together"),
        (("--chat", "--system", "\udcff"), "--system is not valid Unicode text"),
    ],
)
def test_flags_that_do_not_go_together(line: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_arguments(line, {})
