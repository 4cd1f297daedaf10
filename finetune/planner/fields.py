"""The fields of a config.json, checked one by one; all problems are reported together."""

from collections.abc import Mapping
from typing import Any

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class Fields:
    """Values of a configuration, with what transformers takes for those that are missing.

    A null means what a missing field means, but where ``optional_number`` says otherwise. A value that cannot be used
    adds a sentence to ``problems``, under its name, and something that can be computed with is returned, so that the
    rest is looked at too; whoever reads raises the problems before using what was read.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values = values
        self.defaults = defaults
        self.problems: dict[str, str] = {}

    def number(self, *names: str, least: int = 1) -> int:
        """A whole number of at least ``least``, under the first of the names that the configuration has."""
        name = next((name for name in names if self.values.get(name) is not None), None)
        value = self.values[name] if name else next((self.defaults[n] for n in names if n in self.defaults), None)
        if value is None:
            self.problems[names[0]] = f"config.json: {names[0]} is missing; use the model's published config.json."
            return least
        return self._checked(name or names[0], value, least)

    def optional_number(self, name: str) -> int | None:
        """A whole number above 0; a null stays None, and a missing field is transformers' default."""
        value = self.values.get(name, self.defaults.get(name))
        return None if value is None else self._checked(name, value, 1)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            value = self.defaults.get(name, False)
        if not isinstance(value, bool):
            self.problems[name] = f"config.json: {name} is {value!r}; it must be true or false."
        return value is True

    def text(self, name: str) -> str:
        """A word."""
        value = self.values.get(name)
        if value is None:
            value = self.defaults[name]
        if not isinstance(value, str):
            self.problems[name] = f"config.json: {name} is {value!r}; it must be a string."
        return str(value)

    def is_set(self, name: str) -> bool:
        """Whether there is a value, the configuration's own or transformers' for a missing field."""
        return self.values.get(name) is not None or self.defaults.get(name) is not None

    def names(self, name: str, length: int) -> list[str] | None:
        """A list with a word for each layer; None where it is missing."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(isinstance(each, str) for each in value):
            self.problems[name] = f"config.json: {name} must be a list of {length} strings, one per layer."
            return []
        return value

    def stored_dtype_bytes(self) -> int:
        """Bytes of a weight's element; 4, as transformers assumes, where no dtype is named."""
        name = self.values.get("dtype") or self.values.get("torch_dtype") or "float32"
        if isinstance(name, str) and name in DTYPE_BYTES:
            return DTYPE_BYTES[name]
        self.problems["dtype"] = f"config.json: dtype is {name!r}; it must be one of {', '.join(DTYPE_BYTES)}."
        return 4

    def published_bits(self) -> int | None:
        """Bits that bitsandbytes quantised the linear layers to; None for a model that is not quantised."""
        stored = self.values.get("quantization_config")
        if not stored:
            return None
        method = stored.get("quant_method", "an unknown method") if isinstance(stored, Mapping) else stored
        if isinstance(stored, Mapping) and (method == "bitsandbytes" or {"load_in_4bit", "load_in_8bit"} & set(stored)):
            return 4 if stored.get("load_in_4bit") else 8
        self.problems["quantization_config"] = (
            f"config.json: the model is published quantised with {method}, which is not supported; use its "
            "16-bit version."
        )
        return None

    def are_sound(self, *names: str) -> bool:
        """Whether nothing is wrong with fields that were read, so that they can be held against one another."""
        return self.problems.keys().isdisjoint(names)

    def _checked(self, name: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.problems[name] = f"config.json: {name} is {value!r}; it must be a whole number of at least {least}."
            return least
        return value
