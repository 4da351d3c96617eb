"""The errors a user can meet. Each says what was found, what was needed, what to change, and carries an exit code."""

from __future__ import annotations


class H2OFlexGenError(Exception):
    """Base of every error raised on purpose.

    `found`, `needed` and `change` are sentences without a final full stop; empty parts are left out of the message.
    """

    exit_code = 1

    def __init__(self, found: str, needed: str = "", change: str = "") -> None:
        self.found, self.needed, self.change = found, needed, change
        super().__init__(". ".join(part.rstrip(".") for part in (found, needed, change) if part))


class UsageError(H2OFlexGenError, ValueError):
    """Flags, arguments or prompts that make no sense."""

    exit_code = 2


class ModelError(H2OFlexGenError):
    """A model, its config.json or its checkpoint cannot be used."""

    exit_code = 4


class PlanError(H2OFlexGenError):
    """A plan does not fit its memory caps."""

    exit_code = 5


class StorageError(H2OFlexGenError, OSError):
    """The file system is full or failing."""

    exit_code = 6

    def __str__(self) -> str:
        return str(self.args[0])
