"""What a job costs beside `run` on the same prompts, what a kill costs it, and how its memory grows with its file.

    python -m benchmarks.jobs memory --requests 50000 --output results/local/jobs.jsonl
    python -m benchmarks.jobs kills --requests 2000 --kills 20
    python -m benchmarks.jobs ray --requests 2000 --repetitions 1
    python -m benchmarks.jobs serve --requests 2000
    python -m benchmarks.jobs ranges --requests 400 --model SmolLM2-135M-Instruct.Q4_1.gguf

Programs run as processes of their own, on the demo model; a record a line.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import psutil

from benchmarks.records import ROOT, facts, print_record

FORMS: list[dict[str, Any]] = [
    {"type": "json_object"},
    *(
        {"type": "json_schema", "json_schema": {"schema": schema}}
        for schema in (
            {"enum": ["yes", "no", "perhaps"]},
            {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]},
        )
    ),
]
COUNTED = "import sys; from benchmarks.jobs import counted; sys.exit(counted(sys.argv[1], sys.argv[2:]))"
FLAGS = ["--hh-ratio", "0.2", "--quiet", "--json"]
MODULES = (
    "argparse array ast asyncio base64 bisect calendar cmath codecs collections configparser contextlib copy csv "
    "datetime decimal difflib dis email.message enum fractions functools gzip hashlib heapq html http.client "
    "http.cookies imaplib inspect io ipaddress itertools json locale logging lzma mailbox math mimetypes numbers "
    "operator os pathlib pickle platform plistlib pprint queue random re sched secrets selectors shelve shlex "
    "shutil signal smtplib socket sqlite3 ssl statistics string struct subprocess tarfile tempfile textwrap "
    "threading timeit tokenize traceback types typing unicodedata unittest.mock urllib.parse urllib.request uuid "
    "wave weakref xml.dom.minidom zipfile zoneinfo"
)
"""Of the standard library, for what is asked about their documentation."""
QUESTIONS = (
    "{0}\n\nIn one sentence, what is this for?",
    "Here is the documentation of {1}:\n\n{0}\n\nList what can go wrong when it is called.",
    "Explain to a beginner when to use {1}. Its documentation says:\n\n{0}\n\nExplanation:",
    "Documentation: {0}\n\nWrite a short example with {1} in Python:\n\n```python\n",
    "Translate into French: {0}\n\nFrench:",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs", allow_abbrev=False)
    parser.add_argument("what", choices=("memory", "kills", "ray", "serve", "ranges"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--words", type=int, default=60, help="most words of a prompt; 0: questions about Python's library"
    )
    parser.add_argument("--gen-len", type=int, default=16)
    parser.add_argument("--gpu-batch-size", type=int, default=32)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append the record here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measures = {"memory": memory, "kills": kills, "ray": actors, "serve": served, "ranges": ranges}
        found = measures[args.what](Path(folder), args)
    command = ["python", "-m", "benchmarks.jobs", *sys.argv[1:]]
    print_record({"what": args.what, **facts(command), **found}, args.output)


def prompts(count: int, words: int, seed: int = 0) -> list[str]:
    """Stretches of the demo's held-out text, of 3 to `words` words; for 0 what people might ask."""
    if words == 0:
        return questions(count, seed)
    source = random.Random(seed)
    text = resources.files("h2o_flexgen").joinpath("data/demo/heldout.txt").read_text(encoding="utf-8").split()
    made = []
    for _ in range(count):
        length = source.randrange(3, words)
        start = source.randrange(len(text) - length)
        made.append(" ".join(text[start : start + length]))
    return made


def questions(count: int, seed: int = 0) -> list[str]:
    """Questions about functions, methods and classes of Python's library, with what is documented: 20 to some 1,000
    tokens."""
    documented = dict[str, str]()
    for module in map(importlib.import_module, MODULES.split()):
        for name, thing in sorted(inspect.getmembers(module, callable)):
            if not name.startswith("_") and (getattr(thing, "__module__", None) or "").startswith(module.__name__):
                within = inspect.getmembers(thing, callable) if inspect.isclass(thing) else []
                for where, each in ((name, thing), *((f"{name}.{inner}", each) for inner, each in within)):
                    if not where.rpartition(".")[2].startswith("_"):
                        documented[f"{module.__name__}.{where}"] = (inspect.getdoc(each) or "")[:4000]
    texts, asked = dict[str, None](), random.Random(seed)
    for name, text in documented.items():
        if len(text) > 40:
            texts[asked.choice(QUESTIONS).format(text, name)] = None
    return asked.sample(list(texts), count)


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
    """Of `batch` and of `run` on the same prompts, in turn: seconds and CPU seconds of the process, and resident memory
    in MiB, after each tenth of the requests and the most ever. `ratio`: of CPU seconds, `run` by `batch`."""
    file = folder / "in.jsonl"
    plain(file, args.requests, args.words)
    flags = ("--gen-len", args.gen_len, "--gpu-batch-size", args.gpu_batch_size)
    runs: dict[str, list[dict[str, Any]]] = {"batch": [], "run": []}
    for number in range(args.repetitions):
        for name, given in (("batch", "-i"), ("run", "--prompts")):
            out = folder / f"{name}{number}.jsonl"
            command = program(name, given, file, "-o", out, *flags, model=args.model)
            runs[name].append(_watched(command, out, args.requests))
    cpu = {name: statistics.median(each["cpu_seconds"] for each in found) for name, found in runs.items()}
    work = {"requests": args.requests, "gen_len": args.gen_len, "gpu_batch_size": args.gpu_batch_size}
    return {**work, "input_bytes": file.stat().st_size, **runs, "ratio": round(cpu["run"] / cpu["batch"], 4)}


def _watched(command: list[str], out: Path, requests: int) -> dict[str, Any]:
    started, tenths, most, done, counted = time.perf_counter(), dict[int, int](), 0, 0, 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        time.sleep(0.2)
        with suppress(psutil.Error):  # it may have ended
            now = watched.memory_info().rss >> 20
            most = max(most, now)
            if out.exists():
                with out.open("rb") as results:
                    results.seek(counted)
                    data = results.read()
                counted, done = counted + len(data), done + data.count(b"\n")
                tenths.setdefault(10 * done // requests, now)
    seconds = round(time.perf_counter() - started, 1)
    stdout, _ = process.communicate()
    after, summary = resource.getrusage(resource.RUSAGE_CHILDREN), json.loads(stdout.splitlines()[-1])
    cpu = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)
    kept = {name: summary[name] for name in ("dtype", "generated_tokens", "gen_throughput")}
    return {"process_seconds": seconds, "cpu_seconds": cpu, **kept, "rss_mib_by_tenth": tenths, "most_mib": most}


def counted(tally: str, argv: list[str]) -> int:
    """`batch`, that keeps in the file `tally` how many tokens it has computed: of prompts, and new ones."""
    from h2o_flexgen.batch import main
    from h2o_flexgen.cli.batch import job
    from h2o_flexgen.cli.progress import GENERATING, PREFILL

    fd = os.open(tally, os.O_WRONLY | os.O_CREAT)

    class Counting(job.JobProgress):
        """Its first call is for the whole of a job that is one window."""

        done: ClassVar = {PREFILL: 0, GENERATING: 0}

        def __call__(self, what: str, done: int, total: int) -> None:
            super().__call__(what, done, total)
            if what in self.done:
                self.done[what] = done
                os.pwrite(fd, struct.pack("=2q", *self.done.values()), 0)

    job.JobProgress = Counting  # type: ignore[misc]
    return main(argv)


def kills(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A mixed job in float32, uninterrupted and killed at random moments: whether the results are equal, how many
    requests were under way at a kill, and which share of the work was done again."""
    file, whole, out = folder / "in.jsonl", folder / "whole.jsonl", folder / "out.jsonl"
    mixed(file, args.requests, args.words)
    flags = ("-i", file, "--dtype", "float32")

    def command(tally: object, *more: object) -> list[str]:
        return [sys.executable, "-c", COUNTED, str(folder / f"{tally}.tally"), *program("batch", *flags, *more)[3:]]

    def tokens(tally: object) -> int:
        path = folder / f"{tally}.tally"
        data = path.read_bytes() if path.exists() else b""
        return sum(struct.unpack("=2q", data)) if data else 0

    started = time.perf_counter()
    done = subprocess.run(command("whole", "-o", whole), stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    uninterrupted = time.perf_counter() - started
    source, lines, kept, changed, hit = random.Random(2), _lines(whole), b"", 0, 0
    for number in range(args.kills):
        goal = _lines(out) + source.randrange(1, max(2, 4 * lines // (3 * args.kills)))
        process = subprocess.Popen(command(number, "-o", out), stdout=subprocess.DEVNULL, cwd=ROOT)
        while process.poll() is None and _lines(out) < goal:
            time.sleep(0.01 * source.random())
        process.send_signal(signal.SIGKILL)
        hit += process.wait() == -signal.SIGKILL
        now = out.read_bytes()
        changed += not now.startswith(kept)
        kept = now[: now.rfind(b"\n") + 1]
    before = _lines(out)
    last = subprocess.run(command("last", "-o", out), stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    work, all_work = tokens("whole"), sum(tokens(tally) for tally in (*range(args.kills), "last"))
    first, second = _results(whole), _results(out)
    differing = [name for name in first if first[name] != second.get(name)]
    return {
        "requests": args.requests,
        "kills": hit,
        "uninterrupted_s": round(uninterrupted, 1),
        "lines": [lines, _lines(out)],
        "before_last_run": before,
        "exit_codes": [done.returncode, last.returncode],
        "finished_lines_changed": changed,
        "missing_or_doubled": len(first.keys() ^ second.keys()) + abs(lines - _lines(out)),
        "texts_differing": len(differing),
        "tokens": work,
        "repeated_tokens_per_kill": round((all_work - work) / max(1, hit) / work, 4),
        "at_once": json.loads(done.stdout.splitlines()[-1])["policy"]["gpu_batch_size"],
    }


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


def served(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The same mixed file by `batch` and by `serve`, in turn, whole processes from their start to the last answer, the
    second with what its client does. `ratio`: of the medians, `batch` by `serve`."""
    file, seconds = folder / "in.jsonl", dict[str, list[float]](batch=[], serve=[])
    mixed(file, args.requests, args.words)
    equal = True
    for number in range(args.repetitions):
        out = folder / f"batch{number}.jsonl"
        started = time.perf_counter()
        flags = ("-i", file, "-o", out, "--error-file", folder / f"errors{number}.jsonl", "--dtype", "float32")
        command = program("batch", *flags, model=args.model)
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        seconds["batch"].append(round(time.perf_counter() - started, 3))
        started = time.perf_counter()
        answers = _by_service(folder / f"data{number}", file, args.model)
        seconds["serve"].append(round(time.perf_counter() - started, 3))
        found = [json.loads(line) for line in answers.splitlines()]
        wanted = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        equal = equal and _texts(found) == _texts(wanted)
    ratio = statistics.median(seconds["batch"]) / statistics.median(seconds["serve"])
    return {"requests": args.requests, "seconds": seconds, "ratio": round(ratio, 4), "texts_equal": equal}


def _by_service(data: Path, file: Path, model: str) -> str:
    """The answers to a file, by a service of its own and the `openai` package."""
    import openai

    with (data.with_suffix(".log")).open("w+") as log:
        flags = [flag for flag in program("serve", "--port", 0, "--data-dir", data, model=model) if flag != "--json"]
        process = subprocess.Popen([*flags, "--dtype", "float32"], stderr=log)
        try:
            while not (listening := re.search(r"on (http://\S+),", (data.with_suffix(".log")).read_text())):
                if process.poll() is not None:
                    raise RuntimeError(f"the service ended with {process.returncode}")
                time.sleep(0.02)
            client = openai.OpenAI(base_url=f"{listening[1]}/v1", api_key="none")
            with file.open("rb") as content:
                uploaded = client.files.create(file=content, purpose="batch")
            made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")
            while (batch := client.batches.retrieve(made.id)).status in ("validating", "in_progress", "finalizing"):
                time.sleep(0.2)
            return client.files.content(batch.output_file_id or "").text
        finally:
            process.terminate()
            process.wait()


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
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        told = json.loads(done.stdout.splitlines()[-1])
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


def _texts(lines: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {each["custom_id"]: [c["text"] for c in each["response"]["body"]["choices"]] for each in lines}


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _results(path: Path) -> dict[str, Any]:
    """By their ids, without the time, and without log-probabilities, which rounding may change."""
    found = {}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        result = json.loads(line)
        body = result["response"]["body"]
        body.pop("created", None)
        for choice in body.get("choices", ()):
            choice.pop("logprobs")
        found[result["id"]] = result
    return found


if __name__ == "__main__":
    main()
