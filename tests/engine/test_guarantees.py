"""A sequence's tokens alone and in blocks: families x dtypes x bits x policies x blocks, places and threads.

What is promised of them is in docs/guarantees.md. The whole product would take days and say little more than its
pairs: `--whole` takes every pair of any two of these, which are as many cases as there are families times policies;
else there is every pair of bits and a block, over which dtypes, families and policies take turns. scripts/guarantees.sh
runs all of it with one thread and with two, on kernels of AVX2 and on the processor's best; test_matrix.py has every
family and policy on every tier.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.reader import Request
from h2o_flexgen.engine.requests.sequence import RequestOutput
from h2o_flexgen.kernels import native
from tests.policy_matrix import LATER, POLICIES, PolicyRow
from tests.tiny import FAMILIES, prompts_of

LENGTHS = [5, 17, 9, 12]
PROMPTS, OTHERS = prompts_of(LENGTHS, seed=8), prompts_of(LENGTHS, seed=9)
NEW = 6
DTYPES = ("float32", "bfloat16")
BITS: dict[str, dict[str, Any]] = {
    "16": {},
    "weights 8": {"weight_bits": 8},
    "weights 4": {"weight_bits": 4, "weight_group": 32},
    "cache 8": {"cache_bits": 8},
    "cache 4": {"cache_bits": 4},
    "both 4": {"weight_bits": 4, "weight_group": 32, "cache_bits": 4},
}
DISK = {kind: {"disk": 1.0} for kind in ("weights", "cache", "hidden")}
BLOCKS: dict[str, dict[str, Any]] = {
    "one batch": {"policy": {"gpu_batch_size": 4}},
    "two threads": {"policy": {"gpu_batch_size": 4}, "threads": 2},
    "two batches on disk": {"policy": {"gpu_batch_size": 2, "num_gpu_batches": 2, **DISK}},
    "parts of prompts": {"policy": {"gpu_batch_size": 1, "num_gpu_batches": 3, "prefill_chunk": 16}},
}
EVERY = (*POLICIES, *LATER)


class Case(NamedTuple):
    """One model, and how its numbers are kept and left out."""

    family: str
    dtype: str
    bits: str
    policy: PolicyRow

    def __str__(self) -> str:
        return f"{self.family}-{self.dtype}-{self.bits}-{self.policy.name}"

    @property
    def settings(self) -> dict[str, Any]:
        """Of an engine. A budget that stays within what the model whose angles depend on the length was trained for."""
        budget = 3 if self.family == "phi3-longrope-beyond" else 8
        eviction = self.policy.eviction(**({} if self.policy.name == "full" else {"budget": budget}))
        return {"dtype": self.dtype, "eviction": eviction, **BITS[self.bits]}


def _turn(values: Any, number: int) -> Any:
    """The `number`-th of all values, over and over again."""
    return list(values)[number % len(values)]


def _selection() -> list[tuple[Case, str]]:
    """Every pair of bits and a block."""
    pairs = list(product(BITS, BLOCKS))
    turns = [(_turn(FAMILIES, 5 * i), _turn(DTYPES, i + i // 4), _turn(EVERY, i)) for i in range(len(pairs))]
    return [(Case(f, d, bits, policy), block) for (f, d, policy), (bits, block) in zip(turns, pairs, strict=True)]


def _whole() -> list[tuple[Case, str]]:
    """Every pair of a family and a policy, over which all else takes turns so that no other pair is missing."""
    return [
        (Case(family, _turn(DTYPES, f // 3 + p), _turn(BITS, f + p), policy), _turn(BLOCKS, f // 6 + p))
        for (f, family), (p, policy) in product(enumerate(FAMILIES), enumerate(EVERY))
    ]


def test_every_pair_is_there() -> None:
    rows = [(case.family, case.dtype, case.bits, case.policy.name, block) for case, block in _whole()]
    met = {pair for row in rows for pair in combinations(enumerate(row), 2)}
    columns = [FAMILIES, DTYPES, BITS, [policy.name for policy in EVERY], BLOCKS]
    assert len(met) == sum(len(one) * len(other) for one, other in combinations(columns, 2))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = _whole() if metafunc.config.option.whole else _selection()
        metafunc.parametrize(("case", "block"), cases, ids=str)


def answers(llm: Engine, prompts: list[list[int]], places: Any, draws: bool) -> dict[int, RequestOutput]:
    """Of these prompts, by their places; every second one is drawn, if any are."""
    rows = []
    for place in places:
        drawn: dict[str, Any] = {"do_sample": True, "seed": 3} if draws and place % 2 else {}
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=0, **drawn)
        rows += llm.read(Request(prompts[place], params, place, place))
    return {row.index: output for row, output in llm.run(rows)}


@pytest.fixture(scope="module")
def alone(checkpoint: Any, pytestconfig: pytest.Config) -> Iterator[Callable[[Case], list[RequestOutput]]]:
    """`alone(case)`: what comes of each prompt by itself; held against what `--tokens FILE` has, or kept there."""
    path = pytestconfig.option.tokens and Path(pytestconfig.option.tokens)
    before = json.loads(path.read_text()) if path and path.exists() else {}

    kept: dict[str, list[RequestOutput]] = {}

    def make(case: Case) -> list[RequestOutput]:
        if str(case) in kept:
            return kept[str(case)]
        with Engine(checkpoint(case.family)[1], policy={}, **case.settings) as llm:
            found = [answers(llm, PROMPTS, [place], case.dtype == "float32")[place] for place in range(len(PROMPTS))]
        if case.dtype == "float32":
            tokens = [output.token_ids for output in found]
            assert before.setdefault(str(case), tokens) == tokens, "with other threads or kernels it was other tokens"
        kept[str(case)] = found
        return found

    yield make
    if path:
        path.write_text(json.dumps(before))


def test_alone_and_in_any_block(case: Case, block: str, checkpoint: Any, alone: Any) -> None:
    """The same tokens in float32. In 16 bits these models have the same ones, too, where all products are our own, but
    for the rounding of attention in parts of prompts; and beside others of the same lengths the same bits."""
    place, before = BLOCKS[block], torch.get_num_threads()
    drawn, own = case.dtype == "float32", native.library() is not None and not native.has_matrix_unit()
    expected = alone(case)
    torch.set_num_threads(place.get("threads", before))
    try:
        with Engine(checkpoint(case.family)[1], policy=place["policy"], **case.settings) as llm:
            found = answers(llm, PROMPTS, range(len(PROMPTS)), drawn)
            beside = answers(llm, [PROMPTS[0], *OTHERS[1:]], range(len(PROMPTS)), drawn)
    finally:
        torch.set_num_threads(before)
    if case.dtype == "float32" or (own and "prefill_chunk" not in place["policy"]):
        assert [found[i].token_ids for i in range(len(PROMPTS))] == [output.token_ids for output in expected]
        assert beside[0].token_ids == expected[0].token_ids
    if case.dtype == "bfloat16" and own:
        assert beside[0].token_ids == found[0].token_ids
        assert beside[0].logprobs == found[0].logprobs
