"""Reasoning kept apart from answers, bounded, and told to templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.config.fold import Thinking
from h2o_flexgen.jobs.reasoning import Marks, Parts, marks_of, parts_of, shown_text
from tests.jobs.files import results, write
from tests.programs import Ran, token, tokenizer, write_talker
from tests.tiny import make_model, save

THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{{ '<think>' if enable_thinking is not defined or enable_thinking else '<think></think>' }}"
)
THINK, PLAIN = Marks("<think>", "</think>", True, False), Marks("<think>", "</think>", False, False)
HARMONY = Marks("<|channel|>analysis<|message|>", "<|end|>", True, True)


def codec(template: str, *special: str) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=template, eos_token="</s>")
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return SimpleNamespace(transformed=made, decode=lambda ids: made.decode(ids, skip_special_tokens=True))


MARKS: list[tuple[str, tuple[str, ...], Marks]] = [
    (THINKS, (), THINK),
    ("plain", (), PLAIN),
    ("plain", ("</think>",), Marks("<think>", "</think>", True, True)),
    ("x[/THINK]", ("[THINK]", "[/THINK]"), Marks("[THINK]", "[/THINK]", True, True)),
    ("<|channel|>analysis", (), HARMONY),
]


@pytest.mark.parametrize(("template", "special", "marks"), MARKS)
def test_what_marks_reasoning(template: str, special: tuple[str, ...], marks: Marks) -> None:
    assert marks_of(codec(template, *special)) == marks


TEXTS: list[tuple[Marks, bool, str, str | None, str, str]] = [
    (THINK, True, "so it is</think>Yes.", "so it is", "Yes.", "so it is</think>"),
    (THINK, False, "<think> so </think>\n\nYes.", "so", "Yes.", "<think> so </think>"),
    (PLAIN, False, " <think>so</think>", "so", "", " <think>so</think>"),
    (THINK, True, "never ends", "never ends", "", "never ends"),
    (THINK, False, "Yes. <think>no</think>", None, "Yes. <think>no</think>", ""),
    (THINK, False, "", None, "", ""),
    (
        HARMONY,
        False,
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "so",
        "<|start|>assistant<|channel|>final<|message|>Yes.",
        "<|channel|>analysis<|message|>so<|end|>",
    ),
    (HARMONY, False, "<|channel|>final<|message|>Yes.", None, "<|channel|>final<|message|>Yes.", ""),
]


@pytest.mark.parametrize(("marks", "inside", "text", "reasoning", "rest", "thought"), TEXTS)
def test_reasoning_is_taken_out_of_a_text(
    marks: Marks, inside: bool, text: str, reasoning: str | None, rest: str, thought: str
) -> None:
    of = codec("", *(("<|channel|>", "<|message|>", "<|end|>", "<|start|>") if marks.special else ()))
    ids = of.transformed.encode(text, add_special_tokens=False)
    tokens = len(of.transformed.encode(thought, add_special_tokens=False))
    assert parts_of(of, marks, text, ids, inside) == Parts(reasoning, rest, tokens)
    if marks.special:
        assert shown_text(of, marks, rest) == "Yes."


def line(name: str, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "temperature": 0, **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_talker(tmp_path_factory.mktemp("thinker") / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": THINKS}))
    return folder


def test_answers_with_bounded_reasoning(tmp_path: Path, thinker: Path, batch: Callable[..., Ran]) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    path = write(
        tmp_path / "requests.jsonl",
        line("free", logprobs=True),
        line("five", max_reasoning_tokens=5),
        line("five of vLLM", thinking_token_budget=5, include_reasoning=False),
        line("none", max_reasoning_tokens=0),
        line("form", max_reasoning_tokens=5, response_format=schema, max_tokens=60),
        line(
            "drawn form", max_reasoning_tokens=5, response_format=schema, temperature=1, seed=4, repetition_penalty=1.2
        ),
        line("long form", response_format=schema, max_tokens=9),
        line("off", enable_thinking=False, max_reasoning_tokens=5),
        line("off as vLLM", reasoning_effort="none"),
        line("off by the template", chat_template_kwargs={"enable_thinking": False}),
        line("effort", reasoning_effort="high"),
        line("twice", enable_thinking=True, chat_template_kwargs={"enable_thinking": True}),
        line("negative", max_reasoning_tokens=-1),
        line("no switch", enable_thinking="no"),
        line("no arguments", enable_thinking=True, chat_template_kwargs=["a"]),
    )
    ran = batch("-i", path, "-o", tmp_path / "out.jsonl", "--model", thinker, "--quiet", "--dtype", "float32")
    assert ran.code == 3
    bodies = {name: each["response"]["body"] for name, each in results(tmp_path / "out.jsonl").items()}
    found = {name: body["choices"][0] for name, body in bodies.items() if "choices" in body}
    free = found["free"]["message"]["reasoning"]
    assert found["free"]["message"] == {
        "role": "assistant", "content": None, "reasoning": free, "reasoning_content": free
    }  # fmt: skip
    assert len(found["free"]["logprobs"]["content"]) == 40
    message, usage = found["five"]["message"], bodies["five"]["usage"]
    assert free.startswith(message["reasoning"].strip())
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5 + len("</think>")}
    assert usage["completion_tokens"] == 40
    assert found["five of vLLM"]["message"] == {"role": "assistant", "content": message["content"]}
    assert found["none"]["message"]["reasoning"] == ""
    for name in ("form", "drawn form"):
        assert found[name]["finish_reason"] == "stop"
        assert json.loads(found[name]["message"]["content"]) in ("yes", "no")
    assert found["form"]["message"]["reasoning"] == message["reasoning"]
    assert found["long form"]["finish_reason"] == "length"
    assert found["long form"]["message"]["content"] is None
    assert found["off"] == found["off as vLLM"] == found["off by the template"]
    assert "reasoning" not in found["off"]["message"]
    assert "completion_tokens_details" not in bodies["off"]["usage"]
    refused = {name: body["error"]["param"] for name, body in bodies.items() if "error" in body}
    assert refused == {
        "effort": "reasoning_effort", "twice": "enable_thinking", "negative": "max_reasoning_tokens",
        "no switch": "enable_thinking", "no arguments": "chat_template_kwargs",
    }  # fmt: skip


def test_thoughts_leave_neighbours_and_reruns_alone(thinker: Path) -> None:
    end = tuple(map(token, "</t>"))
    thoughts = [
        None,
        Thinking((token("<"),), end, inside=True, most=4, then=(token("!"),)),
        Thinking(tuple(map(token, "<t>")), end, opens=True, most=3),
        Thinking(tuple(map(token, "<t>")), end, most=3),
        Thinking(tuple(map(token, "<t>")), end, opens=True, most=0, then=(token("."),)),
    ]
    for settings in ({}, {"repetition_penalty": 1.3}, {"do_sample": True, "seed": 2, "typical_p": 0.9}):
        params = [SamplingParams(max_new_tokens=14, ignore_eos=True, thinking=each, **settings) for each in thoughts]  # type: ignore[arg-type]
        with LLM(str(thinker), dtype="float32") as llm:
            together = llm.generate(["one"] * 5, params)
            alone = [llm.generate(["zero"] * n + ["one"], each)[n] for n, each in enumerate(params)]
        texts = [output.text or "" for output in together]
        assert texts == [output.text for output in alone]
        assert (texts[1][4:9] == "</t>!" and texts[1][:4] == texts[0][:4]) or settings.get("do_sample")
        assert texts[2][:3] == "<t>"
        assert texts[2][6:10] == "</t>"
        assert texts[3] == texts[0] or settings.get("do_sample"), "it never began"
        assert texts[4].startswith("<t></t>.")


SAYS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant{# <|channel|>analysis #}"
)
CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")


def test_channels_of_harmony_by_the_engine(tmp_path: Path, batch: Callable[..., Ran]) -> None:
    """A form, and a limit of 5 tokens: the channel of analysis is opened and closed, that of the answer is opened."""
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=SAYS, eos_token="<|return|>")
    words.add_special_tokens({"additional_special_tokens": list(CHANNELS)})
    ends = words.convert_tokens_to_ids("<|return|>")
    folder = save(make_model("gpt-oss", vocab_size=len(words), eos_token_id=ends), tmp_path / "gpt-oss")
    words.save_pretrained(folder)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    path = write(
        tmp_path / "requests.jsonl",
        line("form", max_reasoning_tokens=5, response_format=schema, max_tokens=60, logprobs=True),
        line("none", max_reasoning_tokens=0, response_format=schema, max_tokens=60),
        *(line(f"cut {most}", response_format=schema, max_tokens=most) for most in (9, 12)),
        line("cut 30", response_format=schema, max_tokens=30, max_reasoning_tokens=2),
    )
    ran = batch("-i", path, "-o", tmp_path / "out.jsonl", "--model", folder, "--quiet", "--dtype", "float32")
    assert ran.code == 0, ran.err
    bodies = {name: each["response"]["body"] for name, each in results(tmp_path / "out.jsonl").items()}
    found = {name: body["choices"][0] for name, body in bodies.items()}
    told = [each["token"] for each in found["form"]["logprobs"]["content"]]  # special ones read as nothing
    opened, thought = ["", *"analysis", ""], "".join(told[10:15])
    assert told[:10] == opened
    assert told[15:32] == ["", "", *"assistant", "", *"final"]
    for name, reasoning in (("form", thought), ("none", "")):
        message = found[name]["message"]
        assert (found[name]["finish_reason"], message["reasoning"]) == ("stop", reasoning.strip())
        assert json.loads(message["content"]) in ("yes", "no")
        counted = bodies[name]["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert counted == len(opened) + (5 if reasoning else 0) + 1
    for name, reasoning in (("cut 9", None), ("cut 12", told[10] + told[11]), ("cut 30", told[10] + told[11])):
        message = found[name]["message"]
        assert (message["content"], message.get("reasoning")) == (None, reasoning and reasoning.strip()), name
