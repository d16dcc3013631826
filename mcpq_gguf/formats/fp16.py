"""Which numbers FP16 holds exactly, as they are or after division by one power of two.

A number is an odd integer of n bits times 2^low; its highest bit is 2^high. FP16 holds it if and only if n <= 11,
low >= -24 and high <= 15 (IEEE 754 binary16, subnormals included).
"""

from dataclasses import dataclass

import numpy as np

_BITS, _LOW, _HIGH, _NORMAL = 11, -24, 15, -14
_FAR = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """What is known of some numbers: how many there are, how many are not FP16 numbers, and of all but the zeros:

    low    the lowest bit of any
    high   the highest bit of any
    floor  the highest bit of the smallest
    width  the most bits that any has
    The four take a closer look; where nobody took it, width is 0.
    """

    total: int = 0
    unfit: int = 0
    low: int = _FAR
    high: int = -_FAR
    floor: int = _FAR
    width: int = 0

    def __add__(self, other: "Span") -> "Span":
        return Span(self.total + other.total, self.unfit + other.unfit, min(self.low, other.low),
                    max(self.high, other.high), min(self.floor, other.floor), max(self.width, other.width))

    @property
    def measured(self) -> bool:
        return self.width > 0

    def power(self) -> tuple[int, bool]:
        """k such that the numbers / 2^k are FP16 numbers, with True; else one at which they lose least, with False.

        Zero where it will do; else the nearest to zero that makes none of them subnormal, as some GPUs flush those.
        """
        if not self.unfit or not self.measured:
            return 0, not self.unfit
        low, high, normal = self.high - _HIGH, self.low - _LOW, self.floor - _NORMAL
        if self.width <= _BITS and low <= high:
            return _nearest(low, min(high, normal) if normal >= low else high), True
        low += 1  # rounding up must not make the largest infinite
        return _nearest(low, normal) if low <= normal else low, False


NOTHING = Span()


def _nearest(low: int, high: int) -> int:
    return min(max(0, low), high)


def count_unfit(raw: np.ndarray, dtype: str) -> int:
    """How many stored scales are not FP16 numbers; NaN and infinity count. `raw` is in the bits of BF16, F16 or F32."""
    if not raw.size:
        return 0
    if dtype == "F32":
        return unfit(raw)
    magnitude = (raw if dtype == "BF16" else raw.view(np.uint16)) & np.uint16(0x7FFF)
    if dtype == "F16":
        return int(np.count_nonzero(magnitude >= 0x7C00))
    # BF16 has 8 bits, so that all from 2^-17 to 65280 are FP16 numbers; zero wraps round to the largest.
    if magnitude.max() <= 0x477F and (magnitude - np.uint16(1)).min() >= 0x36FF:
        return 0
    return unfit((raw.astype(np.uint32) << 16).view(np.float32))


def span(values: np.ndarray) -> Span:
    """The span of finite float32 or float64 numbers."""
    x = values.astype(np.float64).reshape(-1)
    x = x[x != 0]
    if not x.size:
        return Span(values.size)
    mantissa, exponent = np.frexp(x)
    whole = np.ldexp(np.abs(mantissa), 53).astype(np.int64)
    lowest = np.frexp((whole & -whole).astype(np.float64))[1] - 1  # position of the lowest bit that is set
    lows = exponent - 53 + lowest
    return Span(values.size, unfit(values), int(lows.min()), int(exponent.max()) - 1, int(exponent.min()) - 1,
                int((exponent - lows).max()))


def unfit(values: np.ndarray) -> int:
    """How many float32 or float64 numbers are not FP16 numbers; NaN and infinity count."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(np.float16).astype(values.dtype)
    return int(np.count_nonzero((rounded != values) | ~np.isfinite(values)))
