"""Weights in memory: what a decoder hands on and an encoder takes, whatever format the bytes came from.

Every class is some rows of one logical weight, shape (rows, columns), and offers the same three things:
`take` (rows by index), `permute_columns` (whole blocks of columns by index) and `dequantize` (float32, the reference).
Arrays may be read-only views of a mapped file; `take` and `permute_columns` copy.
"""

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

# E2M1 values by code: sign, 2 exponent bits, 1 mantissa bit (OCP Microscaling Formats v1.0, section 5.3.3).
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)

T = TypeVar("T", bound="Codes")


class Codes(Protocol):
    """Rows of a weight: quantized codes with their scales, or plain numbers."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def take(self: T, rows: np.ndarray | slice) -> T: ...

    def permute_columns(self: T, blocks: np.ndarray, width: int) -> T: ...

    def dequantize(self) -> np.ndarray: ...


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 as BF16 bits (uint16), rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if nan.any():
        rounded = np.where(nan, (bits >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16)


def e4m3_table() -> np.ndarray:
    """float32 value of each E4M3 (FN) byte; 0x7F and 0xFF are NaN (OCP 8-bit floating point, section 5.2)."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[(code & 127) == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


E4M3 = e4m3_table()


def permute_blocks(array: np.ndarray, blocks: np.ndarray, width: int) -> np.ndarray:
    """Columns of a 2-D array in the order that `blocks` gives to runs of `width` columns."""
    rows, columns = array.shape
    return array.reshape(rows, columns // width, width)[:, blocks].reshape(rows, columns)


@dataclass(frozen=True)
class Dense:
    """Unquantized numbers as stored: `dtype` is the safetensors name (BF16 in uint16, F16, F32 or F64)."""

    values: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def take(self, rows: np.ndarray | slice) -> "Dense":
        return replace(self, values=self.values[rows])

    def permute_columns(self, blocks: np.ndarray, width: int) -> "Dense":
        return replace(self, values=permute_blocks(self.values, blocks, width))

    def dequantize(self) -> np.ndarray:
        """float32; exact for BF16, F16 and F32."""
        return bf16_to_f32(self.values) if self.dtype == "BF16" else self.values.astype(np.float32)


@dataclass(frozen=True)
class Fp4:
    """E2M1 codes with a scale byte for each `group` of columns.

    packed  uint8 (rows, columns / 2): even column in the low nibble, odd in the high one
    scales  uint8 (rows, columns / group): E4M3 bytes for NVFP4 (group 16), E8M0 bytes for MXFP4 (group 32)
    divisor float32 that divides every scale (NVFP4's weight_global_scale), None for MXFP4
    factor  float32 that multiplies every scale (ModelOpt's weight_scale_2); at most one of the two is there
    """

    packed: np.ndarray
    scales: np.ndarray
    group: int
    divisor: np.float32 | None = None
    factor: np.float32 | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    def take(self, rows: np.ndarray | slice) -> "Fp4":
        return replace(self, packed=self.packed[rows], scales=self.scales[rows])

    def permute_columns(self, blocks: np.ndarray, width: int) -> "Fp4":
        return replace(self, packed=permute_blocks(self.packed, blocks, width // 2),
                       scales=permute_blocks(self.scales, blocks, width // self.group))

    def codes(self) -> np.ndarray:
        """uint8 (rows, columns), each code in 0..15."""
        return np.stack([self.packed & 15, self.packed >> 4], -1).reshape(self.shape)

    def block_scales(self) -> np.ndarray:
        """float32 (rows, columns / group): the block scales alone, without the divisor."""
        if self.group == 16:
            scales: np.ndarray = E4M3[self.scales]
            return scales
        # E8M0: 2^(byte - 127); byte 255 is NaN (OCP Microscaling Formats v1.0, section 5.4.1).
        return np.where(self.scales == 255, np.nan, np.ldexp(np.float32(1), self.scales.astype(np.int32) - 127)
                        ).astype(np.float32)

    def dequantize(self) -> np.ndarray:
        """float32: code x (scale / divisor), compressed-tensors' order; or code x (scale x factor), ModelOpt's."""
        scale = self.block_scales()
        if self.divisor is not None:
            scale = scale / self.divisor
        if self.factor is not None:
            scale = scale * self.factor
        rows, columns = self.shape
        values: np.ndarray = E2M1[self.codes()].reshape(rows, -1, self.group) * scale[:, :, None]
        return values.reshape(rows, columns)
