"""What a plan says that packed weights take is what they take, byte for byte, on every tier."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.checkpoint.quantising import QuantisingSource
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.huge import LARGE
from h2o_flexgen.schedule.footprint import Footprint
from tests.programs import write_model

PLACES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "disk": {"policy": {"weights": {"disk": 1.0}}},
    "cpu and disk": {"policy": {"weights": {"cpu": 0.5, "disk": 0.5}, "lookahead": 2}},
    "gpu": {"emulate_gpu": "1GiB", "policy": {"weights": {"gpu": 1.0}}},
    "all tiers": {"emulate_gpu": "1GiB", "policy": {"weights": {"gpu": 0.4, "cpu": 0.3, "disk": 0.3}}},
}
NAMES = {"weights": "weights", "weight buffers": "weight buffers", "weight staging buffers": "staging buffers"}
"""Items of a footprint, and what the tiers call them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3.2 MiB of weights in float32."""
    sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": 4}
    return write_model(tmp_path_factory.mktemp("packed") / "model", **sizes)


def planned(footprint: Footprint) -> Counter[tuple[str, str]]:
    return Counter({(item.tier, NAMES[item.what]): item.nbytes for item in footprint.items if item.what in NAMES})


def taken(llm: Engine) -> Counter[tuple[str, str]]:
    """What the tiers have handed out for weights, and the extents of those on disk."""
    (stage,) = llm._loaded.stages
    found = Counter[tuple[str, str]]()
    for tier in {stage.tiers.compute, stage.tiers.cpu}:
        found.update({(tier.name, what): n for what, n in tier.items.items() if what in NAMES.values()})
    for location in stage.weights._locations.values():
        if location.unit is not None:
            found["disk", "weights"] += location.layout.nbytes
    return found


@pytest.mark.turns
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_are_those_of_the_plan(model: Path, place: str, bits: int, tmp_path: Path) -> None:
    settings = {"dtype": "float32", "offload_dir": str(tmp_path), "weight_bits": bits, **PLACES[place]}
    with Engine(str(model), **settings) as llm:
        llm.generate([[5, 6, 7], [8]], max_new_tokens=3, ignore_eos=True)
        expected, found = planned(llm.last_plan.footprint), taken(llm)
        embed = llm.model.spec.groups_by_key["embed"]
        if llm.last_plan.placement.weights["embed"] == "disk":  # not packed, and read in place with less padding
            expected["disk", "weights"] -= 2 * 4096 * len(embed.tensors)
        assert found == expected
        moved = llm.last_record.bytes_moved
    whole = sum(group.buffer_bytes("float32") for group in llm.model.spec.weight_groups)
    assert sum(n for (_, what), n in found.items() if what == "weights") == whole
    if place == "disk":
        read = whole - embed.buffer_bytes("float32") + sum(tensor.nbytes("float32") for tensor in embed.tensors)
        assert moved["disk->cpu"] == pytest.approx(3 * read, rel=0.01)


def test_fewer_bits_take_that_much_less(model: Path) -> None:
    """Layers take 32 bits, 8 and the scale's 16 of 64 numbers, 4 and those of scale and low."""
    layers = {}
    for bits in (16, 8, 4):
        with Engine(str(model), dtype="float32", weight_bits=bits) as llm:
            groups = [group for group in llm.model.spec.weight_groups if group.key.endswith("mlp")]
            layers[bits] = sum(group.nbytes("float32") for group in groups)
    assert layers[8] / layers[16] == pytest.approx(8.25 / 32, rel=0.03)
    assert layers[4] / layers[16] == pytest.approx(4.5 / 32, rel=0.06)


def test_the_widest_matrices_are_packed_first_and_leave_no_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of the embedding waited beside all that was loaded after it, and an output head's came on top of that: at
    8 bits OPT-125M took 64 MiB more than the cap that its plan fits into."""
    config = {"model_type": "llama", "vocab_size": 90_000, "hidden_size": 128, "intermediate_size": 256}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, seen = QuantisingSource.read_into, list[tuple[int, int]]()

    def noting(source: QuantisingSource, name: str, out: Any) -> None:
        seen.append((math.prod(out.shape), LARGE.free_bytes))
        read(source, name, out)

    monkeypatch.setattr(QuantisingSource, "read_into", noting)
    LARGE.trim()
    with Engine(str(tmp_path), weights="dummy", dtype="bfloat16", weight_bits=8) as llm:
        llm.generate([[5, 6, 7]], max_new_tokens=2)
    wide = [place for place, (numbers, _) in enumerate(seen) if numbers == 90_000 * 128]
    assert wide == [0, 2], "embedding, and head behind its norm"
    assert max(free for _, free in seen[3:]) <= 16 << 20
