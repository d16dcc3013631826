"""nvfp4-pack-quantized: E2M1 codes, an E4M3 scale for each 16 columns, one float32 global scale a weight.

compressed-tensors/compressors/nvfp4: `weight_packed` uint8 (rows, columns / 2), even column in the low nibble;
`weight_scale` E4M3 (rows, columns / 16); `weight_global_scale` float32 (1,), which divides; `input_global_scale` for
W4A4. A value is code x (weight_scale / weight_global_scale).
"""

from collections.abc import Mapping

import numpy as np

from ..checkpoint import TensorRef
from ..errors import CheckpointError, UnsupportedFormat
from . import Carry, Format, Module, Rows, SourceWeight, always, require_scheme, stored_row
from .codes import Fp4

GROUP = 16
_SUFFIXES = frozenset({"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"})


def check_scales(scales: np.ndarray, rows: Rows, ref: TensorRef) -> None:
    """Refuse NaN bytes and negative scales: GGML's unsigned E4M3 would read them as other numbers."""
    if scales.size and (int(scales.max()) > 0x80 or bool((scales == 0x7F).any())):
        row, column = np.argwhere((scales > 0x80) | (scales == 0x7F))[0]
        byte = int(scales[row, column])
        kind = "NaN" if byte & 0x7F == 0x7F else "negative"
        raise CheckpointError(f"{ref}: scale of row {stored_row(rows, row)}, group {column} is {kind} (byte "
                              f"0x{byte:02X}); E4M3 block scales should be finite and not negative")


def _matches(params: Mapping[str, TensorRef]) -> bool:
    packed, scale = params.get("weight_packed"), params.get("weight_scale")
    return packed is not None and packed.dtype == "U8" and (
        "weight_global_scale" in params or (scale is not None and scale.dtype == "F8_E4M3"))


def _open(module: Module) -> SourceWeight:
    packed = module.need("weight_packed", ("U8",))
    if len(packed.shape) != 2:
        raise CheckpointError(f"{packed}: expected two dimensions (rows, columns / 2)")
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if columns % GROUP:
        raise CheckpointError(f"{packed}: {columns} columns do not divide into groups of {GROUP}")
    scale = module.need("weight_scale", ("F8_E4M3",), (rows, columns // GROUP))
    factor = module.scalar("weight_global_scale")
    scheme = require_scheme(module, "NVFP4", ("nvfp4-pack-quantized",))
    args = scheme.weights
    if (args.num_bits, args.type, args.group_size) != (4, "float", GROUP) or not args.symmetric:
        raise UnsupportedFormat(f"{module.name}: config group {scheme.group} says {args} for nvfp4-pack-quantized, "
                                f"expected symmetric float4 in groups of {GROUP}")
    input_scale = None
    if scheme.inputs is not None and scheme.inputs.num_bits == 4:
        input_scale = module.scalar("input_global_scale")
    array = module.checkpoint.array
    divisor = np.float32(array(module.params["weight_global_scale"]).reshape(-1)[0])

    def read(index: Rows) -> Fp4:
        scales = array(scale).view(np.uint8)[index]
        check_scales(scales, index, scale)
        return Fp4(array(packed)[index], scales, GROUP, divisor)

    return SourceWeight(module.name, "nvfp4-pack-quantized", (rows, columns), tuple(module.params.values()), read,
                        always(Carry("NVFP4", factor=factor)), input_scale, scheme)


FORMAT = Format("nvfp4-pack-quantized", _SUFFIXES, _matches, _open)
