"""NVIDIA ModelOpt: scales multiply where compressed-tensors' divide, and every config that names them is understood."""

from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from small import MODULE, open_module, permuted, rows_and_columns, schemes, write

from mcpq_gguf.errors import CheckpointError, McpqError, SchemeError, UnsupportedFormat
from mcpq_gguf.formats import disagreements, open_weights
from mcpq_gguf.formats.codes import Fp4
from mcpq_gguf.formats.fp8codes import Fp8
from mcpq_gguf.ggml.encode import encode
from mcpq_gguf.modelopt_schemes import LayerSchemes, parse_modelopt
from mcpq_gguf.schemes import parse_schemes

EXCLUDED = ["lm_head", "model.layers.*.mlp.gate", "model.layers.1*", "vision?tower*"]


def config(algorithm: str | None = "NVFP4", **keys: Any) -> dict[str, Any]:
    """As newer versions write into config.json."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt"}, "ignore": EXCLUDED,
            "config_groups": {"group_0": {"targets": ["Linear"]}}} | keys


def side(algorithm: str = "NVFP4", **keys: Any) -> dict[str, Any]:
    """As hf_quant_config.json."""
    return {"producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": EXCLUDED,
                             "group_size": 16} | keys}


def nvfp4(rows: int = 4, columns: int = 64, seed: int = 0, factor: float = 0.003) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {"weight": torch.from_numpy(rng.integers(0, 256, (rows, columns // 2), np.uint8)),
            "weight_scale": torch.from_numpy(rng.integers(0, 0x7F, (rows, columns // 16), np.uint8)
                                             ).view(torch.float8_e4m3fn),
            "weight_scale_2": torch.tensor(factor, dtype=torch.float32), "input_scale": torch.tensor(0.25)}


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 4), factor=st.floats(2**-20, 2**4, width=32),
       seed=st.integers(0, 2**32 - 1))
def test_nvfp4_is_carried_with_a_factor_that_multiplies(rows: int, blocks: int, factor: float, seed: int) -> None:
    tensors = nvfp4(rows, blocks * 64, seed, factor)
    source = open_module(tensors, config())
    codes = source.read(slice(0, rows))
    values = unpack_fp4_from_uint8(tensors["weight"], rows, blocks * 64, dtype=torch.float32)
    scales = tensors["weight_scale"].float().repeat_interleave(16, 1)
    np.testing.assert_array_equal(codes.dequantize(), (values * (scales * tensors["weight_scale_2"])).numpy())
    read = dequantize(encode(codes, "NVFP4"), GGMLQuantizationType.NVFP4)
    np.testing.assert_array_equal(read, (values * scales).numpy())
    (carry,) = source.carries()
    assert (carry.type, carry.exact, carry.factor) == ("NVFP4", True, np.float32(factor))
    assert source.input_scale == np.float32(0.25)
    assert isinstance(codes, Fp4)
    rng = np.random.default_rng(seed)
    index, order = rows_and_columns(rng, rows, blocks * 64, 64)
    np.testing.assert_array_equal(codes.take(index).permute_columns(order, 64).dequantize(),
                                  permuted(codes.dequantize(), index, order, 64))


def test_weight_only_nvfp4_has_no_input_scale() -> None:
    tensors = nvfp4()
    assert open_module(tensors, config("W4A16_NVFP4")).input_scale is None
    del tensors["input_scale"]
    assert open_module(tensors, config("W4A16_NVFP4")).input_scale is None
    with pytest.raises(CheckpointError, match="input_scale: missing"):
        open_module(tensors, config())


@pytest.mark.parametrize(("algorithm", "shape", "tile"), [
    ("FP8", (), (200, 130)), ("FP8", (1,), (200, 130)),
    ("FP8_PER_CHANNEL_PER_TOKEN", (200,), (1, 130)), ("FP8_PER_CHANNEL_PER_TOKEN", (200, 1), (1, 130)),
    ("FP8_PB_WO", (2, 2), (128, 128)), ("fp8_pb_wo", (2, 1, 2, 1), (128, 128)),
])
def test_fp8(algorithm: str, shape: tuple[int, ...], tile: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    weight = torch.from_numpy(rng.standard_normal((200, 130)).astype(np.float32)).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(np.asarray(rng.uniform(0.1, 1, shape), np.float32))
    source = open_module({"weight": weight, "weight_scale": scale, "input_scale": torch.ones(())}, config(algorithm))
    grid = scale.reshape(-(-200 // tile[0]), -(-130 // tile[1]))
    full = grid.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[:200, :130]
    codes = source.read(slice(0, 200))
    assert isinstance(codes, Fp8)
    np.testing.assert_array_equal(codes.dequantize(), (weight.float() * full).numpy())
    assert [(c.type, c.exact) for c in source.carries()] == [("BF16", False)]
    assert source.format == "modelopt-fp8"
    assert "input_scale" in source.notes[0]


def test_mxfp8() -> None:
    weight = torch.full((3, 64), -2.5).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128]] * 3, dtype=torch.uint8)
    source = open_module({"weight": weight, "weight_scale": scale}, config("MXFP8"))
    np.testing.assert_array_equal(source.read(slice(0, 3)).dequantize(), np.repeat([[-2.5, -5]] * 3, 32, 1))
    assert source.format == "modelopt-mxfp8"


def test_config_only_in_the_side_file() -> None:
    made = write(nvfp4(), None, side())
    found = schemes(made)
    assert open_weights(made, found.resolve)[MODULE].format == "modelopt-nvfp4"
    assert "KV cache" in found.notes[0]
    both = write(nvfp4(), config(), side())
    assert open_weights(both, schemes(both).resolve)[MODULE].format == "modelopt-nvfp4"


def test_a_side_file_beside_another_method_is_left_alone() -> None:
    weight = torch.ones(2, 4).to(torch.float8_e4m3fn)
    source = open_module({"weight": weight, "weight_scale": torch.ones(1)}, {"quant_method": "fp8"}, side("FP8"))
    assert source.format == "fp8"


def test_side_file_and_config_must_agree() -> None:
    with pytest.raises(SchemeError, match=r"quant_algo is 'FP8', config\.json says 'NVFP4'"):
        schemes(write(nvfp4(), config(), side("FP8")))
    with pytest.raises(SchemeError, match="expected an object `quantization`"):
        schemes(write(nvfp4(), None, {"quantization": None}))


@pytest.mark.parametrize(("name", "left_out"), [
    ("lm_head", True), ("lm_heads", False), ("model.layers.7.mlp.gate", True), ("model.layers.7.mlp.gate_proj", False),
    ("model.layers.1.x", True), ("model.layers.12.y", True), ("model.layers.2.x", False), ("vision_tower.a", True),
])
def test_excluded_names_are_shell_patterns(name: str, left_out: bool) -> None:
    for made in (parse_modelopt(config()), parse_modelopt(config(ignore=None, exclude_modules=EXCLUDED))):
        assert (made.resolve(name) is None) == left_out


def test_mixed_precision_names_each_layer() -> None:
    layers = {"model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 16},
              "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    made = parse_schemes(config("MIXED_PRECISION", quantized_layers=layers))
    assert isinstance(made, LayerSchemes)
    kinds = {name: s.format if (s := made.resolve(name)) else None for name in (
        "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
        "model.layers.0.mlp2.up_proj")}
    assert list(kinds.values()) == ["modelopt-nvfp4", "modelopt-fp8", None, None]


@pytest.mark.parametrize(("wrong", "error", "says"), [
    (config("NVFP4_AWQ"), UnsupportedFormat, "NVFP4_AWQ.*pre_quant_scale"),
    (config("W4A8_AWQ"), UnsupportedFormat, "AWQ"),
    (config(None), UnsupportedFormat, "quant_algo None"),
    (config("MIXED_PRECISION"), UnsupportedFormat, "MIXED_PRECISION"),
    (config("MIXED_PRECISION", quantized_layers=["a"]), SchemeError, "quantized_layers"),
    (config(group_size=32), SchemeError, "group_size 32"),
    (config(surprise=1), SchemeError, "surprise"),
    (config(ignore="lm_head"), SchemeError, "ignore"),
    ({"quant_method": "modelopt_future"}, UnsupportedFormat, "modelopt_future"),
])
def test_configs_that_are_refused(wrong: dict[str, Any], error: type[McpqError], says: str) -> None:
    with pytest.raises(error, match=says):
        parse_schemes(wrong)


def negative() -> torch.Tensor:
    raw = torch.zeros(4, 4, dtype=torch.uint8)
    raw[3, 2] = 0x85
    return raw.view(torch.float8_e4m3fn)


@pytest.mark.parametrize(("change", "error", "says"), [
    ({"weight_scale": None}, CheckpointError, "weight_scale: missing"),
    ({"weight_scale_2": None}, CheckpointError, "weight_scale_2: missing"),
    ({"weight_scale": torch.zeros(4, 3).to(torch.float8_e4m3fn)}, CheckpointError,
     r"\[4, 3\].*expected shape \[4, 4\]"),
    ({"weight_scale": torch.zeros(4, 4)}, UnsupportedFormat, "expected dtype F8_E4M3"),
    ({"weight_scale": negative()}, CheckpointError, r"row 3, group 2 is negative \(byte 0x85\)"),
    ({"weight": torch.zeros(4, 4, dtype=torch.uint8)}, CheckpointError, "8 columns do not divide into groups of 16"),
    ({"weight_scale_2": torch.zeros(())}, CheckpointError, "weight_scale_2.*positive finite"),
    ({"weight_scale_2": torch.tensor(float("nan"))}, CheckpointError, "positive finite"),
    ({"weight_scale_2": torch.ones(2)}, CheckpointError, "single value"),
    ({"pre_quant_scale": torch.ones(64)}, UnsupportedFormat, "pre_quant_scale"),
])
def test_malformed(change: dict[str, torch.Tensor | None], error: type[McpqError], says: str) -> None:
    tensors = {k: v for k, v in (nvfp4() | change).items() if v is not None}
    with pytest.raises(error, match=says):
        open_module(tensors, config()).read(slice(1, 4))


def test_a_module_that_config_leaves_out_but_tensors_quantize() -> None:
    with pytest.raises(SchemeError, match="stored as ModelOpt NVFP4"):
        open_module(nvfp4(), config(ignore=["*k_proj"]))
    for leaves_out in (config(ignore=["*k_proj"]),
                       config("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "NVFP4"},
                                                                   "b": {"quant_algo": "NVFP4"}})):
        made = write(nvfp4(), leaves_out)
        found = schemes(made)
        assert found.resolve(MODULE) is None
        weights = open_weights(made, found.resolve, groups=found.all)
        assert weights[MODULE].format == "modelopt-nvfp4"
        assert "against the config" in disagreements(weights, found.resolve, ())[0]
