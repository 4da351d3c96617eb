"""The flags of `run`, FlexGen's and H2O's among them, and the checked configs that they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Self

from h2o_flexgen.cli.parser import Parser, at_least_one
from h2o_flexgen.cli.program import add_json, output_file, require_several
from h2o_flexgen.cli.prompts import GivenPrompt, as_conversations, checked_text, demo_prompts, read_prompts, stop_texts
from h2o_flexgen.config.checks import Checked, json_file
from h2o_flexgen.config.engine import PLANNED_FIELDS, EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.flags import add_arguments, called, from_namespace, given, option
from h2o_flexgen.config.hardware.profile import HardwareProfile, PlanningConfig, find_profile
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.response_format import ResponseFormat
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.errors import UsageError

_SHARES = "layers are placed by shares: --percent 50 50 100 0 100 0; leave it out and they are placed for you"
_QUANTISED = "keys and values are packed by --cache-bits 8 or --cache-bits 4"
REFUSED = {
    "--hh-long-seq": "it left out OPT's position embedding, which is another model; longer prompts are refused instead",
    "--cut-gen-len": "it projected decode time from fewer tokens; every figure here is measured",
    "--debug-mode": "a breakdown comes with every run's report, and --trace FILE writes a timeline",
    "--kv-cache-dtype": _QUANTISED,
    "--cache-type-k": _QUANTISED,
    "--cache-type-v": _QUANTISED,
    "-ngl": _SHARES,
    "--n-gpu-layers": _SHARES,
    "--device-map": _SHARES,
    "--cpu-offload-gb": "what does not fit under --gpu-mem SIZE goes to the host, and beyond --cpu-mem SIZE to disk",
    "--gpu-memory-utilization": "GPU memory is capped by --gpu-mem SIZE",
    "--max-memory": "every tier has a cap of its own: --gpu-mem 15GiB --cpu-mem 200GiB --nvme-mem 1TB",
    "--load-mode": "weights are read around the page cache where the file system can, and never memory-mapped",
    "--threads": "set OMP_NUM_THREADS",
    "-t": "set OMP_NUM_THREADS",
}


def _prompt_len(text: str) -> int:
    if any(character.isalpha() for character in text):
        raise argparse.ArgumentTypeError(f"{text!r}: needed a number of tokens; a prompt is given with --prompt TEXT")
    return at_least_one(text)


@dataclass(frozen=True)
class WorkArguments(Checked):
    """All of a command line that has work for an engine, checked. `notes` are sentences for the user."""

    engine: EngineConfig
    sampling: SamplingParams
    hardware: HardwareProfile | None
    calibrate: bool | None
    json: bool | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, args: argparse.Namespace, engine: EngineConfig, sampling: SamplingParams, **others: Any) -> Self:
        planning, json = from_namespace(PlanningConfig, args), getattr(args, "json", None)
        hardware = None if planning.hardware is None else find_profile(planning.hardware)
        return cls(engine, sampling, hardware, planning.calibrate, json, tuple(args.notes), **others)


@dataclass(frozen=True)
class RunArguments(WorkArguments):
    prompts: Sequence[str] = option(
        (), "--prompt", parse=str, action="append", metavar="TEXT", help="a prompt; may be given several times"
    )
    prompts_file: Path | None = option(
        None,
        "--prompts",
        metavar="FILE",
        help='text, a prompt per line, or .jsonl with {"prompt": "..." or [token ids]} or {"messages": [...]} '
        "per line; - for stdin",
    )
    chat: bool = option(False, help="each prompt is a user message, for the model's chat template")
    system: str | None = option(None, metavar="TEXT", help="with --chat: a system message before each prompt")
    prompt_len: int | None = option(
        None, "--prompt-len", "--input-len", "-p", parse=_prompt_len, help="random prompts of N tokens instead"
    )
    num_prompts: int | None = option(
        None,
        parse=at_least_one,
        help="number of random prompts (default: one block), or only the first N given prompts",
    )
    stop: Sequence[str] = option(
        (), parse=str, action="append", metavar="TEXT", help="ends a sequence; may be given several times"
    )
    json_schema: str | None = option(
        None, metavar="FILE", help="answers are JSON as the JSON schema in FILE describes it"
    )
    output: Path | None = option(
        None,
        "--output",
        "--output-file",
        "-o",
        metavar="FILE",
        help="answers as JSONL; - for stdout (default: text there)",
    )
    on_error: Literal["fail", "skip"] = option(
        "fail",
        choices=("fail", "skip"),
        help="a prompt that cannot be run (too long, a line that is not JSON) ends the program before any work "
        "(default), or has an error for its answer while the others are run (exit code 3)",
    )
    overwrite: bool = option(False, help="replace existing files of --output, --trace and so on")
    log_file: Path | None = option(None, metavar="FILE", help="append figures in FlexGen's five-line log format")
    no_log: bool = option(False, help="no log file, whatever --log-file says")
    trace_file: Path | None = option(None, "--trace", metavar="FILE", help="a timeline for ui.perfetto.dev")
    report_file: Path | None = option(None, "--report", metavar="FILE", help="an HTML page of the run")
    scores_file: Path | None = option(
        None, "--record-scores", metavar="FILE", help="scores of the prompts' tokens, for h2o-flexgen report"
    )
    quiet: bool = option(False, "--quiet", "-q", help="no progress, no report")


def parse_arguments(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> RunArguments:
    """Parses `argv` and what `environ` adds. Exits (2) where argparse objects, UsageError where the configs do."""
    with _run_parser().parsed(argv, environ) as args:
        return _checked(args)


def given_prompts(arguments: RunArguments) -> list[GivenPrompt] | None:
    """The prompts that the user gave, None where random ones are wanted."""
    prompts: list[GivenPrompt]
    skip = arguments.on_error == "skip"
    if arguments.prompts:
        prompts = list(map(GivenPrompt, arguments.prompts))
    elif arguments.prompts_file is not None:
        prompts = read_prompts(arguments.prompts_file, skip=skip)
    elif arguments.prompt_len is None and arguments.engine.model == "demo" and arguments.engine.weights == "checkpoint":
        prompts = list(map(GivenPrompt, demo_prompts()))
    elif arguments.chat:
        raise UsageError("--chat is given, and there is nothing to answer", "needed --prompt TEXT or --prompts FILE")
    elif arguments.sampling.response_format is not None:
        found = "--json-schema is given, and random prompts are for measuring"
        raise UsageError(found, "needed --prompt TEXT or --prompts FILE")
    else:
        return None
    prompts = prompts[: arguments.num_prompts]
    if not arguments.chat:
        return prompts
    talks = as_conversations([each.prompt for each in prompts], arguments.system, skip=skip)
    return [GivenPrompt(talk, each.settings) for talk, each in zip(talks, prompts, strict=True)]


def _checked(args: argparse.Namespace) -> RunArguments:
    engine, typed = engine_of(args), given(RunArguments, args)
    said: dict[str, Any] = {"stop_strings": stop_texts(typed.get("stop", ()))}
    said["response_format"] = _form(typed["json_schema"]) if "json_schema" in typed else None
    sampling = from_namespace(SamplingParams, args, defaults=said)
    if len(typed.keys() & {"prompts", "prompts_file", "prompt_len"}) > 1:
        raise UsageError("--prompt, --prompts and --prompt-len are given together", "needed one of them")
    if typed.keys() >= {"chat", "prompt_len"}:
        raise UsageError("--chat and --prompt-len are given together", "random tokens are not a conversation")
    if "system" in typed:
        if "chat" not in typed:
            raise UsageError("--system is given without --chat", "a system message belongs to a conversation")
        checked_text(typed["system"], "--system")
    written = {"--trace": "trace_file", "--report": "report_file", "--record-scores": "scores_file"}
    overwrite = "overwrite" in typed
    if overwrite and not typed.keys() & {"output", *written.values()}:
        needed = "needed --output FILE, --trace FILE, --report FILE or --record-scores FILE"
        raise UsageError("--overwrite is given without --output", needed)
    files = {"--prompts": "prompts_file", "--output": "output", "--log-file": "log_file", **written}
    require_several({flag: typed.get(name) for flag, name in files.items()})
    typed["prompts"] = tuple(checked_text(text, "--prompt") for text in typed.get("prompts", ()))
    typed["log_file"] = None if "no_log" in typed else output_file("--log-file", typed.get("log_file"), keep=False)
    for flag, name in written.items():
        typed[name] = output_file(flag, typed.get(name), keep=not overwrite)
    return RunArguments.of(args, engine, sampling, **typed)


def _form(path: str) -> ResponseFormat:
    """The form that the JSON schema in a file describes. UsageError for a file that holds none."""
    called = f"--json-schema {path}"
    schema = json_file(path, called, "needed a JSON schema")
    try:
        return ResponseFormat.of_schema(schema)
    except UsageError as error:
        raise error.reworded(lambda words: words.replace("the schema", f"{called}: the schema")) from None


def engine_of(args: argparse.Namespace) -> EngineConfig:
    """The engine that the flags describe; `args.notes` gets sentences about those without effect. UsageError for a flag
    of another engine that means nothing here."""
    for name in getattr(args, "refused", None) or []:
        raise UsageError(f"{name} is not taken", REFUSED[name])
    eviction = eviction_of(args)

    def asked(*names: str) -> bool:
        return any(getattr(args, name, None) is not None for name in names)

    defaults: dict[str, Any] = {"eviction": eviction, "policy": policy_of(args), "trace": asked("trace", "report")}
    defaults["record_scores"] = asked("record_scores", "report") and eviction.name != "full"
    engine = from_namespace(EngineConfig, args, defaults=defaults)
    if engine.path == "_DUMMY_" or args.dummy_weights:
        path = None if engine.path == "_DUMMY_" else engine.path
        engine = replace(engine, path=path, weights="dummy")
    if _is_false(args.hh_all):
        raise UsageError(f"--hh-all {args.hh_all} is not taken", "eviction while decoding is always on here")
    if _is_false(args.sep_layer):
        args.notes.append("--sep-layer has no effect: attention and MLP are always units of their own")
    if _is_false(args.pin_weight):
        args.notes.append(
            "--pin-weight has no effect: with a GPU host memory is pinned up to a bounded pool, without one never"
        )
    if args.attn_sparsity != 1.0:
        raise UsageError(
            f"--attn-sparsity {args.attn_sparsity} is not taken", "needed 1.0", "--hh-ratio bounds the cache"
        )
    args.notes.extend(_made_for(args, engine))
    return replace(engine, eviction=replace(engine.eviction, seed=engine.seed))


def eviction_of(args: argparse.Namespace) -> EvictionConfig:
    """--hh-ratio below 1 or --kv-budget mean H2O unless --eviction names another; heavy + recent ratios add up."""
    typed = given(EvictionConfig, args)
    defaults: dict[str, Any] = {}
    if args.compression_ratio is not None:
        _exclusive("--compression-ratio", "--hh-ratio", "ratio" in typed)
        _exclusive("--compression-ratio", "--kv-budget", "budget" in typed)
        if not 0 <= args.compression_ratio < 1:
            raise UsageError(f"--compression-ratio is {args.compression_ratio}", "needed at least 0 and less than 1")
        # In decimals: 1 - 0.7 is 0.3, which as a float it is not.
        defaults["ratio"] = float(1 - Decimal(repr(args.compression_ratio)))
    if args.heavy_ratio is not None:
        _exclusive("--heavy-ratio", "--hh-ratio", "ratio" in typed or args.compression_ratio is not None)
        _exclusive("--heavy-ratio", "--kv-budget", "budget" in typed)
        if "recent_ratio" not in typed:
            raise UsageError(
                "--heavy-ratio is given without --recent-ratio", "needed both", "or --hh-ratio for their sum"
            )
        both = float(Decimal(repr(args.heavy_ratio)) + Decimal(repr(args.recent_ratio)))
        if not (args.heavy_ratio >= 0 and 0 < both <= 1):
            raise UsageError(
                f"--heavy-ratio is {args.heavy_ratio}, --recent-ratio {args.recent_ratio}",
                "needed shares that add up to more than 0 and at most 1",
            )
        defaults["ratio"] = both
    ratio = getattr(args, "hh_ratio", defaults.get("ratio", 1.0))
    if "name" not in typed and ("budget" in typed or "bytes" in typed or ratio != 1.0):
        defaults["name"] = "h2o"
    return from_namespace(EvictionConfig, args, defaults=defaults)


def _exclusive(flag: str, other: str, given_too: bool) -> None:
    if given_too:
        raise UsageError(f"{flag} and {other} are both given", "needed one of them")


def policy_of(args: argparse.Namespace) -> OffloadPolicy | dict[str, Any] | str:
    """The user's choices: a policy from a file, changed by typed flags, or the typed fields alone, or "auto"."""
    typed = given(OffloadPolicy, args)
    fixed: dict[str, Any] = {name: getattr(from_namespace(OffloadPolicy, args), name) for name in typed}
    if args.percent is not None:
        clash = typed.keys() & {"weights", "cache", "hidden"}
        _exclusive("--percent", f"--{next(iter(clash), 'weights')}-placement", bool(clash))
        placed = OffloadPolicy.from_percent(args.percent)
        fixed.update(weights=placed.weights, cache=placed.cache, hidden=placed.hidden)
    if args.policy == "auto":
        return fixed or "auto"
    data = json_file(args.policy, f"--policy {args.policy}", "needed a JSON file, or auto")
    try:
        whole = OffloadPolicy.from_json(data)
    except UsageError as error:
        raise UsageError(f"--policy {args.policy}: {error.found}", error.needed, error.change) from None
    return replace(whole, **fixed)


def _made_for(args: argparse.Namespace, engine: EngineConfig) -> Iterator[str]:
    """The purpose that `search` noted in a policy file, where it was another."""
    made_for = {} if args.policy == "auto" else json_file(args.policy, args.policy, "").get("made_for")
    if not isinstance(made_for, Mapping):
        return
    other, choice = made_for.get("model"), made_for.get("bits_choice")
    if isinstance(other, str) and Path(other).name.lower() != Path(engine.model).name.lower():
        yield f"the policy in {args.policy} was made for {other}"
    bits = choice.get("chosen") if isinstance(choice, Mapping) else None
    if bits is not None and bits != engine.weight_bits:
        yield f"the policy in {args.policy} was made for weights of {bits} bits: --weight-bits {bits} has them so"


def _run_parser() -> Parser:
    parser = Parser(
        prog=called("run"),
        usage="%(prog)s [--model MODEL] [--prompt TEXT | --prompts FILE] [--hh-ratio R] [flags]",
        description="Completes prompts with a model that need not fit in memory, its KV cache held at a budget.",
        epilog="Every flag can be set in the environment: --cpu-mem 8GiB is H2O_FLEXGEN_CPU_MEM=8GiB. "
        "Exit codes: 0 all well, 2 flags or prompts, 3 some sequences failed, 4 model or checkpoint, 5 does not fit, "
        "6 disk, 130 or 143 interrupted.",
    )
    add_json(add_arguments(parser, RunArguments, title="work", bare=True))
    add_engine(parser)
    return parser


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The flags of an engine, of plans and of sampling, and those known from others."""
    add_arguments(parser, EvictionConfig, title="KV cache and eviction")
    add_arguments(parser, EngineConfig, title="model and machine")
    planned = dict.fromkeys(PLANNED_FIELDS)
    add_arguments(parser, OffloadPolicy, title="placement and the shape of the block", defaults=planned)
    add_arguments(parser, PlanningConfig, title="rates for plans and predictions")
    add_arguments(parser, SamplingParams, title="sampling, and the end of a sequence")
    _add_known(parser)


def _add_known(parser: argparse.ArgumentParser) -> None:
    """FlexGen's and H2O's flags, and the habits of other engines, where they differ from ours."""
    group = parser.add_argument_group("known from FlexGen and others")
    add_known_choices(group)
    group.add_argument("--dummy-weights", action="store_true", help="--weights dummy")
    for name, text in (
        ("--hh-all", "evict while decoding too: always on"),
        ("--sep-layer", "attention and MLP as separate units: always on"),
        ("--pin-weight", "pinned host memory where there is a GPU: on, up to a bounded pool"),
    ):
        group.add_argument(name, nargs="?", const="true", metavar="BOOL", help=text)
    group.add_argument("--attn-sparsity", type=float, default=1.0, metavar="S", help="only 1.0: use --hh-ratio")
    group.add_argument("--no-mmap", action="store_true", help="weights are never memory-mapped: always on")
    group.add_argument("--trust-remote-code", action="store_true", help="accepted; code in a checkpoint is never run")
    group.add_argument("--verbose", nargs="?", metavar="N", help="accepted; --quiet is the other way")
    for name in REFUSED:
        group.add_argument(name, nargs="?", action=_Refuse, dest="refused", help=argparse.SUPPRESS)


def add_known_choices(group: argparse._ArgumentGroup) -> None:
    """FlexGen's and H2O's ways to say where things live and which tokens stay: see `eviction_of` and `policy_of`."""
    group.add_argument(
        "--percent",
        nargs=6,
        type=int,
        metavar=("WG", "WC", "CG", "CC", "HG", "HC"),
        help="percent of weights, cache, hidden states on gpu and cpu each; disk has the rest",
    )
    add_compress(group, "weight")
    add_compress(group, "cache")
    group.add_argument("--policy", default="auto", metavar="auto|FILE", help="a policy file (JSON), or auto (default)")
    group.add_argument("--heavy-ratio", type=float, metavar="R", help="heavy hitters as a share; with --recent-ratio")
    group.add_argument("--compression-ratio", type=float, metavar="R", help="1 - hh-ratio")


def add_compress(group: argparse._ArgumentGroup, what: str) -> None:
    """FlexGen's way to ask for 4 bits of `what`, "weight" or "cache"."""
    how: dict[str, Any] = {"action": "store_const", "const": 4, "default": argparse.SUPPRESS}
    group.add_argument(f"--compress-{what}", dest=f"{what}_bits", help=f"--{what}-bits 4", **how)


class _Refuse(argparse.Action):
    """Notes the flag, unless it was typed only to be switched off."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if not _is_false(values):
            namespace.refused = [*(getattr(namespace, "refused", None) or []), option]


def _is_false(value: str | None) -> bool:
    return value is not None and value.lower() in ("0", "false", "no", "off")
