"""Every flag of `run` for a model of transformers' modules: it works as for the family of its own, or is refused by
name; and the other programs with a type that only the modules have."""

from __future__ import annotations

import json
import re
import signal
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OlmoConfig, OlmoForCausalLM

from h2o_flexgen.batch import main as batch
from h2o_flexgen.cli.arguments import _run_parser
from h2o_flexgen.models.hf.shrink import random_model, shrunk
from h2o_flexgen.search import main as search
from tests.jobs.files import request, results, timeless, write
from tests.programs import CONFIG, TEMPLATE, Child, Run, tokenizer, until, write_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 2,
    "intermediate_size": 56,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a family of its own."""
    folder = write_model(tmp_path_factory.mktemp("llama") / "model", **LLAMA)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def olmo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One without."""
    folder = tmp_path_factory.mktemp("olmo") / "model"
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    torch.manual_seed(0)
    model = OlmoForCausalLM(OlmoConfig(**{key: CONFIG[key] for key in kept}, intermediate_size=56, eos_token_id=2))
    for parameter in model.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


WORKS = (
    "--hh-ratio 0.5 --eviction h2o --recent 3 --sinks 1 --recall cpu --recall-every 2",
    "--kv-budget 20 --recent-ratio 0.1 --budget-split far --far-layers 0 --eviction h2o --no-overlap --lookahead 2",
    "--keep-prompt --kv-budget 30 --eviction h2o --no-share-prefixes --check-finite --verify always --seed 3",
    "--spans whitelist --hh-ratio 0.5 --eviction h2o --cache-bits 8 --trace {out}.trace --report {out}.html",
    "--cache-bits 4 --cache-rotation none --prefill-chunk 16 --gpu-batch-size 1 --num-gpu-batches 2",
    "--kv-bytes 0.6 --eviction h2o --cache-bits 8 --cache-newest 2",
    "--record-scores {out}.scores --hh-ratio 0.5 --eviction h2o --log-file {out}.log --quiet",
    "--weights-placement cpu=0.5,disk=0.5 --cache-placement disk=1 --hidden-placement cpu=1 --offload-dir {out}.dir",
    "--percent 0 50 0 100 0 100 --compress-weight --compress-cache --weight-group 32 --no-weight-importance",
    "--weight-bits 8 --cpu-mem 64 --nvme-mem 4 --prefix-mem 0.1 --prefix-dir {out}.kept --prefix-disk 1 --dequantize",
    "--emulate-gpu 1 --gpu-mem 1 --cache-placement cpu=1 --no-cpu-cache-compute --num-gpus 1 --device cpu",
    "--allow-compress --no-calibrate --no-log --no-json",
    "--do-sample --temperature 1.2 --top-k 9 --top-p 0.9 --min-p 0.01 --num-return-sequences 2 --logprobs 2",
    "--repetition-penalty 1.3 --no-repeat-ngram-size 3 --min-new-tokens 4 --ignore-eos --stop q --on-error skip",
    "--chat --system be --json-schema {schema} --gen-len 30 --overwrite --no-log",
    "--heavy-ratio 0.2 --recent-ratio 0.2 --hh-all --sep-layer --pin-weight --attn-sparsity 1.0 --no-mmap",
    "--compression-ratio 0.5 --eviction h2o --trust-remote-code --verbose --policy auto --offline",
)
"""Together they have every flag but those of ELSEWHERE and REFUSED."""
REFUSED = {
    "--rolling-positions --eviction h2o --hh-ratio 0.5": "whose keys are rotated by transformers' own modules",
    "--eviction expected_attention --hh-ratio 0.5": "does not look at queries before they are rotated",
    "--hidden-placement disk=1": "needed all on cpu",
    "--num-gpus 2": "--num-gpus is 2",
    "--emulate-gpu 1 --cpu-cache-compute": "--cpu-cache-compute is given",
}
ELSEWHERE = {
    *("--help", "--model", "--prompt", "--dtype", "--model-impl", "--output", "--json", "--max-new-tokens"),
    *("--prompts", "--prompt-len", "--num-prompts", "--weights", "--dummy-weights", "--path", "--revision"),
    *("--hardware", "--calibrate"),
}
"""In every command below, in a test of its own, or of how a model is found and machines are measured before it is known
what computes it."""


def words(lines: Any) -> set[str]:
    return set(re.findall(r"--[a-z][\w-]*", " ".join(lines)))


def test_every_flag_is_tried() -> None:
    known = words(WORKS) | words(REFUSED) | ELSEWHERE
    for action in _run_parser()._actions:
        told = action.option_strings and action.help is not SUPPRESS  # the others are refused whatever the model
        assert not told or known & set(action.option_strings), action.option_strings


@pytest.mark.turns
@pytest.mark.parametrize("line", WORKS)
def test_a_flag_works_as_for_a_family(line: str, talker: Path, run: Run, tmp_path: Path) -> None:
    answers, records = [], []
    (tmp_path / "schema").write_text(json.dumps(SCHEMA))
    for impl in ("native", "transformers"):
        out = tmp_path / impl
        given = line.format(out=out, schema=tmp_path / "schema").split()
        new = [] if "--gen-len" in line else ["--max-new-tokens", 9]
        prompts = ["--prompt", "the cat sat on a mat", "--prompt", "the cat sat on the log, a", "--prompt", "one"]
        ran = run(
            *("--model", talker, "--model-impl", impl, "--dtype", "float32", *prompts, *new, "-o", out, "--json"),
            *given,
        )
        assert ran.code == 0, ran.err
        answers.append(out.read_text())
        if "--no-json" not in line:
            records.append(ran.record)
    assert answers[0]
    assert _rounded(answers[0]) == _rounded(answers[1])
    if records:
        for key in ("eviction", "kv_bytes", "quantization", "prompt_tokens", "generated_tokens"):
            assert records[0][key] == records[1][key]


def _rounded(text: str) -> list[Any]:
    """JSON lines with fewer digits."""
    return [json.loads(line, parse_float=lambda number: round(float(number), 2)) for line in text.splitlines()]


@pytest.mark.parametrize("line", REFUSED)
def test_a_flag_is_refused_by_name(line: str, talker: Path, run: Run) -> None:
    ran = run("--model", talker, "--model-impl", "transformers", "--prompt", "a", *line.split())
    assert ran.code == 2
    assert REFUSED[line] in ran.err


def test_random_weights_of_a_shape(olmo: Path, run: Run) -> None:
    ran = run("--model", olmo, "--weights", "dummy", "--prompt-len", 12, "--num-prompts", 3, "-n", 4)
    assert ran.code == 0, ran.err
    assert ran.record["generated_tokens"] == 12


def test_a_plan_that_search_made_is_run(
    olmo: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """search knows the type by itself, what it plans can be run, and it refuses what run refuses."""
    policy = tmp_path / "policy.json"
    work = ["--prompt-len", "24", "--gen-len", "6", "--eviction", "h2o", "--hh-ratio", "0.5"]
    asked = ["--model", str(olmo), "--hardware", "h200", "--device", "cpu", "--num-prompts", "5", *work]
    assert search([*asked, "-o", str(policy), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert planned["policy"]["hidden"] == {"cpu": 1.0}
    ran = run("--model", olmo, "--policy", policy, "--num-prompts", 5, "--dtype", "float32", *work)
    assert ran.code == 0, ran.err
    assert ran.record["policy"]["gpu_batch_size"] == planned["policy"]["gpu_batch_size"]
    for line in ("--hidden-placement disk=1", "--eviction expected_attention --sinks 1", "--rolling-positions"):
        assert search([*asked, *line.split()]) == 2, line


@pytest.mark.parametrize(
    "kind", ["olmo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5_text", "falcon_h1"))]
)
def test_a_job_that_is_killed_goes_on(kind: str, olmo: Path, tmp_path: Path) -> None:
    """By types that only the modules have, some with states: nothing is lost, and answers are those of one run."""
    folder = olmo if kind == "olmo" else tmp_path / "model"
    if kind != "olmo":
        random_model(shrunk({"model_type": kind})).save_pretrained(folder)
        tokenizer().save(str(folder / "tokenizer.json"))
    body = [{"prompt": "abc defg."[i % 7 :] * (1 + i % 3), "max_tokens": 2 + i % 9} for i in range(24)]
    body = [{**each, "temperature": 0} if i % 2 else {**each, "seed": 3} for i, each in enumerate(body)]
    file = write(tmp_path / "in.jsonl", *(request(f"r{i}", each) for i, each in enumerate(body)))
    flags = ("-i", file, "--model", folder, "--hh-ratio", 0.5, "--gpu-batch-size", 2, "--dtype", "float32", "--no-json")

    def ended(out: Path, kill: bool = False) -> int:
        with Child(tmp_path, *flags, "-o", out, program=batch) as child:
            if kill:
                until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 5, 60)
                child.kill(signal.SIGKILL)
            return child.wait(120).code

    assert ended(tmp_path / "whole.jsonl") == 0
    assert ended(tmp_path / "out.jsonl", kill=True) == 128 + signal.SIGKILL
    done = (tmp_path / "out.jsonl").read_bytes().count(b"\n")
    assert 5 <= done < 24
    assert ended(tmp_path / "out.jsonl") == 0
    whole, resumed = (timeless(results(tmp_path / f"{name}.jsonl", "id")) for name in ("whole", "out"))
    assert resumed == whole
