"""FP8 weights: one E4M3 or E5M2 byte a number, scales by tensor, channel, group or block.

Three writers store them almost alike, and the scheme's format says which it is:
float-quantized, naive-quantized  compressed-tensors/compressors/naive_quantized: `weight`, `weight_scale`
fp8           DeepSeek's `quant_method: fp8`: `weight_scale_inv`, one number per `weight_block_size`; or a single
              `weight_scale`. Despite the name it multiplies (transformers, integrations/finegrained_fp8.py). float32,
              or E8M0 bytes
modelopt-fp8  NVIDIA ModelOpt: `weight_scale`, a single float32, one a row, or blocks with axes of length 1 between
A value is code x scale. `input_scale` and `activation_scale` (static FP8 activations) are taken, noted and left
out: llama.cpp rounds activations in its own way.
"""

from collections.abc import Mapping
from math import prod

import numpy as np

from ..checkpoint import TensorRef
from ..errors import CheckpointError, UnsupportedFormat
from ..schemes import QuantArgs
from . import Carry, Format, Module, Rows, SourceWeight, always, require_scheme, stored_row
from .codes import bf16_to_f32
from .fp8codes import LARGEST, Fp8, Kind, ScaleDtype, e8m0

FORMATS = ("float-quantized", "naive-quantized", "fp8", "modelopt-fp8")
WEIGHT_DTYPES: dict[str, Kind] = {"F8_E4M3": "E4M3", "F8_E5M2": "E5M2"}
_SCALE_DTYPES: dict[str, ScaleDtype] = {"F32": "F32", "BF16": "BF16", "F16": "F16", "F8_E8M0": "F32"}
ACTIVATION_SCALES = frozenset({"input_scale", "activation_scale"})
_SUFFIXES = frozenset({"weight", "weight_scale", "weight_scale_inv"}) | ACTIVATION_SCALES
_F32_MAX = float(np.finfo(np.float32).max)
WHY = "GGML has no FP8 type"


def matches(params: Mapping[str, TensorRef]) -> bool:
    """FP8 bytes as `weight`, whatever else is there."""
    return "weight" in params and params["weight"].dtype in WEIGHT_DTYPES


def open_fp8(module: Module) -> SourceWeight:
    """The weight of a module with FP8 bytes and float scales."""
    refuse_others(module, _SUFFIXES)
    weight = need_matrix(module, "weight", tuple(WEIGHT_DTYPES))
    inverse = "weight_scale_inv" in module.params
    scheme = require_scheme(module, f"FP8 with {'weight_scale_inv' if inverse else 'weight_scale'}",
                            ("fp8",) if inverse else FORMATS)
    check_args(module, scheme.weights, scheme.format, 8)
    scale = module.need("weight_scale_inv" if inverse else "weight_scale", tuple(_SCALE_DTYPES))
    grid, block = tiles(scale, scheme.weights, weight)

    kind, scale_dtype = WEIGHT_DTYPES[weight.dtype], _SCALE_DTYPES[scale.dtype]
    array = module.checkpoint.array

    def read(rows: Rows) -> Fp8:
        index = rows if block[0] == 1 else np.arange(weight.shape[0])[rows] // block[0]
        raw = array(scale).reshape(grid)[index]
        decode = {"BF16": bf16_to_f32, "F8_E8M0": e8m0}.get(scale.dtype)
        values = decode(raw) if decode else raw.astype(np.float32)
        check_scales(values, index, scale)
        return checked(Fp8(array(weight)[rows], values, (1, block[1]), kind, scale_dtype), rows, weight)

    notes = tuple(f"{ref}: scale of static FP8 activations, not carried: llama.cpp rounds activations in its own way"
                  for suffix, ref in module.params.items() if suffix in ACTIVATION_SCALES)
    return SourceWeight(module.name, scheme.format, weight.shape, tuple(module.params.values()), read,
                        always(Carry("BF16", exact=False, why=WHY)), scheme=scheme, notes=notes)


def tiles(scale: TensorRef, args: QuantArgs, weight: TensorRef) -> tuple[tuple[int, int], tuple[int, int]]:
    """Number of scales as (rows, columns), and the size of the tile that each is for, as `args` has it.

    Raises CheckpointError when the stored scale has another shape, or groups do not divide the columns.
    """
    rows, columns = weight.shape
    if args.strategy == "tensor":
        block = (max(rows, 1), max(columns, 1))
    elif args.strategy == "channel":
        block = (1, max(columns, 1))
    elif args.strategy in ("group", "tensor_group") and args.group_size:
        block = (1, args.group_size)
        if columns % args.group_size:
            raise CheckpointError(f"{weight}: {columns} columns do not divide into groups of {args.group_size}")
    elif args.strategy == "block" and args.block and min(args.block) > 0:
        block = args.block
    else:
        raise UnsupportedFormat(f"{weight}: FP8 weights with the strategy {args} are not known; known are tensor, "
                                "channel, group and block")
    grid = -(-rows // block[0]), -(-columns // block[1])
    allowed: set[tuple[int, ...]] = {grid}
    if args.strategy == "tensor":
        allowed |= {(), (1,)}
    elif args.strategy == "channel":
        allowed.add((rows,))
    elif args.strategy == "block":
        allowed.add((grid[0], 1, grid[1], 1))
    if scale.shape not in allowed:
        raise CheckpointError(f"{scale}: expected shape {list(grid)} for a weight of {list(weight.shape)} with one "
                              f"scale per {args.strategy}{f' of {block[0]} x {block[1]}' if grid != (1, 1) else ''}")
    return grid, block


def check_scales(values: np.ndarray, rows: Rows, ref: TensorRef) -> None:
    """Refuse NaN, infinite and negative scales; `values` (n, m) are the rows `rows` of the stored scales."""
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise CheckpointError(f"{ref}: the scale in row {stored_row(rows, row)}, column {column} is "
                              f"{values[row, column]}; scales should be finite and not negative")


def checked(codes: Fp8, rows: Rows, ref: TensorRef) -> Fp8:
    """`codes`, which are the rows `rows` of `ref`; CheckpointError for a NaN or infinite byte, or a product beyond
    float32."""
    bad = codes.invalid()
    if bad is not None:
        raise CheckpointError(f"{ref}: the number in row {stored_row(rows, bad[0])}, column {bad[1]} is NaN or "
                              f"infinite (byte 0x{int(codes.codes[bad]):02X}); FP8 weights should be finite")
    if codes.scales.size and float(codes.scales.max()) > _F32_MAX / LARGEST[codes.kind] and not np.isfinite(
            codes.dequantize()).all():
        raise CheckpointError(f"{ref}: code x scale goes beyond float32 (largest scale {codes.scales.max():g}); "
                              "the scales are damaged")
    return codes


def check_args(module: Module, args: QuantArgs, name: str, bits: int) -> None:
    """The config must say symmetric float of `bits` bits."""
    if (args.num_bits, args.type) != (bits, "float") or not args.symmetric:
        raise UnsupportedFormat(f"{module.name}: stored as FP{bits}, but the config says {args} for {name}; expected "
                                f"symmetric float{bits}")


def need_matrix(module: Module, suffix: str, dtypes: tuple[str, ...]) -> TensorRef:
    """A stored tensor with two dimensions."""
    ref = module.need(suffix, dtypes)
    if len(ref.shape) != 2 or not prod(ref.shape):
        raise CheckpointError(f"{ref}: expected two dimensions (rows, columns), neither of them 0")
    return ref


def refuse_others(module: Module, known: frozenset[str]) -> None:
    """UnsupportedFormat for a stored tensor beside the weight that would change its numbers and is not in `known`."""
    for suffix, ref in module.params.items():
        if suffix not in known:
            beside = ", ".join(sorted(known & set(module.params)))
            raise UnsupportedFormat(f"{ref}: not expected beside {beside}; it may change the numbers, so it is not "
                                    "skipped")


FORMAT = Format("float-quantized", _SUFFIXES, matches, open_fp8)
