"""int-quantized and naive-quantized integers: one int8 a code, with a scale for each group, channel or tensor.

compressed-tensors/compressors/naive_quantized: `weight` int8 (rows, columns), `weight_scale` (1,), (rows, 1) or
(rows, groups), `weight_zero_point` int8 of the same shape for asymmetric codes. A value is (code - zero point) x scale.
Activations may be quantized too, by stored scales (`input_scale`) or at run time; llama.cpp does that in its own way.
"""

from collections.abc import Mapping

import numpy as np

from ..checkpoint import TensorRef
from ..errors import CheckpointError, UnsupportedFormat
from . import Format, Module, Rows, SourceWeight, require_scheme
from .bits import signed_limits
from .fp8 import refuse_others
from .intcarry import IntSource, open_int
from .packed import ACTIVATIONS, activation_notes, broadcast, group_size, scales_of, stored_zeros

_SUFFIXES = frozenset({"weight", "weight_scale", "weight_zero_point"})


def _matches(params: Mapping[str, TensorRef]) -> bool:
    return "weight" in params and params["weight"].dtype == "I8"


def _open(module: Module) -> SourceWeight:
    refuse_others(module, _SUFFIXES | ACTIVATIONS)
    scheme = require_scheme(module, "int8", ("int-quantized", "naive-quantized"))
    args = scheme.weights
    if args.type != "int" or not 2 <= args.num_bits <= 8:
        raise UnsupportedFormat(f"{module.name}: config group {scheme.group} says {args} for int8 codes, expected int "
                                "with 2 to 8 bits")
    weight = module.need("weight", ("I8",))
    if len(weight.shape) != 2:
        raise CheckpointError(f"{weight}: expected two dimensions (rows, columns)")
    shape = weight.shape[0], weight.shape[1]
    group = group_size(weight, args, shape[1])
    scale = scales_of(module, "weight_scale", args, shape, group)
    zeros = None
    if "weight_zero_point" in module.params or not args.symmetric:
        zeros = stored_zeros(module, args, shape, group)
    array = module.checkpoint.array

    def codes(rows: Rows) -> np.ndarray:
        values = array(weight)[rows]
        low, high = signed_limits(args.num_bits)
        if args.num_bits < 8 and values.size and (int(values.min()) < low or int(values.max()) > high):
            raise CheckpointError(f"{weight}: codes from {values.min()} to {values.max()}, expected {low} to {high} "
                                  f"for {args}")
        return values

    def scales(rows: Rows) -> np.ndarray:
        return broadcast(array(scale), shape[0])[rows]

    return open_int(IntSource(module, scheme.format, shape, scheme, args.num_bits, group, codes, scales, scale, zeros,
                              notes=activation_notes(module)))


FORMAT = Format("int-quantized", _SUFFIXES | ACTIVATIONS, _matches, _open)
