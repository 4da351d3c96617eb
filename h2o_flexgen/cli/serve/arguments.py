"""The flags of `serve`: where it listens and keeps things, and the engine's as `batch` has them. No torch."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from h2o_flexgen.cli.arguments import add_engine
from h2o_flexgen.cli.batch.arguments import BatchArguments, job_arguments
from h2o_flexgen.cli.parser import Parser
from h2o_flexgen.config.flags import add_arguments, called, given, option
from h2o_flexgen.errors import UsageError
from h2o_flexgen.folders import expanded, last_part
from h2o_flexgen.units import parse_bytes

NEEDED = ("starlette", "uvicorn", "python_multipart")
MOST_BYTES = "8GiB"
_DATA = "~/.local/share/h2o_flexgen/serve"


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r}: needed a port from 0, for any that is free, to 65535")
    return int(text)


_KEY = "H2O_FLEXGEN_API_KEY"
_OF_BATCH = {"served_model_name", "sample", "at_risk", "quiet"}
"""Fields of BatchArguments whose flags there are here, too."""


@dataclass(frozen=True)
class ServeArguments:
    """The whole command line, checked. `jobs`: the arguments of batches of all models, but for their files."""

    jobs: BatchArguments
    api_key: str | None = field(repr=False)
    host: str = option("127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    port: int = option(8000, parse=_port, metavar="PORT", help="port to listen on; 0: any free one (default: 8000)")
    data_dir: Path = option(
        lambda: expanded(_DATA), parse=expanded, metavar="DIR", help=f"folder for files and batches (default: {_DATA})"
    )
    max_file: int = option(
        parse_bytes(MOST_BYTES),
        parse=parse_bytes,
        metavar="SIZE",
        help=f"largest file that may be uploaded (default: {MOST_BYTES})",
    )
    more_models: Sequence[str] = option(
        (),
        parse=str,
        nargs="+",
        action="extend",
        metavar="MODEL",
        help="other models for batches and requests; one is loaded at a time, when its turn comes",
    )
    queue: str = option(
        "arrival",
        choices=("arrival", "model"),
        help="order of batches: by arrival, or batches of the loaded model first (default: arrival)",
    )

    @cached_property
    def models(self) -> dict[str, BatchArguments]:
        """The arguments of each model's batches, by its id: its path's last part. UsageError where two have one."""
        found = dict[str, BatchArguments]()
        for typed in (self.jobs.engine.model, *self.more_models):
            engine = replace(self.jobs.engine, model=typed, revision=None)
            jobs = replace(self.jobs, engine=engine, served_model_name=()) if found else self.jobs
            if found.setdefault(last_part(typed), jobs) is not jobs:
                raise _one_name(last_part(typed))
        return found

    @cached_property
    def called(self) -> dict[str, str]:
        """The ids of models by all that requests may call them, the ids first. UsageError where two have one name."""
        names = {name: name for name in self.models}
        for name, jobs in self.models.items():
            for other in (jobs.engine.model, *jobs.served_model_name):
                if names.setdefault(other, name) != name:
                    raise _one_name(other)
        return names


def parse_serve(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> ServeArguments:
    """Parses `argv` and what `environ` adds. Exits (2) where argparse objects, UsageError where the configs do."""
    with _serve_parser().parsed(argv, environ) as args:
        key = (args.api_key or "").strip() or None
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UsageError("the key is not of printable ASCII characters", "needed what a header can carry")
        made = ServeArguments(job_arguments(args), key, **given(ServeArguments, args))
        if key is None and not _is_loopback(made.host):
            raise UsageError(
                f"--host {made.host} can be reached from other machines, and there is no key",
                "needed a key for all who ask",
                f"set {_KEY}, or leave --host at 127.0.0.1",
            )
        return made


def require_libraries() -> None:
    """UsageError where what the service is made of is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        found = f"serve needs {', '.join(missing)}, which is not installed"
        raise UsageError(found, change="pip install 'h2o_flexgen[serve]'")


def _one_name(name: str) -> UsageError:
    return UsageError(f"two models are called {name}", "needed a name for each", "see --more-models")


def _is_loopback(host: str) -> bool:
    """Whether all addresses of `host` are this machine's own, for itself. UsageError where it has none."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror}", "needed an address of this machine") from None
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def _serve_parser() -> Parser:
    parser = Parser(
        prog=called("serve"),
        usage="%(prog)s [--model MODEL] [--port PORT] [--data-dir DIR] [--hh-ratio R] [flags]",
        description="Answers OpenAI's files, batches, chat completions and completions. Work in progress when it "
        "was stopped or killed goes on when it is started again.",
        epilog="Every flag can be set in the environment, as for run. Exit codes: 0 stopped by SIGINT or SIGTERM, 2 "
        "flags, 4 model or checkpoint, 6 disk, 7 another process serves this folder.",
    )
    work = add_arguments(parser, ServeArguments, title="work", bare=True)
    work.add_argument("--api-key", metavar="KEY", help=f"key of all clients; process lists show it, not {_KEY}")
    others = {item.name for item in fields(BatchArguments)} - _OF_BATCH
    add_arguments(parser, BatchArguments, title="batches and notes", exclude=others, bare=True)
    add_engine(parser)
    return parser
