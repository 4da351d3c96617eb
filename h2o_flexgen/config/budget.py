"""The tokens that one KV cache may hold, and how spans of a prompt and layers share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from h2o_flexgen.errors import UsageError

Range = tuple[int, int]
"""Positions of a prompt, from the first to before the second."""
STEEPNESS = 20
"""Of a pyramid: what the last layer chooses is the mean by this."""


@dataclass(frozen=True)
class Budget:
    """Tokens that one KV cache may hold: total = sinks + heavy + recent, unless `prompt` says otherwise.

    `full`: total is the length, nothing goes. Of a budget that is `fair` to spans, heavy tokens are all that is kept of
    the prompt, and the recent ones are the answer's.
    """

    total: int
    heavy: int
    recent: int
    sinks: int
    full: bool
    burst: int = 1
    """Tokens that go at once, when there is one more than the total."""
    prompt: int | None = None
    """Where no more than this may be kept of the prompt, and what follows is added to it, up to the total."""
    spans: tuple[Range, ...] = ()
    """Of the prompt, in order: what is kept of it there never goes, and is all of it unless the budget is `fair`."""
    inside: Budget | None = None
    """What would be kept without spans, which are all of the prompt then: each has its share of this, and the policy
    chooses in it as if it were the prompt."""

    @property
    def after_prompt(self) -> int:
        """Tokens that may be held once the prompt is in: sinks + heavy + recent."""
        return self.total if self.prompt is None else self.prompt

    @property
    def fair(self) -> bool:
        """Whether spans have shares."""
        return self.inside is not None

    @property
    def latest(self) -> int:
        """Tokens at the end of a prompt that stay whatever they score."""
        return 0 if self.fair else self.recent

    @property
    def scored(self) -> bool:
        """Whether what stays is chosen by score, of the prompt if nothing else; else tokens go in the order in which
        they came."""
        return (self.heavy > 0 or self.prompt is not None) and not self.full

    def within(self, window: int | None) -> Budget:
        """The budget in a layer whose queries see the last `window` tokens, themselves included; None: all of them.

        A budget that holds all that the next query can see, window - 1 tokens, is exactly that: no choice is left, and
        nothing older is kept. A smaller one, or a sequence that never leaves the window, stays as it is.
        """
        if window is None or self.total < window - 1 or (self.full and self.total == window - 1):
            return self
        return Budget(total=window - 1, heavy=0, recent=window - 1, sinks=0, full=False)


def whitelisted(budget: Budget, spans: Sequence[Range], seen: int = 0) -> Budget:
    """`budget`, of which `spans` take their part before anything else; UsageError where it has no room for them.

    Where all the rest of the budget is recent, these are fewer. seen: the first position that the answer's queries see.
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
    """`spans`, which are in order and apart, and what lies between them: together the first `length` positions."""
    ranges, done = list[Range](), 0
    for start, stop in spans:
        ranges += [(done, start)] * (start > done) + [(start, stop)]
        done = stop
    return (*ranges, *([(done, length)] if done < length else []))


def shares(total: int, lengths: Sequence[int]) -> list[int]:
    """`total` tokens by length, each share rounded down or up, and at least 1 of what is not empty.

    Of what rounding down leaves one each goes to the largest remainders, of equal ones to the first. UsageError where
    there are more parts than tokens.
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
    while sum(found) > total:  # what the smallest have got beyond their share comes from the largest
        found[max(range(len(found)), key=lambda i: (found[i], -i))] -= 1
    return found


def shares_of(budget: Budget, length: int, window: int | None) -> list[tuple[Range, Budget | None]]:
    """Of a fair budget: the parts of a prompt of `length` tokens and what each may keep; None: all of it.

    window: of the layer; what the next query does not see has no share. The most recent tokens are the same part of
    each share as of the whole, and every share has as many sinks.
    """
    inside, first = budget.inside, 0 if window is None else max(0, length + 1 - window)
    if inside is None:
        raise ValueError(f"{budget} is not fair")
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

    What is divided is what is chosen, or all that is recent where nothing is: the most is at most what there is to
    choose from. Layer l and its counterpart, as far from the end as l from the beginning, get twice the mean.
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

    What is missing goes evenly to those with room, what is too much comes evenly from those above their least.
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
