"""Tiny random models made by transformers, saved the way the hub has them: what our engine is compared with.

Adding a family adds rows to FAMILIES: every test over all families then runs over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Dots1Config,
    DynamicCache,
    Ernie4_5_MoeConfig,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HYV3Config,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from tests.seeds import moved, torch_generator

T = TypeVar("T")

VOCAB = 97
WINDOW = 12
"""Of models with a sliding window: less than the sequences that tests run."""

CLEAR = 1e-4
"""How much larger than the next the largest logit must be for a greedy token to say anything."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
_OPT = {"word_embed_proj_dim": 32, "ffn_dim": 56, "dropout": 0.0}
_ROTARY = {"intermediate_size": 56}
_GROUPED = {**_ROTARY, "num_key_value_heads": 2}
_MULTIPLIED = {
    "attention_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
    "tie_word_embeddings": True,
}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_EIGHT = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 3}

_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def _rope(kind: str, theta: float = 10000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


def _longrope(original: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.2, 1.9, 3.5, 7.0]}
    return {"original_max_position_embeddings": original, **_rope("longrope", **factors)}


class FamilyRow(NamedTuple):
    """A model of one family: transformers' config class, and what is changed from SIZES and its defaults.

    `seed` makes weights under which no test hangs a token or an eviction on a rounding error.
    """

    config: type[PreTrainedConfig]
    settings: dict[str, Any]
    seed: int = 0

    @property
    def family(self) -> str:
        """The model_type of its config.json."""
        return self.config.model_type


FAMILIES: dict[str, FamilyRow] = {
    "opt": FamilyRow(OPTConfig, _OPT),
    "opt-350m": FamilyRow(OPTConfig, {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt-projected": FamilyRow(OPTConfig, {**_OPT, "word_embed_proj_dim": 16}),
    "opt-no-bias": FamilyRow(OPTConfig, {**_OPT, "enable_bias": False}),
    "galactica": FamilyRow(
        OPTConfig,
        {**_OPT, "enable_bias": False, "activation_function": "gelu", "layer_norm_elementwise_affine": False},
    ),
    "opt-no-affine": FamilyRow(OPTConfig, {**_OPT, "layer_norm_elementwise_affine": False}),
    "opt-untied": FamilyRow(OPTConfig, {**_OPT, "tie_word_embeddings": False}),
    "llama": FamilyRow(LlamaConfig, _ROTARY),
    "llama-gqa": FamilyRow(LlamaConfig, {**_GROUPED, "rms_norm_eps": 1e-5, **_rope("default", 500.0)}),
    "llama-gqa1": FamilyRow(LlamaConfig, {**_ROTARY, "num_key_value_heads": 1}),
    "llama-tied": FamilyRow(LlamaConfig, {**_GROUPED, "tie_word_embeddings": True}),
    "llama-bias": FamilyRow(LlamaConfig, {**_GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": FamilyRow(LlamaConfig, {**_GROUPED, "head_dim": 12}),
    "llama-linear": FamilyRow(LlamaConfig, {**_GROUPED, **_rope("linear", factor=2.5)}),
    "llama-dynamic": FamilyRow(
        LlamaConfig, {**_GROUPED, "max_position_embeddings": 32, **_rope("dynamic", factor=4.0)}
    ),
    "llama3-rope": FamilyRow(
        LlamaConfig,
        {
            **_GROUPED,
            **_rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
        },
    ),
    "llama-yarn": FamilyRow(
        LlamaConfig, {**_GROUPED, **_rope("yarn", factor=4.0, original_max_position_embeddings=32)}
    ),
    "mistral": FamilyRow(MistralConfig, {**_GROUPED, "sliding_window": WINDOW}, seed=1),
    "mistral-full": FamilyRow(MistralConfig, {**_GROUPED, "sliding_window": None}),
    "qwen2": FamilyRow(Qwen2Config, {**_GROUPED, "tie_word_embeddings": True}),
    "qwen2-window": FamilyRow(
        Qwen2Config, {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": FamilyRow(Qwen3Config, {**_GROUPED, "head_dim": 12}),
    "phi3": FamilyRow(Phi3Config, {**_GROUPED, "original_max_position_embeddings": 128}, seed=1),
    "phi3-longrope": FamilyRow(Phi3Config, {**_GROUPED, **_longrope(64)}, seed=1),
    "phi3-longrope-beyond": FamilyRow(Phi3Config, {**_GROUPED, **_longrope(4)}),
    "gemma3": FamilyRow(
        Gemma3TextConfig,
        {
            **_GROUPED,
            "head_dim": 12,
            "query_pre_attn_scalar": 6,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma2": FamilyRow(
        Gemma2Config,
        {
            **_GROUPED,
            "head_dim": 12,
            "query_pre_attn_scalar": 6,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "ministral3": FamilyRow(
        Ministral3Config,
        {
            **_GROUPED,
            "head_dim": 12,
            **_rope(
                "yarn",
                500.0,
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.7,
            ),
        },
    ),
    "gpt-neox": FamilyRow(GPTNeoXConfig, {**_ROTARY, "rotary_pct": 0.5}),
    "gpt-neox-serial": FamilyRow(GPTNeoXConfig, {**_ROTARY, "use_parallel_residual": False}),
    "pythia": FamilyRow(GPTNeoXConfig, {**_ROTARY, "rotary_pct": 0.25}),
    "pythia-whole-rope": FamilyRow(GPTNeoXConfig, {**_ROTARY, "rotary_pct": 1.0}),
    "mixtral": FamilyRow(MixtralConfig, {**_GROUPED, **_EIGHT}),
    "mixtral-window": FamilyRow(MixtralConfig, {**_GROUPED, **_EIGHT, "sliding_window": WINDOW}),
    "olmoe": FamilyRow(OlmoeConfig, {**_GROUPED, **_EIGHT, "clip_qkv": 0.9}),
    "qwen2-moe": FamilyRow(
        Qwen2MoeConfig,
        {**_GROUPED, **_EIGHT, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "qwen3-moe": FamilyRow(
        Qwen3MoeConfig,
        {**_GROUPED, **_EIGHT, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "gpt-oss": FamilyRow(
        GptOssConfig,
        {
            **_GROUPED,
            **_EIGHT,
            "head_dim": 12,
            "sliding_window": WINDOW,
            "swiglu_limit": 0.5,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
        },
    ),
    "granite-moe": FamilyRow(
        GraniteMoeConfig,
        {
            **_GROUPED,
            **_EIGHT,
            **_MULTIPLIED,
        },
        seed=1,
    ),
    "glm4-moe": FamilyRow(
        Glm4MoeConfig,
        {
            **_GROUPED,
            **_ROUTED,
            "head_dim": 12,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "dots1": FamilyRow(
        Dots1Config,
        {
            **_GROUPED,
            **_ROUTED,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "ernie4.5-moe": FamilyRow(
        Ernie4_5_MoeConfig,
        {
            **_GROUPED,
            "moe_num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
    "hy-v3": FamilyRow(
        HYV3Config,
        {**_GROUPED, "head_dim": 12, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "minimax-m2": FamilyRow(
        MiniMaxM2Config,
        {
            **_GROUPED,
            "head_dim": 12,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            **_rope("default", 500.0, partial_rotary_factor=0.5),
        },
    ),
    "granite": FamilyRow(GraniteConfig, {**_GROUPED, **_MULTIPLIED}),
    "olmo2": FamilyRow(Olmo2Config, _GROUPED),
    "smollm3": FamilyRow(SmolLM3Config, {**_GROUPED, "no_rope_layer_interval": 2}),
    "smollm3-window": FamilyRow(
        SmolLM3Config,
        {**_GROUPED, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "olmo3": FamilyRow(
        Olmo3Config,
        {
            **_GROUPED,
            "sliding_window": WINDOW,
            **_LAYERS,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 2000.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0},
            },
        },
    ),
    "exaone4": FamilyRow(Exaone4Config, {**_GROUPED, "sliding_window": WINDOW, **_LAYERS}),
    "exaone4-full": FamilyRow(
        Exaone4Config, {**_GROUPED, "sliding_window": None, "layer_types": ["full_attention"] * 3}
    ),
    "cohere2": FamilyRow(Cohere2Config, {**_GROUPED, "sliding_window": WINDOW, "logit_scale": 0.4, **_LAYERS}),
    "glm4": FamilyRow(Glm4Config, {**_GROUPED, "head_dim": 12, "eos_token_id": 2}),
    "seed-oss": FamilyRow(SeedOssConfig, {**_GROUPED, "head_dim": 12}),
}
"""By the names that tests go by; "opt" is the one where nothing depends on the family."""

OPT_VARIANTS: tuple[str, ...] = tuple(name for name, row in FAMILIES.items() if row.config is OPTConfig)

_SCALES = (
    ("post_feedforward", 2.0),
    ("norm.weight", 0.3),
    ("positions", 1.0),
    ("q_proj", 0.25),
    ("k_proj", 0.25),
    ("qkv", 0.3),
    ("query_key_value", 0.3),
    ("gate", 0.4),
    ("proj", 0.8),
    ("fc", 0.8),
    ("dense", 0.8),
)
"""Of the noise in a parameter, by the first part of its name that is here; else 0.3."""


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    """A config with every odd size: 3 layers, 4 heads, context 128. Of a row of FAMILIES, with `changes`."""
    row = FAMILIES[name]
    # A copy: transformers completes dictionaries inside a config in place.
    settings = {key: dict(value) if isinstance(value, dict) else value for key, value in row.settings.items()}
    return row.config(**{**SIZES, **settings, **changes})


def opt_config(variant: str = "opt", **changes: Any) -> OPTConfig:
    """`config_of` for the OPT rows."""
    return config_of(variant, **changes)


def make_model(name: str, seed: int | None = None, **changes: Any) -> PreTrainedModel:
    """Random weights large enough that attention is far from uniform and the next token far from certain."""
    torch.manual_seed(moved(FAMILIES[name].seed if seed is None else seed))
    model = AutoModelForCausalLM.from_config(config_of(name, **changes), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            scale = next((scale for part, scale in _SCALES if part in parameter_name), 0.3)
            noise = scale * torch.randn_like(parameter)
            if parameter_name.endswith("norm.weight"):
                parameter.add_(noise)  # to what makes it the identity: 1, in Gemma 0
            else:
                parameter.copy_(noise)
        for buffer_name, buffer in (*model.named_buffers(), *model.named_parameters()):
            if "correction_bias" in buffer_name:
                buffer.copy_(0.3 * torch.randn_like(buffer))
    return model


def make_opt(variant: str = "opt", seed: int | None = None, **changes: Any) -> OPTForCausalLM:
    """`make_model` for the OPT rows."""
    return make_model(variant, seed, **changes)


def save(model: PreTrainedModel, folder: Path, **settings: Any) -> Path:
    """Writes config.json and safetensors files."""
    model.save_pretrained(folder, **settings)
    return folder


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts that start with BOS and hold no special token elsewhere."""
    generator = torch_generator(seed)
    return [[2, *torch.randint(3, VOCAB, (n - 1,), generator=generator).tolist()] for n in lengths]


class TooCloseToCall(AssertionError):
    """A token or an eviction hangs on a rounding error: from there on two correct programs may differ."""


def decided(prompts: list[list[int]], answer: Callable[[int, list[int]], T]) -> tuple[list[list[int]], list[T]]:
    """`prompts`, and answer(number, prompt) for each. Where that is too close to call, another prompt of the same
    length takes its place; ten in a row are a fault.
    """
    prompts, answers = list(prompts), []
    for number, prompt in enumerate(prompts):
        for seed in range(100, 110):
            with suppress(TooCloseToCall):
                answers.append(answer(number, prompts[number]))
                break
            prompts[number] = prompts_of([len(prompt) + 1], seed)[0][1:]
        else:
            raise TooCloseToCall(f"ten prompts of {len(prompt)} tokens")
    return prompts, answers


def rope_of(model: PreTrainedModel) -> dict[str, Any]:
    """The rotary settings of all layers; empty where positions are learned or layers differ."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    return rope if "rope_type" in rope else {}


@contextmanager
def in_sequence_of(model: PreTrainedModel, length: int) -> Iterator[bool]:
    """Rotary angles of a sequence of which `length` tokens go in; gives whether keys must be kept as first rotated.

    dynamic: keys keep the angles of the step that made them, as in transformers' generate. transformers' module keeps
    those of the longest sequence so far until it sees a short one: it sees one here.
    longrope: the factors that `length` calls for, from the first token on: of a text that is known as a whole, and of
    an answer that does not pass the original context. See `generated_logprobs` for one that does.
    """
    rope = rope_of(model)
    kind = rope.get("rope_type")
    if kind in ("dynamic", "longrope"):
        model(torch.tensor([[2]]), use_cache=False)
    if kind != "longrope":
        yield kind == "dynamic"
        return
    original = rope["original_max_position_embeddings"]
    rope["original_max_position_embeddings"] = 0 if length > original else length
    try:
        yield False
    finally:
        rope["original_max_position_embeddings"] = original


@torch.no_grad()
def transformers_logprobs(model: PreTrainedModel, prompt: list[int], continuation: list[int]) -> torch.Tensor:
    """Log-probabilities (len(continuation), vocab) of the next token, after the prompt and after each token but the
    last, by transformers' own forward. Without a cache wherever that is the same, else with one.
    """
    with in_sequence_of(model, len(prompt) + len(continuation) - 1) as cached:
        if not cached:
            logits = model(torch.tensor([prompt + continuation[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
            return logits.float().log_softmax(-1)
        cache, rows = DynamicCache(), []
        for ids in (prompt, *([token] for token in continuation[:-1])):
            rows.append(model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1])
        return torch.stack(rows).float().log_softmax(-1)


@torch.no_grad()
def generated_logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The same for tokens that are not known beforehand. longrope: generate computes all keys anew when the sequence
    passes the original context, as if there were no cache."""
    if rope_of(model).get("rope_type") != "longrope":
        return transformers_logprobs(model, prompt, tokens)
    ids, ends = prompt + tokens, range(len(prompt), len(prompt) + len(tokens))
    rows = [model(torch.tensor([ids[:end]]), use_cache=False).logits[0, -1] for end in ends]
    return torch.stack(rows).float().log_softmax(-1)


def transformers_agrees(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[float]:
    """Asserts that `tokens` are those of greedy decoding: each the most likely after those before it. Their
    log-probabilities; TooCloseToCall where the next likely token comes near one of them, before any that is wrong."""
    rows = generated_logprobs(model, prompt, tokens)
    best, second = rows.topk(2).values.unbind(1)
    close = (best - second <= CLEAR).tolist()
    sure = close.index(True) if True in close else len(tokens)
    assert tokens[:sure] == rows.argmax(-1).tolist()[:sure]
    if sure < len(tokens):
        raise TooCloseToCall(f"{float(best[sure] - second[sure])} between the two most likely tokens")
    return best.tolist()


@torch.no_grad()
def transformers_greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, one sequence at a time, by the same forward passes; or TooCloseToCall."""
    ids, logprobs = list(prompt), []
    with in_sequence_of(model, len(prompt) + new_tokens - 1) as cached:
        cache = DynamicCache() if cached else None
        for _ in range(new_tokens):
            given = torch.tensor([ids if cache is None else ids[cache.get_seq_length() :]])
            logits = model(given, past_key_values=cache, use_cache=cached).logits[0, -1].float()
            best, second = logits.topk(2).values
            if best - second <= CLEAR:
                raise TooCloseToCall(f"{float(best - second)} between the two most likely tokens")
            token = int(logits.argmax())
            logprobs.append(float(logits.log_softmax(-1)[token]))
            ids.append(token)
    return ids[len(prompt) :], logprobs
