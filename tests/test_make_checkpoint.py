"""tools/make_checkpoint.py writes what the upstream libraries expect of this architecture and these formats."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

TOOL = Path(__file__).parent.parent / "tools" / "make_checkpoint.py"
FORMATS = ("nvfp4", "int4-mixed", "fp8", "bf16")


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_checkpoint", TOOL)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("made")
    for fmt in FORMATS:
        tool.make_checkpoint(base / fmt, tool.PRESETS["demo"], fmt, seed=7)
    return {fmt: base / fmt for fmt in FORMATS}


def read_all(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            out |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a dict
    return out


def model_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of transformers' own model for this config, its fused experts split one by one."""
    from transformers import AutoConfig, MiniCPMV4_7ForConditionalGeneration

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = MiniCPMV4_7ForConditionalGeneration(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, p in model.state_dict().items():
        if name.endswith("mlp.experts.gate_up_proj"):
            for e in range(p.shape[0]):
                for proj in ("gate_proj", "up_proj"):
                    shapes[name.replace("gate_up_proj", f"{e}.{proj}.weight")] = (p.shape[1] // 2, p.shape[2])
        elif name.endswith("mlp.experts.down_proj"):
            for e in range(p.shape[0]):
                shapes[name.replace("down_proj", f"{e}.down_proj.weight")] = tuple(p.shape[1:])
        else:
            shapes[name] = tuple(p.shape)
    return shapes


def decompressed(path: Path) -> dict[str, torch.Tensor]:
    """Dense weights, by compressed-tensors' decompressors as config.json says."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((path / "config.json").read_text())
    tensors = read_all(path)
    if "quantization_config" not in config:
        return tensors
    groups = QuantizationConfig.model_validate(config["quantization_config"]).config_groups
    local: dict[str, dict[str, torch.Tensor]] = {}
    for name, t in tensors.items():
        module, _, leaf = name.rpartition(".")
        local.setdefault(module, {})[leaf] = t
    dense: dict[str, torch.Tensor] = {}
    for module, state in local.items():
        scheme = next((g for g in groups.values() if any(re.match(t[3:], module) for t in g.targets)), None)
        if scheme:
            state = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)
            state = {"weight": state["weight"]}
        dense |= {f"{module}.{leaf}": t for leaf, t in state.items()}
    return dense


@pytest.mark.parametrize("fmt", FORMATS)
def test_decompresses_to_the_parameters_of_the_upstream_model(checkpoints: dict[str, Path], fmt: str) -> None:
    dense = decompressed(checkpoints[fmt])
    assert {n: tuple(t.shape) for n, t in dense.items()} == model_shapes(checkpoints[fmt])


@pytest.mark.parametrize("fmt", FORMATS)
def test_weights_are_finite_of_model_size_and_unlike(checkpoints: dict[str, Path], fmt: str) -> None:
    dense = decompressed(checkpoints[fmt])
    for name, t in dense.items():
        assert torch.isfinite(t.float()).all(), name
    experts = [t.float() for n, t in dense.items() if ".experts." in n and "gate_proj" in n]
    assert len({t.numpy().tobytes() for t in experts}) == 4 * 8
    assert all(0.01 < t.std() < 0.1 for t in experts)


def test_int4_scales_are_fp16_numbers(checkpoints: dict[str, Path]) -> None:
    scales = [t for n, t in read_all(checkpoints["int4-mixed"]).items() if n.endswith("weight_scale")]
    assert scales
    assert all(t.dtype == torch.bfloat16 and torch.equal(t.half().float(), t.float()) for t in scales)


def test_ignore_names_exactly_the_dense_linear_modules(checkpoints: dict[str, Path]) -> None:
    from transformers import AutoConfig, MiniCPMV4_7ForConditionalGeneration

    config = AutoConfig.from_pretrained(checkpoints["nvfp4"])
    with torch.device("meta"):
        model = MiniCPMV4_7ForConditionalGeneration(config)
    stored = read_all(checkpoints["nvfp4"])
    linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    linear |= {n for n, _ in model.named_modules() if n.endswith("mlp.gate")}  # the router, a linear when quantized
    expected = {n for n in linear if f"{n}.weight" in stored}
    assert set(config.quantization_config["ignore"]) == expected


def test_same_seed_same_bytes_other_seed_other_bytes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for seed in (7, 8):
        tool.make_checkpoint(tmp_path / str(seed), tool.PRESETS["demo"], "nvfp4", seed)
    first = (checkpoints["nvfp4"] / "model.safetensors").read_bytes()
    assert (tmp_path / "7" / "model.safetensors").read_bytes() == first
    assert (tmp_path / "8" / "model.safetensors").read_bytes() != first


def test_values_do_not_depend_on_sharding(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    dims = tool.replace(tool.PRESETS["demo"], shard_mb=4)
    tool.make_checkpoint(tmp_path / "c", dims, "nvfp4", seed=7)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    one, many = read_all(checkpoints["nvfp4"]), read_all(tmp_path / "c")
    assert len(set(index["weight_map"].values())) > 2
    assert set(index["weight_map"]) == set(one) == set(many)
    assert all(torch.equal(one[n].view(torch.uint8), many[n].view(torch.uint8)) for n in one)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values())


def test_tokenizer_works_and_agrees_with_config(checkpoints: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoints["nvfp4"])
    config = json.loads((checkpoints["nvfp4"] / "config.json").read_text())
    for text in ("The image shows 3 people.\n\n", "你好 été Привет 🙂", "a  b\tc\r\n  d'll <image></image>"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert max(ids) < config["text_config"]["vocab_size"]
    assert len(tokenizer.encode("The image shows")) < 8
    named = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "image_start_id": "<image>",
             "image_end_id": "</image>", "slice_start_id": "<slice>", "slice_end_id": "</slice>"}  # fmt: skip
    assert {k: tokenizer.convert_ids_to_tokens(config[k]) for k in named} == named
    assert tokenizer.encode("\n") == [config["newline_id"]]
    assert tokenizer.eos_token_id == config["text_config"]["eos_token_id"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}],
        add_generation_prompt=True, tokenize=False,
    )  # fmt: skip
    assert prompt.startswith("<|im_start|>user\n<|image_pad|>\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_large_preset_has_the_shapes_of_35b() -> None:
    tensors, _ = tool.plan(tool.PRESETS["35b"], "nvfp4")
    by_name = {t.name: t for t in tensors}
    assert len(by_name) == len(tensors) == 93472
    assert 23e9 < sum(t.nbytes for t in tensors) < 25e9
    assert by_name["model.language_model.layers.39.mlp.experts.255.down_proj.weight_packed"].shape == (2048, 256)
    assert by_name["model.language_model.layers.0.linear_attn.in_proj_qkv.weight"].shape == (8192, 2048)


def test_refuses_a_directory_in_use(tmp_path: Path) -> None:
    (tmp_path / "precious.safetensors").write_bytes(b"x")
    with pytest.raises(SystemExit, match="not empty"):
        tool.make_checkpoint(tmp_path, tool.PRESETS["demo"])
