"""Schedule shapes for tests: small ones written by hand, and hypothesis strategies for all of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hypothesis import strategies as st

from h2o_flexgen.config.model.spec import UnitSpec
from h2o_flexgen.schedule.tasks import EXPERT_SLOTS, ScheduleShape


def make_units(layers: int, tied: bool = True, experts: int = 0) -> tuple[UnitSpec, ...]:
    """The compute positions of a model; tied embeddings share the group "vocab"; `experts` in each MLP half."""
    units = [UnitSpec(0, "embed", "embed", None, "vocab" if tied else "embed")]
    for layer in range(layers):
        for kind in ("attn", "mlp"):
            name = f"layers.{layer}.{kind}"
            keys = tuple(f"{name}.experts.{number}" for number in range(experts if kind == "mlp" else 0))
            units.append(UnitSpec(len(units), name, kind, layer, name, keys))
    units.append(UnitSpec(len(units), "head", "head", None, "vocab" if tied else "head"))
    return tuple(units)


def make_shape(
    layers: int = 1,
    steps: int = 3,
    batches: int = 1,
    *,
    tied: bool = True,
    streamed: Collection[str] | None = None,
    cache_moves: bool = True,
    hidden_moves: bool = True,
    lookahead: int = 1,
) -> ScheduleShape:
    """A shape in which everything (or nothing, or the weight groups `streamed`) moves."""
    units = make_units(layers, tied)
    return ScheduleShape(
        units=units,
        num_steps=steps,
        num_batches=batches,
        streamed=frozenset({unit.weights for unit in units} if streamed is None else streamed),
        cache_moves=frozenset((i, k) for i in range(layers) for k in range(batches)) if cache_moves else frozenset(),
        hidden_moves=frozenset(range(batches)) if hidden_moves else frozenset(),
        lookahead=lookahead,
    )


@dataclass(frozen=True)
class Case:
    """A shape and the batches active in each step; the record is as long as the steps that are asked for."""

    shape: ScheduleShape
    record: tuple[tuple[int, ...], ...]

    def active(self, step: int) -> tuple[int, ...]:
        return self.record[step]


@st.composite
def shapes(draw: st.DrawFn, experts: int = 0) -> ScheduleShape:
    layers, batches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    units = make_units(layers, draw(st.booleans()), experts)
    caches = [(layer, batch) for layer in range(layers) for batch in range(batches)]

    def subset(items: Collection[object]) -> frozenset:
        return draw(st.one_of(st.just(frozenset(items)), st.frozensets(st.sampled_from(sorted(items)))))

    return ScheduleShape(
        units=units,
        num_steps=draw(st.integers(1, 5)),
        num_batches=batches,
        streamed=subset({key for unit in units for key in (unit.weights, *unit.experts)}),
        cache_moves=subset(caches),
        hidden_moves=subset(range(batches)),
        lookahead=draw(st.integers(1, 3)),
        expert_slots=draw(st.integers(2, 9) | st.integers(16, 40)) if experts else EXPERT_SLOTS,
    )


@st.composite
def cases(draw: st.DrawFn, experts: int = 0) -> Case:
    """A shape with batches that drop out at random, in any order, possibly all of them before the last step."""
    shape = draw(shapes(experts))
    ends = [draw(st.integers(1, shape.num_steps)) for _ in range(shape.num_batches)]  # steps that each batch takes
    record = tuple(tuple(k for k, end in enumerate(ends) if step < end) for step in range(shape.num_steps))
    return Case(shape, record)
