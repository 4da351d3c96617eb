"""Runs a command as on a machine with less memory: a control group holds it there. Standard library only.

`python -m h2o_flexgen.baselines.memcap LIMIT [--cold PATH]... [--report FILE] -- COMMAND [ARGUMENT]...`
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

EXIT_REFUSED = 125
COMMAND = (sys.executable, "-P", __file__)
"""Runs this file wherever it is installed, whatever the current folder."""
_NAME = "scripts/memcap.sh" if __spec__ is None else f"python -m {__spec__.name}"
_USAGE = f"""usage: {_NAME} LIMIT [--cold PATH]... [--report FILE] -- COMMAND [ARGUMENT]...

Runs COMMAND with at most LIMIT of memory, page cache included: a control group holds it there, and the kernel ends it
where it insists on more. Swap does not count as memory: COMMAND gets none. File pages that another process has brought
into the page cache before count as that process's: shared libraries, and files that --cold does not name.

  LIMIT          512M, 6G, 6GiB: powers of 1024
  --cold PATH    a file or folder that leaves the page cache first, so that reading it really reads the disk (under a
                 virtual machine the host may still cache it: compare only what ran in the same minutes)
  --report FILE  what was seen, as JSON: limit_bytes, peak_bytes (page cache included), reclaims (times the limit was
                 met), oom_kills, exit_code; the same goes to stderr in any case

Needs root and the memory controller of control groups, v1 or v2. Exit code: COMMAND's, or {EXIT_REFUSED} with a reason
on stderr where the cap could not be set up. Processes that COMMAND leaves running are ended.
"""
_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}
_SYSTEM = Path("/sys/fs/cgroup")


def cap_command(limit: int | str, cold: Sequence[Path] = (), report: Path | None = None) -> list[str]:
    """The prefix of a command: at most `limit` bytes, none of the files in `cold` in the page cache before it."""
    if isinstance(limit, int):
        unit, shift = next((one for one in reversed(_UNITS.items()) if limit % (1 << one[1]) == 0), ("K", 10))
        limit = f"{limit >> shift}{unit}"
    command = [*COMMAND, limit, *(["--report", str(report)] if report else [])]
    for path in cold:
        command += ["--cold", str(path)]
    return [*command, "--"]


@cache
def cap_problem() -> str | None:
    """Why no process can be held to a limit here, in one line; None where one can."""
    tried = subprocess.run([*cap_command("64M"), "true"], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip() or f"memcap ended with {tried.returncode}, and said nothing"
    return said.splitlines()[-1].removeprefix("memcap: ")


def read_report(report: Path) -> dict[str, Any]:
    """The contents of --report; {} where it is empty."""
    try:
        seen: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return seen


class ControlGroup:
    """A control group of a version of its own, with its limit; removed, with all that runs in it, by `remove`."""

    def __init__(self, limit: int) -> None:
        self.version, root = _controller()
        self.path = root / f"h2o_flexgen_memcap_{os.getpid()}"
        try:
            self.path.mkdir()
        except OSError:
            _fail(f"cannot make a control group in {root}")
        limits = {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}
        if self.version == 2:
            limits = {"memory.max": limit, "memory.swap.max": 0}
        for position, (name, value) in enumerate(limits.items()):
            if position > 0 and not (self.path / name).exists():  # not every kernel counts swap
                continue
            try:
                (self.path / name).write_text(str(value), encoding="ascii")
            except OSError:
                self.remove()
                _fail(f"cannot write {value} to {self.path / name}")

    def join(self) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    def seen(self) -> dict[str, int | None]:
        """The peak in bytes, how often the limit was met, and how many processes the kernel ended."""
        if self.version == 2:
            return {
                "peak_bytes": self._number("memory.peak"),
                "reclaims": self._number("memory.events", "max"),
                "oom_kills": self._number("memory.events", "oom_kill") or 0,
            }
        met = [self._number(f"memory.{kind}failcnt") or 0 for kind in ("", "memsw.")]
        return {
            "peak_bytes": self._number("memory.max_usage_in_bytes"),
            "reclaims": sum(met),
            "oom_kills": self._number("memory.oom_control", "oom_kill") or 0,
        }

    def _number(self, file: str, name: str = "") -> int | None:
        """A file's number, or that after `name`; None where the kernel has none."""
        try:
            words = (self.path / file).read_text(encoding="ascii").split()
        except OSError:
            return None
        place = words.index(name) + 1 if name in words else None if name else 0
        return None if place is None else int(words[place])

    def remove(self) -> None:
        for _ in range(50):
            with suppress(OSError):
                for pid in (self.path / "cgroup.procs").read_text(encoding="ascii").split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                self.path.rmdir()
                return
            time.sleep(0.1)
        sys.stderr.write(f"memcap: {self.path} is still there\n")


def _controller() -> tuple[int, Path]:
    """The version of the memory controller, and the folder in which groups are made."""
    if (_SYSTEM / "memory/memory.limit_in_bytes").is_file():
        return 1, _SYSTEM / "memory"
    for root in (_SYSTEM, _SYSTEM / "unified"):
        handed_on = root / "cgroup.subtree_control"
        with suppress(OSError):
            if "memory" not in (root / "cgroup.controllers").read_text(encoding="ascii").split():
                continue
            if "memory" not in handed_on.read_text(encoding="ascii").split():
                handed_on.write_text("+memory", encoding="ascii")
            return 2, root
        if (root / "cgroup.controllers").is_file():
            _fail(f"the memory controller of {root} cannot be handed on to a group")
    _fail("no memory controller of control groups (v1 or v2) under /sys/fs/cgroup")


def _drop_cache(path: Path) -> None:
    """Has a file, or all files of a folder, written back, and out of the page cache."""
    if not path.exists():
        _fail(f"--cold {path}: not there")
    below = (Path(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names)
    for file in [path] if path.is_file() else below:
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run(command: Sequence[str], group: ControlGroup) -> int:
    """Runs a command in the group from its first instruction; its exit code as the shell has it."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _: object = None) -> None:
        if child is None:
            early.append(number)
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)

    for number in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        # A process group of its own, so that signals are passed on to all of it.
        child = subprocess.Popen(command, preexec_fn=group.join, process_group=0)
    except subprocess.SubprocessError:
        _fail(f"cannot put the command into {group.path}")
    except OSError as error:
        sys.stderr.write(f"memcap: {command[0]}: {error.strerror}\n")
        return 126 if isinstance(error, PermissionError) else 127
    for number in early:
        pass_on(number)
    code = child.wait()
    return 128 - code if code < 0 else code


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"memcap: {message}\n")
    raise SystemExit(EXIT_REFUSED)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMGT])(iB)?", text)
    if found is None:
        _fail(f"LIMIT is '{text}'; needed a number with a unit: 512M, 6G, 6GiB")
    return int(found[1]) << _UNITS[found[2]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"{message}; COMMAND comes after --")

    def format_help(self) -> str:
        return _USAGE


def main(argv: Sequence[str]) -> int:
    if not argv:
        sys.stderr.write(_USAGE)
        return EXIT_REFUSED
    split = argv.index("--") if "--" in argv else len(argv)
    parser = _Parser(allow_abbrev=False)
    parser.add_argument("limit")
    parser.add_argument("--cold", type=Path, action="append", default=[])
    parser.add_argument("--report", type=Path)
    args = parser.parse_args(argv[:split])
    limit, command = _bytes(args.limit), argv[split + 1 :]
    if not command:
        _fail("no command after --")
    if os.geteuid() != 0:
        _fail("needs root, to make a control group")
    for path in args.cold:
        _drop_cache(path)
    group = ControlGroup(limit)
    try:
        code = _run(command, group)
        seen = group.seen()
    finally:
        group.remove()
    peak = "unknown" if seen["peak_bytes"] is None else seen["peak_bytes"]
    met = f"limit met {seen['reclaims']} times, {seen['oom_kills']} killed"
    sys.stderr.write(f"memcap: peak {peak} of {limit} bytes, page cache included; {met}\n")
    if seen["oom_kills"]:
        sys.stderr.write(f"memcap: the command wanted more than {args.limit}, and the kernel ended it\n")
    if args.report is not None:
        args.report.write_text(json.dumps({"limit_bytes": limit, **seen, "exit_code": code}) + "\n", encoding="ascii")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
