"""How much there is to do, and whether a model can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace

from h2o_flexgen.config.checks import Checked, Count
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.far_layers import far_places, fault_of
from h2o_flexgen.config.flags import option
from h2o_flexgen.config.model.packing import channel_numbers, first_tokens
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.recall import check_recall
from h2o_flexgen.config.splits import THEN_H2O
from h2o_flexgen.errors import ContextLengthError, UsageError


@dataclass(frozen=True)
class Workload(Checked):
    """Sequences and their lengths in tokens; where these differ, the largest of the call. Raises UsageError."""

    prompt_len: Count = option(MISSING, "--prompt-len", "--input-len", help="tokens per prompt")
    gen_len: Count = option(MISSING, "--gen-len", "--output-len", help="tokens to generate per prompt")
    num_sequences: Count = option(1, "--num-prompts", help="number of prompts")

    @property
    def total_len(self) -> int:
        return self.prompt_len + self.gen_len


def counted_in_bytes(eviction: EvictionConfig, spec: ModelSpec) -> EvictionConfig:
    """`eviction` for the caches of `spec`: where its budget is in bytes, or layers share it by how far they look."""
    own = [layer for layer in range(spec.num_layers) if spec.attends(layer) and spec.source_of(layer) == layer]
    eviction = _with_far_layers(eviction, spec)
    if eviction.how_layers_share != "uniform":
        eviction = replace(eviction, cacheless=tuple(sorted({*range(spec.num_layers)}.difference(own))))
    if eviction.bytes is None:
        return eviction
    plain = spec.with_cache_bits(16)

    def token(layers: Sequence[int]) -> tuple[int, int]:
        """Bytes of a token in the caches of `layers`, and in 16 bits."""
        kept, whole = (
            sum(each.kv_bytes_per_token_and_layer("bfloat16", layer) for layer in layers) for each in (spec, plain)
        )
        return kept, whole

    kept, whole = token(own)
    scales = channel_numbers(spec.cache_bits, spec.cache_rotation)
    mended = spec.cache_newest + first_tokens(spec.cache_bits, spec.cache_rotation)
    beside = scales * sum(2 * spec.heads_of(i).keys * spec.heads_of(i).dim for i in own)
    narrow = sorted({window for layer in own if (window := spec.windows[layer]) is not None})
    windows = ((window - 1, *token([layer for layer in own if spec.windows[layer] == window])) for window in narrow)
    by_token = kept, whole, beside, mended
    return replace(eviction, token_bytes=by_token, window_bytes=tuple(windows)) if own else eviction


def asks_for_far_layers(eviction: EvictionConfig, spec: ModelSpec) -> bool:
    """Whether layers or heads that look far get more than others, are not named, and no window tells them."""
    return (
        eviction.far_layers is None
        and eviction.how_layers_share == "far"
        and not eviction.keeps_all
        and not any(spec.windows)
        and any(map(spec.attends, range(spec.num_layers)))
    )


def _with_far_layers(eviction: EvictionConfig, spec: ModelSpec) -> EvictionConfig:
    """With the layers or heads that look far, where that is known, if none are named and no window tells.

    UsageError for others than the model has."""
    if asks_for_far_layers(eviction, spec):
        found = far_places(spec)
        if found is not None and found.places:
            eviction = replace(eviction, far_layers=found.layers if eviction.recall else found.places)
    for place in eviction.far_layers or ():
        if (fault := fault_of(spec, place)) is not None:
            shown = place if isinstance(place, int) else "head {1} of layer {0}".format(*place)
            named = f"--far-layers names {'layer ' * isinstance(place, int)}{shown}"
            raise UsageError(named, f"{spec.name} has {fault}", "leave it out")
    heads = [spec.heads_of(layer).keys for layer in range(spec.num_layers) if spec.attends(layer)]
    return replace(eviction, kv_heads=heads[0]) if eviction.far_layers and heads else eviction


def check_eviction(spec: ModelSpec, eviction: EvictionConfig) -> None:
    """UsageError where what is evicted is to wait, and cannot; and where positions are to roll, and the model learned a
    table of them, or rotates keys itself."""
    check_recall(spec, eviction.recall)
    if eviction.rolling_positions and spec.arch.rotary is None:
        learned = spec.arch.positions == "learned"
        why = "which learned a table of positions" if learned else "whose keys are rotated by transformers' own modules"
        raise UsageError(
            f"--rolling-positions with {spec.name}, {why}",
            "needed a model with rotary positions" if learned else "needed a model with a family of its own here",
            "leave --rolling-positions out",
        )


def first_pass(spec: ModelSpec, eviction: EvictionConfig, prompt_len: int, gen_len: int, what: str) -> int:
    """The tokens of a prompt that are computed at once; later tokens are fed step by step.

    With rolling positions a sequence may have any length, if the tokens that a cache holds stay within the context.
    ContextLengthError for one that is too long; `what` names the prompt there.
    """
    length = prompt_len + gen_len
    reads_twice = eviction.split.replays and not eviction.resolve(prompt_len, gen_len).full
    if reads_twice and eviction.computed(prompt_len) > spec.max_positions:
        raise ContextLengthError(
            f"{what} has {prompt_len} tokens, and {eviction.name} reads it twice",
            f"the context of {spec.name} is {spec.max_positions} tokens",
            "shorten it, or choose another policy",
        )
    if not eviction.rolling_positions:
        if length <= spec.max_positions:
            return prompt_len
        rolls = "use --rolling-positions with a smaller budget, or " if spec.arch.rotary else ""
        raise ContextLengthError(
            f"{what} has {prompt_len} tokens, with {gen_len} to be generated {length} in all",
            f"the context of {spec.name} is {spec.max_positions} tokens",
            f"{rolls}shorten the prompt or generate less; nothing is ever cut off silently",
        )
    if eviction.split.prompt_only and prompt_len > spec.max_positions:
        raise ContextLengthError(
            f"{what} has {prompt_len} tokens, and {eviction.name} looks at whole prompts",
            f"the context of {spec.name} is {spec.max_positions} tokens",
            f"shorten it, or choose --eviction {eviction.name}{THEN_H2O}",
        )
    budget = eviction.resolve(prompt_len, gen_len).total
    if budget >= spec.rolling_slots and length > spec.rolling_slots:
        trained = "" if spec.rolling_slots == spec.max_positions else "trained "
        raise ContextLengthError(
            f"the KV budget of {what} is {budget} tokens, and positions roll within it",
            f"the {trained}context of {spec.name} is {spec.rolling_slots} tokens",
            f"needed --kv-budget of at most {spec.rolling_slots - 1}, or a smaller --hh-ratio",
        )
    return min(prompt_len, spec.max_positions)
