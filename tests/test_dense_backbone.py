"""The dense backbone (`qwen35`), with every linear layer of the language model in NVFP4.

The checkpoint is built here: transformers makes the random model, compressed-tensors' own compressor quantizes it.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from gguf import GGUFReader
from oracle import PROMPTS, Decompressed, checkpoint, float32_model, hf_logprobs, kl, read_gguf
from safetensors.torch import save_file

from mcpq_gguf.convert import Options, convert, prepare
from mcpq_gguf.verify.engine import Server

ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
FORMAT = "nvfp4-pack-quantized"
VOCABULARY = 1024


def nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The stored tensors of a weight, by compressed-tensors' compressor."""
    args = QuantizationArgs(**ARGS)
    divisor = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
    groups = weight.unflatten(1, (-1, 16))
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), args, global_scale=divisor)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=FORMAT)
    return dict(BaseCompressor.get_value_from_registry(FORMAT).compress(state, scheme))


def build(folder: Path, quantize: bool, tied: bool, layers: int = 4) -> Path:
    """A dense MiniCPM-V-4.7 checkpoint with a small vision tower."""
    from transformers import AutoConfig, MiniCPMV4_7ForConditionalGeneration
    folder.mkdir()
    source = checkpoint("made-bf16")
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    text = {k: v for k, v in config["text_config"].items() if not any(w in k for w in ("expert", "moe", "router"))}
    config["tie_word_embeddings"] = tied
    config["text_config"] = text | {"model_type": "qwen3_5_text", "intermediate_size": 512, "num_hidden_layers": layers,
                                    "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(4)
    model = MiniCPMV4_7ForConditionalGeneration(AutoConfig.from_pretrained(folder))
    tensors = {}
    for name, value in model.state_dict().items():
        value = value.float()
        if name.endswith(("proj.weight", "proj_qkv.weight", "proj_z.weight", "proj_a.weight", "proj_b.weight")):
            value = torch.randn_like(value) * 1.5 / value.shape[1] ** 0.5
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            value = torch.randn_like(value) * 0.1
        elif name.endswith("norm.weight"):
            value = value + torch.randn_like(value) * 0.1
        value = value.bfloat16()
        module = name.removesuffix(".weight")
        linear = ("language_model" in name and name.endswith("proj.weight")) or "in_proj" in name or module == "lm_head"
        if tied and module == "lm_head":
            continue
        if quantize and linear:
            tensors.update({f"{module}.{k}": v for k, v in nvfp4(value.float()).items()})
        else:
            tensors[name] = value
    if quantize:
        group = {"format": FORMAT, "weights": ARGS, "targets": ["re:.*language_model.*proj.*", "lm_head"],
                 "input_activations": None}
        config["quantization_config"] = {"quant_method": "compressed-tensors", "format": FORMAT, "ignore": [],
                                         "quantization_status": "compressed", "config_groups": {"group_0": group}}
        (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["bf16 tied", "nvfp4"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "dense"
    return build(folder, request.param == "nvfp4", "tied" in request.param)


def test_log_probabilities_of_the_dense_backbone(source: Path, tmp_path: Path) -> None:
    model = float32_model(source)
    for kind in ("f32", "native"):
        prepared = prepare(source, Options(kind, mmproj=False))
        assert prepared.model.arch == "qwen35"
        with Server(convert(prepared, tmp_path / kind)[0].path, extra=["-ctk", "f32", "-ctv", "f32"]) as server:
            for ids in PROMPTS:
                ids = [i % VOCABULARY for i in ids]
                theirs, ours = hf_logprobs(model, ids), server.logprobs(ids, VOCABULARY)
                if kind == "f32":
                    assert np.abs(theirs - ours).max() < 2e-3
                else:
                    assert kl(theirs, ours) < 2e-2


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The NVFP4 checkpoint and its native file."""
    folder = tmp_path_factory.mktemp("nvfp4")
    source = build(folder / "dense", quantize=True, tied=False)
    return source, convert(prepare(source, Options(mmproj=False)), folder / "out")[0].path


def test_every_kind_of_layer_is_carried_in_nvfp4(quantized: tuple[Path, Path]) -> None:
    source, path = quantized
    written, reference = read_gguf(path), Decompressed(source)
    kinds = {name.split(".", 2)[-1] for name, (_, kind, _) in written.items() if kind == "NVFP4"}
    assert kinds == {f"{n}.weight" for n in (
        "attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", "ssm_out", "ssm_alpha", "ssm_beta",
        "ffn_gate", "ffn_up", "ffn_down")} | {"output.weight".split(".", 2)[-1]}
    layer = "model.language_model.layers.0.linear_attn."
    expected, _ = reference.codes_times_scales(layer + "out_proj")
    heads = expected.reshape(256, 2, 2, 64).transpose(0, 2, 1, 3).reshape(256, 256)  # grouped to tiled
    np.testing.assert_array_equal(written["blk.0.ssm_out.weight"][0], heads)
    expected, _ = reference.codes_times_scales(layer + "in_proj_a")
    np.testing.assert_array_equal(written["blk.0.ssm_alpha.weight"][0], expected[[0, 2, 1, 3]])


def test_llama_cpp_reads_every_scale_of_the_dense_backbone(quantized: tuple[Path, Path], tmp_path: Path) -> None:
    _, path = quantized
    scales = [t for t in GGUFReader(path).tensors if t.name.endswith(".scale")]
    assert len(scales) == 3 * (5 + 3) + (4 + 3) + 1
    ids = [i % VOCABULARY for i in PROMPTS[5]]
    with Server(path) as server:
        base = server.logprobs(ids, VOCABULARY)
    for tensor in scales:
        changed = tmp_path / "changed.gguf"
        shutil.copy(path, changed)
        with open(changed, "r+b") as f:
            f.seek(tensor.data_offset)
            # by so much that the norm behind attn_k, which takes a common factor out, comes down to its epsilon
            f.write((np.asarray(tensor.data) * 1e-5).astype(np.float32).tobytes())
        with Server(changed) as server:
            assert np.abs(server.logprobs(ids, VOCABULARY) - base).max() > 1e-3, f"{tensor.name} is not read"
