"""pack-quantized: integers of 2 to 8 bits in int32 words, with a scale for each group, channel or tensor.

compressed-tensors/compressors/pack_quantized: `weight_packed` int32 (rows, words), code + 2^(bits - 1) along the
columns, in one of the two packings of `bits`; `weight_scale` BF16, F16 or F32; `weight_shape` (rows, columns);
`weight_zero_point` int32 (words, groups), packed likewise along the rows, or int8 (rows, groups) as older versions
wrote it; `weight_g_idx` int32 (columns,), the group of each column, or -1 for the usual order.
A value is (code - zero point) x scale (quantization/lifecycle/forward_helpers.py, `_dequantize`).
"""

from collections.abc import Mapping

import numpy as np

from ..checkpoint import TensorRef
from ..errors import CheckpointError, SchemeError, UnsupportedFormat
from ..schemes import QuantArgs
from . import Format, Module, Rows, SourceWeight, require_scheme
from .bits import is_dense, signed, unpack, word_count
from .fp8 import refuse_others
from .intcarry import IntSource, open_int
from .intcodes import BLOCK

FLOATS = ("BF16", "F16", "F32")
ACTIVATIONS = frozenset({"input_scale", "input_zero_point", "output_scale", "output_zero_point",
                         "input_global_scale", "output_global_scale"})
_SUFFIXES = frozenset({"weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"})


def _matches(params: Mapping[str, TensorRef]) -> bool:
    return "weight_packed" in params and params["weight_packed"].dtype == "I32"


def _open(module: Module) -> SourceWeight:
    refuse_others(module, _SUFFIXES | ACTIVATIONS)
    scheme = require_scheme(module, "packed integers", ("pack-quantized",))
    args = scheme.weights
    if args.type != "int" or not 2 <= args.num_bits <= 8:
        raise UnsupportedFormat(f"{module.name}: config group {scheme.group} says {args} for pack-quantized, expected "
                                "int with 2 to 8 bits")
    bits = args.num_bits
    packed = module.need("weight_packed", ("I32",))
    shape = _shape(module, packed)
    dense = is_dense(packed, 1, shape[1], bits)
    group = group_size(packed, args, shape[1])
    scale = scales_of(module, "weight_scale", args, shape, group)
    array = module.checkpoint.array

    def codes(rows: Rows) -> np.ndarray:
        words = array(packed)[rows]
        if bits == 4 and shape[1] % BLOCK == 0:
            return np.ascontiguousarray(words).view(np.uint8)
        return signed(unpack(words, bits, shape[1], dense), bits)

    def scales(rows: Rows) -> np.ndarray:
        return broadcast(array(scale), shape[0])[rows]

    zero = module.params.get("weight_zero_point")
    if zero is None and not args.symmetric:
        module.need("weight_zero_point", ("I32", "I8"))
    zeros: _PackedZeros | _StoredZeros | None = None
    if zero is not None and zero.dtype == "I32":
        zeros = _PackedZeros(module, zero, args, shape, group, dense)
    elif zero is not None:
        zeros = stored_zeros(module, args, shape, group)
    return open_int(IntSource(module, "pack-quantized", shape, scheme, bits, group, codes, scales, scale, zeros,
                              _g_idx(module, args, shape[1], group), activation_notes(module)))


def _shape(module: Module, packed: TensorRef) -> tuple[int, int]:
    """(rows, columns) as `weight_shape` says, checked against `packed`."""
    ref = module.need("weight_shape", ("I64", "I32"), (2,))
    rows, columns = (int(n) for n in module.array("weight_shape"))
    if len(packed.shape) != 2 or packed.shape[0] != rows or columns <= 0:
        raise CheckpointError(f"{packed}: weight_shape says [{rows}, {columns}] ({ref.file.name}), expected "
                              f"[{rows}, words]")
    return rows, columns


def group_size(weight: TensorRef, args: QuantArgs, columns: int) -> int:
    """Columns that share a scale.

    Raises UnsupportedFormat for a strategy that is not one of integer weights, CheckpointError when groups do not
    divide the columns.
    """
    if args.strategy in ("tensor", "channel"):
        return columns
    if args.strategy != "group" or args.group_size is None:
        raise UnsupportedFormat(f"{weight}: strategy {args.strategy} is not carried for integer weights, expected "
                                "tensor, channel or group")
    size = min(args.group_size, columns)
    if columns % size:
        raise CheckpointError(f"{weight}: {columns} columns do not divide into groups of {size}")
    return size


def scales_of(module: Module, suffix: str, args: QuantArgs, shape: tuple[int, int], group: int,
              dtypes: tuple[str, ...] = FLOATS) -> TensorRef:
    """The stored scales or zero points, with a shape that the strategy allows."""
    ref = module.need(suffix, dtypes)
    groups = shape[1] // group
    allowed: list[tuple[int, ...]] = [(1,), (), (1, 1)] if args.strategy == "tensor" else [(shape[0], groups)]
    if args.strategy != "tensor" and groups == 1:
        allowed.append((shape[0],))
    if ref.shape not in allowed:
        raise CheckpointError(f"{ref}: expected shape {list(allowed[0])} for {args} of a weight {list(shape)}")
    return ref


def broadcast(values: np.ndarray, rows: int) -> np.ndarray:
    """Scales of any allowed shape as (rows, groups), without a copy."""
    return np.broadcast_to(values.reshape(1, 1), (rows, 1)) if values.size == 1 else values.reshape(rows, -1)


def stored_zeros(module: Module, args: QuantArgs, shape: tuple[int, int], group: int) -> "_StoredZeros":
    """Zero points that are stored as int8, in the shape of the scales."""
    return _StoredZeros(module, scales_of(module, "weight_zero_point", args, shape, group, ("I8",)), shape[0])


def activation_notes(module: Module) -> tuple[str, ...]:
    """What to say of stored activation scales."""
    found = sorted(ACTIVATIONS & module.params.keys())
    return (f"{', '.join(found)}: static activation scales are not carried over; llama.cpp rounds activations in its "
            "own way",) if found else ()


class _StoredZeros:
    """rows -> int16 (rows, groups)."""

    def __init__(self, module: Module, ref: TensorRef, rows: int) -> None:
        self.array, self.ref, self.rows = module.checkpoint.array, ref, rows

    def __call__(self, rows: Rows) -> np.ndarray:
        return broadcast(self.array(self.ref), self.rows)[rows].astype(np.int16)


class _PackedZeros:
    """rows -> int16 (rows, groups), from words packed along the rows."""

    def __init__(self, module: Module, ref: TensorRef, args: QuantArgs, shape: tuple[int, int], group: int,
                 dense: bool) -> None:
        groups = shape[1] // group
        if args.symmetric or args.strategy == "tensor":
            raise SchemeError(f"{ref}: packed zero points, but config says {args}")
        if len(ref.shape) != 2 or ref.shape[1] != groups:
            raise CheckpointError(f"{ref}: expected shape [words, {groups}] for {args} of a weight {list(shape)}")
        self.array, self.ref, self.rows, self.bits = module.checkpoint.array, ref, shape[0], args.num_bits
        # Packed as the codes are; a row of codes within one word is the same either way and does not tell.
        self.dense = dense if shape[1] > 32 // self.bits else is_dense(ref, 0, shape[0], self.bits)
        words = word_count(shape[0], self.bits, self.dense)
        if ref.shape[0] != words:
            raise CheckpointError(f"{ref}: {shape[0]} zero points of {self.bits} bits take {words} words along the "
                                  f"rows, found {ref.shape[0]}")

    def __call__(self, rows: Rows) -> np.ndarray:
        low, high, index = bounds(rows, self.rows)
        each, words = (32, self.bits) if self.dense else (32 // self.bits, 1)  # values in so many words
        first, last = low // each, -(-high // each)
        some = self.array(self.ref)[first * words:last * words].T
        values = unpack(np.ascontiguousarray(some), self.bits, high - first * each, self.dense)
        zeros: np.ndarray = values[:, low - first * each:].T[index].astype(np.int16)
        zeros -= np.int16(1 << self.bits - 1)
        return zeros


def bounds(rows: Rows, count: int) -> tuple[int, int, Rows]:
    """low, high, and the index within low..high that makes `rows` of `count`."""
    if isinstance(rows, slice):
        low, high, step = rows.indices(count)
        return low, max(low, high), slice(None, None, step)
    if not len(rows):
        return 0, 0, rows
    low = int(rows.min())
    return low, int(rows.max()) + 1, rows - low


def _g_idx(module: Module, args: QuantArgs, columns: int, group: int) -> np.ndarray | None:
    """The group of each column, None where groups are runs of columns."""
    if "weight_g_idx" not in module.params:
        if args.actorder in ("group", "dynamic"):
            module.need("weight_g_idx", ("I32",))
        return None
    ref = module.need("weight_g_idx", ("I32", "I64"), (columns,))
    return checked_index(ref, module.array("weight_g_idx"), columns, group)


def checked_index(ref: TensorRef, values: np.ndarray, columns: int, group: int) -> np.ndarray | None:
    """`values` as intp (columns,), None where groups are runs of columns, or a -1 says so."""
    groups = columns // group
    if (values == -1).any() or (values == np.arange(columns) // group).all():
        return None
    if int(values.min()) < 0 or int(values.max()) >= groups:
        raise CheckpointError(f"{ref}: groups from {values.min()} to {values.max()}, expected 0 to {groups - 1}")
    return values.astype(np.intp)


FORMAT = Format("pack-quantized", _SUFFIXES | ACTIVATIONS, _matches, _open)
