"""Token choice against transformers' logits processors; seeds, stop strings and errors row by row."""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as checked
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import EpsilonLogitsWarper, EtaLogitsWarper, TopHLogitsWarper

from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.sequence import Hooks, Sequence
from h2o_flexgen.engine.requests.tokenizer import text_of
from h2o_flexgen.engine.sampling import processors, sampler
from h2o_flexgen.engine.sampling.processors import Chooser, Group
from h2o_flexgen.engine.sampling.sampler import Sampler
from h2o_flexgen.errors import UsageError
from tests.kernels.tape import NoHostWork
from tests.seeds import torch_generator
from tests.tiny import VOCAB, prompts_of

EOS = 2


def row(prompt: list[int] | None = None, seed: int = 0, index: int = 0, sample: int = 0, **settings: Any) -> Sequence:
    params = SamplingParams(**{"max_new_tokens": 50, **settings})
    budget = Budget(total=100, heavy=0, recent=100, sinks=0, full=True)
    return Sequence(index, sample, index, prompt or [EOS, 5, 7], params, budget, frozenset({EOS}), seed=seed)


def draw(sequence: Sequence, logits: torch.Tensor, steps: int) -> list[int]:
    for _ in range(steps):
        Sampler().step([sequence], logits)
    return sequence.token_ids


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.8},
        {"top_k": 0, "repetition_penalty": 1.8},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers(settings: dict[str, Any]) -> None:
    logits = torch.randn(1, 12) * 2
    prompt = [3, 4, 4, 9]
    expected = RepetitionPenaltyLogitsProcessor(settings.get("repetition_penalty", 1.0))(
        torch.tensor([prompt]), logits.clone()
    )
    expected = TemperatureLogitsWarper(float(settings.get("temperature", 1.0)))(None, expected)
    if settings.get("top_k", 50):
        expected = TopKLogitsWarper(settings.get("top_k", 50))(None, expected)
    expected = TopPLogitsWarper(settings.get("top_p", 1.0))(None, expected).softmax(-1)[0]
    rows = [row(prompt, index=index, do_sample=True, **settings) for index in range(4000)]
    for sequence in rows:
        sequence.eos = frozenset()
    Sampler().step(rows, logits.expand(len(rows), -1))
    found = torch.tensor([sequence.token_ids[0] for sequence in rows]).bincount(minlength=12) / len(rows)
    assert not found[expected == 0].any()
    assert torch.allclose(found, expected, atol=0.035)  # 4 standard deviations of a share of 0.4


WARPERS: dict[str, Any] = {
    "temperature": TemperatureLogitsWarper,
    "top_h": TopHLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
    "epsilon_cutoff": EpsilonLogitsWarper,
    "eta_cutoff": EtaLogitsWarper,
}
"""In the order in which transformers applies them."""


@checked(deadline=None)  # beside other work an example may take long
@given(
    seed=st.integers(0, 1000),
    ties=st.booleans(),
    settings=st.fixed_dictionaries(
        {"top_k": st.integers(1, 40)},
        optional={
            "temperature": st.sampled_from([0.3, 0.9, 2.5]),
            "top_p": st.sampled_from([0.0, 0.2, 0.9, 0.999]),
            "min_p": st.sampled_from([0.01, 0.3, 1.0]),
            "typical_p": st.sampled_from([0.2, 0.9]),
            "top_h": st.sampled_from([0.3, 0.8]),
            "epsilon_cutoff": st.sampled_from([0.001, 0.1]),
            "eta_cutoff": st.sampled_from([0.001, 0.1]),
        },
    ),
)
def test_the_scores_that_tokens_are_drawn_from_are_those_of_transformers(seed, ties, settings) -> None:
    logits = torch.randn(30, generator=torch_generator(seed)) * 3
    logits = logits.round() if ties else logits
    expected = logits[None]
    for name, warper in WARPERS.items():
        if name in settings:
            expected = warper(settings[name])(None, expected)
    sequence = row(do_sample=True, **settings)
    sequence.hooks = Hooks(context=sequence.prompt_ids, scores=[])
    chooser = Chooser(sequence, {}, logits.device)
    before = logits.clone()
    token = int(chooser.choose(sequence, logits[None]))
    assert torch.equal(sequence.hooks.scores[0], expected[0])
    assert torch.isfinite(expected[0, token])
    assert torch.equal(logits, before)
    alone = row(do_sample=True, **settings)
    Sampler().step([alone], logits[None])
    assert alone.token_ids == [token], "whether the row is looked at or not"
    number = float(torch.empty(1, dtype=torch.float64).uniform_(generator=row().generator(logits.device)))
    sums = list(accumulate(expected[0].softmax(-1).tolist()))
    assert token == next(i for i, reached in enumerate(sums) if reached > number * sums[-1]), (
        "by one number of the row's"
    )


def test_greedy_rows_keep_to_one_max_over_the_batch(monkeypatch) -> None:
    """Rows without options cost nothing of their own, and those with min_new_tokens nothing once they have them."""
    chosen: list[int] = []
    choose = Group.choose

    def noted(group: Group, rows: list[Sequence], logits: torch.Tensor, members: list[int]) -> torch.Tensor:
        chosen.extend(row.index for row in rows)
        return choose(group, rows, logits, members)

    monkeypatch.setattr(Group, "choose", noted)
    monkeypatch.delattr(Chooser, "choose")
    rows = [row(index=0), row(index=1, min_new_tokens=2), row(index=2, stop_strings=("x",)), row(index=3, logprobs=1)]
    rows[0].hooks = Hooks(context=rows[0].prompt_ids)
    sampler = Sampler()
    for _ in range(5):
        sampler.step(rows, torch.randn(4, 20).index_fill(1, torch.tensor([EOS]), -9.0))
    assert chosen == [1, 1]
    assert all(len(each.token_ids) == 5 for each in rows)


@pytest.mark.slow
def test_the_engine_does_without_transformers_for_the_usual_options() -> None:
    code = (
        "import sys, torch\nfrom h2o_flexgen import LLM\n"
        "settings = dict(max_new_tokens=3, min_new_tokens=2, repetition_penalty=1.2, do_sample=True,"
        " temperature=0.7, top_k=9, top_p=0.9, min_p=0.1)\n"
        "with LLM('demo') as llm:\n"
        "    llm.generate([[2, 5]], **settings)\n"
        "    llm.generate_ids(torch.tensor([[2, 5]]), **settings)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr


def test_a_score_says_which_tokens_are_greedy(llm) -> None:
    prompt = prompts_of([9])[0]
    tokens = llm.generate([prompt], max_new_tokens=4, ignore_eos=True)[0].token_ids
    other = [*tokens[:2], (tokens[2] + 1) % VOCAB, tokens[3]]
    greedy, not_greedy = llm.score([(prompt, tokens), (prompt, other)])
    assert greedy.token_is_greedy == [True] * 4
    assert not_greedy.token_is_greedy[:3] == [True, True, False]
    assert (greedy.is_greedy, not_greedy.is_greedy) == (True, False)


def test_max_time_ends_a_sequence_after_its_next_token(llm) -> None:
    outputs = llm.generate(prompts_of([4, 9]), max_new_tokens=50, max_time=0.0, ignore_eos=True)
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(1, "length")] * 2


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.0}], ids=str)
def test_an_eos_that_is_no_token_is_none(llm, settings: dict[str, Any]) -> None:
    """That of another model: forbidding it ended the call, and with it all other rows."""
    params = {"max_new_tokens": 4, "min_new_tokens": 2, **settings}
    prompts = prompts_of([4, 9])
    wanted = [output.token_ids for output in llm.generate(prompts, **params, eos_token_id=())]
    for eos in (VOCAB, (VOCAB, 10**30), -1):
        assert [output.token_ids for output in llm.generate(prompts, **params, eos_token_id=eos)] == wanted


def test_greedy_repetition_penalty_and_min_new_tokens_equal_transformers() -> None:
    prompt, logits = [3, 4, 4, 9], torch.randn(1, 12)
    logits[0, EOS] = 10.0
    sequence, ids = row(prompt, repetition_penalty=1.5, min_new_tokens=3), torch.tensor([prompt])
    for _ in range(5):
        scores = RepetitionPenaltyLogitsProcessor(1.5)(ids, logits.clone())
        scores = MinNewTokensLengthLogitsProcessor(len(prompt), 3, EOS, device="cpu")(ids, scores)
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
        Sampler().step([sequence], logits)
        if ids[0, -1] == EOS:
            break
    assert sequence.token_ids == ids[0, len(prompt) :].tolist()
    assert sequence.finish_reason == "stop"


def test_presence_and_frequency_penalties_count_new_tokens_alone() -> None:
    prompt, logits = [3, 3, 4], torch.tensor([[0.0, 1.0, 2.0, 3.9, 4.0, 3.0]])
    sequence, found = row(prompt, presence_penalty=0.5, frequency_penalty=0.25, ignore_eos=True), list[int]()
    for _ in range(8):
        scores = [
            float(logits[0, token]) - 0.5 * (token in found) - 0.25 * found.count(token)
            for token in range(logits.shape[1])
        ]
        found.append(scores.index(max(scores)))
        Sampler().step([sequence], logits)
    assert sequence.token_ids == found
    assert {4, 3, 5} <= set(found)


def test_draws_depend_on_seed_prompt_and_sample_alone() -> None:
    logits = torch.randn(1, 50)
    alone = draw(row(do_sample=True, seed=7, index=3), logits, 10)
    beside = [row(do_sample=True, seed=7, index=i) for i in (9, 3, 1)]
    for _ in range(10):
        Sampler().step(beside, logits.expand(3, -1))
    assert beside[1].token_ids == alone
    for other in ({"seed": 8, "index": 3}, {"seed": 7, "index": 4}, {"seed": 7, "index": 3, "sample": 1}):
        assert draw(row(do_sample=True, **other), logits, 10) != alone


TOGETHER: list[dict[str, Any]] = [
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8},
    {"do_sample": True, "top_k": 0, "top_p": 0.7, "min_p": 0.02, "renormalize_logits": True},
    {"do_sample": True, "temperature": 1.7, "repetition_penalty": 1.6, "min_new_tokens": 5},
    {"repetition_penalty": 4.0, "logprobs": 3},
    {"min_new_tokens": 3, "logprobs": 0},
    {"do_sample": True, "typical_p": 0.6, "logprobs": 2},
    {},
]


@pytest.mark.parametrize(("vocabulary", "most"), [(40, 9), (70_001, 5)])
def test_rows_get_together_what_they_get_alone(vocabulary: int, most: int, monkeypatch) -> None:
    """Bit for bit, logarithms included, whoever is beside them, whoever leaves, and however many are processed at once;
    rows whose scores are recorded get the same, and those go one by one."""
    monkeypatch.setattr(processors, "_CHUNK", 3 * vocabulary)
    monkeypatch.setattr(sampler, "_CHUNK", 2 * vocabulary)
    noise = torch_generator(4)
    steps = torch.randn(most, 24, vocabulary, generator=noise) * 4

    def rows() -> list[Sequence]:
        made = []
        for i in range(24):
            prompt = [EOS, *torch.randint(3, 40, (1 + i % 5,), generator=noise).tolist()]
            new = min(most, 4 + i % 6)
            made.append(row(prompt, seed=3, index=i, max_new_tokens=new, ignore_eos=i % 2 == 0, **TOGETHER[i % 8]))
        return made

    noise.manual_seed(5)
    beside, one = rows(), Sampler()
    noise.manual_seed(5)
    alone = rows()
    noise.manual_seed(5)
    watched = rows()
    for each in watched:
        each.hooks = Hooks(context=each.prompt_ids, scores=[])
    for number, logits in enumerate(steps):
        going = [i for i, each in enumerate(beside) if not (each.finished and number % 2)]
        one.step([beside[i] for i in going], logits[going])
        for kept in (alone, watched):
            for i, each in enumerate(kept):
                if not each.finished:
                    Sampler().step([each], logits[i : i + 1])
    for found, expected, seen in zip(beside, alone, watched, strict=True):
        assert found.token_ids == expected.token_ids == seen.token_ids
        assert found.finish_reason == expected.finish_reason is not None
        assert found.logprobs == expected.logprobs
        assert found.top_logprobs == expected.top_logprobs
    assert len({tuple(each.token_ids) for each in beside}) == 24


@pytest.mark.parametrize("settings", TOGETHER[:6], ids=str)
def test_equal_settings_cost_one_question(settings: dict[str, Any], monkeypatch) -> None:
    """However many rows there are, the device is asked once, and once more for log-probabilities. What it is sent goes
    without a wait: numbers of the host, and then a copy."""
    asked: list[int] = []
    lists, tensor = sampler.lists, torch.tensor
    monkeypatch.setattr(sampler, "lists", lambda tensors: asked.append(len(tensors)) or lists(tensors))

    def on_the_host(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        assert device is None, "this would wait"
        with _disable_current_modes():
            return tensor(*args, **options)

    logits = torch.randn(16, 50)
    for count in (2, 16):
        chooses, rows = Sampler(), [row(index=i, **settings) for i in range(count)]
        rows[1].finish_reason = "stop"  # so that the others are no neighbours
        chooses.step(rows, logits[:count])
        monkeypatch.setattr(torch, "tensor", on_the_host)
        for _ in range(3):
            asked.clear()
            with NoHostWork():
                chooses.step(rows, logits[:count])
            assert len(asked) == 1 + ("logprobs" in settings)
        monkeypatch.setattr(torch, "tensor", tensor)


def test_numbers_come_from_a_device_by_one_copy() -> None:
    """Exactly: the least float32 beside the largest ids."""
    tensors = [torch.tensor([1.1, -3e-45, float("inf")]), torch.tensor([[7, (1 << 31) - 1]]), torch.tensor([[0.3]])]
    packed = sampler.pack(tensors)
    assert packed.shape == (6,)
    assert sampler.unpacked(packed, tensors) == sampler.lists(tensors)


def test_settings_that_forbid_every_token_end_their_row(monkeypatch) -> None:
    rows = [row(index=0, do_sample=True, min_new_tokens=2), row(index=1, do_sample=True, min_new_tokens=2)]
    logits = torch.full((2, 5), float("-inf")).index_fill(1, torch.tensor([EOS]), 1.0)
    logits[1, 4] = 0.0
    assert Sampler().step(rows, logits) == [rows[0]]
    assert (rows[0].error, rows[0].fault) == ("its settings forbid every token", "settings")
    assert rows[1].token_ids == [4]


def test_sampled_tokens_do_not_depend_on_block_shape(checkpoint) -> None:
    _, folder = checkpoint("opt")
    prompts = prompts_of([9, 20, 14, 9, 31])
    settings = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 12, "num_return_sequences": 2, "seed": 5}
    found = []
    for policy in ({"gpu_batch_size": 10}, {"gpu_batch_size": 1}, {"gpu_batch_size": 3, "num_gpu_batches": 2}):
        with Engine(folder, dtype="float32", policy=policy) as llm:
            found.append([(o.index, o.sample, o.token_ids) for o in llm.generate(prompts, **settings)])
    assert found[0] == found[1] == found[2]
    assert found[0][0][2] != found[0][1][2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_their_row_only(bad: float) -> None:
    logits = torch.zeros(2, 9)
    logits[0, 4], logits[1, 6] = bad, 1.0
    rows = [row(index=0), row(index=1)]
    assert Sampler().step(rows, logits) == [rows[0]]
    assert rows[0].finish_reason == "error"
    assert "not finite" in rows[0].error
    assert rows[1].token_ids == [6]


def test_logprobs_are_those_of_the_model(checkpoint) -> None:
    _, folder = checkpoint("opt")
    with Engine(folder, dtype="float32") as llm:
        output = llm.generate(prompts_of([9]), max_new_tokens=4, logprobs=3, ignore_eos=True)[0]
    assert len(output.logprobs) == len(output.top_logprobs) == 4
    for token, logprob, top in zip(output.token_ids, output.logprobs, output.top_logprobs, strict=True):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())


class TestStopStrings:
    @staticmethod
    def decode(ids: list[int]) -> str:
        return "".join(chr(96 + token) for token in ids)

    def test_the_text_ends_before_and_the_tokens_with_it(self) -> None:
        sequence = row(stop_strings=("cd",))
        sampler = Sampler(self.decode)
        for token in (1, 5, 3, 4, 6):
            if not sequence.finished:
                sampler.step([sequence], torch.nn.functional.one_hot(torch.tensor([token]), 30).float())
        assert sequence.token_ids == [1, 5, 3, 4]
        assert (sequence.finish_reason, sequence.stop_string) == ("stop", "cd")

    def test_they_do_not_count_before_the_fewest_new_tokens(self) -> None:
        """As vLLM's min_tokens has it, and unlike transformers' min_new_tokens."""
        sequence = row(stop_strings=("cd", "z"), min_new_tokens=3)
        sampler = Sampler(self.decode)
        for token in (3, 4, 3, 4, 6):
            if not sequence.finished:
                sampler.step([sequence], torch.nn.functional.one_hot(torch.tensor([token]), 30).float())
        assert sequence.token_ids == [3, 4, 3, 4]
        codec: Any = SimpleNamespace(decode=self.decode)
        assert (sequence.finish_reason, text_of(codec, sequence)) == ("stop", "cd")

    def test_a_stop_string_that_reaches_over_tokens_before_the_answer_does_not_count(self) -> None:
        sequence = row([EOS, 3], stop_strings=("cd",))
        Sampler(self.decode).step([sequence], torch.nn.functional.one_hot(torch.tensor([4]), 30).float())
        assert not sequence.finished


class TestPrompts:
    def test_an_empty_prompt_starts_from_bos(self, llm) -> None:
        outputs = llm.generate([[], [2]], max_new_tokens=5)
        assert outputs[0].token_ids == outputs[1].token_ids
        assert outputs[0].prompt_ids == [2]

    def test_no_prompts_give_no_outputs(self, llm) -> None:
        assert llm.generate([], max_new_tokens=5) == []

    def test_past_the_context_is_refused_with_numbers(self, llm) -> None:
        with pytest.raises(UsageError, match=r"125 tokens, with 4 to be generated 129.*context .* 128") as caught:
            llm.generate(prompts_of([9, 125]), max_new_tokens=4)
        assert caught.value.exit_code == 2

    def test_stop_strings_need_a_tokenizer(self, llm) -> None:
        with pytest.raises(UsageError, match="no tokenizer"):
            llm.generate(prompts_of([5]), max_new_tokens=4, stop_strings=("x",))

    def test_the_last_position_of_the_context_can_be_used(self, llm) -> None:
        assert len(llm.generate(prompts_of([124]), max_new_tokens=4, ignore_eos=True)[0].token_ids) == 4

    @pytest.mark.parametrize(
        "prompts",
        [
            *("text", ["text"], [[1.5]], [[VOCAB]], [[-1]], [["a"]], [5, 6, 7], [None], torch.tensor([5, 6])),
            *(torch.tensor(5), [b"a"], [{5: 6}], {(5, 6): 7}, {(5, 6)}),
        ],
        ids=str,
    )
    def test_what_is_no_prompt_is_refused(self, llm, prompts) -> None:
        with pytest.raises(UsageError):
            llm.generate(prompts, max_new_tokens=4)

    def test_a_token_where_a_prompt_should_be_is_named(self, llm) -> None:
        with pytest.raises(UsageError, match=r"prompt 0: 5 is not a prompt.* a string or a list of token ids.* wrap "):
            llm.generate([5, 6, 7], max_new_tokens=4)
        with pytest.raises(UsageError, match="pair 1: 6 is not a prompt"):
            llm.score([([5], [6]), ([5], 6)])

    def test_more_logprobs_than_tokens_are_refused(self, llm) -> None:
        with pytest.raises(UsageError, match=f"logprobs={VOCAB + 1}. needed at most {VOCAB}"):
            llm.generate(prompts_of([5]), max_new_tokens=2, logprobs=VOCAB + 1)
        (output,) = llm.generate(prompts_of([5]), max_new_tokens=1, logprobs=VOCAB)
        assert len(output.top_logprobs[0]) == VOCAB

    def test_each_prompt_may_have_its_own_settings(self, llm) -> None:
        params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (3, 9, 1)]
        outputs = llm.generate(prompts_of([5, 12, 8]), params)
        assert [len(output.token_ids) for output in outputs] == [3, 9, 1]

    def test_stream_gives_every_sequence_once_as_it_finishes(self, llm) -> None:
        params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (9, 3, 6)]
        assert [output.index for output in llm.stream(prompts_of([5, 5, 5]), params)] == [1, 2, 0]
