"""The flags of `serve`: where it listens and keeps things, and the engine's as `batch` has them. No torch."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from h2o_flexgen.cli.arguments import add_engine
from h2o_flexgen.cli.batch.arguments import BatchArguments, job_arguments
from h2o_flexgen.cli.parser import Parser, misspelt
from h2o_flexgen.config.flags import called
from h2o_flexgen.errors import UsageError
from h2o_flexgen.folders import expanded
from h2o_flexgen.units import parse_bytes

NEEDED = ("starlette", "uvicorn", "python_multipart")
MOST_BYTES = "8GiB"


@dataclass(frozen=True)
class ServeArguments:
    """All of a command line, checked. `jobs`: what a batch is run with, but for its files; `max_file`: bytes that an
    uploaded file may have."""

    jobs: BatchArguments
    host: str
    port: int
    data_dir: Path
    api_key: str | None = field(repr=False)
    max_file: int

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call the model by: first its last path component, then as typed."""
        typed = self.jobs.engine.model
        last = typed.rstrip("/").rpartition("/")[2] or typed
        return tuple(dict.fromkeys((last, typed, *self.jobs.served_model_name)))


def parse_serve(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> ServeArguments:
    """Parses `argv` and what `environ` adds. Exits (2) where argparse objects, UsageError where the configs do."""
    parser = _serve_parser()
    with parser.parsed(argv, environ) as args:
        key = (args.api_key or "").strip() or None
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UsageError("the key is not of printable ASCII characters", "needed what a header can carry")
        if key is None and not _is_loopback(args.host):
            raise UsageError(
                f"--host {args.host} can be reached from other machines, and there is no key",
                "needed a key for all who ask",
                f"set {_KEY}, or leave --host at 127.0.0.1",
            )
        return ServeArguments(
            jobs=job_arguments(args, misspelt(parser, environ)),
            host=args.host,
            port=args.port,
            data_dir=expanded(args.data_dir),
            api_key=key,
            max_file=parse_bytes(args.max_file),
        )


def require_libraries() -> None:
    """UsageError where what the service is made of is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        found = f"serve needs {', '.join(missing)}, which is not installed"
        raise UsageError(found, change="pip install 'h2o_flexgen[serve]'")


_KEY = "H2O_FLEXGEN_API_KEY"


def _is_loopback(host: str) -> bool:
    """Whether all addresses of `host` are this machine's own, for itself. UsageError where it has none."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror}", "needed an address of this machine") from None
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r}: needed a port from 0, for any that is free, to 65535")
    return int(text)


def _serve_parser() -> Parser:
    """The parser of `python -m h2o_flexgen.serve`."""
    parser = Parser(
        prog=called("serve"),
        usage="%(prog)s [--model MODEL] [--port PORT] [--data-dir DIR] [--hh-ratio R] [flags]",
        description="Answers OpenAI's files, batches, chat completions and completions. What was in progress when it "
        "was stopped or killed goes on when it is started again.",
        epilog="Every flag can be set in the environment, as for run. Exit codes: 0 stopped by SIGINT or SIGTERM, 2 "
        "flags, 4 model or checkpoint, 6 disk, 7 another process serves this folder.",
    )
    work = parser.add_argument_group("work")
    work.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: 127.0.0.1)")
    work.add_argument("--port", type=_port, default=8000, metavar="PORT", help="0: any that is free (default: 8000)")
    work.add_argument(
        "--data-dir",
        default="~/.local/share/h2o_flexgen/serve",
        metavar="DIR",
        help="where files and batches are kept (default: %(default)s)",
    )
    work.add_argument("--api-key", metavar="KEY", help=f"what clients must send; who lists processes sees it: {_KEY}")
    work.add_argument(
        "--max-file", default=MOST_BYTES, metavar="SIZE", help=f"of a file that is uploaded (default: {MOST_BYTES})"
    )
    work.add_argument(
        "--served-model-name", nargs="+", default=(), metavar="NAME", help="requests may call the model by these, too"
    )
    work.add_argument("--at-risk", type=float, metavar="SHARE", help="as for batch")
    work.add_argument("--quiet", "-q", action="store_true", help="no notes on stderr")
    add_engine(parser)
    return parser
