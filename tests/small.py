"""Checkpoints of a few tensors, written with safetensors' own writer and opened as the program opens them."""

import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mcpq_gguf.checkpoint import Checkpoint, open_checkpoint
from mcpq_gguf.formats import SourceWeight, open_weights
from mcpq_gguf.modelopt_schemes import quantization_config
from mcpq_gguf.schemes import Schemes, parse_schemes

MODULE = "model.layers.0.self_attn.k_proj"


def compressed_tensors(fmt: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A quantization_config with one group, as compressed-tensors writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": fmt}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}, "ignore": []}


def write(tensors: Mapping[str, torch.Tensor], config: dict[str, Any] | None, side: dict[str, Any] | None = None,
          ) -> Checkpoint:
    """A checkpoint; tensors without a dot in their name belong to MODULE. `side` is hf_quant_config.json."""
    folder = Path(tempfile.mkdtemp(prefix="mcpq-small-"))
    named = {n if "." in n else f"{MODULE}.{n}": t.clone().contiguous() for n, t in tensors.items()}
    save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    if side is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(side))
    checkpoint = open_checkpoint(folder)
    weakref.finalize(checkpoint, shutil.rmtree, folder, ignore_errors=True)
    return checkpoint


def schemes(checkpoint: Checkpoint) -> Schemes:
    return parse_schemes(quantization_config(checkpoint))


def open_module(tensors: Mapping[str, torch.Tensor], config: dict[str, Any] | None, side: dict[str, Any] | None = None,
                ) -> SourceWeight:
    """The weight of MODULE."""
    checkpoint = write(tensors, config, side)
    return open_weights(checkpoint, schemes(checkpoint).resolve)[MODULE]


def bits(tensor: torch.Tensor) -> np.ndarray:
    """uint16 bits of a BF16 tensor."""
    assert tensor.dtype == torch.bfloat16
    return tensor.view(torch.int16).numpy().view(np.uint16)


def rows_and_columns(rng: np.random.Generator, rows: int, columns: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Some rows in any order, and an order of the column blocks of `width`."""
    return rng.permutation(rows)[: max(1, rows - 1)], rng.permutation(columns // width)


def permuted(values: np.ndarray, rows: np.ndarray, blocks: np.ndarray, width: int) -> np.ndarray:
    """What the two do to plain numbers, element by element."""
    columns = (blocks[:, None] * width + np.arange(width)).reshape(-1)
    return values[rows][:, columns]
