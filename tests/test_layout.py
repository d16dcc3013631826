"""A layout transform means the same on packed codes as on the numbers they stand for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcpq_gguf.arch.layout import AS_IS, HeadRegroup, Layout
from mcpq_gguf.errors import UnsupportedFormat
from mcpq_gguf.formats.codes import Codes, Dense, Fp4, bf16_to_f32, f32_to_bf16


def random_codes(kind: str, rows: int, columns: int, seed: int) -> Codes:
    rng = np.random.default_rng(seed)
    if kind == "BF16":
        return Dense(f32_to_bf16(rng.standard_normal((rows, columns), np.float32)), "BF16")
    packed = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    if kind == "NVFP4":
        return Fp4(packed, rng.integers(0, 0x7F, (rows, columns // 16), np.uint8), 16, np.float32(1234.5))
    return Fp4(packed, rng.integers(100, 140, (rows, columns // 32), np.uint8), 32)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(["BF16", "NVFP4", "MXFP4"]), key=st.integers(1, 4), per_key=st.integers(1, 4),
       width=st.sampled_from([32, 64, 128]), start=st.sampled_from([0, 3, 64]), seed=st.integers(0, 2**32 - 1))
def test_transform_and_dequantize_commute(kind: str, key: int, per_key: int, width: int, start: int, seed: int) -> None:
    size = key * per_key * width
    rows, columns = HeadRegroup(key, per_key, width, start), HeadRegroup(key, per_key, width)
    codes = random_codes(kind, start + size, size, seed)
    layout = Layout(rows=rows, columns=columns)
    moved = layout.apply(codes.take(layout.source_rows(0, start + size)), "m").dequantize()
    plain = layout.apply(Dense(codes.dequantize()[layout.source_rows(0, start + size)], "F32"), "m").dequantize()
    np.testing.assert_array_equal(moved, plain)
    # and both are what an index into the dequantized matrix gives
    np.testing.assert_array_equal(plain, codes.dequantize()[rows.index()][:, columns.index()])


@settings(max_examples=30, deadline=None)
@given(key=st.integers(1, 5), per_key=st.integers(1, 5), width=st.integers(1, 9), start=st.integers(0, 5))
def test_heads_go_from_grouped_to_tiled(key: int, per_key: int, width: int, start: int) -> None:
    source = torch.arange(start + key * per_key * width)
    heads = source[start:].reshape(key, per_key, width).transpose(0, 1).reshape(-1)
    expected = torch.cat([source[:start], heads])
    assert torch.equal(torch.from_numpy(HeadRegroup(key, per_key, width, start).index()), expected)


def test_row_ranges_of_a_regrouped_weight_join_to_the_whole() -> None:
    layout = Layout(rows=HeadRegroup(2, 3, 4, 5))
    whole = layout.source_rows(0, 29)
    parts = [layout.source_rows(a, b) for a, b in ((0, 7), (7, 8), (8, 29))]
    np.testing.assert_array_equal(np.concatenate([np.asarray(p) for p in parts]), whole)
    assert AS_IS.source_rows(3, 9) == slice(3, 9)


def test_value_transforms_are_computed_in_float32() -> None:
    w = f32_to_bf16(np.array([-1, -0.00390625, 0, 0.3, 1e-30, 5], np.float32))
    one = Layout(value="add_one").apply(Dense(w, "BF16"), "norm").dequantize()
    assert torch.equal(torch.from_numpy(one), 1 + torch.from_numpy(bf16_to_f32(w)))
    a = Layout(value="neg_exp").apply(Dense(w, "BF16"), "A_log").dequantize()
    np.testing.assert_allclose(a, -np.exp(bf16_to_f32(w).astype(np.float64)), rtol=1e-7)


def test_value_transforms_refuse_quantized_codes() -> None:
    with pytest.raises(UnsupportedFormat, match=r"layers\.0\.norm"):
        Layout(value="add_one").apply(random_codes("NVFP4", 4, 64, 0), "layers.0.norm")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=50))
def test_bf16_rounds_as_torch_does(values: list[float]) -> None:
    x = np.array(values, np.float32)
    ours = bf16_to_f32(f32_to_bf16(x))
    theirs = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    np.testing.assert_array_equal(ours[~np.isnan(ours)], theirs[~np.isnan(theirs)])
