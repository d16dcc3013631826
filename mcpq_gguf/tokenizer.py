"""tokenizer.json -> GGUF vocabulary, for byte-level BPE.

llama.cpp knows a pre-tokenizer by name and has its rules built in (src/llama-vocab.cpp). The name is found here by the
rules themselves: the Split patterns of tokenizer.json must be those that the name stands for. llama.cpp applies no
Unicode normalization, so text that is not in NFC is tokenized as it is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFValueType, TokenType

from .checkpoint import read_json
from .errors import CheckpointError, UnsupportedFormat
from .ggml.metadata import Metadata, array, boolean, string, u32

_QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?{LETTERS}+|\p{N}{DIGITS}| ?[^\s{MARKS}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def _family(letters: str, digits: str, marks: str) -> str:
    return _QWEN.replace("{LETTERS}", letters).replace("{DIGITS}", digits).replace("{MARKS}", marks)


# Split patterns, in order -> llama.cpp's name. `()` stands for ByteLevel's own rule (use_regex).
PRE_TOKENIZERS: dict[tuple[str, ...], str] = {
    (_family(r"[\p{L}\p{M}]", "", r"\p{L}\p{M}"),): "qwen35",
    (_family(r"\p{L}", "", r"\p{L}"),): "qwen2",
    (_family(r"\p{L}", "{1,3}", r"\p{L}"),): "llama-bpe",
    (): "gpt-2",
}
_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "eot")
_KEYS = {"unk": "unknown", "sep": "seperator"}  # spelled so in llama.cpp


def vocabulary(folder: Path, rows: int) -> Metadata:
    """`tokenizer.ggml.*` and `tokenizer.chat_template` of the tokenizer in `folder`.

    rows: rows of the embedding matrix; ids that no token has up to there become `[PADid]`, unused.
    Raises CheckpointError for files that are missing or contradict each other, UnsupportedFormat for another kind of
    tokenizer, or rules that llama.cpp has no name for.
    """
    path = folder / "tokenizer.json"
    tokenizer = read_json(path)
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        kind = model.get("type") if isinstance(model, dict) else None
        raise UnsupportedFormat(f"{path}: tokenizer model {kind!r}; carried is byte-level BPE")
    pre = _pre_tokenizer(path, tokenizer)
    tokens, types = _tokens(path, tokenizer, rows)
    keys: Metadata = {
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string(pre),
        "tokenizer.ggml.tokens": array(GGUFValueType.STRING, tokens),
        "tokenizer.ggml.token_type": array(GGUFValueType.INT32, types),
        "tokenizer.ggml.merges": array(GGUFValueType.STRING, _merges(path, model.get("merges"))),
        **_special_ids(folder, tokenizer, config, rows),
    }
    for kind in ("bos", "eos"):
        keys[f"tokenizer.ggml.add_{kind}_token"] = boolean(_adds(tokenizer, config, kind))
    return keys | _chat_templates(folder, config)


def _pre_tokenizer(path: Path, tokenizer: Mapping[str, Any]) -> str:
    """llama.cpp's name for the pre-tokenizer's rules."""
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers", []) if normalizer.get("type") == "Sequence" else [normalizer]
    for step in steps:
        if step.get("type") not in (None, "NFC"):
            raise UnsupportedFormat(f"{path}: normalizer {step['type']!r} changes text before it is split; "
                                    "llama.cpp has no such step for BPE")
    pre = tokenizer.get("pre_tokenizer") or {}
    parts = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    splits = tuple(str(p.get("pattern", {}).get("Regex")) for p in parts if p.get("type") == "Split")
    bytes_ = [p for p in parts if p.get("type") == "ByteLevel"]
    others = [p.get("type") for p in parts if p.get("type") not in ("Split", "ByteLevel")]
    plain = all(p.get("behavior") == "Isolated" and not p.get("invert") for p in parts if p.get("type") == "Split")
    plain = plain and len(bytes_) == 1 and not others and not bytes_[0].get("add_prefix_space")
    if plain and bytes_[0].get("use_regex", True) == (not splits) and splits in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[splits]
    raise UnsupportedFormat(f"{path}: llama.cpp has no known name for this pre-tokenizer: {json.dumps(pre)[:400]}")


def _tokens(path: Path, tokenizer: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Token texts and types by id, padded to `rows`."""
    by_id: dict[int, tuple[str, TokenType]] = {}
    added = tokenizer.get("added_tokens") or []
    for text, number in tokenizer["model"]["vocab"].items():
        _place(path, by_id, number, text, TokenType.NORMAL, rows)
    for token in added:
        text, number = token.get("content"), token.get("id")
        special = token.get("special") or (str(text).startswith("<|") and str(text).endswith("|>"))
        if number in by_id and by_id[number][0] == text:
            del by_id[number]  # listed in the vocabulary, too
        _place(path, by_id, number, text, TokenType.CONTROL if special else TokenType.USER_DEFINED, rows)
    filled = [by_id.get(i, (f"[PAD{i}]", TokenType.UNUSED)) for i in range(rows)]
    return [text for text, _ in filled], [int(kind) for _, kind in filled]


def _place(path: Path, by_id: dict[int, tuple[str, TokenType]], number: Any, text: Any, kind: TokenType,
           rows: int) -> None:
    if type(number) is not int or not isinstance(text, str):
        raise CheckpointError(f"{path}: token {text!r} has id {number!r}; expected a text and a number")
    if not 0 <= number < rows:
        raise CheckpointError(f"{path}: token {text!r} has id {number}, the embedding has {rows} rows; "
                              "the tokenizer belongs to another model")
    if number in by_id:
        raise CheckpointError(f"{path}: id {number} is given to {by_id[number][0]!r} and to {text!r}")
    by_id[number] = (text, kind)


def _merges(path: Path, merges: Any) -> list[str]:
    """`left right` strings; a space inside a part is written as the byte-level alphabet has it."""
    if not isinstance(merges, list) or not merges:
        raise CheckpointError(f"{path}: model.merges is missing or empty")
    out = []
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(p, str) and p for p in pair):
            raise CheckpointError(f"{path}: merge {merge!r} is not a pair of texts")
        out.append(" ".join(p.replace(" ", "\u0120") for p in pair))
    return out


def _special_ids(folder: Path, tokenizer: Mapping[str, Any], config: Mapping[str, Any], rows: int) -> Metadata:
    """Ids of the special tokens: named in tokenizer_config.json, else by number in config.json."""
    ids = {t["content"]: t["id"] for t in tokenizer.get("added_tokens") or []}
    ids = tokenizer["model"]["vocab"] | ids
    model = read_json(folder / "config.json")
    text = model.get("text_config") or {}
    keys: Metadata = {}
    for kind in _SPECIAL:
        token = config.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        number = ids.get(token) if isinstance(token, str) else None
        if isinstance(token, str) and number is None:
            raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {kind}_token {token!r} is unknown")
        for source in (model, text):
            if number is None:
                number = source.get(f"{kind}_token_id")
                number = number[0] if isinstance(number, list) and number else number
        if number is None:
            continue
        if type(number) is not int or not 0 <= number < rows:
            raise CheckpointError(f"{folder / 'config.json'}: {kind}_token_id {number!r} is no id below {rows}")
        keys[f"tokenizer.ggml.{_KEYS.get(kind, kind if kind != 'pad' else 'padding')}_token_id"] = u32(number)
    return keys


def _adds(tokenizer: Mapping[str, Any], config: Mapping[str, Any], kind: str) -> bool:
    """Whether the tokenizer itself puts a bos or eos token around a text."""
    post = tokenizer.get("post_processor") or {}
    for step in post.get("processors", [post]):
        if step.get("type") == "TemplateProcessing" and step.get("single"):
            edge = step["single"][0 if kind == "bos" else -1]
            token = config.get(f"{kind}_token")
            token = token.get("content") if isinstance(token, dict) else token
            return bool(edge.get("SpecialToken", {}).get("id") == token and token)
    return config.get(f"add_{kind}_token") is True


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> Metadata:
    """The chat template, and named ones beside it."""
    named: dict[str, str] = {}
    given = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        named["default"] = (folder / "chat_template.jinja").read_text("utf-8")
    elif (folder / "chat_template.json").is_file():
        given = read_json(folder / "chat_template.json").get("chat_template")
    if "default" not in named and isinstance(given, str):
        named["default"] = given
    elif isinstance(given, list):
        named = {str(t["name"]): str(t["template"]) for t in given} | named
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = file.read_text("utf-8")
    keys: Metadata = {}
    if "default" in named:
        keys["tokenizer.chat_template"] = string(named.pop("default"))
    for name, template in named.items():
        keys[f"tokenizer.chat_template.{name}"] = string(template)
    if named:
        keys["tokenizer.chat_templates"] = array(GGUFValueType.STRING, list(named))
    return keys
