"""From block shapes to the linear programs of their placements: coefficients read off footprints and prices.

A footprint and a price with everything on the compute tier, and one for each kind on each other tier, give all that is
linear in the shares. So a program follows whatever `schedule.footprint` and `cost.model` say, without a formula of its
own. Everything else is taken as favourable as it can be, so that a program refuses nothing that fits: weight buffers
are those of a layer's units, though embeddings may be larger; recorded steps take no memory, and the time that they
save is saved wherever weights are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.placement import KINDS, Placement
from h2o_flexgen.cost.lp import Charge, KindTier, PassTimes, Program
from h2o_flexgen.cost.model import BatchPrices, CostModel
from h2o_flexgen.schedule.footprint import RECORDED, footprint
from h2o_flexgen.schedule.request import PlanRequest
from h2o_flexgen.schedule.work import links

ONCE = frozenset(
    {"output projection", "prompts for the cpu"}
    | {f"{kind} {what}" for kind in ("weight", "cache", "hidden") for what in ("buffers", "staging buffers")}
)
"""Items of a footprint that are there as soon as anything of a kind moves, however little."""
_HIDDEN = 0.8  # of the weights may be streamed without waiting, as simulations show: resident units make room
_BESIDE: KindTier = ("cache", "cpu")
_WORKSPACE = "workspace"  # on cpu beside a gpu: as soon as any attention is computed there


class _Memory(NamedTuple):
    """Bytes on each tier: bytes held whatever the shares, bytes that grow with them, and buffers."""

    held: Counter[str]
    grows: dict[KindTier, Counter[str]]
    charges: tuple[Charge, ...]


class Programs:
    """The programs of one request. Parts that block shapes have in common are worked out once."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._memories: dict[tuple[int, int, bool, int], _Memory] = {}
        self._prices: dict[tuple[int, bool, bool, bool], dict[KindTier | None, BatchPrices]] = {}

    def of(self, policy: OffloadPolicy, *, waits: bool = True) -> Program:
        """The placements of one block of `policy`'s shape; its own placements do not matter.

        waits: whether to price what a short lookahead waits for; without, the program bounds any lookahead.
        """
        request, memory = self.request, self._memory(policy)
        return Program(
            tiers=request.tiers,
            caps=request.capped,
            phases=tuple(self._phases(policy, waits)),
            held=memory.held,
            grows=memory.grows,
            charges=memory.charges,
            fixed=request.fixed_shares(policy),
        )

    def _away(self, many: bool) -> list[KindTier]:
        """Every kind with every tier but the compute tier, as far as it can be there."""
        return [(kind, tier) for kind in (KINDS if many else KINDS[:2]) for tier in self.request.tiers[1:]]

    # ---- memory

    def _memory(self, policy: OffloadPolicy) -> _Memory:
        """Each GPU batch beyond the second adds the same: footprints of two and of three say what."""
        more = policy.num_gpu_batches - 2
        if more <= 0:
            return self._known_memory(policy)
        two, three = (self._known_memory(replace(policy, num_gpu_batches=count)) for count in (2, 3))
        grows = {pair: _line(two.grows[pair], three.grows[pair], more) for pair in two.grows}
        return _Memory(_line(two.held, three.held, more), grows, two.charges)

    def _known_memory(self, policy: OffloadPolicy) -> _Memory:
        key = (policy.gpu_batch_size, policy.num_gpu_batches, policy.cpu_cache_compute, policy.lookahead)
        if key not in self._memories:
            self._memories[key] = self._new_memory(policy)
        return self._memories[key]

    def _new_memory(self, policy: OffloadPolicy) -> _Memory:
        here = self._amounts(policy, None)
        grows: dict[KindTier, Counter[str]] = {}
        charges: list[Charge] = []
        for pair in self._away(policy.num_gpu_batches > 1):
            there, grown = self._amounts(policy, pair), Counter[str]()
            for tier, what in {**here, **there}:
                nbytes = there[tier, what] - here[tier, what]
                if what in ONCE or (what == _WORKSPACE and tier != self.request.compute_tier):
                    charges.append(Charge(*pair, tier, what, nbytes))
                else:  # of the weights only the layers went, and a share is of all
                    grown[tier] += round(nbytes * self._all_over_layers) if what == "weights" else nbytes
            grows[pair] = grown
        held = Counter[str]()
        for (tier, _), nbytes in here.items():
            held[tier] += nbytes
        return _Memory(held, grows, tuple(charge for charge in charges if charge.nbytes))

    def _amounts(self, policy: OffloadPolicy, pair: KindTier | None) -> Counter[tuple[str, str]]:
        items = footprint(self.request, policy, corner(self.request, policy, pair)).items
        return Counter({(item.tier, item.what): item.nbytes for item in items if item.what != RECORDED})

    @cached_property
    def _all_over_layers(self) -> float:
        """All weights over those of the layers, in bytes."""
        sizes = {key: group.nbytes(self.request.dtype) for key, group in self.request.spec.groups_by_key.items()}
        return sum(sizes.values()) / sum(nbytes for key, nbytes in sizes.items() if _of_layer(key))

    # ---- time

    def _phases(self, policy: OffloadPolicy, waits: bool) -> Iterator[PassTimes]:
        """The prompt's pass, and the decode step in the middle."""
        count, steps = policy.num_gpu_batches, self.request.workload.gen_len
        for name, passes in (("prefill", range(1)), ("decode", range(1, steps))):
            if not passes:
                return
            found = self._seconds(policy, passes)
            grounds = {pair: found[pair] for pair in (None, _BESIDE) if pair in found}
            base = {resource: count * seconds for resource, seconds in grounds[None].items()}
            slope: dict[KindTier, dict[str, float]] = {pair: {} for pair in self._away(count > 1)}
            for pair, there in found.items():
                if pair is not None:
                    ground = grounds[_BESIDE if self._favoured(policy, pair) else None]
                    slope[pair] = {name: count * (s - ground.get(name, 0.0)) for name, s in there.items()}
            tokens = policy.block_size * (self.request.computed_prompt if name == "prefill" else 1)
            chosen = self.request.spec.chosen_share(tokens)
            for (tier, link), (shared, experts) in self._weight_seconds.items():
                slope["weights", tier][link] = shared + chosen * experts
            # Units are attention and MLP halves, by turns.
            in_halves = len(self.request.spec.units) == 2 * self.request.spec.num_layers + 2
            if waits and policy.overlap and policy.lookahead == 1 and in_halves:
                price, size = self._priced(policy, True)[None], policy.block_size
                halves = [count * price.half_seconds(kind, passes, size) for kind in ("attn", "mlp")]
                # With two buffers each unit is read while the one before computes, and the longer of the two counts.
                for tier in self.request.tiers[1:]:
                    reads = [self._read_seconds(tier, kind) for kind in ("attn", "mlp")]
                    waiting = max(0.0, reads[0] - halves[1]) + max(0.0, reads[1] - halves[0])
                    late = self.request.spec.num_layers * waiting / (1 - _HIDDEN)
                    row = f"compute and waiting for weights from {tier}"
                    base[row] = base["compute"] - _HIDDEN * late
                    for each in slope.values():
                        each[row] = each.get("compute", 0.0)
                    slope["weights", tier][row] = late
            phase = PassTimes(name, len(passes), base, slope, summed=not policy.overlap)
            yield phase.contended(self.request.machine.slowdown) if policy.overlap else phase

    def _read_seconds(self, tier: str, kind: str) -> float:
        """Seconds to read one half of a layer from `tier` to the compute tier, link after link."""
        request = self.request
        nbytes = request.spec.groups_by_key[f"layers.0.{kind}"].buffer_bytes(request.dtype)
        path = links(tier, request.compute_tier, inward=True)
        return sum(request.machine.link(link).seconds(nbytes) for link in path)

    def _seconds(self, policy: OffloadPolicy, passes: range) -> dict[KindTier | None, dict[str, float]]:
        """Seconds of a GPU batch in one of `passes`, the mean over the call's blocks: the first takes new memory."""
        blocks = 1 if self.request.endless else max(1.0, self.request.workload.num_sequences / policy.block_size)
        both = [self._priced(policy, later) for later in (False, True)[: 1 + (blocks > 1)]]
        found = [{pair: each.seconds(passes, policy.block_size) for pair, each in prices.items()} for prices in both]
        first, later = found[0], found[-1]
        return {
            pair: {name: (s + (blocks - 1) * later[pair].get(name, s)) / blocks for name, s in seconds.items()}
            for pair, seconds in first.items()
        }

    def _priced(self, policy: OffloadPolicy, later: bool) -> dict[KindTier | None, BatchPrices]:
        """The prices of a GPU batch with everything on the compute tier, and with caches or hidden states elsewhere."""
        many = policy.num_gpu_batches > 1
        key = (policy.gpu_batch_size, many, policy.cpu_cache_compute and policy.overlap, later)
        if key not in self._prices:
            few, request = replace(policy, num_gpu_batches=1 + many), self.request
            pairs = [None, *(pair for pair in self._away(many) if pair[0] != "weights")]
            rows = (few.gpu_batch_size,) * few.num_gpu_batches
            models = {pair: CostModel(request, few, self._corner(few, pair), rows, later) for pair in pairs}
            self._prices[key] = {pair: BatchPrices(model, list(models.values())) for pair, model in models.items()}
        return self._prices[key]

    def _corner(self, policy: OffloadPolicy, pair: KindTier | None) -> Placement:
        found = corner(self.request, policy, pair)
        return replace(found, cache=dict.fromkeys(found.cache, "cpu")) if self._favoured(policy, pair) else found

    def _favoured(self, policy: OffloadPolicy, pair: KindTier | None) -> bool:
        """Whether hidden states there are priced as if all caches were on cpu: states that wait for attention on
        the host do not move, and how many do depends on both shares."""
        beside = policy.cpu_cache_compute and policy.overlap and policy.num_gpu_batches > 1
        return beside and self.request.compute_tier == "gpu" and pair is not None and pair[0] == "hidden"

    @cached_property
    def _weight_seconds(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Seconds to read once all weights that every token needs, and all experts, by their tier and by link."""
        request, found = self.request, dict[tuple[str, str], tuple[float, float]]()
        sizes: dict[bool, list[int]] = {False: [], True: []}
        for key, group in request.spec.groups_by_key.items():
            sizes[".experts." in key].append(group.buffer_bytes(request.dtype))
        for tier in request.tiers[1:]:
            for name in links(tier, request.compute_tier, inward=True):
                shared, experts = (sum(map(request.machine.link(name).seconds, each)) for each in sizes.values())
                found[tier, name] = shared, experts
        return found


def corner(request: PlanRequest, policy: OffloadPolicy, pair: KindTier | None) -> Placement:
    """Everything on the compute tier; but where `pair` is given, all of one kind, of weights the layers, on another."""
    kind, tier = pair or ("", "")
    here, batches = request.compute_tier, range(policy.num_gpu_batches)
    places = ((layer, batch) for layer in range(request.spec.num_layers) for batch in batches)
    groups = request.spec.groups_by_key
    return Placement(
        weights={key: tier if kind == "weights" and _of_layer(key) else here for key in groups},
        cache=dict.fromkeys(places, tier if kind == "cache" else here),
        hidden=dict.fromkeys(batches, tier if kind == "hidden" else here),
    )


def _of_layer(key: str) -> bool:
    return key.startswith("layers.")


def _line(two: Counter[str], three: Counter[str], more: int) -> Counter[str]:
    """On the line through two points, `more` steps beyond the first."""
    return Counter({key: two[key] + more * (three[key] - two[key]) for key in {**two, **three}})
