"""NVFP4: every code and every block scale survives the way to GGML, checked with gguf's and torch's own arithmetic."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from mcpq_gguf.errors import PlanError
from mcpq_gguf.formats.codes import E2M1, E4M3, Fp4
from mcpq_gguf.ggml.encode import encode, row_bytes


def test_tables_are_those_of_torch() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, theirs)
    pairs = torch.arange(16, dtype=torch.uint8)[:, None]
    np.testing.assert_array_equal(E2M1, unpack_fp4_from_uint8(pairs, 16, 2, dtype=torch.float32)[:, 0].numpy())


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5), seed=st.integers(0, 2**32 - 1),
       low=st.integers(0, 0x7E), divisor=st.floats(2**-10, 2**17, width=32))
def test_gguf_reads_the_same_numbers(rows: int, blocks: int, seed: int, low: int, divisor: float) -> None:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, blocks * 32), np.uint8)
    scales = rng.integers(low, 0x7F, (rows, blocks * 4), np.uint8)
    codes = Fp4(packed, scales, 16, np.float32(divisor))
    read = dequantize(encode(codes, "NVFP4"), GGMLQuantizationType.NVFP4)
    values = unpack_fp4_from_uint8(torch.from_numpy(packed), rows, blocks * 64, dtype=torch.float32)
    block_scales = torch.from_numpy(scales).view(torch.float8_e4m3fn).float()
    np.testing.assert_array_equal(read, (values * block_scales.repeat_interleave(16, 1)).numpy())
    reference = values * (block_scales / torch.tensor(divisor, dtype=torch.float32)).repeat_interleave(16, 1)
    np.testing.assert_array_equal(codes.dequantize(), reference.numpy())


def test_every_code_in_every_place() -> None:
    for place in range(64):
        packed = np.zeros((16, 32), np.uint8)
        packed[:, place // 2] = np.arange(16) << (4 * (place % 2))
        read = dequantize(encode(Fp4(packed, np.full((16, 4), 0x38, np.uint8), 16), "NVFP4"),
                          GGMLQuantizationType.NVFP4)
        expected = np.zeros((16, 64), np.float32)
        expected[:, place] = E2M1
        np.testing.assert_array_equal(read, expected)


def test_every_scale_byte() -> None:
    scales = np.arange(0x7F, dtype=np.uint8).repeat(4).reshape(-1, 4)
    packed = np.full((0x7F, 32), 0x22, np.uint8)  # code 2 is 1.0
    read = dequantize(encode(Fp4(packed, scales, 16), "NVFP4"), GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(read, np.repeat(E4M3[scales], 16, 1))


def test_negative_zero_scale_is_zero() -> None:
    codes = Fp4(np.full((1, 32), 0x77, np.uint8), np.full((1, 4), 0x80, np.uint8), 16)
    assert not dequantize(encode(codes, "NVFP4"), GGMLQuantizationType.NVFP4).any()


def test_rows_that_do_not_fill_a_block_are_refused() -> None:
    with pytest.raises(PlanError, match="96 columns do not divide into NVFP4 blocks of 64"):
        row_bytes("NVFP4", 96)
