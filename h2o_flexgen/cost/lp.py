"""Where weights, caches and hidden states should live for one block shape, as a linear program (FlexGen, section 4.3).

Variables are the shares of each kind on each tier. The time of a phase is that of its busiest resource, computation or
link, or with overlap off the sum of them all; the whole is weighed over prefill and decode steps. The bytes on a tier
grow with the shares; transfer buffers, which are there as soon as anything of a kind uses a tier, are charged by
binary variables, so that the program says exactly what `schedule.footprint` says. Seconds and bytes are scaled to
milliseconds and GB, without which solvers lose digits. Cost inside a maximum leaves slack, so that many placements are
equally fast: a second program takes the one of them with the least bytes on slow tiers, and every solver finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from h2o_flexgen.config.checks import one_of
from h2o_flexgen.config.offload import Shares
from h2o_flexgen.config.placement import KINDS
from h2o_flexgen.errors import UsageError

SOLVERS = ("highs", "cbc")
_INSTALLED_BY = {"highs": "pip install highspy", "cbc": "pip install 'pulp[cbc]'"}
_OPTIMAL = 1  # PuLP's status
SLACK = 1e-6
"""How much longer than the optimum the second program may take; with 1e-9 CBC calls feasible programs infeasible."""
_DIGITS = 4  # of a share: below them two solvers differ
_FULL = 1e-5  # of a cap: less room than that may be the solver's tolerance
_GB, _MS = 1e9, 1e-3
_PREFERENCE = {"weights": 1.0, "cache": 1.01, "hidden": 1.02}  # of equal bytes, weights go to the slower tier

KindTier = tuple[str, str]
"""A kind and the tier that it, or a share of it, lives on."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds per resource of one pass over the model: `base`, and for each kind on a tier its share times `slope`.

    times: how many such passes a block takes; summed: whether resources wait for one another (overlap off).
    """

    name: str
    times: float
    base: Mapping[str, float]
    slope: Mapping[KindTier, Mapping[str, float]]
    summed: bool = False

    def seconds(self, shares: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        busy = dict(self.base)
        for (kind, tier), slope in self.slope.items():
            for resource, seconds in slope.items():
                busy[resource] = busy.get(resource, 0.0) + seconds * shares[kind].get(tier, 0.0)
        return busy

    def contended(self, slowdown: Mapping[str, Mapping[str, float]]) -> PassTimes:
        """The same where resources disturb each other, `slowdown` of a HardwareProfile.

        Where `a` takes f times as long beside `b`, and `b` f' times beside `a`, `a` is busy for its own seconds and
        f' (1 - 1/f) of those of `b`, if `b` is the shorter. Reading and writing one disk, f = f' = 2, they add up.
        """

        def mixed(seconds: Mapping[str, float]) -> dict[str, float]:
            found = dict(seconds)
            for slowed, factors in slowdown.items():
                for beside, factor in factors.items():
                    if extra := seconds.get(beside, 0.0):
                        share = slowdown.get(beside, {}).get(slowed, 1.0) * (1 - 1 / factor)
                        found[slowed] = found.get(slowed, 0.0) + share * extra
            return found

        return replace(self, base=mixed(self.base), slope={pair: mixed(each) for pair, each in self.slope.items()})


@dataclass(frozen=True)
class Charge:
    """Bytes on `tier` as soon as anything of `kind` lives on `on`; charges with the same `what` count once."""

    kind: str
    on: str
    tier: str
    what: str
    nbytes: float


@dataclass(frozen=True)
class Program:
    """One block shape. `tiers` fastest first, the compute tier the first; `caps` of the tiers that have one.

    held    bytes per tier that are there wherever things live
    grows   bytes per tier of each kind on a tier at share 1
    fixed   the shares of the kinds that are not to be chosen
    banned  kinds on tiers that are not to be used, unless they are fixed
    """

    tiers: tuple[str, ...]
    caps: Mapping[str, float]
    phases: tuple[PassTimes, ...]
    held: Mapping[str, float]
    grows: Mapping[KindTier, Mapping[str, float]]
    charges: tuple[Charge, ...] = ()
    fixed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    banned: frozenset[KindTier] = frozenset()

    def seconds(self, shares: Mapping[str, Mapping[str, float]]) -> float:
        return sum(
            phase.times * (sum(busy.values()) if phase.summed else max(busy.values(), default=0.0))
            for phase in self.phases
            for busy in (phase.seconds(shares),)
        )


@dataclass(frozen=True)
class Solution:
    """The best shares, and the seconds of the block with them: a lower bound on those of whole units.

    full: tiers that are filled to their caps; more of the others would not change what a relaxed program finds.
    """

    shares: Mapping[str, Shares]
    seconds: float
    full: frozenset[str] = frozenset()


def solve(program: Program, solver: str = "highs", *, relaxed: bool = False) -> Solution | None:
    """The fastest placement; None where none fits.

    relaxed: with buffers charged in proportion, and without the second program: a quick bound, not a plan. UsageError
    for a solver that is not there.
    """
    model = _PulpModel(program, relaxed)
    if not model.solve(solver):
        return None
    best = model.value(model.total) * _MS
    shares, full = model.shares, model.full
    if not relaxed:
        model.problem += model.total <= best / _MS * (1 + SLACK)
        model.problem.setObjective(model.slow_bytes)
        # At the edge of the caps the solver's tolerances can leave nothing that is as fast: the first answer stands.
        shares = model.shares if model.solve(solver) else shares
    return Solution({kind: tidy(of_tiers, _DIGITS) for kind, of_tiers in shares.items()}, best, full)


class _PulpModel:
    """A Program in PuLP's terms. Imports PuLP, and numpy with it, only when it is made."""

    def __init__(self, program: Program, relaxed: bool = False) -> None:
        import pulp

        self._pulp, self._program = pulp, program
        self.problem = pulp.LpProblem("placement", pulp.LpMinimize)
        self._share = {(kind, tier): self._variable(f"{kind}_{tier}", 1) for kind in KINDS for tier in program.tiers}
        # Whether anything of a kind is on a tier; relaxed, its share says how far it is.
        self._used: dict[KindTier, Any] = dict(self._share) if relaxed else {}
        self._buffer: dict[tuple[str, str, str], Any] = {}
        self._times = [self._variable(f"time_{phase.name}") for phase in program.phases]
        self.total = pulp.lpSum(phase.times * time for phase, time in zip(program.phases, self._times, strict=True))
        self.problem += self.total
        for charge in program.charges:
            self._charge(charge)
        self._constrain()

    def _variable(self, name: str, most: float | None = None, category: str = "Continuous") -> Any:
        return self.problem.add_variable(name, 0, most, category)

    def _charge(self, charge: Charge) -> None:
        pair = (charge.kind, charge.on)
        if pair not in self._used:
            self._used[pair] = self._variable(f"uses_{charge.kind}_{charge.on}", 1, self._pulp.LpBinary)
            self.problem += self._share[pair] <= self._used[pair]
        key = (charge.kind, charge.tier, charge.what)
        if key not in self._buffer:
            self._buffer[key] = self._variable(f"buffer_{len(self._buffer)}")
        self.problem += self._buffer[key] >= charge.nbytes / _GB * self._used[pair]

    def _constrain(self) -> None:
        program = self._program
        for kind in KINDS:
            self.problem += self._pulp.lpSum(self._share[kind, tier] for tier in program.tiers) == 1
            for tier in program.tiers:
                if kind in program.fixed:
                    self.problem += self._share[kind, tier] == program.fixed[kind].get(tier, 0.0)
                elif (kind, tier) in program.banned:
                    self.problem += self._share[kind, tier] == 0
        for phase, time in zip(program.phases, self._times, strict=True):
            resources = dict.fromkeys([*phase.base, *(name for slope in phase.slope.values() for name in slope)])
            busy = [self._busy(phase, resource) for resource in resources]
            for seconds in [self._pulp.lpSum(busy)] if phase.summed else busy:
                self.problem += time >= seconds
        for tier, cap in program.caps.items():
            self.problem += self.held_on(tier) <= cap / _GB

    def _busy(self, phase: PassTimes, resource: str) -> Any:
        slopes = [
            (self._share[pair], slope[resource] / _MS) for pair, slope in phase.slope.items() if resource in slope
        ]
        return self._sum(slopes, phase.base.get(resource, 0.0) / _MS)

    def held_on(self, tier: str) -> Any:
        """GB on `tier`."""
        grows = [(self._share[pair], by[tier] / _GB) for pair, by in self._program.grows.items() if tier in by]
        lent = [(variable, 1.0) for (_, place, _), variable in self._buffer.items() if place == tier]
        return self._sum([*grows, *lent], self._program.held.get(tier, 0.0) / _GB)

    def _sum(self, terms: list[tuple[Any, float]], constant: float) -> Any:
        """The sum of variables times their factors, and of `constant`."""
        if hasattr(self._pulp, "lpSum_vars_coefs"):  # since PuLP 4
            return self._pulp.lpSum_vars_coefs(terms) + constant
        return self._pulp.LpAffineExpression(terms, constant)

    @property
    def full(self) -> frozenset[str]:
        caps = self._program.caps.items()
        return frozenset(tier for tier, cap in caps if self.value(self.held_on(tier)) > (1 - _FULL) * cap / _GB)

    @property
    def slow_bytes(self) -> Any:
        """GB below the compute tier, those on disk counted twice."""
        rank = {tier: number for number, tier in enumerate(self._program.tiers)}
        grows = self._program.grows
        return self._pulp.lpSum(
            rank[tier] * _PREFERENCE[kind] * grows.get((kind, tier), {}).get(tier, 0.0) / _GB * self._share[kind, tier]
            for kind in KINDS
            for tier in self._program.tiers[1:]
        )

    def solve(self, solver: str) -> bool:
        chosen = _solver(self._pulp, solver)
        with _silent_highs() if solver == "highs" else nullcontext():
            found = self.problem.solve(chosen)
        return bool(getattr(found, "status", found) == _OPTIMAL)  # PuLP 3 says the status alone

    def value(self, expression: Any) -> float:
        return float(self._pulp.value(expression))

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """By kind and tier, as the solver left them."""
        return {kind: {tier: self.value(self._share[kind, tier]) for tier in self._program.tiers} for kind in KINDS}


def _solver(pulp: Any, name: str) -> Any:
    """HiGHS runs in this process, CBC in one of its own. UsageError for another name, and for one not installed."""
    one_of(name, "--solver", SOLVERS)
    options: dict[str, Any] = {"msg": False, "gapRel": 0.0, "threads": 1}
    # A heuristic for large programs, which would take most of the time of such small ones.
    quick = {"mip_heuristic_run_feasibility_jump": False}
    # PuLP 3 brings a CBC along; PuLP 4 will not, and asks for one that is installed.
    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    solvers = [pulp.HiGHS(**options, **quick)]
    if name == "cbc":
        solvers = [pulp.COIN_CMD(path=path, **options) for path in (None, bundled)]
    for solver in solvers:
        if solver.available():
            return solver
    raise UsageError(f"the solver {name} is not installed", "needed HiGHS or CBC", _INSTALLED_BY[name])


@contextmanager
def _silent_highs() -> Iterator[None]:
    """HiGHS 1.16 writes two lines about itself where answers go, as it is made: before PuLP can forbid it."""
    from highspy import Highs

    made: Any = Highs
    enable = made.enableCallbacks  # the last step of its making

    def silently(highs: Any) -> None:
        highs.setOptionValue("output_flag", False)
        enable(highs)

    made.enableCallbacks = silently
    try:
        yield
    finally:
        made.enableCallbacks = enable


def tidy(shares: Mapping[str, float], digits: int = 6) -> Shares:
    """Rounded to so many decimals, what that leaves over or takes away going to the largest."""
    kept = {tier: rounded for tier, share in shares.items() if (rounded := round(share, digits)) > 0}
    largest = max(kept, key=lambda tier: kept[tier])
    rest = sum(share for tier, share in kept.items() if tier != largest)
    return Shares({**kept, largest: round(1.0 - rest, digits)})
