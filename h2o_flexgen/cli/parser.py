"""The flags of `run`: those of the configs, those of FlexGen that its users expect, and what is refused by name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from h2o_flexgen.cli.environment import environment_arguments
from h2o_flexgen.cli.program import add_json
from h2o_flexgen.config.engine import PLANNED_FIELDS, EngineConfig
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.flags import Parser, add_arguments, called
from h2o_flexgen.config.offload import OffloadPolicy
from h2o_flexgen.config.planning import PlanningConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.errors import UsageError

_SHARES = "layers are placed by shares: --percent 50 50 100 0 100 0; leave it out and they are placed for you"
_QUANTISED = "4-bit weights and caches are not built yet; --hh-ratio 0.2 makes the KV cache a fifth"
REFUSED = {
    "--hh-long-seq": "it left out OPT's position embedding, which is another model; longer prompts are refused instead",
    "--cut-gen-len": "it projected decode time from fewer tokens; every figure here is measured",
    "--debug-mode": "a breakdown comes with every run's report, and --trace FILE writes a timeline",
    "--compress-weight": _QUANTISED,
    "--compress-cache": _QUANTISED,
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


class RunParser(Parser):
    """Knows where a bare word of the command line belongs, and what did not come from there.

    `origins` holds the variables of the environment that were read, as one would set them, and the flag of each.
    """

    origins: Mapping[str, str] = MappingProxyType({})

    def parse_with(self, argv: Sequence[str], environ: Mapping[str, str]) -> argparse.Namespace:
        """What `argv` says, and what `environ` adds. Exits (2) where argparse objects."""
        added = environment_arguments(self, argv, environ)
        self.origins = {f"{name}={environ[name]}": words[0].partition("=")[0] for name, words in added.items() if words}
        return self.parse_args([*(word for words in added.values() for word in words), *argv])

    def origin(self, message: str) -> str:
        """Where the flags that `message` is about were set, if that was in the environment."""
        set_there = [setting for setting, flag in self.origins.items() if self._is_about(message, flag)]
        return f"from the environment: {', '.join(set_there)}" if set_there else ""

    def _is_about(self, message: str, flag: str) -> bool:
        """Whether `message` names the flag, by any of its spellings."""
        names = "|".join(map(re.escape, self._option_string_actions[flag].option_strings))
        return re.search(rf"(?<![\w-])(?:{names})\b(?!-)", message) is not None

    def told(self, error: UsageError) -> UsageError:
        """With where the flag was set, if that was in the environment."""
        told = super().told(error)
        origin = self.origin(str(told))
        change = ". ".join(part for part in (told.change, origin) if part)
        return UsageError(told.found, told.needed, change)

    def error(self, message: str) -> NoReturn:
        word = message.removeprefix("unrecognized arguments: ")
        if word != message and not word.startswith("-"):
            message += "\n  a prompt is given with --prompt TEXT"
        origin = self.origin(message)
        super().error(f"{message}\n  {origin}" if origin else message)


def run_parser() -> RunParser:
    """The parser of `python -m h2o_flexgen.run`."""
    parser = RunParser(
        prog=called("run"),
        usage="%(prog)s [--model MODEL] [--prompt TEXT | --prompts FILE] [--hh-ratio R] [flags]",
        description="Completes prompts with a model that need not fit in memory, its KV cache held at a budget.",
        epilog="Every flag can be set in the environment: --cpu-mem 8GiB is H2O_FLEXGEN_CPU_MEM=8GiB. "
        "Exit codes: 0 all well, 2 flags or prompts, 3 some sequences failed, 4 model or checkpoint, 5 does not fit, "
        "6 disk, 130 or 143 interrupted.",
    )
    _add_work(parser)
    add_arguments(parser, EvictionConfig, title="which tokens stay in the KV cache")
    add_arguments(parser, EngineConfig, title="model and machine")
    planned = dict.fromkeys(PLANNED_FIELDS)
    add_arguments(parser, OffloadPolicy, title="where things live, and the block of sequences", defaults=planned)
    add_arguments(parser, PlanningConfig, title="what plans and predictions are made from")
    add_arguments(parser, SamplingParams, title="how tokens are chosen, and when a sequence ends")
    _add_known(parser)
    return parser


def _add_work(parser: argparse.ArgumentParser) -> None:
    """Prompts in, answers and figures out."""
    work = parser.add_argument_group("work")
    work.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be given several times"
    )
    work.add_argument(
        "--prompts",
        metavar="FILE",
        help='text, a prompt per line, or .jsonl with {"prompt": "..." or [token ids]} or {"messages": [...]} '
        "per line; - for stdin",
    )
    work.add_argument(
        "--chat", action="store_true", help="each prompt is what a user says, for the model's chat template"
    )
    work.add_argument("--system", metavar="TEXT", help="with --chat: a system message before each prompt")
    work.add_argument(
        "--prompt-len", "--input-len", "-p", type=_prompt_len, metavar="N", help="random prompts of N tokens instead"
    )
    work.add_argument(
        "--num-prompts",
        type=at_least_one,
        metavar="N",
        help="how many random prompts (default: one block), or the first N of the prompts given",
    )
    work.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends a sequence; may be given several times"
    )
    work.add_argument(
        "--output",
        "--output-file",
        "-o",
        metavar="FILE",
        help="answers as JSONL; - for stdout (default: text there)",
    )
    work.add_argument("--overwrite", action="store_true", help="replace an existing --output or --trace FILE")
    add_json(work)
    work.add_argument("--log-file", metavar="FILE", help="append figures in FlexGen's five-line log format")
    work.add_argument("--no-log", action="store_true", help="no log file, whatever --log-file says")
    work.add_argument("--trace", metavar="FILE", help="a timeline for ui.perfetto.dev")
    work.add_argument("--quiet", "-q", action="store_true", help="no progress, no report")


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
    """FlexGen's and H2O's ways to say where things live and which tokens stay: see `arguments`."""
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


class _Refuse(argparse.Action):
    """Notes the flag, unless it was typed only to be switched off."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if not is_false(values):
            namespace.refused = [*(getattr(namespace, "refused", None) or []), option]


def is_false(value: str | None) -> bool:
    """Whether a switch was typed with a word for no."""
    return value is not None and value.lower() in ("0", "false", "no", "off")


def at_least_one(text: str) -> int:
    """A whole number that counts something, as argparse wants its types."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: needed a whole number of at least 1")
    return int(text)


def _prompt_len(text: str) -> int:
    if any(character.isalpha() for character in text):
        raise argparse.ArgumentTypeError(f"{text!r}: needed a number of tokens; a prompt is given with --prompt TEXT")
    return at_least_one(text)
