"""llama.cpp tokenizes as the Hugging Face tokenizer does, and files that contradict each other are refused."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from oracle import checkpoint
from tokenizers import Tokenizer

from mcpq_gguf.convert import convert, prepare
from mcpq_gguf.errors import CheckpointError, UnsupportedFormat
from mcpq_gguf.tokenizer import vocabulary
from mcpq_gguf.verify.engine import Server

FIXED = [
    "Hello, world!",
    "今天天气很好，我们去公园散步吧。",
    "人工智能正在改变世界",
    "한국어 문장도 조금 넣어 둡니다.",
    "日本語の文章。カタカナ",
    "Привет, мир!",
    "مرحبا بالعالم",
    "שלום עולם",
    "ไทย",
    "Übergrößenträger Straße",
    "e\u0301 a\u0308 o\u0302\u0301",
    "def f(x: int) -> str:\n    return f'{x!r}'\n",
    "for (int i = 0; i < n; ++i) { a[i] += 1; }",
    "\t\tx\t",
    "   ",
    " ",
    "\n",
    "\n\n\n",
    "\r\n\r\n",
    "a  b   c    d",
    "line\n\n  next\n\t\tend",
    "0",
    "12",
    "123",
    "1234567890",
    "3.14159",
    "1e-10",
    "2026-12-01",
    "100%",
    "$5.00",
    "🙂🚀🎉",
    "👨\u200d👩\u200d👧",
    "🇩🇪",
    "I'm you're he'll we'd they've it's I'M YOU'RE",
    "don''t",
    "https://example.org/a?b=c&d=e",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|>",
    "<|im_end|><|im_end|>",
    "x<|endoftext|>y",
    "<think>\n\n</think>\n\n",
    "<image></image>",
    "<slice>a</slice>",
    "<|im_start",
    "|im_end|>",
    '<tool_call>{"a": 1}</tool_call>',
    "\u00a0nbsp\u3000ideographic",
    "\u200bzero\ufeffwidth",
    "mixed中文and한국어12and🙂",
    "CamelCaseAndsnake_case",
    "---===***",
    "...",
    "?!?!",
    "\x00\x01",
    "\u0939\u093f\u0928\u094d\u0926\u0940",
]


def strings(count: int) -> list[str]:
    """The fixed ones and random mixtures of scripts, digits, white space, code and special tokens."""
    rng = random.Random(7)
    pieces = [
        *FIXED,
        *"abcXYZ 0123456789",
        " ",
        "  ",
        "\n",
        "\t",
        "\r\n",
        "的",
        "한",
        "é",
        "'s",
        "'LL",
        "_",
        "(",
        ")",
        "->",
        "<think>",
    ]
    return FIXED + ["".join(rng.choice(pieces) for _ in range(rng.randint(1, 12))) for _ in range(count - len(FIXED))]


@pytest.mark.parametrize("name", ["made-nvfp4", "bf16"])
def test_llama_cpp_tokenizes_as_hugging_face_does(name: str, tmp_path: Path) -> None:
    source = checkpoint(name)
    theirs = Tokenizer.from_file(str(source / "tokenizer.json"))
    theirs.normalizer = None  # llama.cpp applies no NFC; the same text must give the same ids all the same
    with Server(convert(prepare(source), tmp_path)[0].path) as server:
        for text in strings(400):
            assert server.tokenize(text) == theirs.encode(text, add_special_tokens=False).ids, repr(text)


def test_text_in_nfc_needs_no_normalizer() -> None:
    """What llama.cpp leaves out makes no difference for text that is in NFC already."""
    import unicodedata

    source = checkpoint("made-nvfp4")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    bare = Tokenizer.from_file(str(source / "tokenizer.json"))
    bare.normalizer = None
    for text in strings(200):
        text = unicodedata.normalize("NFC", text)
        assert tokenizer.encode(text).ids == bare.encode(text).ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = checkpoint("made-nvfp4")
    for file in source.glob("*"):
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, tmp_path)
    return tmp_path


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(data | values))


def model(folder: Path, **values: Any) -> dict[str, Any]:
    return {"model": json.loads((folder / "tokenizer.json").read_text())["model"] | values}


def test_rows_without_a_token_are_padded_as_unused(folder: Path) -> None:
    keys = vocabulary(folder, 1500)
    tokens, types = keys["tokenizer.ggml.tokens"].value, keys["tokenizer.ggml.token_type"].value
    assert len(tokens) == len(types) == 1500  # type: ignore[arg-type]
    assert tokens[1499] == "[PAD1499]"  # type: ignore[index]
    assert types[1499] == TokenType.UNUSED  # type: ignore[index]
    at = tokens.index("<|im_end|>"), tokens.index("<think>"), tokens.index("a")  # type: ignore[union-attr]
    assert [types[i] for i in at] == [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL]  # type: ignore[index]


def test_special_ids_come_by_name_then_by_number(folder: Path) -> None:
    tokens = vocabulary(folder, 1024)["tokenizer.ggml.tokens"].value
    assert tokens[vocabulary(folder, 1024)["tokenizer.ggml.eos_token_id"].value] == "<|im_end|>"  # type: ignore[index]
    change(folder, "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert tokens[vocabulary(folder, 1024)["tokenizer.ggml.eos_token_id"].value] == "<|endoftext|>"  # type: ignore[index]
    change(folder, "tokenizer_config.json", eos_token=None)
    change(folder, "config.json", eos_token_id=[5, 6])
    assert vocabulary(folder, 1024)["tokenizer.ggml.eos_token_id"].value == 5
    assert vocabulary(folder, 1024)["tokenizer.ggml.add_bos_token"].value is False


def test_both_forms_of_merges_are_the_same(folder: Path) -> None:
    pairs = vocabulary(folder, 1024)["tokenizer.ggml.merges"]
    listed = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    as_strings = [m if isinstance(m, str) else " ".join(m) for m in listed]
    change(folder, "tokenizer.json", **model(folder, merges=as_strings))
    assert vocabulary(folder, 1024)["tokenizer.ggml.merges"] == pairs


def test_chat_templates_from_every_place(folder: Path) -> None:
    assert vocabulary(folder, 1024)["tokenizer.chat_template"].value == (folder / "chat_template.jinja").read_text()
    extra = folder / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("T")
    keys = vocabulary(folder, 1024)
    assert keys["tokenizer.chat_template.tool_use"].value == "T"
    assert keys["tokenizer.chat_templates"].value == ("tool_use",)
    (folder / "chat_template.jinja").unlink()
    shutil.rmtree(extra)
    assert "tokenizer.chat_template" not in vocabulary(folder, 1024)
    change(folder, "chat_template.json", chat_template="J")
    assert vocabulary(folder, 1024)["tokenizer.chat_template"].value == "J"
    (folder / "chat_template.json").unlink()
    change(
        folder,
        "tokenizer_config.json",
        chat_template=[{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}],
    )
    keys = vocabulary(folder, 1024)
    assert (keys["tokenizer.chat_template"].value, keys["tokenizer.chat_template.rag"].value) == ("D", "R")


def split(regex: str, **extra: Any) -> dict[str, Any]:
    parts = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} | extra,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    return {"type": "Sequence", "pretokenizers": parts}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pre_tokenizer": split(r"\w+|\s+")}, r"\\w+|\\s+"),
        ({"pre_tokenizer": None}, "pre-tokenizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}},
            "StripAccents",
        ),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece"),
    ],
)
def test_other_tokenizers_are_refused_by_their_rules(folder: Path, values: dict[str, Any], words: str) -> None:
    change(folder, "tokenizer.json", **values)
    with pytest.raises(UnsupportedFormat) as caught:
        vocabulary(folder, 1024)
    assert words in str(caught.value)


def test_contradictions_are_refused(folder: Path) -> None:
    def refused(words: str, rows: int = 1024) -> None:
        with pytest.raises(CheckpointError) as caught:
            vocabulary(folder, rows)
        assert words in str(caught.value)

    refused("the embedding has 300 rows", 300)
    good = (folder / "tokenizer.json").read_text()
    vocab = json.loads(good)["model"]["vocab"]
    change(folder, "tokenizer.json", **model(folder, vocab=vocab | {"twice": 7}))
    refused("id 7 is given to")
    change(folder, "tokenizer.json", **model(folder, vocab=vocab | {"bad": "7"}))
    refused("'bad' has id '7'")
    change(folder, "tokenizer.json", **model(folder, vocab=vocab, merges=[["a"]]))
    refused("merge ['a']")
    change(folder, "tokenizer.json", **model(folder, vocab=vocab, merges=[]))
    refused("merges is missing")
    (folder / "tokenizer.json").write_text(good)
    change(folder, "tokenizer_config.json", eos_token="<gone>")
    refused("'<gone>'")
    change(folder, "tokenizer_config.json", eos_token=None)
    change(folder, "config.json", eos_token_id=99999)
    refused("99999")
    (folder / "tokenizer.json").unlink()
    refused("tokenizer.json: missing")
