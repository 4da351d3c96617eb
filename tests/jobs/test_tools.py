"""Tool calls: what templates of several makers write, and answers of a tiny model that must call."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from h2o_flexgen.jobs.requests import Refused
from h2o_flexgen.jobs.tools import HARMONY, CallStyle, Tools, calls_in, style_of
from tests.jobs.files import results, write
from tests.programs import Ran, tokenizer, write_talker

_TOOLS = "{% if tools %}[system]{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
_OF = "{% set f = c.function %}"
HERMES = (
    _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls or [] %}" + _OF + "{% if not loop.first or m.content %}{{ sep }}{% endif %}"
    '<tool_call>{{ sep }}{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{{ sep }}</tool_call>'
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
LLAMA = (
    _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|im_end|>'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
MISTRAL = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}" + _OF +
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)  # fmt: skip
DEEPSEEK = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}<|calls|>{% for c in m.tool_calls %}" + _OF +
    "<|call|>function<|sep|>{{ f.name }} ```json {{ f.arguments + ' ```' }}<|end|>{% endfor %}<|ends|></s>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
)  # fmt: skip
GPT_OSS = (
    _TOOLS + "{% for m in messages %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}{% endfor %}"
)
NO_CALLS = _TOOLS + "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_TOOLS = HERMES.removeprefix(_TOOLS)

HERMES_STYLE = CallStyle(
    '<tool_call> {"name": "', '", "arguments": ', "} </tool_call>", '} </tool_call> <tool_call> {"name": "'
)
LLAMA_STYLE = CallStyle('{"name": "', '", "parameters": ', "}")
STYLES: dict[str, tuple[str, CallStyle | None]] = {
    "hermes": (HERMES.replace("{{ sep }}", " "), HERMES_STYLE),
    "llama": (LLAMA, LLAMA_STYLE),
    "deepseek": (
        DEEPSEEK,
        CallStyle(
            "<|calls|><|call|>function<|sep|>",
            " ```json ",
            " ```<|end|><|ends|>",
            " ```<|end|><|call|>function<|sep|>",
            special=True,
            as_text=True,
        ),
    ),
    "mistral": (
        MISTRAL,
        CallStyle('[TOOL_CALLS][{"name": "', '", "arguments": ', "}]", '}, {"name": "', special=True, ids=9),
    ),
    "gpt-oss": (GPT_OSS, HARMONY),
    "calls that are not written": (NO_CALLS, None),
    "tools that are not written": (NO_TOOLS, None),
}


def codec(template: str) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=template, eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": ["<|call|>", "[TOOL_CALLS]"]})
    made.add_tokens([AddedToken("<|im_end|>", special=False)])
    return SimpleNamespace(transformed=made, turn_ends=(made.convert_tokens_to_ids("<|im_end|>"),))


@pytest.mark.parametrize(("template", "style"), STYLES.values(), ids=STYLES)
def test_how_a_template_writes_calls(template: str, style: CallStyle | None) -> None:
    if style is None:
        with pytest.raises(Refused, match="the chat template of m takes no tools") as why:
            style_of(codec(template), "m", (2,))
        assert why.value.param == "tools"
    else:
        assert style_of(codec(template), "m", (2,)) == style


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
STOP: dict[str, Any] = {"type": "object", "properties": {}}


def tool(name: str, parameters: Any = None, **changes: Any) -> dict[str, Any]:
    more = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **more, **changes}}


TOOLS = [tool("weather", WEATHER), tool("stop")]
ONE = {"type": "function", "function": {"name": "stop"}}


def test_calls_are_read_out_of_a_text() -> None:
    names = {"weather": WEATHER, "stop": STOP}
    first = '<tool_call> {"name": "weather", "arguments": {"city":\n"Rome", "days": 2}} </tool_call>'
    second = '<tool_call> {"name": "stop", "arguments": {}} </tool_call>'
    called = [("weather", '{"city": "Rome", "days": 2}'), ("stop", "{}")]
    for text, said, calls in (
        (f"I look. {first} {second}", "I look.", called),
        (f"{first} and {second}", "and", called),
        (f"{first} <tool_call> {{", '<tool_call> {', called[:1]),
        (first[:50], first[:50], []),
        ('<tool_call> {"name": "other", "arguments": {}} </tool_call>', None, []),
        ("", "", []),
    ):  # fmt: skip
        assert calls_in(text, HERMES_STYLE, names) == (text if said is None else said, calls)
    gpt = "<|channel|>analysis<|message|>x<|end|><|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
    assert calls_in(gpt, HARMONY, names)[1] == [("stop", "{}")]


BAD: list[tuple[Any, Any, Any, str]] = [
    ([{"type": "function"}], None, None, "tools"),
    ([tool("a b")], None, None, "tools"),
    ([tool("a"), tool("a")], None, None, "tools"),
    ([tool("a", {"not": {}})], None, None, "tools"),
    ([tool("a", {"type": "array"})], None, None, "tools"),
    ("x", None, None, "tools"),
    ([tool("a")] * 129, None, None, "tools"),
    (TOOLS, "always", None, "tool_choice"),
    (TOOLS, {"type": "function", "function": {"name": "nothing"}}, None, "tool_choice"),
    (None, "required", None, "tool_choice"),
    (None, ONE, None, "tool_choice"),
    (TOOLS, None, 1, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("tools", "choice", "parallel", "param"), BAD)
def test_what_makes_no_sense_is_refused_by_name(tools: Any, choice: Any, parallel: Any, param: str) -> None:
    with pytest.raises(Refused) as why:
        Tools.read(tools, choice, parallel)
    assert why.value.param == param
    assert param in why.value.message.replace("the tool a", "tools")


def line(name: str, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 110, "temperature": 0, **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_talker(tmp_path_factory.mktemp("caller") / "model", max_position_embeddings=800)
    path = folder / "tokenizer_config.json"
    template = HERMES.replace("{{ sep }}", " ")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


def test_answers_call_as_they_must(tmp_path: Path, caller: Path, batch: Callable[..., Ran]) -> None:
    asked = [{"role": "user", "content": "Hi"}]
    past = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **tool("stop"), "type": "function"}]}
    past["tool_calls"][0]["function"] = {"name": "stop", "arguments": '{"x": [1]}'}
    said = [*asked, past, {"role": "tool", "tool_call_id": "c", "content": "done"}]
    path = write(
        tmp_path / "requests.jsonl",
        line("required", tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=90),
        line("drawn", tools=TOOLS, tool_choice="required", max_tokens=90, temperature=1, seed=3, n=2),
        line("named", tools=TOOLS, tool_choice=ONE, max_tokens=90),
        line("auto", tools=TOOLS, max_tokens=4),
        line("none", tools=TOOLS, tool_choice="none", max_tokens=4),
        line("plain", max_tokens=4),
        line("past", messages=said, max_tokens=4),
        line("bad past", messages=[*asked, {**past, "tool_calls": [{"function": {"name": "x", "arguments": "{"}}]}]),
        line("two forms", tools=TOOLS, response_format={"type": "json_object"}),
        line("given twice", tools=TOOLS, chat_template_kwargs={"tools": []}),
    )
    output = tmp_path / "results.jsonl"
    ran = batch("-i", path, "-o", output, "--model", caller, "--quiet")
    assert ran.code == 3
    found = {name: each["response"]["body"] for name, each in results(output).items()}
    for name in ("required", "named", "drawn"):
        for choice in found[name]["choices"]:
            message = choice["message"]
            assert message["role"] == "assistant"
            if choice["finish_reason"] == "length":
                assert name == "drawn"
                continue
            assert choice["finish_reason"] == "tool_calls"
            assert message["content"] is None
            for call in message["tool_calls"]:
                assert call["type"] == "function"
                assert call["id"].startswith("call_")
                schema = {"weather": WEATHER, "stop": STOP}[call["function"]["name"]]
                jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    assert [call["function"] for call in found["named"]["choices"][0]["message"]["tool_calls"]] == [
        {"name": "stop", "arguments": "{}"}
    ]
    assert len(found["required"]["choices"][0]["message"]["tool_calls"]) == 1
    for name in ("auto", "none", "plain", "past"):
        (choice,) = found[name]["choices"]
        assert choice["finish_reason"] in ("length", "stop")
        assert "tool_calls" not in choice["message"]
    assert found["auto"]["choices"] == found["none"]["choices"] != found["plain"]["choices"]
    shown = "[user]Hi{}".format('<tool_call> {"name": "stop", "arguments": {"x": [1]}} </tool_call>')
    assert found["past"]["usage"]["prompt_tokens"] > len(shown)
    for name, param in (("bad past", "messages"), ("two forms", "response_format"), ("given twice", "chat_template")):
        assert found[name]["error"]["param"].startswith(param)
        assert found[name]["error"]["message"]


def test_special_tokens_mark_calls_too(tmp_path: Path, batch: Callable[..., Ran]) -> None:
    folder = write_talker(tmp_path / "model", max_position_embeddings=800)
    path = folder / "tokenizer_config.json"
    template = MISTRAL.replace("[TOOL_CALLS]", "<none>")  # a special token of this model's
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    lines = [line(str(n), tools=TOOLS, tool_choice=choice) for n, choice in enumerate(("required", ONE))]
    ran = batch("-i", write(tmp_path / "in.jsonl", *lines), "-o", tmp_path / "out.jsonl", "--model", folder, "--quiet")
    assert ran.code == 0, ran.err
    for each in results(tmp_path / "out.jsonl").values():
        (choice,) = each["response"]["body"]["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert [len(call["id"]) for call in choice["message"]["tool_calls"]] == [9] * len(
            choice["message"]["tool_calls"]
        )


def test_a_template_without_tools_refuses_them(tmp_path: Path, batch: Callable[..., Ran]) -> None:
    folder = write_talker(tmp_path / "model")
    path = write(tmp_path / "requests.jsonl", line("a", tools=TOOLS), line("b", max_tokens=3))
    ran = batch("-i", path, "-o", tmp_path / "results.jsonl", "--model", folder, "--quiet")
    found = results(tmp_path / "results.jsonl")
    assert ran.code == 3
    assert found["b"]["response"]["status_code"] == 200
    assert found["a"]["response"]["body"]["error"]["param"] == "tools"
    assert "takes no tools" in found["a"]["error"]["message"]
