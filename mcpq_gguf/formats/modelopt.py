"""NVIDIA ModelOpt's NVFP4: as compressed-tensors', under other names and with the other convention for its scales.

modelopt/torch/quantization/qtensor/nvfp4_tensor.py: `weight` uint8 (rows, columns / 2), even column in the low nibble;
`weight_scale` E4M3 (rows, columns / 16); `weight_scale_2` a single float32 that multiplies (compressed-tensors'
global scale divides); `input_scale` likewise, for 4-bit activations. A value is code x (weight_scale x weight_scale_2).
ModelOpt's FP8 is in fp8.py, its config in modelopt_schemes.py.
"""

from collections.abc import Mapping

import numpy as np

from ..checkpoint import TensorRef
from ..errors import CheckpointError
from . import Carry, Format, Module, Rows, SourceWeight, always, require_scheme
from .codes import Fp4
from .fp8 import check_args, need_matrix, refuse_others
from .nvfp4 import GROUP, check_scales

_SUFFIXES = frozenset({"weight", "weight_scale", "weight_scale_2", "input_scale"})
_REFUSED = frozenset({"pre_quant_scale"})  # AWQ's factor on the activations: part of the sums, so never skipped


def _matches(params: Mapping[str, TensorRef]) -> bool:
    return "weight" in params and params["weight"].dtype == "U8" and (
        "weight_scale_2" in params or ("weight_scale" in params and params["weight_scale"].dtype == "F8_E4M3"))


def _open(module: Module) -> SourceWeight:
    refuse_others(module, _SUFFIXES)
    packed = need_matrix(module, "weight", ("U8",))
    rows, columns = packed.shape[0], packed.shape[1] * 2
    if columns % GROUP:
        raise CheckpointError(f"{packed}: {columns} columns do not divide into groups of {GROUP}")
    scale = module.need("weight_scale", ("F8_E4M3",), (rows, columns // GROUP))
    factor = _multiplier(module, "weight_scale_2")
    scheme = require_scheme(module, "ModelOpt NVFP4", ("modelopt-nvfp4",))
    check_args(module, scheme.weights, scheme.format, 4)
    input_scale = None
    if scheme.inputs is not None and scheme.inputs.num_bits == 4:
        input_scale = _multiplier(module, "input_scale")
    array = module.checkpoint.array

    def read(index: Rows) -> Fp4:
        scales = array(scale)[index]
        check_scales(scales, index, scale)
        return Fp4(array(packed)[index], scales, GROUP, factor=factor)

    return SourceWeight(module.name, scheme.format, (rows, columns), tuple(module.params.values()), read,
                        always(Carry("NVFP4", factor=factor)), input_scale, scheme)


def _multiplier(module: Module, suffix: str) -> np.float32:
    """A stored single float32 that multiplies, positive and finite."""
    module.scalar(suffix)  # checks it
    ref = module.need(suffix, ("F32",))
    value: np.float32 = module.checkpoint.array(ref).reshape(-1)[0]
    return value


FORMAT = Format("modelopt-nvfp4", _SUFFIXES | _REFUSED, _matches, _open)
