"""MXFP4 is carried bit for bit, MXFP8 becomes the reference's BF16, and FP4 decodes to compressed-tensors' BF16."""

from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Decompressed, checkpoint
from small import bits, compressed_tensors, open_module, permuted, rows_and_columns, schemes

from mcpq_gguf.checkpoint import open_checkpoint
from mcpq_gguf.errors import CheckpointError, McpqError, SchemeError, UnsupportedFormat
from mcpq_gguf.formats import SourceWeight, open_weights
from mcpq_gguf.formats.codes import E2M1, Dense, Fp4
from mcpq_gguf.ggml.encode import encode

MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MXFP8 = MXFP4 | {"num_bits": 8}
NVFP4 = MXFP4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}


def scheme(args: dict[str, Any]) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))


def open_mxfp4(packed: np.ndarray, scales: np.ndarray) -> SourceWeight:
    return open_module({"weight_packed": torch.from_numpy(packed), "weight_scale": torch.from_numpy(scales)},
                       compressed_tensors("mxfp4-pack-quantized", MXFP4))


def decoded(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 code x 2^(byte - 127), by torch and float64."""
    values = unpack_fp4_from_uint8(torch.from_numpy(packed), len(packed), packed.shape[1] * 2, dtype=torch.float64)
    powers = torch.from_numpy(scales).double().sub(127).exp2().repeat_interleave(32, 1)
    wide = values * powers
    assert torch.equal(wide.float().double(), wide)  # nothing is rounded
    return wide.float().numpy()


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 4), low=st.integers(0, 252), span=st.integers(0, 20),
       seed=st.integers(0, 2**32 - 1))
def test_gguf_and_the_reference_read_the_same_numbers(rows: int, blocks: int, low: int, span: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, blocks * 16), np.uint8)
    scales = rng.integers(low, min(low + span, 252) + 1, (rows, blocks), np.uint8)
    source = open_mxfp4(packed, scales)
    codes = source.read(slice(0, rows))
    want = decoded(packed, scales)
    np.testing.assert_array_equal(codes.dequantize(), want)
    np.testing.assert_array_equal(dequantize(encode(codes, "MXFP4"), GGMLQuantizationType.MXFP4), want)
    assert [(c.type, c.exact, c.factor) for c in source.carries()] == [("MXFP4", True, None)]
    theirs = MXFP4PackedCompressor.decompress({"weight_packed": torch.from_numpy(packed),
                                               "weight_scale": torch.from_numpy(scales)}, scheme(MXFP4))["weight"]
    np.testing.assert_array_equal(encode(codes, "BF16").view(np.uint16), bits(theirs))
    np.testing.assert_array_equal(theirs.float().numpy(), want)  # BF16 holds all of them


def test_every_code_in_every_place() -> None:
    for place in range(32):
        packed = np.zeros((16, 16), np.uint8)
        packed[:, place // 2] = np.arange(16) << (4 * (place % 2))
        read = dequantize(encode(Fp4(packed, np.full((16, 1), 127, np.uint8), 32), "MXFP4"), GGMLQuantizationType.MXFP4)
        expected = np.zeros((16, 32), np.float32)
        expected[:, place] = E2M1
        np.testing.assert_array_equal(read, expected)


def test_every_scale_byte() -> None:
    """0 and 1 included, which GGML halves into subnormal numbers."""
    scales = np.arange(255, dtype=np.uint8)[:, None]
    for code in range(8):
        packed = np.full((255, 16), code * 0x11, np.uint8)
        with np.errstate(over="ignore"):
            want = np.ldexp(np.float64(E2M1[code]), np.arange(255) - 127).astype(np.float32)
            codes = Fp4(packed, scales, 32)
            np.testing.assert_array_equal(codes.dequantize()[:, 0], want)
            read = dequantize(encode(codes, "MXFP4"), GGMLQuantizationType.MXFP4)
        np.testing.assert_array_equal(read, np.repeat(want[:, None], 32, 1))


def test_a_weight_that_the_real_compressor_packed() -> None:
    rng = np.random.default_rng(3)
    weight = torch.from_numpy(rng.standard_normal((8, 128)).astype(np.float32)).bfloat16()
    scale = weight.unflatten(-1, (-1, 32)).abs().amax(-1).float().log2().floor().sub(2).exp2().bfloat16()
    state = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme(MXFP4))
    source = open_mxfp4(state["weight_packed"].numpy(), state["weight_scale"].numpy())
    theirs = MXFP4PackedCompressor.decompress(state, scheme(MXFP4))["weight"]
    read = dequantize(encode(source.read(slice(0, 8)), "MXFP4"), GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(read, theirs.float().numpy())
    assert (read - weight.float().numpy()).std() < 0.15


def test_modules_of_a_whole_checkpoint() -> None:
    path = checkpoint("mxfp4a16")
    source, reference = open_checkpoint(path), Decompressed(path)
    found = [w for w in open_weights(source, schemes(source).resolve).values() if w.format == "mxfp4-pack-quantized"]
    assert len(found) == 96
    for weight in found:
        codes = weight.read(slice(0, weight.shape[0]))
        theirs = reference.bf16(weight.module).float().numpy()
        np.testing.assert_array_equal(dequantize(encode(codes, "MXFP4"), GGMLQuantizationType.MXFP4), theirs)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
def test_transforms_mean_the_same_before_and_after_decoding(rows: int, blocks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, blocks * 32), np.uint8)
    codes = Fp4(packed, rng.integers(100, 140, (rows, blocks * 2), np.uint8), 32)
    index, order = rows_and_columns(rng, rows, blocks * 64, 64)
    moved = codes.take(index).permute_columns(order, 64)
    want = permuted(codes.dequantize(), index, order, 64)
    np.testing.assert_array_equal(moved.dequantize(), want)
    np.testing.assert_array_equal(dequantize(encode(moved, "MXFP4"), GGMLQuantizationType.MXFP4), want)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 4), low=st.integers(0, 246), seed=st.integers(0, 2**32 - 1))
def test_mxfp8_is_the_reference_decompression(rows: int, blocks: int, low: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 0x7F, (rows, blocks * 32), np.uint8) | rng.integers(0, 2, (rows, blocks * 32), np.uint8) << 7
    scales = rng.integers(low, min(low + 9, 246) + 1, (rows, blocks), np.uint8)
    state = {"weight": torch.from_numpy(raw).view(torch.float8_e4m3fn), "weight_scale": torch.from_numpy(scales)}
    source = open_module(state, compressed_tensors("mxfp8-quantized", MXFP8))
    theirs = MXFP8QuantizationCompressor.decompress(state, scheme(MXFP8))["weight"]
    codes = source.read(slice(0, rows))
    np.testing.assert_array_equal(encode(codes, "BF16").view(np.uint16), bits(theirs))
    powers = state["weight_scale"].double().sub(127).exp2().repeat_interleave(32, 1)
    np.testing.assert_array_equal(codes.dequantize(), (state["weight"].double() * powers).float().numpy())
    assert source.format == "mxfp8-quantized"


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 4), divisor=st.floats(2**-20, 2**20, width=32),
       seed=st.integers(0, 2**32 - 1))
def test_nvfp4_in_bf16_is_the_reference_decompression(rows: int, blocks: int, divisor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, blocks * 8), np.uint8)
    scales = rng.integers(0, 0x7F, (rows, blocks), np.uint8)
    state = {"weight_packed": torch.from_numpy(packed),
             "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
             "weight_global_scale": torch.tensor([divisor], dtype=torch.float32)}
    theirs = NVFP4PackedCompressor.decompress(state, scheme(NVFP4))["weight"]
    codes = open_module(state, compressed_tensors("nvfp4-pack-quantized", NVFP4)).read(slice(0, rows))
    np.testing.assert_array_equal(encode(codes, "BF16").view(np.uint16), bits(theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_numbers_in_bf16_are_those_of_torch(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    tensor = torch.from_numpy(np.ldexp(rng.standard_normal((64, 64)), rng.integers(-140, 120, (64, 64)))).to(dtype)
    tensor[0, :4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    codes = open_module({"weight": tensor}, None).read(slice(0, 64))
    assert isinstance(codes, Dense)
    np.testing.assert_array_equal(encode(codes, "BF16").view(np.uint16), bits(tensor.to(torch.bfloat16)))


# ------------------------------------------------------------------------------------- malformed

PACKED, SCALES = torch.full((4, 32), 0x77, dtype=torch.uint8), torch.full((4, 2), 127, dtype=torch.uint8)


def scale_byte(byte: int) -> torch.Tensor:
    scales = SCALES.clone()
    scales[3, 1] = byte
    return scales


@pytest.mark.parametrize(("tensors", "change", "error", "says"), [
    ({"weight_packed": PACKED}, {}, CheckpointError, "weight_scale: missing"),
    ({"weight_packed": PACKED, "weight_scale": SCALES[:3]}, {}, CheckpointError,
     r"U8 \[3, 2\].*expected shape \[4, 2\]"),
    ({"weight_packed": PACKED, "weight_scale": SCALES.bfloat16()}, {}, UnsupportedFormat, "expected dtype U8"),
    ({"weight_packed": PACKED[:, :24], "weight_scale": SCALES}, {}, CheckpointError, "48 columns do not divide"),
    ({"weight_packed": PACKED[0], "weight_scale": SCALES}, {}, CheckpointError, "expected two dimensions"),
    ({"weight_packed": PACKED, "weight_scale": scale_byte(255)}, {}, CheckpointError, "row 3, group 1 is NaN"),
    ({"weight_packed": PACKED, "weight_scale": scale_byte(253)}, {}, CheckpointError, "beyond float32.*253"),
    ({"weight_packed": PACKED, "weight_scale": SCALES}, {"group_size": 16}, UnsupportedFormat, "groups of 32"),
    ({"weight_packed": PACKED, "weight_scale": SCALES}, {"num_bits": 8}, UnsupportedFormat, "symmetric float4"),
    ({"weight_packed": PACKED, "weight_scale": SCALES, "weight_zero_point": SCALES.char()}, {}, UnsupportedFormat,
     "weight_zero_point"),
])
def test_malformed(tensors: dict[str, torch.Tensor], change: dict[str, Any], error: type[McpqError],
                   says: str) -> None:
    with pytest.raises(error, match=says):
        open_module(tensors, compressed_tensors("mxfp4-pack-quantized", MXFP4 | change)).read(slice(1, 4))


def test_other_formats_in_the_config() -> None:
    with pytest.raises(SchemeError, match=r"stored as MXFP4.*says nvfp4-pack-quantized"):
        open_module({"weight_packed": PACKED, "weight_scale": SCALES},
                    compressed_tensors("nvfp4-pack-quantized", NVFP4))
    with pytest.raises(SchemeError, match=r"stored as MXFP8.*says float-quantized"):
        open_module({"weight": PACKED.view(torch.float8_e4m3fn), "weight_scale": SCALES[:, :1]},
                    compressed_tensors("float-quantized", MXFP8))


def test_largest_scale_with_small_codes_is_carried() -> None:
    packed = np.full((1, 16), 0x11, np.uint8)  # 0.5 x 2^127
    codes = open_mxfp4(packed, np.full((1, 1), 254, np.uint8)).read(slice(0, 1))
    assert np.isfinite(codes.dequantize()).all()
    np.testing.assert_array_equal(dequantize(encode(codes, "MXFP4"), GGMLQuantizationType.MXFP4), codes.dequantize())
