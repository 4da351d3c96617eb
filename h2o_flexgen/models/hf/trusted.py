"""How the modules of each model type run here, as `tests/engine/test_modules_sweep.py` has found.

It compares the greedy tokens of all types with transformers' own. Any other type, or release, is tested before it is
used (`engine.self_test`): a module may take positions from a cache, or keep states, where nothing shows it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NamedTuple

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from h2o_flexgen.errors import ModelError
from h2o_flexgen.folders import cached, whole_file

LOWEST, HIGHEST = (5, 20), (5, 24)
"""The releases of transformers that were swept: the first and the last."""


class Way(NamedTuple):
    """How a model runs: its sequences packed, or one by one ("rows") for a reason; or not at all ("refused")."""

    how: Literal["packed", "rows", "refused"]
    why: str = ""


class Untested(ModelError):
    """It is not known how a model can be run: a test of it will say."""


_WHY = {
    "positions that follow from its cache": (
        "bart",
        "blenderbot-small",
        "marian",
        "mbart",
        "moshi",
        "pegasus",
        "plbart",
    ),
    "attention of its own": (
        "big_bird",
        "bigbird_pegasus",
        "git",
        "gpt_neox_japanese",
        "megatron-bert",
        "mvp",
        "rembert",
        "roformer",
        "trocr",
    ),
    "masks of its own": ("doge",),
    "a cache of its own, or none": ("minimax", "openai-gpt"),
    "an index of keys in its cache": ("qwen4_exp", "qwen4_exp_text"),
    "states that stay in its modules": ("recurrent_gemma",),
}
ROWS = {kind: why for why, kinds in _WHY.items() for kind in kinds}
"""Types whose sequences cannot be packed, and what they have."""
_NO_CLASS = "transformers has no class for it that makes text alone"
REFUSED = {
    "blenderbot": "transformers' own decoder fails on tiny ones, and nothing shows how it runs",
    "blt": "it reads bytes in patches of its own",
    "cpmant": "its positions are of a prompt within a prompt",
    "emu3": _NO_CLASS,
    "gemma4_assistant": "it drafts for another model, whose states it needs",
    "inkling2_loop_text": "its attention adds biases by position",
    "mllama": _NO_CLASS,
    "musicgen": _NO_CLASS,
    "musicgen_melody": _NO_CLASS,
    "prophetnet": "it predicts several tokens at once, by two streams of attention",
    "reformer": "its attention hashes whole prompts, of lengths that it pads",
    "rwkv": "it rescales its weights where they lie",
    "whisper": "it hears sound, and makes no text alone",
    "xlm": "it makes text by tokens that are masked",
    "xlnet": "it makes text by permuted tokens, of which the last is masked",
    "xlstm": "transformers' own decoder fails without its kernels",
    "xmod": "it wants the language of each prompt",
}
"""Types that are not run, and why."""
_WITH_IMAGES = {
    "aria",
    "aya_vision",
    "cohere2_vision",
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
    "deepseek_vl",
    "exaone4_5",
    "glm4v",
    "glm_ocr",
    "hyperclovax_vision_v2",
    "idefics2",
    "idefics3",
    "internvl",
    "janus",
    "lighton_ocr",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "mistral3",
    "ovis2",
    "paddleocr_vl",
    "pp_chart2table",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "shieldgemma2",
    "smolvlm",
    "video_llama_3",
    "video_llava",
    "vipllava",
}
"""Types that also look at images, and are packed as decoders of text alone are."""
_LATE = {
    "bailing_hybrid",
    "bamba",
    "codegen",
    "cohere_compass",
    "cohere_compass_text",
    "dory",
    "dots3_note",
    "dots3_note_text",
    "falcon_h1",
    "falcon_mamba",
    "gptj",
    "granitemoehybrid",
    "idefics3",
    "jamba",
    "kimi_linear",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "zamba",
    "zamba2",
    "zaya",
}
"""Types that are packed in the last release alone: in those before, some run otherwise, or not at all."""
_EACH = {"deepseek_v4", "inkling2_text", "inkling_text"}
"""Decoders of text of which each model is tested before it is used."""
TRUSTED = (_WITH_IMAGES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()) - ROWS.keys() - REFUSED.keys() - _EACH
"""Types whose sequences are packed: the decoders of text of transformers, but those that are listed otherwise."""
SINCE = {kind: HIGHEST if kind in _LATE else LOWEST for kind in TRUSTED}
"""The first release in which they are."""
_assumed: ContextVar[Way | None] = ContextVar("assumed", default=None)


@contextmanager
def assumed(way: Way) -> Iterator[None]:
    """Within, every model is run so: for the test that finds out whether it can be."""
    token = _assumed.set(way)
    try:
        yield
    finally:
        _assumed.reset(token)


def under_test() -> bool:
    """Whether a test is finding out how a model is run."""
    return _assumed.get() is not None


def way_of(config: Mapping[str, Any]) -> Way | None:
    """How a model is run; None: that is still to be found out."""
    kind, way = config["model_type"], _assumed.get()
    if way is not None:
        return way
    if kind in REFUSED:
        return Way("refused", REFUSED[kind])
    if max(LOWEST, SINCE.get(kind, LOWEST)) <= release() <= HIGHEST and (kind in TRUSTED or kind in ROWS):
        return Way("packed") if kind in TRUSTED else Way("rows", ROWS[kind])
    return tested(config)


def release() -> tuple[int, int]:
    """The release of transformers, without that of its corrections."""
    major, minor, *_ = transformers.__version__.split(".")
    return int(major), int(minor)


def tested(config: Mapping[str, Any]) -> Way | None:
    """The result of a test of just this model, now or earlier; None: there was no test."""
    try:
        kept = json.loads(_verdict(config).read_text(encoding="utf-8"))
        return Way(kept["how"], kept["why"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(config: Mapping[str, Any], way: Way) -> None:
    """For later runs, what a test has found. OSError where it cannot be written."""
    with whole_file(_verdict(config)) as temporary:
        temporary.write_text(json.dumps(way._asdict()), encoding="utf-8")


def _verdict(config: Mapping[str, Any]) -> Path:
    """Where it is kept: of one config, one release of transformers and of what computes with it here."""
    code = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    said = json.dumps([config, transformers.__version__, code], sort_keys=True)
    return cached("modules", f"{config['model_type']}-{hashlib.sha256(said.encode()).hexdigest()[:16]}.json")
