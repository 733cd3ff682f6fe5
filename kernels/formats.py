"""The number formats, as tables and constants. Nothing here computes on a tensor or knows a file.

| type | bits    | values                                                             |
|------|---------|--------------------------------------------------------------------|
| E2M1 | s e2 m1 | code & 7 indexes {0, .5, 1, 1.5, 2, 3, 4, 6}; bit 3 is the sign     |
| E4M3 | s e4 m3 | bias 7, max 448 (0x7E), NaN 0x7F and 0xFF, subnormals m * 2^-9      |
| E8M0 | e8      | 2^(b - 127); byte 0 is 2^-127, byte 255 is NaN                      |

MXFP4 = E2M1 codes, one E8M0 scale per 32 along K. NVFP4 = E2M1 codes, one E4M3 scale per 16 along K, and one FP32
global scale per tensor (`weight_scale_2`). Two codes share a byte, the low nibble holds the even K index. Scales are
linear [N, K/group], never swizzled. (OCP Microscaling Formats v1.0, section 5; NVFP4 as modelopt 0.47 writes it.)

E8M0 is decoded by table, never by exp2 or a shift into the exponent: those get byte 255 (infinity instead of NaN) or
byte 0 (zero instead of 2^-127) wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "E2M1_MAGNITUDES",
    "E2M1_MAX",
    "E2M1_VALUES",
    "E4M3_MAX",
    "E4M3_MAX_BYTE",
    "E4M3_NAN_BYTE",
    "E4M3_POW2_BYTES",
    "E4M3_POW2_MAX",
    "E4M3_POW2_MIN",
    "E4M3_VALUES",
    "E8M0_BIAS",
    "E8M0_NAN_BYTE",
    "E8M0_VALUES",
    "MARLIN_POW2_MIN",
    "MARLIN_WINDOW",
    "MXFP4_GROUP",
    "NATIVE_WINDOW",
    "NVFP4_GROUP",
    "NumberFormat",
    "PackedTensor",
    "e4m3_pow2_byte",
]

MXFP4_GROUP: Final = 32
"""Elements along K that share one E8M0 scale (OCP MX v1.0, 5.2)."""
NVFP4_GROUP: Final = 16
"""Elements along K that share one E4M3 scale."""

E2M1_MAGNITUDES: Final[NDArray[np.float32]] = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
"""|value| of an E2M1 code, by code & 7."""
E2M1_VALUES: Final[NDArray[np.float32]] = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])
"""Value of each of the 16 E2M1 codes; code 8 is -0.0."""
E2M1_MAX: Final = 6.0

E4M3_MAX: Final = 448.0
E4M3_MAX_BYTE: Final = 0x7E
E4M3_NAN_BYTE: Final = 0x7F
E4M3_POW2_MIN: Final = -9
"""2^-9 is E4M3's smallest subnormal (byte 0x01)."""
E4M3_POW2_MAX: Final = 8
"""2^8 is the largest power of two that E4M3 holds (byte 0x78)."""
MARLIN_POW2_MIN: Final = -6
"""Marlin flushes block scales below 2^-6, E4M3's smallest normal, to zero."""
NATIVE_WINDOW: Final = E4M3_POW2_MAX - E4M3_POW2_MIN
"""17: exponents this far under the largest still have an exact E4M3 scale."""
MARLIN_WINDOW: Final = E4M3_POW2_MAX - MARLIN_POW2_MIN
"""14: the same for kernels that flush subnormal scales."""

E8M0_BIAS: Final = 127
E8M0_NAN_BYTE: Final = 255


def _e4m3_table() -> NDArray[np.float32]:
    values = np.empty(256, dtype=np.float32)
    for byte in range(256):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        if byte & 0x7F == E4M3_NAN_BYTE:
            magnitude = np.nan
        elif exponent == 0:
            magnitude = mantissa * 2.0**-9
        else:
            magnitude = (8 + mantissa) * 2.0 ** (exponent - 10)
        values[byte] = -magnitude if byte & 0x80 else magnitude
    return values


def _e8m0_table() -> NDArray[np.float32]:
    values = np.ldexp(np.float64(1.0), np.arange(256) - E8M0_BIAS)
    values[E8M0_NAN_BYTE] = np.nan
    return values.astype(np.float32)


E4M3_VALUES: Final[NDArray[np.float32]] = _e4m3_table()
"""Value of each E4M3 (fn) byte."""
E8M0_VALUES: Final[NDArray[np.float32]] = _e8m0_table()
"""Value of each E8M0 byte; 2^-127 is a float32 subnormal and exact."""


def e4m3_pow2_byte(exponent: int) -> int:
    """The E4M3 byte whose value is exactly 2^exponent, for exponent in [-9, 8]."""
    if not E4M3_POW2_MIN <= exponent <= E4M3_POW2_MAX:
        raise ValueError(f"2^{exponent} is not an E4M3 value: exponents run from {E4M3_POW2_MIN} to {E4M3_POW2_MAX}")
    return (exponent + 7) << 3 if exponent >= MARLIN_POW2_MIN else 1 << (exponent + 9)


E4M3_POW2_BYTES: Final[NDArray[np.uint8]] = np.array(
    [e4m3_pow2_byte(p) for p in range(E4M3_POW2_MIN, E4M3_POW2_MAX + 1)], dtype=np.uint8
)
"""Byte of 2^p at index p + 9."""


class NumberFormat(StrEnum):
    """A way to write a weight as numbers, whatever the file calls its parts."""

    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    FP8 = "fp8"
    BF16 = "bf16"

    @property
    def group(self) -> int:
        """Elements along K per block scale; 0 where there is none."""
        return {NumberFormat.NVFP4: NVFP4_GROUP, NumberFormat.MXFP4: MXFP4_GROUP}.get(self, 0)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One FP4 weight between a reading and a writing layout.

    codes: uint8 [N, K/2], low nibble = even K. block_scales: uint8 bytes [N, K/group], E8M0 for MXFP4 and E4M3 for
    NVFP4. global_scale: float32 for NVFP4 (value = code * block_scale * global_scale), None for MXFP4.
    """

    format: NumberFormat
    codes: NDArray[np.uint8]
    block_scales: NDArray[np.uint8]
    global_scale: np.float32 | None = None

    def __post_init__(self) -> None:
        if self.codes.ndim != 2:
            raise ValueError(f"codes {self.codes.shape} are not [N, K/2]")
        rows, half_k = self.codes.shape
        if self.block_scales.shape != (rows, half_k * 2 // self.format.group):
            raise ValueError(
                f"block scales {self.block_scales.shape} do not fit codes {self.codes.shape} in groups of "
                f"{self.format.group}: expected {(rows, half_k * 2 // self.format.group)}"
            )
        if (self.global_scale is None) != (self.format is NumberFormat.MXFP4):
            raise ValueError(f"{self.format} and global_scale={self.global_scale!r} do not go together")
