#!/usr/bin/env python3
"""Measure `mcpq-gguf convert` against a plain copy of the same bytes, on the same disk, in the same run.

    benchmarks/convert.py [CHECKPOINT] [--repeat N] [--work DIR] [--json FILE] [-- ARGUMENTS OF convert]

Copy is `cat all shards > file`, then fsync. Convert is the command, then fsync of what it wrote. The two take turns,
the order changes every round, and the source's pages are dropped from the cache before each run. Without CHECKPOINT
the 5gb preset of tools/make_checkpoint.py is made in the work directory and kept there. Linux only (/proc, pidfd).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INTERVAL_MS = 50


@dataclass(frozen=True)
class Run:
    """One measured process. Bytes are those that the kernel counts at the block layer, not system calls'."""

    seconds: float
    cpu_seconds: float
    rss_anon: int
    rss_file: int
    bytes_read: int
    bytes_written: int
    first_mb_seconds: float
    output_bytes: int


def proc_numbers(path: str, keys: tuple[str, ...]) -> list[int]:
    """Numbers of a `key: value` file in /proc; 0 for a key that is not there."""
    try:
        with open(path) as f:
            values = {key: rest for key, _, rest in (line.partition(":") for line in f)}
    except OSError:
        return [0] * len(keys)
    return [int(values[k].split()[0]) if k in values else 0 for k in keys]


def fsync_tree(path: Path) -> int:
    """fsync every file under a directory; returns their bytes."""
    total = 0
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
            total += file.stat().st_size
    return total


def drop_cache(files: list[Path]) -> None:
    """Make the kernel forget the files' pages, so that the next read comes from the disk; let old writes settle."""
    os.sync()
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@contextmanager
def scratch(work: Path) -> Iterator[Path]:
    """An output directory that is gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="out-", dir=work))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def measure(command: list[str], out: Path, stdout: Path | None, log: Path) -> Run:
    """Run a command that writes into `out`, sampling its memory; the time includes fsync of what it wrote."""
    anon = file_rss = 0
    first_mb = 0.0
    with open(log, "ab") as messages, open(stdout, "wb") if stdout else nullcontext(messages) as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=messages, cwd=ROOT)
        poll = select.poll()
        pidfd = os.pidfd_open(process.pid)
        poll.register(pidfd, select.POLLIN)
        while not poll.poll(INTERVAL_MS):
            now_anon, now_file = proc_numbers(f"/proc/{process.pid}/status", ("RssAnon", "RssFile"))
            anon, file_rss = max(anon, now_anon * 1024), max(file_rss, now_file * 1024)
            if not first_mb and proc_numbers(f"/proc/{process.pid}/io", ("write_bytes",))[0] >= 1 << 20:
                first_mb = time.perf_counter() - start
        os.close(pidfd)
        read, written = proc_numbers(f"/proc/{process.pid}/io", ("read_bytes", "write_bytes"))  # not yet reaped
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output_bytes = fsync_tree(out)
        seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{log.read_text(errors='replace')}")
    cpu = usage.ru_utime + usage.ru_stime
    return Run(seconds, cpu, anon, file_rss, read, written, first_mb, output_bytes)


def default_checkpoint(work: Path) -> Path:
    """The 5gb preset, made once; built aside, so that a broken-off attempt is not taken for it."""
    path = work / "5gb-nvfp4"
    if not (path / "config.json").exists():
        partial = work / "5gb-nvfp4.partial"
        shutil.rmtree(partial, ignore_errors=True)
        tool = ROOT / "tools" / "make_checkpoint.py"
        subprocess.run([sys.executable, tool, "--preset", "5gb", "--out", partial], check=True)
        partial.rename(path)
    return path


def compare(checkpoint: Path, work: Path, repeat: int, extra: list[str]) -> dict[str, list[Run]]:
    """Copy and convert in turns, `repeat` times each."""
    shards = sorted(checkpoint.glob("*.safetensors"))
    size = sum(s.stat().st_size for s in shards)
    if not shards:
        raise SystemExit(f"{checkpoint}: no .safetensors files")
    if shutil.disk_usage(work).free < size * 1.2:
        raise SystemExit(f"{work}: less than {size * 1.2 / 1e9:.1f} GB free for the output")
    runs: dict[str, list[Run]] = {"copy": [], "convert": []}
    for i in range(repeat):
        for kind in ("copy", "convert") if i % 2 == 0 else ("convert", "copy"):
            with scratch(work) as out, tempfile.NamedTemporaryFile(dir=work, suffix=".log") as log:
                drop_cache(shards)
                if kind == "copy":
                    command, stdout = ["cat", *map(str, shards)], out / "copy.bin"
                else:
                    command, stdout = [sys.executable, "-m", "mcpq_gguf", "convert", str(checkpoint)], None
                    command += ["-o", str(out), *extra]
                run = measure(command, out, stdout, Path(log.name))
            runs[kind].append(run)
            print(f"round {i + 1}: {kind:7} {run.seconds:7.2f} s", file=sys.stderr)
    return runs


def medians(runs: list[Run]) -> Run:
    return Run(**{f.name: statistics.median(getattr(r, f.name) for r in runs) for f in fields(Run)})


def table(runs: dict[str, list[Run]], size: int) -> str:
    """One line a figure, a column each for copy and convert."""
    copy, convert = medians(runs["copy"]), medians(runs["convert"])
    gb = size / 1e9

    def spread(kind: str) -> str:
        seconds = [r.seconds for r in runs[kind]]
        return f"{min(seconds):.2f}-{max(seconds):.2f}"

    rounds = [b.seconds / a.seconds for a, b in zip(runs["copy"], runs["convert"], strict=True)]
    rows = [
        ("seconds (median)", f"{copy.seconds:.2f}", f"{convert.seconds:.2f}"),
        ("seconds (range)", spread("copy"), spread("convert")),
        ("time / copy", "1.00", f"{convert.seconds / copy.seconds:.2f}"),
        ("time / copy (range of rounds)", "", f"{min(rounds):.2f}-{max(rounds):.2f}"),
        ("GB/s of source", f"{gb / copy.seconds:.2f}", f"{gb / convert.seconds:.2f}"),
        ("CPU seconds per GB", f"{copy.cpu_seconds / gb:.2f}", f"{convert.cpu_seconds / gb:.2f}"),
        ("peak RSS anonymous, MB", f"{copy.rss_anon / 1e6:.0f}", f"{convert.rss_anon / 1e6:.0f}"),
        ("peak RSS of files, MB", f"{copy.rss_file / 1e6:.0f}", f"{convert.rss_file / 1e6:.0f}"),
        ("GB read from disk", f"{copy.bytes_read / 1e9:.2f}", f"{convert.bytes_read / 1e9:.2f}"),
        ("GB written", f"{copy.bytes_written / 1e9:.2f}", f"{convert.bytes_written / 1e9:.2f}"),
        ("GB of output", f"{copy.output_bytes / 1e9:.2f}", f"{convert.output_bytes / 1e9:.2f}"),
        ("seconds to first MB written", f"{copy.first_mb_seconds:.2f}", f"{convert.first_mb_seconds:.2f}"),
    ]
    lines = [f"{'':30} {'copy':>12} {'convert':>12}"]
    return "\n".join(lines + [f"{name:30} {a:>12} {b:>12}" for name, a, b in rows])


def main() -> None:
    argv = sys.argv[1:]
    at = argv.index("--") if "--" in argv else len(argv)
    ours, extra = argv[:at], argv[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work", metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures")
    args = parser.parse_args(ours)
    args.work.mkdir(parents=True, exist_ok=True)
    work = args.work.resolve()
    checkpoint = (args.checkpoint or default_checkpoint(work)).resolve()
    runs = compare(checkpoint, work, args.repeat, extra)
    size = sum(s.stat().st_size for s in checkpoint.glob("*.safetensors"))
    print(f"{checkpoint.name}: {size / 1e9:.2f} GB, {args.repeat} runs each, {os.cpu_count()} processors")
    print(table(runs, size))
    if args.json:
        result: dict[str, Any] = {
            "checkpoint": str(checkpoint), "source_bytes": size, "arguments": extra, "processors": os.cpu_count(),
            "system": platform.platform(), "python": platform.python_version(),
            "runs": {kind: [asdict(r) for r in rs] for kind, rs in runs.items()},
            "medians": {kind: asdict(medians(rs)) for kind, rs in runs.items()},
        }  # fmt: skip
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
