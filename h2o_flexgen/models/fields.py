"""Reading the fields of a config.json, which is not to be trusted. Every problem is a ModelError naming the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from h2o_flexgen.config.model.arch import Activation
from h2o_flexgen.config.model.tensors import DTYPES
from h2o_flexgen.errors import ModelError
from h2o_flexgen.registry import suggestion

T = TypeVar("T")

ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""The activations by the names that transformers has for them."""

_LARGEST = 10**15
"""No size in a config is larger, so that what is computed from two of them is finite."""

_DTYPE_WORDS = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
"""Other words for dtypes: torch's, and people's."""

_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class ConfigReader:
    """Typed access to `config`, with the model's `name` in every error. A null counts as absent.

    `path` goes before the keys in errors: `rope_parameters.` for an object inside the config.
    """

    where = " in config.json"

    def __init__(self, config: Mapping[str, Any], name: str, path: str = "") -> None:
        self._config, self.name, self._path = config, name, path

    def __contains__(self, key: str) -> bool:
        return self._config.get(key) is not None

    def values(self) -> dict[str, Any]:
        """The fields that are there and not null."""
        return {key: value for key, value in self._config.items() if value is not None}

    def section(self, key: str) -> ConfigReader:
        """The object inside the config that `key` holds; an empty one where it is absent."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return ConfigReader(value, self.name, f"{self._path}{shown(key)}.")

    def filled(self, **defaults: Any) -> ConfigReader:
        """The same with `defaults` for the keys that have no value."""
        return ConfigReader({**defaults, **self.values()}, self.name, self._path)

    def without_zeros(self, *keys: str) -> ConfigReader:
        """The same where a 0 under one of `keys` counts as absent."""
        kept = {key: value for key, value in self._config.items() if value or key not in keys}
        return ConfigReader(kept, self.name, self._path)

    def refuse(self, keys: Iterable[str]) -> None:
        """ModelError for the first of `keys` that asks for something: that is neither null, false, 0 nor empty."""
        for key in keys:
            if self._config.get(key):
                raise self.error(key, "a model without it: it is not supported")

    def replaced(self, **values: Any) -> ConfigReader:
        return ConfigReader({**self._config, **values}, self.name, self._path)

    def others(self, keys: Iterable[str]) -> list[str]:
        """The keys outside of `keys` that ask for something."""
        known = set(keys)
        return [key for key, value in self._config.items() if value and key not in known]

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, at least 1; without a default the key has to be there."""
        value = _as_int(self._value(key, default))
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
            raise self._error(key, value, f"a whole number, at least 1 and at most {_LARGEST:.0e}")
        return value

    def whole_or_null(self, key: str, default: int | None) -> int | None:
        """A whole number, at least 1, or None for a null: here a null is not the default."""
        return (default if key not in self._config else None) if key not in self else self.whole(key)

    def count(self, key: str, default: int = 0) -> int:
        """A whole number, at least 0."""
        value = _as_int(self._value(key, default))
        return value if value == 0 and type(value) is int else self.whole(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; without a default the key has to be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise self._error(key, value, f"a number above 0, at most {_LARGEST:.0e}")
        return float(value)

    def number_or_null(self, key: str, default: float | None) -> float | None:
        """A number above 0, or None for a null: here a null is not the default."""
        return (default if key not in self._config else None) if key not in self else self.number(key)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        values = self._value(key, None)
        numbers = values if isinstance(values, list) else []
        sound = all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= _LARGEST for x in numbers)
        if len(numbers) != count or not sound:
            raise self._error(key, values, f"a list of {count} numbers above 0")
        return tuple(float(x) for x in numbers)

    def words(self, key: str, count: int, options: Mapping[str, T]) -> tuple[T, ...]:
        """The entries of `options` for the first `count` words of a list, which may describe more layers."""
        values = self._value(key, None)
        if not isinstance(values, list) or len(values) < count:
            raise self._error(key, values, f"a list of {count} of {', '.join(options)}")
        values = values[:count]
        for value in values:
            if not isinstance(value, str) or value not in options:
                raise self._error(key, value, f"one of {', '.join(options)} for each layer")
        return tuple(options[value] for value in values)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return value

    def choice(self, key: str, default: str, options: Mapping[str, T]) -> T:
        """The entry of `options` for the value."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in options:
            raise self._error(key, value, f"one of {', '.join(options)}", suggestion(str(value), options))
        return options[value]

    def token_ids(self, key: str, default: int | None) -> tuple[int, ...]:
        """One token id or a list of them; null counts as an empty list, and so does what no token of the vocabulary
        has: -1 is what Llama's first conversions wrote for none, and an id past the end is never chosen."""
        value = self._config.get(key, default)
        ids = [_as_int(each) for each in (value if isinstance(value, list) else [] if value is None else [value])]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in ids):
            raise self._error(key, value, "a token id or a list of them")
        size = _as_int(self._config.get("vocab_size"))
        end = size if isinstance(size, int) and size > 0 else _LARGEST
        return tuple(dict.fromkeys(each for each in ids if 0 <= each < end))

    def whole_list(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers, at least 0; empty where it is absent."""
        values = self._value(key, [])
        numbers = [_as_int(each) for each in values] if isinstance(values, list) else []
        sound = all(type(each) is int and each >= 0 for each in numbers)
        if not isinstance(values, list) or not sound:
            raise self._error(key, values, "a list of whole numbers")
        return tuple(numbers)

    def special_tokens(self, bos: int | None, eos: int | None, pad: int | None) -> dict[str, Any]:
        """The three of a ModelSpec by its names, from their defaults; without a BOS, EOS starts a sequence."""
        words = (("bos_token_id", bos), ("eos_token_id", eos), ("pad_token_id", pad))
        first, last, padding = (self.token_ids(key, usual) for key, usual in words)
        for key, ids in (("bos_token_id", first), ("pad_token_id", padding)):
            if len(ids) > 1:
                raise self._error(key, list(ids), "one token id")
        return {
            "bos_token_id": (first or last or (0,))[0],
            "eos_token_id": last[0] if len(last) == 1 else last,
            "pad_token_id": padding[0] if padding else None,
        }

    def dtype(self, default: str) -> str:
        """The dtype the checkpoint was saved in, by either of the two keys that transformers has used."""
        key = "dtype" if self._config.get("dtype") is not None else "torch_dtype"
        value = self._value(key, default)
        text = value.removeprefix("torch.") if isinstance(value, str) else ""
        text = _DTYPE_WORDS.get(text, text)
        if text not in DTYPES:
            raise self._error(key, value, f"one of {', '.join(DTYPES)}")
        return text

    def divide(self, key: str, value: int, by_key: str, by: int) -> int:
        """`value` / `by`, which must leave no rest."""
        if value % by:
            raise ModelError(f"{self.name}: {key} {value} is not a multiple of {by_key} {by}")
        return value // by

    def error(self, key: str, needed: str, change: str = "") -> ModelError:
        """That the value of `key` will not do."""
        return self._error(key, self._config.get(key), needed, change)

    def _value(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        return default if value is None else value

    def _error(self, key: str, value: object, needed: str, change: str = "") -> ModelError:
        text = repr(value) if len(repr(value)) <= _SHOWN else f"{repr(value)[:_SHOWN]}..."
        found = f"{self._path}{shown(key)} is {'missing' if value is None else text}{self.where}"
        return ModelError(f"{self.name}: {found}", f"needed {needed}", change)


def _as_int(value: Any) -> Any:
    """A whole number that was written as a float (4096.0) as the whole number; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def shown(key: str) -> str:
    """A key that a file chose, as an error may show it."""
    return key if key.isprintable() and len(key) <= _SHOWN else ascii(key)[:_SHOWN]
