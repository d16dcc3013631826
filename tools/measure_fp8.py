#!/usr/bin/env python3
"""Print the table of docs/formats.md that tells how exactly FP8 goes into Q8_0: random weights, and checkpoints.

    measure_fp8.py [CHECKPOINT ...]
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mcpq_gguf.checkpoint import open_checkpoint
from mcpq_gguf.formats import open_weights
from mcpq_gguf.formats.codes import bf16_to_f32, f32_to_bf16
from mcpq_gguf.formats.fp8codes import LARGEST, VALUES, Fp8, Kind, ScaleDtype
from mcpq_gguf.ggml.fp8_blocks import bf16, q8_0, q8_0_report
from mcpq_gguf.modelopt_schemes import quantization_config
from mcpq_gguf.schemes import parse_schemes

ROWS, COLUMNS = 1024, 4096


def quantized(weight: np.ndarray, kind: Kind, block: tuple[int, int], dtype: ScaleDtype) -> Fp8:
    """Round to nearest, with the largest number of a tile at the largest code."""
    tiles = np.abs(weight).reshape(ROWS // block[0], block[0], COLUMNS // block[1], block[1])
    scales = (tiles.max((1, 3)) / LARGEST[kind]).astype(np.float32)
    if dtype == "BF16":
        scales = bf16_to_f32(f32_to_bf16(scales))
    scaled = weight / scales.repeat(block[0], 0).repeat(block[1], 1)
    codes = np.flatnonzero(np.isfinite(VALUES[kind]) & (np.arange(256) != 0x80))
    values = VALUES[kind][codes]
    order = np.argsort(values)
    middles = (values[order][1:] + values[order][:-1]) / 2
    return Fp8(codes[order][np.searchsorted(middles, scaled)].astype(np.uint8), scales, block, kind, dtype)


def cases() -> Iterator[tuple[str, Fp8]]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.02)
    heavy = (rng.standard_t(4, (ROWS, COLUMNS)) * 0.02).astype(np.float32)
    channel, block, tensor = (1, COLUMNS), (128, 128), (ROWS, COLUMNS)
    yield "normal, E4M3, channel, BF16 scale", quantized(normal, "E4M3", channel, "BF16")
    yield "normal, E4M3, channel, F32 scale", quantized(normal, "E4M3", channel, "F32")
    yield "normal, E4M3, block 128x128, F32 scale", quantized(normal, "E4M3", block, "F32")
    yield "normal, E4M3, tensor, BF16 scale", quantized(normal, "E4M3", tensor, "BF16")
    yield "normal, E5M2, channel, BF16 scale", quantized(normal, "E5M2", channel, "BF16")
    yield "Student t (4), E4M3, channel, BF16 scale", quantized(heavy, "E4M3", channel, "BF16")


def stored(path: Path) -> Iterator[Fp8]:
    checkpoint = open_checkpoint(path)
    schemes = parse_schemes(quantization_config(checkpoint))
    for weight in open_weights(checkpoint, schemes.resolve, groups=schemes.all).values():
        if any(ref.dtype.startswith("F8_E") and ref.name.endswith(".weight") for ref in weight.refs):
            codes = weight.read(slice(0, weight.shape[0]))
            assert isinstance(codes, Fp8)
            yield codes


def main() -> None:
    print("| weights | exact blocks | RMS error | of plain Q8_0 |\n|---|---|---|---|")
    first = None
    for name, codes in cases():
        first = first or codes
        r = q8_0_report(codes)
        print(f"| {name} | {r.exact_blocks / r.blocks:.2%} | {r.rms:.3%} | {r.rms_plain:.3%} |")
    for path in map(Path, sys.argv[1:]):
        reports = [q8_0_report(codes) for codes in stored(path)]
        blocks = sum(r.blocks for r in reports)
        print(f"| {path.name} | {sum(r.exact_blocks for r in reports) / blocks:.2%} "
              f"| {sum(r.rms * r.blocks for r in reports) / blocks:.3%} "
              f"| {sum(r.rms_plain * r.blocks for r in reports) / blocks:.3%} |")
    assert first is not None
    for encoder in (bf16, q8_0):
        start = time.perf_counter()
        encoder(first)
        print(f"{encoder.__name__}: {first.codes.size / (time.perf_counter() - start) / 1e6:.0f} M numbers/s, one core")


if __name__ == "__main__":
    main()
