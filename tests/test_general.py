"""Names and general metadata follow GGUF's conventions and the checkpoint's own model card."""

import json
import shutil
from pathlib import Path

import pytest
from gguf import GGUFReader
from oracle import checkpoint

from mcpq_gguf.convert import Options, convert, prepare
from mcpq_gguf.general import split_name


@pytest.mark.parametrize(("name", "parts"), [
    ("MiniCPM-V-4.7-35B-A3B-NVFP4", ("MiniCPM-V-4.7", "35B-A3B", "NVFP4")),
    ("MiniCPM-V-4.7-35B-A3B", ("MiniCPM-V-4.7", "35B-A3B", None)),
    ("MiniCPM-V-4.7-1B", ("MiniCPM-V-4.7", "1B", None)),
    ("Qwen3.5-0.8B-Instruct-W4A16", ("Qwen3.5", "0.8B", "Instruct-W4A16")),
    ("Mixtral-8x7B-v0.1", ("Mixtral", "8x7B", "v0.1")),
    ("gpt oss 20b", ("gpt-oss", "20b", None)),
    ("nvfp4a16", ("nvfp4a16", None, None)),
    ("MiniCPM-V-4.7-Demo-NVFP4", ("MiniCPM-V-4.7-Demo", None, None)),
    ("7B", ("7B", None, None)),
])
def test_names_split_into_base_size_and_finetune(name: str, parts: tuple[str, str | None, str | None]) -> None:
    assert split_name(name) == parts


@pytest.mark.parametrize(("name", "file"), [
    ("MiniCPM-V-4.7-35B-A3B-NVFP4", "MiniCPM-V-4.7-35B-A3B-NVFP4.gguf"),
    ("MiniCPM-V-4.7-35B-A3B-W4A16", "MiniCPM-V-4.7-35B-A3B-W4A16-NVFP4.gguf"),
    ("MiniCPM-V-4.7-35B-A3B", "MiniCPM-V-4.7-35B-A3B-NVFP4.gguf"),
    ("made", "made-8x2.4M-NVFP4.gguf"),
])
def test_file_names(name: str, file: str) -> None:
    plans = prepare(checkpoint("made-nvfp4"), Options(overrides={"name": name})).plans
    assert plans[0].name == file
    assert plans[1].name == "mmproj-" + file.replace("-NVFP4.gguf", "-BF16.gguf")


def test_the_model_card_and_generation_config_are_carried_over(tmp_path: Path) -> None:
    source = tmp_path / "Org-Model-3B-NVFP4"
    shutil.copytree(checkpoint("made-nvfp4"), source)
    (source / "README.md").write_text("---\nlicense: apache-2.0\nbase_model:\n- openbmb/MiniCPM-V-4.7-35B-A3B\n"
                                      "language: [en, zh]\ntags: [vision]\n---\n# card\n")
    (source / "generation_config.json").write_text(json.dumps(
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True}))
    options = Options(mmproj=False, overrides={"quantized_by": "somebody"})
    fields = GGUFReader(convert(prepare(source, options), tmp_path)[0].path).fields
    found = {k: f.contents() for k, f in fields.items() if k.startswith("general.")}
    assert found["general.name"] == "Org-Model-3B-NVFP4"
    assert (found["general.basename"], found["general.size_label"]) == ("Org-Model", "3B")
    assert found["general.license"] == "apache-2.0"
    assert found["general.quantized_by"] == "somebody"
    assert found["general.base_model.count"] == 1
    assert found["general.base_model.0.repo_url"] == "https://huggingface.co/openbmb/MiniCPM-V-4.7-35B-A3B"
    assert found["general.languages"] == ["en", "zh"]
    assert "vision" in found["general.tags"]
    assert found["general.file_type"] == 39
    assert [round(found[f"general.sampling.{k}"], 4) for k in ("temp", "top_p", "top_k", "penalty_repeat")] == [
        0.7, 0.8, 20, 1.05]
