"""An OPT model as FlexGen wants it: its own configuration, and a checkpoint as one numpy file per tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from flexgen.opt_config import OptConfig

from h2o_flexgen.baselines.work import CannotRun, Work


def config_of(folder: str) -> Any:
    """FlexGen's own configuration of the model; CannotRun where it is none that FlexGen knows."""
    given = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    hidden, wide = given["hidden_size"], given.get("ffn_dim")
    if given.get("model_type") != "opt":
        raise CannotRun(f"FlexGen 0.1.8 runs OPT models only, and this is a {given.get('model_type')}")
    if not given.get("do_layer_norm_before", True) or wide != 4 * hidden:
        raise CannotRun("FlexGen 0.1.8 knows OPT with norms before its blocks and 4 x hidden size in between only")
    return OptConfig(
        name="model",
        num_hidden_layers=given["num_hidden_layers"],
        max_seq_len=given["max_position_embeddings"],
        hidden_size=hidden,
        n_head=given["num_attention_heads"],
        input_dim=hidden,
        ffn_embed_dim=wide,
        vocab_size=given["vocab_size"],
        pad_token_id=given["pad_token_id"],
    )


def converted(work: Work, config: Any) -> str:
    """The folder in which FlexGen finds the checkpoint as numpy files, made from it once."""
    target = Path(work.scratch) / "numpy" / f"{config.name}-np"
    if not (target / "done").exists():
        target.mkdir(parents=True, exist_ok=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(str(work.folder), dtype=torch.float32)
        for name, tensor in model.model.named_parameters():
            stored = name.replace("decoder.final_layer_norm", "decoder.layer_norm")
            with (target / stored).open("wb") as file:  # np.save with a name would add .npy
                np.save(file, tensor.detach().numpy())
        (target / "done").touch()
    return str(target.parent)
