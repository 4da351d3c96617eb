"""Reading the fields of a config.json, which anybody may have written. Every problem is a ModelError naming the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from h2o_flexgen.config.tensors import DTYPES
from h2o_flexgen.errors import ModelError
from h2o_flexgen.registry import suggestion

T = TypeVar("T")


class ConfigReader:
    """Typed access to `config`, with the model's `name` in every error. A null counts as absent."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name

    def whole(self, key: str, default: int) -> int:
        """A whole number, at least 1."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(key, value, "a whole number, at least 1")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def choice(self, key: str, default: str, options: Mapping[str, T]) -> T:
        """What `options` has for the value."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in options:
            raise self._error(key, value, f"one of {', '.join(options)}", suggestion(str(value), options))
        return options[value]

    def token_id(self, key: str, default: int) -> int | None:
        """A token id, or None where the config says null."""
        ids = self.token_ids(key, default)
        if len(ids) > 1:
            raise self._error(key, list(ids), "one token id")
        return ids[0] if ids else None

    def token_ids(self, key: str, default: int) -> tuple[int, ...]:
        """One token id or a list of them; null is none."""
        value = self._config.get(key, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
            raise self._error(key, value, "a token id or a list of them")
        return tuple(ids)

    def dtype(self, default: str) -> str:
        """The dtype the checkpoint was saved in, by either of the two keys that transformers has used."""
        key = "dtype" if self._config.get("dtype") is not None else "torch_dtype"
        value = self._value(key, default)
        text = value.removeprefix("torch.") if isinstance(value, str) else ""
        if text not in DTYPES:
            raise self._error(key, value, f"one of {', '.join(DTYPES)}")
        return text

    def divide(self, key: str, value: int, by_key: str, by: int) -> int:
        """`value` / `by`, which must leave no rest."""
        if value % by:
            raise ModelError(f"{self._name}: {key} {value} is no multiple of {by_key} {by}")
        return value // by

    def _value(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        return default if value is None else value

    def _error(self, key: str, value: object, needed: str, change: str = "") -> ModelError:
        return ModelError(f"{self._name}: {key} is {value!r} in config.json", f"needed {needed}", change)
