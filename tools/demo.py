#!/usr/bin/env python3
"""The whole way on a small checkpoint: make it, convert it to all tiers, check the files, run them in llama.cpp.

    demo.py [--dir demo]

The check reads every file back with gguf's reader and compares what was carried over, tier by tier, byte by byte.
Without llama.cpp's programs the last step says how to get them.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from gguf import GGUFReader

sys.path.insert(0, str(Path(__file__).parent))
from make_checkpoint import PRESETS, make_checkpoint

from mcpq_gguf.errors import EngineError
from mcpq_gguf.verify.engine import Server, find_binary


def blocks(path: Path) -> dict[str, bytes]:
    """The bytes of every tensor that is neither F32 nor BF16, as gguf's reader finds them."""
    return {t.name: t.data.tobytes() for t in GGUFReader(path).tensors if t.tensor_type.name == "NVFP4"}


def answer(model: Path) -> str:
    """What llama-server makes of a prompt, in words for the table."""
    try:
        with Server(model) as server:
            ids = server.tokenize("The quick brown fox")
            reply = server.post("/completion", {"prompt": ids, "n_predict": 8, "temperature": 0, "ignore_eos": True})
            return f"{len(ids)} tokens in, {reply['tokens_predicted']} out"
    except EngineError as e:
        return f"failed: {e}"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--dir", type=Path, default=Path("demo"))
    a = ap.parse_args()
    checkpoint, out = a.dir / "MiniCPM-V-4.7-Demo-NVFP4", a.dir / "gguf"
    for folder in (checkpoint, out):
        shutil.rmtree(folder, ignore_errors=True)
    print(f"== a random checkpoint of the true architecture: {checkpoint}", flush=True)
    make_checkpoint(checkpoint, PRESETS["demo"], "nvfp4", seed=0)
    for command in (["inspect", checkpoint], ["convert", checkpoint, "-o", out, "--tiers", "all"]):
        print(f"\n== mcpq-gguf {' '.join(map(str, command))}", flush=True)
        subprocess.run([sys.executable, "-m", "mcpq_gguf", *map(str, command)], check=True)

    try:
        print(f"\n== llama.cpp: {find_binary('llama-server')}", flush=True)
        found = True
    except EngineError as e:
        print(f"\n== llama.cpp: {e}", flush=True)
        found = False
    files = json.loads((out / "manifest.json").read_text())["files"]
    exact = blocks(out / files[0]["file"])
    print(f"\n{'tier':8} {'bytes':>11}  {'sha256':6}  {'NVFP4 blocks of the checkpoint':31} {'file':46} llama-server")
    for f in files:
        path = out / f["file"]
        same = hashlib.sha256(path.read_bytes()).hexdigest() == f["sha256"]
        mine = blocks(path)
        kept = sum(mine.get(name) == data for name, data in exact.items())
        carried = "-" if f["tier"] == "mmproj" else f"{kept} of {len(exact)} tensors byte for byte"
        run = "-" if f["tier"] == "mmproj" else answer(path) if found else "not found"
        print(f"{f['tier']:8} {f['bytes']:11,}  {'ok' if same else 'WRONG':6}  {carried:31} {f['file']:46} {run}")
    print("\n(random weights: what the model says means nothing)")


if __name__ == "__main__":
    main()
