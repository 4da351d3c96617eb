"""Exit codes and signals: what every program does around its work."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from h2o_flexgen.errors import H2OFlexGenError

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143


class Terminated(BaseException):
    """SIGTERM arrived: unwind as for Ctrl-C, so that threads stop and files go."""


def exit_on_errors(work: Callable[[], int]) -> int:
    """Runs `work`; a user's mistake becomes one message on stderr and its exit code, a signal a clean end.

    A second signal ends the process at once. H2O_FLEXGEN_DEBUG=1 shows tracebacks of user errors too.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return work()
    except H2OFlexGenError as error:
        if os.environ.get("H2O_FLEXGEN_DEBUG") == "1":
            raise
        print_error(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted: threads are stopped and temporary files removed")
        return EXIT_INTERRUPTED
    except Terminated:
        print_error("terminated: threads are stopped and temporary files removed")
        return EXIT_TERMINATED
    except BrokenPipeError:
        # The reader of stdout went away (`| head`): not an error of ours, and nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def print_error(message: str) -> None:
    """One message on stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise Terminated
