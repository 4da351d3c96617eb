"""Tiny random models made by transformers, saved the way the hub has them: what our engine is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

VOCAB = 97

OPT_VARIANTS: dict[str, dict[str, Any]] = {
    "opt": {},
    "opt-350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "opt-projected": {"word_embed_proj_dim": 16},
    "opt-no-bias": {"enable_bias": False},
    "galactica": {"enable_bias": False, "activation_function": "gelu", "layer_norm_elementwise_affine": False},
    "opt-no-affine": {"layer_norm_elementwise_affine": False},
    "opt-untied": {"tie_word_embeddings": False},
}


def opt_config(variant: str = "opt", **changes: Any) -> OPTConfig:
    """A config with every odd size: 3 layers, 4 heads of 8, context 128."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "dropout": 0.0,
    }
    return OPTConfig(**{**settings, **OPT_VARIANTS[variant], **changes})


def make_opt(variant: str = "opt", seed: int = 0, **changes: Any) -> OPTForCausalLM:
    """Random weights large enough that attention is far from uniform and the next token far from certain."""
    torch.manual_seed(seed)
    model = OPTForCausalLM(opt_config(variant, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif "positions" in name:
                parameter.copy_(noise)
            elif "q_proj" in name or "k_proj" in name:
                parameter.copy_(0.25 * noise)
            else:
                parameter.copy_((0.8 if "proj" in name or "fc" in name else 0.3) * noise)
    return model


def save(model: OPTForCausalLM, folder: Path, **settings: Any) -> Path:
    """Writes config.json and safetensors files."""
    model.save_pretrained(folder, **settings)
    return folder


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts that start with BOS and hold no special token elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    return [[2, *torch.randint(3, VOCAB, (n - 1,), generator=generator).tolist()] for n in lengths]


@torch.no_grad()
def transformers_greedy(model: OPTForCausalLM, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities by transformers' own forward, one sequence at a time, without a cache."""
    ids, logprobs = list(prompt), []
    for _ in range(new_tokens):
        logits = model(torch.tensor([ids])).logits[0, -1].float()
        token = int(logits.argmax())
        logprobs.append(float(logits.log_softmax(-1)[token]))
        ids.append(token)
    return ids[len(prompt) :], logprobs
