"""What a store of prefixes saves a job, and which entries it had better evict.

    python -m benchmarks.prefixes job --requests 10000 --headers 50 --output results/local/prefixes.jsonl
    python -m benchmarks.prefixes replay --requests 4000

`job`: requests in any order over headers of 64 to 512 tokens, on the demo model: without a store, with an empty one,
and by an engine that finds what the one before left on disk; and the hit rates of eviction orders on these headers.
`replay`: blocks of 16 tokens of made-up requests whose shape is that of the two traces of "KVCache Cache in the Wild"
(arXiv 2506.02634), as published: conversations of one turn or several under a system prompt (A), and single requests
under the prompts of customers (B). Lengths and shares are chosen so that an endless store, and the least recently used
order at these caps, find what they find in the published traces. A+B has both, B slowed down to last as long, in one
store. Belady's order knows the future.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.records import facts, print_record
from h2o_flexgen import LLM, EvictionConfig, SamplingParams
from h2o_flexgen.cache.prefix_store import GRAIN, LIFE
from h2o_flexgen.cache.reuse import Category, ExpectedReuse, LeastRecent, ReuseOrder

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
"""Of all distinct bytes: the caps of replays."""
BLOCK = 16
"""Tokens, as the published traces have them."""
WINDOW = 8192
"""Requests that a job reads at a time."""
LIVES = {"A": 600.0, "B": 60.0, "A+B": 600.0}
"""Seconds for which an entry is expected to be worth its room, by workload."""


class Access(NamedTuple):
    """Entries of one prompt in their order, each (name, size, offset), when they are asked for, and by what."""

    entries: list[tuple[Hashable, int, int]]
    now: float
    category: Category


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefixes", allow_abbrev=False)
    parser.add_argument("what", choices=("job", "replay"))
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--headers", type=int, default=50)
    parser.add_argument("--output", type=Path, help="append the record here")
    args = parser.parse_args()
    command = ["python", "-m", "benchmarks.prefixes", args.what, "--requests", str(args.requests)]
    found = job(args.requests, args.headers) if args.what == "job" else replay(args.requests)
    print_record({"what": args.what, **facts(command), **found}, args.output)


# A job over headers


def job(requests: int, headers: int) -> dict[str, Any]:
    """Prompt tokens computed, FLOPs predicted and counted, seconds of prefill; the same tokens each time."""
    source = random.Random(0)
    tops = [[source.randrange(4, 4096) for _ in range(source.randrange(64, 512))] for _ in range(headers)]
    chosen = [source.randrange(headers) for _ in range(requests)]
    own = [[source.randrange(4, 4096) for _ in range(source.randrange(8, 40))] for _ in range(requests)]
    prompts = [tops[header] + tail for header, tail in zip(chosen, own, strict=True)]
    found: dict[str, Any] = {"prompt_tokens": sum(map(len, prompts))}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, dict[str, Any]] = {"none": {}, "empty": {"prefix_dir": folder}, "warm": {"prefix_dir": folder}}
        for name, settings in runs.items():
            found[name] = _run(prompts, settings)
    found["same_tokens"] = len({each.pop("answers") for each in (found["none"], found["empty"], found["warm"])}) == 1
    kept = [len(top) // GRAIN * GRAIN for top in tops]
    used = sorted(set(chosen))
    rests = [(len(prompt) - kept[header], kept[header]) for prompt, header in zip(prompts, chosen, strict=True)]
    found["empty"]["predicted_flops"] = _flops([*((kept[header], 0) for header in used), *rests], requests)
    found["warm"]["predicted_flops"] = _flops(rests, requests)
    windows = [range(at, min(at + WINDOW, requests)) for at in range(0, requests, WINDOW)]
    by_window = [i for window in windows for i in sorted(window, key=chosen.__getitem__)]
    for name, order in (("as it runs", by_window), ("as it comes", range(requests))):
        asked = [Access([(chosen[i], kept[chosen[i]], 0)], float(at), ("", 0)) for at, i in enumerate(order)]
        found[f"hit rates, {name}"] = hit_rates(asked, LIFE)
    return found


def _run(prompts: list[list[int]], settings: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    with LLM("demo", dtype="float32", eviction=EvictionConfig("h2o", ratio=0.2), **settings) as llm:
        answers, flops, computed, seconds, started = list[Any](), 0, 0, 0.0, time.monotonic()
        for at in range(0, len(prompts), WINDOW):
            answers += [tuple(output.token_ids) for output in llm.generate(prompts[at : at + WINDOW], params)]
            assert llm.last_record is not None
            flops += llm.last_record.flops
            computed += llm.last_record.computed_prompt_tokens or 0
            seconds += llm.last_record.prefill_s
        counts = {} if llm.prefixes is None else vars(llm.prefixes.counts)
    whole = time.monotonic() - started
    made = {"computed": computed, "flops": flops, "prefill_s": seconds, "seconds": whole, "answers": tuple(answers)}
    return {**made, **counts}


def _flops(parts: Sequence[tuple[int, int]], rows: int) -> int:
    """Of the demo model's prefill: of (tokens, tokens before them) that go through it, and `rows` last tokens."""
    layers, width, inner, vocabulary = 6, 256, 1024, 4096
    tokens = sum(own for own, _ in parts)
    pairs = sum(own * (own + before) for own, before in parts)
    products = 8 * width**2 * layers * tokens + 4 * width * inner * ((layers - 1) * tokens + rows)
    return products + 4 * width * layers * pairs + 2 * width * vocabulary * rows


# Replays


def replay(requests: int) -> dict[str, Any]:
    """Hit rates in tokens at caps that are shares of what is distinct."""
    made = {"A": conversations(requests), "B": shared_prompts(requests)}
    slowed = [each._replace(now=each.now * 7200 / made["B"][-1].now) for each in made["B"]]
    made["A+B"] = sorted([*made["A"], *slowed], key=lambda access: access.now)
    return {f"trace {name}": hit_rates(asked, LIVES[name]) for name, asked in made.items()}


def hit_rates(asked: Sequence[Access], life: float) -> dict[str, Any]:
    """By order and cap: the share of all tokens asked for that were there."""
    distinct = {name: size for access in asked for name, size, _ in access.entries}
    total, every = sum(distinct.values()), sum(size for access in asked for _, size, _ in access.entries)
    found: dict[str, Any] = {"requests": len(asked), "ideal": round(1 - total / every, 4)}
    for share in SHARES:
        orders: dict[str, ReuseOrder[Hashable]] = {
            "fifo": FirstIn(),
            "lfu": LeastOften(),
            "lru": LeastRecent(),
            "ours": ExpectedReuse(life),
            "belady": Belady(asked),
        }
        hits = {name: _hits(asked, order, share * total) / every for name, order in orders.items()}
        found[f"{share:.0%}"] = {name: round(rate, 4) for name, rate in hits.items()}
    return found


def _hits(asked: Sequence[Access], order: ReuseOrder[Hashable], cap: float) -> int:
    """Tokens found; of a prompt only those before the first that is missing."""
    held, room, hits = dict[Hashable, int](), cap, 0
    for access in asked:
        for name, size, _ in access.entries:
            if name not in held:
                break
            hits += size
        for name, size, offset in reversed(access.entries):
            if name not in held:
                held[name] = size
                room -= size
            order.touch(name, access.category, offset, access.now)
        while room < 0:
            victim = order.victim(access.now)
            assert victim is not None
            order.forget(victim)
            room += held.pop(victim)
    return hits


class FirstIn(LeastRecent[Hashable]):
    """The entry that came first goes, however often it was asked for."""

    def touch(self, key: Hashable, category: Category, offset: int, now: float) -> None:
        self._held.setdefault(key, None)


class LeastOften:
    """The entry goes that was asked for least often while it was there, among equals the one longest unasked."""

    def __init__(self) -> None:
        self._by_uses: dict[int, LeastRecent[Hashable]] = defaultdict(LeastRecent)
        self._uses: dict[Hashable, int] = {}

    def touch(self, key: Hashable, category: Category, offset: int, now: float) -> None:
        uses = self._uses.get(key, 0)
        self.forget(key)
        self._uses[key] = uses + 1
        self._by_uses[uses + 1].touch(key, category, offset, now)

    def forget(self, key: Hashable) -> None:
        self._by_uses[self._uses.pop(key, 0)].forget(key)

    def victim(self, now: float, spared: Any = ()) -> Hashable | None:
        found = (self._by_uses[uses].victim(now, spared) for uses in sorted(self._by_uses))
        return next((key for key in found if key is not None), None)


class Belady:
    """The entry goes that is asked for last, or never again; among equals the deepest."""

    def __init__(self, asked: Sequence[Access]) -> None:
        uses: dict[Hashable, list[int]] = defaultdict(list)
        for at, access in enumerate(asked):
            for name, _, _ in access.entries:
                uses[name].append(at)
        self._uses = {name: iter([*times[1:], math.inf]) for name, times in uses.items()}
        self._next: dict[Hashable, float] = {}
        self._held: dict[Hashable, int] = {}
        self._queue: list[tuple[float, int, int, Hashable]] = []
        self._number = count()

    def touch(self, key: Hashable, category: Category, offset: int, now: float) -> None:
        self._next[key] = next(self._uses[key])
        self._held[key] = number = next(self._number)
        heapq.heappush(self._queue, (-self._next[key], -offset, number, key))

    def forget(self, key: Hashable) -> None:
        self._held.pop(key, None)

    def victim(self, now: float, spared: Any = ()) -> Hashable | None:
        while self._queue:
            _, _, number, key = self._queue[0]
            if self._held.get(key) == number:
                return key
            heapq.heappop(self._queue)
        return None


def conversations(requests: int) -> list[Access]:
    """Trace A: kinds of conversation, their share of several turns, how soon the next turn comes, in seconds."""
    kinds = {"text": (78, 0.47, 240), "file": (4, 0.51, 420), "multimodal": (3, 0.10, 300), "search": (15, 0.49, 360)}
    source, asked, numbers = random.Random(1), list[Access](), count()
    weights = [share for share, _, _ in kinds.values()]
    while len(asked) < requests:
        kind = source.choices(list(kinds), weights)[0]
        _, several, wait = kinds[kind]
        now, blocks = source.uniform(0, 7200), [("system", kind, i) for i in range(20)]
        turns = 1
        while turns < 30 and source.random() < (several if turns == 1 else 0.6):
            turns += 1
        for turn in range(turns):
            new = source.lognormvariate(math.log(450), 1.5) if turn == 0 else source.lognormvariate(math.log(150), 0.9)
            blocks = [*blocks, *((next(numbers),) for _ in range(max(1, int(new / BLOCK))))]
            if now < 7200:
                entries = [(block, BLOCK, BLOCK * at) for at, block in enumerate(blocks)]
                asked.append(Access(entries, now, (kind, turn)))
            answer = source.lognormvariate(math.log(300), 0.8)
            blocks = [*blocks, *((next(numbers),) for _ in range(int(answer / BLOCK)))]
            now += source.expovariate(1 / wait)
    return sorted(asked, key=lambda access: access.now)


def shared_prompts(requests: int) -> list[Access]:
    """Trace B: 24 requests a second of customers with a prompt each, a few of them busy, most hardly."""
    source, numbers = random.Random(2), count()
    customers = [max(2, int(source.lognormvariate(math.log(220), 0.7) / BLOCK)) for _ in range(requests // 20)]
    weights = [1 / (rank + 1) ** 1.3 for rank in range(len(customers))]
    now, asked = 0.0, list[Access]()
    for _ in range(requests):
        now += source.expovariate(24)
        customer = source.choices(range(len(customers)), weights)[0]
        shared: list[Hashable] = [(customer, i) for i in range(customers[customer])]
        own = [(None, next(numbers)) for _ in range(max(1, int(source.lognormvariate(math.log(260), 0.9) / BLOCK)))]
        entries = [(block, BLOCK, BLOCK * at) for at, block in enumerate([*shared, *own])]
        asked.append(Access(entries, now, ("api", 0)))
    return asked


if __name__ == "__main__":
    main()
