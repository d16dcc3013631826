"""The projector file: its embeddings are those of transformers, its bytes those of the checkpoint."""

import base64
import json
import os
import select
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from oracle import Decompressed, checkpoint, float32_model, read_gguf
from PIL import Image
from safetensors.torch import load_file, save_file

from mcpq_gguf.arch.vision import describe_projector, image_processor
from mcpq_gguf.checkpoint import open_checkpoint
from mcpq_gguf.convert import Options, convert, prepare
from mcpq_gguf.errors import McpqError, PlanError, UnsupportedArchitecture
from mcpq_gguf.formats import open_weights
from mcpq_gguf.general import Identity
from mcpq_gguf.mmproj import Projector, plan_projector
from mcpq_gguf.plan import Exactness
from mcpq_gguf.schemes import parse_schemes
from mcpq_gguf.verify.engine import Server, environment, find_binary
from mcpq_gguf.writer import write_files

OLD = "minicpmv4_6"  # the one projector type that the pinned llama.cpp knows
SIZES = {"square": (448, 448), "wide": (896, 448), "tall": (448, 1344)}
TOWER = ("model.vision_tower.", "model.merger.")
Tensors = dict[str, torch.Tensor]


def plan(folder: Path, kind: str = "bf16", projector: str | None = OLD, build: int | None = None) -> Projector:
    return plan_and_weights(folder, kind, projector, build)[0]


def plan_and_weights(folder: Path, kind: str, projector: str | None, build: int | None) -> tuple[Projector, Any, Any]:
    source = open_checkpoint(folder)
    weights = open_weights(source, parse_schemes(source.config.get("quantization_config")).resolve)
    planned = plan_projector(source, weights, Identity("Model", "Model-1B", {}), kind, projector, build)
    assert planned is not None
    return planned, weights, source


def write(folder: Path, out: Path, kind: str = "bf16") -> Path:
    planned, weights, source = plan_and_weights(folder, kind, OLD, None)
    path = out / planned.plan.name
    write_files([planned.plan], [path], weights, source, 2)
    return path


@pytest.fixture(scope="module", params=["made-bf16", "bf16"])
def source(request: pytest.FixtureRequest) -> Path:
    """Checkpoints with a vision tower in BF16; the first is always there."""
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def model(source: Path) -> Any:
    return float32_model(source)


@pytest.fixture(scope="module")
def texts(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("text")
    return {kind: convert(prepare(source, Options(kind, mmproj=False)), out)[0].path for kind in ("native", "f32")}


@pytest.fixture(scope="module")
def files(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("mmproj")
    return {kind: write(source, out, kind) for kind in ("f32", "bf16", "f16")}


@pytest.fixture
def variant(source: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint that holds the vision tensors only, after `change`, with other settings."""

    def make(change: Callable[[Tensors], object] = lambda t: None, config: dict[str, Any] | None = None,
             images: dict[str, Any] | None = None) -> Path:
        out = tmp_path / "variant"
        out.mkdir()
        tensors: Tensors = {}
        for file in source.glob("*.safetensors"):
            tensors |= {k: v for k, v in load_file(file).items() if k.startswith(TOWER)}
        change(tensors)
        save_file(tensors, out / "model.safetensors")
        settings = json.loads((source / "config.json").read_text())
        settings.pop("quantization_config", None)
        vision = settings["vision_config"]
        for key, value in (config or {}).items():
            (vision if key in vision and key != "insert_layer_id" else settings)[key] = value
        (out / "config.json").write_text(json.dumps(settings))
        processor = image_processor(open_checkpoint(source)) | (images or {})
        (out / "preprocessor_config.json").write_text(json.dumps(processor))
        return out

    return make


def picture(width: int, height: int) -> Image.Image:
    """Two ramps and a checkerboard."""
    y, x = np.mgrid[0:height, 0:width]
    board = (x // 32 + y // 32) % 2 * 255
    return Image.fromarray(np.stack([x * 255 // (width - 1), y * 255 // (height - 1), board], -1).astype(np.uint8))


def llama_embeddings(text: Path, projector: Path, image: Path, folder: Path) -> list[np.ndarray]:
    """The embeddings of the overview and of each slice, (tokens, width), in the order in which llama.cpp makes them.

    MTMD_DEBUG_EMBEDDINGS names a file that is written anew for each of them (int32 tokens, int32 width, float32), so
    it is a pipe here. It is held open for reading and writing: closed in between, a writer would meet a broken pipe.
    """
    binary = find_binary("llama-mtmd-cli")
    fifo, log, data = folder / "embeddings", folder / "log", b""
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    pipe = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    command = [binary, "-m", text, "--mmproj", projector, "--image", image, "-p", "What is this?", "-n", "1", "-t", "2",
               "-c", "2048", "--no-warmup"]
    with open(log, "wb") as out, subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            env=environment(binary) | {"MTMD_DEBUG_EMBEDDINGS": str(fifo)}) as process:
        try:
            while process.poll() is None or select.select([pipe], [], [], 0)[0]:
                if select.select([pipe], [], [], 0.05)[0]:
                    data += os.read(pipe, 1 << 20)
        finally:
            process.kill()
            os.close(pipe)
    assert process.returncode == 0, log.read_text(errors="replace")[-2000:]
    parts = []
    while data:
        tokens, width = np.frombuffer(data, np.int32, 2)
        end = 8 + 4 * int(tokens) * int(width)
        parts.append(np.frombuffer(data[8:end], np.float32).reshape(tokens, width))
        data = data[end:]
    return parts


def hf_embeddings(model: Any, source: Path, image: Image.Image, mode: str = "16x") -> list[np.ndarray]:
    """The same by transformers: its own slices, pixels and tower.

    The pictures' slices need no resampling, so that they are the same pixels in both programs. The overview is
    resampled, by both with Pillow's integer arithmetic, but llama.cpp always goes along the rows first, and Pillow
    along the columns where that is less work (tall pictures); here the order is llama.cpp's.
    """
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
    processor = MiniCPMV4_6ImageProcessorPil.from_pretrained(source)
    given = processor(images=[image], return_tensors="pt")
    height, width = (14 * int(n) for n in given["target_sizes"][0])
    overview = image.resize((width, image.height), Image.Resampling.BICUBIC)
    overview = overview.resize((width, height), Image.Resampling.BICUBIC)
    pixels = (np.asarray(overview, np.float32) / 255 - 0.5) / 0.5
    patches = torch.from_numpy(processor.reshape_by_patch(pixels.transpose(2, 0, 1), 14))
    stored = given["pixel_values"][0, :, :, :patches.shape[-1]]
    if image.height <= image.width:
        torch.testing.assert_close(stored, patches, atol=1e-6, rtol=0)
    stored.copy_(patches)
    with torch.no_grad():
        features = model.model.get_image_features(given["pixel_values"], given["target_sizes"], downsample_mode=mode)
    return [f.numpy() for f in features.pooler_output]


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """RMS of the difference relative to the RMS of b."""
    return float(np.sqrt(((a - b) ** 2).sum() / (b**2).sum()))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize(("kind", "limit"), [("f32", 1e-3), ("bf16", 1e-2), ("f16", 1e-3)])
def test_llama_cpp_sees_what_transformers_sees(shape: str, kind: str, limit: float, source: Path, model: Any,
                                               texts: dict[str, Path], files: dict[str, Path], tmp_path: Path) -> None:
    image = picture(*SIZES[shape])
    image.save(tmp_path / "x.png")
    ours = llama_embeddings(texts["f32"], files[kind], tmp_path / "x.png", tmp_path)
    theirs = hf_embeddings(model, source, image)
    assert [o.shape for o in ours] == [t.shape for t in theirs]
    assert len(ours) == {"square": 1, "wide": 3, "tall": 4}[shape]  # the overview, and slices where it is large
    for number, (o, t) in enumerate(zip(ours, theirs)):
        assert difference(o, t) <= limit, f"slice {number}"


@pytest.mark.parametrize("stored", [True, False], ids=["vit_merger-stored", "vit_merger-left-out"])
def test_the_4x_mode_leaves_the_window_merger_out(stored: bool, source: Path, model: Any, texts: dict[str, Path],
                                                  variant: Callable[..., Path], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if "vit_merger" in n and not stored]:
            del tensors[name]

    path = write(variant(change, {"downsample_mode": "4x"}, {"downsample_mode": "4x"}), tmp_path, "f32")
    reader = GGUFReader(path)
    assert not [t.name for t in reader.tensors if "vit_merger" in t.name]
    assert reader.fields["clip.vision.projector.scale_factor"].contents() == 2
    image = picture(448, 448)
    image.save(tmp_path / "x.png")
    (ours,) = llama_embeddings(texts["f32"], path, tmp_path / "x.png", tmp_path)
    (theirs,) = hf_embeddings(model, source, image, "4x")
    assert len(ours) == 256
    assert difference(ours, theirs) <= 1e-3


def test_what_keeps_its_type_keeps_its_bytes(source: Path, files: dict[str, Path]) -> None:
    reference = Decompressed(source)
    names = {e.name: e for e in plan(source).plan.entries}
    kept = widened = 0
    for name, (values, kind, raw) in read_gguf(files["bf16"]).items():
        (part,) = names[name].parts
        stored = reference.raw(part.module if part.module.endswith(".bias") else part.module + ".weight")
        assert values.shape == stored.shape
        assert names[name].exactness is Exactness.EXACT
        if kind == "BF16":
            assert raw.tobytes() == stored.contiguous().view(torch.uint8).numpy().tobytes()
            kept += 1
        else:
            assert kind == "F32"
            assert values.tobytes() == stored.float().numpy().tobytes()
            assert stored.ndim == 1 or name == "v.patch_embd.weight"
            widened += 1
    assert kept + widened == len(names) == sum(k.startswith(TOWER) for k in reference.where)


def test_the_loader_finds_every_setting(source: Path, files: dict[str, Path]) -> None:
    config = json.loads((source / "config.json").read_text())
    vision, text = config["vision_config"], config["text_config"]
    fields = {k: f.contents() for k, f in GGUFReader(files["bf16"]).fields.items()}
    assert {k: v for k, v in fields.items() if k.startswith(("clip.", "general.arch", "general.type"))} == {
        "general.architecture": "clip", "general.type": "mmproj", "clip.has_vision_encoder": True,
        "clip.projector_type": OLD, "clip.use_gelu": True, "clip.vision.image_size": 448, "clip.vision.patch_size": 14,
        "clip.vision.embedding_length": vision["hidden_size"], "clip.vision.projection_dim": text["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": vision["num_hidden_layers"],
        "clip.vision.attention.head_count": vision["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": pytest.approx(1e-6),
        "clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3,
        "clip.vision.projector.scale_factor": 4, "clip.vision.wa_layer_indexes": [config["insert_layer_id"]],
        "clip.vision.max_slice_nums": 9,
    }
    assert files["bf16"].name == "mmproj-Model-1B-BF16.gguf"


def test_a_server_answers_with_and_without_the_projector(texts: dict[str, Path], files: dict[str, Path],
                                                         tmp_path: Path) -> None:
    picture(448, 448).save(tmp_path / "x.png")
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "x.png").read_bytes()).decode()
    text: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    for kind, parts in (("native", text), ("native", [{"type": "image_url", "image_url": {"url": url}}, *text])):
        projector = files["bf16"] if len(parts) > 1 else None
        with Server(texts[kind], projector) as server:
            answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}],
                                                          "max_tokens": 4, "temperature": 0})
        assert answer["usage"]["completion_tokens"] >= 1
        assert (answer["usage"]["prompt_tokens"] > 64) == (projector is not None)


def test_the_projector_does_not_depend_on_the_text_models_type(texts: dict[str, Path], files: dict[str, Path],
                                                               tmp_path: Path) -> None:
    picture(448, 448).save(tmp_path / "x.png")
    one, other = (llama_embeddings(text, files["bf16"], tmp_path / "x.png", tmp_path)[0] for text in texts.values())
    assert one.tobytes() == other.tobytes()


def test_values_beyond_f16_are_named(variant: Callable[..., Path], tmp_path: Path) -> None:
    name = "model.vision_tower.encoder.layers.1.mlp.fc1"

    def change(tensors: Tensors) -> None:
        tensors[name + ".weight"][3, 5] = 1e5

    folder = variant(change)
    with pytest.raises(PlanError, match=rf"{name} -> v\.blk\.1\.ffn_up\.weight: 1 values lie beyond F16's range"):
        write(folder, tmp_path, "f16")
    assert not list(tmp_path.glob("*.gguf"))
    assert np.isclose(read_gguf(write(folder, tmp_path, "bf16"))["v.blk.1.ffn_up.weight"][0][3, 5], 1e5, rtol=4e-3)


def test_tensors_must_be_all_known_and_all_there(variant: Callable[..., Path], tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.vision_tower.head.probe.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)

    with pytest.raises(PlanError, match=r"model\.vision_tower\.head\.probe: not used by the clip architecture"):
        plan(variant(add))


@pytest.mark.parametrize("gone", ["vision_tower.vit_merger.linear_1.weight", "merger.mlp.0.pre_norm.bias",
                                  "vision_tower.encoder.layers.1.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_an_error(gone: str, variant: Callable[..., Path]) -> None:
    with pytest.raises(PlanError, match=f"sources missing, the first is model.{gone.removesuffix('.weight')}"):
        plan(variant(lambda tensors: tensors.pop("model." + gone)))


@pytest.mark.parametrize(("config", "images"), [
    ({"hidden_act": "gelu"}, {}), ({"layer_norm_eps": 1e-5}, {}), ({"window_kernel_size": [4, 4]}, {}),
    ({"merge_kernel_size": [4, 4]}, {}), ({"merger_times": 2}, {}), ({"image_size": 448}, {}),
    ({"num_channels": 1}, {}), ({"insert_layer_id": 99}, {}), ({"insert_layer_id": -1}, {}),
    ({"num_attention_heads": 3}, {}), ({"drop_vision_last_layer": True}, {}), ({}, {"downsample_mode": "8x"}),
    ({}, {"scale_resolution": 450}), ({}, {"resample": 2}), ({}, {"image_std": [0.5, 0, 0.5]}),
    ({}, {"do_normalize": False}), ({}, {"rescale_factor": 1.0}), ({}, {"patch_size": 16}),
], ids=str)
def test_settings_that_llama_cpp_does_not_compute_are_errors(config: dict[str, Any], images: dict[str, Any],
                                                             variant: Callable[..., Path]) -> None:
    (key,) = {**config, **images}
    with pytest.raises(UnsupportedArchitecture, match=key):
        plan(variant(config=config, images=images))


def test_the_projector_type_follows_model_and_build(source: Path) -> None:
    at = open_checkpoint(source)
    names = frozenset(n.removesuffix(".weight") for n in at.tensors)

    def kind(model: str, projector: str | None = None, build: int | None = None) -> tuple[Any, str]:
        found = describe_projector(f"MiniCPMV4_{model}ForConditionalGeneration", at.config, image_processor(at), names,
                                   projector, build)
        assert found is not None
        return found.metadata["clip.projector_type"].value, " ".join(found.notes)

    assert kind("7")[0] == kind("7", build=11700)[0] == "minicpmv4_7"
    assert "b11700" in kind("7")[1]
    for answer in (kind("7", OLD), kind("7", build=11434)):
        assert answer[0] == OLD
        assert "canvas M-RoPE" in answer[1]
    assert kind("6") == kind("6", OLD) == kind("6", build=11434) == (OLD, "")
    for model, projector, build in (("7", "resampler", None), ("7", "minicpmv4_7", 11434), ("6", "minicpmv4_7", None)):
        with pytest.raises(PlanError, match="projector type"):
            kind(model, projector, build)


def test_no_vision_tower_no_projector(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    text = frozenset({"model.language_model.embed_tokens", "lm_head"})
    assert describe_projector("MiniCPMV4_7ForConditionalGeneration", config, {}, text) is None
    with pytest.raises(UnsupportedArchitecture, match="--no-mmproj"):
        describe_projector("Qwen3_5ForConditionalGeneration", config, {}, text | {"model.visual.patch_embed.proj"})


def test_settings_that_disagree_are_told(variant: Callable[..., Path]) -> None:
    folder = variant(config={"insert_layer_id": 1}, images={"downsample_mode": "4x", "max_slice_nums": 4})
    planned = plan(folder)
    notes = " ".join(planned.notes)
    assert "insert_layer_id is 1" in notes
    assert "4x is taken" in notes
    assert "cuts up to 4 slices" in notes
    assert planned.plan.metadata["clip.vision.wa_layer_indexes"].value == (1,)
    assert planned.plan.metadata["clip.vision.max_slice_nums"].value == 4


def test_defaults_stand_in_for_a_missing_image_processor(variant: Callable[..., Path]) -> None:
    folder = variant()
    (folder / "preprocessor_config.json").unlink()
    planned = plan(folder)
    assert planned.plan.metadata["clip.vision.image_size"].value == 448
    assert "no preprocessor_config.json" in " ".join(planned.notes)


def _quantize(tensors: Tensors, kind: torch.dtype, largest: float) -> list[str]:
    """Per-channel codes and BF16 scales for every linear layer of the tower; the modules' names."""
    modules = [n.removesuffix(".weight") for n in tensors if n.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))]
    for module in modules:
        weight = tensors[module + ".weight"].float()
        scale = (weight.abs().amax(1, keepdim=True) / largest).to(torch.bfloat16)
        codes = weight / scale.float()
        tensors[module + ".weight"] = (codes.round() if kind == torch.int8 else codes).clamp(-largest, largest).to(kind)
        tensors[module + ".weight_scale"] = scale
    return modules


@pytest.mark.parametrize("form", ["float-quantized", "int-quantized"])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_quantized_vision_tower_is_decoded(form: str, kind: str, variant: Callable[..., Path],
                                             tmp_path: Path) -> None:
    fp8 = form == "float-quantized"
    modules: list[str] = []
    folder = variant(lambda t: modules.extend(_quantize(t, torch.float8_e4m3fn if fp8 else torch.int8,
                                                        448 if fp8 else 127)))
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "type": "float" if fp8 else "int", "strategy": "channel", "symmetric": True,
               "dynamic": False, "group_size": None, "block_structure": None, "actorder": None,
               "observer": "minmax", "observer_kwargs": {}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": [],
        "kv_cache_scheme": None, "global_compression_ratio": None,
        "config_groups": {"group_0": {"targets": [r"re:.*vision_tower.*(_proj|fc1|fc2)$"], "weights": weights,
                                      "input_activations": None, "output_activations": None, "format": form}}}
    (folder / "config.json").write_text(json.dumps(config))
    reference, written = Decompressed(folder), read_gguf(write(folder, tmp_path, kind))
    entries = {e.parts[0].module: e for e in plan(folder, kind).plan.entries}
    assert len(modules) > 20
    for module in modules:
        entry = entries[module]
        assert entry.exactness is (Exactness.F32 if kind == "f32" else Exactness.BF16)
        values, found, raw = written[entry.name]
        assert found == kind.upper()
        decoded = reference.weight(module)
        if kind == "bf16":
            assert raw.tobytes() == decoded.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
        else:
            assert values.tobytes() == decoded.numpy().tobytes()


def test_q8_0_leaves_what_does_not_divide_or_must_be_exact(source: Path) -> None:
    types = {e.name: e.type for e in plan(source, "q8_0").plan.entries}
    assert types["v.blk.0.ffn_up.weight"] == types["mm.down.weight"] == "Q8_0"
    assert types["v.position_embd.weight"] == "BF16"
    assert types["v.patch_embd.weight"] == types["v.post_ln.weight"] == types["mm.up.bias"] == "F32"
    with pytest.raises(McpqError, match="q4_0"):
        plan(source, "q4_0")


