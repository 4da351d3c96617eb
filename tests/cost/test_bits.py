"""Weights of fewer bits: what products with them take, the bytes they save, and which bits a search chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.hardware.profile import HardwareProfile
from h2o_flexgen.config.hardware.rates import UNMEASURED_PACKED, Curve
from h2o_flexgen.config.model.packing import groupwise
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost import search as choosing
from h2o_flexgen.cost.explain import explain, to_json
from h2o_flexgen.cost.search import GOOD_ENOUGH, BitsChoice, quality, search
from h2o_flexgen.errors import PlanError, UsageError
from h2o_flexgen.schedule.request import PlanRequest
from h2o_flexgen.schedule.tasks import NO_BATCH, Task, TaskKind
from h2o_flexgen.schedule.work import PhaseWork
from h2o_flexgen.units import GIB, MIB
from tests.cost.machines import KINDS, TINY, known, model_of, on, profile, rates
from tests.cost.test_search import SMALL, ask
from tests.pairs import pairs

TWICE, HALF = Curve(((1, 2.0),)), Curve(((1, 0.5),))
SLOW = rates(gemm_flops=Curve(((1, 1e6),)))


def products(spec_bits: int, machine: HardwareProfile, unit: int, step: int = 1) -> float:
    spec = TINY if spec_bits == 16 else TINY.with_bits(spec_bits, 32)
    model = model_of(OffloadPolicy(3), spec=spec, machine=machine)
    return model.compute.parts(Task(TaskKind.COMPUTE, step, unit, 0))["products"]


def test_products_take_the_factor_of_their_bits() -> None:
    machine = profile(replace(SLOW, packed={"4": TWICE, "8": HALF}))
    for unit in (1, 2):  # attention and MLP
        plain = products(16, machine, unit)
        assert products(4, machine, unit) == pytest.approx(2 * plain)
        assert products(8, machine, unit) == pytest.approx(plain / 2)
    head = products(16, machine, 5)
    assert products(4, machine, 5) == pytest.approx(head / 2), "the head has 8 bits at least"


def test_first_reads_of_packed_files_are_checked() -> None:
    """At best as fast as memory is read; not the user's own files, nor in later steps and blocks."""
    for spec in (TINY, TINY.with_bits(4, 32)):
        model = model_of(OffloadPolicy(2, **on(weights="disk")), spec=spec)
        again, ours = replace(model, later=True), spec.groups_by_key["layers.0.attn"].fewer_bits
        first, later = (model.price(Task(TaskKind.LOAD_WEIGHTS, step, 1, NO_BATCH)).transfers[0] for step in (0, 1))
        assert first.seconds - later.seconds == pytest.approx(ours * first.nbytes / 1e10)
        assert again.price(Task(TaskKind.LOAD_WEIGHTS, 0, 1, NO_BATCH)).transfers == (later,)
        checked = sum(model.moves.group_bytes[group.key] for group in spec.weight_groups if group.fewer_bits)
        seconds = [each.moves.traffic(range(1))["disk->cpu", "weights"].seconds for each in (model, again)]
        assert seconds[0] - seconds[1] == pytest.approx(checked / 1e10)


def test_where_nothing_was_measured_stated_factors_stand() -> None:
    machine = profile(SLOW)
    for step, rows in ((1, 3), (0, 72)):
        factor = UNMEASURED_PACKED[2].at(rows)
        assert products(4, machine, 1, step) == pytest.approx(factor * products(16, machine, 1, step))


def test_units_of_mixed_bits_are_priced_by_their_shares() -> None:
    """Q, K and O in 4 bits, V in 8, the second layer's not at all: in the mean over both."""
    four, eight = groupwise(4, 32), groupwise(8, 32)
    names = {"q": four, "k": four, "v": eight, "o": four}
    spec = replace(TINY, packings=tuple((f"layers.0.attn.{each}.weight", kind) for each, kind in names.items()))
    assert spec.packed_shares["attn"] == {4: 3 / 8, 8: 1 / 8}
    assert spec.packed_shares["mlp"] == spec.packed_shares["embed"] == {}
    found = rates(packed={"4": TWICE, "8": HALF}).packed_factor(spec.packed_shares["attn"], 1, 2)
    assert found == pytest.approx(1 / 2 + 2 * 3 / 8 + 1 / 2 * 1 / 8)


@pytest.mark.parametrize("name", ["opt-350m", "llama-3.2-1b", "pythia-160m", "gemma-3-270m"])
def test_the_matrices_of_products(name: str) -> None:
    spec = known(name)
    for kind in ("embed", "attn", "mlp", "head"):
        units = sum(unit.kind == kind for unit in spec.units)
        numbers = sum(product.out_features * product.in_features for product in spec.products(kind))
        assert sum(tensor.numel for tensor in spec.multiplied[kind]) == units * numbers


def test_bytes_read_by_products_are_the_packed_ones() -> None:
    work = PhaseWork()
    for kind in ("attn", "mlp", "head"):
        work.products[kind, 3] = 4
    packed = TINY.with_bits(4, 32)
    tables = [tensor for tensor in packed.groups_by_key["vocab"].tensors if tensor.name == "embed.tokens"]
    layer = [packed.groups_by_key[f"layers.0.{kind}"].tensors for kind in ("attn", "mlp")]
    matrices = [tensor for tensors in layer for tensor in tensors if len(tensor.shape) == 2]
    assert work.weight_bytes(packed, "float16") == 4 * sum(each.nbytes("float16") for each in (*matrices, *tables))
    assert work.weight_bytes(packed, "float16") < 0.5 * work.weight_bytes(TINY, "float16")


def test_streamed_bytes_are_the_packed_ones() -> None:
    policy = OffloadPolicy(3, **on(weights="disk"))
    moved = {}
    for bits in (16, 4):
        spec = TINY if bits == 16 else TINY.with_bits(4, 32)
        model = model_of(policy, spec=spec)
        whole = sum(group.buffer_bytes("float16") for group in spec.weight_groups)
        again = spec.groups_by_key["vocab"].buffer_bytes("float16")  # tied: the first pass reads it twice
        moved[bits] = model.moves.bytes_moved()["disk->cpu"]
        assert moved[bits] == 8 * whole + again
    assert moved[4] < 0.5 * moved[16]


# ---- the choice


def compress(request: PlanRequest) -> PlanRequest:
    return replace(request, choices=EngineConfig(allow_compress=True).choices(request.spec))


def one_by_one(request: PlanRequest) -> dict[int, float]:
    """Throughputs of each, searched for alone; those that fit."""
    found = {}
    for bits in (16, 8, 4):
        spec = request.spec if bits == 16 else request.spec.with_bits(bits, 64)
        try:
            found[bits] = search(replace(request, spec=spec)).best.prediction.gen_throughput or 0.0
        except PlanError:
            continue
    return found


SLOWER: Mapping[str, Curve] = {"4": Curve(((1, 3.0),)), "8": Curve(((1, 1.5),))}


def machine_of(packed: Mapping[str, Curve]) -> HardwareProfile:
    """One whose products and links are what takes the time."""
    return profile(rates(packed=packed, tick_s=dict.fromkeys(KINDS, 1e-5)))


@pytest.mark.turns
@pytest.mark.parametrize(("tier", "packed", "cap"), pairs(["cpu", "gpu"], [{}, SLOWER], [3, 6, 200]))
def test_the_fastest_is_taken(tier: str, packed: Mapping[str, Curve], cap: int) -> None:
    """SMALL has 8 MiB in 16 bits, of which 3 MiB hold a part, and 6 MiB all of it in 8."""
    caps = {tier: cap * MIB, "disk": GIB, **({"cpu": 8 * MIB} if tier == "gpu" else {})}
    request = ask(tier, caps, profile=machine_of(packed), workload=Workload(4, 12, 2))
    alone = one_by_one(request)
    best = max(bits for bits, rate in alone.items() if GOOD_ENOUGH * rate >= max(alone.values()))
    result = search(compress(request))
    assert result.bits is not None
    assert result.bits.bits == best
    assert {bits: rate for bits, rate in result.bits.throughputs.items() if rate is not None} == alone
    assert result.best.prediction.gen_throughput == alone[best]
    assert (result.best.request.spec.packed_kind or {"bits": 16})["bits"] == best


def test_all_of_them_are_chosen_somewhere() -> None:
    chosen = set()
    for cap in (3, 6, 200):
        caps = {"cpu": cap * MIB, "disk": GIB}
        request = ask("cpu", caps, profile=machine_of(SLOWER), workload=Workload(4, 12, 2))
        result = search(compress(request))
        assert result.bits is not None
        chosen.add(result.bits.bits)
    assert chosen == {16, 8, 4}


def test_ties_go_to_more_bits() -> None:
    assert BitsChoice({16: 100.0, 8: 100.9, 4: 100.5}).bits == 16
    assert BitsChoice({16: 90.0, 8: 100.0, 4: 100.9}).bits == 8
    assert BitsChoice({16: None, 8: 50.0, 4: 100.0}).bits == 4


def test_where_nothing_fits_the_fewest_bits_say_what_would() -> None:
    request = ask("cpu", {"cpu": MIB // 2, "disk": MIB // 2})
    with pytest.raises(PlanError) as of_all:
        search(compress(request))
    with pytest.raises(PlanError) as of_four:
        search(replace(request, spec=request.spec.with_bits(4, 64)))
    assert str(of_all.value) == str(of_four.value)


def test_what_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = search(compress(ask(caps={"cpu": 6 * MIB, "disk": GIB})))
    assert result.bits is not None
    entry = to_json(result)["bits_choice"]
    assert entry["chosen"] == result.bits.bits
    assert set(entry["gen_throughput"]) == {"16", "8", "4"}
    assert f"bits        {result.bits.text}" in explain(result).splitlines()
    monkeypatch.setattr(choosing, "PERPLEXITY", {16: 0.0, 8: None, 4: 0.013})
    assert quality(4) == "4 bits: perplexity about +1.3% (a model of 270 M parameters)"
    assert "was not measured" in quality(8)
    assert quality(16) == "16 bits: the model as it is"


def test_a_large_model_stays_in_memory_in_4_bits() -> None:
    """And the answer says so beforehand: OPT-6.7B in 6 GiB."""
    caps, fixed = {"cpu": 6 * GIB, "disk": 100 * GIB}, {"gpu_batch_size": 4, "num_gpu_batches": 1}
    request = ask(caps=caps, spec=known("opt-6.7b"), workload=Workload(512, 32, 4), baseline=512 * MIB, fixed=fixed)
    packed = search(replace(request, spec=request.spec.with_bits(4, 64)))
    assert packed.best.prediction.bytes_moved == {}
    assert "traffic     none: everything stays where it is computed on" in explain(packed)
    assert "with weights of 4 bits in groups of 64" in explain(packed)
    assert to_json(packed)["weight_bits"] == {"bits": 4, "group": 64}
    plain = search(request)
    assert plain.best.prediction.bytes_moved["disk->cpu"] > 32 * 6 * GIB
    decode = [found.best.prediction.decode_throughput or 0.0 for found in (packed, plain)]
    assert decode[0] > 2 * decode[1]


def test_bits_that_were_given_are_no_choice() -> None:
    with pytest.raises(UsageError, match="needed one of them"):
        EngineConfig(weight_bits=4, allow_compress=True)
    assert EngineConfig().choices(SMALL) == {}
    assert EngineConfig(allow_compress=True).choices(SMALL.with_bits(4, 64)) == {}
    anew = EngineConfig(allow_compress=True, dequantize=True).choices(SMALL.with_bits(4, 64))
    assert [(bits, spec.packed_kind) for bits, spec in anew.items()] == [
        (16, None), (8, {"bits": 8, "group": 64}), (4, {"bits": 4, "group": 64}),
    ]  # fmt: skip
