"""Importance matrices of both file formats mean what llama-quantize takes them for."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from oracle import checkpoint, make_checkpoint
from test_quantize import ROWS, llama_quantize, numbers, write_imatrix, write_model

from mcpq_gguf.convert import Options, convert, prepare
from mcpq_gguf.errors import EngineError, PlanError
from mcpq_gguf.ggml.quantize import quantize
from mcpq_gguf.imatrix import load_imatrix, run_imatrix
from mcpq_gguf.verify.engine import find_binary

STACKED, PLAIN = "blk.0.ffn_up_exps.weight", "blk.0.attn_k.weight"


def entry(name: str, calls: int, values: list[float]) -> bytes:
    raw = name.encode()
    return struct.pack(f"<i{len(raw)}sii{len(values)}f", len(raw), raw, calls, len(values), *values)


def dat(*entries: bytes, tail: bytes = b"") -> bytes:
    return struct.pack("<i", len(entries)) + b"".join(entries) + tail


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A model, and llama-imatrix's files of it: GGUF and .dat."""
    folder = tmp_path_factory.mktemp("imatrix")
    try:
        find_binary("llama-imatrix")
    except EngineError as e:
        pytest.skip(str(e))
    prepared = prepare(checkpoint("made-nvfp4"), Options(mmproj=False))
    model = convert(prepared, folder / "model.gguf", 1)[0].path
    text = folder / "text.txt"
    text.write_text(make_checkpoint.CORPUS * 4, encoding="utf-8")
    for name in ("i.gguf", "i.dat"):
        run_imatrix(model, text, folder / name, chunks=2, context=64, threads=1, timeout=100)
    return model, folder / "i.gguf", folder / "i.dat"


def test_a_run_covers_every_weight_of_the_layers(computed: tuple[Path, Path, Path]) -> None:
    model, path, _ = computed
    imatrix = load_imatrix(path)
    assert imatrix.chunks == 2
    assert [Path(d).name for d in imatrix.datasets] == ["text.txt"]
    matrices = [t for t in GGUFReader(model).tensors if t.name.endswith("_exps.weight") or ".attn_q." in t.name
                or ".ssm_out." in t.name or ".attn_qkv." in t.name or t.name.endswith("_shexp.weight")]
    assert len(matrices) > 20
    for t in matrices:
        shape = tuple(int(n) for n in reversed(t.shape))
        assert t.name in imatrix
        imatrix.check(t.name, shape)
        importance = imatrix.importance(t.name, shape[0] - 1 if len(shape) == 3 else None, shape[-1])
        assert importance is not None
        assert importance.shape == (shape[-1],)
        assert importance.dtype == np.float32
        assert importance.min() >= 0
    assert imatrix.importance("token_embd.weight", None, 256) is None
    assert "token_embd.weight" not in imatrix


def test_both_formats_hold_the_same_weights(computed: tuple[Path, Path, Path]) -> None:
    """The .dat format adds up a mean a chunk and has one count for all experts, so it is near and not equal."""
    a, b = (load_imatrix(p) for p in computed[1:])
    assert a.values.keys() == b.values.keys()
    assert (a.chunks, a.datasets) == (b.chunks, b.datasets)
    skipped = {name for name, _ in a.unused}
    for name, values in a.values.items():
        if name not in skipped:
            np.testing.assert_allclose(values, b.values[name], rtol=1e-5)


def test_each_expert_has_its_slice_and_an_idle_one_equal_weights(tmp_path: Path) -> None:
    sums = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_imatrix(tmp_path / "i.gguf", {STACKED: (sums, np.array([2, 0, 4], np.float32))})
    imatrix = load_imatrix(tmp_path / "i.gguf")
    assert imatrix.importance(STACKED, 0, 4).tolist() == [0, .5, 1, 1.5]
    assert imatrix.importance(STACKED, 1, 4).tolist() == [1, 1, 1, 1]
    assert imatrix.importance(STACKED, 2, 4).tolist() == [2, 2.25, 2.5, 2.75]
    assert imatrix.unused == ((STACKED, 1),)
    for expert, columns in ((3, 4), (None, 4), (0, 5)):
        with pytest.raises(PlanError, match=r"ffn_up_exps.weight has 12 weights.*another model"):
            imatrix.importance(STACKED, expert, columns)
    with pytest.raises(PlanError, match=r"needs 16; the imatrix belongs to another model"):
        imatrix.check(STACKED, (4, 8, 4))
    assert imatrix.importance(PLAIN, None, 7) is None


def test_the_older_format_quantizes_as_in_llama_quantize(tmp_path: Path) -> None:
    values = np.exp(np.random.default_rng(3).standard_normal(512)).astype(np.float32)
    raw = dat(entry(PLAIN, 5, list(values)), tail=struct.pack("<ii8s", 11, 8, b"/a/b.txt"))
    (tmp_path / "i.dat").write_bytes(raw)
    imatrix = load_imatrix(tmp_path / "i.dat")
    assert (imatrix.chunks, imatrix.datasets) == (11, ("/a/b.txt",))
    assert np.array_equal(imatrix.importance(PLAIN, None, 512), values / np.float32(5))
    x = numbers(ROWS, 512)
    write_model(tmp_path / "in.gguf", {PLAIN: x})
    got = llama_quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", {PLAIN: "Q3_K"}, "--imatrix",
                         str(tmp_path / "i.dat"))
    assert np.array_equal(got[PLAIN][1], quantize(x, "Q3_K", imatrix.importance(PLAIN, None, 512)))


@pytest.mark.parametrize("older", [False, True])
def test_the_metadata_are_llama_quantizes_without_paths(tmp_path: Path, older: bool) -> None:
    path = tmp_path / ("i.dat" if older else "i.gguf")
    if older:
        tail = struct.pack("<ii23s", 7, 23, b"/home/somebody/text.txt")
        path.write_bytes(dat(entry(PLAIN, 1, [1.0] * 512), tail=tail))
    else:
        write_imatrix(path, {PLAIN: (np.ones((1, 512), np.float32), np.ones(1, np.float32))})
    write_model(tmp_path / "in.gguf", {PLAIN: numbers(ROWS, 512)})
    llama_quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", {PLAIN: "Q3_K"}, "--imatrix", str(path))
    theirs = {k: f for k, f in GGUFReader(tmp_path / "out.gguf").fields.items() if k.startswith("quantize.imatrix")}
    ours = load_imatrix(path).metadata()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert theirs[key].types == [value.type]
        found = theirs[key].contents()
        assert value.value == (found if isinstance(found, int) else Path(found).name)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "i.dat"
    whole = dat(entry(PLAIN, 1, [1.0] * 4))
    for raw, message in (
            (b"", "no importance matrix"), (whole[:-3], "ends at byte"), (dat(), "holds no importance matrix"),
            (dat(entry(PLAIN, 1, [])), "has 0 weights"), (b"\xff" * 40, "no importance matrix"),
            (dat(entry(PLAIN, 1, [1.0, float("nan")])), "negative or not finite"),
            (dat(entry(PLAIN, 1, [1.0, -1.0])), "negative or not finite"), (b"GGUF" + bytes(8), "no importance matrix"),
    ):
        path.write_bytes(raw)
        with pytest.raises(PlanError, match=message) as e:
            load_imatrix(path)
        assert str(path) in str(e.value)
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        load_imatrix(tmp_path / "none.gguf")


def test_a_model_is_no_importance_matrix(computed: tuple[Path, Path, Path]) -> None:
    with pytest.raises(PlanError, match=r"no tensors named .in_sum2"):
        load_imatrix(computed[0])
