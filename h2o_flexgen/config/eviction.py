"""Which tokens stay in a KV cache, in numbers: the budget and how it splits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from operator import attrgetter
from typing import Literal

from h2o_flexgen.config import budget as budgets
from h2o_flexgen.config.budget import Budget as Budget
from h2o_flexgen.config.budget import Range
from h2o_flexgen.config.checks import Checked, Count, KeptAsJson, Natural, Ratio, iterable, whole
from h2o_flexgen.config.flags import layer_numbers, option
from h2o_flexgen.config.recall import EVERY, STATIC, RecallTier
from h2o_flexgen.config.splits import AUTO, CHOSEN, THEN_H2O, LayerSplit, Share, Split, split_of
from h2o_flexgen.errors import UsageError

SpanRule = Literal["whitelist", "fair"]
FAR_RECENT = 32
"""With the split "far": the most recent tokens of a layer that sees everything, unless asked for."""
LEAST = 16
"""So many tokens a sequence may hold whatever its share of bytes is, which scales may exceed: a longer one never holds
fewer, so that a plan for the longest has room for all."""
LAST_QUERIES = 400
ROW_LOGITS = 1 << 20
"""Logits of a prompt's queries that are alive at once where a policy looks at them: float32."""


@dataclass(frozen=True)
class EvictionConfig(Checked, KeptAsJson):
    """The eviction policy and its budget, as asked for; `resolve` gives tokens. Raises UsageError naming the flag."""

    name: str = option("full", "--eviction", help="eviction policy, or auto", metavar="NAME")
    ratio: Ratio = option(
        1.0, "--hh-ratio", help="KV budget as a share of prompt and generated tokens, in (0, 1]", metavar="R"
    )
    budget: Count | None = option(
        None, "--kv-budget", help="KV budget in tokens, instead of --hh-ratio", unset="by ratio"
    )
    bytes: Ratio | None = option(
        None,
        "--kv-bytes",
        help="KV budget as a share of the bytes of a full 16-bit cache; --cache-bits is 4,3 unless given",
        metavar="R",
        unset="by ratio",
    )
    recent: Natural | None = option(None, help="most recent tokens kept", unset="half the budget")
    sinks: Natural | None = option(None, help="first tokens kept", unset="4 for streaming, else 0")
    recent_ratio: Ratio | None = option(
        None, help="--recent as a share of prompt and generated tokens", metavar="R", unset="half the budget"
    )
    keep_prompt: bool = option(False, help="the whole prompt stays; only the answer is evicted from")
    budget_split: LayerSplit | None = option(
        None,
        help="how layers share the KV budget: uniform, pyramid; global or far: more for layers without a window",
        metavar="HOW",
        unset="uniform; pyramid for pyramidkv",
    )
    far_layers: tuple[int | tuple[int, int], ...] | None = option(
        None,
        help="layers, or KV heads of layers (7.2), that --budget-split far gives more, counted from 0",
        metavar="N,N.N",
        parse=layer_numbers,
        unset="those without a window",
    )
    rolling_positions: bool = option(False, help="positions within the cache, for streams longer than the context")
    """Of models with rotary positions: keys are kept as they were before rotation and turned by their place among the
    tokens that are held, so that no position ever passes the budget."""
    spans: SpanRule | None = option(
        None,
        help="spans of a prompt: whitelist (those with keep never go), fair (each has its share)",
        metavar="HOW",
        unset="kept tokens are counted only",
    )
    recall: RecallTier | None = option(
        None,
        help="tier where evicted tokens wait for queries that look for them, to come back: cpu or disk",
        metavar="TIER",
        unset="they are lost",
    )
    recall_every: Count = option(EVERY, help="steps from one look at what waits to the next, after the first 16")
    seed: Natural = 0
    """Of the random policy."""
    token_bytes: tuple[int, int, int, int] = (1, 1, 0, 0)
    """Bytes of a token in all caches, in 16 bits, and beside all tokens, and of how many tokens a row has the packing
    errors, which take as many again; they turn a share of bytes into tokens."""
    window_bytes: tuple[tuple[int, int, int], ...] = ()
    """Of each window that layers have, the narrowest first: the tokens that one of these layers holds at most, and the
    bytes of a token in them all, and in 16 bits."""
    kv_heads: int = 1
    """Of each layer, where `far_layers` names heads."""
    cacheless: tuple[int, ...] = ()
    """Layers without a cache of their own: they have states alone, or read the caches of others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name == AUTO:
            object.__setattr__(self, "name", CHOSEN[0])
            if self.budget_split is None:
                object.__setattr__(self, "budget_split", CHOSEN[1])
        split = split_of(self.name)
        object.__setattr__(self, "token_bytes", tuple(self.token_bytes))  # as JSON has lists
        object.__setattr__(self, "window_bytes", tuple(map(tuple, self.window_bytes)))
        object.__setattr__(self, "cacheless", tuple(self.cacheless))
        self._check_far_layers()
        if self.keep_prompt and (split.prompt_only or not split.takes_sinks or self.sinks):
            given = f"with --sinks {self.sinks}" if self.sinks else f"with --eviction {self.name}"
            raise UsageError(
                f"--keep-prompt is given {given}",
                "needed a policy that evicts while decoding and keeps sinks, which the prompt then is",
                "--eviction h2o --keep-prompt",
            )
        if self.rolling_positions and split.looks_back:
            raise UsageError(
                f"--rolling-positions with --eviction {self.name}, which asks again what queries asked before",
                "needed a policy that looks at no earlier query",
                "leave --rolling-positions out, or choose --eviction h2o",
            )
        self._check_spans()
        self._check_recall()
        if self.recent is not None and self.recent_ratio is not None:
            raise UsageError("--recent and --recent-ratio are both given", "needed one of them")
        asked = [f"--kv-budget {self.budget}"] * (self.budget is not None)
        asked += [f"--kv-bytes {self.bytes!r}"] * (self.bytes is not None)
        asked += [f"--hh-ratio {self.ratio!r}"] * (self.ratio < 1)
        if len(asked) > 1:
            raise UsageError(f"{' and '.join(asked)} are both given", "needed one of them")
        if self.name == "full" and asked:
            raise UsageError(f"{asked[0]} is given with the full cache", "name an eviction policy", "--eviction h2o")
        for name, label in (("recent", "--recent"), ("recent_ratio", "--recent-ratio"), ("sinks", "--sinks")):
            if getattr(self, name) and not (split.takes_sinks if name == "sinks" else split.takes_recent):
                raise UsageError(
                    f"{label} is {getattr(self, name)} with --eviction {self.name}",
                    "the whole budget is spent otherwise there",
                    f"leave {label} out, or choose --eviction h2o",
                )
        if self.budget is not None:
            self._require_room(self.budget, f"{self.budget} tokens", self._sinks)

    @property
    def keeps_all(self) -> bool:
        """Whether every sequence has the full cache, whatever its lengths."""
        return self.ratio == 1 and self.budget is None and self.bytes is None

    def _check_far_layers(self) -> None:
        if self.far_layers is None:
            return
        needed = "needed a list of layers, or of layers and KV heads, counted from 0"
        found = {far_place(each, needed) for each in iterable(self.far_layers, "--far-layers", needed)}
        far = sorted(found, key=lambda each: (each, -1) if isinstance(each, int) else each)
        object.__setattr__(self, "far_layers", tuple(far))
        if self.budget_split is None:
            object.__setattr__(self, "budget_split", "far")
        if self.budget_split != "far":
            raise UsageError(f"--far-layers with --budget-split {self.budget_split}", "needed --budget-split far")

    def _check_spans(self) -> None:
        if self.spans is None:
            return
        if self.keep_prompt:
            raise UsageError(f"--spans {self.spans} with --keep-prompt, which keeps all of the prompt", "needed one")
        if self.spans == "fair" and self.split.replays:
            raise UsageError(
                f"--spans fair with --eviction {self.name}, which reads the whole prompt a second time",
                "needed a policy that can look at a span alone",
                "--spans whitelist, or --eviction snapkv",
            )

    def _check_recall(self) -> None:
        if self.recall is None:
            if self.recall_every != EVERY:
                raise UsageError(f"--recall-every is {self.recall_every} without --recall", "needed both, or neither")
            return
        asked = f"--recall {self.recall}"
        if self.name != "h2o" and not self.name.endswith(THEN_H2O):
            raise UsageError(
                f"{asked} with --eviction {self.name}",
                f"needed h2o, alone or behind a policy for prompts (snapkv{THEN_H2O}): what comes back takes the place "
                "of another in its sums",
                "--eviction h2o",
            )
        if self.rolling_positions:
            raise UsageError(
                f"{asked} with --rolling-positions", "needed keys that are kept as they were rotated", "leave one out"
            )
        if any(not isinstance(each, int) for each in self.far_layers or ()):
            named = f"--far-layers names heads of layers with {asked}"
            raise UsageError(named, "needed whole layers", "--far-layers 0,7")
        if self.spans == "fair":
            raise UsageError(
                f"{asked} with --spans fair", "needed one budget for all spans", "--spans whitelist, or leave one out"
            )

    def resolve(self, prompt_len: int, gen_len: int, spans: Sequence[Range] = ()) -> Budget:
        """The budget of a sequence of `prompt_len` prompt tokens and at most `gen_len` new ones.

        A budget that reaches the length is the full cache. Raises UsageError where sinks and recent do not fit, and
        where `spans` do not: of the prompt, those that stay or have their shares, in order and apart.
        """
        length = whole(prompt_len, "the prompt length", 1) + whole(gen_len, "the generation length", 0)
        asked = self.budget if self.budget is not None else exact_ceiling(self.ratio, length)
        if self.bytes is not None:
            asked = self._tokens_of_bytes(self.bytes, length)
        if asked >= length:
            return self._whole(prompt_len, gen_len)
        self._require_room(asked, f"{asked} of {length} tokens", self._sinks_of(prompt_len))
        return self._marked(self._divided(asked, prompt_len, gen_len), prompt_len, gen_len, spans)

    def _tokens_of_bytes(self, share: float, length: int) -> int:
        """The most tokens that every layer may hold, or all within its window, for `share` of the full cache's bytes;
        LEAST if that is more."""
        kept, plain, beside, mended = self.token_bytes
        full = length * plain - sum(max(0, length - most) * each for most, _, each in self.window_bytes)
        room = Decimal(repr(share)) * full - beside - mended * kept
        asked = math.floor(room / kept)
        for most, each, _ in self.window_bytes:
            if asked > most:  # which these layers do not take: others may
                room, kept = room - most * each, kept - each
                asked = math.floor(room / kept) if kept else length
        return max(LEAST, asked)

    def _marked(
        self, budget: Budget, prompt_len: int, gen_len: int, spans: Sequence[Range], window: int | None = None
    ) -> Budget:
        """With what `spans` are for."""
        if not spans or self.spans is None or budget.full or (window is not None and budget.total >= window - 1):
            return budget
        if self.spans == "whitelist":
            seen = 0 if window is None else max(0, prompt_len + 1 - window)
            return budgets.whitelisted(budget, spans, seen)
        return budgets.fair(budget, spans, prompt_len, gen_len, self.split.burst)

    def by_layer(
        self, windows: Sequence[int | None], prompt_len: int, gen_len: int, spans: Sequence[Range] = ()
    ) -> tuple[Budget, ...]:
        """The budget of each layer, within its window; all caches hold as many tokens as if all budgets were the same.

        Where it is not split evenly a layer's total is rounded down, and the first layers get a token more each. Tokens
        that a layer has no use for go to the others.
        """
        budget, length = self.resolve(prompt_len, gen_len), prompt_len + gen_len
        how = self.how_layers_share
        if how == "uniform" or budget.full:
            marked = self.resolve(prompt_len, gen_len, spans) if spans else budget
            return tuple(marked.within(window) for window in windows)
        far, heads = self._looking_far(windows)
        cached = [layer not in self.cacheless for layer in range(len(windows)) for _ in range(heads)]
        far = [looks and has for looks, has in zip(far, cached, strict=True)]
        windows = [window for window in windows for _ in range(heads)]
        even = tuple(budget.within(window) for window in windows)
        ends = [min(length, length if window is None else window - 1) for window in windows]
        most = [end * has for end, has in zip(ends, cached, strict=True)]
        held = sum(min(each.total, limit) for each, limit in zip(even, most, strict=True))
        # Of a prompt that is pruned once the answer has its place in every layer, and the window that chooses.
        fixed = budget.prompt is not None or (how == "pyramid" and budget.heavy > 0)
        least = budget.total - budget.heavy + (how != "pyramid") if fixed else budget.sinks + (self.recent or 0) + 1
        halved, differ = how == "far", any(windows) or self.far_layers is not None
        if how == "pyramid":
            falling = iter(budgets.pyramid(budget, sum(cached), length))
            wanted = [next(falling) if has else 0 for has in cached]
        else:
            # A layer with a window keeps of what it sees the share that all would keep, or half of what all would hold.
            seen = [length if window is None else window - 1 for window in windows]
            shares = [budget.total // 2 if halved else budget.total * each // length for each in seen]
            near = [max(least, share) * has for share, has in zip(shares, cached, strict=True)]
            spent = sum(each for each, sees_all in zip(near, far, strict=True) if not sees_all)
            rest = (held - spent) // max(1, sum(far))
            wanted = [rest if sees_all else each for each, sees_all in zip(near, far, strict=True)]
        totals = budgets.shared_out(wanted, [min(least, limit) for limit in most], most, held)
        found = list[Budget]()
        for i, (total, window, sees_all) in enumerate(zip(totals, windows, far, strict=True)):
            if not cached[i]:
                found.append(even[i])
                continue
            recent = budget.recent if how == "pyramid" and budget.heavy else None
            if halved and sees_all and differ:
                # The newest tokens are for layers with a window: these layers are for tokens far back.
                own = self._divided(total, prompt_len, gen_len)
                asked = self.recent is not None or self.recent_ratio is not None or not self.split.takes_recent
                recent = None if asked or own.full or not own.heavy else min(own.recent, FAR_RECENT)
            divided = self._divided(total, prompt_len, gen_len, recent).within(window)
            found.append(self._marked(divided, prompt_len, gen_len, spans, window))
        return tuple(_of_layer(found[i : i + heads], far[i : i + heads]) for i in range(0, len(found), heads))

    def _looking_far(self, windows: Sequence[int | None]) -> tuple[list[bool], int]:
        """Of each layer whether it looks far; where heads are named of each KV head, of which a layer has so many."""
        if self.far_layers is None:
            far = [window is None for window in windows]
            if self.how_layers_share == "far" and any(windows) and any(far[:-1]):
                far[-1] = False  # no later layer reads what the last one has found
            return far, 1
        named, layers = set(self.far_layers), range(len(windows))
        if all(isinstance(each, int) for each in named):
            return [layer in named for layer in layers], 1
        heads = range(self.kv_heads)
        return [layer in named or (layer, head) in named for layer in layers for head in heads], self.kv_heads

    def far_heads(self, layer: int) -> tuple[int, ...]:
        """The KV heads of a layer that look far, where others of it do not."""
        if self.how_layers_share != "far" or self.far_layers is None or layer in self.far_layers:
            return ()
        named = tuple(head for head in range(self.kv_heads) if (layer, head) in self.far_layers)
        return named if len(named) < self.kv_heads else ()

    def _whole(self, prompt_len: int, gen_len: int) -> Budget:
        length = prompt_len + gen_len
        sinks = min(self._sinks_of(prompt_len), length)
        recent = self._recent(Share(length, length - sinks, length, prompt_len), length)
        return Budget(total=length, heavy=length - sinks - recent, recent=recent, sinks=sinks, full=True)

    def _divided(self, total: int, prompt_len: int, gen_len: int, recent: int | None = None) -> Budget:
        """A budget of `total` tokens; `recent`: of another layer, which this has too."""
        length, split = prompt_len + gen_len, self.split
        if total >= length:
            return self._whole(prompt_len, gen_len)
        sinks = min(self._sinks_of(prompt_len), total)
        # Of a prompt that is pruned once: the answer needs its room beside what is kept of it.
        kept = total - gen_len if split.prompt_only else total
        share = Share(total, total - sinks, max(kept, sinks + 2), prompt_len)
        chosen = 1 if recent is None else 0  # at least; the last layers of a pyramid may keep the window alone
        recent = self._recent(share, length) if recent is None else min(recent, total - sinks)
        if not split.prompt_only:
            heavy, burst = total - sinks - recent, split.burst
            going = 1 if burst is None else max(1, min(burst(total), heavy))
            kept = total + 1 - going if split.early else total
            prompt = kept if kept < total else None
            return Budget(total, kept - sinks - recent, recent, sinks, full=False, burst=going, prompt=prompt)
        kept = max(kept, sinks + recent + chosen)
        if kept >= prompt_len:
            return self._whole(prompt_len, gen_len)
        heavy = kept - sinks - recent
        return Budget(total=kept + gen_len, heavy=heavy, recent=recent, sinks=sinks, full=False, prompt=kept)

    def _sinks_of(self, prompt_len: int) -> int:
        """Of a prompt so long: all of it, if it is to stay."""
        return prompt_len if self.keep_prompt else self._sinks

    @property
    def _sinks(self) -> int:
        usual = self.split.sinks if self.recall is None else max(self.split.sinks, STATIC)
        return usual if self.sinks is None else self.sinks

    @property
    def split(self) -> Split:
        split = split_of(self.name)
        # Within a span no attention but the span's own counts, which kernels have not summed.
        looks = self.spans == "fair" and (split.column_sums or split.queries != "none")
        return split._replace(queries="all") if looks else split

    @property
    def how_layers_share(self) -> LayerSplit:
        return self.split.layers if self.budget_split is None else self.budget_split

    def computed(self, prompt_len: int) -> int:
        """The tokens that a prompt takes through the layers; twice its own, where it is replayed."""
        return prompt_len * (2 if self.split.replays and self.name != "full" else 1)

    def _require_room(self, total: int, described: str, sinks: int) -> None:
        """UsageError where a budget of `total` tokens that evicts has no room for the sinks and the recent tokens."""
        rest = total - sinks
        if rest < 1:
            first, flag = (
                ("of the prompt", "leave --keep-prompt out") if self.keep_prompt else ("sinks", "lower --sinks")
            )
            raise UsageError(
                f"the budget is {described}, {sinks} {first} leave nothing of it",
                f"needed a budget of at least {sinks + 1}",
                f"raise --hh-ratio or --kv-budget, or {flag}",
            )
        if self.recent is not None and self.recent > rest:
            beside = "beside the sinks " if sinks else ""
            raise UsageError(
                f"--recent is {self.recent}, {beside}the budget has {rest} tokens",
                f"needed at most {rest}",
                "lower --recent, or raise --hh-ratio or --kv-budget",
            )

    def _recent(self, share: Share, length: int) -> int:
        """The most recent tokens among the rest of the budget beside the sinks."""
        split = self.split
        if self.recent_ratio is not None:
            asked = exact_ceiling(self.recent_ratio, length)
        else:
            asked = split.recent(share) if self.recent is None else self.recent
        return min(share.rest, max(asked, split.least_recent))


def exact_ceiling(ratio: float, count: int) -> int:
    """ceil(ratio * count), taking the decimal number that `ratio` is written as: 0.07 of 100 is 7, not 8."""
    return math.ceil(Decimal(repr(ratio)) * count)


def far_place(value: object, needed: str) -> int | tuple[int, int]:
    """A layer, or a layer and one of its KV heads. UsageError for anything else."""
    if isinstance(value, tuple | list):
        if len(value) != 2:
            raise UsageError(f"--far-layers names {value!r}", needed)
        return whole(value[0], "--far-layers", 0), whole(value[1], "--far-layers", 0)
    return whole(value, "--far-layers", 0)


def _of_layer(heads: Sequence[Budget], far: Sequence[bool]) -> Budget:
    """The budget of a layer of these heads; heads that look far have the same one, and so have the others."""
    pairs, total = list(zip(heads, far, strict=True)), attrgetter("total")
    near = min((each for each, looks in pairs if not looks), key=total, default=None)
    most = min((each for each, looks in pairs if looks), key=total, default=None)
    if near is None or most is None:
        return near or most or heads[0]
    return budgets.mean_of(near, most, len(heads), sum(far))
