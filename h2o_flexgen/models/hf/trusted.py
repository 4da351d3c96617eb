"""The model types whose modules were found to give transformers' own tokens here, and by which transformers.

`tests/engine/test_modules_sweep.py` compares them all. Others are refused: a module may take positions from a cache, or
keep states, where nothing shows it.
"""

from __future__ import annotations

import transformers

SWEPT = "5.23"
"""The release of transformers that was swept."""

TRUSTED = frozenset(
    {
        "afmoe",
        "apertus",
        "arcee",
        "axk1",
        "aya_vision",
        "bert",
        "bert-generation",
        "biogpt",
        "bitnet",
        "camembert",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "ctrl",
        "cwm",
        "data2vec-text",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "electra",
        "ernie",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "fuyu",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "got_ocr2",
        "gpt-sw3",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "hyperclovax",
        "internlm3",
        "internvl",
        "iquestcoder",
        "jais2",
        "kolibri1",
        "laguna",
        "llama",
        "llava",
        "mellum",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mistral3",
        "mixtral",
        "modernbert-decoder",
        "moss_transcribe_diarize",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "persimmon",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "seed_oss",
        "smollm3",
        "solar_open",
        "stablelm",
        "starcoder2",
        "vaultgemma",
        "xlm-roberta",
        "xlm-roberta-xl",
        "youtu",
    }
)


def why_not(kind: str) -> str | None:
    """Why a model type is not trusted; None: it is."""
    release = ".".join(transformers.__version__.split(".")[:2])
    if release != SWEPT:
        return f"its modules were compared with those of transformers {SWEPT}, and this is {transformers.__version__}"
    return None if kind in TRUSTED else f"its modules were not found to give the tokens of transformers {SWEPT}"
