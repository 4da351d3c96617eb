"""Text to token ids and back: what transformers' AutoTokenizer gives for the same folder, and text as it grows."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from h2o_flexgen.config.eviction import Budget, EvictionConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests import tokenizer
from h2o_flexgen.engine.requests.reader import RequestReader
from h2o_flexgen.engine.requests.sequence import Sequence
from h2o_flexgen.engine.requests.tokenizer import Decode, TextCodec, find_stop, text_of
from h2o_flexgen.errors import ModelError, UsageError
from tests.cost.machines import TINY
from tests.engine import tokenizer_folders as folders
from tests.seeds import python_random
from tests.tiny import FAMILIES

Opened = Callable[[str], TextCodec]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = folders.FOLDERS[name](tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return make


@pytest.fixture(scope="module")
def opened(folder: Callable[[str], Path]) -> Opened:
    return lambda name: codec_of(folder(name))


def codec_of(path: Path) -> TextCodec:
    codec = TextCodec.open(path)
    assert codec is not None
    return codec


def auto(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(path), local_files_only=True)


def agree(codec: TextCodec, tokenizer: Any) -> None:
    for text in folders.TEXTS:
        ids = tokenizer(text).input_ids
        assert codec.encode(text) == ids, text
        assert codec.encode_bare(text) == tokenizer(text, add_special_tokens=False).input_ids, text
        assert codec.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True), text
    source = python_random(3)
    for length in (0, 1, 2, 30):
        ids = [source.randrange(len(tokenizer)) for _ in range(length)]
        assert codec.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True), ids


@pytest.mark.parametrize("name", folders.FOLDERS)
def test_as_transformers_has_it(folder: Callable[[str], Path], name: str) -> None:
    codec = codec_of(folder(name))
    agree(codec, auto(folder(name)))
    assert (codec.transformed is None) == (name.startswith("plain"))


@pytest.mark.parametrize("family", sorted({row.family for row in FAMILIES.values()}))
def test_plain_means_the_same_in_every_family(tmp_path: Path, family: str) -> None:
    """Should transformers put a class of its own in the place of a plain one, this tells."""
    path = folders.plain(folders.metaspace, family)(tmp_path / "model")
    codec = codec_of(path)
    agree(codec, auto(path))
    assert (codec.transformed is None) == (family != "qwen2")


@pytest.mark.parametrize("name", ["metaspace", "byte_level", "words"])
def test_a_tokenizer_json_alone_means_what_it_says(tmp_path: Path, name: str) -> None:
    made: Tokenizer = getattr(folders, name)()
    made.enable_truncation(3)
    made.enable_padding(length=50)
    codec = codec_of(folders.write(tmp_path / "model", "llama", made))
    made.no_truncation()
    made.no_padding()
    for text in folders.TEXTS:
        assert codec.encode(text) == made.encode(text).ids
    assert codec.transformed is None


def test_transformers_is_imported_where_it_is_needed_alone(
    folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing it, and building a class of its own for 262,144 tokens, took most of the seconds before a run."""
    light = [*map(folder, ("plain-words", "plain-gemma", "gemma-chat", "llama3")), large(folder, tmp_path / "large")]
    heavy = folder("llama")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.setitem(sys.modules, name, None)  # so that it cannot be imported
    for path in light:
        assert codec_of(path).encode("The dog")
    with pytest.raises(ModelError, match="import of transformers halted"):
        codec_of(heavy)


def large(folder: Callable[[str], Path], path: Path) -> Path:
    """A tokenizer like Gemma's with a large vocabulary."""
    shutil.copytree(folder("plain-gemma"), path)
    state = json.loads((path / "tokenizer.json").read_text())
    vocabulary = state["model"]["vocab"]
    vocabulary.update({token["content"]: token["id"] for token in state["added_tokens"]})
    vocabulary.update({f"unused{number}": number for number in range(len(vocabulary), 1 << 17)})
    (path / "tokenizer.json").write_text(json.dumps(state))
    return path


@pytest.mark.parametrize("name", ["gemma-chat", "llama3"])
def test_a_chat_template_waits_until_it_is_asked_for(folder: Callable[[str], Path], name: str) -> None:
    codec = codec_of(folder(name))
    assert codec.transformed.chat_template == folders.TEMPLATE


@pytest.mark.parametrize("light", [True, False])
def test_code_in_the_folder_never_runs(tmp_path: Path, light: bool) -> None:
    path = folders.write(tmp_path / "model", "llama", folders.metaspace(), **({} if light else evil()))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "auto_map": {"AutoConfig": "evil.Config"}}))
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert codec_of(path).encode("The dog")[0] == folders.metaspace().token_to_id("<s>")
    (path / "tokenizer.json").unlink()
    if not light:
        with pytest.raises(ModelError, match=r"code of its own \(auto_map\), which is never run"):
            TextCodec.open(path)
    assert not (tmp_path / "ran").exists()


def evil() -> dict[str, Any]:
    return {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Fast"]}}


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TextCodec.open(None) is None
    assert TextCodec.open(folders.write(tmp_path / "none", "llama")) is None
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
        torn = folders.write(tmp_path / f"torn-{name}", "llama", None if name.endswith("model") else folders.words())
        (torn / name).write_text('{"torn')
        with pytest.raises(ModelError, match="cannot be read") as caught:
            TextCodec.open(torn)
        assert name.endswith("model") or f"cannot be read: {name}: " in str(caught.value)
    lonely = folders.write(tmp_path / "lonely", "llama", tokenizer_class="LlamaTokenizer")
    (lonely / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr(tokenizer, "_installed", lambda name: name != "sentencepiece")
    with pytest.raises(ModelError, match=r"and sentencepiece cannot be imported.*pip install"):
        TextCodec.open(lonely)


@pytest.mark.parametrize("model_type", ["opt", "qwen2", "gemma3_text", "gpt_neox", "cohere2"])
def test_a_folder_without_a_vocabulary(tmp_path: Path, model_type: str) -> None:
    """transformers makes these classes without one: every prompt would be empty."""
    path = folders.write(tmp_path / "model", model_type, padding_side="left")
    with pytest.raises(ModelError, match=r"has no vocabulary.*needed tokenizer\.json"):
        TextCodec.open(path)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": ["a"]}'),
        ("chat_template.json", '{"torn'),
        ("chat_template.json", "[1]"),
        ("chat_template.json", "[" * 100_000),
        ("chat_template.jinja", "\udcff"),
    ],
)
def test_a_chat_template_that_cannot_be_read(tmp_path: Path, file: str, text: str) -> None:
    path = folders.write(tmp_path / "model", "llama", folders.words(), tokenizer_class="PreTrainedTokenizerFast")
    (path / file).write_text(text, errors="surrogateescape")
    with pytest.raises(ModelError, match=f"cannot be read: ({file}|.*'utf-8'|string indices)"):
        _ = codec_of(path).transformed


def row_of(prompt: list[int], new: list[int], *stops: str) -> Sequence:
    return Sequence(
        index=0,
        sample=0,
        row_id=0,
        prompt_ids=prompt,
        params=SamplingParams(stop_strings=stops),
        budget=Budget(total=9, heavy=4, recent=5, sinks=0, full=False),
        eos=frozenset(),
        token_ids=new,
    )


def continuation(decode: Decode, prompt: list[int], new: list[int]) -> str:
    before, whole = decode(prompt), decode([*prompt, *new])
    while not whole.startswith(before):
        before = before[:-1]
    return whole[len(before) :]


@pytest.mark.parametrize("name", ["llama", "llama-sentencepiece", "gemma-sentencepiece", "opt", "plain-words"])
def test_the_text_of_an_answer_begins_with_its_space(opened: Opened, name: str) -> None:
    """A sentencepiece decoder takes the first space away, which is right for a text and wrong for the end of one."""
    codec = opened(name)
    ids, start = codec.encode("The quick brown fox"), len(codec.encode("The quick"))
    assert text_of(codec, row_of(ids[:start], ids[start:])) == " brown fox"
    row = row_of(ids[:start], ids[start:], "own")
    row.stop_string = find_stop(codec.decode, row)
    assert (row.stop_string, text_of(codec, row)) == ("own", " br")
    assert find_stop(codec.decode, row_of(ids[:start], ids[start:], "quick", "fog")) is None
    assert text_of(None, row) is None


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_a_character_between_prompt_and_answer_is_the_answers(opened: Opened, name: str) -> None:
    codec = opened(name)
    ids = codec.encode("ab 🦊 cd")
    fox = ids.index(codec.encode("ab 🦊")[-1])
    for cut in (fox - 1, fox):
        assert text_of(codec, row_of(ids[:cut], ids[cut:])) == "🦊 cd"


@pytest.mark.parametrize("name", ["llama", "gemma-chat", "opt"])
def test_a_character_that_is_cut_leaves_those_before_it_whole(opened: Opened, name: str) -> None:
    """A decoder with byte fallback makes U+FFFD of every byte beside those that are no text."""
    codec = opened(name)
    ids = codec.encode("ab 🦊🦊")
    fox = len(ids) - len(codec.encode("ab 🦊"))
    for cut in range(1, fox):
        for eos in ([], codec.encode_bare("</s>")[-1:] if name == "llama" else []):
            assert codec.decode(ids[:-cut] + eos).rstrip("\ufffd") == "ab 🦊"


@pytest.mark.parametrize("name", ["llama", "opt", "plain-words", "plain-pieces", "cleaned"])
@pytest.mark.parametrize("seed", range(8))
def test_stop_strings_are_found_when_the_text_has_them(opened: Opened, name: str, seed: int) -> None:
    """Token by token, against decoding everything each time."""
    codec, source = opened(name), python_random(seed)
    ids = [
        token
        for _ in range(12)
        for token in codec.encode_bare(source.choice([*folders.CORPUS, "世界🦊世界", "🦊" * 9]))
    ]
    ids = ids[source.randrange(40) :]
    start = source.randrange(1, 60)
    prompt, new = ids[:start], ids[start:]
    text = continuation(codec.decode, prompt, new)
    place = source.randrange(len(text) - 9)
    stops = [text[place : place + source.randrange(1, 9)], "no such text", text[place + 3 : place + 9]]
    for n in range(1, len(new) + 1):
        row = row_of(prompt, new[:n], *stops)
        whole = continuation(codec.decode, prompt, new[:n])
        expected = min((stop for stop in stops if stop in whole), key=whole.index, default=None)
        row.stop_string = find_stop(codec.decode, row)
        assert row.stop_string == expected, (n, whole, stops)
        if expected is not None:
            assert text_of(codec, row) == whole[: whole.index(expected)]
            return
    raise AssertionError("the stop string was taken from the text")


@pytest.mark.parametrize("name", ["llama", "opt", "plain-words"])
def test_stop_strings_count_after_the_fewest_new_tokens_only(opened: Opened, name: str) -> None:
    """Against every place in the text: a string counts if it ends after them, whenever it began."""
    codec = opened(name)
    ids = codec.encode_bare("The dog 🦊 saw the dog 🦊 and the dog 🦊 ran") + codec.encode_bare("🦊 the dog")
    prompt, new, stops = ids[:2], ids[2:], ["dog", "🦊", "the d"]
    for fewest in range(len(new)):
        early = len(continuation(codec.decode, prompt, new[:fewest]).rstrip("\ufffd"))
        for n in range(1, len(new) + 1):
            row = row_of(prompt, new[:n], *stops)
            row.params = replace(row.params, min_new_tokens=fewest, max_new_tokens=len(new))
            whole = continuation(codec.decode, prompt, new[:n])
            every = ((i, stop) for i in range(len(whole)) for stop in stops if whole.startswith(stop, i))
            first = min(((i, stop) for i, stop in every if i + len(stop) > early), default=None) if n > fewest else None
            row.stop_string = find_stop(codec.decode, row)
            assert row.stop_string == (first and first[1]), (fewest, n, whole)
            if first is not None:
                assert text_of(codec, row) == whole[: first[0]]
                break


def test_a_stop_string_costs_a_tail_only(opened: Opened) -> None:
    """Of 4,000 tokens, a third of them bytes of characters, a step decodes some dozens."""
    codec, lengths = opened("llama"), []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return codec.decode(ids)

    ids = codec.encode_bare("The dog🦊☃" * 500)
    assert len(ids) > 4000
    for n in range(3990, 4000):
        assert find_stop(decode, row_of(ids[:100], ids[100:n], "cat", "☃X")) is None
    assert max(lengths) < 100


PAIRS = [("The dog", " does not mind."), ("The do", "g does"), ("", "The dog"), ("<s> spelt", " out</s>"), ("a ", " ")]


@pytest.mark.parametrize(
    ("single", "opening"),
    [("$A", []), ("<s> $A", [1]), ("<s> $A </s>", [1]), ("$A </s>", []), ("<s> <pad> $A </s> </s>", [1, 3])],
)
def test_pairs_are_opened_and_never_closed(single: str, opening: list[int], tmp_path: Path) -> None:
    """Special tokens are added before the context alone, whatever the tokenizer would add to each text."""
    made = folders.byte_level()
    special = [(token, made.token_to_id(token)) for token in ("<s>", "</s>", "<pad>") if token in single]
    if special:
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    codec = codec_of(folders.write(tmp_path / "model", "opt", made))
    assert codec.encode("dog") == [*opening, *codec.encode_bare("dog"), *[2] * single.count("</s>")]
    rows = RequestReader(TINY, EvictionConfig(), codec, 0).read_scored(PAIRS)
    for row, (context, continuation) in zip(rows, PAIRS, strict=True):
        parts = [made.encode(text, add_special_tokens=False).ids for text in (context, continuation)]
        whole = made.encode(context + continuation, add_special_tokens=False).ids
        together = whole[: len(parts[0])] == parts[0]
        assert row.prompt_ids == ([*opening, *parts[0]] or [TINY.bos_token_id])
        assert row.forced == (whole[len(parts[0]) :] if together else parts[1]), (context, continuation)


def test_pairs_of_texts_and_token_ids(opened: Opened) -> None:
    codec = opened("plain-words")
    read = RequestReader(TINY, EvictionConfig(), codec, 0).read_scored
    bare, opening = codec.encode_bare, codec.encode("")
    assert len(opening) == 1
    found = read([("dog", [5, 6]), ([7, 8], "dog"), ([], [5]), ([], "dog")])
    assert [row.prompt_ids for row in found] == [[*opening, *bare("dog")], [7, 8], [2], [2]]
    assert [row.forced for row in found] == [[5, 6], bare("dog"), [5], bare("dog")]
    with pytest.raises(UsageError, match="pair 1 has an empty continuation"):
        read([("dog", "dog"), ("dog", "")])
    with pytest.raises(UsageError, match="pair 0 is text, and this model has no tokenizer"):
        RequestReader(TINY, EvictionConfig(), None, 0).read_scored([("dog", [5])])
