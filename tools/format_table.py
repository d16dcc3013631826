#!/usr/bin/env python3
"""Write the table of docs/formats.md: each format and granularity, from random weights, and how it is carried.

    format_table.py            print the table
    format_table.py --write    put it into docs/formats.md between its two marks
    format_table.py --check    exit 1 when docs/formats.md has another table

Weights are normal random numbers, quantized by compressed-tensors with min-max scales in BF16. Exactness
is recomputed here: the blocks as gguf's dequantizer reads them, times the factor, against code x scale in float64.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import save_file

from mcpq_gguf.checkpoint import open_checkpoint
from mcpq_gguf.formats import open_weights
from mcpq_gguf.ggml.encode import encode
from mcpq_gguf.schemes import parse_schemes
from mcpq_gguf.transcode import scale_factor

DOC = Path(__file__).parents[1] / "docs" / "formats.md"
START, END = "<!-- table: tools/format_table.py -->", "<!-- end of table -->"
ROWS, COLUMNS, MODULE = 256, 512, "m.proj"

INT = [("tensor", None), ("channel", None), *(("group", g) for g in (16, 32, 64, 128, 256))]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    *(("pack-quantized", {"num_bits": b, "type": "int", "strategy": s, "group_size": g, "symmetric": y})
      for y in (True, False) for b in (4, 8) for s, g in INT),
    *(("pack-quantized", {"num_bits": b, "type": "int", "strategy": "group", "group_size": 128})
      for b in (2, 3, 5, 6, 7)),
    *(("int-quantized", {"num_bits": 8, "type": "int", "strategy": s, "group_size": g})
      for s, g in (("tensor", None), ("channel", None), ("group", 128))),
    *(("float-quantized", {"num_bits": 8, "type": "float", "strategy": s, "group_size": g})
      for s, g in (("tensor", None), ("channel", None), ("group", 128))),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}),
]


def quantized(fmt: str, args: dict[str, Any], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The stored tensors of `weight` as compressed-tensors' compressor of the format makes them."""
    q = QuantizationArgs(**args)
    rows, columns = weight.shape
    groups = {"tensor": (1, 1), "channel": (rows, 1)}.get(args["strategy"])
    if args["strategy"] == "block":
        h, w = args["block_structure"]
        tiles = weight.unflatten(0, (rows // h, h)).unflatten(2, (columns // w, w))
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        size = columns if groups else args["group_size"]
        tiles = weight.unflatten(1, (columns // size, size))
        low, high = tiles.amin(2), tiles.amax(2)
        if args["strategy"] == "tensor":
            low, high = low.amin().reshape(1), high.amax().reshape(1)
    state: dict[str, torch.Tensor] = {"weight": weight}
    divisor = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1)) if fmt.startswith("nvfp4") else None
    scale, zero = calculate_qparams(low, high, q, global_scale=divisor)
    state["weight_scale"] = scale if fmt.startswith(("nvfp4", "mxfp4")) else scale.bfloat16()
    if divisor is not None:
        state["weight_global_scale"] = divisor
    if not q.symmetric:
        state["weight_zero_point"] = zero
    scheme = QuantizationScheme(targets=["Linear"], weights=q, format=fmt)
    compressed = BaseCompressor.get_value_from_registry(fmt).compress(state, scheme)
    return {k: v for k, v in compressed.items() if v is not None}


def carried(fmt: str, args: dict[str, Any]) -> tuple[str, str, str]:
    """(GGML type, exactness as measured, remark) of one case."""
    torch.manual_seed(0)
    tensors = quantized(fmt, args, torch.randn(ROWS, COLUMNS).bfloat16().float() * 0.02)
    config = {"config_groups": {"g": {"weights": args, "targets": ["Linear"], "format": fmt}}, "format": fmt}
    with tempfile.TemporaryDirectory() as folder:
        save_file({f"{MODULE}.{k}": v.contiguous() for k, v in tensors.items()}, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps({"quantization_config": config}))
        checkpoint = open_checkpoint(folder)
        weight = open_weights(checkpoint, parse_schemes(config).resolve)[MODULE]
        carry = weight.carries()[0]
        codes = weight.read(slice(None))
        got = dequantize(encode(codes, carry.type), GGMLQuantizationType[carry.type]).astype(np.float64)
        got *= scale_factor(weight, carry.type)
        want = reference(fmt, args, tensors)
        if np.array_equal(got, want):
            return carry.type, "exact", carry.why
        if carry.type == "BF16":
            scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=fmt)
            theirs = BaseCompressor.get_value_from_registry(fmt).decompress(dict(tensors), scheme)["weight"]
            same = np.array_equal(got, theirs.bfloat16().double().numpy())
            return carry.type, "bf16" if same else "differs", carry.why
        error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want ** 2))
        return carry.type, f"lossy, RMS {error:.1e}", carry.why


def reference(fmt: str, args: dict[str, Any], tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """(code - zero point) x scale in float64, unpacked by compressed-tensors."""
    scale = tensors["weight_scale"]
    zero = None
    if "fp4" in fmt:
        packed = tensors["weight_packed"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, dtype=torch.float32)
        scale = decompress_mx_scale(scale) if fmt.startswith("mx") else scale.float()
    elif fmt == "pack-quantized":
        codes = unpack_from_int32(tensors["weight_packed"], args["num_bits"], torch.Size([ROWS, COLUMNS]))
        if not args.get("symmetric", True):
            shape = torch.Size([ROWS if scale.ndim == 2 and scale.shape[0] > 1 else 1, scale.shape[-1]])
            stored = tensors["weight_zero_point"]
            zero = unpack_from_int32(stored, args["num_bits"], shape, packed_dim=0) if stored.dtype == torch.int32 \
                else stored
    else:
        codes = tensors["weight"]

    def spread(x: torch.Tensor) -> torch.Tensor:
        x = x.double().reshape(-1, x.shape[-1]) if x.ndim else x.double().reshape(1, 1)
        return x.repeat_interleave(ROWS // x.shape[0], 0).repeat_interleave(COLUMNS // x.shape[1], 1)

    values = codes.to(torch.float64) if zero is None else codes.to(torch.float64) - spread(zero)
    values = values * spread(scale.float())
    if fmt.startswith("nvfp4"):
        values = values * float(np.float32(1) / np.float32(tensors["weight_global_scale"].item()))
    return values.numpy()


def table() -> str:
    """The table in Markdown."""
    lines = ["| format | weights | GGML type | exactness on random weights | remark |", "|---|---|---|---|---|"]
    for fmt, args in CASES:
        shape = args["strategy"] + (f" {args['group_size']}" if args.get("group_size") else "") + (
            " 128x128" if args["strategy"] == "block" else "")
        kind = f"{args['type']}{args['num_bits']}, {shape}{'' if args.get('symmetric', True) else ', zero points'}"
        lines.append(f"| {fmt} | {kind} | " + " | ".join(carried(fmt, args)) + " |")
    return "\n".join(lines)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--write", action="store_true")
    ap.add_argument("--check", action="store_true")
    a = ap.parse_args()
    made = table()
    if not (a.write or a.check):
        print(made)
        return
    text = DOC.read_text()
    head, _, rest = text.partition(START)
    _, _, tail = rest.partition(END)
    new = f"{head}{START}\n{made}\n{END}{tail}"
    if a.write:
        DOC.write_text(new)
    elif new != text:
        sys.exit(f"{DOC} has another table; run tools/format_table.py --write")


if __name__ == "__main__":
    main()
