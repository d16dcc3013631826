"""The ladder: what each tier does to each kind of checkpoint, and what its files are called."""

from functools import cache
from pathlib import Path

import pytest
from oracle import checkpoint
from resolvers import cache_tag, hf_choice, hub_label, projector_choice

from mcpq_gguf.arch import ALWAYS_F32, ROLES
from mcpq_gguf.convert import Options, Prepared, prepare
from mcpq_gguf.errors import PlanError
from mcpq_gguf.ggml.quantize import TYPES, bits
from mcpq_gguf.plan import FLOATS, Entry, native_policy, plan_entries
from mcpq_gguf.tiers import GROUPS, LARGE, Tier, distinct, encoding, file_token, load_tiers, parse_tiers

ALL = load_tiers("all")
NAMES = ["exact", "q8", "q6", "q5", "q4", "compact"]
INPUTS = ["made-nvfp4", "made-int4-mixed", "made-fp8", "made-bf16", "bf16", "nvfp4a16", "nvfp4-w4a4",
          "int4-mixed-w4a16", "qqq-w4a8-mixed", "fp8-dynamic", "int4-g128-asym", "mixed-nvfp4-fp8", "mxfp4a16"]


class Everything:
    """An imatrix that covers every tensor."""

    def __contains__(self, tensor: object) -> bool:
        return True


@cache
def opened(name: str) -> Prepared:
    return prepare(checkpoint(name), Options(mmproj=False))


@pytest.fixture(params=INPUTS)
def prepared(request: pytest.FixtureRequest) -> Prepared:
    return opened(request.param)


def ladder(prepared: Prepared, covered: bool = False, tied: bool = False) -> dict[str, list[Entry]]:
    return {t.name: plan_entries(prepared.model, prepared.weights, t.policy(Everything() if covered else (), tied))
            for t in ALL}


def types(entries: list[Entry], role: str) -> set[str]:
    return {e.type for e in entries if e.role == role and e.kind == "weight"}


def test_exact_is_the_native_plan(prepared: Prepared) -> None:
    assert ladder(prepared)["exact"] == plan_entries(prepared.model, prepared.weights, native_policy)


def test_quantized_weights_are_untouched_down_to_q4(prepared: Prepared) -> None:
    tiers = ladder(prepared)
    for native, *others in zip(*(tiers[n] for n in NAMES[:5])):
        if native.kind == "weight" and native.type not in FLOATS:
            assert all(e == native for e in others), native.name


def test_each_tier_is_smaller_and_no_tensor_grows(prepared: Prepared) -> None:
    for covered in (False, True):
        tiers = ladder(prepared, covered)
        sizes = [sum(e.nbytes for e in tiers[n]) for n in NAMES]
        assert sizes == sorted(sizes, reverse=True)
        for name in NAMES:
            native = {e.name: e.nbytes for e in tiers["exact"]}
            assert all(e.nbytes <= native[e.name] for e in tiers[name])


def test_small_tensors_stay_and_the_output_has_six_bits(prepared: Prepared) -> None:
    for entries in ladder(prepared).values():
        assert {e.type for e in entries if e.role in ALWAYS_F32} == {"F32"}
        assert types(entries, "linear_alpha_beta") == types(ladder(prepared)["exact"], "linear_alpha_beta")
        assert all(bits(t) >= bits("Q6_K") for t in types(entries, "output"))


def test_every_other_matrix_has_the_tiers_type() -> None:
    """A BF16 checkpoint, where nothing is quantized; rows of 128 columns fall back."""
    tiers = ladder(opened("made-bf16"))
    for name, kind, short, output in (("q8", "Q8_0", "Q8_0", "Q8_0"), ("q6", "Q6_K", "Q8_0", "Q6_K"),
                                      ("q5", "Q5_K", "Q5_1", "Q6_K"), ("q4", "Q4_K", "Q5_0", "Q6_K")):
        for e in tiers[name]:
            if e.role in LARGE - {"output"}:
                assert e.type == (kind if e.shape[-1] % 256 == 0 else short), e.name
        assert types(tiers[name], "output") == {output}


def test_fp8_weights_take_the_tiers_type() -> None:
    tiers = ladder(opened("made-fp8"))
    assert [types(tiers[n], "expert_up") for n in NAMES[:5]] == [{"BF16"}, {"Q8_0"}, {"Q6_K"}, {"Q5_K"}, {"Q4_K"}]


def test_compact_quantizes_experts_to_three_bits() -> None:
    for source in ("made-nvfp4", "made-int4-mixed", "made-fp8", "made-bf16"):
        for covered, gate, up in ((False, "Q2_K", "Q3_K"), (True, "IQ3_XXS", "IQ3_XXS")):
            entries = ladder(opened(source), covered)["compact"]
            assert types(entries, "expert_gate") == {gate}
            assert types(entries, "expert_up") == {up}
            assert bits(types(entries, "output").pop()) == bits("Q6_K")
    assert types(ladder(opened("made-nvfp4"))["compact"], "expert_down") == {"NVFP4"}  # 128 columns: Q4_0 gains nothing


def test_a_tied_embedding_is_treated_as_the_output() -> None:
    tiers = ladder(opened("made-bf16"), tied=True)
    kinds = [types(tiers[n], "embedding") for n in NAMES]
    assert kinds == [{"BF16"}, {"Q8_0"}, {"Q6_K"}, {"Q6_K"}, {"Q6_K"}, {"Q6_K"}]


def test_tiers_that_come_out_alike_are_named() -> None:
    prepared = opened("made-nvfp4")
    exact = plan_entries(prepared.model, prepared.weights, native_policy)
    q8 = plan_entries(prepared.model, prepared.weights, ALL[1].policy())
    kept, notes = distinct([(ALL[0], exact), (ALL[1], q8), (ALL[2], q8), (ALL[3], exact)])
    assert kept == [0, 1]
    assert notes == ["tier q6 would be the same as q8 for this checkpoint: left out",
                     "tier q5 would be the same as exact for this checkpoint: left out"]


def test_tiers_are_chosen_by_name_or_file(tmp_path: Path) -> None:
    assert [t.name for t in ALL] == NAMES
    assert [t.name for t in load_tiers(" Q4, exact")] == ["exact", "q4"]
    assert all(t.description for t in ALL)
    assert all(set(t.rules) == set(t.without_imatrix) == LARGE for t in ALL)
    file = tmp_path / "mine.toml"
    file.write_text('[[tier]]\nname = "mine"\nsuffix = "X"\n'
                    'rules = { expert_down = "iq4_xs", large = "q8_0", experts = "Q4_K", output = "Native" }\n')
    mine, = load_tiers(str(file))
    assert (mine.rules["expert_down"], mine.rules["expert_up"]) == ("IQ4_XS", "Q4_K")
    assert (mine.rules["attn_q"], mine.rules["output"], mine.without_imatrix) == ("Q8_0", "native", mine.rules)
    for spec in ("q7", "q8,q7", "", ",", "everything"):
        with pytest.raises(PlanError, match=r"is not known; known are exact, q8, .*, compact, all, or a \.toml file"):
            load_tiers(spec)
    with pytest.raises(PlanError, match=r"none\.toml: cannot be read"):
        load_tiers(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(("text", "message"), [
    ("", "expected a list of .*found nothing"),
    ("x = 1", "nothing else, found x"),
    ("tier = 3", "expected a list"),
    ("tier = [3]", "expected a table"),
    ("[[tier", "is no TOML"),
    ('[[tier]]\nname = "a"\nsuffix = ""', "rules should be a dict, found None"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = {}\ncolour = 1', "'colour' is not known; known are"),
    ('[[tier]]\nname = "a"\nsuffix = "q8"\nrules = {}', "capital letters only"),
    ('[[tier]]\nname = "A b"\nsuffix = ""\nrules = {}', "lower-case letters"),
    ('[[tier]]\nname = "all"\nsuffix = ""\nrules = {}', "is not `all`"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = {}\nrequantize = "yes"', "requantize should be a bool"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = { expert = "Q4_K" }', r"tier 1 \(a\): role 'expert' is not known"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = { large = "Q4_K_M" }', "'Q4_K_M' is no type to quantize to"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = { large = "NVFP4" }', "'NVFP4' is no type"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = { large = 4 }', "large = 4 is no type"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = { router = "Q8_0" }', "router cannot be quantized"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = { vision = "Q8_0" }', "vision cannot be quantized"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = {}\nwithout_imatrix = { x = "Q8_0" }', "role 'x' is not known"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = {}\n' * 2, "two tiers have the name 'a'"),
    ('[[tier]]\nname = "a"\nsuffix = ""\nrules = {}\n[[tier]]\nname = "b"\nsuffix = ""\nrules = {}', "the suffix ''"),
])
def test_a_file_that_is_no_list_of_tiers_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as e:
        parse_tiers(text, "mine.toml")
    assert "mine.toml" in str(e.value)


def test_a_type_that_needs_importance_is_refused_when_planning() -> None:
    tier, = parse_tiers('[[tier]]\nname = "a"\nsuffix = ""\nrules = { attn_q = "IQ2_XS" }', "x")
    prepared = opened("made-bf16")
    with pytest.raises(PlanError, match=r"blk.3.attn_q.weight: tier a wants IQ2_XS.*--imatrix"):
        plan_entries(prepared.model, prepared.weights, tier.policy())
    assert "IQ2_XS" in types(plan_entries(prepared.model, prepared.weights, tier.policy(Everything())), "attn_q")


def test_every_role_has_its_place() -> None:
    assert frozenset().union(*GROUPS.values()) == LARGE
    assert ALWAYS_F32 | {"vision", "vision_embedding", "linear_alpha_beta"} == ROLES - LARGE


def names(source: str, main: dict[str, str], fine: str = "") -> dict[str, str]:
    """Tier -> file name for a source whose files have these main types (the source's own where none is given)."""
    return {t.name: f"MiniCPM-V-4.7-35B-A3B-{fine}{file_token(t, main.get(t.name, source), source)}.gguf" for t in ALL}


REQUANTIZED = [{"compact": "IQ3_XXS"}, {"compact": "Q3_K"}, {"compact": "Q4_K"}, {}]
PLAIN = {"q8": "Q8_0", "q6": "Q6_K", "q5": "Q5_K", "q4": "Q4_K"}


@pytest.mark.parametrize(("source", "main", "fine"), [
    *(("NVFP4", m, "") for m in REQUANTIZED),
    *(("Q4_0", m, "W4A16-") for m in REQUANTIZED),
    *(("Q4_1", m, "W4A16-") for m in REQUANTIZED),
    *(("MXFP4", m, "") for m in REQUANTIZED),
    *(("Q8_0", m, "W8A8-") for m in REQUANTIZED),
    *(("BF16", PLAIN | m, "") for m in REQUANTIZED[:2]),
    *(("BF16", PLAIN | m, "FP8-") for m in REQUANTIZED[:2]),
])
@pytest.mark.parametrize("order", [str, str.lower])
def test_each_file_is_found_by_its_own_tag(source: str, main: dict[str, str], fine: str, order: type) -> None:
    """By the Hub's label, by `-hf repo:TAG` and in the cache; without a tag it is the exact one, in any order."""
    files = names(source, main, fine)
    projector = "mmproj-MiniCPM-V-4.7-35B-A3B-BF16.gguf"
    repository = sorted([*files.values(), projector, "README.md"], key=order)
    assert hf_choice(repository) == files["exact"]
    tags = {t.name: encoding(t, main.get(t.name, source), source) for t in ALL}
    assert len(set(files.values())) == len(set(tags.values())) == len(ALL)
    for name, file in files.items():
        tag = tags[name]
        assert (hub_label(file), cache_tag(file), hf_choice(repository, tag)) == (tag, tag, file)
        assert hf_choice(repository, tag.lower()) == file
        assert projector_choice(repository, file) == projector
        shards = [f"{file.removesuffix('.gguf')}-{i:05d}-of-00002.gguf" for i in (1, 2)]
        sharded = sorted([*(set(repository) - {file}), *shards], key=order)
        assert (hub_label(shards[0]), cache_tag(shards[0]), hf_choice(sharded, tag)) == (tag, tag, shards[0])
        assert name == "exact" or file.count(tag) == 1


def test_the_published_names() -> None:
    assert list(names("NVFP4", {"compact": "IQ3_XXS"}).values()) == [
        "MiniCPM-V-4.7-35B-A3B-NVFP4.gguf", "MiniCPM-V-4.7-35B-A3B-NVFP4_XL.gguf", "MiniCPM-V-4.7-35B-A3B-NVFP4_L.gguf",
        "MiniCPM-V-4.7-35B-A3B-NVFP4_M.gguf", "MiniCPM-V-4.7-35B-A3B-NVFP4_S.gguf",
        "MiniCPM-V-4.7-35B-A3B-Requant-IQ3_XXS.gguf"]
    assert [encoding(t, PLAIN.get(t.name, "BF16"), "BF16") for t in ALL[:5]] == [
        "BF16", "Q8_0_XL", "Q6_K_L", "Q5_K_M", "Q4_K_S"]
    assert [file_token(ALL[5], main, source) for main, source in (
        ("IQ3_XXS", "BF16"), ("Q3_K", "MXFP4"), ("MXFP4", "MXFP4"))] == ["IQ3_XXS", "Requant-Q3_K_M", "MXFP4_MOE_XS"]
    assert names("Q4_0", {}, "W4A16-")["exact"] == "MiniCPM-V-4.7-35B-A3B-W4A16-Q4_0.gguf"


def test_names_that_break_the_resolvers_do_so_here() -> None:
    """The imitation shows the faults that the naming rule is there for."""
    old = [f"M-35B-A3B-NVFP4-{t}.gguf" for t in NAMES]
    assert {hub_label(f) for f in old} == {"NVFP4"}
    assert hf_choice(sorted(old)) == hf_choice(sorted(old), "NVFP4") == "M-35B-A3B-NVFP4-compact.gguf"
    assert hub_label("M-35B-A3B-INT4.gguf") is None
    assert hub_label("M-35B-A3B-NVFP4_Q8.gguf") == "NVFP4_Q"
    assert hf_choice(["M-IQ3_XXS.gguf", "M-NVFP4.gguf"]) == "M-IQ3_XXS.gguf"
    assert hub_label("M-Q3_K.gguf") is None


def test_types_are_spelled_as_ggml_does() -> None:
    used = {t for tier in ALL for rules in (tier.rules, tier.without_imatrix) for t in rules.values()}
    assert used <= TYPES | {"native"}
    assert isinstance(ALL[0], Tier)
