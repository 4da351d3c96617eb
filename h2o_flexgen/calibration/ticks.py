"""What a tick costs whatever its size, and what choosing a token costs: a narrow model in the engine itself."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from h2o_flexgen.cache.eviction import make_policy
from h2o_flexgen.calibration.attention import attend_call
from h2o_flexgen.calibration.bench import Bench
from h2o_flexgen.calibration.products import product_call
from h2o_flexgen.calibration.timing import sample_of
from h2o_flexgen.checkpoint.dummy import DummySource
from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware import UNIT_KINDS
from h2o_flexgen.config.model import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.products import products
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.engine.block import BlockRunner, BlockTotals
from h2o_flexgen.engine.loader import Loaded, load
from h2o_flexgen.engine.plan import Caps, Plan, PlanRequest, make_plan
from h2o_flexgen.engine.requests import RequestReader, blocks
from h2o_flexgen.engine.sampler import Sampler
from h2o_flexgen.engine.sequence import Sequence
from h2o_flexgen.engine.trace import Trace
from h2o_flexgen.models.decoder import Decoder

_WIDTH, _LAYERS, _VOCABULARY = 64, 6, 64
_PROMPT, _STEPS = 4, 24
_ROWS = 64  # rows whose tokens are chosen, beside one
_LEAST = 1e-7


def narrow_model(spec: ModelSpec) -> ModelSpec:
    """A model of the same architecture whose bytes are nothing."""
    bridged = spec.embed_dim != spec.hidden_size
    return replace(
        spec,
        name="narrow",
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        ffn_size=_WIDTH,
        num_layers=_LAYERS,
        num_heads=1,
        num_kv_heads=1,
        embed_dim=_WIDTH // 2 if bridged else _WIDTH,
        max_positions=max(spec.max_positions, _PROMPT + _STEPS),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


class Overheads(NamedTuple):
    """`tick_s` and `sample_s` of ComputeRates."""

    ticks: dict[str, float]
    sample: float


@torch.inference_mode()
def overheads(bench: Bench, seconds: float, elementwise: float) -> Overheads:
    """Seconds of ticks by kind of unit, and of choosing one row's token.

    elementwise: bytes per second; looking once through a row's logits at that rate is no part of `sample`.
    """
    spec = narrow_model(bench.spec)
    with Bench(spec, str(bench.dtype).removeprefix("torch."), bench.device, 1 << 20) as narrow:
        one = _choosing(narrow, spec.vocab_size, 1, seconds * 0.05)
        many = _choosing(narrow, spec.vocab_size, _ROWS, seconds * 0.1)
        per_row = (many - one) / (_ROWS - 1)
        known = {kind: _products(narrow, kind, seconds * 0.05) for kind in UNIT_KINDS}
        attend = attend_call(narrow, _PROMPT + _STEPS)
        known["attn"] += narrow.timer.measure(attend, seconds * 0.05).seconds
    known["head"] += per_row
    measured = _ticks(bench, spec, seconds * 0.4)
    wide = _choosing(bench, bench.spec.vocab_size, _ROWS, seconds * 0.15) / _ROWS
    looked_through = 4 * bench.spec.vocab_size / elementwise
    ticks = {kind: max(_LEAST, measured[kind] - known[kind]) for kind in UNIT_KINDS}
    return Overheads(ticks, max(_LEAST, per_row, wide - looked_through))


def _products(bench: Bench, kind: str, seconds: float) -> float:
    """Of one row, in one unit of `kind`."""
    shapes = products(bench.spec, kind)
    calls = (product_call(bench, shape, 1, biased=bench.spec.arch.mlp_bias and kind != "head") for shape in shapes)
    return math.fsum(bench.timer.measure(call, seconds / len(shapes)).seconds for call in calls)


def _choosing(bench: Bench, vocabulary: int, rows: int, seconds: float) -> float:
    """Seconds of the sampler's step over so many rows that are never done."""
    spec = replace(bench.spec, vocab_size=vocabulary)
    sequences = _sequences(replace(spec, max_positions=1 << 40), rows, 1 << 30)
    logits = bench.noise(rows, vocabulary).float()
    sampler = Sampler()
    sample = bench.timer.measure(lambda: sampler.step(sequences, logits), seconds)
    return bench.spreads.note(f"{bench.name} sampling", sample).seconds


def _sequences(spec: ModelSpec, rows: int, new: int) -> list[Sequence]:
    """Greedy rows of `new` tokens that no token ends."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return RequestReader(spec, EvictionConfig(), None, 0).read([[0] * _PROMPT] * rows, params)


def _ticks(bench: Bench, spec: ModelSpec, seconds: float) -> dict[str, float]:
    """Seconds from the start of one decode tick to that of the next, by the kind of the first one's unit."""
    tier = bench.name
    request = PlanRequest(
        spec, Workload(_PROMPT, _STEPS), EvictionConfig(), str(bench.dtype).removeprefix("torch."), Caps(), tier
    )
    at_home = {tier: 1.0}
    plan = make_plan(request, OffloadPolicy(weights=at_home, cache=at_home, hidden=at_home))
    kinds = {unit.name: unit.kind for unit in spec.units}
    taken: dict[str, list[float]] = {kind: [] for kind in UNIT_KINDS}
    clock, runs = bench.timer.clock, 0
    source = DummySource(spec, request.dtype)
    with closing(load(plan, source, EngineConfig(), bench.device, "", _no_trace, _no_progress)) as loaded:
        start = clock()
        while runs < 2 or clock() - start < seconds:
            for name, step, lasted in _one_run(plan, loaded):
                if runs > 0 and step > 1:  # the first run and the first steps warm up
                    taken[kinds[name]].append(lasted)
            runs += 1
    for values in taken.values():
        bench.spreads.note(f"{bench.name} ticks", sample_of(values))
    return {kind: statistics.median(values) for kind, values in taken.items()}


def _one_run(plan: Plan, loaded: Loaded) -> Iterator[tuple[str, int, float]]:
    """(unit, step, seconds) of the ticks of one block of one row, the last one left out."""
    request, trace = plan.request, Trace(enabled=True)
    runner = BlockRunner(
        request.spec,
        Decoder(request.spec),
        loaded.weights,
        loaded.tiers,
        loaded.copies,
        make_policy(request.eviction),
        Sampler(),
        trace,
        request.dtype,
    )
    (block,) = blocks(_sequences(request.spec, 1, _STEPS), 1, 1, False)
    for _ in runner.run(plan, block, BlockTotals()):
        pass
    for row, following in pairwise(trace.timeline().rows):
        name, _, step, *_ = row.task.split()
        yield name, int(step), following.start - row.start


def _no_trace(task: str, start: float, end: float, resource: str) -> None:
    """Nothing moves."""


def _no_progress(what: str, done: int, total: int) -> None:
    """There is next to nothing to load."""
