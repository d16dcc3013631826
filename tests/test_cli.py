"""The command line: results on stdout, one clear line for an error, exit codes that scripts can rely on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from oracle import checkpoint


def mcpq(*args: object, **kwargs: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "mcpq_gguf", *map(str, args)], capture_output=True, text=True,
                          check=False, timeout=120, **kwargs)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def source() -> Path:
    return checkpoint("made-nvfp4")


def test_convert_writes_one_file_named_after_the_model(source: Path, tmp_path: Path) -> None:
    done = mcpq("convert", source, "-o", tmp_path, "--name", "MiniCPM-V-4.7-35B-A3B-NVFP4", "--no-mmproj")
    assert (done.returncode, done.stderr) == (0, "")  # no bar in a pipe
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".gguf"] == ["MiniCPM-V-4.7-35B-A3B-NVFP4.gguf"]
    assert "sha256" in done.stdout


def test_dry_run_writes_nothing_and_predicts_the_size(source: Path, tmp_path: Path) -> None:
    plan = mcpq("convert", source, "-o", tmp_path / "out", "--dry-run")
    assert plan.returncode == 0
    assert not (tmp_path / "out").exists()
    assert "blk.0.ffn_gate_exps.weight" in plan.stdout
    predicted = json.loads(mcpq("convert", source, "--dry-run", "--json").stdout)
    written = json.loads(mcpq("convert", source, "-o", tmp_path, "--json").stdout)
    assert {f["bytes"] for f in predicted["files"]} == {Path(f["file"]).stat().st_size for f in written["files"]}


def test_inspect_reads_headers_and_says_what_becomes_of_what(source: Path) -> None:
    shown = mcpq("inspect", source)
    assert shown.returncode == 0
    rows = [line for line in shown.stdout.splitlines() if line.startswith("nvfp4-pack-quantized")]
    assert len(rows) == 1
    assert "NVFP4" in rows[0]
    assert "exact" in rows[0]
    data = json.loads(mcpq("inspect", source, "--json", "--tensors").stdout)
    assert data["census"][0]["modules"] > 0
    assert len(data["tensors"]) == sum(f["tensors"] for f in data["files"])
    assert "blk.3.attn_q.weight" in mcpq("inspect", source, "--tensors").stdout


@pytest.mark.parametrize(("args", "code", "words"), [
    (["convert", "/nowhere"], 1, "error: /nowhere: not a directory"),
    (["inspect", "/nowhere"], 1, "error: /nowhere: not a directory"),
    (["convert"], 2, "CHECKPOINT"),
    (["convert", "/nowhere", "--outtype", "q9"], 2, "q9"),
    (["convert", "/nowhere", "--threads", "0"], 2, "threads"),
    (["nonsense"], 2, "nonsense"),
])
def test_wrong_use_and_failures_are_one_message(args: list[str], code: int, words: str) -> None:
    done = mcpq(*args)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in mcpq("--debug", "convert", "/nowhere").stderr


def test_a_folder_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = mcpq("convert", source, "-o", blocked / "out")
    assert done.returncode == 1
    assert str(blocked) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_complete_looking_file_and_goes_on(
        source: Path, tmp_path: Path, number: signal.Signals) -> None:
    whole = mcpq("convert", source, "-o", tmp_path / "whole")
    assert whole.returncode == 0
    command = [sys.executable, "-m", "mcpq_gguf", "convert", str(source), "-o", str(tmp_path / "cut")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "cut" / ".mcpq-lock").exists() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if process.returncode:  # it may have been faster than the signal
        assert process.returncode == 130
        assert errors.strip().splitlines()[-1].startswith("interrupted: no file was finished")
        assert "Traceback" not in errors
        assert not list((tmp_path / "cut").glob("*.gguf"))
    assert mcpq("convert", source, "-o", tmp_path / "cut").returncode == 0
    for file in (tmp_path / "whole").glob("*.gguf"):
        assert (tmp_path / "cut" / file.name).read_bytes() == file.read_bytes()
