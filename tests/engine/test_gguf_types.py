"""Every type of GGUF's tensors as a whole model, beside the same model dequantised by the `gguf` package."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from h2o_flexgen.checkpoint.gguf.blocks import FORMATS
from h2o_flexgen.engine.engine import Engine
from tests.checkpoint.gguf_files import Kind, by_transformers, write_gguf
from tests.checkpoint.test_gguf_blocks import PACKED, dequantised, random_blocks
from tests.engine.test_gguf import NEW, check
from tests.engine.test_packed import PLACES
from tests.tiny import make_model, prompts_of

HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,),
    "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "Q8_K": (), "IQ1_M": (),
}  # fmt: skip
"""Where the float16 numbers of a block are, if not at byte 0."""
SIZE = 0.06
"""Of the numbers, about: those of random bytes would be no weights of a model."""


def blocks_of(kind: str, rows: int, count: int, seed: int) -> np.ndarray:
    """Random blocks (rows, count, bytes) whose numbers have about SIZE."""
    data = random_blocks(kind, rows, count, seed)

    def scaled(scale: float) -> None:
        half = np.array([scale], "<f2").view(np.uint8)
        for at in HALVES.get(kind, (0,)):
            data[..., at : at + 2] = half
        if kind == "Q8_K":
            data[..., :4] = np.array([scale], "<f4").view(np.uint8)
        if kind == "IQ1_M":
            word = int(half.view("<u2")[0])
            for i in range(4):
                data[..., 49 + 2 * i] = data[..., 49 + 2 * i] & 15 | (word >> 4 * i & 15) << 4

    if kind == "MXFP4":
        data[..., 0] = 121 + data[..., 0] % 2
    elif kind == "NVFP4":
        data[..., :4] = 8 + data[..., :4] % 8
    else:
        scaled(1)
        scaled(SIZE / float(dequantised(kind, data).std()))
    return data


def written(folder: Path, model: PreTrainedModel, kind_of: Callable[[str, int], str]) -> tuple[Path, Path]:
    """The model with random blocks, of the kind of each matrix by its name and number, and the same dequantised."""
    plain: dict[str, np.ndarray] = {}
    number = itertools.count()

    def random(name: str, values: np.ndarray) -> tuple[np.ndarray, Kind]:
        seed = next(number)
        kind, rows = kind_of(name, seed), values.size // values.shape[-1]
        if kind == "F32" or "ffn_gate_inp" in name:  # as routers are
            plain[name] = values
            return values.astype(np.float32), Kind.F32
        blocks = blocks_of(kind, rows, values.shape[-1] // FORMATS[kind].numbers, seed)
        plain[name] = dequantised(kind, blocks).reshape(values.shape)
        return blocks.reshape(*values.shape[:-1], -1), Kind[kind]

    packed = write_gguf(folder / "packed.gguf", model, random)
    floats = write_gguf(folder / "floats.gguf", model, lambda name, values: (plain[name].astype(np.float32), Kind.F32))
    return packed, floats


SIZES = {"hidden_size": 256, "intermediate_size": 256}


@pytest.mark.turns
@pytest.mark.parametrize("kind", PACKED)
def test_a_model_of_one_type(kind: str, tmp_path: Path) -> None:
    packed, floats = written(tmp_path, make_model("llama", **SIZES, num_hidden_layers=1), lambda name, number: kind)
    judge = by_transformers(floats)
    for place in ("cpu", "disk"):
        llm = check(packed, judge, place)
        assert llm.last_record.quantization["weights"]["format"] == "gguf"


@pytest.mark.turns
@pytest.mark.parametrize("place", ["cpu", "disk", "gpu"])
@pytest.mark.parametrize("first", [0, 7])
def test_types_are_mixed_as_a_file_likes(first: int, place: str, tmp_path: Path) -> None:
    """Matrices that are neighbours, as q, k and v, or gate and up, are of different types, some of them floats."""
    kinds = [*PACKED, "F32"]
    model = make_model("llama-gqa", **SIZES, num_hidden_layers=3)
    packed, floats = written(tmp_path, model, lambda name, number: kinds[(first + number) % len(kinds)])
    check(packed, by_transformers(floats), place)


@pytest.mark.turns
@pytest.mark.parametrize("kind", ["IQ4_XS", "IQ2_XS", "Q2_K", "Q3_K", "IQ1_M", "MXFP4", "NVFP4", "TQ1_0"])
def test_experts_of_each_type(kind: str, tmp_path: Path) -> None:
    model = make_model("mixtral", **SIZES, num_hidden_layers=1)
    other = {"up": "Q4_K", "gate": kind, "down": kind}
    packed, floats = written(
        tmp_path, model, lambda name, number: next((other[part] for part in other if f"ffn_{part}_exps" in name), kind)
    )
    prompts = prompts_of([11, 4])
    with Engine(str(floats), dtype="float32") as judge:
        for place in ("cpu", "disk"):
            with Engine(str(packed), dtype="float32", **PLACES[place]) as llm:
                outputs = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True, logprobs=0)
            wanted = judge.score([(prompt, out.token_ids) for prompt, out in zip(prompts, outputs, strict=True)])
            for output, score in zip(outputs, wanted, strict=True):
                assert output.logprobs == pytest.approx(score.token_logprobs, abs=2e-4)
