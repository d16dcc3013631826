"""Targets and ignore lists mean what compressed-tensors takes them to mean, and nothing in the config is skipped."""

import copy
from typing import Any

import pytest
import torch
from compressed_tensors.utils.match import is_match, match_name

from mcpq_gguf.errors import SchemeError, UnsupportedFormat
from mcpq_gguf.schemes import aliases, parse_schemes

WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
NAMES = [
    "lm_head",
    "model.language_model.layers.0.mlp.gate",
    "model.language_model.layers.0.mlp.experts.3.up_proj",
    "model.language_model.layers.10.self_attn.q_proj",
    "model.language_model.layers.0.mlp.shared_expert.down_proj",
    "model.vision_tower.encoder.layers.0.mlp.fc1",
    "model.language_model.layers.0.linear_attn.in_proj_qkv",
]
ENTRIES = [
    "lm_head",
    "re:.*lm_head",
    "re:lm_head$",
    "re:head",
    "head",
    "re:.*experts.*",
    "re:.*mlp\\.gate$",
    "re:model\\.vision",
    "model.language_model.layers.0.mlp.gate",
    "re:.*layers\\.[0-9]\\.",
    "re:.*\\.(gate|up|down)_proj$",
    "re:",
]


def config(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": [],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"weights": dict(WEIGHTS), "targets": ["Linear"]}},
        **changes,
    }


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", NAMES)
def test_matches_names_and_patterns_as_compressed_tensors_does(name: str, entry: str) -> None:
    ignoring = parse_schemes(config(ignore=[entry])).resolve(name) is None
    targeting = parse_schemes(config(config_groups={"g": {"weights": WEIGHTS, "targets": [entry]}})).resolve(name)
    expected = match_name(name, entry)
    others = any(match_name(alias, entry) for alias in aliases(name))
    assert ignoring == (expected or others)
    assert (targeting is not None) == (expected or others)


def test_class_names_match_any_module_and_yield_to_names() -> None:
    assert is_match("x", torch.nn.Linear(1, 1), "Linear")
    other = dict(WEIGHTS, num_bits=8, strategy="channel", group_size=None)
    schemes = parse_schemes(
        config(
            config_groups={
                "all": {"weights": WEIGHTS, "targets": ["Linear"]},
                "some": {"weights": other, "targets": ["re:.*down_proj"], "format": "float-quantized"},
                "one": {"weights": WEIGHTS, "targets": ["a.b.down_proj"]},
            }
        )
    )
    found = {n: schemes.resolve(n) for n in ("a.x", "a.c.down_proj", "a.b.down_proj")}
    assert {n: s.group if s else None for n, s in found.items()} == {
        "a.x": "all",
        "a.c.down_proj": "some",
        "a.b.down_proj": "one",
    }


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("model.layers.3.self_attn.qkv_proj", "model.language_model.layers.3.self_attn.k_proj"),
        ("re:.*mlp.shared_expert.gate_up_proj", "model.language_model.layers.3.mlp.shared_expert.up_proj"),
        ("re:.*in_proj_qkvz", "model.language_model.layers.3.linear_attn.in_proj_z"),
        ("re:.*in_proj_ba$", "model.language_model.layers.3.linear_attn.in_proj_a"),
        ("re:language_model.model.layers.3.mlp.experts$", "model.language_model.layers.3.mlp.experts.7.down_proj"),
        ("re:vpm.*", "model.vision_tower.encoder.layers.0.mlp.fc1"),
        ("re:vit_merger.*", "model.vision_tower.vit_merger.linear_1"),
        ("re:merger.*", "model.merger.mlp.0.linear_1"),
    ],
)
def test_fused_and_foreign_names_are_understood(entry: str, module: str) -> None:
    assert parse_schemes(config(ignore=[entry])).resolve(module) is None


def test_strategy_follows_from_group_size_when_it_is_left_out() -> None:
    def strategy(**args: Any) -> str:
        group = {"weights": {"num_bits": 8, "type": "int", **args}, "targets": ["Linear"], "format": "int-quantized"}
        scheme = parse_schemes(config(config_groups={"g": group})).resolve("a")
        assert scheme is not None
        return scheme.weights.strategy

    assert [strategy(), strategy(group_size=-1), strategy(group_size=32)] == ["tensor", "channel", "group"]


def test_every_group_may_have_its_own_format() -> None:
    group = {"weights": WEIGHTS, "targets": ["Linear"], "format": "float-quantized"}
    scheme = parse_schemes(config(format="mixed-precision", config_groups={"g": group})).resolve("a")
    assert scheme is not None
    assert scheme.format == "float-quantized"


def test_no_config_quantizes_nothing() -> None:
    assert parse_schemes(None).resolve("a") is None


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"config_groups": {}}, SchemeError, "config_groups"),
        ({"config_groups": {"g": {"targets": ["Linear"]}}}, SchemeError, "config_groups.g"),
        ({"format": "marlin-24"}, UnsupportedFormat, "'marlin-24'"),
        ({"quantization_status": "frozen"}, UnsupportedFormat, "'frozen'"),
        ({"sparsity_config": {"format": "sparse-bitmask"}}, UnsupportedFormat, "sparse-bitmask"),
        ({"transform_config": {"config_groups": {"u": {}}}}, UnsupportedFormat, "Hadamard"),
        ({"surprise": 1}, SchemeError, "'surprise'"),
        ({"ignore": ["re:("]}, SchemeError, "re:("),
        ({"ignore": "lm_head"}, SchemeError, "ignore"),
        ({"quant_method": "bitsandbytes"}, UnsupportedFormat, "'bitsandbytes'"),
    ],
)
def test_malformed_and_unsupported_configs_are_named(change: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error) as caught:
        parse_schemes(config(**change))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_bits", 17, "17"),
        ("num_bits", "4", "'4'"),
        ("type", "complex", "complex"),
        ("strategy", "rows", "'rows'"),
        ("group_size", 0, "group_size"),
        ("strategy", "block", "block_structure"),
        ("rotation", "hadamard", "'rotation'"),
    ],
)
def test_malformed_arguments_are_named(key: str, value: Any, words: str) -> None:
    changed = copy.deepcopy(config())
    changed["config_groups"]["group_0"]["weights"][key] = value
    with pytest.raises(SchemeError) as caught:
        parse_schemes(changed)
    assert words in str(caught.value)
    assert "group_0" in str(caught.value)


def test_kv_cache_scheme_is_carried_on_with_a_notice() -> None:
    assert "kv_cache_scheme" in parse_schemes(config(kv_cache_scheme={"num_bits": 8})).notes[0]


def test_unmatched_ignores_are_found() -> None:
    schemes = parse_schemes(config(ignore=["lm_head", "re:vpm.*", "re:.*q_proj", "gone"]))
    assert list(schemes.unmatched_ignores({"lm_head": 1, "a.q_proj": 1})) == ["re:vpm.*", "gone"]
