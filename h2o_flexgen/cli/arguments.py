"""The flags of `run`: those of the configs, those of FlexGen that its users expect, and what is refused by name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.flags import Parser, add_arguments, from_namespace, given
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.errors import UsageError

_REFUSED = {
    "--hh-long-seq": "it left out OPT's position embedding, which is another model; longer prompts are refused instead",
    "--cut-gen-len": "it projected decode time from fewer tokens; every figure here is measured",
    "--debug-mode": "a breakdown comes with every run's report, and --trace FILE writes a timeline",
    "--compress-weight": "4-bit weights are not built yet",
    "--compress-cache": "a 4-bit KV cache is not built yet",
    "-ngl": "layers are placed by shares: --percent 50 50 100 0 100 0, or leave it out and they are placed for you",
    "--n-gpu-layers": "layers are placed by shares: --percent 50 50 100 0 100 0, or leave it out and they are placed for you",
}


@dataclass(frozen=True)
class RunArguments:
    """All of a command line, checked."""

    engine: EngineConfig
    sampling: SamplingParams
    prompts: tuple[str, ...]
    prompts_file: Path | None
    prompt_len: int | None
    num_prompts: int | None
    output: Path | None
    overwrite: bool
    log_file: Path | None
    trace_file: Path | None
    quiet: bool
    notes: tuple[str, ...]


def parse_arguments(argv: Sequence[str] | None = None) -> RunArguments:
    """Parses `argv`. Exits with code 2 where argparse objects; UsageError where the configs do."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name in getattr(args, "refused", None) or []:
        raise UsageError(f"{name} is not taken", _REFUSED[name])
    notes: list[str] = []
    engine = _engine(args, notes)
    stops = {"stop_strings": tuple(args.stop)}
    sampling = from_namespace(SamplingParams, args, defaults=stops)
    output = None if args.output is None else Path(args.output)
    return RunArguments(
        engine=engine,
        sampling=sampling,
        prompts=tuple(args.prompt),
        prompts_file=None if args.prompts is None else Path(args.prompts),
        prompt_len=args.prompt_len,
        num_prompts=args.num_prompts,
        output=output,
        overwrite=args.overwrite,
        log_file=None if args.log_file is None or args.no_log else Path(args.log_file),
        trace_file=None if args.trace is None else Path(args.trace),
        quiet=args.quiet,
        notes=tuple(notes),
    )


def _parser() -> Parser:
    parser = Parser(
        prog="python -m h2o_flexgen.run",
        description="Completes prompts with a model that need not fit in memory, its KV cache held at a budget.",
    )
    add_arguments(parser, EngineConfig)
    add_arguments(parser, EvictionConfig)
    add_arguments(parser, OffloadPolicy)
    add_arguments(parser, SamplingParams)
    work = parser.add_argument_group("work")
    work.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given several times"
    )
    work.add_argument(
        "--prompts", metavar="FILE", help='text, a prompt per line, or .jsonl with {"prompt": ...} per line'
    )
    work.add_argument(
        "--prompt-len", "--input-len", "-p", type=_count, metavar="N", help="random prompts of N tokens instead"
    )
    work.add_argument("--num-prompts", type=_count, metavar="N", help="how many random prompts (default: one block)")
    work.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends a sequence; may be given several times"
    )
    work.add_argument(
        "--output", "--output-file", "-o", metavar="FILE", help="answers as JSONL; without it they go to stdout"
    )
    work.add_argument("--overwrite", action="store_true", help="replace an existing --output FILE")
    work.add_argument("--log-file", metavar="FILE", help="figures in FlexGen's five-line log format")
    work.add_argument("--no-log", action="store_true", help="no log file, whatever --log-file says")
    work.add_argument("--trace", metavar="FILE", help="a timeline for ui.perfetto.dev")
    work.add_argument("--quiet", "-q", action="store_true", help="no progress bars, no report")
    _add_flexgen(parser)
    return parser


def _add_flexgen(parser: argparse.ArgumentParser) -> None:
    """FlexGen's and H2O's flags, and the habits of other engines, where they differ from ours."""
    group = parser.add_argument_group("known from FlexGen and others")
    group.add_argument(
        "--percent",
        nargs=6,
        type=int,
        metavar=("WG", "WC", "CG", "CC", "HG", "HC"),
        help="percent of weights, cache, hidden states on gpu and cpu each; disk has the rest",
    )
    group.add_argument("--policy", default="auto", metavar="auto|FILE", help="a policy file (JSON), or auto (default)")
    group.add_argument("--heavy-ratio", type=float, metavar="R", help="heavy hitters as a share; with --recent-ratio")
    group.add_argument("--compression-ratio", type=float, metavar="R", help="1 - hh-ratio")
    group.add_argument("--dummy-weights", action="store_true", help="--weights dummy")
    for name, help_text in (
        ("--hh-all", "evict while decoding too: always on"),
        ("--sep-layer", "attention and MLP as separate units: always on"),
        ("--pin-weight", "pinned host memory where there is a GPU: always on"),
    ):
        group.add_argument(name, nargs="?", const="true", metavar="BOOL", help=help_text)
    group.add_argument("--attn-sparsity", type=float, default=1.0, metavar="S", help="only 1.0: use --hh-ratio")
    group.add_argument("--trust-remote-code", action="store_true", help="accepted; code in a checkpoint is never run")
    group.add_argument("--verbose", nargs="?", metavar="N", help="accepted; --quiet is the other way")
    for name in _REFUSED:
        group.add_argument(name, nargs="?", action=_Refuse, dest="refused", help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.refused = [*(getattr(namespace, "refused", None) or []), option]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: needed a whole number of at least 1")
    return int(text)


def _engine(args: argparse.Namespace, notes: list[str]) -> EngineConfig:
    eviction = _eviction(args)
    defaults: dict[str, Any] = {"eviction": eviction, "policy": _policy(args), "trace": args.trace is not None}
    engine = from_namespace(EngineConfig, args, defaults=defaults)
    if engine.path == "_DUMMY_" or args.dummy_weights:
        engine = replace(engine, path=None, weights="dummy")
    for name in ("hh_all", "sep_layer", "pin_weight"):
        value = getattr(args, name)
        if value is not None and value.lower() in ("0", "false", "no", "off"):
            raise UsageError(f"--{name.replace('_', '-')} {value} is not taken", "it is always on here")
    if args.attn_sparsity != 1.0:
        raise UsageError(
            f"--attn-sparsity {args.attn_sparsity} is not taken", "needed 1.0", "--hh-ratio bounds the cache"
        )
    if args.percent is not None and any(args.percent[i] for i in (0, 2, 4)):
        notes.append("gpu shares")
    return replace(engine, eviction=replace(engine.eviction, seed=engine.seed))


def _eviction(args: argparse.Namespace) -> EvictionConfig:
    """--hh-ratio below 1 or --kv-budget mean H2O unless --eviction names another; heavy + recent ratios add up."""
    typed = given(EvictionConfig, args)
    defaults: dict[str, Any] = {}
    if args.compression_ratio is not None:
        _exclusive("--compression-ratio", "--hh-ratio", "ratio" in typed)
        defaults["ratio"] = 1 - args.compression_ratio
    if args.heavy_ratio is not None:
        _exclusive("--heavy-ratio", "--hh-ratio", "ratio" in typed or args.compression_ratio is not None)
        if "recent_ratio" not in typed:
            raise UsageError(
                "--heavy-ratio is given without --recent-ratio", "needed both", "or --hh-ratio for their sum"
            )
        defaults["ratio"] = args.heavy_ratio + args.recent_ratio
    ratio = getattr(args, "hh_ratio", defaults.get("ratio", 1.0))
    if "name" not in typed and ("budget" in typed or ratio != 1.0):
        defaults["name"] = "h2o"
    return from_namespace(EvictionConfig, args, defaults=defaults)


def _exclusive(flag: str, other: str, given_too: bool) -> None:
    if given_too:
        raise UsageError(f"{flag} and {other} are both given", "needed one of them")


def _policy(args: argparse.Namespace) -> OffloadPolicy | dict[str, Any] | str:
    """What the user fixed: a whole policy from a file, or the fields whose flags were typed; the rest is chosen."""
    typed = given(OffloadPolicy, args)
    fixed: dict[str, Any] = {name: getattr(from_namespace(OffloadPolicy, args), name) for name in typed}
    if args.percent is not None:
        clash = typed & {"weights", "cache", "hidden"}
        _exclusive("--percent", f"--{next(iter(clash), 'weights')}-placement", bool(clash))
        placed = OffloadPolicy.from_percent(args.percent)
        fixed.update(weights=placed.weights, cache=placed.cache, hidden=placed.hidden)
    if args.policy == "auto":
        return fixed or "auto"
    try:
        whole = OffloadPolicy.from_json(json.loads(Path(args.policy).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--policy {args.policy} cannot be read: {error}", "needed a JSON file, or auto") from None
    return replace(whole, **fixed)
