"""Answers by 8 JSON schemas in one block: whether they are valid, and what they cost beside free text.

    python -m benchmarks.schemas --model gemma-3-270m-q4_k_m.gguf --requests 32 --output results/local/schemas.jsonl

Greedy, one engine, in turn: each row by its schema, then each row without one, for as many tokens as its answer by the
schema had.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import sys
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema

from benchmarks.records import facts, print_record
from h2o_flexgen import LLM, EvictionConfig, SamplingParams
from h2o_flexgen.errors import required

MODULES = "argparse bisect collections functools heapq json os pathlib random re shutil statistics string tempfile"
"""Of the standard library, for what is asked about their documentation."""
_TEXT, _SHARE = {"type": "string", "maxLength": 60}, {"type": "number", "minimum": 0, "maximum": 1}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


SCHEMAS: tuple[dict[str, Any], ...] = (
    _object(summary={"type": "string", "maxLength": 160}),
    _object(name=_TEXT, arguments={"type": "integer", "minimum": 0, "maximum": 12}, pure={"type": "boolean"}),
    {
        "type": "array",
        "items": {"enum": ["str", "int", "float", "list", "dict", "None"]},
        "minItems": 4,
        "maxItems": 12,
    },
    _object(level={"enum": ["beginner", "intermediate", "expert"]}, reason=_TEXT),
    _object(error=_object(kind={"type": "string", "pattern": "^[A-Z][a-z]{2,12}Error$"}, message=_TEXT), likely=_SHARE),
    {"anyOf": [_object(answer=_TEXT), _object(unknown={"const": True}, missing=_TEXT)]},
    _object(version={"type": "string", "pattern": "^3\\.[0-9]{1,2}$"}, since={"type": "integer", "minimum": 1990}),
    _object(steps={"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 4}),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schemas", allow_abbrev=False)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--gen-len", type=int, default=160)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append the record here")
    args = parser.parse_args()
    print_record({**facts(["python", "-m", "benchmarks.schemas", *sys.argv[1:]]), **measured(args)}, args.output)


def questions(count: int) -> list[str]:
    """Questions about functions and classes of Python's library, with what is documented: 20 to some 1,000 tokens."""
    members = [each for name in MODULES.split() for each in inspect.getmembers(import_module(name), callable)]
    told = {name: (inspect.getdoc(thing) or "")[:4000] for name, thing in members if not name.startswith("_")}
    texts = [f"{text}\n\nWhat is {name} for?" for name, text in told.items() if len(text) > 40]
    return random.Random(0).sample(texts, count)


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Rows that ended and how many of these are valid; seconds of prefill and decode, by schema and as free text."""
    prompts = [f"{text}\n\nThe answer as JSON:\n" for text in questions(args.requests)]
    forms = [{"type": "json_schema", "json_schema": {"schema": SCHEMAS[i % len(SCHEMAS)]}} for i in range(len(prompts))]
    params = [SamplingParams(max_new_tokens=args.gen_len, response_format=form) for form in forms]
    seconds: dict[str, list[float]] = {"schemas": [], "free": []}
    shape = {"gpu_batch_size": args.requests, "num_gpu_batches": 1}
    with LLM(args.model, eviction=EvictionConfig("h2o", ratio=0.2), policy=shape) as llm:

        def timed(name: str, each: list[SamplingParams]) -> list[Any]:
            outputs = llm.generate(prompts, each)
            record = required(llm.last_record, "a run has just ended")
            seconds[name].append(round(record.prefill_s + record.decode_s, 3))
            return outputs

        answers = timed("schemas", params)
        free = [SamplingParams(max_new_tokens=len(answer.token_ids), ignore_eos=True) for answer in answers]
        timed("free", free)
        seconds = {name: [] for name in seconds}  # what came first compiled schemas and touched memory
        for _ in range(args.repetitions):
            timed("schemas", params)
            timed("free", free)
    ended = [i for i, answer in enumerate(answers) if answer.finish_reason == "stop"]
    valid = sum(_valid(answers[i].text, SCHEMAS[i % len(SCHEMAS)]) for i in ended)
    work = {"model": Path(args.model).name, "requests": args.requests, "schemas": len(SCHEMAS)}
    tokens = sum(len(answer.token_ids) for answer in answers)
    ratio = median(seconds["schemas"]) / median(seconds["free"])
    return {**work, "ended": len(ended), "valid": valid, "tokens": tokens, "seconds": seconds, "ratio": round(ratio, 4)}


def _valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    main()
