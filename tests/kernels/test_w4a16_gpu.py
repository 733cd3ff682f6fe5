"""W4A16 on a GPU, against float64: every width, alignment and way to divide the work, dense and grouped.

The bound is that of kernels/bounds.py: half-precision partial sums fail it. x has a dynamic range of 2^20 and outlier
channels, block scales reach both ends of their range.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from requant.kernels import w4a16
from requant.kernels import w4a16_configs as configs
from requant.kernels import w4a16_wgmma_configs as wgmma
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess

pytestmark = pytest.mark.gpu

FORMATS = [NumberFormat.NVFP4, NumberFormat.MXFP4]
SHAPES = [(64, 512), (40, 272), (7, 1040), (100, 2880), (16, 32), (33, 2944), (24, 288), (48, 8192), (16, 16)]


def random_weight(fmt, *shape, generator=None):
    import torch

    *lead, n, k = shape
    low, high = (0, 0x7F) if fmt is NumberFormat.NVFP4 else (107, 147)  # all finite E4M3; 2^-20 .. 2^20
    codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, device="cuda", generator=generator)
    scales = torch.randint(low, high, (*lead, n, k // fmt.group), dtype=torch.uint8, device="cuda", generator=generator)
    return codes, scales


def random_x(*shape):
    import torch

    x = torch.randn(*shape, device="cuda") * torch.exp2(torch.randint(-20, 1, shape, device="cuda").float())
    x[..., :: max(1, shape[-1] // 7)] *= 64
    return x.bfloat16()


def assert_within_bound(y, exact, magnitude):
    assert not exact.isnan().any()
    assert excess(y, exact, magnitude) <= 1.0


@pytest.mark.parametrize("path", ["cuda", "triton"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_width_and_alignment_is_within_the_bound_and_repeats_its_bits(fmt, path):
    import torch

    torch.manual_seed(1)
    for n, k in SHAPES:
        if k % fmt.group:
            continue
        codes, scales = random_weight(fmt, n, k)
        w = dequantize(fmt, codes, scales)
        for m in (1, 2, 3, 8, 9, 17, 64, 70):
            x = random_x(m, k)
            for constant_weights in (False, True):
                y = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
                again = torch.full_like(y, float("nan"))
                for out in (y, again):
                    w4a16.w4a16_matmul(
                        x, codes, scales, 0.37, fmt=fmt, out=out, path=path, constant_weights=constant_weights
                    )
                assert torch.equal(y, again)
                exact = x.double() @ w.T * 0.37
                assert_within_bound(y, exact, x.double().abs() @ w.abs().T * 0.37)


@pytest.mark.parametrize("fmt", FORMATS)
def test_few_tokens_divide_the_work_in_any_way(fmt):
    """Blocks that take several row groups, clusters that split K, x that does not fit at once, idle warps."""
    import torch

    torch.manual_seed(6)
    divisions = [(4, 2, 1, 0, 0), (2, 4, 1, 0, 2), (3, 1, 2, 0, 0), (1, 3, 4, 0, 0), (2, 2, 8, 1, 0), (2, 3, 1, 1, 1)]
    if torch.cuda.get_device_capability() < (9, 0):
        divisions = [d for d in divisions if d[2] == 1]
    for n, k in [(100, 2944), (71, 1280), (256, 4096), (40, 272), (48, 96)]:
        if k % fmt.group:
            continue
        codes, scales = random_weight(fmt, n, k)
        w = dequantize(fmt, codes, scales)
        for m in (1, 2, 3, 8):
            x = random_x(m, k)
            exact, magnitude = x.double() @ w.T, x.double().abs() @ w.abs().T
            for column_warps, row_warps, cluster, x_stages, blocks in divisions:
                groups = -(-n // (16 * row_warps))
                config = configs.Config(column_warps, row_warps, blocks or groups, cluster, x_stages)
                for constant_weights in (False, True):
                    y, again = (
                        w4a16.w4a16_matmul(
                            x, codes, scales, 1.0, fmt=fmt, config=config, constant_weights=constant_weights
                        )
                        for _ in range(2)
                    )
                    assert torch.equal(y, again)
                    assert_within_bound(y, exact, magnitude)


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_few_tokens_scale_each_256_of_x_alone(m):
    """Where the weights of huge x are zero, small x keeps its bits: a common power of two would lose them."""
    import torch

    torch.manual_seed(7)
    codes, scales = random_weight(NumberFormat.NVFP4, 64, 2048)
    codes[:, :128] = 0
    x = random_x(m, 2048)
    x[:, :256] *= 2.0**90
    w = dequantize(NumberFormat.NVFP4, codes, scales)
    y = w4a16.w4a16_matmul(x, codes, scales, 1.0, fmt=NumberFormat.NVFP4)
    assert_within_bound(y, x.double() @ w.T, x.double().abs() @ w.abs().T)


@pytest.mark.parametrize("m", [1, 16])
def test_more_rows_than_a_grid_has_blocks(m):
    n, k = 65535 * 64 + 40, 64  # 65536 row groups of mma.sync, and of wgmma's smallest blocks
    codes, scales = random_weight(NumberFormat.NVFP4, n, k)
    x = random_x(m, k)
    y = w4a16.w4a16_matmul(x, codes, scales, 1.0, fmt=NumberFormat.NVFP4)
    for rows in (slice(0, 4096), slice(65535 * 32 - 64, 65535 * 32 + 64), slice(n - 4096, n)):
        w = dequantize(NumberFormat.NVFP4, codes[rows], scales[rows])
        assert_within_bound(y[:, rows], x.double() @ w.T, x.double().abs() @ w.abs().T)


@pytest.mark.parametrize("fmt", FORMATS)
def test_wgmma_divides_the_work_in_any_way_and_converts_every_scale(fmt):
    """SM90: rows and K that no tile divides, scales that need the slow conversion, NaN that stays in its row."""
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is of SM90 alone")
    torch.manual_seed(5)
    for n, k in [(100, 2944), (71, 1280), (256, 4096)]:
        codes, scales = random_weight(fmt, n, k)
        codes |= 0x11  # no zero codes
        if fmt is NumberFormat.NVFP4:
            scales |= (torch.rand(scales.shape, device="cuda") < 0.1).to(torch.uint8) * 128  # negative
            scales[(scales & 127) == 127] = 126
        w = dequantize(fmt, codes, scales)
        for m in (9, 16, 31, 64):
            x = random_x(m, k)
            exact, magnitude = x.double() @ w.T, x.double().abs() @ w.abs().T
            for row_groups, k_groups, cluster in [(1, 1, 1), (2, 2, 1), (1, 4, 2), (3, 1, 3), (1, 2, 8)]:
                config = wgmma.WgmmaConfig(row_groups, k_groups, -(-n // (64 * row_groups)), cluster, 2, 2)
                y = w4a16.w4a16_matmul(x, codes, scales, 1.0, fmt=fmt, config=config)
                assert_within_bound(y, exact, magnitude)
                broken = scales.clone()
                broken[5, 7] = 0x7F if fmt is NumberFormat.NVFP4 else 0xFF
                broken = w4a16.w4a16_matmul(x, codes, broken, 1.0, fmt=fmt, config=config)
                assert broken[:, 5].isnan().all()
                keep = [r for r in range(n) if r != 5]
                assert torch.equal(broken[:, keep], y[:, keep])


@pytest.mark.parametrize("path", ["cuda", "triton"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_grouped_is_within_the_bound_for_every_slot(fmt, path):
    import torch

    torch.manual_seed(2)
    for experts, topk, n, k in [(8, 2, 96, 512), (5, 3, 80, 2880), (40, 6, 64, 4096), (3, 3, 50, 288)]:
        codes, scales = random_weight(fmt, experts, n, k)
        gs = torch.rand(experts, device="cuda") + 0.5 if fmt is NumberFormat.NVFP4 else None
        for tokens in (1, 2, 7, 60):
            ids = torch.stack([torch.randperm(experts, device="cuda")[:topk] for _ in range(tokens)]).int()
            weights = torch.rand(tokens, topk, device="cuda")
            for per_slot in (False, True):
                x = random_x(tokens, topk, k) if per_slot else random_x(tokens, k)
                given = {"fmt": fmt, "weights": weights, "x_per_slot": per_slot, "path": path}
                y = w4a16.w4a16_moe(x, codes, scales, gs, ids, **given)
                again = w4a16.w4a16_moe(x, codes, scales, gs, ids, **given)
                assert torch.equal(y, again)
                for e in range(experts):
                    rows, slots = torch.where(ids == e)
                    if not len(rows):
                        continue
                    w = dequantize(fmt, codes[e], scales[e]) * (1.0 if gs is None else gs[e].double())
                    xe = (x[rows, slots] if per_slot else x[rows]).double() * weights[rows, slots, None].double()
                    assert_within_bound(y[rows, slots], xe @ w.T, xe.abs() @ w.abs().T)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_stream_is_within_the_bound_for_every_slot_wherever_its_warps_are_cut(fmt):
    import torch

    torch.manual_seed(5)
    for experts, topk, n, k in [
        (16, 2, 96, 512),
        (24, 6, 208, 2880),
        (24, 6, 40, 2880),
        (40, 6, 72, 4096),
        (30, 6, 72, 2048),
        (30, 6, 48, 2944),
        (30, 6, 48, 2816),
    ]:
        at = configs.alignment(fmt, k)
        streams = [] if at == configs.GENERAL else [configs.LONG_STREAM]
        streams += [configs.SHORT_STREAM] if at == configs.SCALE16 else []
        streams += [configs.SPLITS[k]] if k in configs.SPLITS else []
        codes, scales = random_weight(fmt, experts, n, k)
        gs = torch.rand(experts, device="cuda") + 0.5
        w = dequantize(fmt, codes, scales) * gs.double()[:, None, None]
        for tokens in (1, 3, 8):
            ids = torch.stack([torch.randperm(experts, device="cuda")[:topk] for _ in range(tokens)]).int()
            ids[:, 0] = 5  # one expert with every token
            ids[0, 1] = experts  # and one that does not exist
            weights = torch.rand(tokens, topk, device="cuda")
            x = random_x(tokens, k)
            terms = x.double()[:, None] * weights[..., None].double()
            exact = torch.einsum("tsk,tsnk->tsn", terms, w[ids.clamp(max=experts - 1).long()])
            magnitude = torch.einsum("tsk,tsnk->tsn", terms.abs(), w[ids.clamp(max=experts - 1).long()].abs())
            known = ids < experts
            for config in (replace(c, blocks=b) for c in streams for b in (132, 20, 7, 1)):
                run = partial(w4a16.w4a16_moe, x, codes, scales, gs, ids, fmt=fmt, weights=weights, config=config)
                y = run()
                assert torch.equal(y[known], run()[known])
                assert y[~known].isnan().all()
                assert_within_bound(y[known], exact[known], magnitude[known])


@pytest.mark.parametrize("k", configs.SPLITS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_where_warps_split_k_nan_and_infinity_reach_exactly_the_outputs_that_depend_on_them(fmt, k):
    import torch

    torch.manual_seed(6)
    experts, n = 16, 200
    codes, scales = random_weight(fmt, experts, n, k)
    codes |= 0x11  # no zero codes: an infinite x times zero would be NaN
    scales.clamp_(min=1)
    ids = torch.tensor([[3, 15], [3, 4], [3, 0], [3, 5]], dtype=torch.int32, device="cuda")
    x = random_x(4, k)
    config = replace(configs.SPLITS[k], blocks=7)
    run = partial(w4a16.w4a16_moe, fmt=fmt, config=config)
    clean = run(x, codes, scales, None, ids)
    assert clean.isfinite().all()
    broken = scales.clone()
    broken[3, 199, -1] = broken[15, 16, 7] = 0x7F if fmt is NumberFormat.NVFP4 else 0xFF
    y = run(x, codes, broken, None, ids)
    wrong = torch.zeros_like(clean, dtype=torch.bool)
    wrong[:, 0, 199] = wrong[0, 1, 16] = True
    assert torch.equal(y.isnan(), wrong)
    assert torch.equal(y[~wrong], clean[~wrong])
    for value in (float("nan"), float("inf")):
        bad = x.clone()
        bad[2, k - 1] = value
        y = run(bad, codes, scales, None, ids)
        assert not y[2].isfinite().any()
        assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("path", ["cuda", "triton"])
def test_an_expert_that_does_not_exist_gives_nan_or_an_error_never_a_number(path):
    import torch

    codes, scales = random_weight(NumberFormat.NVFP4, 4, 32, 512)
    ids = torch.tensor([[0, 4], [-1, 2]], dtype=torch.int32, device="cuda")
    x = random_x(2, 512)
    y = w4a16.w4a16_moe(x, codes, scales, None, ids, fmt=NumberFormat.NVFP4, path=path)
    assert y.isnan().all(-1).tolist() == [[False, True], [True, False]]
    assert not y[0, 0].isnan().any()
    with pytest.raises(ValueError, match=r"expert_ids\[0, 1\] is 4: experts run from 0 to 3"):
        w4a16.w4a16_moe(x, codes, scales, None, ids, fmt=NumberFormat.NVFP4, check=True, path=path)


@pytest.mark.parametrize("m", [1, 4, 20])
def test_nan_and_infinity_reach_exactly_the_outputs_that_depend_on_them(m):
    import torch

    torch.manual_seed(3)
    codes, scales = random_weight(NumberFormat.NVFP4, 48, 1024)
    codes |= 0x11  # no zero codes: an infinite x times zero would be NaN
    scales.clamp_(min=1)
    x = random_x(m, 1024)
    clean = w4a16.w4a16_matmul(x, codes, scales, 1.0, fmt=NumberFormat.NVFP4)
    broken = scales.clone()
    broken[5, 7] = 0x7F
    y = w4a16.w4a16_matmul(x, codes, broken, 1.0, fmt=NumberFormat.NVFP4)
    assert y[:, 5].isnan().all()
    keep = [r for r in range(48) if r != 5]
    assert torch.equal(y[:, keep], clean[:, keep])
    for value in (float("nan"), float("inf")):
        bad = x.clone()
        bad[m - 1, 900] = value
        y = w4a16.w4a16_matmul(bad, codes, scales, 1.0, fmt=NumberFormat.NVFP4)
        assert not y[m - 1].isfinite().any()
        assert torch.equal(y[: m - 1], clean[: m - 1])


def test_a_global_scale_on_the_device_that_is_not_positive_poisons_the_output():
    import torch

    codes, scales = random_weight(NumberFormat.NVFP4, 32, 512)
    x = random_x(2, 512)
    good = w4a16.w4a16_matmul(x, codes, scales, torch.tensor([0.5], device="cuda"), fmt=NumberFormat.NVFP4)
    assert torch.equal(good, w4a16.w4a16_matmul(x, codes, scales, 0.5, fmt=NumberFormat.NVFP4))
    for value in (0.0, -1.0, float("nan")):
        scale = torch.tensor([value], device="cuda")
        assert w4a16.w4a16_matmul(x, codes, scales, scale, fmt=NumberFormat.NVFP4).isnan().all()


def test_every_configuration_of_the_table_and_the_rule_launches_and_agrees_with_float64():
    import torch

    torch.manual_seed(4)
    shapes = [*configs.H200_DENSE, (2880, 2880), (1536, 16384)]
    for n, k in shapes:
        codes, scales = random_weight(NumberFormat.NVFP4, n, k)
        w = dequantize(NumberFormat.NVFP4, codes, scales)
        for m in configs.WIDTHS:
            x = random_x(m, k)
            y = w4a16.w4a16_matmul(x, codes, scales, 1.0, fmt=NumberFormat.NVFP4)
            assert_within_bound(y, x.double() @ w.T, x.double().abs() @ w.abs().T)
