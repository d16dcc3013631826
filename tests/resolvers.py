"""The three readers of a repository's file names, imitated: the Hub's label, `-hf repo:TAG`, and the cache's tag.

Written after huggingface.js packages/tasks/src/gguf.ts (parseGGUFQuantLabel) and llama.cpp common/download.cpp
(find_best_model, get_gguf_split_info, find_best_sibling).
"""

import re

# Names of GGMLFileQuantizationType in its order: the first that matches at a place wins there.
HUB_QUANTS = """
    F32 F16 Q4_0 Q4_1 Q4_1_SOME_F16 Q4_2 Q4_3 Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K
    IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 Q4_0_4_4 Q4_0_4_8
    Q4_0_8_8 TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0 Q2_K_XL Q3_K_XL Q4_K_XL Q5_K_XL Q6_K_XL Q8_K_XL
""".split()
_NOT_MODELS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")


def hub_label(name: str) -> str | None:
    """The quantization that the Hub shows for a file: the last known name, with `_` and letters that follow it."""
    found = re.findall(rf"(?:UD-)?(?:{'|'.join(HUB_QUANTS)})(?:_[A-Z]+)?", name.upper())
    return found[-1] if found else None


def hf_choice(files: list[str], tag: str = "") -> str | None:
    """The model that `-hf repo:TAG` takes from files in the Hub's order."""
    models = [f for f in files if f.endswith(".gguf") and not any(w in f.rsplit("/", 1)[-1] for w in _NOT_MODELS)]
    models = [f for f in models if not (m := _shard(f)) or int(m[2]) == 1]
    for t in [tag] if tag else ["Q4_K_M", "Q8_0"]:
        if found := next((f for f in models if re.search(t + "[.-]", f, re.IGNORECASE)), None):
            return found
    return models[0] if models and not tag else None


def cache_tag(name: str) -> str:
    """The tag under which llama.cpp lists a file of its cache."""
    m = _shard(name)
    found = re.search(r"[-.]([A-Z0-9_]+)$", m[1] if m else name.removesuffix(".gguf"), re.IGNORECASE)
    return found[1].upper() if found else ""


def projector_choice(files: list[str], model: str) -> str | None:
    """The projector that comes with a model, all files in one folder: the one with the nearest number in its tag."""
    def number(name: str) -> int:
        m = re.search(r"\d+", cache_tag(name))
        return int(m[0]) if m else 0

    found = [f for f in files if f.endswith(".gguf") and "mmproj" in f]
    return min(found, key=lambda f: abs(number(f) - number(model)), default=None)


def _shard(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", name, re.IGNORECASE)
