"""OCP Microscaling formats: codes in groups of 32 with an E8M0 byte, a power of two, for each.

mxfp4-pack-quantized  compressed-tensors/compressors/mxfp4: `weight_packed` uint8 (rows, columns / 2), E2M1, even
                      column in the low nibble; `weight_scale` uint8 (rows, columns / 32)
mxfp8-quantized       compressed-tensors/compressors/mxfp8: `weight` E4M3, `weight_scale` as above;
modelopt-mxfp8        NVIDIA ModelOpt stores the same
A scale is 2^(byte - 127); 255 is NaN (OCP Microscaling Formats v1.0, section 5.4.1), which GGML would read as 2^128.
"""

from collections.abc import Mapping

import numpy as np

from ..checkpoint import TensorRef
from ..errors import CheckpointError, UnsupportedFormat
from ..schemes import Scheme
from . import Carry, Format, Module, Rows, SourceWeight, always, require_scheme, stored_row
from .codes import Fp4
from .fp8 import WHY, check_args, checked, need_matrix, refuse_others
from .fp8codes import Fp8, e8m0

GROUP = 32
_SCALE_DTYPES = ("U8", "F8_E8M0")
_MXFP4 = frozenset({"weight_packed", "weight_scale"})
_MXFP8 = frozenset({"weight", "weight_scale"})
_LARGE = 253  # from this scale byte on the largest E2M1 code, 6, goes beyond float32


def _matches_fp4(params: Mapping[str, TensorRef]) -> bool:
    return "weight_packed" in params and params["weight_packed"].dtype == "U8" and "weight_global_scale" not in params


def _matches_fp8(params: Mapping[str, TensorRef]) -> bool:
    return ("weight" in params and params["weight"].dtype == "F8_E4M3"
            and "weight_scale" in params and params["weight_scale"].dtype in _SCALE_DTYPES)


def _open_fp4(module: Module) -> SourceWeight:
    refuse_others(module, _MXFP4)
    packed = need_matrix(module, "weight_packed", ("U8",))
    columns = packed.shape[1] * 2
    scheme, scale = _scales(module, packed, columns, "MXFP4", ("mxfp4-pack-quantized",), 4)
    array = module.checkpoint.array

    def read(rows: Rows) -> Fp4:
        codes = Fp4(array(packed)[rows], _bytes(array(scale)[rows], rows, scale), GROUP)
        if codes.scales.size and int(codes.scales.max()) >= _LARGE:
            with np.errstate(over="ignore"):
                finite = np.isfinite(codes.dequantize())
            if not finite.all():
                raise CheckpointError(f"{scale}: code x scale goes beyond float32 (scale byte {codes.scales.max()}, "
                                      f"2^{int(codes.scales.max()) - 127}); the scales are damaged")
        return codes

    return SourceWeight(module.name, scheme.format, (packed.shape[0], columns), tuple(module.params.values()), read,
                        always(Carry("MXFP4")), scheme=scheme)


def _open_fp8(module: Module) -> SourceWeight:
    refuse_others(module, _MXFP8)
    weight = need_matrix(module, "weight", ("F8_E4M3",))
    scheme, scale = _scales(module, weight, weight.shape[1], "MXFP8", ("mxfp8-quantized", "modelopt-mxfp8"), 8)
    array = module.checkpoint.array

    def read(rows: Rows) -> Fp8:
        # The reference turns the scales into BF16, which holds every one of these powers of two.
        scales = e8m0(_bytes(array(scale)[rows], rows, scale))
        return checked(Fp8(array(weight)[rows], scales, (1, GROUP), "E4M3", "BF16"), rows, weight)

    return SourceWeight(module.name, scheme.format, weight.shape, tuple(module.params.values()), read,
                        always(Carry("BF16", exact=False, why=WHY)), scheme=scheme)


def _scales(module: Module, codes: TensorRef, columns: int, storage: str, names: tuple[str, ...], bits: int
            ) -> tuple[Scheme, TensorRef]:
    """The scheme and the scales of a module, checked against the codes and the config."""
    if columns % GROUP:
        raise CheckpointError(f"{codes}: {columns} columns do not divide into groups of {GROUP}")
    scale = module.need("weight_scale", _SCALE_DTYPES, (codes.shape[0], columns // GROUP))
    scheme = require_scheme(module, storage, names)
    check_args(module, scheme.weights, scheme.format, bits)
    if scheme.weights.group_size != GROUP:
        raise UnsupportedFormat(f"{module.name}: config group {scheme.group} says {scheme.weights} for "
                                f"{scheme.format}, expected groups of {GROUP}")
    return scheme, scale


def _bytes(scales: np.ndarray, rows: Rows, ref: TensorRef) -> np.ndarray:
    """The E8M0 bytes of `rows`; CheckpointError for the NaN byte."""
    if scales.size and int(scales.max()) == 255:
        row, group = np.argwhere(scales == 255)[0]
        raise CheckpointError(f"{ref}: scale of row {stored_row(rows, row)}, group {group} is NaN (byte 0xFF); E8M0 "
                              "scales should be bytes 0 to 254")
    return scales


MXFP4 = Format("mxfp4-pack-quantized", _MXFP4, _matches_fp4, _open_fp4)
MXFP8 = Format("mxfp8-quantized", _MXFP8, _matches_fp8, _open_fp8)
