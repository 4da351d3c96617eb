"""What do fewer bits cost? Perplexity and greedy tokens beside those of 16 bits, by the bits of weights and caches.

    python -m benchmarks.bits                           the demo: 24 windows of 384 + 128 tokens of its held-out text
    python -m benchmarks.bits --models demo,FILE.gguf   and another model, on that text as well

A process per model, cache (full, H2O at 20 %) and bits. Of a checkpoint that is packed, "16" is its weights
dequantised, and "as stored" what it is without that. Agreement: of 32 greedy tokens after each context, the share
before the first that differs from those of 16 bits. bfloat16 where the processor has it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.records import arguments, in_process, provenance, run_all
from h2o_flexgen.baselines.store import Record

CACHES: dict[str, dict[str, Any]] = {"full": {"name": "full"}, "H2O 20 %": {"name": "h2o", "ratio": 0.2}}
BITS: dict[str, dict[str, Any]] = {
    "16": {},
    "W8": {"weight_bits": 8},
    "W4": {"weight_bits": 4},
    "W4, groups of 32": {"weight_bits": 4, "weight_group": 32},
    "W4, all inputs alike": {"weight_bits": 4, "weight_importance": False},
    "KV8": {"cache_bits": 8},
    "K8 V4": {"cache_bits": (8, 4)},
    "KV4": {"cache_bits": 4},
    "W4 + KV4": {"weight_bits": 4, "cache_bits": 4},
}
STORED = "as stored"
NEW = 32


def run(point: Record) -> int:
    """Of one point, in this process; the record goes to stdout."""
    from h2o_flexgen.config.eviction import EvictionConfig
    from h2o_flexgen.config.sampling import SamplingParams
    from h2o_flexgen.evaluation.quality import cut_windows, evicting, likelihood
    from h2o_flexgen.evaluation.settings import EvaluationSettings, read_text

    settings = EvaluationSettings(context=point["context"], continuation=point["continuation"], limit=point["windows"])
    engine = {} if point["bits"] == STORED else {"dequantize": True, **BITS[point["bits"]]}
    model = str(Path(point["model"]).expanduser()) if point["model"].startswith("~") else point["model"]
    with evicting(model, engine, EvictionConfig(**CACHES[point["cache"]])) as llm:
        windows = cut_windows(llm, read_text(point["text"]), settings)
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        answers = llm.generate([context for context, _ in windows.pairs], params)
        scored = likelihood(llm, windows.pairs)
    tokens = [answer.token_ids for answer in answers]
    print(json.dumps({"nll": scored.nll, "scored_tokens": scored.tokens, "tokens": tokens}))
    return 0


def agreement(tokens: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> float:
    """The share of tokens that come before the first one that is not as wanted."""

    def same(row: Sequence[int], its: Sequence[int]) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(row, its, strict=True)))

    return mean(same(row, its) / len(its) for row, its in zip(tokens, wanted, strict=True))


def table(records: list[Record]) -> Iterator[str]:
    """Perplexity, what it is more than that of 16 bits, and agreement; a column per model and cache."""
    cells = {(record["model_name"], record["cache"], record["bits"]): record for record in records}
    columns = list(dict.fromkeys((model, cache) for model, cache, _ in cells))
    yield f"| bits | {' | '.join(f'{model}, {cache}' for model, cache in columns)} |"
    yield "|---|" + "---:|" * len(columns)
    for bits in (*BITS, STORED):
        found = [cells.get((*column, bits)) for column in columns]
        if any(found):
            exact = [cells.get((*column, "16")) for column in columns]
            shown = (_cell(*pair) for pair in zip(found, exact, strict=True))
            yield f"| {bits} | {' | '.join(shown)} |"
    yield from ("", provenance(records).replace("random weights in ", "") if records else "")


def _cell(record: Record | None, exact: Record | None) -> str:
    if record is None:
        return ""
    perplexity = f"{math.exp(record['nll']):.2f}"
    if exact is None or record is exact:
        return perplexity
    more = math.exp(record["nll"] - exact["nll"]) - 1
    return f"{perplexity} ({more:+.1%}), {agreement(record['tokens'], exact['tokens']):.0%}"


def main() -> int:
    """Measures what is missing in the output folder, then writes the table of all that is there."""
    parser = arguments(__doc__, "bits", 1, "processes per point", takes_points=True)
    parser.add_argument("--models", default="demo", help="with commas between")
    parser.add_argument("--bits", default=";".join(BITS), help="which, with semicolons between")
    parser.add_argument("--text", help="held-out text (default: the demo's)")
    for name, default in (("context", 384), ("continuation", 128), ("windows", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.run:
        return run(args.run)
    points = []
    for model in args.models.split(","):
        kinds = [*args.bits.split(";"), *([STORED] if model.endswith(".gguf") else [])]
        for cache in CACHES:
            for bits in kinds:
                name = model.rsplit("/", 1)[-1].removesuffix(".gguf")
                sizes = {"context": args.context, "continuation": args.continuation, "windows": args.windows}
                point = {"model": model, "model_name": name, "cache": cache, "bits": bits, "text": args.text, **sizes}
                points.append({**point, "point": f"{name}, {cache}, {bits}"})
    return run_all(args, points, partial(in_process, "bits"), "point", table)


if __name__ == "__main__":
    sys.exit(main())
