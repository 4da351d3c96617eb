"""Where answers go: JSON lines in a file that is never overwritten unasked, or text on stdout."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from h2o_flexgen.cli.program import print_error, write_result
from h2o_flexgen.cli.prompts import Messages, PromptLike
from h2o_flexgen.config.prompt import Prompt
from h2o_flexgen.errors import StorageError, UsageError
from h2o_flexgen.jobs.requests import line_of, output_json

if TYPE_CHECKING:
    from h2o_flexgen.engine.requests.sequence import RequestOutput


class AnswerFile:
    """Finished sequences as JSON lines, in the order in which they finish. Every line in the file is whole.

    A new file is written in place; with `overwrite` an existing one stays until the run is complete. When a run fails,
    the finished lines stay, and where they are is printed; a file without any is removed. A pipe, and the
    file that stdout goes to already, are written to as they are.
    """

    def __init__(self, path: Path, overwrite: bool) -> None:
        self.path = path
        self.count = self._size = 0
        # Through a link, so that the file is replaced and not the link.
        self._final = self._written = Path(os.path.realpath(path))
        self._regular, self._mode = True, 0o666
        try:
            self._fd = self._open(overwrite)
        except OSError as error:
            folder = self._final.parent
            gone = error.errno == errno.ENOENT and not os.path.isdir(folder)
            reason = f"the folder {folder} is not there" if gone else error.strerror
            change = "make the folder first" if gone else ""
            raise UsageError(f"--output {path}: {reason}", "needed a file that can be written", change) from None

    def _open(self, overwrite: bool) -> int:
        """A descriptor for the answers: of a new file, of one beside the file to replace, or of a pipe or device."""
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(self.path)  # as it was typed: /dev/fd/3 leads to pipes that have no path
            mode = status.st_mode
            if _is_stdout(status):
                self._regular = False
                return os.dup(1)  # shares the place in the file with what else is printed
            self._regular = stat.S_ISREG(mode)
            if not self._regular and not stat.S_ISDIR(mode):
                return os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            if overwrite and self._regular:
                if not os.access(self._final, os.W_OK):
                    raise PermissionError(errno.EACCES, "the file that is there is write-protected")
                self._written = self._final.with_name(f"{self._final.name}.{os.getpid()}.part")
                self._mode = stat.S_IMODE(mode)
        try:
            return os.open(self._written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
        except FileExistsError:
            if os.path.isdir(self._written):
                raise IsADirectoryError(errno.EISDIR, "this is a folder") from None
            raise UsageError(
                f"--output {self._written} exists",
                "nothing is overwritten unasked",
                "name another file, or add --overwrite",
            ) from None

    def write(self, answer: dict[str, Any]) -> None:
        """Writes one line. StorageError where the disk is full or failing; a file keeps no part of the line then."""
        line = memoryview(line_of(answer).encode())
        done = 0
        try:
            while done < len(line):
                done += os.write(self._fd, line[done:])
        except BaseException as error:
            if self._regular:
                os.ftruncate(self._fd, self._size)
                os.lseek(self._fd, self._size, os.SEEK_SET)
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                raise StorageError(
                    f"cannot write to --output {self.path}: {error.strerror}",
                    change="free some space, or name a file on another disk",
                ) from error
            raise
        self._size += done
        self.count += 1

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a pipe cannot be synced
            os.fsync(self._fd)
        os.close(self._fd)
        if kind is None or issubclass(kind, BrokenPipeError):
            if self._written != self._final:
                os.replace(self._written, self._final)
        elif self._regular and self.count == 0:
            self._written.unlink(missing_ok=True)
        else:
            word = "1 answer that was" if self.count == 1 else f"{self.count} answers that were"
            print_error(f"the {word} finished: {self._written}")


class AnswerPrinter:
    """Finished sequences on stdout: as text, or as JSON lines for `--output -`."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def write(self, answer: dict[str, Any]) -> None:
        """One answer. Prints nothing for random prompts and dummy weights."""
        if self._as_json:
            write_result(line_of(answer))
            return
        if not answer.keys() & {"prompt", "messages"} or answer.get("weights") == "dummy":
            return
        name = f"{answer['index']}" if answer["sample"] == 0 else f"{answer['index']}.{answer['sample']}"
        text = f"token ids {answer['token_ids']}" if answer["text"] is None else answer["text"].strip()
        asked = answer["prompt"] if "prompt" in answer else answer["messages"][-1]["content"]
        write_result(f"--- {name} ({answer['finish_reason']})\n{asked}\n>>> {text}\n")


def answer_json(output: RequestOutput, prompt: PromptLike | None, dummy: bool = False) -> dict[str, Any]:
    """One answer as it is written to a file. `prompt`: None for random tokens."""
    answer: dict[str, Any] = {"index": output.index, "sample": output.sample}
    if prompt is not None:
        given = prompt.content if isinstance(prompt, Prompt) else prompt
        answer["messages" if isinstance(prompt, Messages) else "prompt"] = given
    answer.update(output_json(output))
    if output.error is not None:
        answer["error"] = output.error
    if dummy:
        answer["weights"] = "dummy"
    return answer


def _is_stdout(status: os.stat_result) -> bool:
    try:
        return os.path.samestat(status, os.fstat(1))
    except OSError:  # stdout is closed
        return False
