"""The footprint: weights, caches and buffers of a tiny model by hand, and what must hold for every plan."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.arch import ArchSpec
from h2o_flexgen.config.offload import TIERS, OffloadPolicy
from h2o_flexgen.config.placement import place
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.schedule.footprint import Footprint, Item, footprint
from h2o_flexgen.schedule.request import Caps, PlanRequest
from h2o_flexgen.schedule.weight_room import weight_room
from tests.schedule.footprints import PAGE, SPEC, WORKLOAD, amounts, measure, pages


def test_everything_on_the_compute_tier() -> None:
    everywhere = {"cpu": 1.0}
    policy = OffloadPolicy(4, 2, everywhere, everywhere, everywhere)
    found = amounts(measure(policy, compute="cpu", baseline=123))
    attn = pages(2 * (4 * 64 * 64 + 6 * 64))  # q, k, v, o with biases, and the norm
    mlp = pages(2 * (2 * 64 * 256 + 256 + 3 * 64))
    vocab = pages(2 * (1000 * 64 + 130 * 64 + 2 * 64))
    # 96 tokens at once: attention has norm, output and a post-norm, q, its output and that of all, the k and v for it;
    # the softmax of all queries beside the next logits, the mask, and queries and output twice, as they follow others
    workspace = 96 * (3 * 64 + 3 * 64 + 2 * 64) * 2 + 4 * 96 * 24 * (3 * 4 + 2) + 3 * 96 * 24 + 96 * 4 * 64 * 2
    assert found == {
        ("cpu", "weights"): vocab + 2 * (attn + mlp),
        ("cpu", "KV cache"): 2 * 2 * pages(2 * 4 * 64 * 32 * 2),
        ("cpu", "hidden states"): 2 * pages(96 * 64 * 2),
        ("cpu", "prompt K and V of one layer"): 2 * (96 + 2 * 24) * 64 * 2,
        ("cpu", "token positions"): 2 * 96 * 32,
        ("cpu", "workspace"): workspace,
        ("cpu", "process"): 123,
    }


def test_everything_streams_from_disk_to_a_gpu() -> None:
    disk = {"disk": 1.0}
    policy = OffloadPolicy(4, 2, disk, disk, disk, lookahead=2)
    # Groups on disk may be read in place, whose tensors start and end anywhere in a page.
    sizes = {group.key: group.buffer_bytes("float16") + 2 * PAGE * len(group.tensors) for group in SPEC.weight_groups}
    found = amounts(measure(policy, EvictionConfig("h2o", ratio=0.5)))
    cache, hidden = pages(2 * 4 * 64 * 17 * 2), pages(96 * 64 * 2)  # 16 of 32 tokens and a free slot
    assert found.pop(("gpu", "workspace")) > 0
    assert found == {
        ("disk", "weights"): sum(sizes.values()),
        ("gpu", "weight buffers"): weight_room(sizes, 2).nbytes,
        ("cpu", "weight staging buffers"): weight_room(sizes, 2).nbytes,
        ("disk", "KV cache"): 4 * cache,
        ("gpu", "cache buffers"): 3 * cache,
        ("cpu", "cache staging buffers"): 2 * cache,
        ("gpu", "new tokens of moving caches"): 4 * 6 * (4 * 2 * 64 * 2 + 16 * 8),
        ("gpu", "cache records"): 4 * (16 * 17 * 8 + 16 * 64),
        ("disk", "hidden states"): 2 * hidden,
        ("gpu", "hidden buffers"): 3 * hidden,
        ("cpu", "hidden staging buffers"): 2 * hidden,
        ("gpu", "prompt K and V of one layer"): 2 * (96 + 2 * 24) * 64 * 2,
        ("gpu", "token positions"): 2 * 96 * 32,
    }


def test_caches_computed_on_the_cpu_stay_there() -> None:
    policy = OffloadPolicy(4, 2, {"gpu": 1}, {"cpu": 0.5, "gpu": 0.5}, {"gpu": 1}, cpu_cache_compute=True)
    found = amounts(measure(policy, EvictionConfig("h2o", ratio=0.5)))
    assert not [what for _, what in found if "buffers" in what or "new tokens" in what]
    assert found["cpu", "cache records"] == found["gpu", "cache records"]
    assert found["cpu", "workspace"] > 0


def test_weights_read_in_place_get_two_pages_per_tensor() -> None:
    policy = OffloadPolicy(weights={"disk": 1.0})
    found = amounts(measure(policy, compute="cpu"))
    tensors = sum(len(group.tensors) for group in SPEC.weight_groups)
    packed = sum(group.buffer_bytes("float16") for group in SPEC.weight_groups)
    assert found["disk", "weights"] == packed + 2 * PAGE * tensors
    assert ("cpu", "weight staging buffers") not in found


WINDOWED = dataclasses.replace(SPEC, arch=ArchSpec("mistral", window=9, window_layers=(1,)))


@pytest.mark.parametrize(
    ("eviction", "slots"),
    [
        (EvictionConfig(), (32, 9)),  # the next query sees 8 and itself
        (EvictionConfig("h2o", 0.5), (17, 9)),
        (EvictionConfig("h2o", budget=5), (6, 6)),
    ],
    ids=["full", "above the window", "below it"],
)
def test_a_windowed_layer_has_slots_of_its_own(eviction: EvictionConfig, slots: tuple[int, int]) -> None:
    disk = {"disk": 1.0}
    policy = OffloadPolicy(4, 2, {"gpu": 1}, disk, {"gpu": 1})
    found = amounts(measure(policy, eviction, spec=WINDOWED))
    caches = [pages(2 * 4 * 64 * count * 2) for count in slots]
    assert found["disk", "KV cache"] == 2 * sum(caches)
    assert found["gpu", "cache buffers"] == 3 * max(caches)
    assert found["cpu", "cache staging buffers"] == 2 * max(caches)
    evicting = [count for count in slots if count < 32]
    assert found["gpu", "cache records"] == 2 * sum(16 * count * 8 + 16 * 64 for count in evicting)
    narrow = dataclasses.replace(WINDOWED, arch=ArchSpec("mistral", window=9))
    assert amounts(measure(policy, eviction, spec=narrow))["gpu", "cache buffers"] == 3 * caches[1]


def test_buffers_are_for_caches_that_move() -> None:
    placed = place(WINDOWED, OffloadPolicy(4, 2), "float16")
    placed = dataclasses.replace(placed, cache={(layer, k): ("gpu", "cpu")[layer] for layer, k in placed.cache})
    asked = PlanRequest(WINDOWED, WORKLOAD, EvictionConfig(), "float16", Caps(), "gpu")
    foot = footprint(asked, OffloadPolicy(4, 2), placed)
    assert amounts(foot)["gpu", "cache buffers"] == 3 * pages(2 * 4 * 64 * 9 * 2), "the windowed layer's only"


def test_opt_30b_needs_what_is_known() -> None:
    opt = dataclasses.replace(
        SPEC,
        name="opt-30b",
        vocab_size=50272,
        hidden_size=7168,
        ffn_size=28672,
        num_layers=48,
        num_heads=56,
        num_kv_heads=56,
        head_dim=128,
        embed_dim=7168,
        max_positions=2048,
    )
    foot = measure(OffloadPolicy(8, 4), spec=opt, workload=Workload(512, 32))
    assert amounts(foot)["cpu", "weights"] / 2**30 == pytest.approx(55.8, abs=0.1)
    assert amounts(foot)["cpu", "KV cache"] / 2**30 == pytest.approx(2 * 48 * 7168 * 544 * 32 * 2 / 2**30, rel=1e-3)


def test_table() -> None:
    foot = Footprint(
        (Item("cpu", "KV cache", 1 << 20), Item("gpu", "weights", 1 << 30), Item("cpu", "weights", 1 << 21))
    )
    assert foot.table().splitlines() == [
        "gpu   weights        1 GiB",
        "gpu   in all         1 GiB",
        "cpu   weights        2 MiB",
        "cpu   KV cache       1 MiB",
        "cpu   in all         3 MiB",
    ]
    assert foot.total("disk") == 0


def shares() -> st.SearchStrategy[dict[str, float]]:
    weights = st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any)
    return weights.map(lambda parts: {tier: part / sum(parts) for tier, part in zip(TIERS, parts, strict=True) if part})


POLICIES = st.builds(
    OffloadPolicy,
    gpu_batch_size=st.integers(1, 9),
    num_gpu_batches=st.integers(1, 5),
    weights=shares(),
    cache=shares(),
    hidden=shares(),
    cpu_cache_compute=st.booleans(),
    lookahead=st.integers(1, 3),
    prefill_chunk=st.integers(16, 200),
)


@settings(max_examples=40, deadline=None)
@given(POLICIES, st.sampled_from(["full", "h2o", "streaming"]), st.booleans(), st.none() | st.integers(1, 40))
def test_every_kind_is_counted_once_and_more_work_needs_no_less(
    policy: OffloadPolicy, name: str, rolling: bool, window: int | None
) -> None:
    eviction = EvictionConfig() if name == "full" else EvictionConfig(name, ratio=0.5)
    eviction = dataclasses.replace(eviction, rolling_positions=rolling)
    spec = dataclasses.replace(SPEC, arch=dataclasses.replace(SPEC.arch, window=window))
    foot = measure(policy, eviction, spec=spec)
    found = amounts(foot)
    assert all(nbytes > 0 for nbytes in found.values())
    assert sum(foot.total(tier) for tier in TIERS) == sum(found.values())
    slots = eviction.resolve(24, 8).total + (name != "full")
    slots = slots if window is None else min(slots, window)
    cache = pages(policy.gpu_batch_size * slots * SPEC.kv_bytes_per_token_and_layer("float16"))
    caches = sum(nbytes for (_, what), nbytes in found.items() if what == "KV cache")
    assert caches == 2 * policy.num_gpu_batches * cache
    placed = place(SPEC, policy, "float16")
    assert (("gpu", "weight buffers") in found) == any(tier != "gpu" for tier in placed.weights.values())
    bigger = measure(dataclasses.replace(policy, gpu_batch_size=policy.gpu_batch_size + 1), eviction, spec=spec)
    longer = measure(policy, eviction, spec=spec, workload=dataclasses.replace(WORKLOAD, prompt_len=40))
    assert all(more.total(tier) >= foot.total(tier) for tier in TIERS for more in (bigger, longer))
