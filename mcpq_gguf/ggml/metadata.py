"""GGUF metadata values: a Python value with the GGUF type it is written as.

The binary layout is that of ggml's docs/gguf.md, version 3: a uint32 type, then the value; strings are a uint64 length
and UTF-8 bytes; arrays are a uint32 element type, a uint64 count and the elements.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from gguf import GGUFValueType as T

_SCALARS = {
    T.UINT8: "<B", T.INT8: "<b", T.UINT16: "<H", T.INT16: "<h", T.UINT32: "<I", T.INT32: "<i",
    T.FLOAT32: "<f", T.BOOL: "<?", T.UINT64: "<Q", T.INT64: "<q", T.FLOAT64: "<d",
}

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Value:
    """One metadata value. An array has its elements' type in `element` and a tuple in `value`."""

    type: T
    value: Scalar | tuple[Scalar, ...]
    element: T | None = None

    def encode(self) -> bytes:
        """The value as GGUF bytes, its type first."""
        head = struct.pack("<I", self.type)
        if self.type != T.ARRAY:
            return head + _encode(self.type, self.value)  # type: ignore[arg-type]
        assert self.element is not None
        assert isinstance(self.value, tuple)
        head += struct.pack("<IQ", self.element, len(self.value))
        return head + b"".join(_encode(self.element, v) for v in self.value)


Metadata = dict[str, Value]


def _encode(kind: T, value: Scalar) -> bytes:
    if kind == T.STRING:
        raw = str(value).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(raw)) + raw
    return struct.pack(_SCALARS[kind], value)


def encode_string(text: str) -> bytes:
    """A GGUF string: uint64 length, UTF-8 bytes."""
    return _encode(T.STRING, text)


def u32(value: int) -> Value:
    """An unsigned 32-bit integer: counts, sizes, ids."""
    return Value(T.UINT32, value)


def f32(value: float) -> Value:
    """A 32-bit float."""
    return Value(T.FLOAT32, value)


def boolean(value: bool) -> Value:
    """A truth value."""
    return Value(T.BOOL, value)


def string(value: str) -> Value:
    """A UTF-8 string."""
    return Value(T.STRING, value)


def array(element: T, values: Iterable[Scalar]) -> Value:
    """An array whose elements all have the type `element`."""
    return Value(T.ARRAY, tuple(values), element)
