"""ggml's FP4 blocks taken apart into the planes that everything else works on: bytes moved, no number computed.

| type  | block                        | in byte j of the codes                          |
|-------|------------------------------|-------------------------------------------------|
| MXFP4 | 1 E8M0, 16 bytes: 32 weights | low nibble weight j, high nibble weight j + 16  |
| NVFP4 | 4 E4M3, 32 bytes: 64 weights | per group of 16 and its 8 bytes: j, and j + 8   |

(ggml-common.h, block_mxfp4 and block_nvfp4; the values behind the codes are E2M1's, doubled, with half the scale.)
The planes: codes [n, K/2] with weight 2b in the low nibble of byte b, scales [n, K/group]. ggml's NVFP4 has no second
scale, and its E4M3 no sign and no NaN: a byte above 0x7E is refused.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST_SCALE", "planes_of"]

Bytes = NDArray[np.uint8]

_BLOCKS = {"mxfp4": (1, 1, 16), "nvfp4": (4, 4, 8)}
"""Format -> scale bytes of a block, groups of a block, code bytes of a group."""
LARGEST_SCALE = 0x7E
"""448, the largest E4M3."""


def planes_of(raw: Bytes, number: str) -> tuple[Bytes, Bytes]:
    """Rows of blocks [n, bytes] -> codes [n, K/2], scales [n, K/group]. ValueError if the rows are no whole blocks."""
    head, groups, width = _BLOCKS[number]
    size = head + groups * width
    rows = len(raw)
    if raw.shape[1] % size:
        raise ValueError(f"{raw.shape[1]} bytes are no whole {number} blocks of {size}")
    blocks = raw.reshape(rows, -1, size)
    count = blocks.shape[1] * groups
    packed = blocks[:, :, head:].reshape(rows, count, width)
    codes = np.empty((rows, count, width), dtype=np.uint8)
    half = width // 2
    for first, nibbles in ((0, packed & 0xF), (half, packed >> 4)):
        codes[:, :, first : first + half] = nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4
    return codes.reshape(rows, -1), np.ascontiguousarray(blocks[:, :, :head]).reshape(rows, count)
