"""The tokens that one KV cache may hold, and how spans of a prompt and layers share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from h2o_flexgen.errors import UsageError, required

Range = tuple[int, int]
"""Positions of a prompt, from the first to before the second."""
STEEPNESS = 20
"""Pyramid: the last layer chooses the mean number of tokens divided by this."""


@dataclass(frozen=True)
class Budget:
    """Tokens that one KV cache may hold: total = sinks + heavy + recent, unless `prompt` says otherwise.

    `full`: total is the sequence's length, and nothing is evicted. If the budget is `fair` to spans, heavy counts all
    kept tokens of the prompt, and recent counts tokens of the answer.
    """

    total: int
    heavy: int
    recent: int
    sinks: int
    full: bool
    burst: int = 1
    """Tokens evicted at once as soon as the cache holds one more than the total."""
    prompt: int | None = None
    """Limit for tokens kept of the prompt; later tokens are added to them, up to the total. None: no such limit."""
    spans: tuple[Range, ...] = ()
    """Spans of the prompt, in order. Tokens kept there are never evicted: all of them, unless the budget is `fair`."""
    inside: Budget | None = None
    """The budget without spans. If it is set, `spans` cover the whole prompt, each span has a share of this budget, and
    the policy chooses within a span as if it were the prompt."""
    parts: tuple[Budget, ...] = ()
    """The budgets of heads that look near and of heads that look far, where a layer has both. This is their mean."""

    def part(self, index: int) -> Budget:
        """The budget of one of a layer's two kinds of heads."""
        return self.parts[index] if self.parts else self

    @property
    def slots(self) -> int:
        """Of a row and head: the budget, and one for the newest token unless the cache is full."""
        return self.total + (not self.full)

    @property
    def after_prompt(self) -> int:
        """Tokens that may be held once the prompt is in: sinks + heavy + recent."""
        return self.total if self.prompt is None else self.prompt

    @property
    def fair(self) -> bool:
        return self.inside is not None

    @property
    def latest(self) -> int:
        """Tokens at the end of a prompt that are kept whatever their score."""
        return 0 if self.fair else self.recent

    @property
    def scored(self) -> bool:
        """Whether tokens are chosen by score, at least those of the prompt; else the oldest are evicted first."""
        return (self.heavy > 0 or self.prompt is not None) and not self.full

    def within(self, window: int | None) -> Budget:
        """The budget in a layer whose queries see the last `window` tokens, themselves included; None: all of them.

        The next query sees window - 1 kept tokens. A budget of at least that many becomes exactly these, which leaves
        no choice, and nothing older is kept. Smaller budgets, and full ones that fit the window, stay as they are.
        """
        if window is None or self.total < window - 1 or (self.full and self.total == window - 1):
            return self
        return Budget(total=window - 1, heavy=0, recent=window - 1, sinks=0, full=False)


def mean_of(near: Budget, far: Budget, heads: int, looking_far: int) -> Budget:
    """The budget of a layer of `heads`, of which some look far: its slots, times all heads, are enough for both."""
    full = near.full and far.full
    slots = near.slots * (heads - looking_far) + far.slots * looking_far
    total = -(-slots // heads) - (not full)
    more, prompt = total - near.total, None if near.prompt is None else near.prompt + total - near.total
    return replace(near, total=total, heavy=near.heavy + more, prompt=prompt, full=full, parts=(near, far))


def whitelisted(budget: Budget, spans: Sequence[Range], seen: int = 0) -> Budget:
    """`budget` with `spans` served first; UsageError if it has no room for them.

    A budget without heavy tokens gives up recent ones for them. seen: first position that the answer's queries see.
    """
    wanted = sum(max(0, stop - max(start, budget.sinks, seen)) for start, stop in spans)
    heavy, recent = (budget.heavy, budget.recent) if budget.heavy else (wanted, budget.recent - wanted)
    if wanted > heavy or (budget.recent and recent < 1):
        most, beside = (budget.heavy, f"{budget.recent} recent tokens") if budget.heavy else (budget.recent - 1, "1")
        sinks = f" and {budget.sinks} sinks" if budget.sinks else ""
        raise UsageError(
            f"spans to keep have {wanted} tokens, and a budget of {budget.after_prompt} leaves {most} beside "
            f"{beside}{sinks}",
            f"needed at most {most}",
            "raise --hh-ratio or --kv-budget, lower --recent, or keep less",
        )
    if not wanted:
        return budget
    burst = max(1, min(budget.burst, budget.total + 1 - budget.sinks - recent - wanted))
    return replace(budget, heavy=heavy, recent=recent, spans=tuple(spans), burst=burst)


def fair(
    budget: Budget, spans: Sequence[Range], prompt: int, new: int, burst: Callable[[int], int] | None = None
) -> Budget:
    """`budget` shared out by length: `spans`, what lies between them, and the answer of at most `new` tokens.

    A policy that prunes nothing but the prompt has its answer's room already. burst: as in `Split`.
    """
    ranges = parts_between(spans, prompt)
    lengths = [stop - start for start, stop in ranges]
    if budget.prompt is not None and budget.total == budget.prompt + new and budget.burst == 1:
        shares(budget.prompt, lengths)
        return Budget(budget.total, budget.prompt, 0, 0, False, prompt=budget.prompt, spans=ranges, inside=budget)
    answer = shares(budget.total, [*lengths, max(1, new)])[-1]
    recent = min(answer, max(min(1, budget.recent), budget.recent * answer // budget.total))
    going = 1 if burst is None else max(1, min(burst(answer), answer - recent))
    kept = budget.total - answer
    return Budget(budget.total, kept, recent, 0, False, going, prompt=kept, spans=ranges, inside=budget)


def parts_between(spans: Sequence[Range], length: int) -> tuple[Range, ...]:
    """`spans` (in order, disjoint) and the gaps between them: together the first `length` positions."""
    ranges, done = list[Range](), 0
    for start, stop in spans:
        ranges += [(done, start)] * (start > done) + [(start, stop)]
        done = stop
    return (*ranges, *([(done, length)] if done < length else []))


def shares(total: int, lengths: Sequence[int]) -> list[int]:
    """Divides `total` tokens in proportion to `lengths`; each share is rounded down or up, and at least 1 if not empty.

    Tokens left by rounding down go to the largest remainders, one each, the first of equals first. UsageError if there
    are more parts than tokens.
    """
    length_of_all, some = sum(lengths), sum(length > 0 for length in lengths)
    if total < some:
        raise UsageError(
            f"a budget of {total} tokens is to be shared by {some} spans and what is beside them",
            f"needed at least {some}",
            "raise --hh-ratio or --kv-budget, or mark fewer spans",
        )
    found = [max(min(1, length), total * length // length_of_all) for length in lengths]
    rounded = (i for i, length in enumerate(lengths) if total * length >= length_of_all)
    rests = sorted(rounded, key=lambda i: (-(total * lengths[i] % length_of_all), i))
    for i in rests[: max(0, total - sum(found))]:
        found[i] += 1
    while sum(found) > total:  # parts raised to 1 took more than their share: the largest give it back
        found[max(range(len(found)), key=lambda i: (found[i], -i))] -= 1
    return found


def shares_of(budget: Budget, length: int, window: int | None) -> list[tuple[Range, Budget | None]]:
    """The parts of a prompt of `length` tokens under a fair budget, and the budget of each (None: it keeps all).

    window: of the layer; tokens that the next query does not see get no share. Each share has the whole budget's
    proportion of recent tokens, and as many sinks.
    """
    inside = required(budget.inside, "the budget is not fair")
    first = 0 if window is None else max(0, length + 1 - window)
    ranges = [(max(start, first), stop) for start, stop in budget.spans if stop > first]
    lengths = [stop - start for start, stop in ranges]
    if budget.after_prompt >= sum(lengths):
        return [(each, None) for each in ranges]
    counts = shares(budget.after_prompt, lengths)
    return [
        (each, None if count == size else _share(inside, count))
        for each, size, count in zip(ranges, lengths, counts, strict=True)
    ]


def _share(inside: Budget, count: int) -> Budget:
    """A budget of `count` tokens that divides as `inside` does."""
    sinks = min(inside.sinks, count - 1)
    recent = inside.recent * (count - sinks) // max(1, inside.after_prompt - inside.sinks)
    recent = min(count - sinks, max(min(1, inside.recent), recent))
    early = inside.prompt is not None
    total = count + inside.burst - 1 if early else count
    kept = count if early else None
    return Budget(total, count - sinks - recent, recent, sinks, False, inside.burst, prompt=kept)


def pyramid(budget: Budget, layers: int, length: int) -> list[int]:
    """Totals that fall linearly with the layer; their mean is the budget's, before layers are held within windows.

    Heavy tokens are divided, or recent ones if there are no heavy ones. No layer gets more than there are tokens to
    choose from. Layer l and layer (layers - 1 - l) together get twice the mean.
    """
    base = budget.heavy or budget.recent
    fixed = budget.total - base
    choices = length - fixed
    if choices + budget.after_prompt - base < 2 * base:
        return [budget.total] * layers
    least = base // STEEPNESS
    most = 2 * base - least
    if most > choices:
        most, least = choices, 2 * base - choices
    totals = [fixed + base] * layers
    for layer in range(layers // 2):
        own = most - layer * (most - least) // (layers - 1)
        totals[layer], totals[layers - 1 - layer] = fixed + own, fixed + 2 * base - own
    return totals


def shared_out(wanted: Sequence[int], least: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """Numbers near those `wanted`, from `least` to `most` each, that add up to `total` if that can be.

    A shortfall is spread evenly over numbers below their `most`, an excess taken evenly from those above `least`.
    """
    found = [min(max(want, low), high) for want, low, high in zip(wanted, least, most, strict=True)]
    while left := total - sum(found):
        open_ = [i for i, each in enumerate(found) if (each < most[i] if left > 0 else each > least[i])]
        if not open_:
            break
        share, more = divmod(abs(left), len(open_))
        for place, i in enumerate(open_):
            change = share + (place < more)
            found[i] = min(most[i], found[i] + change) if left > 0 else max(least[i], found[i] - change)
    return found
