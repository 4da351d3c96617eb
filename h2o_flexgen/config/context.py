"""How long a sequence may be, and how much of its prompt is computed at once: by the engine and by plans. No torch."""

from __future__ import annotations

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import UsageError


def check_positions(spec: ModelSpec, eviction: EvictionConfig) -> None:
    """UsageError where positions are to roll, and the model learned a table of them."""
    if eviction.rolling_positions and spec.arch.rotary is None:
        raise UsageError(
            f"--rolling-positions with {spec.name}, which learned a table of positions",
            "needed a model with rotary positions",
            "leave --rolling-positions out",
        )


def first_pass(spec: ModelSpec, eviction: EvictionConfig, prompt_len: int, gen_len: int, what: str) -> int:
    """The tokens of a prompt that are computed at once; those after them are fed step by step.

    With rolling positions a sequence may be as long as it likes, if what a cache holds stays within the context.
    UsageError for one that is too long; `what` names the prompt there.
    """
    length = prompt_len + gen_len
    if not eviction.rolling_positions:
        if length <= spec.max_positions:
            return prompt_len
        rolls = "use --rolling-positions with a smaller budget, or " if spec.arch.rotary else ""
        raise UsageError(
            f"{what} has {prompt_len} tokens, with {gen_len} to be generated {length} in all",
            f"the context of {spec.name} is {spec.max_positions} tokens",
            f"{rolls}shorten the prompt or generate less; nothing is ever cut off silently",
        )
    budget = eviction.resolve(prompt_len, gen_len).total
    if budget >= spec.rolling_slots and length > spec.rolling_slots:
        trained = "" if spec.rolling_slots == spec.max_positions else "trained "
        raise UsageError(
            f"the KV budget of {what} is {budget} tokens, and positions roll within it",
            f"the {trained}context of {spec.name} is {spec.rolling_slots} tokens",
            f"needed --kv-budget of at most {spec.rolling_slots - 1}, or a smaller --hh-ratio",
        )
    return min(prompt_len, spec.max_positions)
