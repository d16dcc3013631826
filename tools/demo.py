#!/usr/bin/env python3
"""The whole way on a small checkpoint: make it, convert it, run it in llama.cpp where its binaries are found.

    demo.py [--dir demo]
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from make_checkpoint import PRESETS, make_checkpoint

from mcpq_gguf.errors import EngineError
from mcpq_gguf.verify.engine import Server, find_binary


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--dir", type=Path, default=Path("demo"))
    a = ap.parse_args()
    checkpoint, out = a.dir / "MiniCPM-V-4.7-Demo-NVFP4", a.dir / "gguf"
    for folder in (checkpoint, out):
        shutil.rmtree(folder, ignore_errors=True)
    print(f"== a random checkpoint of the true architecture: {checkpoint}", flush=True)
    make_checkpoint(checkpoint, PRESETS["demo"], "nvfp4", seed=0)
    for command in (["inspect", checkpoint], ["convert", checkpoint, "-o", out]):
        print(f"\n== mcpq-gguf {' '.join(map(str, command))}", flush=True)
        subprocess.run([sys.executable, "-m", "mcpq_gguf", *map(str, command)], check=True)
    print("\n== llama.cpp", flush=True)
    try:
        binary = find_binary("llama-server")
    except EngineError as e:
        print(e)
        return
    for model in sorted(out.glob("*.gguf")):
        with Server(model) as server:
            ids = server.tokenize("The quick brown fox")
            answer = server.post("/completion", {"prompt": ids, "n_predict": 8, "temperature": 0})
            print(f"{binary} serves {model.name}: {len(ids)} prompt tokens, {answer['tokens_predicted']} generated "
                  "(random weights: the text means nothing)")


if __name__ == "__main__":
    main()
