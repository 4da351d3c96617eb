"""The footprint's activations, by hand for a tiny model: hidden states, prompts' keys and values, workspace."""

from __future__ import annotations

import dataclasses

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.model.arch import ArchSpec, RotarySpec
from h2o_flexgen.config.offload import Kernels, OffloadPolicy
from h2o_flexgen.config.workload import Workload
from tests.schedule.footprints import SPEC, amounts, measure, pages


def test_the_head_is_the_workspace_of_a_large_vocabulary() -> None:
    large = dataclasses.replace(SPEC, vocab_size=1_000_000)
    found = amounts(measure(OffloadPolicy(4), spec=large, compute="cpu"))
    assert found["cpu", "workspace"] == 4 * (2 * 64 + 1_000_000) * 2 + (4 * 4 + 32) * 1_000_000


def test_attention_is_the_workspace_of_a_long_prompt() -> None:
    found = amounts(measure(OffloadPolicy(), EvictionConfig("h2o", 0.5), workload=Workload(2000, 48), compute="cpu"))
    queries = 2**20 // (4 * 2000)  # whose logits the kernel has alive at once
    assert queries * 4 * 2000 < 2**20
    kernel = 2**20 * (3 * 4 + 2) + 3 * 2**20 // 4 + 2000 * 2 * 64 * 2
    sums = 4 * (1 + 3) * 4 * 2000
    assert found["cpu", "workspace"] == 2000 * (3 + 3 + 2) * 64 * 2 + sums + kernel


def test_a_gated_mlp_has_three_wide_tensors() -> None:
    wide = dataclasses.replace(SPEC, ffn_size=4096)
    gated = dataclasses.replace(wide, arch=dataclasses.replace(wide.arch, gated_mlp=True))
    plain, fused = (amounts(measure(OffloadPolicy(4), spec=spec))["gpu", "workspace"] for spec in (wide, gated))
    assert (plain, fused) == (96 * (3 * 64 + 2 * 4096) * 2, 96 * (3 * 64 + 3 * 4096) * 2)


def test_a_parallel_layer_has_hidden_states_of_twice_the_width() -> None:
    spec = dataclasses.replace(SPEC, arch=ArchSpec("gpt_neox", positions="rotary", parallel=True, rotary=RotarySpec(8)))
    found = amounts(measure(OffloadPolicy(4, 2), spec=spec, compute="cpu"))
    assert found["cpu", "hidden states"] == 2 * pages(96 * 128 * 2)
    assert found["cpu", "token positions"] == 2 * 96 * (32 + 2 * 8 * 2)


def test_recorded_steps() -> None:
    """Where a GPU records and everything stays on it: the attention half's activations, and each batch's logits."""
    here = {"gpu": 1.0}
    policy = OffloadPolicy(4, 2, here, here, here)
    attention = 4 * 2 * (3 * 64 + 3 * 64 + 2 * 64) + 12 * 16 * 32
    found = amounts(measure(policy, kernels=Kernels.TRITON))
    assert found.pop(("gpu", "recorded steps")) == attention + 2 * 4 * 1000 * 4
    assert found == amounts(measure(policy)), "and nothing else changes"
    for kind in ("weights", "cache", "hidden"):
        moved = dataclasses.replace(policy, **{kind: {"gpu": 0.5, "cpu": 0.5}})
        assert amounts(measure(moved, kernels=Kernels.TRITON)) == amounts(measure(moved))
    rolling = EvictionConfig("h2o", 0.5, rolling_positions=True)
    assert amounts(measure(policy, rolling, kernels=Kernels.TRITON)) == amounts(measure(policy, rolling))


def test_prompts_in_parts() -> None:
    def keys(policy: OffloadPolicy, eviction: EvictionConfig | None = None, prompt: int = 100) -> float:
        found = amounts(measure(policy, eviction, workload=Workload(prompt, 8), compute="cpu"))
        return found["cpu", "prompt K and V of one layer"] / (2 * 64 * 2)

    rolling = EvictionConfig("h2o", 0.5, rolling_positions=True)
    assert keys(OffloadPolicy()) == 100, "one prompt in one piece follows nothing"
    assert keys(OffloadPolicy(prefill_chunk=30)) == 30 + 2 * 100, "the parts of it, and once more in one piece"
    assert keys(OffloadPolicy(4, prefill_chunk=30)) == 30 + 2 * 100
    assert keys(OffloadPolicy(4)) == 400 + 2 * 100, "four may share what they begin with"
    assert keys(OffloadPolicy(1, 2)) == 100 + 2 * 100
    assert keys(OffloadPolicy(4, prefill_chunk=30), rolling) == 30 + 3 * 100, "unrotated keys, too"


def test_smaller_chunks_need_less() -> None:
    found = [
        measure(
            OffloadPolicy(4, prefill_chunk=chunk),
            EvictionConfig("h2o", 0.2),
            workload=Workload(2000, 48),
            compute="cpu",
        )
        for chunk in (16, 128, 2000, 8000, 10**6)
    ]
    workspaces = [amounts(foot)["cpu", "workspace"] for foot in found]
    assert workspaces == sorted(workspaces)
    assert workspaces[0] < workspaces[2] / 3
    assert workspaces[3] == workspaces[4]


def test_rolling_positions_need_ranks_and_rotated_keys() -> None:
    spec = dataclasses.replace(SPEC, arch=ArchSpec("llama", positions="rotary", rotary=RotarySpec(16)), vocab_size=10)
    work = Workload(4, 1000)
    h2o, rolling = (EvictionConfig("h2o", 0.5, rolling_positions=rolls) for rolls in (False, True))
    plain, rolled = (
        amounts(measure(OffloadPolicy(4), e, spec=spec, workload=work, compute="cpu")) for e in (h2o, rolling)
    )
    slots = 503
    assert rolled["cpu", "cache records"] - plain["cpu", "cache records"] == 2 * 4 * 16 * slots
    keys = 16 * slots * (2 * 16 * 2 + 8)
    step = 4 * (3 * 64 + 4 * 64 + 3 * 64) * 2 + 4 * slots * (4 * (8 + 2) + 16 * 4)
    assert rolled["cpu", "workspace"] == step + keys + 6 * slots * 16 * 4 > plain["cpu", "workspace"]
    assert rolled["cpu", "KV cache"] == plain["cpu", "KV cache"]
