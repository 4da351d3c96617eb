"""`python -m h2o_flexgen.search`: flags in, a policy for `run` out, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from h2o_flexgen.cli.arguments import parse_arguments
from h2o_flexgen.cli.search_arguments import SearchArguments, parse_search
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.explain import cache_row
from h2o_flexgen.engine.requests.reader import RequestReader, workload_of
from h2o_flexgen.errors import ModelError, UsageError
from h2o_flexgen.search import _cache_table, main
from h2o_flexgen.units import GIB
from tests.checkpoint.formats import FORMATS
from tests.checkpoint.quantised import checkpoint
from tests.cost.solvers import OTHER

ROOT = Path(__file__).parents[2]
SMALL = "--model opt-125m --hardware t4-16gb --num-prompts 16 --prompt-len 64 --gen-len 8"


def parse(*arguments: str, **environ: str) -> SearchArguments:
    return parse_search(arguments, {f"H2O_FLEXGEN_{name}": value for name, value in environ.items()})


def entry(out: str) -> dict[str, Any]:
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_the_command_line_of_the_readme() -> None:
    line = "--model opt-30b --gpu-mem 16 --cpu-mem 200 --nvme-mem 1500 --prompt-len 512 --gen-len 32 --hh-ratio 0.2"
    request = parse(*line.split(), "--hardware", "t4").request
    assert (request.spec.name, request.profile.name, request.compute_tier) == ("opt-30b", "t4-16gb", "gpu")
    assert request.capped == {"gpu": 16 * GIB, "cpu": 200 * GIB, "disk": 1500 * GIB}
    assert (request.eviction.name, request.eviction.ratio) == ("h2o", 0.2)
    assert (request.workload.prompt_len, request.workload.gen_len, request.endless) == (512, 32, True)
    assert (request.dtype, request.fixed) == ("float16", {})


def test_what_is_left_out() -> None:
    """Caps are nine tenths of what the machine has, lengths are FlexGen's."""
    request = parse("--model", "opt-125m", "--hardware", "h200").request
    assert request.caps.gpu == int(0.9 * request.profile.memory["gpu"])
    assert request.dtype == "bfloat16"
    assert (request.workload.prompt_len, request.workload.gen_len) == (512, 32)
    cpu = parse("--model", "opt-125m", "--hardware", "h200", "--device", "cpu", "--gpu-mem", "8").request
    assert cpu.compute_tier == "cpu"
    assert "gpu" not in cpu.capped


def test_caches_of_fewer_bits_take_less() -> None:
    plain, packed = (parse(*SMALL.split(), *extra).request for extra in ((), ("--cache-bits", "4")))
    assert packed.spec.cache_bits == 4
    sizes = [request.spec.kv_bytes_per_token_and_layer("float16") for request in (plain, packed)]
    assert sizes == [2 * 12 * 64 * 2, 2 * 12 * (64 // 2 + 4)]


def test_smaller_caches_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The full cache in 16 bits first, then each share with the policy that was named; the plan stays as asked for."""
    arguments = parse(*SMALL.split(), "--compare-kv-bytes", "0.5,0.2", "--hh-ratio", "0.3")
    assert arguments.request.eviction.ratio == 0.3
    full, half, fifth = arguments.caches
    assert (full.eviction.name, full.spec.cache_bits) == ("full", 16)
    assert [(each.eviction.name, each.eviction.bytes) for each in (half, fifth)] == [("h2o", 0.5), ("h2o", 0.2)]
    assert fifth.eviction == parse(*SMALL.split(), "--kv-bytes", "0.2").request.eviction
    assert parse(*SMALL.split(), "--compare-kv-bytes", "0.5").caches[1].eviction.how_layers_share == "far"
    for wrong in ("a", "", "0", "0.1,1.5", "nan"):
        with pytest.raises((SystemExit, UsageError)):
            parse(*SMALL.split(), "--compare-kv-bytes", wrong)
    capsys.readouterr()
    assert main([*SMALL.split(), "--compare-kv-bytes", "0.5", "--json"]) == 0
    out = capsys.readouterr().out
    rows = entry(out)["caches"]
    assert [row["kv_bytes"] for row in rows] == [None, 0.5]
    assert rows[1]["most_sequences"] > rows[0]["most_sequences"]
    assert out.count("| full ") == 1
    tiny = ("--model", "opt-125m", "--hardware", "t4", "--gpu-mem", "0.1", "--cpu-mem", "0.6", "--disk-mem", "1")
    assert "none fits" in _cache_table(
        [cache_row(each, "highs") for each in parse(*tiny, "--compare-kv-bytes", "0.5").caches]
    )


def test_what_is_typed_of_the_policy_is_fixed(tmp_path: Path) -> None:
    base = ("--model", "opt-125m", "--hardware", "t4")
    fixed = parse(*base, "--percent", "20", "80", "0", "100", "0", "100", "--gbs", "8", "--no-overlap").request.fixed
    assert set(fixed) == {"weights", "cache", "hidden", "gpu_batch_size", "overlap"}
    assert fixed["weights"] == {"gpu": 0.2, "cpu": 0.8}
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(OffloadPolicy(4, 2).to_json()))
    whole = parse(*base, "--policy", str(file), "--num-gpu-batches", "3").request.fixed
    assert OffloadPolicy(**whole) == OffloadPolicy(4, 3)


@pytest.mark.slow
def test_a_policy_for_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, timeline = tmp_path / "policy.json", tmp_path / "timeline.json"
    assert main([*SMALL.split(), "--output", str(policy), "--simulate", str(timeline), "--hh-ratio", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = entry(out)
    assert out.startswith("model       opt-125m, float16 on the GPU of t4-16gb\n")
    assert "gpu   in all" in out
    written = json.loads(policy.read_text())
    assert written.pop("made_for")["predicted"] == found["predicted"]
    assert written == found["policy"]
    assert parse_arguments(["--policy", str(policy)], {}).engine.policy == OffloadPolicy(**written)
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "M"} >= {"process_name", "thread_name"}
    assert any(event["ph"] == "X" and event["dur"] > 0 for event in events)
    assert main([*SMALL.split(), "--output", str(policy)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*SMALL.split(), "--output", str(policy), "--overwrite", "--quiet", "--solver", OTHER]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1
    assert entry(out)["policy"]["gpu_batch_size"] == 16


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --device cpu --cpu-mem 550MiB --nvme-mem 0"
    assert main(line.split()) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert "does not fit into cpu 550 MiB, disk 0 B" in err
    assert "the smallest that works: --cpu-mem " in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model opt-125m --hardware t4-16g", "did you mean 't4-16gb'"),
        ("--model opt-12 --hardware t4", "did you mean 'opt-125m'"),
        ("--model opt-125m --hardware t4 --prompt-len 2040", "the context of opt-125m is 2048 tokens"),
        ("--model opt-125m --hardware t4 --rolling-positions", "learned a table of positions"),
        ("--model pythia-160m --hardware t4 --rolling-positions --prompt-len 3000", "positions roll within it"),
        ("--model opt-125m --hardware t4 --num-prompts 0", "at least 1"),
        ("--model opt-125m --hardware t4 --hh-ratio 2", "--hh-ratio is 2.0"),
        ("--model opt-125m --hardware t4 --overwrite", "needed --output FILE"),
        ("--model opt-125m --hardware t4 --output a --simulate a", "--output and --simulate are both a"),
        ("--model opt-125m --hardware t4 --output /none/such.json", "the folder /none is not there"),
        ("--model opt-125m --hardware t4 --simulate /tmp", "this is a folder"),
        ("--model opt-125m --hardware README.md", "is not a hardware profile"),
        ("--model opt-125m --hardware t4 --percent 60 50 0 100 0 100", "needed at most 100"),
    ],
)
def test_what_is_refused_says_what_to_do(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) in (2, 4)
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_a_prompt_past_the_context_is_fed_step_by_step_as_the_engine_does() -> None:
    rolling = ("--rolling-positions", "--kv-budget", "256", "--prompt-len", "5000", "--num-prompts", "1")
    request = parse("--model", "pythia-160m", "--hardware", "t4", *rolling).request
    assert request.workload == Workload(2048, 5000 - 2048 + 32)
    reader = RequestReader(request.spec, request.eviction, None, 0)
    assert request.workload == workload_of(reader.read([[5] * 5000], SamplingParams(max_new_tokens=32)))


def test_rates_of_another_dtype_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --dtype float32 --gbs 16 --num-gb 1 --percent 100 0 100 0 100 0".split()
    assert main(line) == 0
    assert capsys.readouterr().err == "note: the rates of t4-16gb are for float16, and this is float32\n"
    assert main([*line, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_no_torch_is_loaded() -> None:
    lines = {"--help": 0, SMALL: 0, f"{SMALL} --weight-bits 4": 0, "--model opt-125m --hardware nothing": 2}
    program = (
        "import sys; from h2o_flexgen.search import _cache_table, main; "
        f"codes = [main(line.split()) for line in {list(lines)}]; "
        "heavy = {'torch', 'transformers'} & set(sys.modules); "
        f"sys.exit(f'{{codes}} {{heavy}}' if heavy or codes != {list(lines.values())} else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_solvers_write_nothing() -> None:
    """HiGHS 1.16 tells of its licence on stdout once a process, beside what python knows of."""
    line = [sys.executable, "-m", "h2o_flexgen.search", *SMALL.split()]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("model "), done.stdout[:200]


@pytest.mark.slow
def test_a_very_large_model_is_searched_for(capsys: pytest.CaptureFixture[str]) -> None:
    work = ["--prompt-len", "512", "--gen-len", "32"]
    # The more GPU batches there are, the longer a block takes to simulate; each size of theirs takes as long again.
    work += ["--num-gpu-batches", "2", "--gbs", "32"]
    assert main(["--model", "opt-30b", "--hardware", "t4", "--cpu-mem", "24", *work]) == 0
    found = entry(capsys.readouterr().out)
    assert found["policy"]["weights"].get("disk", 0) > 0.5
    assert found["predicted"]["gen_throughput"] > 0.2


def test_a_models_folder_is_read_as_run_reads_it(tmp_path: Path) -> None:
    text = (ROOT / "configs" / "models" / "opt-125m.json").read_bytes()
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + text)
    assert parse("--model", str(tmp_path), "--hardware", "t4").request.spec.hidden_size == 768
    for content in (b"[" * 100_000, b'{"model_type": '):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ModelError, match="torn or not JSON"):
            parse("--model", str(tmp_path), "--hardware", "t4")


def test_mistakes_in_the_environment_name_their_origin() -> None:
    with pytest.raises(UsageError, match="from the environment: H2O_FLEXGEN_HH_RATIO=7"):
        parse("--model", "opt-125m", "--hardware", "t4", HH_RATIO="7")


class TestBits:
    """Weights of fewer bits: as `run` takes them."""

    LINE = ("--model", "opt-125m", "--hardware", "t4")

    def test_flags(self) -> None:
        assert parse(*self.LINE).request.spec.packed_kind is None
        found = parse(*self.LINE, "--weight-bits", "8", "--weight-group", "128").request
        assert (found.spec.packed_kind, found.choices) == ({"bits": 8, "group": 128}, {})
        assert parse(*self.LINE, "--compress-weight").request.spec.packed_kind == {"bits": 4, "group": 64}
        chosen = parse(*self.LINE, "--allow-compress", "--weight-group", "32").request
        assert chosen.spec.packed_kind is None
        assert {bits: spec.packed_kind for bits, spec in chosen.choices.items()} == {
            16: None, 8: {"bits": 8, "group": 32}, 4: {"bits": 4, "group": 32},
        }  # fmt: skip
        with pytest.raises(UsageError, match="needed one of them"):
            parse(*self.LINE, "--allow-compress", "--weight-bits", "4")

    def test_what_was_chosen(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A run by that policy with weights of other bits is told so."""
        fixed = ("--gbs", "4", "--num-gb", "1", "--device", "cpu", "--cpu-mem", "620MiB", "--allow-compress")
        assert main([*SMALL.split(), *fixed, "--output", str(tmp_path / "policy.json")]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert "\nbits        " in out
        chosen = entry(out)["bits_choice"]["chosen"]
        assert chosen in (8, 4)
        line = ["--model", "opt-125m", "--policy", str(tmp_path / "policy.json")]
        (told,) = parse_arguments(line, {}).notes
        assert f"--weight-bits {chosen}" in told
        assert not parse_arguments([*line, "--weight-bits", str(chosen)], {}).notes

    def test_a_packed_checkpoint_is_known_as_such(self, tmp_path: Path) -> None:
        written = checkpoint(FORMATS["gptq 128"], num_hidden_layers=2)
        written.write(tmp_path)
        line = ("--model", str(tmp_path), "--hardware", "t4", "--prompt-len", "8", "--gen-len", "4")
        found = parse(*line).request.spec
        assert len(found.packings) == 2 * 7
        assert found.packed_kind == {"bits": 4, "group": 128}
        expanded = parse(*line, "--dequantize").request.spec
        assert expanded.packings == ()
        with pytest.raises(UsageError, match="whose checkpoint has packed weights"):
            parse(*line, "--weight-bits", "8")
