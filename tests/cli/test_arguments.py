"""The command line: what users of FlexGen, H2O, llama.cpp and vLLM type, typos, the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from h2o_flexgen.cli.arguments import RunArguments, parse_arguments
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.errors import UsageError
from h2o_flexgen.run import main


def parse(*arguments: str, **environ: str) -> RunArguments:
    return parse_arguments(arguments, {f"H2O_FLEXGEN_{name}": value for name, value in environ.items()})


def test_the_demo_without_any_flag() -> None:
    arguments = parse()
    assert arguments.engine.model == "demo"
    assert arguments.engine.eviction.name == "full"
    assert arguments.engine.policy == "auto"
    assert arguments.sampling.max_new_tokens == 32


def test_flexgens_own_command_line() -> None:
    line = (
        "--model facebook/opt-30b --path _DUMMY_ --prompt-len 512 --gen-len 32 --gpu-batch-size 144 "
        "--num-gpu-batches 2 --percent 20 80 0 100 0 100 --offload-dir ~/flexgen_offload_dir "
        "--pin-weight 1 --sep-layer true --overlap true --cpu-cache-compute --verbose 2 --no-log"
    )
    arguments = parse(*line.split())
    assert (arguments.engine.weights, arguments.engine.path, arguments.notes) == ("dummy", None, ())
    assert arguments.engine.policy == {
        "gpu_batch_size": 144,
        "num_gpu_batches": 2,
        "cpu_cache_compute": True,
        "overlap": True,
        **{
            name: getattr(OffloadPolicy.from_percent([20, 80, 0, 100, 0, 100]), name)
            for name in ("weights", "cache", "hidden")
        },
    }


@pytest.mark.parametrize(
    ("line", "name", "ratio"),
    [
        ("--hh-ratio 0.2", "h2o", 0.2),
        ("--hh-ratio 0.1 --hh-all", "h2o", 0.1),
        ("--hh-ratio 1", "full", 1.0),
        ("--compression-ratio 0.7", "h2o", 0.3),
        ("--compression-ratio 0", "full", 1.0),
        ("--heavy-ratio 0.1 --recent-ratio 0.2", "h2o", 0.3),
        ("--hh-ratio 0.2 --eviction streaming", "streaming", 0.2),
        ("--eviction h2o", "h2o", 1.0),
    ],
)
def test_ratios_are_exact(line: str, name: str, ratio: float) -> None:
    """1 - 0.7 and 0.1 + 0.2 are 0.3 here, and of 10 tokens that is 3, not 4."""
    eviction = parse(*line.split()).engine.eviction
    assert (eviction.name, eviction.ratio) == (name, ratio)


def test_fewer_bits_by_flexgens_names() -> None:
    engine = parse("--compress-cache", "--compress-weight").engine
    assert (engine.cache_bits, engine.weight_bits) == (4, 4)
    assert parse("--cache-bits", "8").engine.cache_bits == 8
    assert parse("--cache-bits", "8,4").engine.cache_bits == (8, 4)


def test_words_that_say_how_a_budget_is_spent() -> None:
    asked = parse(*["--hh-ratio", "0.2", "--budget-split", "global", "--spans", "fair"]).engine.eviction
    assert (asked.budget_split, asked.spans) == ("global", "fair")


def test_a_budget_in_tokens_means_h2o() -> None:
    eviction = parse("--kv-budget", "100", "--recent", "30").engine.eviction
    assert (eviction.name, eviction.budget, eviction.recent) == ("h2o", 100, 30)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-ngl 20", "--percent"),
        ("--n-gpu-layers 20", "--percent"),
        ("--cut-gen-len 5", "every figure here is measured"),
        ("--debug-mode breakdown", "--trace FILE"),
        ("--cache-type-k q8_0", "--cache-bits 8"),
        ("--hh-long-seq", "another model"),
        ("--gpu-memory-utilization 0.9", "--gpu-mem SIZE"),
        ("--cpu-offload-gb 8", "--cpu-mem SIZE"),
        ("--max-memory {0:1}", "--gpu-mem 15GiB --cpu-mem 200GiB"),
        ("-t 4", "OMP_NUM_THREADS"),
        ("--hh-all false", "always on here"),
        ("--attn-sparsity 0.1", "--hh-ratio bounds the cache"),
        ("--heavy-ratio 0.1", "needed both"),
        ("--hh-ratio 0.1 --compression-ratio 0.9", "needed one of them"),
        ("--hh-ratio 0.1 --kv-budget 9", "--kv-budget 9 and --hh-ratio 0.1 are both given"),
        ("--compression-ratio 0.9 --kv-budget 9", "needed one of them"),
        ("--heavy-ratio 0.1 --recent-ratio 0.1 --kv-budget 9", "needed one of them"),
        ("--prompt a --prompt-len 5", "needed one of them"),
        ("--percent 0 100 0 100 0 100 --cache-placement cpu", "needed one of them"),
        ("--overwrite", "needed --output FILE"),
        ("--log-file /none/such.log", "the folder /none is not there"),
        ("--trace /tmp", "this is a folder"),
        ("--output a.html --report ./a.html", "--output and --report are both a.html"),
        ("--trace a --record-scores a", "needed two files"),
        ("--prompts a.jsonl --output a.jsonl --overwrite", "--prompts and --output are both"),
        ("--policy /none/such.json", "cannot be read"),
        ("--model demo --dtype float8", "needed one of auto, float32, bfloat16, float16"),
        ("--weights dumy", "did you mean 'dummy'?"),
        ("--eviction h20", "did you mean 'h2o'?"),
        ("--cpu-mem 512KiB", "at least 1MiB"),
        ("--gbs 0", "needed at least 1"),
        ("--gen-len 0", "at least 1"),
        ("--seed -1", "needed at least 0"),
        ("--num-return-sequences 3", "--do-sample"),
        ("--top-p -0.1 --do-sample", "from 0 to 1"),
    ],
)
def test_what_is_refused_says_what_to_do(line: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*line.split())
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--gen-len -3", "--gen-len is -3"),
        ("-n 0", "-n is 0"),
        ("--max-new-tokens=0", "--max-new-tokens is 0"),
        ("--min-new-tokens 50", "--min-new-tokens 50 is larger than --gen-len 32"),
        ("--min-new-tokens 50 -n 9", "--min-new-tokens 50 is larger than -n 9"),
        ("--num-return-sequences 3", "--num-return-sequences 3 with greedy search gives equal sequences"),
        ("--temperature nan", "--temperature is nan"),
        ("--top-k -1", "--top-k is -1"),
        ("--logprobs -1", "--logprobs is -1"),
        ("--seed -1", "--seed is -1"),
        ("--gpu-mem 5B", "--gpu-mem is 5B"),
        ("--nvme-mem 5B", "--nvme-mem is 5B"),
        ("--disk-mem 5B", "--disk-mem is 5B"),
        ("--dtype float8", "--dtype is 'float8'"),
        ("--load-format gguf", "--load-format is 'gguf'"),
        ("--gbs 0", "--gbs is 0"),
        ("--kv-budget 8 --recent 9", "--recent is 9, the budget has 8 tokens"),
        ("--heavy-ratio 0 --recent-ratio 0", "--heavy-ratio is 0.0, --recent-ratio 0.0"),
    ],
)
def test_mistakes_are_told_of_the_flag_that_was_typed(line: str, found: str) -> None:
    """The API's names of them are another user's."""
    with pytest.raises(UsageError) as caught:
        parse(*line.split())
    assert caught.value.found == found


def test_switches_that_change_nothing_are_noted() -> None:
    """FlexGen's users turn these off to save memory; here that is moot, and refusing would only be in their way."""
    notes = parse("--pin-weight", "0", "--sep-layer", "false", "--hh-long-seq", "false").notes
    assert len(notes) == 2
    assert all("has no effect" in note for note in notes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--gen-len many", "error: --gen-len: invalid int value: 'many'"),
        ("-n many", "error: -n: invalid int value: 'many'"),
        ("--prompt-len -3", "error: --prompt-len: '-3': needed a whole number of at least 1"),
        ("--hh-rati 0.2", "did you mean '--hh-ratio'?"),
        ("--temp 2", "did you mean '--temperature'?"),
        ("--max-tokens 5", "did you mean '--max-new-tokens'?"),
        ("Once upon", "a prompt is given with --prompt TEXT"),
        ("-p hello", "a prompt is given with --prompt TEXT"),
        ("--hh-ratio", "expected one argument"),
        ("--hh-ratio one", "invalid float value: 'one'"),
        ("--cpu-mem lots", "'lots' is not a size"),
        ("--percent 1 2", "expected 6 arguments"),
        ("--num-prompts 0", "at least 1"),
    ],
)
def test_a_mistake_is_told_in_three_lines(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("error: ")
    assert "OFFLOAD_DIR" not in err, "which is set, and has no part in it"
    assert len(err.splitlines()) <= 3


def test_a_policy_file_and_flags_that_override_it(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text('{"gpu_batch_size": 8, "cache": {"disk": 1}}')
    policy = parse("--policy", str(path), "--num-gpu-batches", "3").engine.policy
    assert policy == OffloadPolicy(8, 3, cache={"disk": 1.0})
    path.write_text('{"gpu_batch_sise": 8}')
    with pytest.raises(UsageError, match="did you mean 'gpu_batch_size'"):
        parse("--policy", str(path))


def test_flags_from_the_environment() -> None:
    arguments = parse(
        MODEL="opt-30b", HH_RATIO="0.2", GPU_BATCH_SIZE="8", PERCENT="0 50 0 100 0 100", OVERLAP="0", QUIET="1",
        OVERWRITE="no", OFFLOAD_DIR="/scratch/offload", PROMPT="one prompt", GEN_LEN="",
    )  # fmt: skip
    assert (arguments.engine.model, arguments.engine.eviction.ratio, arguments.quiet) == ("opt-30b", 0.2, True)
    assert isinstance(arguments.engine.policy, dict)
    assert arguments.engine.policy["overlap"] is False
    assert arguments.engine.policy["weights"] == {"cpu": 0.5, "disk": 0.5}
    assert arguments.engine.offload_dir == "/scratch/offload"
    assert (arguments.prompts, arguments.sampling.max_new_tokens) == (("one prompt",), 32)


def test_what_is_typed_wins_over_the_environment() -> None:
    arguments = parse("-m", "demo", "--prompt", "typed", "--gbs=2", MODEL="opt-30b", PROMPT="set", GPU_BATCH_SIZE="8")
    assert (arguments.engine.model, arguments.prompts) == ("demo", ("typed",))
    assert arguments.engine.policy == {"gpu_batch_size": 2}


def test_what_is_typed_wins_over_what_the_environment_says_otherwise() -> None:
    eviction = parse("--kv-budget", "100", HH_RATIO="0.2").engine.eviction
    assert (eviction.budget, eviction.ratio) == (100, 1.0)
    arguments = parse("--prompt", "typed", PROMPTS="prompts.txt")
    assert (arguments.prompts, arguments.prompts_file) == (("typed",), None)
    placed = parse("--percent", "0", "100", "0", "100", "0", "100", WEIGHTS_PLACEMENT="disk", OVERLAP="false")
    assert placed.engine.policy["weights"]["cpu"] == 1.0
    assert placed.engine.policy["overlap"] is False


def test_mistakes_in_the_environment_name_their_origin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"--hh-ratio is 7\.0.*from the environment: H2O_FLEXGEN_HH_RATIO=7"):
        parse(HH_RATIO="7", GPU_BATCH_SIZE="4")
    with pytest.raises(UsageError, match="H2O_FLEXGEN_QUIET: 'loud' is neither"):
        parse(QUIET="loud")
    with pytest.raises(SystemExit):
        parse(GEN_LEN="many", GPU_BATCH_SIZE="4")
    assert "from the environment: H2O_FLEXGEN_GEN_LEN=many\n" in capsys.readouterr().err
    for name, value in (
        ("DTYPE", "bf16"),
        ("TEMPERATURE", "-1"),
        ("GEN_LEN", "0"),
        ("CPU_MEM", "1KiB"),
        ("WEIGHTS", "x"),
        ("NUM_RETURN_SEQUENCES", "3"),
    ):
        with pytest.raises(UsageError, match=f"from the environment: H2O_FLEXGEN_{name}={value}"):
            parse(**{name: value}, SEED="5")
    with pytest.raises(UsageError, match=r"--gen-len is -3.*from the environment: H2O_FLEXGEN_MAX_NEW_TOKENS=-3"):
        parse(MAX_NEW_TOKENS="-3")
    (note,) = parse(HH_RATI="0.2", DEBUG="1", SOMETHING_QUITE_DIFFERENT="1").notes
    assert note == "H2O_FLEXGEN_HH_RATI is set, and no flag is called so: did you mean 'HH_RATIO'?"


@pytest.mark.parametrize("line", ["--help", "--hh-rati 0.2", "--hh-ratio 7", "--percent 60 50 0 0 0 0"])
def test_help_and_mistakes_need_no_torch(line: str) -> None:
    program = (
        "import sys; from h2o_flexgen.run import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'transformers', 'tqdm'} & set(sys.modules); sys.exit(99 if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *line.split()], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if line == "--help" else 2), done.stderr


def test_help_tells_everything_in_groups(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in ("--hh-ratio R", "KV cache and eviction", "H2O_FLEXGEN_CPU_MEM=8GiB", "Exit codes: 0"):
        assert words in " ".join(out.split())
    assert "--hh-long-seq" not in out
    assert out.index("--prompt TEXT  ") < out.index("--hh-ratio R  ") < out.index("--offload-dir")
