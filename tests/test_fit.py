"""The memory sum is llama.cpp's own, term by term, and the ladder's promise for a 16 GB card is kept."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from oracle import checkpoint, make_checkpoint

from mcpq_gguf.convert import Options, Prepared, convert, prepare
from mcpq_gguf.errors import EngineError, PlanError
from mcpq_gguf.fit import KV_TYPES, MemorySum, best, memory, parse_size
from mcpq_gguf.plan import FilePlan, layout_file, plan_entries
from mcpq_gguf.tiers import load_tiers
from mcpq_gguf.verify.engine import find_binary, run

MIB = 1 << 20


def program(name: str) -> Path:
    try:
        return find_binary(name)
    except EngineError as e:
        pytest.skip(str(e))


def write_sparse(path: Path, tensors: list[make_checkpoint.Tensor], values: object) -> None:
    """A shard of the right size that holds zeros, which take no disk; only global scales are written."""
    header, end, scales = {}, 0, []
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        if t.fill == "global_scale":
            scales.append(end)
        end += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        start = f.tell()
        for at in scales:
            f.seek(start + at)
            f.write(struct.pack("<f", 1000.0))
        f.truncate(start + end)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The shapes of 35B-A3B in NVFP4, planned."""
    folder = tmp_path_factory.mktemp("large") / "MiniCPM-V-4.7-35B-A3B"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_checkpoint, "write_safetensors", write_sparse)
        make_checkpoint.make_checkpoint(folder, make_checkpoint.PRESETS["35b"], "nvfp4", seed=1)
    return prepare(folder)


class Everything:
    """An imatrix that covers every tensor."""

    def __contains__(self, tensor: object) -> bool:
        return True


def tier_plan(prepared: Prepared, name: str, covered: bool = True) -> FilePlan:
    tier, = load_tiers(name)
    entries = plan_entries(prepared.model, prepared.weights, tier.policy(Everything() if covered else ()))
    return layout_file("model.gguf", prepared.plan.metadata, entries)


def projected(path: Path, *args: str) -> list[int]:
    """llama-fit-params: MiB of weights, of caches and states, and of compute buffers."""
    out = run(program("llama-fit-params"), ["-m", str(path), "-fitp", "on", "--no-repack", *args], timeout=60).stdout
    return [int(n) for n in out.split("Host")[-1].split()[:3]]


@pytest.mark.parametrize("name", ["compact", "exact"])
def test_the_sum_is_that_of_llama_fit_params(large: Prepared, tmp_path: Path, name: str) -> None:
    """At true sizes: weights and caches to the MiB, and the reserve holds what it computes with."""
    plan = tier_plan(large, name)
    path = tmp_path / "model.gguf"
    with open(path, "wb") as f:
        f.write(plan.header)
        f.truncate(plan.nbytes)
    for context, kv, slots in ((16384, "f16", 4), (40000, "q8_0", 1)):
        need = memory(plan, context, kv, slots=slots)
        model, caches, compute = projected(path, "-c", str(context), "-ctk", kv, "-ctv", kv, "-np", str(slots))
        assert abs(model - (need.weights + need.host) / MIB) <= 1
        assert need.context == -(-context // 256) * 256
        assert caches == (need.kv + need.recurrent) // MIB
        assert compute * MIB < need.reserve


def test_caches_and_states_are_those_that_llama_cpp_allocates(tmp_path: Path) -> None:
    prepared = prepare(checkpoint("made-nvfp4"), Options(mmproj=False))
    model = convert(prepared, tmp_path / "model.gguf", 1)[0].path
    for kv in ("f16", "q8_0"):
        done = run(program("llama-completion"), [
            "-m", str(model), "-c", "30000", "-ctk", kv, "-ctv", kv, "-p", "a", "-n", "1", "-no-cnv", "-lv", "4", "-t",
            "1"], timeout=60)
        log = done.stdout + done.stderr
        need = memory(prepared.plan, 30000, kv, slots=1)
        for words, size in (("KV", need.kv), ("RS", need.recurrent)):
            found = re.search(rf"{words} buffer size = *([0-9.]+) MiB", log)
            assert found, log[-2000:]
            assert found[1] == f"{size / MIB:.2f}"


def test_compact_fits_one_16_gb_card_and_exact_two(large: Prepared) -> None:
    """16k tokens, four slots, the projector in BF16, and the reserve."""
    projector = large.plans[1].nbytes
    for covered in (False, True):
        need = memory(tier_plan(large, "compact", covered), 16384, projector=projector)
        assert need.fits(parse_size("16GiB"))
        assert need.total == need.gpus[0]
    exact = memory(tier_plan(large, "exact"), 32768, "q8_0", gpus=2, projector=projector)
    assert exact.fits(parse_size("16GiB"))
    assert sum(exact.gpus) == exact.total
    assert not memory(tier_plan(large, "exact"), 32768, "q8_0", projector=projector).fits(parse_size("16GiB"))


def test_the_best_tier_that_fits_is_taken(large: Prepared) -> None:
    names = ["exact", "q8", "q6", "q5", "q4", "compact"]
    sums = [memory(tier_plan(large, n), 16384, projector=large.plans[1].nbytes) for n in names]

    def chosen(size: str) -> str | None:
        index = best(sums, parse_size(size))
        return None if index is None else names[index]

    assert [chosen(s) for s in ("24GiB", "22GiB", "21GiB", "16GiB", "8GiB")] == ["exact", "q8", "q6", "compact", None]


@pytest.mark.parametrize(("layers", "fixed"), [
    ([3, 3, 3, 3], [0, 0]), ([10, 1, 1, 1], [0, 0]), ([1, 1, 1, 10], [0, 5]), ([2] * 7, [4, 0, 1]), ([5], [0, 0, 9])])
def test_layers_are_split_so_that_the_fullest_takes_least(layers: list[int], fixed: list[int]) -> None:
    from mcpq_gguf.fit import _split

    def spread(left: list[int], gpus: list[int]) -> int:
        if len(gpus) == 1:
            return gpus[0] + sum(left)
        return min(max(gpus[0] + sum(left[:i]), spread(left[i:], gpus[1:])) for i in range(len(left) + 1))

    shares = _split(layers, fixed)
    assert sum(shares) == sum(layers) + sum(fixed)
    assert max(shares) == spread(layers, fixed)


def test_the_sum_is_printed_term_by_term(large: Prepared) -> None:
    need = memory(tier_plan(large, "compact"), 16000, "Q8_0", gpus=2, projector=1000 * MIB)
    text = str(need)
    for words in ("weights", "projector", "1,000 MiB", "KV cache (q8_0, 16,128 tokens)", "recurrent state (4 slots)",
                  "compute reserve (2 GPUs)", "sum", "on each GPU", "token embedding, in system memory"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("call", "message"), [
    (lambda p: memory(p, 1000, "q3_k"), "KV cache type 'q3_k' is not known; known are f32"),
    (lambda p: memory(p, 0), "should be at least 1"), (lambda p: memory(p, 1000, gpus=0), "should be at least 1")])
def test_settings_that_make_no_sense_are_refused(large: Prepared, call: Callable[[FilePlan], MemorySum],
                                                 message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call(large.plan)
    assert {memory(large.plan, 512, kv).kv for kv in KV_TYPES}


@pytest.mark.parametrize(("text", "size"), [
    ("16GiB", 16 << 30), ("16 gib", 16 << 30), ("16Gi", 16 << 30), ("16GB", 16 * 10**9), ("16G", 16 * 10**9),
    ("1.5GiB", 3 << 29), ("500M", 5 * 10**8), ("12K", 12000), ("1TiB", 1 << 40), ("123", 123), ("123B", 123)])
def test_sizes_are_read_as_they_are_written(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "16 XB", "-1G", "1iB", "16GiBs", "0", "1e3", "16 G 3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="size"):
        parse_size(text)
