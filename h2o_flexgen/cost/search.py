"""The fastest policy for a workload on a machine: block shapes, a linear program for each, whole units, simulation.

FlexGen's search (arXiv 2303.06865, section 4.3), with an eviction budget, prefill and decode apart, and a disk whose
reads and writes disturb each other. For every shape a quick relaxation of its program bounds what it can reach; in the
order of these bounds placements are made and simulated until no bound beats what was found. No assumption is made about
how time depends on the shape. Results depend on the question alone, not on how fast this machine is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import KINDS
from h2o_flexgen.cost.candidate import Candidate, fit, place, shift
from h2o_flexgen.cost.linear import Programs
from h2o_flexgen.cost.lp import Program, solve
from h2o_flexgen.cost.shapes import BlockChoice, BlockChoices
from h2o_flexgen.errors import PlanError
from h2o_flexgen.schedule.request import PlanRequest
from h2o_flexgen.units import GIB, MIB, format_bytes, size_at_least

GOOD_ENOUGH = 1.01
"""Among candidates this close to the best, which no prediction can tell apart, that move up to MORE_BYTES times the
fewest bytes: first the fewest GPU batches per block, then blocks that divide the work evenly, then the smallest block,
which starts sooner and leaves more memory free. Of bits of weights the most."""
MORE_BYTES = 1.1
RESIDENT = 1.05
"""A plan that moves nothing wins over plans that are faster by less: a prediction errs most in what links do."""
PERPLEXITY: Mapping[int, float | None] = {16: 0.0, 8: 0.004, 4: 0.128}
"""By how much of itself perplexity grows with weights of so many bits in groups of 64, as measured on Gemma 3 270M, see
docs/bits.md; None: that was not measured."""
_TICKS = 60_000  # to simulate in one search: a few seconds
_POLISH_TICKS = 20_000
_WAITS = 1.02  # times the bound: slower candidates wait for links now and then
_MOST = 30  # candidates to simulate: where so many are alike, no later one is much better
_ALIKE = 0.01  # bounds that differ by less say nothing: quickly simulated candidates go first
_ROUNDS = 2  # of looking around the best shapes
_NEAR = 1.5  # times the best bound: shapes that a little more memory might make the best
_AMPLE = 1 << 50  # bytes


@dataclass(frozen=True)
class BitsChoice:
    """The bits to choose among. throughputs: generated tokens per second by bits; None where nothing fits."""

    throughputs: Mapping[int, float | None]

    @property
    def bits(self) -> int:
        """The most that are as fast as any."""
        known = {bits: rate for bits, rate in self.throughputs.items() if rate is not None}
        return max(bits for bits, rate in known.items() if GOOD_ENOUGH * rate >= max(known.values()))

    @property
    def text(self) -> str:
        tried = ", ".join(
            f"{bits} bits {'do not fit' if rate is None else f'{rate:.3g} tokens/s'}"
            for bits, rate in self.throughputs.items()
        )
        return f"{self.bits} of {tried} (predicted); {quality(self.bits)}"

    def to_json(self) -> dict[str, Any]:
        rates = {str(bits): rate for bits, rate in self.throughputs.items()}
        return {"chosen": self.bits, "gen_throughput": rates, "quality": quality(self.bits), "text": self.text}


def quality(bits: int) -> str:
    """The quality that weights of so many bits cost, in a sentence."""
    more = PERPLEXITY[bits]
    if more is None:
        return f"{bits} bits: what they cost in perplexity was not measured"
    return (
        f"{bits} bits: perplexity about {more:+.1%} (a model of 270 M parameters)"
        if more
        else f"{bits} bits: the model as it is"
    )


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search. `tried` shapes were bounded, `simulated` candidates simulated."""

    best: Candidate
    runner_up: Candidate | None
    tried: int
    simulated: int
    more: Mapping[str, float] = field(default_factory=dict)
    """Generated tokens per second that one more GiB of each capped tier would add: the linear programs say so, with
    the block shape chosen anew."""
    bits: BitsChoice | None = None
    """Among which bits of weights was chosen; None where these were given."""

    @property
    def runner_up_throughput(self) -> float | None:
        """Generated tokens per second of `runner_up`, as far as it was simulated."""
        throughput, other = self.best.prediction.gen_throughput, self.runner_up
        return throughput * self.best.seconds / other.seconds if throughput and other else None

    @cached_property
    def binding(self) -> str | None:
        """The tier whose cap holds the throughput back most; None where more memory would not help."""
        tier = max(self.more, key=lambda name: self.more[name], default=None)
        return tier if tier and self.more[tier] > 1e-3 * (self.best.prediction.gen_throughput or 0.0) else None


def search(request: PlanRequest, solver: str = "highs") -> SearchResult:
    """The best policy. PlanError that names the cap that is too small, and the smallest that works, where none fits."""
    return _of_all_bits(request, solver) if request.choices else _PlanSearch(request, solver).run()


def _of_all_bits(request: PlanRequest, solver: str) -> SearchResult:
    """The best of all choices of bits; PlanError as of the fewest, which need least, where none fits."""
    found: dict[int, SearchResult] = {}
    refused: PlanError | None = None
    for bits, spec in request.choices.items():
        try:
            found[bits] = _PlanSearch(replace(request, spec=spec, choices={}), solver).run()
        except PlanError as error:
            refused = error
    if not found and refused is not None:
        raise refused
    rates = {bits: found[bits].best.prediction.gen_throughput if bits in found else None for bits in request.choices}
    choice = BitsChoice(rates)
    return replace(found[choice.bits], bits=choice)


class _PlanSearch:
    def __init__(self, request: PlanRequest, solver: str) -> None:
        self._request, self._solver = request, solver
        self._programs = Programs(request)
        self._known: dict[BlockChoice, Program] = {}
        self._bounds: dict[BlockChoice, float] = {}
        self._full: dict[BlockChoice, frozenset[str]] = {}  # the tiers that hold a bound back
        self._found: dict[OffloadPolicy, Candidate] = {}
        self._spent = 0

    def run(self) -> SearchResult:
        shapes = BlockChoices(self._request, self.bound)
        if not list(shapes.coarse()):
            self._last_resort(shapes)
        for _ in range(_ROUNDS if self._fitting else 0):
            list(shapes.fine(self._fitting))
        self._simulate()
        if not self._found:
            self._last_resort(shapes)
        # Prompts were cut as small as they get until now, so that nothing has to move for them.
        best = self._polished(self._farther(self._choose())).cut()
        others = [each for each in self._found.values() if _shape(each)[:2] != _shape(best)[:2]]
        runner_up = min(others, key=_order, default=None)
        return SearchResult(best, runner_up, len(self._bounds), len(self._found), self._marginal(best))

    @property
    def _fitting(self) -> dict[BlockChoice, float]:
        return {shape: bound for shape, bound in self._bounds.items() if not math.isinf(bound)}

    def bound(self, shape: BlockChoice) -> float:
        """Seconds per sequence, as far as a relaxed program can tell; infinite where nothing fits."""
        if shape not in self._bounds:
            self._known[shape] = self._programs.of(shape.policy(self._request), waits=False)
            self._bounds[shape], self._full[shape] = _relaxed(self._known[shape], shape, self._solver)
        return self._bounds[shape]

    def _simulate(self) -> None:
        """Candidates in the order of their bounds, until no bound beats what was found."""
        waiting: list[tuple[int, int, BlockChoice, bool]] = []
        for shape, bound in self._fitting.items():
            waiting.append((_grade(bound), shape.num_gpu_batches, shape, False))
            resident = self._resident(shape)
            if resident is not None:
                seconds = self._known[shape].seconds(resident) / shape.block_size
                waiting.append((_grade(seconds), shape.num_gpu_batches, shape, True))
        best = math.inf
        for grade, _, shape, resident_only in sorted(waiting):
            shapes = {_shape(each)[:2] for each in self._found.values()}
            enough = len(self._found) >= _MOST or self._spent > _TICKS or grade > _grade(best) + 1
            if enough and len(shapes) > 1:  # one to run, and one to compare it with
                break
            best = min(best, self._try(shape, resident_only))

    def _try(self, shape: BlockChoice, resident_only: bool) -> float:
        """Seconds per sequence of the best placement found for `shape`; infinite without any."""
        if resident_only:
            here = {kind: {self._request.compute_tier: 1.0} for kind in KINDS}
            placed = place(self._request, self._request.with_shares(shape.policy(self._request), here))
            return math.inf if placed.over else self._add(placed)
        best = math.inf
        for lookahead in self._lookaheads:
            found = self._fitted(replace(shape.policy(self._request), lookahead=lookahead))
            best = min([best, *map(self._add, found)])
            # Reading further ahead takes memory: only where links were waited for is it worth a try.
            if not found or best <= _WAITS * self._bounds.get(shape, 0.0):
                break
        return best

    @property
    def _lookaheads(self) -> tuple[int, ...]:
        given = self._request.policy
        return (given.lookahead,) if "lookahead" in self._request.fixed or not given.overlap else (1, 2, 3)

    def _fitted(self, policy: OffloadPolicy) -> list[Candidate]:
        """Placements of a block, in whole units: the fastest, and with a cache on disk the fastest without."""
        request, program = self._request, self._programs.of(policy)
        found = fit(request, policy, program, self._solver)
        candidates = [] if found is None else [found]
        slow = frozenset((kind, "disk") for kind in ("cache", "hidden"))
        if found is not None and any(getattr(found.policy, kind)["disk"] for kind, _ in slow):
            # A cache on disk is late for its tick now and then, which averages hide.
            without = fit(request, policy, replace(program, banned=slow), self._solver)
            candidates += [] if without is None else [without]
        return candidates

    def _resident(self, shape: BlockChoice) -> dict[str, dict[str, float]] | None:
        """Everything on the compute tier as far as it is free, of one GPU batch: more of them then bring nothing."""
        if shape.num_gpu_batches > 1 and "num_gpu_batches" not in self._request.fixed:
            return None
        here = {kind: {self._request.compute_tier: 1.0} for kind in KINDS}
        return here | {kind: dict(shares) for kind, shares in self._known[shape].fixed.items()}

    def _add(self, candidate: Candidate) -> float:
        """Its seconds per sequence, simulated unless that was done before."""
        if candidate.policy not in self._found:
            self._found[candidate.policy] = candidate
            self._spent += candidate.ticks
        return self._found[candidate.policy].seconds

    def _choose(self) -> Candidate:
        fastest = min(each.seconds for each in self._found.values())
        resident = [each for each in self._found.values() if not each.moves and each.seconds <= RESIDENT * fastest]
        among = resident or list(self._found.values())
        close = [each for each in among if each.seconds <= GOOD_ENOUGH * min(other.seconds for other in among)]
        fewest = min(each.moved for each in close)
        return min((each for each in close if each.moved <= MORE_BYTES * fewest), key=_plainness)

    def _farther(self, best: Candidate) -> Candidate:
        """`best`, or its block with weights read further ahead than `_try` had reason to look at."""
        for lookahead in self._lookaheads if best.moves else ():
            if lookahead > best.policy.lookahead:
                for found in self._fitted(replace(_shape(best).policy(self._request), lookahead=lookahead)):
                    if self._add(found) * GOOD_ENOUGH < best.seconds:  # it takes memory that could be left free
                        best = found
        return best

    def _polished(self, best: Candidate) -> Candidate:
        """`best`, with units moved one by one as long as that helps; itself where nothing moves."""
        if not best.moves:
            return best
        limit = self._spent + _POLISH_TICKS
        improved = best.shrunk is None  # one unit of very many is less than an estimate can tell
        while improved and self._spent < limit:
            improved = False
            for kind in KINDS:
                for tier in self._request.tiers:
                    for down in (-1, 1):
                        moved = shift(best, kind, tier, down)
                        if moved is None or moved.over or moved.policy in self._found:
                            continue
                        if self._add(moved) < best.seconds * (1 - 1e-6):
                            best, improved = moved, True
        return best

    def _marginal(self, best: Candidate) -> dict[str, float]:
        """Generated tokens per second for one more GiB of each tier."""
        throughput = best.prediction.gen_throughput or 0.0
        fitting = self._fitting
        if not fitting or _shape(best) not in fitting:
            return {}
        lowest = min(fitting.values())
        near = [shape for shape, bound in fitting.items() if bound <= _NEAR * lowest]
        gains = {}
        for tier, cap in self._request.capped.items():
            gained = self._with_more(near, tier, cap + GIB)
            gains[tier] = throughput * max(0.0, lowest / min(lowest, gained) - 1)
        return gains

    def _with_more(self, near: list[BlockChoice], tier: str, cap: int) -> float:
        """The lowest bound under another cap, of the shapes in `near` and of larger ones that then fit."""
        bounds: dict[BlockChoice, float] = {}

        def bound(shape: BlockChoice) -> float:
            if shape not in bounds:
                bounds[shape] = self.bound(shape)
                if tier in self._full[shape]:
                    caps = {**self._known[shape].caps, tier: cap}
                    bounds[shape], _ = _relaxed(replace(self._known[shape], caps=caps), shape, self._solver)
            return bounds[shape]

        for shape in near:
            bound(shape)
        fitting = {shape: each for shape, each in bounds.items() if not math.isinf(each)}
        list(BlockChoices(self._request, bound).fine(fitting))
        return min(bounds.values())

    def _last_resort(self, shapes: BlockChoices) -> None:
        """The smallest blocks, as full programs place them; PlanError where not even these fit."""
        for shape in shapes.smallest():
            self._known[shape] = self._programs.of(shape.policy(self._request), waits=False)
            if math.isinf(self._try(shape, False)):
                self._try(shape, True)
        if not self._found:
            raise refuse(self._request, shapes.smallest(), self._solver)


def _grade(seconds: float) -> int:
    """The same number for times that are alike."""
    return math.floor(math.log(seconds) / _ALIKE) if math.isfinite(seconds) else 1 << 30


def _relaxed(program: Program, shape: BlockChoice, solver: str) -> tuple[float, frozenset[str]]:
    """Seconds per sequence, infinite where nothing fits, and the tiers of which more might help."""
    solution = solve(program, solver, relaxed=True)
    if solution is None:
        return math.inf, frozenset(program.caps)
    return solution.seconds / shape.block_size, solution.full


def _shape(candidate: Candidate) -> BlockChoice:
    policy = candidate.policy
    return BlockChoice(policy.gpu_batch_size, policy.num_gpu_batches, policy.cpu_cache_compute)


def _plainness(candidate: Candidate) -> tuple[int, bool, int, float, int, str]:
    """The plainest first, of candidates that take the same time; see GOOD_ENOUGH."""
    policy = candidate.policy
    return (policy.num_gpu_batches, _uneven(candidate), policy.block_size, *_order(candidate))


def _uneven(candidate: Candidate) -> bool:
    """Whether the last block is smaller than it had to be: 32 sequences as 20 + 12, but not 33 as 17 + 16."""
    request, policy = candidate.request, candidate.policy
    if request.endless:
        return False
    blocks = math.ceil(request.workload.num_sequences / policy.block_size)
    empty = blocks * policy.block_size - request.workload.num_sequences
    return empty >= blocks * policy.num_gpu_batches  # a row less in every GPU batch would do


def _order(candidate: Candidate) -> tuple[float, int, str]:
    """Fastest first; of equals the smaller block, then whichever comes first in the alphabet."""
    return candidate.seconds, candidate.policy.block_size, str(candidate.policy.to_json())


def refuse(request: PlanRequest, shapes: Sequence[BlockChoice], solver: str) -> PlanError:
    """The error when not even `shapes`, the smallest blocks of a request, fit: which cap is too small.

    One cap is raised, wherever that is enough; else as few as will do.
    """
    programs = {shape: Programs(request).of(shape.policy(request)) for shape in shapes}
    capped, ways = list(request.capped), list[dict[str, int]]()
    for count in range(1, len(capped) + 1):
        ways = ways or [
            way for tiers in combinations(capped, count) if (way := _raised(request, programs, tiers, solver))
        ]
    if not ways:
        return PlanError("no block shape fits, whatever the caps are", change="leave placement flags out")
    tiers = " or the ".join(dict.fromkeys(tier for way in ways for tier in way))
    shape, work = min(shapes), request.workload
    caps = request.caps
    have = ", ".join(f"{tier} {format_bytes(cap)}{caps.origin(tier)}" for tier, cap in request.capped.items())
    raised = [[f"{caps.flag(tier)} {size_at_least(nbytes)}" for tier, nbytes in way.items()] for way in ways]
    return PlanError(
        f"{request.spec.name}, {work.prompt_len} + {work.gen_len} tokens: even a block of {shape.gpu_batch_size} x "
        f"{shape.num_gpu_batches} sequences does not fit into {have}",
        f"the {tiers} cap is too small; the smallest that works: " + ", or ".join(map(" and ".join, raised)),
        "or a smaller --hh-ratio, --prompt-len or --prefill-chunk, or fewer fixed placement flags",
    )


def _raised(
    request: PlanRequest, programs: Mapping[BlockChoice, Program], tiers: Sequence[str], solver: str
) -> dict[str, int] | None:
    """The smallest caps of `tiers`, of the fastest first, under which something fits; None where nothing does."""
    found = {tier: _AMPLE for tier in tiers}

    def enough(tier: str, mebibytes: int) -> bool:
        return _fits(request.with_caps(**{**found, tier: mebibytes * MIB}), programs, solver)

    if not _fits(request.with_caps(**found), programs, solver):
        return None
    for tier in tiers:
        low, step = request.capped[tier] // MIB, 64
        while not enough(tier, low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > max(1, high >> 10):
            middle = (low + high) // 2
            low, high = (low, middle) if enough(tier, middle) else (middle, high)
        found[tier] = high * MIB
    return found


def _fits(request: PlanRequest, programs: Mapping[BlockChoice, Program], solver: str) -> bool:
    return any(
        fit(request, shape.policy(request), replace(program, caps=request.capped), solver)
        for shape, program in programs.items()
    )
