"""FP8: BF16 is compressed-tensors' own decompression bit for bit; Q8_0 is exact wherever an FP16 scale makes it so."""

from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Decompressed, checkpoint
from small import MODULE, bits, compressed_tensors, open_module, permuted, rows_and_columns, schemes, write

from mcpq_gguf.checkpoint import open_checkpoint
from mcpq_gguf.convert import Options, prepare
from mcpq_gguf.errors import CheckpointError, McpqError, PlanError, SchemeError, UnsupportedFormat
from mcpq_gguf.formats import open_weights
from mcpq_gguf.formats.fp8codes import E5M2, Fp8
from mcpq_gguf.formats.unused import notices
from mcpq_gguf.ggml.encode import encode
from mcpq_gguf.ggml.fp8_blocks import q8_0_report
from mcpq_gguf.plan import Exactness

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
KINDS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
# Exponents of the scales: ordinary, subnormal in F16 or BF16, largest.
EXPONENTS = [(-14, -6), (-24, -10), (-133, -120), (-149, -130), (6, 8), (100, 112), (-3, 15)]


def random_bytes(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """All finite codes, each as likely."""
    limit = 0x7F if kind == "E4M3" else 0x7C
    return rng.integers(0, limit, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7


def random_scales(rng: np.random.Generator, shape: tuple[int, ...], exponents: tuple[int, int],
                  dtype: torch.dtype) -> torch.Tensor:
    scales = np.ldexp(rng.uniform(0.5, 1, shape), rng.integers(exponents[0], exponents[1] + 1, shape))
    scales[rng.random(shape) < 0.05] = 0
    return torch.from_numpy(scales).clamp(max=float(torch.finfo(dtype).max)).to(dtype)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, dict[str, Any], tuple[int, int]]:
    """Rows, columns, QuantizationArgs as a dict, shape of the scales."""
    strategy = draw(st.sampled_from(["tensor", "channel", "group", "block"]))
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 80))
    args: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy}
    shape = {"tensor": (1, 1), "channel": (rows, 1)}.get(strategy, (0, 0))
    if strategy == "group":
        size = draw(st.sampled_from([1, 4, 16, 24, 32]))
        columns = size * draw(st.integers(1, 5))
        args["group_size"], shape = size, (rows, columns // size)
    elif strategy == "block":
        height, width = draw(st.sampled_from([(16, 16), (8, 32), (3, 5), (128, 128), (1, 7)]))
        args["block_structure"], shape = [height, width], (-(-rows // height), -(-columns // width))
    return rows, columns, args, shape


def test_table_is_that_of_torch() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float().numpy()
    np.testing.assert_array_equal(E5M2, theirs)


@settings(max_examples=120, deadline=None)
@given(layout=layouts(), dtype=st.sampled_from(list(DTYPES)), kind=st.sampled_from(list(KINDS)),
       exponents=st.sampled_from(EXPONENTS), seed=st.integers(0, 2**32 - 1))
def test_bf16_is_the_reference_decompression(layout: tuple[int, int, dict[str, Any], tuple[int, int]], dtype: str,
                                             kind: str, exponents: tuple[int, int], seed: int) -> None:
    rows, columns, args, shape = layout
    rng = np.random.default_rng(seed)
    weight = torch.from_numpy(random_bytes(rng, (rows, columns), kind)).view(KINDS[kind])
    scale = random_scales(rng, shape, exponents, DTYPES[dtype])
    source = open_module({"weight": weight, "weight_scale": scale},
                         compressed_tensors("float-quantized", args))
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    theirs = NaiveQuantizationCompressor.decompress({"weight": weight, "weight_scale": scale}, scheme)["weight"]
    assert theirs.dtype == DTYPES[dtype]
    codes = source.read(slice(0, rows))
    assert isinstance(codes, Fp8)
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "group": (1, args.get("group_size", 1)),
                     "block": args.get("block_structure", (1, 1))}[args["strategy"]]
    full = scale.float().repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
    np.testing.assert_array_equal(codes.dequantize(), (weight.float() * full).numpy())
    if torch.isfinite(theirs.to(torch.bfloat16)).all():
        np.testing.assert_array_equal(encode(codes, "BF16").view(np.uint16), bits(theirs.to(torch.bfloat16)))
    else:  # it overflowed F16 there
        with pytest.raises(PlanError, match="beyond"):
            encode(codes, "BF16")


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 20), blocks=st.integers(1, 6), width=st.sampled_from([1, 4, 16, 32]),
       tile=st.sampled_from([(1, 16), (4, 24), (128, 128), (5, 7), (1000, 1000)]), seed=st.integers(0, 2**32 - 1))
def test_transforms_mean_the_same_before_and_after_decoding(rows: int, blocks: int, width: int, tile: tuple[int, int],
                                                            seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = blocks * width
    scales = rng.uniform(1, 2, (-(-rows // tile[0]), -(-columns // tile[1]))).astype(np.float32)
    codes = Fp8(random_bytes(rng, (rows, columns), "E4M3"), scales, tile)
    index, order = rows_and_columns(rng, rows, columns, width)
    expected = permuted(codes.dequantize(), index, order, width)
    np.testing.assert_array_equal(codes.take(index).permute_columns(order, width).dequantize(), expected)
    np.testing.assert_array_equal(codes.permute_columns(order, width).take(index).dequantize(), expected)
    np.testing.assert_array_equal(codes.take(slice(0, rows)).dequantize(), codes.dequantize())


def some_scale_is_exact(values: np.ndarray) -> bool:
    """Whether an FP16 d and integers within +-127 give these numbers: d must be the smallest one / 1 .. 127.

    In float64 a product of 11 and 7 bits is exact, and so are these comparisons.
    """
    numbers = np.abs(values[values != 0].astype(np.float64))
    if not numbers.size:
        return True
    q = np.arange(1, 128)
    d = (numbers.min() / q).astype(np.float16).astype(np.float64)
    d = d[(d * q == numbers.min()) & np.isfinite(d)][:, None]
    steps = np.rint(numbers / d)
    return bool(((steps * d == numbers) & (steps <= 127)).all(1).any())


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), low=st.integers(0, 0x7B), span=st.integers(0, 60),
       zeros=st.sampled_from([0, 0.5, 0.95]), odd=st.sampled_from([1, 3, 5, 7]),
       exponents=st.sampled_from([(-14, -6), (-24, -10), (-3, 3)]), seed=st.integers(0, 2**32 - 1))
def test_q8_0_is_exact_where_a_scale_exists(kind: str, low: int, span: int, zeros: float, odd: int,
                                            exponents: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    allowed = np.arange(low, min(low + span, 0x7E if kind == "E4M3" else 0x7B) + 1, dtype=np.uint8)
    unit = 9 if kind == "E4M3" else 16
    table = torch.from_numpy(allowed).view(KINDS[kind]).double().numpy()
    multiples = allowed[np.ldexp(table, unit) % odd == 0]
    allowed = multiples if len(multiples) else allowed
    bytes_ = rng.choice(allowed, (4, 64)) | rng.integers(0, 2, (4, 64), np.uint8) << 7
    bytes_[rng.random((4, 64)) < zeros] = 0
    scale = random_scales(rng, (4, 1), exponents, torch.bfloat16).float().numpy()
    codes = Fp8(bytes_, scale, (1, 64), "E5M2" if kind == "E5M2" else "E4M3", "BF16")
    values = codes.dequantize()
    if np.abs(values).max() > 65504:
        return
    read = dequantize(encode(codes, "Q8_0"), GGMLQuantizationType.Q8_0)
    same = (read == values).reshape(-1, 32).all(1)
    assert list(same) == [some_scale_is_exact(b) for b in values.reshape(-1, 32)]
    assert q8_0_report(codes)[:2] == (8, int(same.sum()))


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), tile=st.sampled_from([(1, 64), (2, 32), (1, 16), (3, 40)]),
       exponents=st.sampled_from([(-14, -6), (-24, -10), (-40, -20), (-149, -126), (-3, 1)]),
       seed=st.integers(0, 2**32 - 1))
def test_q8_0_is_never_worse_than_plain_quantization(kind: str, tile: tuple[int, int], exponents: tuple[int, int],
                                                     seed: int) -> None:
    rng = np.random.default_rng(seed)
    scale = random_scales(rng, (-(-4 // tile[0]), -(-64 // tile[1])), exponents, torch.float32).numpy()
    codes = Fp8(random_bytes(rng, (4, 64), kind), scale, tile, "E5M2" if kind == "E5M2" else "E4M3")
    values = codes.dequantize()
    ours = dequantize(encode(codes, "Q8_0"), GGMLQuantizationType.Q8_0).astype(np.float64) - values
    with np.errstate(all="ignore"):
        plain = dequantize(quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0) - values
    error, other = (np.square(x.astype(np.float64)).reshape(-1, 32).sum(1) for x in (ours, plain))
    assert (error <= other * (1 + 1e-5)).all()


def test_q8_0_of_random_weights() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 2048)).astype(np.float32)
    scale = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / 448).bfloat16().float()
    codes = (torch.from_numpy(weight) / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    report = q8_0_report(Fp8(codes, scale.numpy(), (1, 2048), "E4M3", "BF16"))
    assert report.exact_blocks > 0.01 * report.blocks
    assert report.rms < 0.72 * report.rms_plain


def test_q8_0_refuses_what_it_cannot_hold() -> None:
    one = np.ones((1, 1), np.float32)
    with pytest.raises(PlanError, match="do not divide"):
        encode(Fp8(np.zeros((1, 40), np.uint8), one, (1, 40)), "Q8_0")
    with pytest.raises(PlanError, match="beyond Q8_0"):
        encode(Fp8(np.full((1, 32), 0x7E, np.uint8), one * 1e6, (1, 32)), "Q8_0")
    assert not encode(Fp8(np.full((1, 32), 0x80, np.uint8), one, (1, 32)), "Q8_0").any()


@pytest.mark.parametrize("name", ["made-fp8", "fp8-dynamic", "mixed-nvfp4-fp8"])
def test_modules_of_whole_checkpoints(name: str) -> None:
    path = checkpoint(name)
    source, reference = open_checkpoint(path), Decompressed(path)
    found = [w for w in open_weights(source, schemes(source).resolve).values() if w.format == "float-quantized"]
    assert len(found) >= 14
    for weight in found:
        codes = weight.read(slice(0, weight.shape[0]))
        np.testing.assert_array_equal(encode(codes, "BF16").view(np.uint16), bits(reference.bf16(weight.module)))


def test_the_plan_claims_bf16_and_not_exact() -> None:
    prepared = prepare(checkpoint("made-fp8"), Options(mmproj=False))
    fp8 = [e for e in prepared.plan.entries
           if e.kind == "weight" and prepared.weights[e.parts[0].module].format == "float-quantized"]
    assert fp8
    assert {(e.type, e.exactness) for e in fp8} == {("BF16", Exactness.BF16)}


# ------------------------------------------------------------------------------------- other writers of FP8


def deepseek(**keys: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"} | keys


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (1, 5)])
def test_deepseek_blocks_multiply(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    weight = torch.from_numpy(random_bytes(rng, shape, "E4M3")).view(torch.float8_e4m3fn)
    scale = random_scales(rng, (-(-shape[0] // 128), -(-shape[1] // 128)), (-14, -6), torch.float32)
    source = open_module({"weight": weight, "weight_scale_inv": scale},
                         deepseek(weight_block_size=[128, 128], modules_to_not_convert=["lm_head"]))
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    want = weight.float() * full
    np.testing.assert_array_equal(source.read(slice(0, shape[0])).dequantize(), want.numpy())
    index = rng.permutation(shape[0])
    np.testing.assert_array_equal(source.read(index).dequantize(), want.numpy()[index])
    assert source.format == "fp8"


def test_deepseek_scales_as_powers_of_two() -> None:
    weight = torch.full((129, 5), 1.5).to(torch.float8_e4m3fn)
    powers = torch.tensor([[126], [1]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    config = deepseek(weight_block_size=[128, 128], scale_fmt="ue8m0")
    read = open_module({"weight": weight, "weight_scale_inv": powers}, config).read(slice(127, 129)).dequantize()
    np.testing.assert_array_equal(read, np.repeat([[0.75], [1.5 * 2.0**-126]], 5, 1))
    powers.view(torch.uint8)[1] = 255
    with pytest.raises(CheckpointError, match="row 1, column 0 is inf"):
        open_module({"weight": weight, "weight_scale_inv": powers}, config).read(slice(127, 129))


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_fp8_with_one_scale(suffix: str, shape: tuple[int, ...]) -> None:
    weight = torch.full((3, 4), 2.0).to(torch.float8_e4m3fn)
    source = open_module({"weight": weight, suffix: torch.full(shape, 0.25), "input_scale": torch.ones(1)},
                         deepseek(activation_scheme="static"))
    np.testing.assert_array_equal(source.read(slice(0, 3)).dequantize(), np.full((3, 4), 0.5))
    assert "input_scale" in source.notes[0]


def test_scales_of_the_kv_cache_are_left_out_with_a_notice() -> None:
    weight, one = torch.ones(2, 4).to(torch.float8_e4m3fn), torch.ones(1)
    tensors = {"weight": weight, "weight_scale": one, "k_scale": one, "model.layers.0.self_attn.v_scale": one,
               "model.layers.1.self_attn.k_proj.weight": torch.ones(2, 4).bfloat16(),
               "model.layers.1.self_attn.k_proj.k_scale": one, "model.k_scale": one}
    made = write(tensors, deepseek())
    assert set(open_weights(made, schemes(made).resolve)) == {MODULE, "model.layers.1.self_attn.k_proj",
                                                             "model.k_scale"}
    (note,) = notices(made.tensors)
    assert "and 2 more" in note
    assert not notices(["model.k_scale"])


# ------------------------------------------------------------------------------------- malformed

GOOD = {"weight": torch.ones(4, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(4, 1).bfloat16()}


def with_byte(byte: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    raw = torch.zeros(4, 64, dtype=torch.uint8)
    raw[2, 9] = byte
    return raw.view(dtype)


def scale_with(value: float) -> torch.Tensor:
    scale = torch.ones(4, 1)
    scale[3] = value
    return scale


def args(**keys: Any) -> dict[str, Any]:
    return compressed_tensors("float-quantized", CHANNEL | keys)


@pytest.mark.parametrize(("change", "config", "error", "says"), [
    ({"weight_scale": None}, args(), CheckpointError, r"weight_scale: missing"),
    ({"weight_scale": torch.ones(3, 1)}, args(), CheckpointError, r"weight_scale \(F32 \[3, 1\].*expected.*\[4, 1\]"),
    ({"weight_scale": torch.ones(1)}, args(), CheckpointError, r"expected shape \[4, 1\].*per channel"),
    ({}, args(strategy="tensor"), CheckpointError, r"expected shape \[1, 1\].*per tensor"),
    ({}, args(strategy="block", block_structure=[2, 32]), CheckpointError, r"expected shape \[2, 2\].*block of 2 x 32"),
    ({}, args(strategy="group", group_size=48), CheckpointError, "64 columns do not divide into groups of 48"),
    ({}, args(strategy="token"), UnsupportedFormat, "known are tensor, channel, group and block"),
    ({"weight_scale": torch.ones(4, 1).int()}, args(), UnsupportedFormat, "expected dtype F32 or BF16"),
    ({"weight_scale": scale_with(float("nan"))}, args(), CheckpointError, "row 3, column 0 is nan"),
    ({"weight_scale": scale_with(float("inf"))}, args(), CheckpointError, "row 3, column 0 is inf"),
    ({"weight_scale": scale_with(-1)}, args(), CheckpointError, "row 3, column 0 is -1"),
    ({"weight": with_byte(0x7E), "weight_scale": scale_with(0) + 1e37}, args(), CheckpointError, "beyond float32"),
    ({"weight": with_byte(0x7F)}, args(), CheckpointError, r"row 2, column 9 is NaN or infinite \(byte 0x7F\)"),
    ({"weight": with_byte(0xFF)}, args(), CheckpointError, r"byte 0xFF"),
    ({"weight": with_byte(0x7C, torch.float8_e5m2)}, args(), CheckpointError, r"byte 0x7C"),
    ({"weight": with_byte(0xFE, torch.float8_e5m2)}, args(), CheckpointError, r"byte 0xFE"),
    ({"weight": torch.ones(256).to(torch.float8_e4m3fn)}, args(), CheckpointError, "expected two dimensions"),
    ({"weight_zero_point": torch.zeros(4, 1, dtype=torch.int8)}, args(), UnsupportedFormat, "weight_zero_point.*not"),
    ({}, args(symmetric=False), UnsupportedFormat, "expected symmetric float8"),
    ({}, compressed_tensors("int-quantized", CHANNEL | {"type": "int"}), SchemeError, "says int-quantized"),
    ({}, None, SchemeError, "no group"),
    ({"weight_scale": None, "weight_scale_inv": torch.ones(1, 1)}, args(), SchemeError, "weight_scale_inv"),
    ({}, deepseek(weight_block_size=[128]), SchemeError, "weight_block_size"),
    ({}, deepseek(fmt="e3m4"), UnsupportedFormat, "fmt"),
    ({}, deepseek(surprise=1), SchemeError, "surprise"),
    ({}, deepseek(modules_to_not_convert=[MODULE]), SchemeError, "no group or ignores it"),
])
def test_malformed(change: dict[str, torch.Tensor | None], config: dict[str, Any] | None, error: type[McpqError],
                   says: str) -> None:
    tensors = {k: v for k, v in (GOOD | change).items() if v is not None}
    with pytest.raises(error, match=says):
        open_module(tensors, config).read(slice(1, 4))
