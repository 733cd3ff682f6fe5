"""The fastest division of dense layers with up to eight tokens on an H200, as tests/gpu/w4a16_sweep.py measured it.

Wider ones run the wgmma kernel there (w4a16_wgmma_configs.py).
"""

from __future__ import annotations

from typing import Final

from requant.kernels.w4a16_division import Config

__all__ = ["H200_DENSE"]

H200_DENSE: Final[dict[tuple[int, int], dict[int, Config]]] = {
    (4096, 4096): {
        1: Config(4, 2, 128, depth=4),
        2: Config(4, 2, 128, depth=4),
        4: Config(2, 4, 64, cluster=2),
        8: Config(4, 4, 64, cluster=2),
    },
    (7168, 2048): {
        1: Config(2, 4, 112, depth=4),
        2: Config(2, 4, 112, depth=4),
        4: Config(2, 4, 112),
        8: Config(4, 4, 112),
    },
    (5120, 2944): {
        1: Config(4, 3, 107),
        2: Config(4, 3, 107),
        4: Config(4, 3, 107),
        8: Config(4, 3, 107),
    },
    (5120, 2880): {  # at M = 1 by the time of gpt-oss-20b's step, as (2880, 4096); wider as 5120 x 2944
        1: Config(12, 1, 107, row_tiles=3, depth=1, stream=3),
        2: Config(4, 3, 107),
        4: Config(4, 3, 107),
        8: Config(4, 3, 107),
    },
    (2880, 4096): {
        1: Config(16, 1, 90, row_tiles=2, depth=1, stream=3),
    },
    (201088, 2880): {
        1: Config(2, 8, 132),
    },
    (12288, 4096): {
        1: Config(2, 6, 128),
        2: Config(2, 6, 128),
        4: Config(2, 6, 128),
        8: Config(2, 6, 128),
    },
    (8192, 8192): {
        1: Config(3, 4, 128),
        2: Config(3, 4, 128),
        4: Config(2, 8, 64, cluster=2),
        8: Config(2, 8, 64, cluster=2),
    },
}
"""(N, K) -> width -> division."""
