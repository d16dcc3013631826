"""Where config.json and the tensors disagree the tensors decide, and the user is told; nothing is guessed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from oracle import Decompressed, checkpoint, read_gguf
from safetensors.torch import load_file, save_file

from mcpq_gguf.convert import Options, convert, prepare
from mcpq_gguf.errors import McpqError, SchemeError

MODEL = "model.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("made-int4-mixed"), tmp_path / "copy"))


def change(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= values
    (folder / "config.json").write_text(json.dumps(config))


def quantization(folder: Path) -> dict:  # type: ignore[type-arg]
    return json.loads((folder / "config.json").read_text())["quantization_config"]  # type: ignore[no-any-return]


def test_a_quantized_module_that_config_ignores_is_taken_as_stored(copy: Path, tmp_path: Path) -> None:
    change(copy, ignore=[*quantization(copy)["ignore"], "lm_head"])
    # the only group with INT8 and groups of 128 is lm_head's; two INT4 groups remain that do not fit its shapes
    with pytest.raises(SchemeError, match=r"lm_head: stored as packed integers.*3 of its groups fit"):
        prepare(copy)
    groups = quantization(copy)["config_groups"]
    change(copy, config_groups={k: g for k, g in groups.items() if g["weights"]["num_bits"] == 8})
    with pytest.raises(McpqError, match=r"weight_packed.*256 values of 8 bits take 64 words.*found 32"):
        prepare(copy)  # the INT4 modules have no group any more, and the INT8 one does not fit their shapes


def test_an_nvfp4_module_that_config_ignores_is_carried_and_reported(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("made-nvfp4"), tmp_path / "copy"))
    module = "model.language_model.layers.0.mlp.shared_expert.up_proj"
    change(folder, ignore=[*quantization(folder)["ignore"], module])
    prepared = prepare(folder, Options(mmproj=False))
    assert any("stored quantized against the config" in n and module in n for n in prepared.notes)
    written = read_gguf(convert(prepared, tmp_path / "out")[0].path)
    expected, divisor = Decompressed(folder).codes_times_scales(module)
    assert written["blk.0.ffn_up_shexp.weight"][1] == "NVFP4"
    assert (written["blk.0.ffn_up_shexp.weight"][0] == expected).all()
    assert divisor


def test_a_plain_module_that_config_targets_is_carried_and_reported(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("made-nvfp4"), tmp_path / "copy"))
    module = "model.language_model.layers.0.mlp.shared_expert.up_proj"
    weight = Decompressed(folder).weight(module).bfloat16()
    tensors = {k: v for k, v in load_file(folder / MODEL).items() if not k.startswith(module + ".")}
    save_file(tensors | {module + ".weight": weight}, folder / MODEL)
    prepared = prepare(folder, Options(mmproj=False))
    assert any("not quantized though the config targets them" in n and module in n for n in prepared.notes)
    written = read_gguf(convert(prepared, tmp_path / "out")[0].path)["blk.0.ffn_up_shexp.weight"]
    assert written[1] == "BF16"
    assert torch.equal(torch.from_numpy(written[0]), weight.float())


def test_ignore_entries_of_another_engine_are_reported(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("made-nvfp4"), tmp_path / "copy"))
    own = [i for i in quantization(folder)["ignore"] if "vision" not in i]
    groups = quantization(folder)["config_groups"]
    groups["group_0"]["targets"] = ["Linear"]
    change(folder, ignore=[*own, "re:vpm.*", "re:vit_merger.*", "re:.*embed_tokens"], config_groups=groups)
    prepared = prepare(folder)
    said = [n for n in prepared.notes if "match no module under its own name" in n]
    assert len(said) == 1
    assert "re:vpm.*" in said[0]
    # the aliases still protect the tower: it is not reported as quantized by the config
    assert not any("vision_tower" in n for n in prepared.notes)


def test_a_clean_checkpoint_has_no_such_notes() -> None:
    for name in ("made-nvfp4", "made-int4-mixed", "made-fp8", "made-bf16"):
        assert not [n for n in prepare(checkpoint(name)).notes if "config" in n or "ignore" in n]
