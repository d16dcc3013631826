"""Stored tensors that belong to no weight and that llama.cpp has no use for, with the reason."""

import re
from collections.abc import Iterable

# Scales of a quantized KV cache: parameters of an attention module (compressed-tensors, vLLM) or of its projections
# (ModelOpt).
_KV_CACHE = re.compile(r".*attn(\.[kv]_proj)?\.([kvq]_scale|[kv]_zero_point|[kvq]_global_scale|kv_scale)")


def is_kv_cache_scale(name: str) -> bool:
    """Whether the tensor is a scale of the KV cache, and so no part of any weight."""
    return _KV_CACHE.fullmatch(name) is not None


def notices(names: Iterable[str]) -> tuple[str, ...]:
    """What to tell the user of such tensors, given the names of all tensors of a checkpoint."""
    scales = [n for n in names if is_kv_cache_scale(n)]
    if not scales:
        return ()
    return (f"{scales[0]}{f' and {len(scales) - 1} more' if len(scales) > 1 else ''}: scales of a quantized KV cache, "
            "not carried: GGUF has no place for them; choose the KV cache type when you run llama.cpp (-ctk, -ctv)",)
