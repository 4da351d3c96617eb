"""Prices: numbers by hand on a machine with round rates, and that the pieces are those of the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.hardware.rates import Curve, LinkRate
from h2o_flexgen.config.model.arch import ArchSpec, RotarySpec
from h2o_flexgen.config.model.known import known_config, known_names
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.inputs import prompt_parts
from h2o_flexgen.cost.model import CostModel
from h2o_flexgen.engine.batching.prefix_tree import chunks_of, segments_of
from h2o_flexgen.errors import UsageError
from h2o_flexgen.models.families import by_modules, spec_from_config
from h2o_flexgen.schedule.tasks import NO_BATCH, Task, TaskKind
from tests.cost.machines import TINY, asked, known, model_of, on, profile, rates
from tests.cost.plans import EVICTIONS, plans

SLOW = rates(gemm_flops=Curve(((1, 1e6),)), elementwise_bytes_per_s=1e6)
"""A millionth of a second per FLOP and per byte: times are counts."""


def parts(model: CostModel, unit: int, step: int, batch: int = 0) -> dict[str, float]:
    return model.compute.parts(Task(TaskKind.COMPUTE, step, unit, batch))


def counts(model: CostModel, unit: int, step: int) -> dict[str, float]:
    """FLOPs and bytes of a unit, on the machine where they take a millionth of a second each."""
    return {name: round(1e6 * seconds) for name, seconds in parts(model, unit, step).items()}


# ---- by hand: 3 rows of 24 + 8 tokens, H 64, Q 64, G 64, F 256, V 1000, 2 bytes


def test_units_of_a_decode_step() -> None:
    model = model_of(OffloadPolicy(3), machine=profile(SLOW))
    embed, attn, mlp, head = (counts(model, unit, 1) for unit in (0, 1, 2, 5))
    assert embed == {"products": 0, "elementwise": 3 * 2 * (2 * 64 + 4 * 64), "moving state": 0, "overhead": 1000}
    halves = 3 * 2 * (2 + 3) * 64  # a norm, and an addition in place
    assert attn["products"] == 2 * 3 * 64 * (3 * 64 + 64)
    assert attn["elementwise"] == halves
    assert mlp["products"] == 2 * 3 * 2 * 64 * 256
    assert mlp["elementwise"] == halves + 3 * 2 * 2 * 256
    assert head["products"] == 2 * 3 * 64 * 1000
    assert head["elementwise"] == 3 * 2 * 2 * 64 + 3 * 1000 * (2 + 4 + 4)
    assert head["sampling"] == 3 * 10


def test_attention_of_a_decode_step_reads_what_is_held_or_the_whole_buffer() -> None:
    curve = {"plain": Curve(((1, 1e-6), (1e9, 1e3))), "scored": Curve(((1, 2e-6), (1e9, 2e3)))}
    held = rates(decode_attention=curve)
    machine = profile({"cpu": replace(held, reads_all_slots=True), "gpu": held})
    slot = 3 * 2 * 64 * 2

    def seconds(config: EvictionConfig, step: int, tier: str = "cpu") -> float:
        home = {tier: 1.0}
        return parts(
            model_of(OffloadPolicy(3, 1, home, home, home), machine=machine, eviction=config, tier=tier), 1, step
        )["attention"]

    assert seconds(EvictionConfig(), 1) == pytest.approx(1e-6 * 32 * slot)
    assert seconds(EvictionConfig(), 7) == pytest.approx(1e-6 * 32 * slot)
    assert seconds(EvictionConfig("h2o", budget=10), 1) == pytest.approx(2e-6 * 11 * slot)
    assert seconds(EvictionConfig("streaming", budget=10), 1) == pytest.approx(1e-6 * 11 * slot)
    # Kernels of our own read the slots in use.
    assert seconds(EvictionConfig(), 1, "gpu") == pytest.approx(1e-6 * 25 * slot)
    assert seconds(EvictionConfig(), 7, "gpu") == pytest.approx(1e-6 * 31 * slot)
    assert seconds(EvictionConfig("h2o", budget=28), 1, "gpu") == pytest.approx(2e-6 * 25 * slot)
    assert seconds(EvictionConfig("h2o", budget=28), 7, "gpu") == pytest.approx(2e-6 * 29 * slot)


def test_units_of_the_prompt_and_what_the_last_layer_leaves_out() -> None:
    model = model_of(OffloadPolicy(3), machine=profile(SLOW))
    tokens = 3 * 24
    first, last, attn = counts(model, 2, 0), counts(model, 4, 0), counts(model, 1, 0)
    assert first["products"] == 2 * tokens * 2 * 64 * 256
    assert last["products"] == 2 * 3 * 2 * 64 * 256, "only the prompts' last tokens go through the last MLP"
    assert counts(model, 5, 0)["products"] == 2 * 3 * 64 * 1000
    assert attn["products"] == 2 * tokens * 64 * 4 * 64
    # A norm, an addition, the output copied into place, keys and values copied into the cache.
    assert attn["elementwise"] == tokens * 2 * 64 * (2 + 3 + 2 + 4)
    plain = {kind: Curve(((1, 1e6),)) for kind in ("plain", "scored")}
    slow = model_of(OffloadPolicy(3), machine=profile(replace(SLOW, prefill_attention=plain)))
    assert counts(slow, 1, 0)["attention"] == 4 * 3 * 24 * 24 * 64


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (EvictionConfig(), "plain"),
        (EvictionConfig("h2o", budget=10), "scored"),
        (EvictionConfig("h2o", budget=32), "plain"),
        (EvictionConfig("random", budget=10), "plain"),
        (EvictionConfig("streaming", budget=10), "plain"),
    ],
)
def test_only_policies_that_ask_for_column_sums_pay_for_them(config: EvictionConfig, kind: str) -> None:
    seconds = parts(model_of(OffloadPolicy(3), eviction=config), 1, 0)["attention"]
    assert seconds == pytest.approx(4 * 3 * 24 * 24 * 64 / {"plain": 1e12, "scored": 5e11}[kind])


def test_long_prompts_go_in_parts_over_what_came_before() -> None:
    model = model_of(OffloadPolicy(2, prefill_chunk=16), workload=Workload(40, 4))
    pairs = 16 * 16 + 16 * 32 + 8 * 40
    assert parts(model, 1, 0)["attention"] == pytest.approx(2 * 4 * 64 * pairs / 1e12)
    small = rates(gemm_flops=Curve(((8, 1.0), (16, 2.0))))
    slow = asked(model, profile=profile(small))
    # 16 rows at 2 FLOP/s and 8 rows at 1, for attention in each prompt; the MLP of 80 tokens needs no parts of prompts.
    assert parts(slow, 1, 0)["products"] == pytest.approx(2 * 2 * 64 * 4 * 64 * (2 * 16 / 2 + 8 / 1))
    assert parts(slow, 2, 0)["products"] == pytest.approx(2 * 80 * 2 * 64 * 256 / 2)


def with_arch(**changes: Any) -> ModelSpec:
    return replace(TINY, arch=replace(TINY.arch, **changes))


def test_windows_bound_attention() -> None:
    spec = with_arch(window=9, window_layers=(1,))
    model = model_of(
        OffloadPolicy(3),
        spec=spec,
        machine=profile(rates(decode_attention={k: Curve(((1, 1.0), (1e9, 1e9))) for k in ("plain", "scored")})),
    )
    assert model.request.slots == (32, 9)  # all of them, and what a query sees but itself, and one
    assert parts(model, 1, 1)["attention"] == pytest.approx(3 * 2 * 64 * 2 * 25)
    assert parts(model, 3, 1)["attention"] == pytest.approx(3 * 2 * 64 * 2 * 9)
    long = model_of(OffloadPolicy(1), spec=replace(spec, max_positions=10**6), workload=Workload(40_000, 4))
    assert parts(long, 3, 0)["attention"] < parts(long, 1, 0)["attention"] / 20


@pytest.mark.parametrize(
    ("changes", "unit", "products_factor", "more_elementwise"),
    [
        ({"gated_mlp": True}, 2, 1.5, 3 * 256),
        ({"post_norms": True}, 1, 1, 2 * 64),
        ({"pre_norm": False}, 1, 1, 2 * 64),
        ({"parallel": True}, 1, 1, -64),
        ({"parallel": True}, 2, 1, 3 * 64),
        ({"norm": "rmsnorm"}, 1, 1, 64 * (28 - 4) // 2),
        ({"positions": "rotary", "rotary": RotarySpec(16)}, 1, 1, 5 * 128),
        ({"qk_norm": True}, 1, 1, 2 * 128),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_architectures(changes: dict[str, Any], unit: int, products_factor: float, more_elementwise: int) -> None:
    """`more_elementwise`: numbers per token beside those of the plain architecture."""
    usual = counts(model_of(OffloadPolicy(3), machine=profile(SLOW)), unit, 1)
    found = counts(model_of(OffloadPolicy(3), machine=profile(SLOW), spec=with_arch(**changes)), unit, 1)
    assert found["products"] == pytest.approx(products_factor * usual["products"])
    assert found["elementwise"] - usual["elementwise"] == 3 * 2 * more_elementwise


def test_recall_is_paid_in_its_first_steps_and_then_evenly() -> None:
    """Of 20 tokens 8 are heavy, of which 2 change in each of 16 steps, then in every fourth."""
    curve = Curve(((1, 1.0), (1e9, 1e9)))
    machine = profile(replace(SLOW, decode_attention={"plain": curve, "scored": curve}))
    recalling, losing = EvictionConfig("h2o", budget=20, recall="cpu"), EvictionConfig("h2o", budget=20, sinks=4)
    here, usual = (model_of(OffloadPolicy(3), machine=machine, eviction=each) for each in (recalling, losing))
    token = 3 * 2 * 64 * 2
    assert counts(here, 1, 0)["elementwise"] - counts(usual, 1, 0)["elementwise"] == 2 * 24 * token
    index = (16 // 2 + 4 + 2 * 16) / 2  # half-way between what is read of a key and what is computed with
    for step, moved, looks in ((1, 3, 1), (16, 3, 1), (17, 1.5, 1 / 4)):
        assert counts(here, 1, step)["elementwise"] - counts(usual, 1, step)["elementwise"] == 2 * moved * token
        more = parts(here, 1, step)["attention"] - parts(usual, 1, step)["attention"]
        assert more == pytest.approx(3 * (24 + step) * 4 * index * looks)
    gpu = {"gpu": 1.0}
    away = model_of(OffloadPolicy(3, 1, gpu, gpu, gpu), machine=machine, eviction=recalling, tier="gpu")
    assert parts(away, 1, 1)["moving state"] == pytest.approx(3 * token / 1e10)
    assert dict(away.moves.bytes_moved()) == {"gpu->cpu": 2 * (24 + 7) * token, "cpu->gpu": 2 * 7 * 2 * token}
    assert asked(away, recalled=0.5).moves.bytes_moved()["cpu->gpu"] == 7 * 2 * token


def test_recall_from_disk_is_paid_page_by_page() -> None:
    """A token takes a page. Of each row four heads want 2 of 3 + n tokens that are away in step n."""
    usual, page = profile(), 4096
    machine = replace(usual, links={**usual.links, "disk->cpu": LinkRate(1e9, 1e-3)})
    model = model_of(OffloadPolicy(3), machine=machine, eviction=EvictionConfig("h2o", budget=20, recall="disk"))
    wanted = [3 * away * (1 - (1 - 2 / away) ** 4) for away in range(4, 11)]
    assert parts(model, 1, 0)["moving state"] == pytest.approx(3 * 24 * page / 1e9)
    assert parts(model, 1, 1)["moving state"] == pytest.approx(3 * page / 1e9 + wanted[0] * (1e-3 + page / 1e9))
    moved = {"cpu->disk": 2 * 3 * (24 + 7) * page, "disk->cpu": 2 * sum(round(tokens * page) for tokens in wanted)}
    assert dict(model.moves.bytes_moved()) == moved
    known = asked(model, recalled=0.75)
    assert known.moves.bytes_moved()["disk->cpu"] == 2 * 3 * 7 * 0.75 * 2 * 4 * page


def test_rolling_positions_turn_the_whole_cache() -> None:
    spec = with_arch(positions="rotary", rotary=RotarySpec(16))
    found = [
        counts(model_of(OffloadPolicy(3), spec=spec, machine=profile(SLOW), eviction=config), 1, 1)["elementwise"]
        for config in (EvictionConfig("h2o", budget=10), EvictionConfig("h2o", budget=10, rolling_positions=True))
    ]
    assert found[1] - found[0] == 3 * 2 * (7 * 11 * 64 - 5 * 64)


def test_state_that_moves_is_copied_by_the_computing_thread() -> None:
    policy = OffloadPolicy(3, 2, {"gpu": 1.0}, {"cpu": 1.0}, {"cpu": 1.0})
    model = model_of(policy, machine=profile(SLOW), tier="gpu", workload=Workload(24, 40))
    page = 4096
    store = Task(TaskKind.STORE_HIDDEN, 0, 1, 0)
    hidden = -(-3 * 24 * 64 * 2 // page) * page
    assert model.price(store).seconds == pytest.approx(2e-6 * hidden)
    assert counts(model, 1, 0)["moving state"] == 2 * hidden
    assert counts(model, 2, 1)["moving state"] == 2 * page
    token = 3 * 2 * 64 * (2 * 2 + 8)
    assert [counts(model, 1, step)["moving state"] - 2 * page for step in (1, 2, 16, 17)] == [0, token, 15 * token, 0]
    assert model.price(Task(TaskKind.STORE_CACHE, 3, 1, 0)).seconds == pytest.approx(1e-6 * token)
    assert model.price(Task(TaskKind.STORE_CACHE, 16, 1, 0)).seconds == 0


def test_attention_may_be_computed_where_the_cache_lives() -> None:
    curves = {kind: Curve(((1, 5.0),)) for kind in ("plain", "scored")}
    machine = profile(compute={"gpu": rates(), "cpu": rates(decode_attention=curves)})
    policy = OffloadPolicy(3, 1, {"gpu": 1.0}, {"cpu": 1.0}, {"gpu": 1.0}, cpu_cache_compute=True, overlap=False)
    model = model_of(policy, machine=machine, tier="gpu")
    assert not model.shape.cache_moves
    found = parts(model, 1, 1)
    assert found["attention"] >= 5
    assert found["moving state"] == pytest.approx(4 * 3 * 64 * 2 / 1e10)  # q, k, v there and the answer back
    assert parts(model, 1, 0)["moving state"] == pytest.approx(2 * 3 * 24 * 64 * 2 / 1e10)


def test_a_resident_cache_is_written_for_the_first_time() -> None:
    machine = profile(rates(fresh_bytes_per_s=1e6))
    assert "fresh memory" not in parts(model_of(OffloadPolicy(3)), 1, 0)
    assert parts(model_of(OffloadPolicy(3), machine=machine), 1, 0)["fresh memory"] == pytest.approx(24576 / 1e6)
    assert "fresh memory" not in parts(model_of(OffloadPolicy(3), machine=machine), 1, 1)
    assert "fresh memory" not in parts(model_of(OffloadPolicy(3, **on(cache="disk")), machine=machine), 1, 0)


def test_transfers() -> None:
    policy = OffloadPolicy(3, 2, {"disk": 1.0}, {"cpu": 1.0}, {"disk": 1.0})
    model = model_of(policy, tier="gpu", workload=Workload(24, 40))
    group = TINY.groups_by_key["layers.0.attn"].buffer_bytes("float16")
    weights = model.price(Task(TaskKind.LOAD_WEIGHTS, 0, 1, NO_BATCH)).transfers
    assert weights == (("disk->cpu", group, group / 1e9), ("cpu->gpu", group, group / 1e10))
    cache = 2 * 3 * 64 * 64 * 2
    assert model.price(Task(TaskKind.LOAD_CACHE, 5, 1, 0)).transfers == (("cpu->gpu", cache, cache / 1e10),)
    assert model.price(Task(TaskKind.STORE_CACHE, 5, 1, 0)).transfers == ()
    assert model.price(Task(TaskKind.STORE_CACHE, 16, 1, 0)).transfers == (("gpu->cpu", cache, cache / 1e10),)
    assert [move.link for move in model.price(Task(TaskKind.STORE_HIDDEN, 0, 1, 0)).transfers] == [
        "gpu->cpu",
        "cpu->disk",
    ]
    assert model.price(Task(TaskKind.FREE_WEIGHTS, 0, 1, NO_BATCH)).transfers == ()


def test_a_profile_without_what_is_needed_is_named() -> None:
    bare = profile(links={})
    with pytest.raises(UsageError, match="no link disk->cpu"):
        model_of(OffloadPolicy(**on(weights="disk")), machine=bare).terms()
    with pytest.raises(UsageError, match="no rates of the gpu"):
        model_of(OffloadPolicy(), machine=profile(compute={"cpu": rates()}), tier="gpu").terms()


# ---- every plan


@settings(max_examples=30, deadline=None)
@given(plans(), EVICTIONS, st.integers(1, 40))
def test_terms_add_up_to_the_tasks(plan: tuple[OffloadPolicy, str], eviction: EvictionConfig, steps: int) -> None:
    model = model_of(plan[0], eviction=eviction, workload=Workload(24, steps), tier=plan[1])
    for phase, step in (("prefill", 0), ("decode", max(1, steps // 2))):
        terms = [term for term in model.terms() if term.phase == phase]
        if phase == "decode" and steps == 1:
            assert not terms
            continue
        computes = (
            Task(TaskKind.COMPUTE, step, unit.index, batch)
            for unit in model.spec.units
            for batch in range(len(model.batches))
        )
        seconds = sum(term.value for term in terms if term.resource == "compute")
        assert seconds == pytest.approx(sum(model.price(task).seconds for task in computes))
    moved = Counter[str]()
    for term in model.terms():
        if term.unit == "B":
            moved[term.resource] += round(term.value * (1 if term.phase == "prefill" else steps - 1))
    assert moved == model.moves.bytes_moved()


def test_terms_can_be_read() -> None:
    model = model_of(OffloadPolicy(3, **on(weights="disk")), eviction=EvictionConfig("h2o", budget=10))
    shown = [str(term) for term in model.terms()]
    assert any(line.startswith("decode compute: attn: attention of 3 rows over 11 tokens: ") for line in shown)
    assert any(line.startswith("prefill disk->cpu: weights: ") and line.endswith("KiB") for line in shown)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9), st.integers(1, 150), st.integers(16, 64))
def test_prompts_are_cut_as_the_engine_cuts_them(rows: int, length: int, chunk: int) -> None:
    (segments,) = segments_of([[[row] * length for row in range(rows)]], chunk, share=False)
    found = Counter((max(1, len(segment.rows)), segment.length, segment.past) for segment in segments)
    expected = prompt_parts(rows, length, chunk)
    assert found == {tuple(segment): count for segment, count in expected.items()}
    chunks = Counter(part.stop - part.start for part in chunks_of(segments, chunk))
    assert chunks == Counter(segment.rows * segment.length for segment in expected.elements())


MIXED = {"qwen2_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [5]}, "qwen3_moe": {"mlp_only_layers": [0, 47]}}
"""Config changes of mixtures with plain layers among the others, by family; sizes are the family's defaults."""


NATIVE = [name for name in known_names() if not by_modules(known_config(name) or {}, name, "auto")]


@pytest.mark.turns
@pytest.mark.parametrize("name", [*NATIVE, *MIXED])
def test_products_are_the_matrices_of_a_model(name: str) -> None:
    config = {"model_type": name, "num_hidden_layers": 48, "eos_token_id": 1, **MIXED[name]} if name in MIXED else None
    spec = known(name) if config is None else spec_from_config(config, name)
    tables = {"embed.tokens", "embed.positions"}
    matrices = Counter[str]()
    for group in spec.weight_groups:
        for tensor in group.tensors:
            if len(tensor.shape) == 2 and tensor.name not in tables:
                half = ".".join(tensor.name.split(".")[:3]) if tensor.name.startswith("layers") else ""
                matrices[half] += tensor.numel
    for unit in spec.units:
        kinds = [unit.products, "experts"] if unit.experts else [unit.products]
        calls = [call for kind in kinds for call in spec.product_calls(kind, 10**5)]  # all experts
        matrices[unit.name if unit.layer is not None else ""] -= round(sum(t * a * b for (a, b), _, t in calls))
    tied = spec.vocab_size * spec.embed_dim if spec.arch.tied_head else 0
    assert +matrices == {}
    assert -matrices == ({"": tied} if tied else {})
    assert len(set(spec.all_products)) == len(spec.all_products) >= 4


def test_blocks_of_a_call() -> None:
    def blocks(sequences: int) -> list[tuple[int, ...]]:
        return asked(model_of(OffloadPolicy(4, 2)), workload=Workload(24, 8, sequences)).blocks

    assert blocks(19) == [(4, 4), (4, 4), (3,)]
    assert blocks(6) == [(4, 2)]
    assert blocks(3) == [(3,)]


def test_the_family_of_the_tiny_model_is_plain() -> None:
    assert TINY.arch == ArchSpec("opt", position_offset=2)
