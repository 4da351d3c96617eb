"""The cost of a job beside `run` on the same prompts and by actors of Ray, and whether its forecasts hold.

    python -m benchmarks.jobs memory --requests 50000 --output results/local/jobs.jsonl
    python -m benchmarks.jobs ray --requests 2000 --repetitions 1
    python -m benchmarks.jobs ranges --requests 400 --model SmolLM2-135M-Instruct.Q4_1.gguf

Programs run as processes of their own, on the demo model; a record a line.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

from benchmarks.records import ROOT, facts
from h2o_flexgen.baselines.process import run_command
from h2o_flexgen.baselines.store import RecordFile

AGE = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
SCHEMAS: tuple[dict[str, Any], ...] = ({"enum": ["yes", "no", "perhaps"]}, AGE)
FORMS = [{"type": "json_object"}, *({"type": "json_schema", "json_schema": {"schema": each}} for each in SCHEMAS)]
FLAGS = ["--hh-ratio", "0.2", "--quiet", "--json"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs", allow_abbrev=False)
    parser.add_argument("what", choices=("memory", "ray", "ranges"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--words", type=int, default=60, help="most words of a prompt")
    parser.add_argument("--gen-len", type=int, default=16)
    parser.add_argument("--gpu-batch-size", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append the record here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measures = {"memory": memory, "ray": actors, "ranges": ranges}
        found = measures[args.what](Path(folder), args)
    command = ["python", "-m", "benchmarks.jobs", *sys.argv[1:]]
    record = {"what": args.what, **facts(command), **found}
    print(json.dumps(record))
    if args.output is not None:
        RecordFile(args.output.parent, args.output.name).add(record)


def prompts(count: int, words: int) -> list[str]:
    """Stretches of the demo's held-out text, of 3 to `words` words."""
    source = random.Random(0)
    text = resources.files("h2o_flexgen").joinpath("data/demo/heldout.txt").read_text(encoding="utf-8").split()
    made = []
    for _ in range(count):
        length = source.randrange(3, words)
        start = source.randrange(len(text) - length)
        made.append(" ".join(text[start : start + length]))
    return made


def mixed(path: Path, count: int, words: int) -> None:
    """A batch file: greedy and drawn, seeds, stops, samples, schemas, scores, and one line in fifty at fault in some
    way."""
    source = random.Random(1)
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {}, {"seed": 7}, {"stop": ["the", "."]}, {"n": 2}]
    kinds.append({"logprobs": 2})
    kinds += [{"response_format": form} for form in FORMS]
    with path.open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(prompts(count, words)):
            body = {"model": "demo", "prompt": prompt, "max_tokens": source.choice([4, 16, 32]), **source.choice(kinds)}
            if number % 40 == 7:
                body = {"model": "demo", "prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
            name = "r0" if number % 200 == 199 else f"r{number}"
            line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
            text = json.dumps(line)
            if number % 200 == 99:
                text = text[: len(text) // 2]
            elif number % 200 == 149:
                text = json.dumps({**line, "body": {**body, "promt": "x"}})
            elif number % 200 == 49:
                text = json.dumps({**line, "body": {**body, "prompt": "word " * 2000}})
            file.write(text + "\n")


def plain(path: Path, count: int, words: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts(count, words):
            file.write(json.dumps({"prompt": prompt}) + "\n")


def program(name: str, *flags: object, model: str = "demo") -> list[str]:
    return [sys.executable, "-m", f"h2o_flexgen.{name}", "--model", model, *FLAGS, *map(str, flags)]


def memory(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Of `batch` and of `run` on the same prompts, in turn: seconds and CPU seconds of the process, and the most memory
    it had resident, in MiB. `ratio`: of CPU seconds, `run` by `batch`."""
    file = folder / "in.jsonl"
    plain(file, args.requests, args.words)
    flags = ("--gen-len", args.gen_len, "--gpu-batch-size", args.gpu_batch_size)
    runs: dict[str, list[dict[str, Any]]] = {"batch": [], "run": []}
    for number in range(args.repetitions):
        for name, given in (("batch", "-i"), ("run", "--prompts")):
            before, out = _cpu_seconds(), folder / f"{name}{number}.jsonl"
            done = run_command(program(name, given, file, "-o", out, *flags, model=args.model))
            summary, used = done.json(), round(_cpu_seconds() - before, 1)
            kept = {key: summary[key] for key in ("dtype", "generated_tokens", "gen_throughput")}
            seen = {"process_seconds": round(done.seconds, 1), "most_mib": done.peak_rss_bytes >> 20}
            runs[name].append({**seen, "cpu_seconds": used, **kept})
    cpu = {name: statistics.median(each["cpu_seconds"] for each in found) for name, found in runs.items()}
    work = {"requests": args.requests, "gen_len": args.gen_len, "gpu_batch_size": args.gpu_batch_size}
    return {**work, "input_bytes": file.stat().st_size, **runs, "ratio": round(cpu["run"] / cpu["batch"], 4)}


def _cpu_seconds() -> float:
    """Of the programs that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def actors(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One process, and one and two actors of Ray on this machine: seconds of the whole, and from the first result on;
    whether the texts are equal."""
    file, texts, found = folder / "in.jsonl", dict[str, list[str]](), dict[str, Any]()
    plain(file, args.requests, args.words)
    flags = ("-i", file, "--gen-len", args.gen_len, "--gpu-batch-size", args.gpu_batch_size, "--dtype", "float32")
    for number in range(args.repetitions):
        for name, more in (("process", ()), ("1 actor", ("--ray", 1)), ("2 actors", ("--ray", 2))):
            out = folder / f"{name}{number}.jsonl"
            started = time.perf_counter()
            process = subprocess.Popen(
                program("batch", *flags, *more, "-o", out, "--ordered"), stdout=subprocess.DEVNULL, cwd=ROOT
            )
            while process.poll() is None and not _lines(out):
                time.sleep(0.02)
            first, done = time.perf_counter(), _lines(out)
            if process.wait():
                raise RuntimeError(f"{name} ended with {process.returncode}")
            end = time.perf_counter()
            rate = round((args.requests - done) / (end - first), 1)
            found.setdefault(name, []).append(
                {"seconds": round(end - started, 1), "first_result": round(first - started, 1), "requests_per_s": rate}
            )
            texts[f"{name}{number}"] = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    equal = len(set(map(tuple, texts.values()))) == 1
    return {"requests": args.requests, "gen_len": args.gen_len, "runs": found, "texts_equal": equal}


def ranges(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Five files by `batch --sample 50`: the seconds that were expected first and at half-time beside those measured,
    how wide these ranges were, and whether they held."""
    lengths = {"short": (args.requests, 20), "long": (args.requests // 3, 400), "schemas": (args.requests // 2, 60)}
    lengths["reasoning"] = (args.requests // 3, 40)
    bodies: dict[str, list[dict[str, Any]]] = {
        "short": [{"max_tokens": 16}],
        "long": [{"max_tokens": 64}],
        "schemas": [{"max_tokens": 48, "response_format": form} for form in FORMS],
        "reasoning": [{"max_tokens": 96, "max_reasoning_tokens": most} for most in (16, 32, 48)],
    }
    models, found = {"reasoning": _thinker(folder, args.model)}, dict[str, Any]()
    for name in ("short", "long", "mixed", "schemas", "reasoning"):
        file = folder / f"{name}.jsonl"
        if name == "mixed":
            mixed(file, args.requests // 2, args.words)
        else:
            lines = [
                _asked(f"r{i}", prompt, bodies[name][i % len(bodies[name])], chat=name == "reasoning")
                for i, prompt in enumerate(prompts(*lengths[name]))
            ]
            file.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
        flags = ("-i", file, "-o", folder / f"{name}.out", "--sample", 50, "--served-model-name", "demo")
        command = program("batch", *flags, model=models.get(name, args.model))
        told = json.loads(run_command(command).last_line)
        found[name] = {"requests": told["requests"], "generated_tokens": told["generated_tokens"], **told["forecast"]}
        for when in ("first", "half"):
            low, _, high = (each := told["forecast"][when]).values()
            each |= {"width": round(high / low, 3), "held": low <= told["forecast"]["measured"] <= high}
    held = {when: sum(each[when]["held"] for each in found.values()) for when in ("first", "half")}
    return {"model": Path(args.model).name, **found, "held": held}


def _asked(name: str, prompt: str, fields: dict[str, Any], chat: bool) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    url = "/v1/chat/completions" if chat else "/v1/completions"
    return {"custom_id": name, "method": "POST", "url": url, "body": {**said, **fields}}


def _thinker(folder: Path, model: str) -> str:
    """A copy of a model whose chat template begins an answer with <think>: a .gguf file, or the demo."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "<|im_start|>assistant\n<think>"
    if model.endswith(".gguf"):
        copy = folder / "thinker.gguf"
        command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--chat-template", template, model]
        subprocess.run([*command, str(copy)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        return str(copy)
    copy = folder / "demo"
    shutil.copytree(str(resources.files("h2o_flexgen").joinpath("data/demo")), copy)
    path = copy / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ messages[0].content }}\n<think>"}))
    return str(copy)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


if __name__ == "__main__":
    main()
