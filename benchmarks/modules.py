"""What does it cost to have a model computed by transformers' own modules, and what does it bring beside transformers?

    python -m benchmarks.modules                                     five shapes of about 1 B, modules beside generate
    python -m benchmarks.modules --shapes llama --sides modules,native --batches 1,8,32
    python -m benchmarks.modules --shapes llama --sides modules,native --weight-bits 4

A process per shape and side, sides in turns: each makes random weights in bfloat16 and takes one batch after the other,
random ids, full cache, everything in memory. `modules` and `native` are this engine's two ways, `transformers` is its
own `generate` with the attention that it chooses and its dynamic cache; where torch multiplies bfloat16 numbers one by
one (without AVX-512) it has float32 ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.records import LLAMA_1B, ROOT, arguments, in_process, provenance, run_all, shaped, spread, timed
from h2o_flexgen.baselines.store import Record
from h2o_flexgen.cli.prompts import random_prompts

MODULES, NATIVE, PEER = "modules", "native", "transformers"
LONG = {"vocab_size": 32000, "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "rope_theta": 10000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_1B,
    "gemma2": {
        **{**LONG, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 1536},
        **{"intermediate_size": 6144, "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 4},
        **{"head_dim": 256, "vocab_size": 256000, "sliding_window": 4096},
    },
    "olmo2": {
        **{**LONG, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 2048},
        **{"intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16, "vocab_size": 100352},
    },
    "deepseek_v2": {
        **{**LONG, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 1024},
        **{"intermediate_size": 4096, "moe_intermediate_size": 704, "num_hidden_layers": 14, "n_group": 1},
        **{"n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 2, "first_k_dense_replace": 1},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_group": 1},
    },
    "qwen3_5": {
        **{**LONG, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 1536},
        **{"intermediate_size": 4608, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    },
    "falcon_h1": {
        **{**LONG, "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "hidden_size": 2048},
        **{"intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 256},
    },
}
SCRATCH = ROOT / "results" / "local" / "models"


def run(point: Record) -> Record:
    return {"cells": (theirs if point["side"] == PEER else ours)(point)}


def _folder(point: Record) -> str:
    return shaped(SCRATCH / f"modules-{point['shape']}", SHAPES[point["shape"]])


def _prompts(point: Record, batch: int) -> list[list[int]]:
    return random_prompts(batch, point["prompt"], SHAPES[point["shape"]]["vocab_size"], 0)


def ours(point: Record) -> list[Record]:
    """Seconds of each batch."""
    from h2o_flexgen.engine.engine import Engine

    impl, cells = "native" if point["side"] == NATIVE else "transformers", []
    policy = {"gpu_batch_size": max(point["batches"]), "num_gpu_batches": 1, "weights": {"cpu": 1.0}}
    made = {"weights": "dummy", "dtype": "bfloat16", "weight_bits": point["weight_bits"], "model_impl": impl}
    with Engine(_folder(point), policy=policy, **made) as engine:
        for batch in point["batches"]:
            cells.append({"batch": batch, **timed(engine, _prompts(point, batch), point["new"])})
    return cells


def theirs(point: Record) -> list[Record]:
    """The same by `generate`."""
    import torch
    import transformers

    from h2o_flexgen.baselines.settings import usable_threads
    from h2o_flexgen.baselines.transformers import GenerationTimer, generate
    from h2o_flexgen.kernels.native.tiers import torch_widens

    torch.set_num_threads(usable_threads())
    config = transformers.AutoConfig.from_pretrained(_folder(point))
    torch.manual_seed(0)
    dtype = torch.float32 if torch_widens() else torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    cells = []
    for batch in point["batches"]:
        ids = torch.tensor(_prompts(point, batch))
        generate(model, ids[:, :8], 3, {})
        timer = GenerationTimer(ids.device)
        done = timer.outcome(generate(model, ids, point["new"] + 1, {}, timer), 0.0, {}, {})
        cells.append({"batch": batch, "prefill_s": done.prefill_s, "decode_s": done.decode_s})
    return cells


def table(records: list[Record]) -> Iterator[str]:
    """A row for each shape and batch: medians of the rates of each side, and the ratio of the first to the others."""
    sides = list(dict.fromkeys(record["side"] for record in records))
    runs: dict[tuple[str, int], dict[str, dict[int, dict[int, Record]]]] = {}
    for record in records:
        key = record["shape"], record["weight_bits"]
        found = runs.setdefault(key, {}).setdefault(record["side"], {})
        found[record["repetition"]] = {cell["batch"]: cell for cell in record["cells"]}
    names = [side if i == 0 else f"{side} | ratio" for i, side in enumerate(sides)]
    head = [f"{phase}, tokens/s: {' | '.join(names)}" for phase in ("prefill", "decode")]
    yield f"| shape | bits | batch | {' | '.join(head)} | n |"
    yield "|---|---:|---:|" + "---:|" * (2 * (2 * len(sides) - 1) + 1)
    sizes = records[0] if records else {}
    for (shape, bits), by_side in runs.items():
        first = by_side.get(sides[0], {})
        for batch in dict.fromkeys(batch for cells in first.values() for batch in cells):
            shown = []
            for phase, tokens in (("prefill_s", sizes["prompt"]), ("decode_s", sizes["new"])):
                for side in sides:
                    cells = by_side.get(side, {})
                    both = [n for n in first if n in cells and batch in cells[n]]
                    rates = [tokens * batch / cells[n][batch][phase] for n in both]
                    shown.append(f"{median(rates):.3g}" if rates else "")
                    if side != sides[0]:
                        ratios = [cells[n][batch][phase] / first[n][batch][phase] for n in both]
                        shown.append(spread(ratios, ".2f"))
            yield f"| {shape} | {bits} | {batch} | {' | '.join(shown)} | {len(first)} |"
    yield from ("", provenance(records))


def main() -> int:
    parser = arguments(__doc__, "modules", 3)
    parser.add_argument("--shapes", default="qwen3_5,gemma2,falcon_h1,deepseek_v2,olmo2", help=", ".join(SHAPES))
    parser.add_argument(
        "--sides", default=f"{MODULES},{PEER}", help=f"{MODULES}, {NATIVE}, {PEER}: the first over the others"
    )
    parser.add_argument("--batches", default="8", help="sequences, with commas between")
    parser.add_argument("--weight-bits", type=int, default=16, help="of the engine's weights")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="steps of decoding")
    args = parser.parse_args()
    sizes = {"prompt": args.prompt, "new": args.new, "weight_bits": args.weight_bits}
    sizes["batches"] = [int(number) for number in args.batches.split(",")]
    points = [
        {"shape": shape, "side": side, **sizes, "point": f"{shape}, {side}"}
        for shape in args.shapes.split(",")
        for side in args.sides.split(",")
    ]
    return run_all(args, points, lambda point: in_process("modules", point), "point", table, run)


if __name__ == "__main__":
    sys.exit(main())
