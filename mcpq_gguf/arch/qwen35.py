"""Qwen3.5 text models, dense (`qwen35`) and MoE (`qwen35moe`), alone or inside MiniCPM-V 4.6 and 4.7.

Three layers of four are Gated DeltaNet (linear attention), every fourth is full attention with an output gate. Names,
shapes and transforms follow what llama.cpp's loader asks for in src/models/qwen35.cpp and qwen35moe.cpp.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gguf import GGUFValueType

from ..errors import PlanError, UnsupportedArchitecture
from ..ggml.metadata import Metadata, array, f32, string, u32
from . import Model, Need, Part, Table
from .hparams import Hparams
from .layout import AS_IS, HeadRegroup, Layout

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_NORM = Layout(value="add_one")  # RMSNorm weights are stored as w and applied as 1 + w
# Settings without effect on the numbers at inference, and those that the code below reads or checks.
_KNOWN = frozenset("""
    architectures attention_bias attention_dropout attn_output_gate bos_token_id dtype torch_dtype eos_token_id
    full_attention_interval head_dim hidden_act hidden_size initializer_range intermediate_size layer_types
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    max_position_embeddings mlp_only_layers model_type moe_intermediate_size mtp_num_hidden_layers
    mtp_use_dedicated_embeddings norm_topk_prob num_attention_heads num_experts num_experts_per_tok num_hidden_layers
    num_key_value_heads output_router_logits pad_token_id partial_rotary_factor quantization_config rms_norm_eps
    rope_parameters rope_scaling rope_theta router_aux_loss_coef shared_expert_intermediate_size tie_word_embeddings
    transformers_version use_cache vocab_size decoder_sparse_step mamba_ssm_dtype
""".split())


def _table(moe: bool, vision: Mapping[str, str], time_slot: bool = False) -> Table:
    """A table for one model class: `vision` names the modules that belong to its projector, with the reason."""

    def build(config: Mapping[str, Any], modules: frozenset[str]) -> Model:
        h = Hparams(config)
        arch = "qwen35moe" if moe else "qwen35"
        prefix = next((p for p in _PREFIXES if f"{p}embed_tokens" in modules), None)
        if prefix is None:
            raise PlanError("the token embedding is missing; looked for "
                            f"{', '.join(p + 'embed_tokens.weight' for p in _PREFIXES)}")
        _check(h, moe)
        layers = h.integer("num_hidden_layers")
        kinds = _layer_kinds(h, layers)
        mtp, notes = _mtp_layers(h, modules)
        tied = bool(config.get("tie_word_embeddings", h.values.get("tie_word_embeddings", False)))
        needs = _globals(h, prefix, tied)
        for i, kind in enumerate(kinds):
            needs += _layer(h, f"{prefix}layers.{i}.", i, kind, moe)
        for i in range(mtp):
            needs += _mtp(h, i, layers + i, moe, modules)
        metadata = _metadata(h, arch, kinds, mtp, moe)
        if time_slot:
            metadata[f"{arch}.rope.mrope_time_slot"] = u32(3)
        unknown = h.unknown(_KNOWN)
        if unknown:
            notes.append(f"{h.where}: keys not known here, taken to have no effect: {', '.join(unknown)}")
        ignored = dict(vision)
        if tied:
            ignored["lm_head"] = "tie_word_embeddings is true: the embedding is the output"
        return Model(arch, tuple(needs), metadata, ignored, tuple(notes))

    return build


def _check(h: Hparams, moe: bool) -> None:
    """Settings that llama.cpp's graph takes for granted."""
    h.expect("hidden_act", "silu")
    h.expect("attention_bias", False)
    h.expect("attn_output_gate", True)
    if h.rope.get("rope_type", "default") not in ("default", "linear", "yarn"):
        raise UnsupportedArchitecture(f"{h.where}.rope_parameters.rope_type is {h.rope['rope_type']!r}; "
                                      "carried are default, linear and yarn")
    if h.integer("linear_key_head_dim") != h.integer("linear_value_head_dim"):
        raise UnsupportedArchitecture(f"{h.where}: linear_key_head_dim and linear_value_head_dim differ; "
                                      "llama.cpp has one state size for both")
    if h.integer("linear_num_value_heads") % h.integer("linear_num_key_heads"):
        raise UnsupportedArchitecture(f"{h.where}: linear_num_value_heads is no multiple of linear_num_key_heads")
    if moe:
        h.expect("norm_topk_prob", True)
        h.expect("mlp_only_layers", [], None)
        h.expect("decoder_sparse_step", 1)


def _layer_kinds(h: Hparams, layers: int) -> list[str]:
    kinds = h.values.get("layer_types")
    if kinds is None:
        every = h.integer("full_attention_interval", 4)
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    bad = set(kinds) - {"full_attention", "linear_attention"}
    if len(kinds) != layers or bad:
        raise UnsupportedArchitecture(f"{h.where}.layer_types: expected {layers} entries of full_attention or "
                                      f"linear_attention, found {len(kinds)} with {sorted(set(kinds))}")
    return list(kinds)


def _mtp_layers(h: Hparams, modules: frozenset[str]) -> tuple[int, list[str]]:
    """How many multi-token-prediction layers the tensors hold, and a note when config.json says otherwise."""
    announced = int(h.values.get("mtp_num_hidden_layers") or 0)
    found = {int(m.split(".")[2]) for m in modules if m.startswith("mtp.layers.") and m.split(".")[2].isdecimal()}
    if not found:
        if any(m.startswith("mtp.") for m in modules):
            raise PlanError("there are mtp.* tensors but none of mtp.layers.0; the checkpoint is incomplete")
        return 0, ([f"config.json announces {announced} MTP layer(s) and the checkpoint has no MTP tensors: "
                    "no nextn layers are written"] if announced else [])
    if found != set(range(len(found))) or (announced and announced != len(found)):
        raise PlanError(f"MTP layers {sorted(found)} are stored, config.json announces {announced}")
    return len(found), ([] if announced else
                        [f"the checkpoint has {len(found)} MTP layer(s) that config.json does not announce: kept"])


def _need(name: str, role: str, shape: tuple[int, ...], module: str, layout: Layout = AS_IS,
          suffix: str = ".weight") -> Need:
    return Need(name, role, shape, ((Part(module),),), layout, suffix)


def _globals(h: Hparams, prefix: str, tied: bool) -> list[Need]:
    hidden, vocab = h.integer("hidden_size"), h.integer("vocab_size")
    needs = [_need("token_embd", "embedding", (vocab, hidden), prefix + "embed_tokens"),
             _need("output_norm", "norm", (hidden,), prefix + "norm", _NORM)]
    if not tied:
        needs.append(Need("output", "output", (vocab, hidden), ((Part("lm_head"),), (Part("language_model.lm_head"),))))
    return needs


def _layer(h: Hparams, source: str, index: int, kind: str, moe: bool) -> list[Need]:
    """One decoder layer; `source` is its prefix in the checkpoint."""
    hidden = h.integer("hidden_size")
    blk = f"blk.{index}."
    needs = [_need(blk + "attn_norm", "norm", (hidden,), source + "input_layernorm", _NORM)]
    needs += _full(h, source, blk) if kind == "full_attention" else _linear(h, source, blk)
    needs.append(_need(blk + "post_attention_norm", "norm", (hidden,), source + "post_attention_layernorm", _NORM))
    return needs + (_moe(h, source + "mlp.", blk) if moe else _dense(h, source + "mlp.", blk))


def _full(h: Hparams, source: str, blk: str) -> list[Need]:
    """Full attention: q_proj holds query and output gate, interleaved by head as llama.cpp expects them."""
    hidden, dim = h.integer("hidden_size"), h.integer("head_dim")
    heads, kv = h.integer("num_attention_heads"), h.integer("num_key_value_heads")
    attn = source + "self_attn."
    return [
        _need(blk + "attn_q", "attn_q", (heads * dim * 2, hidden), attn + "q_proj"),
        _need(blk + "attn_k", "attn_k", (kv * dim, hidden), attn + "k_proj"),
        _need(blk + "attn_v", "attn_v", (kv * dim, hidden), attn + "v_proj"),
        _need(blk + "attn_output", "attn_output", (hidden, heads * dim), attn + "o_proj"),
        _need(blk + "attn_q_norm", "norm", (dim,), attn + "q_norm", _NORM),
        _need(blk + "attn_k_norm", "norm", (dim,), attn + "k_norm", _NORM),
    ]


def _linear(h: Hparams, source: str, blk: str) -> list[Need]:
    """Gated DeltaNet. Value heads are regrouped wherever they are counted out: rows, channels, columns of out_proj."""
    hidden, dim = h.integer("hidden_size"), h.integer("linear_key_head_dim")
    key, value = h.integer("linear_num_key_heads"), h.integer("linear_num_value_heads")
    conv = dim * (2 * key + value)

    def by(width: int, start: int = 0) -> HeadRegroup | None:
        return HeadRegroup(key, value // key, width, start) if value > key else None

    lin = source + "linear_attn."
    heads = Layout(rows=by(1))
    return [
        _need(blk + "attn_qkv", "linear_in", (conv, hidden), lin + "in_proj_qkv", Layout(rows=by(dim, 2 * key * dim))),
        _need(blk + "attn_gate", "linear_gate", (value * dim, hidden), lin + "in_proj_z", Layout(rows=by(dim))),
        _need(blk + "ssm_conv1d", "ssm_small", (conv, h.integer("linear_conv_kernel_dim")), lin + "conv1d",
              Layout(rows=by(dim, 2 * key * dim))),
        _need(blk + "ssm_dt", "ssm_small", (value,), lin + "dt_bias", heads, ".bias"),
        _need(blk + "ssm_a", "ssm_small", (value,), lin + "A_log", Layout(rows=by(1), value="neg_exp"), ""),
        _need(blk + "ssm_beta", "linear_alpha_beta", (value, hidden), lin + "in_proj_b", heads),
        _need(blk + "ssm_alpha", "linear_alpha_beta", (value, hidden), lin + "in_proj_a", heads),
        _need(blk + "ssm_norm", "norm", (dim,), lin + "norm"),  # applied as it is, unlike the other norms
        _need(blk + "ssm_out", "linear_out", (hidden, value * dim), lin + "out_proj", Layout(columns=by(dim))),
    ]


def _dense(h: Hparams, mlp: str, blk: str) -> list[Need]:
    hidden, inner = h.integer("hidden_size"), h.integer("intermediate_size")
    return [_need(blk + "ffn_gate", "ffn_gate", (inner, hidden), mlp + "gate_proj"),
            _need(blk + "ffn_up", "ffn_up", (inner, hidden), mlp + "up_proj"),
            _need(blk + "ffn_down", "ffn_down", (hidden, inner), mlp + "down_proj")]


def _moe(h: Hparams, mlp: str, blk: str) -> list[Need]:
    """Routed experts, stored one by one or stacked (gate and up then fused), the shared expert, and both gates."""
    hidden, inner, n = h.integer("hidden_size"), h.integer("moe_intermediate_size"), h.integer("num_experts")
    shared = h.integer("shared_expert_intermediate_size")
    stacked = mlp + "experts.gate_up_proj"

    def experts(kind: str, role: str, shape: tuple[int, int], fused: tuple[Part, ...]) -> Need:
        single = tuple(Part(f"{mlp}experts.{e}.{kind}_proj") for e in range(n))
        return Need(f"{blk}ffn_{kind}_exps", role, (n, *shape), (single, fused))

    def half(k: int) -> tuple[Part, ...]:
        return tuple(Part(stacked, (2 * e + k) * inner, (2 * e + k + 1) * inner) for e in range(n))

    return [
        _need(blk + "ffn_gate_inp", "router", (n, hidden), mlp + "gate"),
        experts("gate", "expert_gate", (inner, hidden), half(0)),
        experts("up", "expert_up", (inner, hidden), half(1)),
        experts("down", "expert_down", (hidden, inner), tuple(
            Part(mlp + "experts.down_proj", e * hidden, (e + 1) * hidden) for e in range(n))),
        _need(blk + "ffn_gate_inp_shexp", "shared_router", (hidden,), mlp + "shared_expert_gate"),
        _need(blk + "ffn_gate_shexp", "shared_gate", (shared, hidden), mlp + "shared_expert.gate_proj"),
        _need(blk + "ffn_up_shexp", "shared_up", (shared, hidden), mlp + "shared_expert.up_proj"),
        _need(blk + "ffn_down_shexp", "shared_down", (hidden, shared), mlp + "shared_expert.down_proj"),
    ]


def _mtp(h: Hparams, index: int, block: int, moe: bool, modules: frozenset[str]) -> list[Need]:
    """One multi-token-prediction layer: a full-attention layer, and how its input is put together.

    llama.cpp loads these only on demand and then skips their weights, but not a `.scale` beside one, and refuses the
    file for the tensors that it did not count: so there is none, and FP4 codes are decoded here.
    """
    hidden = h.integer("hidden_size")
    blk = f"blk.{block}."
    needs = _layer(h, f"mtp.layers.{index}.", block, "full_attention", moe)
    needs += [
        _need(blk + "nextn.eh_proj", "mtp", (hidden, 2 * hidden), "mtp.fc"),
        _need(blk + "nextn.enorm", "norm", (hidden,), "mtp.pre_fc_norm_embedding", _NORM),
        _need(blk + "nextn.hnorm", "norm", (hidden,), "mtp.pre_fc_norm_hidden", _NORM),
        _need(blk + "nextn.shared_head_norm", "norm", (hidden,), "mtp.norm", _NORM),
    ]
    for module, name in (("mtp.embed_tokens", "nextn.embed_tokens"), ("mtp.lm_head", "nextn.shared_head_head")):
        if module in modules:
            needs.append(_need(blk + name, "mtp", (h.integer("vocab_size"), hidden), module))
    return [replace(need, scaled=False) for need in needs]


def _metadata(h: Hparams, arch: str, kinds: list[str], mtp: int, moe: bool) -> Metadata:
    """Hyperparameters under the keys that llama.cpp's loader reads."""
    dim = h.integer("head_dim")
    keys: Metadata = {
        "block_count": u32(len(kinds) + mtp),
        "context_length": u32(h.integer("max_position_embeddings")),
        "embedding_length": u32(h.integer("hidden_size")),
        "attention.head_count": u32(h.integer("num_attention_heads")),
        "attention.head_count_kv": u32(h.integer("num_key_value_heads")),
        "attention.key_length": u32(dim),
        "attention.value_length": u32(dim),
        "attention.layer_norm_rms_epsilon": f32(h.number("rms_norm_eps")),
        "attention.recurrent_layers": array(
            GGUFValueType.BOOL, [k == "linear_attention" for k in kinds] + [False] * mtp),
        "full_attention_interval": u32(h.integer("full_attention_interval", 4)),
        "ssm.conv_kernel": u32(h.integer("linear_conv_kernel_dim")),
        "ssm.state_size": u32(h.integer("linear_key_head_dim")),
        "ssm.group_count": u32(h.integer("linear_num_key_heads")),
        "ssm.time_step_rank": u32(h.integer("linear_num_value_heads")),
        "ssm.inner_size": u32(h.integer("linear_value_head_dim") * h.integer("linear_num_value_heads")),
        **_rope(h, dim),
    }
    if mtp:
        keys["nextn_predict_layers"] = u32(mtp)
    if moe:
        keys["expert_count"] = u32(h.integer("num_experts"))
        keys["expert_used_count"] = u32(h.integer("num_experts_per_tok"))
        keys["expert_feed_forward_length"] = u32(h.integer("moe_intermediate_size"))
        keys["expert_shared_feed_forward_length"] = u32(h.integer("shared_expert_intermediate_size"))
    else:
        keys["feed_forward_length"] = u32(h.integer("intermediate_size"))
    return {f"{arch}.{key}": value for key, value in keys.items()}


def _rope(h: Hparams, dim: int) -> Metadata:
    theta, part = h.rope.get("rope_theta"), h.rope.get("partial_rotary_factor")
    if theta is None:
        raise UnsupportedArchitecture(f"{h.where}.rope_parameters.rope_theta is missing")
    sections = list(h.rope.get("mrope_section") or (11, 11, 10))  # transformers' default for Qwen3.5
    keys: Metadata = {
        "rope.freq_base": f32(float(theta)),
        "rope.dimension_count": u32(int(dim * (0.25 if part is None else part))),
        "rope.dimension_sections": array(GGUFValueType.INT32, (sections + [0] * 4)[:4]),
    }
    kind = h.rope.get("rope_type", "default")
    if kind != "default":
        keys["rope.scaling.type"] = string(kind)
        keys["rope.scaling.factor"] = f32(float(h.rope["factor"]))
        if kind == "yarn":
            keys["rope.scaling.original_context_length"] = u32(int(h.rope["original_max_position_embeddings"]))
            for ours, theirs in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"),
                                 ("yarn_attn_factor", "attention_factor")):
                if h.rope.get(theirs) is not None:
                    keys[f"rope.scaling.{ours}"] = f32(float(h.rope[theirs]))
    return keys


_TO_MMPROJ = "part of the vision projector, not of the language model"
_MINICPM_VISION = {"model.vision_tower.": _TO_MMPROJ, "model.merger.": _TO_MMPROJ}
_QWEN_VISION = {"model.visual.": _TO_MMPROJ}


def _minicpm(time_slot: bool) -> Table:
    """MiniCPM-V: config.json's text_config says which of the two text models it is."""
    moe, dense = (_table(m, _MINICPM_VISION, time_slot) for m in (True, False))

    def build(config: Mapping[str, Any], modules: frozenset[str]) -> Model:
        kind = (config.get("text_config") or {}).get("model_type")
        if kind not in ("qwen3_5_moe_text", "qwen3_5_text"):
            raise UnsupportedArchitecture(f"config.json text_config.model_type is {kind!r}; "
                                          "expected qwen3_5_moe_text or qwen3_5_text")
        return (moe if kind == "qwen3_5_moe_text" else dense)(config, modules)

    return build


CLASSES: dict[str, Table] = {
    "MiniCPMV4_7ForConditionalGeneration": _minicpm(time_slot=True),
    "MiniCPMV4_6ForConditionalGeneration": _minicpm(time_slot=False),
    "Qwen3_5MoeForConditionalGeneration": _table(True, _QWEN_VISION),
    "Qwen3_5MoeForCausalLM": _table(True, {}),
    "Qwen3_5ForConditionalGeneration": _table(False, _QWEN_VISION),
    "Qwen3_5ForCausalLM": _table(False, {}),
}
