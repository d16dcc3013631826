"""The door: every way in which a checkpoint's files can be wrong is one clear error, and reading stays lazy."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from mcpq_gguf.checkpoint import INDEX, open_checkpoint
from mcpq_gguf.errors import CheckpointError, UnsupportedFormat

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.arange(4, dtype=np.float16),
    "c": np.array(7, dtype=np.int64),
    "empty": np.zeros((0, 5), np.float32),
}


def make(folder: Path, shards: int = 1, index: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["X"]}')
    names, where = list(TENSORS), {}
    for k in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: TENSORS[n] for n in names[k::shards]}
        save_file(part, folder / file, {"format": "pt"})
        where.update(dict.fromkeys(part, file))
    if index:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def raw(folder: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A single-file checkpoint with the given header, well formed or not."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = struct.pack("<Q", len(text) if length is None else length)
    (folder / "model.safetensors").write_bytes(head + text + data)
    return folder


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(("shards", "index"), [(1, False), (1, True), (2, True), (3, False)])
def test_reads_what_the_safetensors_library_reads(tmp_path: Path, shards: int, index: bool) -> None:
    checkpoint = open_checkpoint(make(tmp_path, shards, index))
    assert set(checkpoint.tensors) == set(TENSORS)
    for file in checkpoint.shards:
        with safe_open(file, "np") as f:
            for name in f.keys():  # noqa: SIM118
                ours = checkpoint.array(checkpoint.tensors[name])
                np.testing.assert_array_equal(ours, f.get_tensor(name))
                assert ours.dtype == TENSORS[name].dtype


def test_opening_maps_no_shard(tmp_path: Path) -> None:
    assert not open_checkpoint(make(tmp_path, 2, True))._maps


def test_views_are_read_only(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path))
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.array(checkpoint.tensors["a.weight"])[0] = 1


def refused(folder: Path, *words: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedFormat)) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_missing_directory_config_and_weights(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "not a directory")
    refused(tmp_path, "config.json", "missing")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no .safetensors")


@pytest.mark.parametrize("index", [True, False])
def test_missing_shard(tmp_path: Path, index: bool) -> None:
    make(tmp_path, 2, index)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00002.safetensors", "missing")


def test_tensor_missing_from_its_shard(tmp_path: Path) -> None:
    make(tmp_path, 2, True)
    save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / "model-00001-of-00002.safetensors")
    refused(tmp_path, "c:", "model-00001-of-00002.safetensors", "in no shard")


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    make(tmp_path, 2)
    save_file(TENSORS, tmp_path / "model-00001-of-00002.safetensors")
    refused(tmp_path, "empty", "twice", "model-00001-of-00002", "model-00002-of-00002")


def test_tensor_that_the_index_does_not_list_or_places_elsewhere(tmp_path: Path) -> None:
    make(tmp_path, 2, True)
    path = tmp_path / INDEX
    index = json.loads(path.read_text())
    moved = dict(index["weight_map"], **{"a.weight": index["weight_map"]["b.weight"]})
    path.write_text(json.dumps({"weight_map": moved}))
    refused(tmp_path, "a.weight", "found in model-00001-of-00002")
    del index["weight_map"]["a.weight"]
    path.write_text(json.dumps(index))
    refused(tmp_path, "a.weight", "does not list it")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", 3])
def test_index_cannot_lead_out_of_the_directory(tmp_path: Path, name: object) -> None:
    make(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a.weight": name}}))
    refused(tmp_path, "a.weight", "same directory")


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    make(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, "model.safetensors", "truncated")


def test_bytes_left_over(tmp_path: Path) -> None:
    make(tmp_path)
    with open(tmp_path / "model.safetensors", "ab") as f:
        f.write(b"x")
    refused(tmp_path, "left over")


def test_lfs_pointer(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(tmp_path, "Git LFS pointer", "git lfs pull")


@pytest.mark.parametrize(("header", "data", "words"), [
    ({"a": entry("F32", [2], 0, 4)}, 4, ("a", "needs 8 bytes", "hold 4")),
    ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, 6, ("b", "overlaps")),
    ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, 12, ("b", "gap")),
    ({"a": entry("F32", [-1], 0, 4)}, 4, ("'a'", "malformed")),
    ({"a": entry("F32", [1], 4, 0)}, 4, ("a", "hold -4")),
    ({"a": entry("F32", [1 << 60], 0, 4)}, 4, ("'a'", "malformed")),
    ({"a": entry("F32", [1 << 40, 1 << 40], 0, 4)}, 4, ("a", "hold 4")),
    ({"a": entry("Q9", [1], 0, 4)}, 4, ("a", "'Q9'")),
    ({"a": {"dtype": "F32"}}, 0, ("'a'", "malformed")),
    ({"a": [1, 2]}, 0, ("'a'", "malformed")),
    ({"a\n\x1b[31m": entry("F32", [1], 0, 4)}, 4, ("malformed",)),
    ([1], 0, ("JSON object",)),
    (b"{", 0, ("not valid JSON",)),
    (b"[" * 100_000, 0, ("not valid JSON",)),
    (b"\xff", 0, ("not valid JSON",)),
])
def test_malformed_header(tmp_path: Path, header: object, data: int, words: tuple[str, ...]) -> None:
    refused(raw(tmp_path, header, bytes(data)), "model.safetensors", *words)


@pytest.mark.parametrize("length", [1 << 63, 1 << 40, 99])
def test_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    refused(raw(tmp_path, {}, length=length), "truncated or not a safetensors file")


@pytest.mark.parametrize("config", ["[]", "{", "\xff", "[" * 100_000])
def test_malformed_config(tmp_path: Path, config: str) -> None:
    make(tmp_path)
    (tmp_path / "config.json").write_text(config, encoding="latin-1")
    refused(tmp_path, "config.json")


@pytest.mark.parametrize("names", [None, [], ["A", "B"], "A", [1]])
def test_architecture_must_be_one_name(tmp_path: Path, names: object) -> None:
    make(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))
    with pytest.raises(CheckpointError, match="architectures"):
        _ = open_checkpoint(tmp_path).architecture


def test_files_beside_the_index_are_noted(tmp_path: Path) -> None:
    make(tmp_path, 2, True)
    save_file({"z": np.zeros(1, np.float32)}, tmp_path / "consolidated.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert "z" not in checkpoint.tensors
    assert "consolidated.safetensors" in checkpoint.notes[0]
