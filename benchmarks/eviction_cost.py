"""How fast does each eviction policy decode beside H2O, with the same budget?

    python -m benchmarks.eviction_cost --batches 8,32

One process; OPT-125M's shape, random weights, a budget of 109 tokens: 20 % of 512 + 32. Prompts are short, as a step
costs what is held and not what was read. Policies take turns, so that what else the machine does meets all of them; the
first round, which compiles and warms up, does not count. A policy that prunes the prompt only does its work before.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.records import default_output, facts

REFERENCE = "h2o"


def measure(args: Any, batch: int, policies: list[str]) -> dict[str, list[float]]:
    """Decoded tokens per second of each policy, one per round."""
    from h2o_flexgen import LLM, EvictionConfig, SamplingParams

    prompts = [[7 + (13 * row + 5 * place) % 1000 for place in range(args.prompt_len)] for row in range(batch)]
    found: dict[str, list[float]] = {name: [] for name in policies}
    policy = {"gpu_batch_size": batch, "num_gpu_batches": 1}
    for turn in range(args.rounds + 1):
        for name in policies:
            eviction = EvictionConfig(name, budget=None if name == "full" else args.budget)
            with LLM(args.model, weights="dummy", eviction=eviction, policy=policy) as llm:
                llm.generate(prompts, SamplingParams(max_new_tokens=args.gen_len, ignore_eos=True))
                if turn and llm.last_record is not None:
                    found[name].append(llm.last_record.decode_throughput)
    return found


def table(records: list[dict[str, Any]]) -> str:
    """A row per policy: its rate, and H2O's step by its own, for every batch."""
    batches = sorted({record["batch"] for record in records})
    rates = {(record["policy"], record["batch"]): median(record["rates"]) for record in records}
    lines = [f"| policy | {' | '.join(f'batch {batch}, tokens/s | beside h2o' for batch in batches)} |"]
    lines.append("|---|" + "---:|---:|" * len(batches))
    for name in dict.fromkeys(record["policy"] for record in records):
        cells = [
            f"{rates[name, batch]:.0f} | {rates[name, batch] / rates[REFERENCE, batch]:.2f}"
            for batch in batches
            if (name, batch) in rates
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measures, adds records to the folder and writes the table of these."""
    from h2o_flexgen.config.splits import SPLITS

    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--policies", default=",".join(SPLITS.names()))
    parser.add_argument("--batches", default="8,32")
    for name, default in (("budget", 109), ("prompt-len", 160), ("gen-len", 128), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, default=default_output("eviction-lab"))
    args = parser.parse_args()
    policies = list(dict.fromkeys([REFERENCE, *args.policies.split(",")]))
    records = []
    for batch in map(int, args.batches.split(",")):
        for name, rates in measure(args, batch, policies).items():
            records.append({"policy": name, "batch": batch, "rates": rates, **facts([sys.executable, *sys.argv])})
    args.output.mkdir(parents=True, exist_ok=True)
    with (args.output / "cost.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    print(table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
