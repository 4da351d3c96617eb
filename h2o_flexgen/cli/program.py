"""Exit codes, signals and messages: the frame around the work of every program."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from h2o_flexgen.config.engine import EngineConfig
from h2o_flexgen.config.flags import Switch
from h2o_flexgen.errors import (
    UNREACHABLE,
    H2OFlexGenError,
    PlanError,
    StorageError,
    UsageError,
    finding_model,
    is_out_of_memory,
    place_of,
    writing,
)
from h2o_flexgen.folders import ask_for

_SIGNALS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
"""How the program ends after a signal, in a word; its exit code is then 128 and the signal's number, as in a shell."""

_arrived: list[int] = []
"""The signal that has to end the program; raising it is not enough, a destructor may swallow what is raised in it."""


class Terminated(BaseException):
    """SIGTERM arrived: unwind as for Ctrl-C, so that threads stop and files go."""


@dataclass
class ProgramExit:
    """The exit code that a program ends with; `stopped`: that after a signal, None for 130 or 143."""

    code: int = 0
    stopped: int | None = None


@contextlib.contextmanager
def exit_on_errors() -> Iterator[ProgramExit]:
    """The frame around the work of every program: a user's mistake becomes one message on stderr, a signal a clean end.

    The exit code is in what it gives. A second signal ends the process at once. Notices of the library and Python
    warnings go to stderr as one line each. H2O_FLEXGEN_DEBUG=1 shows tracebacks of user errors too.
    """
    _require_streams()
    outcome = ProgramExit()
    with _signals_call(_raise), _notices():
        try:
            yield outcome
            write_result("")
        except SystemExit as stop:  # argparse's way to end after --help or a typo
            outcome.code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except H2OFlexGenError as error:
            outcome.code = _failed(error, outcome)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            tier = "--gpu-mem" if "CUDA" in str(error) else "--cpu-mem"
            advice = f"free some, or lower {tier} or --gpu-batch-size"
            outcome.code = _failed(PlanError("out of memory", change=advice), outcome)
        except KeyboardInterrupt:
            outcome.code = _stopped(signal.SIGINT, outcome)
        except Terminated:
            outcome.code = _stopped(signal.SIGTERM, outcome)
        except BrokenPipeError:
            # The reader of stdout went away (`| head`): not an error of ours, and nothing more can be said there.
            pass
        except OSError as error:
            outcome.code = _failed(_of_system(error), outcome)
        finally:
            _arrived.clear()
            _let_go_of_stdout()


def _of_system(error: OSError) -> H2OFlexGenError:
    """The system's refusal as an error for users; any other OSError is a fault of the program, and raised again."""
    if error.errno in UNREACHABLE:
        return UsageError(place_of(error), "needed a path that can be reached")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return StorageError(place_of(error), change="free some space, or set TMPDIR to a folder with room")
    if error.errno == errno.ENOENT and error.filename is None:  # as tempfile says it
        return StorageError(str(error.strerror), change="set TMPDIR to a folder that can be written")
    raise error


def program(work: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """The `main` of `work` on arguments (None: the typed ones), which gives the exit code; within `exit_on_errors`."""

    @functools.wraps(work)
    def main(argv: Sequence[str] | None = None) -> int:
        with exit_on_errors() as outcome:
            outcome.code = work(argv)
        return outcome.code

    return main


def stop_if_told() -> None:
    """Raises once more what a signal raised, if that was swallowed on its way. Called now and then by long work."""
    if _arrived:
        _raise(_arrived[0], None)


@contextlib.contextmanager
def leaving_at_once(held: contextlib.ExitStack | None = None) -> Iterator[None]:
    """Signals end the process there and then: for imports, which swallow exceptions. `held` is closed before."""

    def leave(signum: int, frame: FrameType | None) -> None:
        os.write(2, f"{_SIGNALS[signum]}\n".encode())
        if held is not None:
            with contextlib.suppress(OSError):
                held.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        os._exit(128 + signum)

    with _signals_call(leave):
        yield


def write_result(text: str) -> None:
    """Results on stdout, at once. BrokenPipeError where the reader has gone, StorageError where there is no room."""
    with writing("to stdout", "another file for it"), _above_bars():
        sys.stdout.write(text)
        sys.stdout.flush()


def add_json(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The flag that every program has for its last line: see `write_json`."""
    text = "one JSON object as the last line of stdout, or none (default: unless stdout is a terminal)"
    parser.add_argument("--json", "--no-json", action=Switch, metavar="BOOL", help=text)


def write_json(line: str, wanted: bool | None) -> None:
    """The JSON object of a program, the last line of its stdout. None: for scripts, but not for who reads a terminal.

    A stdout that is closed, or was redirected under Python's feet, is no terminal.
    """
    if not sys.stdout.isatty() if wanted is None else wanted:
        write_result(line + "\n")


def look_up_model(config: EngineConfig) -> None:
    """Finds the model that `config` names, fetches what the hub has of it, and checks it: ModelError for what cannot be
    used. Called before torch is imported, which takes seconds that a refusal need not cost."""
    from h2o_flexgen.checkpoint.hub import resolve_model
    from h2o_flexgen.checkpoint.opening import check_model

    stored = config.weights != "dummy"
    logging.disable(logging.WARNING)  # whoever opens the model says it
    try:
        with finding_model():
            check_model(resolve_model(**config.named, need_weights=stored), config.model_impl, stored)
    finally:
        logging.disable(logging.NOTSET)


def output_file(flag: str, text: str | None, *, keep: bool) -> Path | None:
    """The path typed for `flag`, found out now, not after hours, where it cannot be written.

    UsageError for a folder, a missing folder and a lack of permission, and with `keep` for a file that is there
    already: no file is overwritten unasked. A pipe or a device (/dev/stdout) may be there.
    """
    if text is None:
        return None
    path, needed = Path(text), "needed a file that can be written"
    ask_for(path)
    if path.is_dir():
        raise UsageError(f"{flag} {path}: this is a folder", needed)
    if not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: the folder {path.parent} is not there", needed, "make the folder first")
    if keep and path.is_file():
        raise UsageError(
            f"{flag} {path} exists", "nothing is overwritten unasked", "name another file, or add --overwrite"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: permission denied", needed)
    return path


def require_several(files: Mapping[str, str | Path | None]) -> None:
    """UsageError where two flags name one of the `files`: the second would replace the first."""
    seen = dict[str, str]()
    for flag, path in files.items():
        if path is None or str(path) == "-" or (os.path.exists(path) and not os.path.isfile(path)):
            continue
        real = os.path.realpath(path)
        if real in seen:
            raise UsageError(f"{seen[real]} and {flag} are both {path}", "needed two files")
        seen[real] = flag


def print_error(message: str) -> None:
    with contextlib.suppress(OSError), _above_bars():  # a stderr that is closed or full is no reason to fail
        sys.stderr.write(message + "\n")
        sys.stderr.flush()


def _above_bars() -> contextlib.AbstractContextManager[None]:
    """Takes progress bars off the terminal while something else is written to it."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)  # where it was not imported, there are no bars
    return contextlib.nullcontext() if tqdm is None else tqdm.external_write_mode(file=sys.stderr)


def _stopped(signum: int, outcome: ProgramExit) -> int:
    """Says why the program ends, and returns its exit code."""
    print_error(f"{_SIGNALS[signum]}: threads are stopped and temporary files removed")
    return 128 + signum if outcome.stopped is None else outcome.stopped


def _failed(error: H2OFlexGenError, outcome: ProgramExit) -> int:
    """Prints what was found, needed and can be changed, a line each, and returns the exit code."""
    if _arrived:  # whatever went wrong then, it was while the program was being ended
        return _stopped(_arrived[0], outcome)
    if os.environ.get("H2O_FLEXGEN_DEBUG") == "1":
        raise error
    found, *rest = [part.rstrip(".") for part in (error.found, error.needed, error.change) if part]
    print_error("\n  ".join([f"error: {found}", *rest]))
    return error.exit_code


@contextlib.contextmanager
def _signals_call(told: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `told`, wherever the main thread is; an ignored signal (nohup, `&`) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, told)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(signum: int, frame: FrameType | None) -> None:
    _arrived[:] = [signum]
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt if signum == signal.SIGINT else Terminated


class _Stderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_error(f"{record.levelname.lower()}: {record.getMessage()}")


@contextlib.contextmanager
def _notices() -> Iterator[None]:
    """The library's log messages (a run left behind, a lock that is waited for) and warns of, as lines on stderr."""
    logger, handler = logging.getLogger("h2o_flexgen"), _Stderr(logging.WARNING)
    logger.addHandler(handler)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print_error(f"warning: {message}")
        try:
            yield
        finally:
            logger.removeHandler(handler)


def _require_streams() -> None:
    """Streams that were closed (`>&-`) swallow what is written; text that a terminal cannot show is replaced."""
    for name, errors in (("stdout", "replace"), ("stderr", "backslashreplace")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open until the end
        reconfigure: Any = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            with contextlib.suppress(OSError):  # a stream that was redirected under Python's feet
                reconfigure(errors=errors)


def _let_go_of_stdout() -> None:
    """Drops the rest of an stdout that cannot be written: at exit the interpreter must not try again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
