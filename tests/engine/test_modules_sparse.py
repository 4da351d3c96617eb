"""Layers that choose what they attend to, under eviction: against transformers, whose mask hides what has gone. And
Dots, whose layers have sizes of their own beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.self_test import prompts_of
from h2o_flexgen.models.hf.build import model_types
from h2o_flexgen.models.hf.shrink import VOCAB, WINDOW, random_model, shrunk

BUDGET, SINKS, NEW = 10, 2, 6  # more than are chosen


DOTS = "dots3_note_text"
dots = pytest.mark.skipif(DOTS not in model_types(), reason="this release has no Dots of the third kind")


def hidden(prompt: int, length: int, window: int | None = None) -> torch.Tensor:
    """What transformers adds to logits (1, 1, length, length): sinks and the most recent are seen behind a prompt, and
    of them those in a window."""
    query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
    kept = (key < SINKS) | (key >= query - (BUDGET - SINKS))
    seen = (key <= query) & (kept | (query < prompt)) & (key > query - (length if window is None else window))
    return torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("deepseek_v32", "glm_moe_dsa")]


@pytest.mark.parametrize("kind", ["hy_v4", *SLOW, pytest.param(DOTS, marks=(dots, pytest.mark.slow))])
def test_what_is_chosen_is_of_what_is_kept(kind: str, tmp_path: Path) -> None:
    """Each layer by its own index, or by that of the layer before, with a prefix that prompts share."""
    with torch.no_grad():
        model = random_model(shrunk({"model_type": kind}))
        assert model.config.index_topk < BUDGET
        model.save_pretrained(tmp_path)
    short, long, other = prompts_of(VOCAB)
    prompts = [long, [*long[:12], *other], short, other]
    how = {"dtype": "float32", "model_impl": "transformers", "offload_dir": str(tmp_path)}
    policy = {"gpu_batch_size": 2, "num_gpu_batches": 2, "prefill_chunk": 16}
    eviction = EvictionConfig("streaming", budget=BUDGET, sinks=SINKS)
    with Engine(str(tmp_path), eviction=eviction, policy=policy, **how) as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, outputs, strict=True):
        whole = torch.tensor([[*prompt, *output.token_ids[:-1]]])
        seen: Any = hidden(len(prompt), whole.shape[1])
        if kind == DOTS:
            windows = hidden(len(prompt), whole.shape[1], WINDOW)
            seen = {"indexed_attention": seen, "sliding_attention": windows}
        with torch.no_grad():
            logits = model(whole, attention_mask=seen).logits[0, len(prompt) - 1 :]
        assert output.token_ids == logits.argmax(-1).tolist()
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
        assert output.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)


@dots
def test_layers_have_sizes_of_their_own(tmp_path: Path) -> None:
    """Of a checkpoint with towers that nothing reads, whose config.json has the fields of its text beside theirs, and
    those of layers with windows by names of their own."""
    text = shrunk({"model_type": DOTS})
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"adapter_in_dim": 32, "adapter_out_dim": text.hidden_size, "mlp_layer_types": ["dense"]}
    audio: dict[str, Any] = {"adapter_output_size": text.hidden_size, "downsample_hidden_size": 16}
    audio |= {"whisper_adapter_in_dim": 32, "whisper_config": {"d_model": 32, "encoder_attention_heads": 2}}
    audio["whisper_config"] |= {"encoder_layers": 1, "encoder_ffn_dim": 32, "num_mel_bins": 16}
    towers = {"vision_config": vision, "audio_config": audio}
    flat = {key: value for key, value in text.to_dict().items() if key != "per_layer_config"}
    flat |= {f"swa_{key}": getattr(text.per_layer_config[1], key) for key in _OF_LAYERS} | {"use_dsa": True}
    config = AutoConfig.for_model("dots3_note", text_config=text.to_dict(), **towers)
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.model.language_model.load_state_dict(random_model(text).model.state_dict())
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**flat, **towers, "model_type": "dots3_note"}))
    prompts = prompts_of(VOCAB)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = [model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]
    with Engine(str(tmp_path), dtype="float32", policy={"gpu_batch_size": 2, "num_gpu_batches": 2}) as llm:
        outputs = llm.generate(prompts, max_new_tokens=NEW, ignore_eos=True)
        heads = [llm.model.spec.heads_of(layer) for layer in range(4)]
    assert [output.token_ids for output in outputs] == wanted
    assert [each.queries for each in heads] == [4, 8, 4, 8]
    assert [each.dim for each in heads] == [16 + 8 + 16, 32 + 8] * 2  # latents, what is rotated, and the index


_OF_LAYERS = ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "head_dim")
_OF_LAYERS += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dots
@pytest.mark.parametrize("kind", [DOTS, "dots3_note"])
def test_what_single_layers_have_stays_when_made_small(kind: str) -> None:
    """In a config that says it by layers, or by a kind of them, beside what is no size."""
    single = {"swa_kv_lora_rank": 192, "swa_num_attention_heads": 16, "swa_num_key_value_heads": 16}
    said = {"model_type": kind, "hidden_size": 5120, "num_hidden_layers": 9, "routed_scaling_factor": 2.5, **single}
    whole = AutoConfig.for_model(kind, **{key: value for key, value in said.items() if key != "model_type"}).to_dict()
    for raw in (said, whole):
        made = shrunk(raw)
        first, second = made.per_layer_config[0], made.per_layer_config[1]
        assert made.layer_types[:2] == ["indexed_attention", "sliding_attention"]
        assert (made.num_hidden_layers, made.routed_scaling_factor) == (4, 2.5)
        assert (first.num_attention_heads, second.num_attention_heads) == (4, 8)
        assert (first.kv_lora_rank, second.kv_lora_rank) == (16, 32)
