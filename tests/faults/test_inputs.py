"""FAULTS rows 18, 21, 22, 28 and 29 through the program: prompts, odd budgets, numbers that are not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.errors import ModelError, UsageError
from tests.programs import Run, answers, tensors, token


def prompts_file(folder: Path, content: bytes, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "abc"', "line 2 is not JSON"),
        (b'{"prompt": NaN}', "line 2 is not JSON (NaN is not a JSON number)"),
        (b'{"prompt": 1e999}', "line 2 has no prompt"),
        (b'{"prompt": "\\ud800"}', "line 2 holds half a surrogate pair"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b'{"text": "abc"}', "line 2 has no prompt"),
        (b'{"prompt": ["a", 1]}', "line 2 has no prompt"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "line 2 is not JSON"),
        (b"null", "line 2 has no prompt"),
    ],
)
def test_row_18_a_bad_line_is_named(tmp_path: Path, model: Path, run: Run, line: bytes, words: str) -> None:
    path = prompts_file(tmp_path, b'{"prompt": "good"}\n' + line + b"\n")
    ran = run("--model", model, "--prompts", path)
    assert (ran.code, ran.out) == (2, "")
    assert f"{path}: {words}" in ran.err
    assert len(ran.err) < 1000


def test_row_18_all_bad_lines_are_named_at_once(tmp_path: Path, model: Path, run: Run) -> None:
    path = prompts_file(tmp_path, b"{\n" * 9)
    ran = run("--model", model, "--prompts", path)
    assert ran.code == 2
    assert "line 5 is not JSON" in ran.err
    assert "and 4 more" in ran.err


def test_row_18_marks_blanks_and_odd_line_ends_are_tolerated(tmp_path: Path, model: Path, run: Run) -> None:
    content = b'\xef\xbb\xbf{"prompt": "ab"}\r\n\r\n  \n"cd"\n{"prompt": [2, 9, 9]}'
    jsonl = prompts_file(tmp_path, content, "PROMPTS.JSONL")
    output = tmp_path / "a.jsonl"
    assert run("--model", model, "--prompts", jsonl, "-o", output, "-n", 2).code == 0
    assert sorted((line["index"], str(line["prompt"])) for line in answers(output)) == [
        (0, "ab"), (1, "cd"), (2, "[2, 9, 9]"),
    ]  # fmt: skip


def test_row_18_a_prompt_keeps_its_own_separators(tmp_path: Path, model: Path, run: Run) -> None:
    """A form feed and U+2028 end a line for Python's splitlines, and for nobody else."""
    text = prompts_file(tmp_path, "a\x0cb\u2028c\n\u2028\n \f\nd\n".encode(), "prompts.txt")
    output = tmp_path / "a.jsonl"
    assert run("--model", model, "--prompts", text, "-o", output, "-n", 2).code == 0
    assert {line["prompt"] for line in answers(output)} == {"a\x0cb\u2028c", "\u2028", "d"}


def test_row_18_files_that_are_no_text(tmp_path: Path, model: Path, run: Run) -> None:
    for content, words in (
        (b"\x7fELF\x02\x01\xff\xfe", "is not UTF-8 text: byte 6"),
        ("abc".encode("utf-16-le"), "is not text: it holds a NUL byte"),
    ):
        path = prompts_file(tmp_path, content, "prompts.txt")
        ran = run("--model", model, "--prompts", path)
        assert ran.code == 2
        assert f"{path} {words}" in ran.err
    assert "Is a directory" in run("--model", model, "--prompts", tmp_path).err
    assert "No such file" in run("--model", model, "--prompts", tmp_path / "none").err


def test_row_18_a_very_long_line(tmp_path: Path, model: Path, run: Run) -> None:
    path = prompts_file(tmp_path, b"[9" + b",9" * 600_000 + b"]")
    ran = run("--model", model, "--prompts", path)
    assert ran.code == 2
    assert "prompt 0 has 600001 tokens" in ran.err
    assert len(ran.err) < 1000


def test_row_21_an_empty_prompt_is_bos(tmp_path: Path, model: Path, run: Run) -> None:
    path, output = prompts_file(tmp_path, b'{"prompt": ""}\n{"prompt": [2]}'), tmp_path / "a.jsonl"
    ran = run("--model", model, "--prompts", path, "-o", output, "-n", 4)
    assert ran.code == 0
    first, second = answers(output)
    assert first["token_ids"] == second["token_ids"]
    assert ran.record["prompt_tokens"] == 2


def test_row_21_a_prompt_past_the_context_is_refused_whole(tmp_path: Path, model: Path, run: Run) -> None:
    output = tmp_path / "a.jsonl"
    ran = run("--model", model, "--prompt", "fine", "--prompt", "x" * 120, "-n", 10, "-o", output)
    assert (ran.code, ran.out) == (2, "")
    assert "prompt 1 has 121 tokens, with 10 to be generated 131 in all" in ran.err
    assert "is 128 tokens" in ran.err
    assert "nothing is ever cut off silently" in ran.err
    assert not output.exists()
    assert run("--model", model, "--prompt", "x" * 117, "-n", 10).code == 0, "128 tokens are not past it"


def test_row_21_a_prompt_longer_than_the_budget_is_pruned(model: Path, run: Run) -> None:
    ran = run("--model", model, "--prompt", "x" * 60, "-n", 4, "--kv-budget", 7)
    assert ran.code == 0
    assert ran.record["eviction"]["budget"] == 7


def not_a_number_for(character: str, folder: Path) -> None:
    """Makes the embedding of one character not a number; the head has weights of its own and stays whole."""
    weights = tensors()
    weights["model.decoder.embed_tokens.weight"][token(character)] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "eviction", [(), ("--hh-ratio", 0.3), ("--eviction", "streaming", "--kv-budget", 6), ("--do-sample", "--seed", 5)]
)
def test_row_22_numbers_that_are_not_finite_end_one_sequence(
    tmp_path: Path, model: Path, own_model: Path, run: Run, eviction: tuple[object, ...]
) -> None:
    not_a_number_for("@", own_model)
    path = prompts_file(tmp_path, b"hello you\nhello @ you\nanother one\nand one more\n", "prompts.txt")
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    arguments = ("--prompts", path, "-n", 5, *eviction)
    assert run("--model", model, *arguments, "-o", good).code == 0
    ran = run("--model", own_model, *arguments, "-o", bad)
    assert ran.code == 3
    assert "prompt 1: the model produced logits that are not finite" in ran.err
    assert "1 of 4 sequences ended in an error" in ran.err
    whole = {line["index"]: line for line in answers(good)}
    for line in answers(bad):
        if line["index"] == 1:
            assert (line["finish_reason"], line["token_ids"], line["text"]) == ("error", [], "")
            assert line["error"] == "the model produced logits that are not finite"
        else:
            assert line == whole[line["index"]], "a neighbour was affected"
    assert ran.record["generated_tokens"] == sum(len(line["token_ids"]) for line in answers(bad))


def test_row_22_every_weight_not_a_number(own_model: Path, run: Run) -> None:
    save_file(
        {name: torch.full_like(t, float("nan")) for name, t in tensors().items()}, own_model / "model.safetensors"
    )
    ran = run("--model", own_model, "--prompt", "abc", "--prompt", "de")
    assert ran.code == 3
    assert "2 of 2 sequences ended in an error" in ran.err


@pytest.mark.parametrize("count", [0, 1, 5])
def test_row_28_any_number_of_prompts(tmp_path: Path, model: Path, run: Run, count: int) -> None:
    """Blocks hold four sequences: none, one, and a last block that is not full."""
    text = "".join(f"prompt {i}{'+' * i}\n" for i in range(count))
    path, output = prompts_file(tmp_path, text.encode(), "prompts.txt"), tmp_path / "a.jsonl"
    ran = run("--model", model, "--prompts", path, "-o", output, "-n", 3, "--gbs", 2, "--num-gb", 2)
    assert ran.code == 0
    assert ran.record["sequences"] == count
    lines = answers(output)
    assert sorted(line["index"] for line in lines) == list(range(count))
    for line in lines:
        alone = tmp_path / f"{line['index']}.jsonl"
        assert run("--model", model, "--prompt", line["prompt"], "-o", alone, "-n", 3).code == 0
        assert answers(alone)[0]["token_ids"] == line["token_ids"]
    assert ("holds no prompts" in ran.err) == (count == 0)
    if count == 0:  # one sentence, and no report of zeros
        assert ran.err == f"{path} holds no prompts, so nothing is generated\n"


@pytest.mark.parametrize(
    "flags",
    [
        ("--hh-ratio", "0"), ("--hh-ratio", "-1"), ("--hh-ratio", "1.5"), ("--hh-ratio", "nan"), ("--hh-ratio", "inf"),
        ("--kv-budget", "0"), ("--kv-budget", "-3"), ("--compression-ratio", "1"), ("--compression-ratio", "nan"),
        ("--heavy-ratio", "0.6", "--recent-ratio", "0.6"), ("--heavy-ratio", "nan", "--recent-ratio", "0.1"),
        ("--eviction", "streaming", "--kv-budget", "4"), ("--recent", "9", "--kv-budget", "8"),
    ],
)  # fmt: skip
def test_row_29_budgets_that_make_no_sense(model: Path, run: Run, flags: tuple[str, ...]) -> None:
    ran = run("--model", model, "--prompt", "a prompt", *flags)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert len(ran.err.splitlines()) <= 3


@pytest.mark.parametrize("flags", [("--hh-ratio", 1), ("--kv-budget", 16), ("--eviction", "h2o", "--kv-budget", 500)])
def test_row_29_a_budget_that_reaches_the_length_is_the_full_cache(
    tmp_path: Path, model: Path, run: Run, flags: tuple[object, ...]
) -> None:
    arguments = ("--model", model, "--prompt", "ten tokens", "-n", 5, "--logprobs", 2)
    full, same = tmp_path / "full.jsonl", tmp_path / "same.jsonl"
    assert run(*arguments, "-o", full).code == 0
    assert run(*arguments, "-o", same, *flags).code == 0
    assert full.read_bytes() == same.read_bytes()


def test_row_29_a_budget_of_one(model: Path, run: Run) -> None:
    ran = run("--model", model, "--prompt", "some prompt", "-n", 5, "--kv-budget", 1)
    assert ran.code == 0
    assert ran.record["eviction"]["budget"] == 1


def test_arguments_of_another_kind_are_refused_in_words(model: Path) -> None:
    """Two pairs of two letters would else be scored as four texts, and the rest end in Python's own words."""
    with LLM(str(model), dtype="float32") as llm:
        for pairs, words in (
            (("ab", "cd"), "pair 0 is 'ab'"),
            (["abc"], "pair 0 is 'abc'"),
            ([("a", "b"), ("a", "b", "c")], "pair 1 is"),
            ([7], "pair 0 is 7"),
            (None, r"pairs is None\. needed a list of \(context, continuation\)"),
            (7, "pairs is 7"),
            ([("a", "\ud800")], "pair 0 holds half a surrogate pair"),
        ):
            with pytest.raises(UsageError, match=words):
                llm.score(pairs)  # type: ignore[arg-type]
        for prompts, kind in ((None, "NoneType"), (5, "int"), ((text for text in "ab"), "generator")):
            with pytest.raises(UsageError, match=f"prompts is {kind}, not a list"):
                llm.generate(prompts, max_new_tokens=2)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="prompt 1 holds half a surrogate pair"):
            llm.generate(["a", "b\ud800"], max_new_tokens=2)
        for talks in (None, 5, {"role": "user", "content": "a"}):
            with pytest.raises(UsageError, match="conversations is"):
                llm.chat(talks)  # type: ignore[arg-type]
        for params, words in (
            (5, "params are 5. needed SamplingParams, or a dict of its settings"),
            (["x"], "the settings of prompt 0 are 'x'"),
            ({"max_tokens": 2}, "did you mean 'max_new_tokens'"),
            ({3: 2}, "'3' is not a generation setting"),
        ):
            with pytest.raises(UsageError, match=words):
                llm.generate(["a"], params)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="beside a list of SamplingParams"):
            llm.generate(["a"], [{"max_new_tokens": 2}], seed=3)
        with pytest.raises(UsageError, match="stop_strings holds b'x'"):
            llm.generate(["a"], stop_strings=[b"x"])
    with pytest.raises(UsageError, match=r'policy is 5\. needed "auto", an OffloadPolicy'):
        LLM(str(model), policy=5)
    for settings, words in (
        ({"offload_dir": 5}, r"offload_dir is 5\. needed a text"),
        ({"dequantize": "no"}, r"dequantize is 'no'\. needed true or false"),
        ({"policy": {1: 2}}, "policy has no field 1"),
        ({"policy": {"prefill_chunk": 3}}, r"--prefill-chunk is 3\. needed at least 16"),
        ({"cache_bits": np.int64(3)}, r"cache_bits is .*3.*\. needed 16, 8, 4"),
    ):
        with pytest.raises(UsageError, match=words):
            LLM(str(model), **settings)
    with pytest.raises(UsageError, match="model is None"):
        LLM(None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"File name too long\. needed a model"):
        LLM("x" * 300)


def test_a_model_may_be_a_path_and_numbers_may_be_those_of_numpy(model: Path) -> None:
    """Seeds from `range` and from `np.arange` draw the same."""
    settings = {"do_sample": True, "max_new_tokens": 6, "no_repeat_ngram_size": 3, "logprobs": 1, "top_k": 9}
    with LLM(model, dtype="float32", seed=np.int64(1)) as llm:
        expected = llm.generate(["a"], settings, seed=3, eos_token_id=[7, 8])
        numbers = {name: np.uint8(value) if type(value) is int else value for name, value in settings.items()}
        for seed, eos in ((np.int64(3), np.array([7, 8])), (torch.tensor(3), [torch.tensor(7), np.uint8(8)])):
            assert llm.generate(["a"], numbers, seed=seed, eos_token_id=eos) == expected
        assert llm.generate(["a"], max_new_tokens=3, forced_eos_token_id=np.int64(5))[0].token_ids[-1] == 5


def test_a_dict_of_settings_is_as_good_as_sampling_params(model: Path) -> None:
    with LLM(str(model), dtype="float32") as llm:
        expected = llm.generate(["a", "b"], SamplingParams(max_new_tokens=3, logprobs=1))
        settings = {"max_new_tokens": 3, "logprobs": 1}
        for found in (
            llm.generate(["a", "b"], settings),
            llm.generate(["a", "b"], [settings, settings]),
            llm.generate(["a", "b"], {"max_new_tokens": 9, "logprobs": 1}, max_new_tokens=3),
        ):
            assert found == expected


def test_an_empty_stop_string_is_named_as_it_was_typed(tmp_path: Path, model: Path, run: Run) -> None:
    ran = run("--model", model, "--prompt", "a", "--stop", "x", "--stop", "")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: --stop is empty\n  needed one character or more\n")
    assert "stop_strings" not in ran.err


def test_files_of_another_kind_are_named_with_their_flags(tmp_path: Path, model: Path, run: Run) -> None:
    """A file in the place of the folder of prefixes ended in a traceback."""
    other = tmp_path / "other.json"
    other.write_text('{"type": "object"}')
    for flag, words in (
        ("--prefix-dir", "Not a directory\n  needed a folder that can be read\n  name another folder"),
        ("--policy", "OffloadPolicy has no key 'type'"),
    ):
        ran = run("--model", model, "--prompt", "a", flag, other)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"error: {flag} {other}: {words}")


def test_an_empty_folder_of_prefixes_is_none(
    tmp_path: Path, model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`H2O_FLEXGEN_PREFIX_DIR=` must not mean the current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    prompts = ("--prompt", "abcd" * 9, "--prompt", "abcd" * 8 + "xyz")
    assert run("--model", model, *prompts, "--prefix-dir", "").code == 0
    assert not list((tmp_path / "here").iterdir())
    full = "--prefix-dir /proc/none keeps nothing for later: No such file or directory\n"
    assert run("--model", model, *prompts, "--prefix-dir", "/proc/none").err.count(full) == 1


def test_a_temperature_of_zero_is_no_greedy_search_but_says_how_to_get_one(model: Path, run: Run) -> None:
    ran = run("--model", model, "--prompt", "a", "--temperature", 0)
    assert ran.code == 2
    assert ran.err.startswith("error: --temperature is 0.0\n  needed 1e-30 or more\n")
    assert "for greedy search leave it and --do-sample out" in ran.err
