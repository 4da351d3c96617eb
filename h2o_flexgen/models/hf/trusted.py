"""The model types whose modules were found to give transformers' own tokens here, and by which transformers.

`tests/engine/test_modules.py` compares some of them in every run. Others are refused: a module may take positions from
a cache, or keep states, where nothing shows it.
"""

from __future__ import annotations

import transformers

SWEPT = "5.23"
"""The release of transformers that was swept."""

TRUSTED = frozenset(
    {
        "apertus",
        "arcee",
        "biogpt",
        "bitnet",
        "cohere",
        "cohere2",
        "cohere_compass_text",
        "ctrl",
        "cwm",
        "electra",
        "ernie4_5",
        "exaone4",
        "fuyu",
        "gemma",
        "gemma3",
        "gemma3_text",
        "glm",
        "glm4",
        "got_ocr2",
        "gpt-sw3",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "llama",
        "ministral",
        "ministral3",
        "mistral",
        "modernbert-decoder",
        "moss_transcribe_diarize",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "opt",
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)


def why_not(kind: str) -> str | None:
    """Why a model type is not trusted; None: it is."""
    release = ".".join(transformers.__version__.split(".")[:2])
    if release != SWEPT:
        return f"its modules were compared with those of transformers {SWEPT}, and this is {transformers.__version__}"
    return None if kind in TRUSTED else f"its modules were not found to give the tokens of transformers {SWEPT}"
