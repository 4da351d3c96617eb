"""Where answers go: JSON lines in a file that is never overwritten unasked, or text on stdout."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from h2o_flexgen.engine.sequence import RequestOutput
from h2o_flexgen.errors import StorageError, UsageError


class AnswerFile:
    """Finished sequences as JSON lines, in the order in which they finish; every line is whole and flushed.

    A new file is written in place. With `overwrite` an existing one is replaced only when the run is complete.
    """

    def __init__(self, path: Path, overwrite: bool) -> None:
        self._path = path
        self._target = path.with_name(f".{path.name}.{os.getpid()}.part") if overwrite and path.exists() else path
        try:
            self._file: IO[str] = self._target.open("x", encoding="utf-8")
        except FileExistsError:
            raise UsageError(
                f"--output {path} exists", "nothing is overwritten unasked", "name another file, or add --overwrite"
            ) from None
        except OSError as error:
            raise UsageError(f"--output {path}: {error.strerror}", "needed a file that can be written") from None

    def write(self, answer: dict[str, Any]) -> None:
        """One line. StorageError where the disk is full or failing; the lines before stay valid."""
        try:
            self._file.write(json.dumps(answer, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            full = " (the file system is full)" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise StorageError(
                f"cannot write {self._path}: {error.strerror}{full}", "finished lines before stay valid"
            ) from None

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._target != self._path:
            if kind is None:
                os.replace(self._target, self._path)
            else:
                self._target.unlink(missing_ok=True)


def answer_json(output: RequestOutput, prompt: str | None) -> dict[str, Any]:
    """One answer as it is written to a file."""
    answer: dict[str, Any] = {"index": output.index, "sample": output.sample}
    if prompt is not None:
        answer["prompt"] = prompt
    answer.update(text=output.text, token_ids=output.token_ids, finish_reason=output.finish_reason)
    if output.logprobs is not None:
        answer["logprobs"] = output.logprobs
    if output.error is not None:
        answer["error"] = output.error
    return answer


def print_answer(output: RequestOutput, prompt: str | None) -> None:
    """One answer as a person reads it."""
    if output.text is None or prompt is None:
        return
    name = f"{output.index}" if output.sample == 0 else f"{output.index}.{output.sample}"
    sys.stdout.write(f"--- {name} ({output.finish_reason})\n{prompt}\n>>> {output.text.strip()}\n")
