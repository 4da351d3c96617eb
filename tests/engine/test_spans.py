"""Spans in whole models: against the oracle on several tiers, in characters and tokens, in outputs and in records."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from h2o_flexgen import Prompt, Span
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import UsageError
from tests.engine.compare import CLOSE, History, assert_outputs_equal
from tests.engine.test_packed_caches import PLACES
from tests.oracles.model import oracle_generate
from tests.oracles.packed import rounding
from tests.oracles.spans import with_spans
from tests.policy_matrix import LATER, POLICIES, THEN_H2O
from tests.tiny import WINDOW, TooCloseToCall, decided, prompts_of

ROWS = {row.name: row for row in (*POLICIES, *LATER, *THEN_H2O)}
CASES = [
    ("h2o", "whitelist", "llama-gqa", "cpu", 16, {}),
    ("h2o", "fair", "opt", "disk", 8, {}),
    ("streaming", "fair", "gemma3", "gpu", 16, {"budget": WINDOW - 3}),
    ("streaming", "whitelist", "gemma3", "cpu", 8, {"budget": WINDOW - 3}),
    ("tova", "fair", "llama-gqa", "disk", 16, {}),
    ("scissorhands", "whitelist", "gpt-neox", "gpu", 16, {"ratio": 0.6}),
    ("snapkv+h2o", "fair", "mistral", "gpu", 16, {"budget": WINDOW - 3}),
    ("kvzip+h2o", "whitelist", "opt", "disk", 16, {"ratio": 0.6}),
    ("expected_attention", "fair", "llama-gqa", "cpu", 16, {"ratio": 0.8}),
]
SPANS = {23: ((2, 4), (9, 12)), 40: ((30, 33),), 12: ()}


@pytest.mark.turns
@pytest.mark.parametrize(("policy", "rule", "name", "place", "bits", "changes"), CASES)
def test_engine_equals_the_oracle(
    policy: str, rule: str, name: str, place: str, bits: int, changes: dict, checkpoint, history: History
) -> None:
    (model, folder), row = checkpoint(name), ROWS[policy]
    eviction = row.eviction(**{"ratio": 0.5, **changes} if "budget" not in changes else changes, spans=rule)
    oracle = rounding(with_spans(row.oracle, rule), bits, scaled=True)
    new, close = (6, CLOSE) if bits == 16 else (3, 1e-3)

    def answer(row_id: int, prompt: list[int]):
        run = oracle_generate(model, prompt, new, oracle, eviction, row_id, SPANS[len(prompt)])
        if run.closest <= close:
            raise TooCloseToCall(f"{run.closest} between two scores or logits")
        return run

    prompts, runs = decided(prompts_of(list(SPANS)), answer)
    marked = [Prompt(ids, [Span(a, b, f"at {a}", keep=True) for a, b in SPANS[len(ids)]]) for ids in prompts]
    history.clear()
    with Engine(
        folder, dtype="float32", eviction=eviction, seed=eviction.seed, cache_bits=bits, **PLACES[place]
    ) as llm:
        outputs = llm.generate(marked, max_new_tokens=new, ignore_eos=True, logprobs=0)
        record = llm.last_record
    for i, (run, output) in enumerate(zip(runs, outputs, strict=True)):
        assert_outputs_equal(run, output, history, i, 1e-3 if bits == 16 else 1e-2)
        for a, b in SPANS[len(prompts[i])]:
            for when, step in (("prefill", run.kept[0]), ("decode", run.kept[-1])):
                heads = [len(head & set(range(a, b))) for layer in step for head in layer]
                assert output.kept[f"at {a}"][when] == pytest.approx(sum(heads) / len(heads))
    assert outputs[2].kept is None
    assert record.kept["at 9"] == outputs[0].kept["at 9"]
    assert record.kept["at 9"]["tokens"] == 3


TEXT = "Never say the word. Remember: the code of the red door is 1234. Tell a story about a cat and a dog at sea. "


def test_characters_and_tokens_mark_the_same() -> None:
    first, end = TEXT.index("Remember"), TEXT.index(" Tell")
    asked = EvictionConfig("h2o", ratio=0.8, spans="whitelist")
    with Engine("demo", eviction=asked) as llm:
        by_text = Prompt(TEXT, [Span(first, end, "fact", keep=True, unit="char")])
        out = llm.generate([by_text], max_new_tokens=4, ignore_eos=True)[0]
        ids = llm.model.codec.encode(TEXT)
        tokens = out.kept["fact"]["tokens"]
        assert out.kept["fact"] == {"tokens": tokens, "prefill": tokens, "decode": tokens}
        starts = [i for i in range(len(ids)) if "Remember" in llm.model.codec.decode(ids[i : i + tokens]).strip()[:9]]
        by_ids = Prompt(ids, [Span(starts[0], starts[0] + tokens, "fact", keep=True)])
        assert llm.generate([by_ids], max_new_tokens=4, ignore_eos=True)[0].token_ids == out.token_ids
        score = llm.score([(by_text, " The cat")])[0]
        assert score.kept["fact"]["prefill"] == tokens
        plain = llm.score([(TEXT, " The cat")])[0]
        assert plain.kept is None
        assert plain.logprob != score.logprob


span = partial(Span, 0, 3, "a")
BAD = [
    (lambda: Prompt("abcdef", [span(), Span(2, 4, "b")]), "overlap"),
    (lambda: Prompt("abcdef", [span(unit="char"), Span(3, 4, "b")]), "needed one unit"),
    (lambda: Prompt([1, 2], [span(unit="char")]), "token ids"),
    (lambda: Prompt("abc", [Span(2, 2, "a")]), "is empty"),
    (lambda: Prompt("abc", [Span(-1, 2, "a")]), "needed at least 0"),
    (lambda: Prompt("abc", [{"start": 1, "end": 2}]), "lacks"),
    (lambda: Prompt("abc", [{"start": 1, "end": 2, "name": "a", "of": 1}]), "no key 'of'"),
    (lambda: Prompt("abc", {"start": 1}), "needed a list"),
]


@pytest.mark.parametrize(("make", "found"), BAD)
def test_spans_that_make_no_sense_are_refused(make, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        make()


def test_spans_beyond_the_prompt_name_it() -> None:
    with Engine("demo", eviction=EvictionConfig("h2o", ratio=0.5, spans="whitelist")) as llm:
        for unit, what in (("char", "characters"), ("token", "tokens")):
            with pytest.raises(UsageError, match=f"prompt 1: span 'a' .* beyond the prompt, which has .* {what}"):
                llm.generate(["Hello", Prompt("Hello", [Span(0, 99, "a", unit=unit)])], max_new_tokens=2)
        with pytest.raises(UsageError, match="spans to keep have"):
            llm.generate([Prompt(TEXT, [Span(0, len(TEXT), "a", True, "char")])], max_new_tokens=2)


def test_spans_are_counted_without_a_rule() -> None:
    prompt = Prompt(TEXT, [Span(0, 19, "first", keep=True, unit="char")])
    with Engine("demo", eviction=EvictionConfig("local", ratio=0.4)) as llm:
        marked = llm.generate([prompt, TEXT], max_new_tokens=4, ignore_eos=True)
        assert marked[0].token_ids == marked[1].token_ids
        assert marked[0].kept["first"]["decode"] == 0
        assert replace(marked[0], index=1, kept=None) == marked[1]
