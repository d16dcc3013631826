#!/usr/bin/env python3
"""Measure what a pass for all tiers costs: `--tiers all` against the slowest tier alone and a copy of the rest.

    benchmarks/ladder.py [CHECKPOINT] [--work DIR] [--tiers NAME,NAME]

The target is 1.3: time of all tiers / (time of the slowest tier alone + time to write the other tiers' bytes). Bytes
read are counted by the kernel; the page cache is emptied of the checkpoint before each run. Without CHECKPOINT one of
35B-A3B's row sizes with fewer layers and experts is made in the work directory.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import make_checkpoint  # noqa: E402


def drop(folder: Path) -> int:
    """Empty the page cache of a checkpoint; returns its bytes."""
    total = 0
    for file in folder.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        total += file.stat().st_size
    return total


def convert(checkpoint: Path, out: Path, tiers: str) -> tuple[float, int, dict[str, int]]:
    """Seconds, bytes read from disk, and bytes of each file."""
    shutil.rmtree(out, ignore_errors=True)
    drop(checkpoint)
    os.sync()
    command = [sys.executable, "-m", "mcpq_gguf", "convert", str(checkpoint), "-o", str(out), "--tiers", tiers,
               "--json"]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        read = 0
        while process.poll() is None:
            try:
                io = Path(f"/proc/{process.pid}/io").read_text()
                read = int(io.split("read_bytes:")[1].split()[0])
            except (OSError, IndexError):
                pass
            time.sleep(0.02)
        assert process.stdout is not None
        files = json.loads(process.stdout.read())["files"]
    return time.monotonic() - started, read, {Path(f["file"]).name: f["bytes"] for f in files}


def copy(nbytes: int, work: Path) -> float:
    """Seconds to write and fsync so many bytes from memory."""
    block, path = os.urandom(1 << 22), work / "copy.bin"
    started = time.monotonic()
    with open(path, "wb") as f:
        for _ in range(-(-nbytes // len(block))):
            f.write(block)
        f.flush()
        os.fsync(f.fileno())
    seconds = time.monotonic() - started
    path.unlink()
    return seconds


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("checkpoint", type=Path, nargs="?")
    ap.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work")
    ap.add_argument("--tiers", default="exact,q8,q6,q5,q4,compact")
    a = ap.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    checkpoint = a.checkpoint or a.work / "ladder"
    if not checkpoint.exists():
        dims = replace(make_checkpoint.PRESETS["5gb"], layers=4, experts=32, vocab=32768)
        make_checkpoint.make_checkpoint(checkpoint, dims, "nvfp4", seed=1)
    size, out = drop(checkpoint), a.work / "ladder-out"
    alone = {tier: convert(checkpoint, out, tier) for tier in a.tiers.split(",")}
    slowest = max(alone, key=lambda tier: alone[tier][0])
    seconds, read, files = convert(checkpoint, out, a.tiers)
    others = sum(files.values()) - sum(alone[slowest][2].values())
    rest = copy(others, a.work)
    print(f"{checkpoint.name}: {size / 1e9:.2f} GB, {len(files)} files of {sum(files.values()) / 1e9:.2f} GB")
    for tier, (s, r, f) in alone.items():
        written = sum(f.values()) / 1e9
        print(f"  {tier:8} alone {s:7.2f} s, {r / size:.3f} x the checkpoint read, {written:.2f} GB written")
    print(f"  all tiers      {seconds:7.2f} s, {read / size:.3f} x the checkpoint read")
    print(f"  {slowest} alone and a copy of the other {others / 1e9:.2f} GB ({rest:.2f} s): "
          f"{alone[slowest][0] + rest:.2f} s; ratio {seconds / (alone[slowest][0] + rest):.2f}")
    shutil.rmtree(out, ignore_errors=True)


if __name__ == "__main__":
    main()
