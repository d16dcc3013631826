"""Reading config.json strictly: what is missing, or what llama.cpp cannot honour, is an error that names it."""

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedArchitecture


class Hparams:
    """The text model's settings: `text_config` where there is one, else the whole of config.json."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.where = "config.json text_config" if "text_config" in config else "config.json"
        self.values: Mapping[str, Any] = config.get("text_config") or config
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        self.rope = {"rope_theta": self.values.get("rope_theta"),
                     "partial_rotary_factor": self.values.get("partial_rotary_factor"), **rope}

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; `default` when the key is absent."""
        value = self.values.get(key, default)
        if type(value) is not int or not 0 < value < 1 << 40:
            raise UnsupportedArchitecture(f"{self.where}.{key}: expected a positive integer, found {value!r}")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.values.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < float("inf"):
            raise UnsupportedArchitecture(f"{self.where}.{key}: expected a number, found {value!r}")
        return float(value)

    def expect(self, key: str, *allowed: Any) -> None:
        """The setting must be absent or one of `allowed`: llama.cpp computes nothing else for this architecture."""
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            raise UnsupportedArchitecture(f"{self.where}.{key} is {value!r}; llama.cpp's graph for this architecture "
                                          f"computes {' or '.join(map(repr, allowed))} only")

    def unknown(self, known: frozenset[str]) -> list[str]:
        """Keys that the table does not know, for a note."""
        return sorted(k for k, v in self.values.items() if k not in known and v is not None)
