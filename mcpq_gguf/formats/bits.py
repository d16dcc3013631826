"""Small unsigned integers packed into int32 words, in the two ways that checkpoints use.

dense   value i of a row takes bits i x bits ... of the row read as one little-endian bit stream, across word borders
padded  each word holds floor(32 / bits) values from its low end; the bits that are left over are unused

For 2, 4 and 8 bits they are the same. compressed-tensors wrote 3, 5, 6 and 7 bits padded until June 2026 and dense from
then on (compressors/pack_quantized/helpers.py, `pack_to_int32`); GPTQ's 3 bits are dense.
"""

from functools import cache

import numpy as np

from ..checkpoint import TensorRef
from ..errors import CheckpointError, UnsupportedFormat


def word_count(count: int, bits: int, dense: bool) -> int:
    """int32 words that hold `count` values."""
    return -(-count * bits // 32) if dense else -(-count // (32 // bits))


def is_dense(ref: TensorRef, axis: int, count: int, bits: int) -> bool:
    """Whether `ref` packs `count` values of `bits` along `axis` densely, told by its length.

    Raises CheckpointError when neither packing has that length, UnsupportedFormat when both have and they differ.
    """
    found, dense, padded = ref.shape[axis], word_count(count, bits, True), word_count(count, bits, False)
    if found not in (dense, padded):
        want = f"{dense}" if dense == padded else f"{dense} (dense) or {padded} (padded)"
        raise CheckpointError(f"{ref}: {count} values of {bits} bits take {want} words along dimension {axis}, "
                              f"found {found}")
    if dense == padded and 32 % bits and count > 32 // bits:
        raise UnsupportedFormat(f"{ref}: {count} values of {bits} bits take {found} words in both packings that "
                                "compressed-tensors has used, so the numbers cannot be told; compress it again with "
                                "a width that is a multiple of 32")
    return found == dense


def unpack(words: np.ndarray, bits: int, count: int, dense: bool) -> np.ndarray:
    """Values of int32 `words` (rows, words) as uint8 (rows, count), each 0 ... 2^bits - 1."""
    rows = words.shape[0]
    if bits == 8:
        return np.ascontiguousarray(words).view(np.uint8)[:, :count]
    if dense or 32 % bits == 0:
        return _stream(words, bits)[:, :count]
    words = np.ascontiguousarray(words).view(np.uint32)
    each = 32 // bits
    out = np.empty((rows, words.shape[1], each), np.uint8)
    for i in range(each):
        out[:, :, i] = words >> np.uint32(i * bits) & np.uint32((1 << bits) - 1)
    return out.reshape(rows, -1)[:, :count]


def _stream(words: np.ndarray, bits: int) -> np.ndarray:
    """A dense stream: 8 values lie in `bits` bytes, each value in one byte or in two neighbours."""
    rows = words.shape[0]
    stream = np.ascontiguousarray(words).view(np.uint8)
    left = -stream.shape[1] % bits
    if left:
        stream = np.concatenate([stream, np.zeros((rows, left), np.uint8)], 1)
    columns = np.ascontiguousarray(stream.reshape(-1, bits).T)  # (bits, groups): contiguous operands for each step
    out = np.empty((columns.shape[1], 8), np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for i in range(8):
        byte, shift = divmod(i * bits, 8)
        value = columns[byte] >> np.uint8(shift)
        if shift + bits > 8:
            value |= columns[byte + 1] << np.uint8(8 - shift)
        value &= mask
        out[:, i] = value
    return out.reshape(rows, -1)


def signed(values: np.ndarray, bits: int) -> np.ndarray:
    """uint8 values as int8 codes: less 2^(bits - 1)."""
    half = 1 << bits - 1
    out: np.ndarray = (values ^ np.uint8(half)).view(np.int8) if bits == 8 else values.view(np.int8) - np.int8(half)
    return out


@cache
def signed_limits(bits: int) -> tuple[int, int]:
    """Smallest and largest code of `bits` as a signed integer."""
    return -(1 << bits - 1), (1 << bits - 1) - 1
