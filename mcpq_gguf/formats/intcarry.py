"""From stored integers to a weight: what the values allow, and which GGML types carry them.

Q4_0, Q5_0 and Q8_0 hold value = code x d, Q4_1 and Q5_1 value = code x d + m, with d and m in FP16 for each 32 columns
(ggml-common.h). So it is the scales and zero points, not the format's name, that decide what is exact.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ..checkpoint import TensorRef
from ..errors import CheckpointError
from ..schemes import Scheme
from . import Carry, FormatOptions, Module, Rows, SourceWeight
from .bits import signed_limits
from .codes import bf16_to_f32
from .fp16 import NOTHING, Span, count_unfit, span, unfit
from .intcodes import BLOCK, KINDS, IntCodes, common_unit, whole_blocks

CHUNK = 1 << 18  # scales looked at together
_ONE = np.float32(1)
_CODES = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
_MINIMUM_BITS = {"Q4_1": (2, 4), "Q5_1": (5, 5)}


@dataclass(frozen=True)
class IntSource:
    """Stored integers of one weight, read by rows.

    codes   rows -> int8 or paired uint8, as IntCodes.stored
    scales  rows -> (rows, groups) in the bits of `scale`'s dtype
    zeros   rows -> int16 (rows, groups) in the domain of the codes, None when the format has none
    scale   the stored scales, for messages
    """

    module: Module
    format: str
    shape: tuple[int, int]
    scheme: Scheme
    bits: int
    group: int
    codes: Callable[[Rows], np.ndarray]
    scales: Callable[[Rows], np.ndarray]
    scale: TensorRef
    zeros: Callable[[Rows], np.ndarray] | None = None
    index: np.ndarray | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What a scan of the scales and zero points found.

    scales   of all scales; `mins` of the minimums m of Q4_1 or Q5_1, None without zero points
    zeros    smallest and largest zero point
    mixed    some block of 32 columns has more than one scale
    ragged   some block has more than one minimum
    units    each mixed block has a unit of which all its values are multiples within int8
    """

    scales: Span = NOTHING
    mins: Span | None = None
    zeros: tuple[int, int] = (0, 0)
    mixed: bool = False
    ragged: bool = False
    units: bool = True


def open_int(source: IntSource) -> SourceWeight:
    """The weight. Its scales are scanned once, by the first call of `carries` or `read`.

    Both raise CheckpointError for a NaN or infinite scale.
    """
    module = source.module

    @cache
    def facts() -> Facts:
        return scan(source)

    @cache
    def carries() -> tuple[Carry, ...]:
        return decide(facts(), source.bits, module.options)

    def read(rows: Rows) -> IntCodes:
        factors = {c.type: c.factor or _ONE for c in carries() if c.type in KINDS}
        zeros = source.zeros(rows) if source.zeros is not None and facts().zeros != (0, 0) else None
        return IntCodes(source.codes(rows), floats(source.scales(rows), source.scale.dtype), source.bits, source.group,
                        zeros, source.index, factors,
                        "refuse" if not facts().mixed else "unit" if facts().units else "round")

    return SourceWeight(module.name, source.format, source.shape, tuple(module.params.values()), read, carries,
                        scheme=source.scheme, notes=source.notes)


def floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Stored BF16, F16 or F32 scales as float32, exactly."""
    return bf16_to_f32(raw) if dtype == "BF16" else raw.astype(np.float32)


def scan(source: IntSource) -> Facts:
    """Look at all scales and zero points, CHUNK by CHUNK. Raises CheckpointError for a scale that is not finite."""
    dtype, (rows, columns) = source.scale.dtype, source.shape
    scattered = _scattered(source)
    facts = Facts(mins=None if source.zeros is None else NOTHING)
    largest = 0.0
    for part in _parts(rows, columns if scattered else columns // source.group):
        raw = source.scales(part)
        facts = replace(facts, scales=facts.scales + _count(raw, dtype, source.scale, part.start))
        zeros = None if source.zeros is None else source.zeros(part)
        if facts.mins is not None and zeros is not None and zeros.size:
            ends = min(facts.zeros[0], int(zeros.min())), max(facts.zeros[1], int(zeros.max()))
            mins = _minimums(source, raw, zeros)
            largest = max(largest, float(np.abs(mins).max(initial=0)))
            facts = replace(facts, zeros=ends, mins=facts.mins + Span(mins.size, unfit(mins)))
        if scattered:
            facts = _blocks(facts, source, floats(raw, dtype), zeros)
    # A factor is worth a closer look where scales lie out of range; minimums alone only fail by having too many bits.
    return _measure(source, facts) if facts.scales.unfit or largest > 65504 else facts


def _measure(source: IntSource, facts: Facts) -> Facts:
    scales, mins = NOTHING, NOTHING
    for part in _parts(source.shape[0], source.shape[1] // source.group):
        raw = source.scales(part)
        scales += span(floats(raw, source.scale.dtype))
        if source.zeros is not None:
            mins += span(_minimums(source, raw, source.zeros(part)))
    return replace(facts, scales=scales, mins=None if facts.mins is None else mins)


def _minimums(source: IntSource, raw: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """float64 (rows, groups): m of Q4_1 and Q5_1, exactly."""
    if source.bits > 5:
        return np.empty(0, np.float32)
    values: np.ndarray = floats(raw, source.scale.dtype).astype(np.float64)
    values *= signed_limits(source.bits)[0] - zeros
    return values


def _parts(rows: int, each: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(each, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _count(raw: np.ndarray, dtype: str, ref: TensorRef, first: int) -> Span:
    """The number of scales that are not FP16 numbers, after a check that all are finite."""
    lost = count_unfit(raw, dtype)
    if lost:
        values = floats(raw, dtype)
        finite = np.isfinite(values)
        if not finite.all():
            row, group = np.argwhere(~finite)[0]
            raise CheckpointError(f"{ref}: scale of row {first + row}, group {group} is {values[row, group]}; "
                                  "scales should be finite")
    return Span(raw.size, lost)


def _scattered(source: IntSource) -> bool:
    if source.shape[1] % BLOCK:
        return False
    if source.index is not None:
        return whole_blocks(source.index) is None
    return source.group % BLOCK != 0 and source.group < source.shape[1]


def _blocks(facts: Facts, source: IntSource, scales: np.ndarray, zeros: np.ndarray | None) -> Facts:
    """Facts with those of the blocks in which groups meet. What is known to fail is not looked at again."""
    if facts.mixed and not facts.units:
        return facts
    columns = source.shape[1]
    codes = IntCodes(np.broadcast_to(np.int8(0), (len(scales), columns)), scales, source.bits, source.group, zeros,
                     source.index)
    mixed = codes.per_block(scales) is None
    ragged = zeros is not None and codes.per_block(zeros) is None
    units = facts.units
    if mixed:
        largest = 1 << source.bits - (source.zeros is None)
        for start in range(0, len(scales), 64):
            some = codes.take(slice(start, start + 64))
            _, multiples = common_unit(some.per_column(some.scales).reshape(-1, columns // BLOCK, BLOCK))
            units = units and int(np.abs(multiples).max()) * largest <= 127
            if not units:
                break
    return replace(facts, mixed=facts.mixed or mixed, ragged=facts.ragged or ragged, units=units)


def decide(facts: Facts, bits: int, options: FormatOptions) -> tuple[Carry, ...]:
    """The types that hold the codes: exact ones first, the smaller before the larger, BF16 at the end."""
    low, high = signed_limits(bits)
    low, high = low - facts.zeros[1], high - facts.zeros[0]
    found: list[Carry] = []
    for kind in KINDS:
        if kind in _CODES:
            fits = _CODES[kind][0] <= low and high <= _CODES[kind][1] and (kind == "Q8_0" or not facts.mixed)
            spans = {"scales": facts.scales}
        else:
            least, most = _MINIMUM_BITS[kind]
            fits = facts.mins is not None and least <= bits <= most and not facts.mixed and not facts.ragged
            spans = {"scales": facts.scales, "minimums": facts.mins or NOTHING}
        if fits:
            found.append(_carry(kind, spans, facts))
    if facts.mins is not None and options.asymmetric == "q8_0":
        found = [c for c in found if c.type != "Q5_0"]
    if facts.mins is not None and options.asymmetric == "q4_1":
        found = [c for c in found if c.type in _MINIMUM_BITS] or found
    found.sort(key=lambda c: not c.exact)
    if found and found[0].exact and not found[0].why and facts.zeros != (0, 0):
        rounded = [c for c in found if c.type in _MINIMUM_BITS and not c.exact]
        if rounded:
            found[0] = replace(found[0], why=f"exact, where {rounded[0].type} would round minimums to FP16")
    why = "decoded" if found else f"codes less zero points run from {low} to {high}, beyond int8"
    return (*found, Carry("BF16", exact=False, why=why))


def _carry(kind: str, spans: dict[str, Span], facts: Facts) -> Carry:
    power, exact = sum(spans.values(), NOTHING).power()
    factor = np.float32(np.ldexp(_ONE, power)) if power else None
    if facts.mixed:
        exact = exact and facts.units
        return Carry(kind, exact, factor, "" if exact else "groups with different scales meet within blocks of 32")
    if exact:
        return Carry(kind, True, factor, f"scales divided by 2^{power}, the tensor's factor" if power else "")
    return Carry(kind, False, factor, " and ".join(
        f"{s.unfit:,} of {s.total:,} {what} are not FP16 numbers" for what, s in spans.items() if s.unfit))
