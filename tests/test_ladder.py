"""`--tiers all`: one pass over the checkpoint, a family of files, each smaller, none better, all with pictures."""

import base64
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from oracle import PROMPTS, checkpoint, kl, read_gguf
from PIL import Image

from mcpq_gguf.convert import Options, Prepared, convert, prepare
from mcpq_gguf.errors import McpqError
from mcpq_gguf.verify.engine import Server
from mcpq_gguf.writer import Finished

INPUTS = ["made-nvfp4", "bf16", "nvfp4a16", "nvfp4-w4a4", "int4-mixed-w4a16", "qqq-w4a8-mixed", "fp8-dynamic",
          "int4-g128-asym", "mixed-nvfp4-fp8", "mxfp4a16", "model-free/nvfp4a16"]
UNTOUCHED = ("exact", "q8", "q6", "q5", "q4")


@pytest.fixture(scope="module", params=INPUTS)
def ladder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, list[Finished]]:
    prepared = prepare(checkpoint(request.param), Options(tiers="all", projector="minicpmv4_6"))
    return prepared, convert(prepared, tmp_path_factory.mktemp("ladder"))


def tiers(ladder: tuple[Prepared, list[Finished]]) -> dict[str, Path]:
    return {tier: file.path for tier, file in zip(ladder[0].tiers, ladder[1])}


def picture() -> str:
    image = io.BytesIO()
    y, x = np.mgrid[0:448, 0:448]
    Image.fromarray(np.stack([x // 2, y // 2, (x // 32 + y // 32) % 2 * 255], -1).astype(np.uint8)).save(image, "PNG")
    return "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()


def test_each_tier_is_smaller_served_with_pictures_and_no_better(
        ladder: tuple[Prepared, list[Finished]], capsys: pytest.CaptureFixture[str]) -> None:
    files = tiers(ladder)
    projector = files.pop("mmproj")
    sizes = [p.stat().st_size for p in files.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    vocabulary = next(e.shape[0] for e in ladder[0].plan.entries if e.role == "embedding")
    prompts = [[(i + shift) % vocabulary for i in ids] for shift in (0, 501) for ids in PROMPTS[3:]]
    base: list[np.ndarray] = []
    divergence: dict[str, float] = {}
    for tier, path in files.items():
        with Server(path, projector, extra=["-ctk", "f32", "-ctv", "f32"]) as server:
            ours = [server.logprobs(ids, vocabulary) for ids in prompts]
            base = base or ours
            divergence[tier] = float(np.mean([kl(a, b) for a, b in zip(base, ours)]))
            content = [{"type": "image_url", "image_url": {"url": picture()}},
                       {"type": "text", "text": "What is this?"}]
            answer = server.post("/v1/chat/completions", {"max_tokens": 4, "messages": [
                {"role": "user", "content": content}]})
            assert answer["usage"]["completion_tokens"] >= 1
            assert answer["usage"]["prompt_tokens"] > 16  # the picture takes 16 tokens
    with capsys.disabled():
        print(f"\n{ladder[0].checkpoint.path.name}: KL to exact "
              + ", ".join(f"{tier} {d:.1e}" for tier, d in divergence.items()))
    values = list(divergence.values())
    # No better further down, but for noise: random weights, and routers that are close to a tie.
    assert all(b >= a * 0.7 - 1e-4 for a, b in pairwise(values))


def test_quantized_weights_are_the_same_bytes_in_all_tiers_but_compact(ladder: tuple[Prepared, list[Finished]]) -> None:
    files = tiers(ladder)
    exact = read_gguf(files["exact"])
    carried = [name for name, (_, kind, _) in exact.items() if kind not in ("F32", "F16", "BF16")]
    for tier in UNTOUCHED:
        if tier in files:
            written = read_gguf(files[tier])
            for name in carried:
                assert written[name][1] == exact[name][1], (tier, name)
                assert written[name][2].tobytes() == exact[name][2].tobytes(), (tier, name)


def test_predicted_sizes_and_sums_are_those_of_the_files(ladder: tuple[Prepared, list[Finished]]) -> None:
    folder = ladder[1][0].path.parent
    sums = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [f["file"] for f in manifest["files"]] == [f.path.name for f in ladder[1]]
    for plan, file, listed in zip(ladder[0].plans, ladder[1], manifest["files"]):
        data = file.path.read_bytes()
        assert len(data) == plan.nbytes
        assert hashlib.sha256(data).hexdigest() == file.sha256 == sums[file.path.name] == listed["sha256"]
        lossy = [t for t in listed["tensors"] if t["exactness"] == "lossy"]
        assert all(0 < t["loss"]["rms"] < 1 for t in lossy)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of some 60 MB, so that a run takes long enough to be killed."""
    from dataclasses import replace

    import make_checkpoint
    dims = replace(make_checkpoint.PRESETS["demo"], hidden=512, moe_inter=256, experts=32, layers=8)
    folder = tmp_path_factory.mktemp("wide") / "wide"
    make_checkpoint.make_checkpoint(folder, dims, "nvfp4", seed=5)
    return folder


def command(source: Path, out: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "mcpq_gguf", "convert", str(source), "-o", str(out), "--tiers", "all", *args]


def sums(folder: Path) -> str:
    return (folder / "SHA256SUMS").read_text()


def test_twenty_kills_and_the_same_files(wide: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments; the next run goes on, and in the end every file is as of an undisturbed run."""
    started = time.monotonic()
    subprocess.run(command(wide, tmp_path / "whole"), check=True, capture_output=True)
    whole = time.monotonic() - started
    rng, kills, continued = random.Random(11), 0, 0
    out = tmp_path / "cut"
    environment = dict(os.environ, MCPQ_JOURNAL_SECONDS="0.05")
    while kills < 20:
        process = subprocess.Popen(command(wide, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                   env=environment)
        try:
            _, errors = process.communicate(timeout=rng.uniform(0.3, 1.0) * whole)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            _, errors = process.communicate()
            kills += 1
        else:
            assert process.returncode == 0
            assert sums(out) == sums(tmp_path / "whole")
            for file in out.iterdir():
                file.unlink()
        continued += "continuing" in errors
        for file in out.glob("*.gguf") if out.exists() else ():
            assert (tmp_path / "whole" / file.name).read_bytes() == file.read_bytes()  # complete, or not there
    assert continued > 0
    last = subprocess.run(command(wide, out), check=True, capture_output=True, text=True)
    assert sums(out) == sums(tmp_path / "whole"), last.stderr
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in (tmp_path / "whole").iterdir())


def test_a_changed_plan_starts_anew_and_says_so(wide: Path, tmp_path: Path) -> None:
    environment = dict(os.environ, MCPQ_JOURNAL_SECONDS="0.01")
    process = subprocess.Popen(command(wide, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env=environment)
    end = time.monotonic() + 60
    while not (tmp_path / ".mcpq-journal.json").exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    process.kill()
    process.wait()
    done = subprocess.run(command(wide, tmp_path, "--name", "Other-1B"), check=True, capture_output=True, text=True)
    assert "starting anew" in done.stderr
    assert not list(tmp_path.glob("*.partial"))


def test_the_checkpoint_is_read_once(wide: Path, tmp_path: Path) -> None:
    """Bytes that the kernel fetched from the disk for the process, the page cache emptied of the file before."""
    size = sum(f.stat().st_size for f in wide.glob("*.safetensors"))
    for file in wide.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    code = ("import sys; from pathlib import Path; from mcpq_gguf.convert import *; "
            "p = prepare(sys.argv[1], Options(tiers='all')); n = lambda: int(open('/proc/self/io').read()"
            ".split('read_bytes:')[1].split()[0]); a = n(); convert(p, Path(sys.argv[2])); print(n() - a)")
    done = subprocess.run([sys.executable, "-c", code, str(wide), str(tmp_path)], check=True, capture_output=True,
                          text=True)
    assert int(done.stdout) <= 1.05 * size


def test_shards_follow_the_split_convention(tmp_path: Path) -> None:
    source = checkpoint("made-nvfp4")
    whole = convert(prepare(source, Options(mmproj=False)), tmp_path / "whole")[0].path
    shards = convert(prepare(source, Options(mmproj=False, shard_size=1_500_000)), tmp_path / "split")
    assert [f.path.name for f in shards] == [f"{whole.stem}-{i + 1:05d}-of-{len(shards):05d}.gguf"
                                             for i in range(len(shards))]
    assert len(shards) > 1
    pieces = {}
    for shard in shards:
        pieces |= read_gguf(shard.path)
    expected = read_gguf(whole)
    assert {k: v[2].tobytes() for k, v in pieces.items()} == {k: v[2].tobytes() for k, v in expected.items()}
    with Server(shards[0].path) as split, Server(whole) as single:
        np.testing.assert_array_equal(split.logprobs([1, 2, 3], 1024), single.logprobs([1, 2, 3], 1024))


def test_a_second_run_in_the_same_directory_says_so(wide: Path, tmp_path: Path) -> None:
    from mcpq_gguf.journal import Lock
    tmp_path.mkdir(exist_ok=True)
    with Lock(tmp_path), pytest.raises(McpqError, match="another conversion is writing here"):
        convert(prepare(wide), tmp_path)


def test_fit_takes_the_best_tier_that_fits(tmp_path: Path) -> None:
    source = checkpoint("made-nvfp4")
    listed = subprocess.run([sys.executable, "-m", "mcpq_gguf", "tiers", str(source), "--ctx", "4096", "--json"],
                            check=True, capture_output=True, text=True)
    rows = {row["tier"]: row for row in json.loads(listed.stdout)}
    done = subprocess.run(command(source, tmp_path, "--fit", str(rows["q5"]["memory"]), "--ctx", "4096",
                                  "--stdout-names"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "q5 (made-8x2.4M-NVFP4_M.gguf): taken" in done.stderr
    assert [Path(line).name for line in done.stdout.splitlines()] == [rows["q5"]["file"],
                                                                       "mmproj-made-8x2.4M-BF16.gguf"]
    done = subprocess.run(command(checkpoint("made-nvfp4"), tmp_path, "--fit", "1MiB"), capture_output=True, text=True,
                          check=False)
    assert done.returncode == 1
    assert "no tier fits" in done.stderr
