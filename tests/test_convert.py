"""From checkpoint to file: what is written is what the references decode, and what llama.cpp computes with."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from oracle import PROMPTS, Decompressed, checkpoint, float32_model, hf_logprobs, kl, read_gguf
from safetensors import safe_open
from safetensors.torch import save_file

from mcpq_gguf.convert import Options, convert, prepare
from mcpq_gguf.errors import McpqError
from mcpq_gguf.plan import Exactness
from mcpq_gguf.verify.engine import Server


@pytest.fixture(scope="module", params=["made-nvfp4", "nvfp4a16", "model-free/nvfp4a16"])
def any_source(request: pytest.FixtureRequest) -> Path:
    """Checkpoints that must convert; the first is always there."""
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def source() -> Path:
    """The checkpoint that tests of single points start from."""
    return checkpoint("made-nvfp4")


@pytest.fixture(scope="module")
def files(any_source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("out")
    return {kind: write(any_source, out, kind) for kind in ("native", "f32", "bf16")}


def write(source: Path, out: Path, kind: str = "native", workers: int | None = None) -> Path:
    """The language model alone."""
    return convert(prepare(source, Options(kind, mmproj=False)), out, workers)[0].path


def source_name(name: str) -> str:
    """HF module of a GGUF weight of this architecture, written out here once more from llama.cpp's tensor names."""
    table = {"token_embd": "model.language_model.embed_tokens", "output": "lm_head",
             "output_norm": "model.language_model.norm"}
    per_layer = {
        "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
        "ssm_norm": "linear_attn.norm",
    }
    if name in table:
        return table[name]
    layer, part = re.fullmatch(r"blk\.(\d+)\.(\w+)", name).groups()  # type: ignore[union-attr]
    return f"model.language_model.layers.{layer}.{per_layer[part]}"


def test_every_quantized_tensor_equals_the_reference_decompression(any_source: Path, files: dict[str, Path]) -> None:
    reference, written = Decompressed(any_source), read_gguf(files["native"])
    seen = 0
    for name, (values, kind, _) in written.items():
        if kind != "NVFP4":
            continue
        seen += 1
        factor = written[name.replace(".weight", ".scale")][0].reshape(-1)
        stem = name.removesuffix(".weight")
        if m := re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps", stem):
            modules = [f"model.language_model.layers.{m[1]}.mlp.experts.{e}.{m[2]}_proj" for e in range(len(values))]
        else:
            modules, values = [source_name(stem)], values[None]
        for value, scale, module in zip(values, factor, modules, strict=True):
            codes_times_scales, divisor = reference.codes_times_scales(module)
            np.testing.assert_array_equal(value, codes_times_scales)  # codes and block scales, bit for bit
            assert scale == np.float32(1) / np.float32(divisor)       # the factor, rounded once
            np.testing.assert_allclose(value * scale, reference.weight(module).numpy(), rtol=3e-7, atol=0)
    assert seen == 4 * 6


def test_f32_output_equals_the_reference_in_float32(any_source: Path, files: dict[str, Path]) -> None:
    reference, written = Decompressed(any_source), read_gguf(files["f32"])
    for layer in range(4):
        values = written[f"blk.{layer}.ffn_down_exps.weight"][0]
        for e, value in enumerate(values):
            module = f"model.language_model.layers.{layer}.mlp.experts.{e}.down_proj"
            np.testing.assert_array_equal(value, reference.weight(module).numpy())


def test_unquantized_tensors_are_byte_identical(any_source: Path, files: dict[str, Path]) -> None:
    """BF16 matrices keep their bytes; 1-D tensors and routers are widened to F32 without a change of value."""
    written, kept = read_gguf(files["native"]), 0
    raw = {}
    for file in any_source.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            raw.update({k: f.get_tensor(k) for k in f.keys()})  # noqa: SIM118
    for name, (values, kind, data) in written.items():
        stem = name.removesuffix(".weight")
        if kind == "NVFP4" or not name.endswith(".weight") or re.search(r"ssm_(?!norm)|attn_qkv|attn_gate", name):
            continue  # regrouped ones: tests/test_layout.py, and the comparison of log-probabilities
        tensor = raw[source_name(stem) + ".weight"]
        if kind == "BF16":
            kept += 1
            assert data.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        else:
            expected = tensor.float()
            if stem.endswith("norm") and not stem.endswith("ssm_norm"):
                expected = 1 + expected
            np.testing.assert_array_equal(values.reshape(-1), expected.numpy().reshape(-1))
    assert kept == 2 + 4


def test_tensor_list_is_the_same_for_every_source_format(files: dict[str, Path]) -> None:
    names = {kind: set(read_gguf(path)) for kind, path in files.items()}
    assert names["f32"] == names["bf16"]
    assert {n for n in names["native"] if not n.endswith(".scale")} == names["f32"]


def test_weight_only_fp4_is_tagged_against_4_bit_activations(files: dict[str, Path]) -> None:
    reader = GGUFReader(files["native"])
    tagged = reader.fields["general.tensor_extra.name"].contents()
    assert tagged == [t.name for t in reader.tensors if t.tensor_type.name == "NVFP4"]
    assert reader.fields["general.tensor_extra.prec_a4"].contents() == [False] * len(tagged)


def test_planned_sizes_offsets_and_hash_are_those_of_the_file(source: Path, tmp_path: Path) -> None:
    import hashlib
    prepared = prepare(source, Options(mmproj=False))
    written, = convert(prepared, tmp_path / "x.gguf")
    assert written.path.stat().st_size == prepared.plan.nbytes == written.nbytes
    assert hashlib.sha256(written.path.read_bytes()).hexdigest() == written.sha256
    for tensor, entry in zip(GGUFReader(written.path).tensors, prepared.plan.entries, strict=True):
        assert (tensor.name, tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes) == (
            entry.name, entry.type, entry.offset, entry.nbytes)
        assert tuple(int(n) for n in reversed(tensor.shape)) == entry.shape
    assert sorted(p.name for p in tmp_path.iterdir()) == ["SHA256SUMS", "manifest.json", "x.gguf"]


def test_output_is_reproducible(any_source: Path, tmp_path: Path, files: dict[str, Path]) -> None:
    again = write(any_source, tmp_path, workers=1)
    assert again.read_bytes() == files["native"].read_bytes()


@pytest.mark.parametrize("kind", ["f32", "native"])
def test_llama_server_gives_the_log_probabilities_of_transformers(
        any_source: Path, files: dict[str, Path], kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = float32_model(any_source)
    vocabulary = model.config.text_config.vocab_size
    worst, divergence, same = 0.0, [], 0
    with Server(files[kind], extra=["-ctk", "f32", "-ctv", "f32"]) as server:
        for ids in PROMPTS:
            ids = [i % vocabulary for i in ids]
            theirs, ours = hf_logprobs(model, ids), server.logprobs(ids, vocabulary)
            worst = max(worst, float(np.abs(theirs - ours).max()))
            divergence.append(kl(theirs, ours))
            same += int(theirs.argmax() == ours.argmax())
    with capsys.disabled():
        print(f"\n{any_source.name} {kind}: largest difference {worst:.1e}, mean KL {np.mean(divergence):.1e}, "
              f"same top {same} of {len(PROMPTS)}")
    assert len(PROMPTS) >= 8
    if kind == "f32":
        assert worst < 2e-3
    else:
        assert np.mean(divergence) < 1e-2


def test_llama_cpp_reads_every_scale(source: Path, files: dict[str, Path], tmp_path: Path) -> None:
    """Set one `.scale` after the other to 1: a result that does not change would mean a scale that nobody reads."""
    reader = GGUFReader(files["native"])
    scales = [t for t in reader.tensors if t.name.endswith(".scale")]
    ids = PROMPTS[5]
    with Server(files["native"]) as server:
        vocabulary = len(reader.fields["tokenizer.ggml.tokens"].data)
        ids = [i % vocabulary for i in ids]
        base = server.logprobs(ids, vocabulary)
    assert len(scales) == 4 * 6
    for tensor in scales:
        changed = tmp_path / "changed.gguf"
        shutil.copy(files["native"], changed)
        with open(changed, "r+b") as f:
            f.seek(tensor.data_offset)
            f.write(np.ones(tensor.n_elements, np.float32).tobytes())
        with Server(changed) as server:
            assert np.abs(server.logprobs(ids, vocabulary) - base).max() > 1e-3, f"{tensor.name} is not read"


# What can be wrong with a checkpoint ---------------------------------------------------------------------------------


class Copy:
    """A checkpoint in memory, to be changed and written as a single file."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.config = json.loads((source / "config.json").read_text())
        self.tensors: dict[str, torch.Tensor] = {}
        for file in sorted(source.glob("*.safetensors")):
            with safe_open(file, "pt") as f:
                self.tensors.update({k: f.get_tensor(k) for k in f.keys()})  # noqa: SIM118

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        for file in self.source.iterdir():
            if file.suffix in (".json", ".jinja") and "index" not in file.name:
                shutil.copy(file, folder)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


L0 = "model.language_model.layers.0."


def drop(name: str):  # type: ignore[no-untyped-def]
    return lambda c: c.tensors.pop(name)


def put(name: str, value: torch.Tensor):  # type: ignore[no-untyped-def]
    return lambda c: c.tensors.__setitem__(name, value)


def set_text(key: str, value: object):  # type: ignore[no-untyped-def]
    return lambda c: c.config["text_config"].__setitem__(key, value)


def edit(name: str, change):  # type: ignore[no-untyped-def]
    def apply(c: Copy) -> None:
        c.tensors[name] = change(c.tensors[name].clone())
    return apply


def poke(row: int, column: int, byte: int):  # type: ignore[no-untyped-def]
    def change(t: torch.Tensor) -> torch.Tensor:
        t.view(torch.uint8)[row, column] = byte
        return t
    return change


E1 = L0 + "mlp.experts.1.up_proj."


@pytest.mark.parametrize(("change", "words"), [
    (drop(L0 + "mlp.experts.2.up_proj.weight_packed"), ["mlp.experts.2.up_proj", "no format"]),
    (lambda c: [c.tensors.pop(k) for k in list(c.tensors) if "layers.0.mlp.experts.3.down" in k],
     ["blk.0.ffn_down_exps", "mlp.experts.3.down_proj", "incomplete"]),
    (lambda c: [c.tensors.pop(k) for k in list(c.tensors) if ".layers.2." in k], ["blk.2.", "layers.2."]),
    (drop("lm_head.weight"), ["output", "lm_head"]),
    (drop("model.language_model.norm.weight"), ["output_norm"]),
    (put("model.language_model.layers.0.mlp.extra.weight", torch.zeros(3)), ["layers.0.mlp.extra", "not used"]),
    (put("model.language_model.layers.9.input_layernorm.weight", torch.zeros(3)), ["layers.9.input_layernorm"]),
    (put(L0 + "self_attn.rotary.inv_freq", torch.zeros(3)), ["inv_freq"]),
    (edit(E1 + "weight_scale", poke(3, 1, 0x7F)), [E1 + "weight_scale", "row 3, group 1", "NaN"]),
    (edit(E1 + "weight_scale", poke(2, 0, 0xB0)), [E1 + "weight_scale", "row 2, group 0", "negative"]),
    (edit(E1 + "weight_global_scale", lambda t: t * 0), [E1 + "weight_global_scale", "positive finite"]),
    (edit(E1 + "weight_global_scale", lambda t: t * float("nan")), [E1 + "weight_global_scale", "positive finite"]),
    (edit(E1 + "weight_global_scale", lambda t: torch.zeros(2)), [E1 + "weight_global_scale", "single value"]),
    (edit(E1 + "weight_scale", lambda t: t[:, :-1].contiguous()), [E1 + "weight_scale", "expected shape"]),
    (drop(E1 + "weight_scale"), [E1 + "weight_scale", "missing"]),
    (drop(E1 + "weight_global_scale"), [E1 + "weight_global_scale", "missing"]),
    (edit(E1 + "weight_packed", lambda t: t[:-1].contiguous()), ["layers.0.mlp.experts.1.up_proj"]),
    (edit(L0 + "input_layernorm.weight", lambda t: t[:-1].contiguous()), ["input_layernorm", "blk.0.attn_norm"]),
    (edit("lm_head.weight", lambda t: t.to(torch.int32)), ["lm_head", "I32"]),
    (lambda c: c.config["quantization_config"].__setitem__("format", "marlin-24"), ["marlin-24"]),
    (lambda c: c.config["quantization_config"]["config_groups"]["group_0"].__setitem__("format", "marlin-24"),
     ["marlin-24"]),
    (lambda c: c.config.__setitem__("architectures", ["LlamaForCausalLM2"]), ["LlamaForCausalLM2", "known are"]),
    (set_text("model_type", "qwen9_text"), ["qwen9_text"]),
    (set_text("hidden_act", "gelu"), ["hidden_act", "gelu"]),
    (set_text("attn_output_gate", False), ["attn_output_gate"]),
    (set_text("num_hidden_layers", 5), ["layer_types", "5"]),
    (set_text("num_experts", 9), ["mlp.gate", "[9, 256]"]),
    (set_text("num_experts", 2), ["mlp.gate", "[2, 256]"]),
    (set_text("hidden_size", None), ["hidden_size"]),
    (set_text("linear_value_head_dim", 16), ["linear_value_head_dim"]),
    (set_text("layer_types", ["linear_attention"] * 3), ["layer_types"]),
    (put("mtp.fc.weight", torch.zeros(3)), ["mtp", "incomplete"]),
])
def test_a_wrong_checkpoint_is_one_clear_error_and_no_file(source: Path, tmp_path: Path, change, words) -> None:  # type: ignore[no-untyped-def]
    copy = Copy(source)
    change(copy)
    folder = copy.write(tmp_path / "ckpt")
    out = tmp_path / "out"
    with pytest.raises(McpqError) as caught:
        convert(prepare(folder), out)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not out.exists() or not list(out.iterdir())


def test_stacked_and_single_experts_give_the_same_file(source: Path, tmp_path: Path) -> None:
    """Experts stored fused (gate_up_proj, 3-D) as transformers holds them, against one by one, both dense."""
    copy, reference = Copy(source), Decompressed(source)
    text = copy.config["text_config"]
    del copy.config["quantization_config"]
    for name in [n for n in copy.tensors if n.endswith("_packed")]:
        module = name.removesuffix(".weight_packed")
        for suffix in ("_packed", "_scale", "_global_scale"):
            copy.tensors.pop(module + ".weight" + suffix)
        copy.tensors[module + ".weight"] = reference.weight(module).bfloat16()
    single = write(copy.write(tmp_path / "single"), tmp_path / "a.gguf")
    for layer in range(text["num_hidden_layers"]):
        mlp = f"model.language_model.layers.{layer}.mlp.experts."
        parts = {p: torch.stack([copy.tensors.pop(f"{mlp}{e}.{p}_proj.weight") for e in range(text["num_experts"])])
                 for p in ("gate", "up", "down")}
        copy.tensors[mlp + "gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        copy.tensors[mlp + "down_proj"] = parts["down"]
    stacked = write(copy.write(tmp_path / "stacked"), tmp_path / "b.gguf")
    a, b = read_gguf(single), read_gguf(stacked)
    assert {k: v[2].tobytes() for k, v in a.items()} == {k: v[2].tobytes() for k, v in b.items()}
    assert all(kind in ("BF16", "F32") for _, kind, _ in a.values())


def test_w4a4_writes_input_scales_and_no_tag(source: Path, tmp_path: Path) -> None:
    copy = Copy(source)
    group = copy.config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                                  "symmetric": True, "dynamic": "local"}
    for k, name in enumerate([n for n in copy.tensors if n.endswith("_packed")]):
        copy.tensors[name.replace("weight_packed", "input_global_scale")] = torch.tensor([10.0 + k])
    prepared = prepare(copy.write(tmp_path / "ckpt"))
    written = read_gguf(convert(prepared, tmp_path)[0].path)
    assert "general.tensor_extra.name" not in prepared.plan.metadata
    for e, value in enumerate(written["blk.1.ffn_up_exps.input_scale"][0]):
        scale = copy.tensors[f"model.language_model.layers.1.mlp.experts.{e}.up_proj.input_global_scale"]
        assert value == np.float32(1) / np.float32(scale)


@pytest.mark.parametrize("announced", [0, 1])
@pytest.mark.parametrize("stored", [False, True])
def test_mtp_layers_are_kept_when_they_are_there(source: Path, tmp_path: Path, announced: int, stored: bool) -> None:
    copy = Copy(source)
    copy.config["text_config"]["mtp_num_hidden_layers"] = announced
    hidden = copy.config["text_config"]["hidden_size"]
    if stored:
        for name, tensor in list(copy.tensors.items()):
            if ".layers.3." in name and "language_model" in name:
                copy.tensors[name.replace("model.language_model.layers.3", "mtp.layers.0")] = tensor.clone()
        copy.tensors["mtp.fc.weight"] = torch.ones(hidden, 2 * hidden, dtype=torch.bfloat16)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            copy.tensors[f"mtp.{name}.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
        copy.config["quantization_config"]["config_groups"]["group_0"]["targets"].append("re:mtp.*experts.*")
    prepared = prepare(copy.write(tmp_path / "ckpt"))
    keys = {k.partition(".")[2]: v.value for k, v in prepared.plan.metadata.items() if k.startswith("qwen35moe.")}
    names = {e.name for e in prepared.plan.entries}
    assert keys["block_count"] == (5 if stored else 4)
    assert keys.get("nextn_predict_layers") == (1 if stored else None)
    assert ("blk.4.nextn.eh_proj.weight" in names) == stored
    assert any("MTP" in n for n in prepared.notes) == (bool(announced) != stored)
    with Server(convert(prepared, tmp_path / "out")[0].path) as server:
        assert np.isfinite(server.logprobs([1, 2, 3], 1024)).all()


def test_exactness_is_claimed_for_what_it_is(source: Path) -> None:
    claims = {e.name: e.exactness for e in prepare(source).plan.entries}
    assert claims["blk.0.ffn_up_exps.weight"] is claims["output.weight"] is Exactness.EXACT
    assert claims["blk.0.ssm_a"] is Exactness.F32
    claims = {e.name: e.exactness for e in prepare(source, Options("bf16")).plan.entries}
    assert claims["blk.0.ffn_up_exps.weight"] is Exactness.BF16
    assert claims["output.weight"] is Exactness.EXACT
