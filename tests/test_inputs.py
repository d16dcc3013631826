"""Every published kind of checkpoint: the codes of each module, and what llama.cpp makes of the file.

For each input every quantized module is read back from the native file with gguf's reader and dequantizer and compared
in float64 with code x scale as compressed-tensors unpacks them; then llama-server's log-probabilities on the native and
on the F32 file are compared with transformers on the decompressed weights.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import PROMPTS, Decompressed, checkpoint, float32_model, hf_logprobs, kl, read_gguf

from mcpq_gguf.convert import Options, convert, prepare
from mcpq_gguf.plan import Entry, Exactness
from mcpq_gguf.transcode import scale_factor
from mcpq_gguf.verify.engine import Server

INPUTS = [
    "made-nvfp4",
    "made-int4-mixed",
    "made-fp8",
    "made-bf16",
    "bf16",
    "nvfp4a16",
    "nvfp4-w4a4",
    "int4-mixed-w4a16",
    "qqq-w4a8-mixed",
    "fp8-dynamic",
    "int4-g128-asym",
    "mixed-nvfp4-fp8",
    "mxfp4a16",
    "model-free/nvfp4a16",
]


@pytest.fixture(scope="module", params=INPUTS)
def source(request: pytest.FixtureRequest) -> Path:
    return checkpoint(request.param)


def regroup(tensor: torch.Tensor, name: str, config: dict[str, int]) -> torch.Tensor:
    """Value heads in llama.cpp's order, stated once more with torch."""
    key, value, dim = (config[f"linear_{k}"] for k in ("num_key_heads", "num_value_heads", "key_head_dim"))

    def tile(x: torch.Tensor, axis: int) -> torch.Tensor:
        shape = x.shape
        x = x.unflatten(axis, (key, value // key, -1)).transpose(axis, axis + 1)
        return x.reshape(shape)

    if name.endswith("attn_qkv.weight"):
        return torch.cat([tensor[: 2 * key * dim], tile(tensor[2 * key * dim :], 0)])
    if re.search(r"attn_gate|ssm_alpha|ssm_beta", name):
        return tile(tensor, 0)
    return tile(tensor, 1) if "ssm_out" in name else tensor


def exact_values(reference: Decompressed, module: str) -> torch.Tensor:
    """(code - zero point) x scale / global scale in float64."""
    if reference.scheme(module) is None:
        return reference.raw(module + ".weight").double()
    codes, scale, zero, divisor = reference.parts(module)
    scale = scale.double().reshape(-1, scale.shape[-1] if scale.ndim == 2 else 1)
    if scale.shape[0] == 1:
        scale = scale.expand(codes.shape[0], -1)
    width = codes.shape[1] // scale.shape[1]
    values = codes.double()
    if zero is not None:
        values = values - zero.double().repeat_interleave(width, 1)
    values = values * scale.repeat_interleave(width, 1)
    return values if divisor is None else values * float(np.float32(1) / np.float32(divisor.item()))


def test_every_module_of_the_native_file(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = prepare(source, Options(mmproj=False))
    reference, written = Decompressed(source), read_gguf(convert(prepared, tmp_path)[0].path)
    config = prepared.checkpoint.config["text_config"]
    kinds: dict[tuple[str, str, str], int] = {}
    for entry in prepared.plan.entries:
        modules = [p.module for p in entry.parts]
        if entry.kind != "weight" or (reference.scheme(modules[0]) is None and entry.layout.value):
            continue
        values = written[entry.name][0].astype(np.float64).reshape(len(modules), -1)
        for value, module in zip(values, modules, strict=True):
            check(entry, value, module, reference, config, scale_factor(prepared.weights[module], entry.type))
            key = (prepared.weights[module].format, entry.type, entry.exactness.value)
            kinds[key] = kinds.get(key, 0) + 1
    with capsys.disabled():
        print(f"\n{source.name}: " + ", ".join(f"{n} {f} -> {t} ({e})" for (f, t, e), n in kinds.items()))


def check(
    entry: Entry, value: np.ndarray, module: str, reference: Decompressed, config: dict[str, int], factor: float
) -> None:
    """One module's values as written, float64, against the reference, by what the plan claims for them."""
    if module + ".weight" not in reference.where and reference.scheme(module) is None:
        tensor = reference.raw(module).double()
        expected = (
            tensor
            if tensor.ndim != 1 or "dt_bias" not in module
            else regroup(tensor, "ssm_alpha", dict(config, linear_key_head_dim=1))
        )
    else:
        expected = exact_values(reference, module).squeeze()
        if "conv1d" in module:
            expected = regroup(expected, "attn_qkv.weight", config)
        else:
            expected = regroup(expected, entry.name, config)
    want = expected.numpy().reshape(-1)
    if entry.exactness is Exactness.EXACT:
        np.testing.assert_array_equal(value * factor, want, err_msg=module)
    elif entry.exactness is Exactness.BF16:
        theirs = regroup(reference.bf16(module), entry.name, config).double().numpy().reshape(-1)
        np.testing.assert_array_equal(value, theirs, err_msg=module)
    elif entry.exactness is Exactness.F32:
        np.testing.assert_array_equal(value, want.astype(np.float32), err_msg=module)
    else:
        assert np.sqrt(np.mean((value * factor - want) ** 2) / np.mean(want**2)) < 0.01, module


def test_log_probabilities(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = float32_model(source)
    vocabulary = model.config.text_config.vocab_size
    prompts = [[i % vocabulary for i in ids] for ids in PROMPTS[-8:]]
    theirs = [hf_logprobs(model, ids) for ids in prompts]
    figures = {}
    for kind in ("f32", "native"):
        path = convert(prepare(source, Options(kind, mmproj=False)), tmp_path / kind)[0].path
        with Server(path, extra=["-ctk", "f32", "-ctv", "f32"]) as server:
            ours = [server.logprobs(ids, vocabulary) for ids in prompts]
        figures[kind] = (
            max(float(np.abs(a - b).max()) for a, b in zip(theirs, ours)),
            float(np.mean([kl(a, b) for a, b in zip(theirs, ours)])),
            sum(int(a.argmax() == b.argmax()) for a, b in zip(theirs, ours)),
        )
    with capsys.disabled():
        print(
            f"\n{source.name}: "
            + "; ".join(
                f"{kind}: largest difference {d:.1e}, KL {k:.1e}, same top {n} of 8"
                for kind, (d, k, n) in figures.items()
            )
        )
    loose = 10 if source.name == "made-fp8" else 1  # its uniformly random FP8 bytes make an ill-conditioned model
    assert figures["f32"][0] < 2e-3 * loose
    assert figures["native"][1] < 5e-2 * loose  # llama.cpp rounds activations: see the F32 figure for what is ours
