"""Quantized rows are those of llama-quantize, byte for byte, whatever the type, with and without an imatrix."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from mcpq_gguf.errors import EngineError, PlanError
from mcpq_gguf.ggml.quantize import FALLBACK, NEEDS_IMPORTANCE, TYPES, WANTS_IMPORTANCE, bits, fitting_type, quantize
from mcpq_gguf.imatrix import load_imatrix
from mcpq_gguf.verify.engine import find_binary, run

ORDER = sorted(TYPES)
EXPERTS, ROWS, COLUMNS = 3, 6, 512


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal numbers of the size of weights; a row of zeros, one with outliers, one of tiny numbers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, np.float32) * np.float32(0.03)
    x[..., 1, :] = 0
    x[..., 2, ::37] *= 60
    x[..., 3, :] *= np.float32(1e-6)
    return x


def write_model(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A GGUF file of the llama architecture with a layer for each type: as much of one as llama-quantize asks for."""
    w = GGUFWriter(path, "llama")
    w.add_block_count(len(ORDER))
    w.add_context_length(512)
    w.add_embedding_length(COLUMNS)
    w.add_feed_forward_length(COLUMNS)
    w.add_head_count(8)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(64)
    for name, x in tensors.items():
        w.add_tensor(name, x)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write_imatrix(path: Path, entries: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """name -> (float32 (experts, columns) sums of squares, float32 (experts,) counts), as llama-imatrix writes them."""
    w = GGUFWriter(path, "")
    w.kv_data[0].clear()
    w.add_type("imatrix")
    w.add_array("imatrix.datasets", ["/home/somebody/text.txt"])
    w.add_uint32("imatrix.chunk_count", 7)
    w.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, counts) in entries.items():
        w.add_tensor(name + ".in_sum2", sums)
        w.add_tensor(name + ".counts", counts.reshape(-1, 1))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def llama_quantize(source: Path, target: Path, types: dict[str, str], *args: str) -> dict[str, tuple[str, np.ndarray]]:
    """Run it with a type for each tensor; name -> (type, uint8 (rows, bytes)) of what it wrote."""
    try:
        binary = find_binary("llama-quantize")
    except EngineError as e:
        pytest.skip(str(e))
    options = [a for name, kind in types.items()
               for a in ("--tensor-type", f"^{name.replace('.', chr(92) + '.')}$={kind.lower()}")]
    run(binary, [*args, *options, str(source), str(target), "Q8_0", "2"], timeout=120)
    return {t.name: (t.tensor_type.name, t.data.view(np.uint8).reshape(-1, t.data.shape[-1] * t.data.itemsize))
            for t in GGUFReader(target).tensors}


def test_rows_are_those_of_llama_quantize(tmp_path: Path) -> None:
    """Without an imatrix; types that it refuses then are tried on the embedding and the output, where it does not."""
    kinds = [k for k in ORDER if k not in WANTS_IMPORTANCE]
    tensors = {f"blk.{i}.ffn_up.weight": numbers(ROWS, COLUMNS, seed=i) for i in range(len(kinds))}
    types = dict(zip(tensors, kinds))
    ends = {"token_embd.weight": "IQ3_XXS", "output.weight": "IQ2_S"}
    tensors |= {name: numbers(64, COLUMNS, seed=90 + i) for i, name in enumerate(ends)}
    write_model(tmp_path / "in.gguf", tensors)
    got = llama_quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", types, "--token-embedding-type", "iq3_xxs",
                         "--output-tensor-type", "iq2_s")
    for name, kind in (types | ends).items():
        assert got[name][0] == kind
        assert np.array_equal(got[name][1], quantize(tensors[name], kind)), (name, kind)


def test_rows_are_those_of_llama_quantize_with_an_imatrix(tmp_path: Path) -> None:
    """Each expert by its own importance, one that the text never reached by equal weights."""
    rng = np.random.default_rng(1)
    tensors = {f"blk.{i}.ffn_down_exps.weight": numbers(EXPERTS, ROWS, COLUMNS, seed=i) for i in range(len(ORDER))}
    tensors |= {f"blk.{i}.attn_k.weight": numbers(ROWS, COLUMNS, seed=50 + i) for i in range(len(ORDER))}
    types = {name: ORDER[int(name.split(".")[1])] for name in tensors}
    entries = {}
    for name, x in tensors.items():
        n = EXPERTS if x.ndim == 3 else 1
        counts = np.array([40.0, 0.0, 7.0], np.float32)[:n]
        sums = (np.exp(rng.standard_normal((n, COLUMNS), np.float32)) * counts[:, None]).astype(np.float32)
        entries[name] = sums, counts
    write_model(tmp_path / "in.gguf", tensors)
    write_imatrix(tmp_path / "imatrix.gguf", entries)
    got = llama_quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", types, "--imatrix",
                         str(tmp_path / "imatrix.gguf"))
    imatrix = load_imatrix(tmp_path / "imatrix.gguf")
    for name, x in tensors.items():
        assert got[name][0] == types[name]
        imatrix.check(name, x.shape)
        parts = [quantize(rows, types[name], imatrix.importance(name, e if x.ndim == 3 else None, COLUMNS))
                 for e, rows in enumerate(x.reshape(-1, ROWS, COLUMNS))]
        assert np.array_equal(got[name][1], np.concatenate(parts)), (name, types[name])


def test_short_rows_fall_back_as_in_llama_quantize(tmp_path: Path) -> None:
    tensors = {f"blk.{i}.ffn_up.weight": numbers(4, 96, seed=i) for i in range(len(ORDER))}
    types = {name: kind for name, kind in zip(tensors, ORDER) if kind not in WANTS_IMPORTANCE}
    tensors = {name: tensors[name] for name in types}
    write_model(tmp_path / "in.gguf", tensors)
    got = llama_quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", types)
    for name, kind in types.items():
        fitting, reason = fitting_type(kind, 96)
        assert got[name][0] == fitting
        assert (reason == "") == (fitting == kind)
        assert np.array_equal(got[name][1], quantize(tensors[name], fitting))


def test_every_type_of_256_has_a_fallback_and_odd_rows_become_bf16() -> None:
    assert set(FALLBACK) == {k for k in TYPES if fitting_type(k, 32)[0] != k}
    assert {fitting_type(k, 100)[0] for k in TYPES} == {"BF16"}
    assert fitting_type("Q4_K", 100)[1] == "rows of 100 columns do not divide into Q4_K blocks of 256"
    assert fitting_type("F32", 7) == ("F32", "")
    assert (bits("Q4_K"), bits("NVFP4"), bits("BF16")) == (4.5, 4.5, 16)


@pytest.mark.parametrize("kind", ["Q4_K", "IQ3_XXS"])
def test_rows_do_not_depend_on_their_neighbours_nor_on_threads(kind: str) -> None:
    x = numbers(40, COLUMNS)
    whole = quantize(x, kind)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda i: quantize(x[i:i + 5], kind), range(0, 40, 5)))
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(quantize(x[::2], kind), whole[::2])  # rows that are no contiguous array
    assert quantize(x[:0], kind).shape == (0, whole.shape[1])


@pytest.mark.parametrize("kind", sorted(NEEDS_IMPORTANCE))
def test_a_type_that_needs_importance_says_so(kind: str) -> None:
    with pytest.raises(PlanError, match=f"{kind} needs an importance matrix.*--imatrix"):
        quantize(numbers(4, 256), kind)


def test_what_cannot_be_quantized_is_named() -> None:
    with pytest.raises(PlanError, match="not quantized to NVFP4"):
        quantize(numbers(4, 256), "NVFP4")
    with pytest.raises(PlanError, match="100 columns do not divide"):
        quantize(numbers(4, 100), "Q8_0")
    with pytest.raises(PlanError, match="another model"):
        quantize(numbers(4, 256), "Q4_K", np.ones(128, np.float32))
    for bad in (np.nan, np.inf, -1e6):
        x = numbers(4, 256)
        x[2, 5] = bad
        with pytest.raises(PlanError, match="cannot hold"):
            quantize(x, "Q4_K")
