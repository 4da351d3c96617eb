"""One prompt with its generated tokens, and what is handed back for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from h2o_flexgen.config.eviction import Budget
from h2o_flexgen.config.sampling import SamplingParams

FinishReason = Literal["stop", "length", "error"]


@dataclass
class Sequence:
    """The state of one row while it runs. Mutated by the sampler only.

    `index` is the prompt's place in the call, `sample` counts its num_return_sequences, `row_id` numbers all sequences
    of a call; policies and generators are seeded by these, so that neighbours never matter. `forced` replaces
    sampling: the tokens are appended as they are and their log-probabilities recorded (`LLM.score`).
    """

    index: int
    sample: int
    row_id: int
    prompt_ids: list[int]
    params: SamplingParams
    budget: Budget
    eos: frozenset[int]
    seed: int = 0
    forced: list[int] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    error: str | None = None

    @property
    def max_new_tokens(self) -> int:
        return len(self.forced) if self.forced is not None else self.params.max_new_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def generator(self, device: torch.device) -> torch.Generator:
        """The row's own random stream, made once: depends on (seed, prompt index, sample index) and nothing else."""
        if not hasattr(self, "_generator"):
            # SplitMix-style mixing, so that neighbouring indices do not give related streams.
            mixed = (
                self.seed * 0x9E3779B97F4A7C15 + self.index * 0xBF58476D1CE4E5B9 + self.sample * 0x94D049BB133111EB
            ) & ((1 << 63) - 1)
            self._generator = torch.Generator(device=device).manual_seed(mixed)
        return self._generator


@dataclass(frozen=True)
class RequestOutput:
    """What a finished sequence gives back.

    `token_ids` are the new tokens only, with the eos that stopped the row; `text` is without special tokens and
    without the stop string (None without a tokenizer). `logprobs` are those of the chosen tokens, if asked for.
    """

    index: int
    sample: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Score:
    """`LLM.score` of one (context, continuation): natural-log probabilities with eviction active."""

    logprob: float
    is_greedy: bool
    token_logprobs: list[float]
