"""MiniCPM-V 4.6 and 4.7: a SigLIP tower, a window merger in the midst of it (`vit_merger`), and a merger to the text.

Names, shapes and hyperparameters are what llama.cpp asks for in tools/mtmd/clip.cpp under PROJECTOR_TYPE_MINICPMV4_6;
the settings that are checked are those that tools/mtmd/models/minicpmv.cpp and mtmd-image.cpp take for granted. The
reference for what a setting means is transformers' models/minicpmv4_6 and minicpmv4_7.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from gguf import GGUFValueType

from ...errors import PlanError, UnsupportedArchitecture
from ...ggml.metadata import Metadata, array, boolean, f32, string, u32
from .. import Model, Need, Part
from ..hparams import Hparams
from . import Table

PROJECTORS = ("minicpmv4_6", "minicpmv4_7")
FIRST_BUILD = 11700  # of llama.cpp that knows minicpmv4_7
_POSITIONS = 70  # a side of the position table: a literal in clip.cpp
_SLICES = 9  # the number of slices that builds before FIRST_BUILD cut at most: a literal in mtmd-image.cpp
_TEXT = {
    "model.language_model.": "part of the language model, not of the vision projector",
    "language_model.": "part of the language model, not of the vision projector",
    "lm_head": "part of the language model, not of the vision projector",
    "mtp.": "multi-token prediction, part of the language model",
}


class _Settings(Hparams):
    """One object of the configuration, read as strictly as the text model's."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where, self.rope = values, where, {}

    def triple(self, key: str, positive: bool = False) -> list[float]:
        """Three finite numbers, one a colour; 0.5 each when absent, transformers' default."""
        value = self.values.get(key, [0.5] * 3)
        if not (isinstance(value, list) and len(value) == 3
                and all(type(x) in (int, float) and isfinite(x) and (x > 0 or not positive) for x in value)):
            raise UnsupportedArchitecture(f"{self.where}.{key}: expected three {'positive ' * positive}numbers, "
                                          f"found {value!r}")
        return [float(x) for x in value]


def _table(native: str) -> Table:
    """The table of a class whose own projector type is `native`."""

    def build_model(config: Mapping[str, Any], preprocessor: Mapping[str, Any], modules: frozenset[str],
                    projector: str | None, build: int | None) -> Model:
        vision = _Settings(config.get("vision_config") or {}, "config.json vision_config")
        images = _Settings(preprocessor, "preprocessor_config.json")
        kind, notes = _projector_type(native, projector, build)
        _check(_Settings(config, "config.json"), vision, images)
        if not preprocessor:
            notes.append("no preprocessor_config.json: transformers' defaults for the pictures are written "
                         "(448 pixels, 9 slices, mean and deviation 0.5)")
        mode = _downsample_mode(config, preprocessor, notes)
        insert = _insert_layer(config, vision, notes)
        text = Hparams(config).integer("hidden_size")
        prefix = "model." if any(m.startswith(("model.vision_tower.", "model.merger.")) for m in modules) else ""
        needs = _tower(vision, prefix + "vision_tower.")
        ignored = dict(_TEXT)
        if mode == "16x":
            needs += _vit_merger(vision, prefix + "vision_tower.vit_merger.")
        else:
            ignored[prefix + "vision_tower.vit_merger."] = "downsample_mode is 4x, which leaves the window merger out"
        needs += _merger(vision, prefix + "merger.mlp.0.", text)
        slices = images.integer("max_slice_nums", _SLICES)
        whole = images.values.get("slice_mode", True) is False
        if whole or slices != _SLICES:
            notes.append(f"the image processor cuts {'no' if whole else f'up to {slices}'} slices; llama.cpp before "
                         f"b{FIRST_BUILD} cuts up to {_SLICES} of every large picture")
        metadata = _metadata(vision, images, kind, mode, insert, text, slices)
        return Model("clip", tuple(needs), metadata, ignored, tuple(notes))

    return build_model


def _projector_type(native: str, wanted: str | None, build: int | None) -> tuple[str, list[str]]:
    """clip.projector_type, and what is lost when it is not the model's own."""
    if wanted is not None and wanted not in PROJECTORS:
        raise PlanError(f"projector type {wanted!r} is not known for this model; known are {', '.join(PROJECTORS)}")
    old = build is not None and build < FIRST_BUILD
    kind = wanted or ("minicpmv4_6" if old else native)
    if kind == "minicpmv4_7" and native != kind:
        raise PlanError("projector type minicpmv4_7 gives pictures canvas positions, which MiniCPM-V 4.6 does not use; "
                        "leave the projector type out")
    if kind == "minicpmv4_7" and old:
        raise PlanError(f"llama.cpp b{build} does not know the projector type minicpmv4_7 (b{FIRST_BUILD} does); "
                        "choose minicpmv4_6")
    if kind != native:
        return kind, [f"projector type {kind} instead of {native}: llama.cpp numbers a picture's tokens as for "
                      "MiniCPM-V 4.6, without canvas M-RoPE positions; the embeddings are the same, answers about "
                      "where things are can get worse"]
    return kind, [] if kind != "minicpmv4_7" else [
        f"projector type minicpmv4_7 needs llama.cpp b{FIRST_BUILD} or newer; an older build refuses the file"]


def _check(top: Hparams, vision: Hparams, images: Hparams) -> None:
    """Settings that llama.cpp's graph and its picture preparation take for granted."""
    top.expect("merge_kernel_size", [2, 2])
    top.expect("merger_times", 1)
    top.expect("drop_vision_last_layer", False)
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    vision.expect("num_channels", 3)
    vision.expect("window_kernel_size", [2, 2])
    vision.expect("layer_norm_eps", 1e-6)  # the merger has 1e-6 in any case, and llama.cpp one value for all
    images.expect("do_rescale", True)
    images.expect("do_normalize", True)
    images.expect("do_resize", True)
    images.expect("resample", 3, None)
    factor = images.values.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-6:
        raise UnsupportedArchitecture(f"{images.where}.rescale_factor is {factor!r}; llama.cpp divides pixels by 255")
    hidden, heads = vision.integer("hidden_size", 768), vision.integer("num_attention_heads", 12)
    if hidden % heads:
        raise UnsupportedArchitecture(f"{vision.where}: hidden_size {hidden} is no multiple of "
                                      f"num_attention_heads {heads}")
    if vision.integer("intermediate_size", 3072) == hidden:
        raise UnsupportedArchitecture(f"{vision.where}: intermediate_size equals hidden_size ({hidden}); llama.cpp "
                                      "would take the two MLP matrices for swapped")
    patch, side = vision.integer("patch_size", 16), vision.integer("image_size", 224)
    if side // patch != _POSITIONS:
        raise UnsupportedArchitecture(f"{vision.where}: image_size {side} / patch_size {patch} gives {side // patch} "
                                      f"positions a side; llama.cpp counts with {_POSITIONS}")
    images.expect("patch_size", patch)
    scale = images.integer("scale_resolution", 448)
    if scale % (4 * patch) or scale > 8192:
        raise UnsupportedArchitecture(f"{images.where}.scale_resolution is {scale}; llama.cpp needs a multiple of four "
                                      f"patches ({4 * patch}), at most 8192")


def _downsample_mode(config: Mapping[str, Any], preprocessor: Mapping[str, Any], notes: list[str]) -> str:
    """16x or 4x. The image processor's value wins, as in llama.cpp's converter: so a copied folder can ask for 4x."""
    model = config.get("downsample_mode", "16x")
    mode = preprocessor.get("downsample_mode", model)
    if mode not in ("4x", "16x"):
        raise UnsupportedArchitecture(f"preprocessor_config.json.downsample_mode is {mode!r}; known are 4x and 16x")
    if mode != model:
        notes.append(f"downsample_mode is {mode} for the image processor and {model} in config.json: {mode} is taken")
    return str(mode)


def _insert_layer(config: Mapping[str, Any], vision: Hparams, notes: list[str]) -> int:
    """The layer after which the window merger comes: config.json's value, which transformers puts over the tower's."""
    layer, own = config.get("insert_layer_id", 6), vision.values.get("insert_layer_id")
    layers = vision.integer("num_hidden_layers", 12)
    if type(layer) is not int or not 0 <= layer < layers:
        raise UnsupportedArchitecture(f"config.json.insert_layer_id is {layer!r}; expected one of the {layers} layers "
                                      "of the vision tower, counted from 0")
    if own is not None and own != layer:
        notes.append(f"insert_layer_id is {layer} for the model and {own} in vision_config: {layer} is taken, "
                     "as transformers does")
    return layer


def _norm(name: str, module: str, size: int) -> list[Need]:
    return [Need(name, "vision_f32", (size,), ((Part(module),),)), _bias(name, module, size)]


def _linear(name: str, module: str, rows: int, columns: int) -> list[Need]:
    return [Need(name, "vision", (rows, columns), ((Part(module),),)), _bias(name, module, rows)]


def _bias(name: str, module: str, size: int) -> Need:
    return Need(name, "vision_f32", (size,), ((Part(module + ".bias"),),), suffix=".bias")


def _attention(name: str, module: str, hidden: int) -> list[Need]:
    needs: list[Need] = []
    for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "out_proj")):
        needs += _linear(f"{name}attn_{ours}", f"{module}self_attn.{theirs}", hidden, hidden)
    return needs


def _tower(vision: Hparams, source: str) -> list[Need]:
    """Patches, positions, layers, last norm.

    The patch kernel is F32 in every file, as in those of llama.cpp's converter: ggml_conv_2d makes it the second
    operand of a matrix product, which not every backend and build takes in BF16. It costs a megabyte or two.
    """
    hidden, inner, patch = (vision.integer(k, d) for k, d in (
        ("hidden_size", 768), ("intermediate_size", 3072), ("patch_size", 16)))
    kernel = source + "embeddings.patch_embedding"
    needs = [
        Need("v.patch_embd", "vision_f32", (hidden, 3, patch, patch), ((Part(kernel),),)),
        _bias("v.patch_embd", kernel, hidden),
        Need("v.position_embd", "vision_embedding", (_POSITIONS**2, hidden),
             ((Part(source + "embeddings.position_embedding"),),)),
    ]
    for i in range(vision.integer("num_hidden_layers", 12)):
        blk, layer = f"v.blk.{i}.", f"{source}encoder.layers.{i}."
        needs += _norm(blk + "ln1", layer + "layer_norm1", hidden)
        needs += _attention(blk, layer, hidden)
        needs += _norm(blk + "ln2", layer + "layer_norm2", hidden)
        needs += _linear(blk + "ffn_up", layer + "mlp.fc1", inner, hidden)
        needs += _linear(blk + "ffn_down", layer + "mlp.fc2", hidden, inner)
    return needs + _norm("v.post_ln", source + "post_layernorm", hidden)


def _vit_merger(vision: Hparams, source: str) -> list[Need]:
    """Attention within windows of 2 x 2 patches, and an MLP that makes one of the four."""
    hidden, inner = vision.integer("hidden_size", 768), vision.integer("intermediate_size", 3072)
    name = "v.vit_merger."
    return [
        *_norm(name + "ln1", source + "layer_norm1", hidden),
        *_attention(name, source, hidden),
        *_norm(name + "ds_ln", source + "pre_norm", 4 * hidden),
        *_linear(name + "ds_ffn_up", source + "linear_1", 4 * inner, 4 * hidden),
        *_linear(name + "ds_ffn_down", source + "linear_2", hidden, 4 * inner),
    ]


def _merger(vision: Hparams, source: str, text: int) -> list[Need]:
    """An MLP that makes one embedding of the language model of 2 x 2 patches."""
    wide = 4 * vision.integer("hidden_size", 768)
    return [
        *_norm("mm.input_norm", source + "pre_norm", wide),
        *_linear("mm.up", source + "linear_1", wide, wide),
        *_linear("mm.down", source + "linear_2", text, wide),
    ]


def _metadata(vision: Hparams, images: _Settings, kind: str, mode: str, insert: int, text: int,
              slices: int) -> Metadata:
    """Hyperparameters under the keys that the clip loader reads."""
    return {
        "clip.has_vision_encoder": boolean(True),
        "clip.projector_type": string(kind),
        "clip.use_gelu": boolean(True),  # ggml's gelu is the tanh approximation
        "clip.vision.image_size": u32(images.integer("scale_resolution", 448)),
        "clip.vision.patch_size": u32(vision.integer("patch_size", 16)),
        "clip.vision.embedding_length": u32(vision.integer("hidden_size", 768)),
        "clip.vision.feed_forward_length": u32(vision.integer("intermediate_size", 3072)),
        "clip.vision.block_count": u32(vision.integer("num_hidden_layers", 12)),
        "clip.vision.attention.head_count": u32(vision.integer("num_attention_heads", 12)),
        "clip.vision.attention.layer_norm_epsilon": f32(1e-6),
        "clip.vision.projection_dim": u32(text),
        "clip.vision.image_mean": array(GGUFValueType.FLOAT32, images.triple("image_mean")),
        "clip.vision.image_std": array(GGUFValueType.FLOAT32, images.triple("image_std", positive=True)),
        "clip.vision.projector.scale_factor": u32(2 if mode == "4x" else 4),
        "clip.vision.wa_layer_indexes": array(GGUFValueType.INT32, [insert]),
        "clip.vision.max_slice_nums": u32(slices),  # read by newer builds; older ones ignore it
    }


CLASSES: dict[str, Table] = {
    "MiniCPMV4_7ForConditionalGeneration": _table("minicpmv4_7"),
    "MiniCPMV4_6ForConditionalGeneration": _table("minicpmv4_6"),
}
