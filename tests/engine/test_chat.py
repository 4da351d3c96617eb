"""Conversations: rendered as transformers renders them, refused where they cannot be, answered as their prompt is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.chat import chat_prompts, marked_chat, with_system
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import ModelError, UsageError
from tests.engine import tokenizer_folders as folders
from tests.programs import write_model

TALKS: list[Any] = [
    "What does the dog do?",
    [{"role": "user", "content": " 你好 🦊 "}],
    [
        {"role": "system", "content": "You are a fox."},
        {"role": "user", "content": "Who are you? <s>"},
        {"role": "assistant", "content": "The quick brown one."},
        {"role": "user", "content": "And the dog?", "name": "cat"},
    ],
]


def in_config(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": folders.TEMPLATE}))


def named(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    templates = [{"name": "rag", "template": "none"}, {"name": "default", "template": folders.TEMPLATE}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": templates}))


def in_jinja(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(folders.TEMPLATE)


def in_json(folder: Path) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": folders.TEMPLATE}))


def codec_of(folder: Path) -> TextCodec:
    codec = TextCodec.open(folder)
    assert codec is not None
    return codec


@pytest.mark.parametrize("place", [in_config, named, in_jinja, in_json])
@pytest.mark.parametrize("name", ["llama", "llama-sentencepiece", "plain-bytes", "bos-and-eos"])
def test_as_transformers_renders_it(tmp_path: Path, name: str, place: Callable[[Path], None]) -> None:
    folder = folders.FOLDERS[name](tmp_path / "model")
    place(folder)
    codec, tokenizer = codec_of(folder), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    given = {"chat_template": folders.TEMPLATE} if place is in_json else {}
    for prompt, talk in zip(chat_prompts(codec, "m", TALKS), TALKS, strict=True):
        ids = prompt.content
        messages = [{"role": "user", "content": talk}] if isinstance(talk, str) else talk
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **given)
        assert ids == expected
        assert ids[0] == tokenizer.bos_token_id != ids[1], "BOS once, and first"
        assert tokenizer.decode(ids).endswith("<|assistant|>") or name == "llama-sentencepiece", "not in its vocabulary"


@pytest.mark.parametrize(
    ("talk", "complaint"),
    [
        ([], "conversation 0 has no messages"),
        (7, "conversation 0 has no messages"),
        (["Hi"], "message 0 of conversation 0 is 'Hi'"),
        ([{"role": "user"}], "message 0 of conversation 0 has no content"),
        ([{"role": "user", "content": "Hi"}, {"content": "Hi"}], "message 1 of conversation 0 has no role"),
        ([{"role": "tool", "content": "Hi"}], "conversation 0 does not suit the chat template of m: no such role"),
        ([{"role": "user", "content": [{"type": "image"}]}], "has no content that is text"),
    ],
)
def test_what_is_no_conversation(tmp_path: Path, talk: Any, complaint: str) -> None:
    codec = codec_of(folders.llama3(tmp_path / "model"))
    with pytest.raises(UsageError, match=complaint):
        chat_prompts(codec, "m", [talk])


@pytest.mark.parametrize("talks", ["Hi", [{"role": "user", "content": "Hi"}]])
def test_one_conversation_is_no_list_of_them(tmp_path: Path, talks: Any) -> None:
    with pytest.raises(UsageError, match=r"wrap it: \[conversation\]"):
        chat_prompts(codec_of(folders.llama3(tmp_path / "model")), "m", talks)


def test_a_model_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="m has no tokenizer"):
        marked_chat(None, "m", "Hi", (), "it")
    for name in ("plain-words", "llama"):
        codec = codec_of(folders.FOLDERS[name](tmp_path / name))
        with pytest.raises(UsageError, match=r"m has no chat template.*GGUF.*chat_template.jinja.*plain text"):
            marked_chat(codec, "m", "Hi", (), "it")
    only = folders.write(tmp_path / "only", "llama", folders.words(), tokenizer_class="PreTrainedTokenizerFast")
    settings = {"chat_template": [{"name": "rag", "template": "x"}, {"name": "code", "template": "x"}]}
    (only / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="m has no chat template of the name default, only code, rag"):
        marked_chat(codec_of(only), "m", "Hi", (), "it")
    (only / "tokenizer_config.json").write_text(json.dumps({"chat_template": []}))
    with pytest.raises(UsageError, match="of the name default, only an empty list"):
        marked_chat(codec_of(only), "m", "Hi", (), "it")


def test_templates_are_run_in_a_sandbox(tmp_path: Path) -> None:
    folder = folders.llama(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages.append('x') }}{{ ''.__class__.__mro__ }}")
    with pytest.raises(UsageError, match="does not suit the chat template"):
        marked_chat(codec_of(folder), "m", "Hi", (), "it")


def test_templates_without_end_and_of_no_text(tmp_path: Path) -> None:
    folder = folders.llama(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}")
    with pytest.raises(UsageError, match="does not suit the chat template of m: maximum recursion depth"):
        marked_chat(codec_of(folder), "m", "Hi", (), "it")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be read: chat_template\.jinja: 'utf-8' codec"):
        marked_chat(codec_of(folder), "m", "Hi", (), "it")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"x": 1}]}))
    with pytest.raises(ModelError, match="cannot be read: KeyError"):
        marked_chat(codec_of(folder), "m", "Hi", (), "it")


def test_a_content_in_parts_is_their_texts(tmp_path: Path) -> None:
    folder = folders.llama(tmp_path / "model")
    in_config(folder)
    parts = [{"type": "text", "text": "What does "}, {"type": "text", "text": "the dog do?"}]
    in_parts = marked_chat(codec_of(folder), "m", [{"role": "user", "content": parts}], (), "it")
    assert in_parts == marked_chat(codec_of(folder), "m", "What does the dog do?", (), "it")
    with pytest.raises(UsageError, match="no content that is text"):
        marked_chat(codec_of(folder), "m", [{"role": "user", "content": [*parts, {"type": "image_url"}]}], (), "it")


def test_arguments_are_the_templates(tmp_path: Path) -> None:
    folder = folders.llama(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} dog{% endif %}"
    )
    codec = codec_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for arguments in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        expected = tokenizer.apply_chat_template(
            [{"role": "user", "content": "the fox"}], add_generation_prompt=True, return_dict=False, **arguments
        )
        assert chat_prompts(codec, "m", ["the fox"], arguments)[0].content == expected
    for wrong, complaint in (([1], "chat_template_kwargs of"), ({"tokenize": True}, "has tokenize")):
        with pytest.raises(UsageError, match=complaint):
            chat_prompts(codec, "m", ["the fox"], wrong)  # type: ignore[arg-type]


def test_a_chat_ends_where_the_template_closes_a_turn(tmp_path: Path) -> None:
    """With a token that no configuration names; what is generated otherwise goes on to the limit as before."""
    folder = write_model(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    with Engine(str(folder)) as engine:
        first = engine.generate(["[user]Hi[assistant]"], max_new_tokens=8)[0].token_ids
    closing = first[3]
    content = next(text for text, number in tokenizer["model"]["vocab"].items() if number == closing)
    if all(token["id"] != closing for token in tokenizer["added_tokens"]):
        rest = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": closing, "content": content, "special": True, **rest})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %} "
        + json.dumps(content).join(("{{ ", " }}"))
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with Engine(str(folder)) as engine:
        assert engine.model.codec is not None
        assert closing in engine.model.codec.turn_ends
        answer = engine.chat(["Hi"], max_new_tokens=32)[0]
        plain = engine.generate([answer.prompt_ids], max_new_tokens=32)[0]
        assert plain.token_ids[: len(answer.token_ids)] == answer.token_ids
        assert (answer.finish_reason == "stop") == (closing in plain.token_ids)
        assert closing in plain.token_ids, "the tiny model says it, so that this test tests something"
        assert closing not in answer.token_ids[:-1]
        others = {"max_new_tokens": 32, "eos_token_id": 10**6}
        longer = engine.chat(["Hi"], **others)[0]
        assert longer.token_ids == engine.generate([answer.prompt_ids], **others)[0].token_ids


def test_the_tokenizers_own_end_ends_a_chat(tmp_path: Path) -> None:
    folder = folders.llama(tmp_path / "model")
    in_config(folder)
    codec = codec_of(folder)
    assert codec.transformed.eos_token_id in codec.turn_ends


@pytest.mark.parametrize("name", list(folders.FOLDERS))
def test_ids_are_those_of_tokenizer_json_or_there_is_a_warning(tmp_path: Path, name: str, caplog) -> None:
    folder = folders.FOLDERS[name](tmp_path / "model")
    codec = codec_of(folder)
    if not (folder / "tokenizer.json").exists():
        return
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.no_padding()
    stored.no_truncation()
    texts = [" the dog", "12345", "e\u0301 \u00e9", "Hello  world\n"]
    same = all(codec.encode_bare(text) == stored.encode(text, add_special_tokens=False).ids for text in texts)
    assert same or "tokenizer.json; for the latter" in caplog.text


def test_a_system_message_comes_first_and_once() -> None:
    user, own = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Own."}
    assert with_system([user], "Given.") == [{"role": "system", "content": "Given."}, user]
    assert with_system([own, user], "Given.") == [own, user]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the programs' tests, with a template of printable characters."""
    folder = write_model(tmp_path_factory.mktemp("talker") / "model")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "</s>", "eos_token": "</s>"})
    )
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return folder


@pytest.fixture(scope="module")
def llm(talker: Path) -> Iterator[Engine]:
    with Engine(str(talker)) as engine:
        yield engine


def test_answers_are_completions_of_the_rendered_text(llm: Engine) -> None:
    assert llm.model.codec is not None
    answers = llm.chat(["Hi", [{"role": "user", "content": "You"}]], max_new_tokens=6)
    prompts = [llm.model.codec.encode_bare(f"</s>[user]{text}[assistant]") for text in ("Hi", "You")]
    assert [answer.prompt_ids for answer in answers] == prompts
    expected = llm.generate(prompts, max_new_tokens=6)
    assert [answer.text for answer in answers] == [output.text for output in expected]
    assert [answer.index for answer in answers] == [0, 1]


@pytest.mark.parametrize(
    ("said", "eos"),
    [(None, (2,)), ([2, 7], (2, 7)), (7, (7,)), ([7.0, 10**9], (7,)), (10**9, (2,)), ([], (2,)), (2.0, (2,))],
)
def test_generation_config_says_what_ends_a_turn(tmp_path: Path, said: Any, eos: tuple[int, ...]) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    with Engine(str(folder)) as engine:
        assert engine.model.spec.eos_token_ids == eos


def test_stored_settings_that_answers_do_not_have_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers' generate would penalise repetitions; what is sampled by is no surprise in greedy answers."""
    folder = write_model(tmp_path / "model")
    said: dict[str, Any] = {"repetition_penalty": 1.1, "suppress_tokens": [], "no_repeat_ngram_size": 0, "num_beams": 1}
    for penalty, warned in ((1.1, True), (1.0, False)):
        said |= {"repetition_penalty": penalty, "do_sample": True, "temperature": 0.7}
        (folder / "generation_config.json").write_text(json.dumps(said))
        caplog.clear()
        Engine(str(folder)).close()
        assert ("asks for repetition_penalty=1.1: only generate_ids" in caplog.text) == warned


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}'])
def test_a_generation_config_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        Engine(str(folder))


def test_the_message_names_the_model_as_it_was_asked_for() -> None:
    with Engine("demo") as engine, pytest.raises(UsageError, match=r"^demo has no chat template"):
        engine.chat(["Hi"])
