"""Integer formats: what is read is what compressed-tensors reads, and what is said to be exact is exact.

Oracles: compressed-tensors' packing and dequantizer, loops written from the published descriptions of GPTQ's and AWQ's
packing, and gguf's dequantizer for what is written, compared in float64.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Decompressed, checkpoint
from safetensors.torch import save_file

from mcpq_gguf.checkpoint import open_checkpoint
from mcpq_gguf.errors import CheckpointError, McpqError, PlanError, SchemeError, UnsupportedFormat
from mcpq_gguf.formats import FormatOptions, SourceWeight, open_weights
from mcpq_gguf.formats.codes import Dense
from mcpq_gguf.formats.fp16 import count_unfit, span
from mcpq_gguf.formats.intcodes import KINDS, IntCodes, common_unit
from mcpq_gguf.ggml.encode import encode
from mcpq_gguf.ggml.int_blocks import q4_0
from mcpq_gguf.schemes import parse_schemes

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
ALL = slice(None)
FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def opened(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any],
           options: FormatOptions | None = None) -> SourceWeight:
    """The module `m` of a checkpoint with these tensors, written by safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"m.{k}": v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    opened = open_weights(open_checkpoint(folder), parse_schemes(config).resolve, options or FormatOptions())
    return opened["m"]


def weights_config(fmt: str, **weights: Any) -> dict[str, Any]:
    """A compressed-tensors config for module m."""
    group = {"targets": ["m"], "weights": {"num_bits": 4, "type": "int", **weights}, "format": fmt}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}}


def written(weight: SourceWeight, kind: str) -> np.ndarray:
    """float64 values of a type as gguf reads them back, times the tensor's factor."""
    carry = weight.carry(kind)
    assert carry is not None
    values = gguf_dequantize(encode(weight.read(ALL), kind), GGMLQuantizationType[kind]).astype(np.float64)
    return values if carry.factor is None else values * float(carry.factor)


def check_carries(weight: SourceWeight, exact: np.ndarray) -> None:
    """A type is said to be exact if and only if what is written in it equals float64 `exact`."""
    carries = weight.carries()
    assert carries[-1].type == "BF16"
    assert not carries[-1].exact
    for carry in carries[:-1]:
        if not exact.shape[1] % 32:
            same = np.array_equal(written(weight, carry.type), exact)
            assert same == carry.exact, carry
            assert carry.exact or carry.why


def random_scales(rng: np.random.Generator, shape: tuple[int, int], kind: str, dtype: str) -> torch.Tensor:
    """Scales as they are found, and as they are feared."""
    usual = np.exp2(rng.uniform(-12, -3, shape))
    if kind == "short":
        usual = np.exp2(rng.integers(-10, 3, shape)) * rng.integers(1, 8, shape)
    elif kind == "extreme":
        f = torch.finfo(DTYPES[dtype])
        odd = np.array([0.0, f.smallest_normal, f.smallest_normal / 4, f.max, -usual.flat[0], 65280, 2**-17, 2**-25])
        usual = np.where(rng.random(shape) < 0.3, rng.choice(odd, shape), usual)
    elif kind == "tiny":
        usual = usual * 2.0**-18
    return torch.from_numpy(usual).to(DTYPES[dtype])


def reference(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> np.ndarray:
    """(code - zero) x scale in float64, scales and zeros spread over their columns."""
    scale = scale.double().reshape(-1, 1) if scale.ndim == 1 else scale.double()
    width = codes.shape[1] // scale.shape[1]
    values = codes.double()
    if zero is not None:
        values = values - zero.double().reshape(scale.shape).repeat_interleave(width, 1)
    return (values * scale.repeat_interleave(width, 1)).numpy()


def pack_padded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words of floor(32 / bits) values each, as compressed-tensors packed them before June 2026."""
    each = 32 // bits
    rows, columns = values.shape
    out = np.zeros((rows, -(-columns // each)), np.uint32)
    for r in range(rows):
        for c in range(columns):
            out[r, c // each] |= (int(values[r, c]) + (1 << bits - 1)) << (c % each * bits)
    return torch.from_numpy(out.view(np.int32))


@settings(FEW, max_examples=120)
@given(rows=st.integers(1, 40), groups=st.integers(1, 4), bits=st.integers(2, 8), seed=st.integers(0, 2**32 - 1),
       size=st.sampled_from([16, 32, 64, 128, 256, None, -1]), symmetric=st.booleans(), padded=st.booleans(),
       dtype=st.sampled_from(sorted(DTYPES)), scales=st.sampled_from(["usual", "short", "extreme", "tiny"]))
def test_pack_quantized(tmp_path: Path, rows: int, groups: int, bits: int, seed: int, size: int | None,
                        symmetric: bool, padded: bool, dtype: str, scales: str) -> None:
    rng = np.random.default_rng(seed)
    half = 1 << bits - 1
    columns = groups * (size if size and size > 0 else 32)
    if padded and 32 % bits:
        rows, columns = min(rows, 8), min(columns, 256)
        size = min(size, columns) if size else size
    groups = columns // size if size and size > 0 else 1
    codes = torch.from_numpy(rng.integers(-half, half, (rows, columns)).astype(np.int8))
    scale = random_scales(rng, (1, 1) if size is None else (rows, groups), scales, dtype)
    args = {"num_bits": bits, "symmetric": symmetric, "group_size": size,
            "strategy": "tensor" if size is None else "channel" if size < 0 else "group"}
    tensors = {"weight_packed": pack_to_int32(codes, bits), "weight_scale": scale[0] if size is None else scale,
               "weight_shape": torch.tensor([rows, columns])}
    assert torch.equal(unpack_from_int32(tensors["weight_packed"], bits, codes.shape), codes)
    zero = None
    if not symmetric:
        zero = torch.from_numpy(rng.integers(-half, half, tuple(scale.shape)).astype(np.int8))
        tensors["weight_zero_point"] = zero[0] if size is None else pack_to_int32(zero, bits, packed_dim=0)
    if padded and 32 % bits:
        tensors["weight_packed"] = pack_padded(codes, bits)
        if zero is not None and size is not None:
            tensors["weight_zero_point"] = pack_padded(zero.T, bits).T
    config = weights_config("pack-quantized", **args)
    if 32 % bits and columns > 32 // bits and -(-columns * bits // 32) == -(-columns // (32 // bits)):
        with pytest.raises(UnsupportedFormat, match="in both packings"):
            opened(tmp_path, tensors, config)
        return
    weight = opened(tmp_path, tensors, config)
    theirs = dequantize(codes.float(), scale.float(), None if zero is None else zero.float(),
                        QuantizationArgs(type="int", **args), torch.float32)
    read = weight.read(ALL)
    np.testing.assert_array_equal(read.dequantize(), theirs.numpy())
    check_carries(weight, reference(codes, scale.expand(rows, -1), None if zero is None else zero.expand(rows, -1)))
    some = rng.integers(0, rows, 5)
    np.testing.assert_array_equal(weight.read(some).dequantize(), theirs.numpy()[some])
    np.testing.assert_array_equal(weight.read(slice(rows // 3, rows)).dequantize(), theirs.numpy()[rows // 3:])


@settings(FEW)
@given(rows=st.integers(1, 20), groups=st.integers(1, 3), bits=st.sampled_from([4, 8]), symmetric=st.booleans(),
       seed=st.integers(0, 2**32 - 1), strategy=st.sampled_from(["tensor", "channel", "group"]),
       fmt=st.sampled_from(["int-quantized", "naive-quantized"]))
def test_int_quantized(tmp_path: Path, rows: int, groups: int, bits: int, symmetric: bool, seed: int, strategy: str,
                       fmt: str) -> None:
    rng = np.random.default_rng(seed)
    args = {"num_bits": bits, "symmetric": symmetric, "strategy": strategy,
            "group_size": 64 if strategy == "group" else None}
    shape = {"tensor": (1,), "channel": (rows, 1), "group": (rows, groups)}[strategy]
    columns = 64 * groups
    state = {"weight": torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32)).bfloat16(),
             "weight_scale": torch.from_numpy(rng.uniform(0.01, 0.5, shape)).bfloat16()}
    if not symmetric:
        state["weight_zero_point"] = torch.from_numpy(rng.integers(-8, 8, shape).astype(np.int8))
    scheme = QuantizationScheme(targets=["m"], weights=QuantizationArgs(type="int", **args))
    stored = IntQuantizationCompressor.compress(state, scheme)
    weight = opened(tmp_path, stored, weights_config(fmt, **args))
    theirs = IntQuantizationCompressor.decompress(stored, scheme)["weight"]
    assert torch.equal(torch.from_numpy(weight.read(ALL).dequantize()).bfloat16(), theirs)
    scale, zero = (v if v is None or v.ndim == 2 else v.reshape(1, 1).expand(rows, 1)
                   for v in (stored["weight_scale"], stored.get("weight_zero_point")))
    check_carries(weight, reference(stored["weight"], scale, zero))


@settings(FEW, max_examples=15)
@given(rows=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), symmetric=st.booleans(),
       size=st.sampled_from([32, 64, 128]))
def test_the_compressor_of_compressed_tensors(tmp_path: Path, rows: int, seed: int, symmetric: bool, size: int) -> None:
    torch.manual_seed(seed)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=size)
    scheme = QuantizationScheme(targets=["m"], weights=args)
    state = {"weight": torch.randn(rows, 256).bfloat16(),
             "weight_scale": (torch.rand(rows, 256 // size) + .1).bfloat16(),
             "weight_zero_point": torch.randint(-8, 8, (rows, 256 // size), dtype=torch.int8)}
    stored = PackedQuantizationCompressor.compress(state, scheme)
    weight = opened(tmp_path, stored, weights_config("pack-quantized", strategy="group", group_size=size,
                                                     symmetric=symmetric))
    theirs = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    assert torch.equal(torch.from_numpy(weight.read(ALL).dequantize()).bfloat16(), theirs)


@pytest.mark.parametrize(("bits", "kinds"), [(4, ("Q4_0", "Q4_1", "Q5_0", "Q8_0")), (5, ("Q5_0", "Q5_1", "Q8_0")),
                                             (8, ("Q8_0",))])
def test_every_code_in_every_place(bits: int, kinds: tuple[str, ...]) -> None:
    half = 1 << bits - 1
    every = np.arange(-half, half)
    for place in range(32):
        codes = np.tile(every[:, None], 64).astype(np.int8)
        codes[:, :] = every[(np.arange(64) * 7 + 3) % len(every)]
        codes[:, 32 + place] = every
        made = IntCodes(codes, np.full((len(every), 2), .5, np.float32), bits, 32)
        stored = [made]
        if bits == 4:
            pairs = (codes + 8).astype(np.uint8)
            stored.append(IntCodes(pairs[:, 0::2] | pairs[:, 1::2] << 4, made.scales, bits, 32))
        for kind in kinds:
            for some in stored:
                read = gguf_dequantize(encode(some, kind), GGMLQuantizationType[kind])
                np.testing.assert_array_equal(read, codes * np.float32(.5))


@pytest.mark.parametrize("name", ["int4-mixed-w4a16", "qqq-w4a8-mixed", "int4-g128-asym"])
def test_published_checkpoints_read_as_compressed_tensors_reads_them(name: str) -> None:
    path = checkpoint(name)
    source, theirs = open_checkpoint(path), Decompressed(path)
    weights = open_weights(source, parse_schemes(source.config["quantization_config"]).resolve)
    quantized = [w for w in weights.values() if w.format != "dense"]
    assert len(quantized) > 90
    for weight in quantized:
        np.testing.assert_array_equal(weight.read(ALL).dequantize(), theirs.weight(weight.module).numpy())
        assert weight.carries()[0].exact


# -- activation ordering -----------------------------------------------------------------------------------------------

def ordered(tmp_path: Path, index: np.ndarray, scale: torch.Tensor, seed: int = 0) -> tuple[SourceWeight, np.ndarray]:
    """4-bit codes whose columns have the groups `index`, and their values in float64."""
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(-8, 8, (scale.shape[0], len(index))).astype(np.int8))
    tensors = {"weight_packed": pack_to_int32(codes, 4), "weight_scale": scale,
               "weight_shape": torch.tensor(codes.shape), "weight_g_idx": torch.from_numpy(index.astype(np.int32))}
    config = weights_config("pack-quantized", strategy="group", group_size=len(index) // scale.shape[1],
                            actorder="group")
    return opened(tmp_path, tensors, config), codes.double().numpy() * scale.double().numpy()[:, np.maximum(index, 0)]


def test_activation_ordering_that_keeps_blocks_whole_is_exact(tmp_path: Path) -> None:
    index = np.repeat(np.random.default_rng(1).permutation(np.repeat(np.arange(4), 2)), 32)
    weight, values = ordered(tmp_path, index, torch.rand(6, 4).bfloat16())
    assert weight.carries()[0].type == "Q4_0"
    check_carries(weight, values)


def test_activation_ordering_within_blocks_is_reported(tmp_path: Path) -> None:
    index = np.random.default_rng(1).permutation(np.repeat(np.arange(4), 64))
    weight, values = ordered(tmp_path, index, (torch.rand(6, 4) + .5).bfloat16())
    carries = weight.carries()
    assert [(c.type, c.exact) for c in carries] == [("Q8_0", False), ("BF16", False)]
    assert "meet within blocks" in carries[0].why
    error = written(weight, "Q8_0") - values
    assert np.sqrt(np.square(error).mean() / np.square(values).mean()) < 5e-3
    read = weight.read(ALL)
    np.testing.assert_array_equal(read.dequantize(), values.astype(np.float32))
    with pytest.raises(PlanError, match="Q4_0 does not hold these codes"):
        q4_0(read)  # type: ignore[arg-type]


@pytest.mark.parametrize(("scales", "kind"), [([.5, .5, .5, .5], "Q4_0"), ([.5, 1, 1.5, 0], "Q8_0"),
                                              ([-.5, 1, 7.5, 0], "Q8_0")])
def test_activation_ordering_with_scales_of_one_unit_is_exact(tmp_path: Path, scales: list[float], kind: str) -> None:
    index = np.random.default_rng(1).permutation(np.repeat(np.arange(4), 64))
    weight, values = ordered(tmp_path, index, torch.tensor([scales] * 70).bfloat16())
    assert weight.carries()[0].type == kind
    assert weight.carries()[0].exact
    check_carries(weight, values)


def test_minus_one_in_g_idx_means_the_usual_order(tmp_path: Path) -> None:
    weight, _ = ordered(tmp_path, np.full(128, -1), torch.rand(3, 4).bfloat16())
    assert weight.read(ALL).index is None  # type: ignore[attr-defined]
    assert weight.carries()[0].exact


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
       st.integers(-20, 20))
def test_common_unit(values: list[float], power: int) -> None:
    near = np.ldexp(np.round(np.array(values) % 9), power).astype(np.float32)
    for scales in (np.array(values, np.float32), near, np.zeros(32, np.float32)):
        unit, multiples = common_unit(scales[None])
        if abs(multiples).max() <= 127:
            np.testing.assert_array_equal(unit * multiples, scales[None])
        else:
            assert scales is not near


# -- scales beyond FP16 ------------------------------------------------------------------------------------------------

def channel(tmp_path: Path, scales: list[float], dtype: str = "bf16", **args: Any) -> tuple[SourceWeight, np.ndarray]:
    """4-bit codes with one scale a row, and their values in float64."""
    scale = torch.tensor(scales, dtype=torch.float64).to(DTYPES[dtype])[:, None]
    codes = torch.from_numpy(np.random.default_rng(0).integers(-8, 8, (len(scales), 64)).astype(np.int8))
    tensors = {"weight_packed": pack_to_int32(codes, 4), "weight_scale": scale,
               "weight_shape": torch.tensor(codes.shape)}
    weight = opened(tmp_path, tensors, weights_config("pack-quantized", strategy="channel", **args))
    return weight, reference(codes, scale, None)


@pytest.mark.parametrize(("scales", "power"), [
    ([2.0**-17, 65280], 0), ([2.0**-24, 1.5 * 2**-23, 0], 0), ([1.5 * 2**-24, 2.0**-20], -10), ([2.0**-25], -11),
    ([2.0**17], 2), ([2.0**-30, 2.0**-3], -16), ([2.0**-120, 1.5 * 2.0**-118], -106), ([3e38], 112)])
def test_one_power_of_two_brings_scales_into_range(tmp_path: Path, scales: list[float], power: int) -> None:
    weight, values = channel(tmp_path, scales)
    first = weight.carries()[0]
    assert (first.type, first.exact) == ("Q4_0", True)
    assert first.factor == (np.ldexp(np.float32(1), power) if power else None)
    np.testing.assert_array_equal(written(weight, "Q4_0"), values)


@pytest.mark.parametrize(("scales", "dtype", "why"), [
    ([2.0**-40, 1.0, 3.0], "bf16", "1 of 3 scales are not FP16 numbers"),
    ([.1, .2, .25], "f32", "2 of 3 scales are not FP16 numbers"),
    ([65530.0, 1], "f32", "1 of 2 scales are not FP16 numbers"), ([1e38, 1e-38], "bf16", "2 of 2 scales")])
def test_scales_that_no_factor_brings_into_range_are_reported(tmp_path: Path, scales: list[float], dtype: str,
                                                              why: str) -> None:
    weight, values = channel(tmp_path, scales, dtype)
    first = weight.carries()[0]
    assert (first.type, first.exact) == ("Q4_0", False)
    assert why in first.why
    assert np.abs(written(weight, "Q4_0") - values).max() <= 2.0**-11 * np.abs(values).max()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_the_power_that_is_found_is_exact_and_one_is_found_where_there_is_one(values: list[float]) -> None:
    x = np.array(values, np.float32)
    for numbers in (x, (x.view(np.uint32) & 0xFFFF0000).view(np.float32)):
        power, exact = span(numbers).power()

        def fits(k: int, x: np.ndarray = numbers) -> bool:
            with np.errstate(over="ignore"):
                scaled = np.ldexp(x.astype(np.float64), -k)
                return bool((scaled.astype(np.float16) == scaled).all())

        assert exact == fits(power)
        assert exact == any(fits(k) for k in range(-180, 140))
        with np.errstate(over="ignore"):
            assert np.isfinite(np.ldexp(numbers.astype(np.float64), -power).astype(np.float16)).all()


def test_which_bf16_and_f16_scales_are_fp16_numbers() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        values = every.view(dtype).float()
        fit = torch.isfinite(values.half()) & (values.half().float() == values)
        raw = every.view(dtype).view(torch.int16).numpy().view(np.uint16)
        raw = raw.view(np.float16) if name == "F16" else raw
        assert [count_unfit(raw[i:i + 1], name) == 0 for i in range(len(raw))] == fit.tolist()
        assert count_unfit(raw, name) == int((~fit).sum())


def test_scales_beyond_fp16_are_never_saturated() -> None:
    codes = IntCodes(np.ones((1, 32), np.int8), np.full((1, 1), 1e6, np.float32), 8, 32)
    for kind in KINDS:
        with pytest.raises(PlanError, match=r"1 scales lie beyond FP16's range \(largest 1e\+06, limit 65504\)"):
            encode(codes, kind)


# -- zero points -------------------------------------------------------------------------------------------------------

def zeroed(tmp_path: Path, zeros: list[int], scale: float, option: str = "exact", bits: int = 4) -> SourceWeight:
    half = 1 << bits - 1
    codes = torch.from_numpy(np.random.default_rng(0).integers(-half, half, (len(zeros), 64)).astype(np.int8))
    zero = torch.tensor(zeros, dtype=torch.int8)[:, None]
    tensors = {"weight_packed": pack_to_int32(codes, bits), "weight_shape": torch.tensor(codes.shape),
               "weight_scale": torch.full((len(zeros), 1), scale).bfloat16(),
               "weight_zero_point": pack_to_int32(zero, bits, packed_dim=0)}
    config = weights_config("pack-quantized", strategy="channel", symmetric=False, num_bits=bits)
    weight = opened(tmp_path, tensors, config, FormatOptions(option))
    check_carries(weight, reference(codes, tensors["weight_scale"], zero))
    return weight


@pytest.mark.parametrize(("zeros", "scale", "option", "kinds"), [
    ([3] * 32, .5, "exact", ["Q4_1", "Q5_0", "Q8_0"]), ([3] * 32, 255 / 256, "exact", ["Q5_0", "Q8_0", "Q4_1"]),
    ([3] * 32, 255 / 256, "q8_0", ["Q8_0", "Q4_1"]), ([3] * 32, 255 / 256, "q4_1", ["Q4_1"]),
    ([0] * 32, .5, "exact", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"]), ([-8, 7] * 16, .5, "exact", ["Q4_1", "Q5_0", "Q8_0"])])
def test_zero_points(tmp_path: Path, zeros: list[int], scale: float, option: str, kinds: list[str]) -> None:
    weight = zeroed(tmp_path, zeros, scale, option)
    assert [c.type for c in weight.carries()] == [*kinds, "BF16"]


def test_groups_of_16_with_one_scale_and_two_zero_points(tmp_path: Path) -> None:
    codes = torch.from_numpy(np.random.default_rng(0).integers(-8, 8, (32, 64)).astype(np.int8))
    zero = torch.tensor([[1, -2, 3, 3]] * 32, dtype=torch.int8)
    tensors = {"weight_packed": pack_to_int32(codes, 4), "weight_shape": torch.tensor(codes.shape),
               "weight_scale": torch.tensor([[1, 1, .5, .5]] * 32).bfloat16(),
               "weight_zero_point": pack_to_int32(zero, 4, packed_dim=0)}
    config = weights_config("pack-quantized", strategy="group", group_size=16, symmetric=False)
    weight = opened(tmp_path, tensors, config)
    assert [(c.type, c.exact) for c in weight.carries()[:2]] == [("Q5_0", True), ("Q8_0", True)]
    check_carries(weight, reference(codes, tensors["weight_scale"], zero))


def test_five_bits_with_zero_points_go_to_q5_1(tmp_path: Path) -> None:
    assert [c.type for c in zeroed(tmp_path, [3] * 32, .5, bits=5).carries()] == ["Q5_1", "Q8_0", "BF16"]


def test_codes_less_zero_points_beyond_int8_are_decoded(tmp_path: Path) -> None:
    (only,) = zeroed(tmp_path, [-100] * 32, .5, bits=8).carries()
    assert "beyond int8" in only.why


def test_unknown_option() -> None:
    with pytest.raises(PlanError, match="asymmetric 'q2'"):
        FormatOptions("q2")


# -- GPTQ and AWQ ------------------------------------------------------------------------------------------------------

def stream(values: np.ndarray, bits: int) -> torch.Tensor:
    """Values (n, rows) packed along the first axis as one bit stream a row: word by word, as GPTQ's packers do."""
    out = np.zeros((-(-len(values) * bits // 32), values.shape[1]), np.uint64)
    for i, row in enumerate(values.astype(np.uint64)):
        word, bit = divmod(i * bits, 32)
        out[word] |= row << np.uint64(bit) & np.uint64(0xFFFFFFFF)
        if bit + bits > 32:
            out[word + 1] |= row >> np.uint64(32 - bit)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


@settings(FEW, max_examples=40)
@given(rows=st.sampled_from([32, 64, 96]), groups=st.integers(1, 3), bits=st.sampled_from([2, 3, 4, 8]),
       size=st.sampled_from([32, 64, -1]), old=st.booleans(), sym=st.booleans(),
       order=st.sampled_from(["", "whole", "any"]), seed=st.integers(0, 2**32 - 1))
def test_gptq(tmp_path: Path, rows: int, groups: int, bits: int, size: int, old: bool, sym: bool, order: str,
              seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = groups * max(size, 32)
    groups = groups if size > 0 else 1
    q = rng.integers(0, 1 << bits, (inputs, rows))
    z = np.full((groups, rows), 1 << bits - 1) if sym else rng.integers(1, 1 << bits, (groups, rows))
    scales = np.exp2(rng.uniform(-10, -4, (groups, rows))).astype(np.float16)
    index = np.arange(inputs) // (inputs // groups)
    if order == "any":
        index = rng.permutation(index)
    elif order == "whole":
        index = rng.permutation(index.reshape(-1, 32)[:, 0]).repeat(32)
    tensors = {"qweight": stream(q, bits), "qzeros": stream((z - old).T, bits).T, "scales": torch.from_numpy(scales),
               "g_idx": torch.from_numpy(index.astype(np.int32))}
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": bool(order),
              "checkpoint_format": "gptq" if old else "gptq_v2"}
    weight = opened(tmp_path, tensors, config)
    exact = ((q - z[index]) * scales.astype(np.float64)[index]).T
    np.testing.assert_array_equal(weight.read(ALL).dequantize(), exact.astype(np.float32))
    check_carries(weight, exact)
    if order != "any" and (sym or bits < 8):
        assert weight.carries()[0].exact
        assert weight.carries()[0].type == ("Q8_0" if bits == 8 else "Q4_0" if sym else weight.carries()[0].type)
    some = rng.integers(0, rows, 7)
    np.testing.assert_array_equal(weight.read(some).dequantize(), exact.astype(np.float32)[some])
    np.testing.assert_array_equal(weight.read(slice(5, 29)).dequantize(), exact.astype(np.float32)[5:29])


def test_gptq_zero_point_of_fifteen_stands_for_sixteen(tmp_path: Path) -> None:
    tensors = {"qweight": stream(np.full((32, 32), 3), 4), "qzeros": stream(np.full((32, 1), 15), 4).T,
               "scales": torch.ones(1, 32).half()}
    weight = opened(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False})
    assert (weight.read(ALL).dequantize() == 3 - 16).all()
    assert written(weight, "Q5_0").tolist() == [[-13.0] * 32] * 32


@settings(FEW)
@given(eights=st.integers(1, 5), groups=st.integers(1, 4), size=st.sampled_from([32, 64, 128]),
       seed=st.integers(0, 2**32 - 1))
def test_awq(tmp_path: Path, eights: int, groups: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, inputs = 8 * eights, groups * size

    def pack(values: np.ndarray) -> torch.Tensor:
        out = np.zeros((len(values), rows // 8), np.uint32)
        for word in range(rows // 8):
            for i, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                out[:, word] |= values[:, 8 * word + row].astype(np.uint32) << np.uint32(4 * i)
        return torch.from_numpy(out.view(np.int32))

    q, z = rng.integers(0, 16, (inputs, rows)), rng.integers(0, 16, (groups, rows))
    scales = np.exp2(rng.uniform(-10, -4, (groups, rows))).astype(np.float16)
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    weight = opened(tmp_path, {"qweight": pack(q), "qzeros": pack(z), "scales": torch.from_numpy(scales)}, config)
    exact = ((q - z.repeat(size, 0)) * scales.astype(np.float64).repeat(size, 0)).T
    np.testing.assert_array_equal(weight.read(ALL).dequantize(), exact.astype(np.float32))
    check_carries(weight, exact)
    assert weight.carries()[0].exact
    some = rng.integers(0, rows, 7)
    np.testing.assert_array_equal(weight.read(some).dequantize(), exact.astype(np.float32)[some])
    np.testing.assert_array_equal(weight.read(slice(3, 7)).dequantize(), exact.astype(np.float32)[3:7])


def test_gptq_patterns_and_awq_exceptions() -> None:
    gptq = parse_schemes({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "damp_percent": 0.1,
                          "dynamic": {"-:.*router": {}, r"+:.*\.0\.": {"bits": 8, "group_size": 32}}})
    assert gptq.resolve("model.layers.1.router") is None
    assert [gptq.resolve(f"model.layers.{i}.q").weights.num_bits for i in (0, 1)] == [8, 4]  # type: ignore[union-attr]
    awq = parse_schemes({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "modules_to_not_convert": ["visual"]})
    assert awq.resolve("model.visual.blocks.0.mlp.fc1") is None
    assert str(awq.resolve("model.layers.0.q").weights) == "int4 group64 asymmetric"  # type: ignore[union-attr]


@pytest.mark.parametrize(("config", "message"), [
    ({"quant_method": "gptq", "bits": 5}, "bits is 5; GPTQ stores 2, 3, 4, 8"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
    ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation is 'hadamard'"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size should be a positive number or -1, found 0"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": []}, None),
    ({"quant_method": "gptq", "bits": 4, "dynamic": [1]}, "patterns"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:(": {}}}, "not a valid regular expression"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": 3}}, "expected an object, found 3"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
    ({"quant_method": "awq", "bits": 8}, "bits is 8; AWQ's gemm layout has 4")])
def test_configs_of_gptq_and_awq_that_are_not_carried(config: dict[str, Any], message: str | None) -> None:
    if message is None:
        parse_schemes(config)
        return
    with pytest.raises((SchemeError, UnsupportedFormat), match=message):
        parse_schemes(config)


# -- transforms --------------------------------------------------------------------------------------------------------

@settings(max_examples=80, deadline=None)
@given(rows=st.integers(1, 6), bits=st.sampled_from([3, 4, 8]), group=st.sampled_from([16, 32, 48, 64, 96, 192]),
       width=st.sampled_from([1, 2, 16, 32, 48, 64, 96]), paired=st.booleans(), zero=st.booleans(),
       ordered=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_transforms_and_dequantize_commute(rows: int, bits: int, group: int, width: int, paired: bool, zero: bool,
                                           ordered: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    half, groups = 1 << bits - 1, 192 // group
    paired &= bits == 4
    stored = rng.integers(0, 256, (rows, 96)).astype(np.uint8) if paired else \
        rng.integers(-half, half, (rows, 192)).astype(np.int8)
    codes = IntCodes(stored, rng.standard_normal((rows, groups)).astype(np.float32), bits, group,
                     rng.integers(-half, half, (rows, groups)).astype(np.int16) if zero else None,
                     rng.permutation(np.arange(192) // group) if ordered else None)
    dense = Dense(codes.dequantize(), "F32")
    blocks, some = rng.permutation(192 // width), rng.integers(0, rows, 4)
    np.testing.assert_array_equal(codes.permute_columns(blocks, width).dequantize(),
                                  dense.permute_columns(blocks, width).values)
    both = codes.take(some).permute_columns(blocks, width)
    np.testing.assert_array_equal(both.dequantize(), dense.take(some).permute_columns(blocks, width).values)
    if width % 32 == 0 and group % 32 == 0 and not ordered and not zero:
        kind = "Q4_0" if bits <= 4 else "Q8_0"
        half_scales = IntCodes(both.stored, both.scales.astype(np.float16).astype(np.float32), bits, both.group)
        np.testing.assert_array_equal(gguf_dequantize(encode(half_scales, kind), GGMLQuantizationType[kind]),
                                      half_scales.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_a_permutation_that_cuts_blocks_is_refused_where_scales_differ(kind: str) -> None:
    codes = IntCodes(np.ones((2, 64), np.int8), np.array([[1, 2], [3, 4]], np.float32), 4, 32)
    with pytest.raises(PlanError, match="groups with different scales meet within blocks of 32"):
        encode(codes.permute_columns(np.array([2, 0, 1, 3]), 16), kind)


# -- malformed ---------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, torch.Tensor]], Any]


def packed_tensors() -> dict[str, torch.Tensor]:
    return {"weight_packed": torch.zeros(8, 16, dtype=torch.int32), "weight_scale": torch.ones(8, 4).bfloat16(),
            "weight_shape": torch.tensor([8, 128])}


def int_tensors() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(8, 128, dtype=torch.int8), "weight_scale": torch.ones(8, 4).bfloat16()}


def gptq_tensors() -> dict[str, torch.Tensor]:
    return {"qweight": torch.zeros(16, 32, dtype=torch.int32), "qzeros": torch.zeros(4, 4, dtype=torch.int32),
            "scales": torch.ones(4, 32).half(), "g_idx": torch.arange(128, dtype=torch.int32) // 32}


def awq_tensors() -> dict[str, torch.Tensor]:
    return {"qweight": torch.zeros(128, 4, dtype=torch.int32), "qzeros": torch.zeros(4, 4, dtype=torch.int32),
            "scales": torch.ones(4, 32).half()}


GROUP32 = {"strategy": "group", "group_size": 32}
PACKED = weights_config("pack-quantized", **GROUP32)
INT8 = weights_config("int-quantized", num_bits=8, **GROUP32)
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}


def put(name: str, value: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def nothing(tensors: dict[str, torch.Tensor]) -> None:
    pass


def poke(name: str, value: float) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][2, 1] = value
    return change


SCALES = r"m\.weight_scale \(BF16 .* in model\.safetensors\): "


@pytest.mark.parametrize(("make", "change", "config", "error", "message"), [
    (packed_tensors, drop("weight_scale"), PACKED, CheckpointError, r"m\.weight_scale: missing.*model\.safetensors"),
    (packed_tensors, drop("weight_shape"), PACKED, CheckpointError, r"m\.weight_shape: missing"),
    (packed_tensors, put("weight_shape", torch.tensor([8, 256])), PACKED, CheckpointError,
     r"m\.weight_packed \(I32 \[8, 16\] in model\.safetensors\): 256 values of 4 bits take 32 words .* found 16"),
    (packed_tensors, put("weight_shape", torch.tensor([9, 128])), PACKED, CheckpointError,
     r"weight_shape says \[9, 128\]"),
    (packed_tensors, put("weight_shape", torch.tensor([8, 0])), PACKED, CheckpointError, r"weight_shape says \[8, 0\]"),
    (packed_tensors, put("weight_shape", torch.tensor([8, 128, 1])), PACKED, CheckpointError, r"expected shape \[2\]"),
    (packed_tensors, put("weight_scale", torch.ones(8, 3).bfloat16()), PACKED, CheckpointError,
     SCALES + r"expected shape \[8, 4\] for int4 group32"),
    (packed_tensors, put("weight_scale", torch.ones(8, 4, dtype=torch.int32)), PACKED, UnsupportedFormat,
     "expected dtype BF16 or F16 or F32"),
    (packed_tensors, poke("weight_scale", float("nan")), PACKED, CheckpointError,
     SCALES + "scale of row 2, group 1 is nan"),
    (packed_tensors, poke("weight_scale", float("-inf")), PACKED, CheckpointError,
     SCALES + "scale of row 2, group 1 is -inf"),
    (packed_tensors, nothing, weights_config("pack-quantized", strategy="group", group_size=48), CheckpointError,
     r"m\.weight_packed .*: 128 columns do not divide into groups of 48"),
    (packed_tensors, nothing, weights_config("pack-quantized", num_bits=9, **GROUP32), UnsupportedFormat,
     "int9 group32 for pack-quantized, expected int with 2 to 8 bits"),
    (packed_tensors, nothing, weights_config("pack-quantized", strategy="block", block_structure=[8, 8]),
     UnsupportedFormat, "strategy block is not carried"),
    (packed_tensors, nothing, weights_config("pack-quantized", symmetric=False, **GROUP32), CheckpointError,
     r"m\.weight_zero_point: missing"),
    (packed_tensors, put("weight_zero_point", torch.zeros(1, 4, dtype=torch.int32)), PACKED, SchemeError,
     "packed zero points, but config says int4 group32"),
    (packed_tensors, put("weight_zero_point", torch.zeros(2, 4, dtype=torch.int32)),
     weights_config("pack-quantized", symmetric=False, **GROUP32), CheckpointError,
     "8 zero points of 4 bits take 1 words"),
    (packed_tensors, put("weight_zero_point", torch.zeros(1, 3, dtype=torch.int32)),
     weights_config("pack-quantized", symmetric=False, **GROUP32), CheckpointError, r"expected shape \[words, 4\]"),
    (packed_tensors, put("weight_g_idx", torch.full((128,), 4, dtype=torch.int32)), PACKED, CheckpointError,
     r"m\.weight_g_idx .*: groups from 4 to 4, expected 0 to 3"),
    (packed_tensors, nothing, weights_config("pack-quantized", actorder="group", **GROUP32), CheckpointError,
     r"m\.weight_g_idx: missing"),
    (packed_tensors, put("qzeros", torch.zeros(1)), PACKED, UnsupportedFormat, r"m\.qzeros .*: not expected beside"),
    (packed_tensors, nothing, INT8, SchemeError, "m: stored as packed integers"),
    (int_tensors, drop("weight_scale"), INT8, CheckpointError, r"m\.weight_scale: missing"),
    (int_tensors, poke("weight_scale", float("inf")), INT8, CheckpointError, SCALES + "scale of row 2, group 1 is inf"),
    (int_tensors, put("weight", torch.zeros(8, dtype=torch.int8)), INT8, CheckpointError, "expected two dimensions"),
    (int_tensors, poke("weight", 8), weights_config("int-quantized", **GROUP32), CheckpointError,
     r"m\.weight .*: codes from 0 to 8, expected -8 to 7 for int4 group32"),
    (int_tensors, nothing, weights_config("int-quantized", type="float", num_bits=8, **GROUP32), UnsupportedFormat,
     "float8 group32 for int8 codes"),
    (gptq_tensors, drop("scales"), GPTQ, CheckpointError, r"m\.scales: missing"),
    (gptq_tensors, drop("qzeros"), GPTQ, CheckpointError, r"m\.qzeros: missing"),
    (gptq_tensors, drop("g_idx"), GPTQ | {"desc_act": True}, CheckpointError, r"m\.g_idx: missing"),
    (gptq_tensors, put("scales", torch.ones(3, 32).half()), GPTQ, CheckpointError,
     r"m\.scales .*: expected shape \[4, 32\]"),
    (gptq_tensors, poke("scales", float("nan")), GPTQ, CheckpointError, "scale of row 1, group 2 is nan"),
    (gptq_tensors, put("qzeros", torch.zeros(4, 5, dtype=torch.int32)), GPTQ, CheckpointError,
     r"expected shape \[4, 4\]"),
    (gptq_tensors, nothing, GPTQ | {"group_size": 48}, CheckpointError, "128 columns do not divide into groups of 48"),
    (gptq_tensors, put("g_idx", torch.full((128,), 9, dtype=torch.int32)), GPTQ, CheckpointError, "expected 0 to 3"),
    (gptq_tensors, nothing, AWQ, SchemeError, "m: stored as GPTQ's qweight"),
    (awq_tensors, nothing, GPTQ, SchemeError, "m: stored as AWQ's qweight"),
    (awq_tensors, drop("qzeros"), AWQ, CheckpointError, r"m\.qzeros: missing"),
    (awq_tensors, put("scales", torch.ones(3, 32).half()), AWQ, CheckpointError, r"expected shape \[4, 32\]"),
    (awq_tensors, poke("scales", float("inf")), AWQ, CheckpointError, "scale of row 1, group 2 is inf")])
def test_malformed(tmp_path: Path, make: Callable[[], dict[str, torch.Tensor]], change: Change,
                   config: dict[str, Any], error: type[McpqError], message: str) -> None:
    tensors = make()
    change(tensors)
    with pytest.raises(error, match=message):
        opened(tmp_path, tensors, config).read(ALL)
    if "scale of row" in message:
        with pytest.raises(error, match=message):
            opened(tmp_path, tensors, config).carries()


def test_both_packings_of_few_columns_cannot_be_told_apart(tmp_path: Path) -> None:
    tensors = {"weight_packed": torch.zeros(8, 2, dtype=torch.int32), "weight_scale": torch.ones(8, 1).bfloat16(),
               "weight_shape": torch.tensor([8, 20])}
    with pytest.raises(UnsupportedFormat, match=r"m\.weight_pa.*20 values of 3 bits take 2 words in both packings"):
        opened(tmp_path, tensors, weights_config("pack-quantized", num_bits=3, strategy="channel"))


def test_zero_scales_are_fine(tmp_path: Path) -> None:
    weight, values = channel(tmp_path, [0.0, 0.0, 1.0])
    assert weight.carries()[0].exact
    np.testing.assert_array_equal(written(weight, "Q4_0"), values)


def test_static_activation_scales_are_noted(tmp_path: Path) -> None:
    weight = opened(tmp_path, int_tensors() | {"input_scale": torch.ones(1), "input_zero_point": torch.zeros(1)}, INT8)
    assert "input_scale, input_zero_point: static activation scales are not carried" in weight.notes[0]
    assert len(weight.refs) == 4
