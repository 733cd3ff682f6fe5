"""`choose` and `attend` of a decode step in CUDA (csrc/decode_*.cuh), and products whose weights wait in registers."""

from __future__ import annotations

import re
import subprocess
from itertools import product
from types import SimpleNamespace

import pytest
from requant.kernels import decode_cuda, w4a16, w4a16_configs, w4a16_library
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess, products

NVCC = w4a16_library.find_nvcc()
NVFP4 = NumberFormat.NVFP4


# --- without a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name", "mirror"),
    [
        ("decode_choose.cuh", "ChooseCall", decode_cuda._Choose),
        ("decode_attend.cuh", "AttendCall", decode_cuda._Attend),
    ],
)
def test_what_python_passes_is_what_the_kernel_reads(file, name, mirror):
    text = (w4a16_library.SOURCES / file).read_text(encoding="utf-8")
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.S).group(1)
    declared = []
    for line in re.sub(r"//[^\n]*", "", body).split(";"):
        kind, pointer, names = re.fullmatch(r"\s*(?:const )?(\w*)\s*(\*?)\s*(.*)", line.strip()).groups()
        each = [part.strip() for part in names.split(",") if part.strip()]
        declared += [(part.lstrip("* "), "pointer" if pointer or part.startswith("*") else kind) for part in each]
    letters = {"c_void_p": "pointer", "c_int": "int", "c_float": "float"}
    assert [(field, letters[kind.__name__]) for field, kind in mirror._fields_] == declared


@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
def test_constants_are_all_on_their_way_before_the_wait(tmp_path):
    """And none after it: what the kernel before wrote is no constant, and a line from memory takes long."""
    probe, ptx = tmp_path / "probe.cu", tmp_path / "probe.ptx"
    room = f"2 * requant::kMostKeys * requant::kKeyRow + sizeof(requant::AttendShared) == {decode_cuda._ATTEND_SHARED}"
    probe.write_text(f'#include "decode_attend.cuh"\n#include "decode_choose.cuh"\nstatic_assert({room});\n')
    command = [NVCC, "-std=c++17", "-I", str(w4a16_library.SOURCES), "-ptx", "-arch=compute_90a", "-o", str(ptx)]
    run = subprocess.run([*command, str(probe)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = {}
    for text in ptx.read_text().split(".entry ")[1:]:
        name = re.search(r"decode_\w*?_kernel", text)
        if name:
            found[name.group()] = text.split("griddepcontrol.wait")
    assert set(found) == {"decode_attend_kernel", "decode_choose_kernel"}
    for before, after in found.values():
        assert "ld.global.nc" in before
        assert "ld.global.nc" not in after
        assert "ld.global" in after


@pytest.mark.parametrize(
    ("capability", "takes"), [((8, 0), (False, False)), ((9, 0), (True, True)), ((12, 0), (True, False))]
)
def test_attention_is_tritons_where_a_block_has_too_little_shared_memory(monkeypatch, capability, takes):
    import torch

    # the second GPU, which need not be the current one
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {"cuda:1": capability}[device])
    given = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, data_ptr=lambda: 256, device="cuda:1")
    assert (decode_cuda.chooses(1, 2880, 32, None, given), decode_cuda.attends(64, 8, 64, 640, given)) == takes
    assert not decode_cuda.attends(64, 8, 64, 737, given)
    for other in ({"is_cuda": False}, {"dtype": torch.float16}, {"data_ptr": lambda: 264}):
        assert not decode_cuda.chooses(1, 2880, 32, given, SimpleNamespace(**vars(given) | other))


def test_a_warp_has_a_stage_of_k_where_weights_wait_in_registers():
    for n, k in ((5120, 2880), (2880, 4096)):
        config = w4a16_configs.choose(NVFP4, 1, n, k)
        assert (config.stream, config.row_warps, config.depth, config.cluster) == (w4a16_configs.RESIDENT, 1, 1, 1)
        assert config.blocks == -(-n // (16 * config.row_tiles))
        assert config.column_warps * w4a16_configs.STAGE_K >= k
        assert 32 * config.column_warps <= {2: 512, 3: 384}[config.row_tiles]
        assert w4a16_configs.choose(NVFP4, 1, n, k, capability=(12, 0)).stream == 0
        assert w4a16_configs.choose(NumberFormat.MXFP4, 1, n, k).stream == 0


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sm90():
    import torch

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the kernels are of SM90 and later")


def glue():
    from requant.validate.decode_fused import FusedGlue

    return FusedGlue(pdl=True)


def randn(*shape):
    import torch

    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.gpu
@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("width", "experts", "top_k"), [(2880, 32, 4), (3072, 32, 8), (96, 5, 3), (2880, 17, 1)])
def test_one_token_is_routed_as_plain_torch_routes_it(width, experts, top_k, normalize):
    import torch
    from requant.validate.decode_glue import Added, PlainGlue
    from requant.validate.decode_model import Router

    torch.manual_seed(width + top_k)
    h, y, norm = torch.randn(1, width, device="cuda"), randn(1, 1, width), randn(width)
    router = Router(randn(experts, width) / width**0.5, top_k, randn(experts), normalize)
    assert decode_cuda.chooses(1, width, experts, y, norm, router.weight, router.bias)
    for bias in (randn(width), None):
        added = Added(y, bias=bias)
        exact = PlainGlue().choose(h, added, norm, 1e-5, router, None, route=False)
        first = glue().choose(h, added, norm, 1e-5, router, None, route=True)
        again = glue().choose(h, added, norm, 1e-5, router, None, route=True)
        assert first.ids.tolist() == exact.ids.tolist()
        torch.testing.assert_close(first.weights, exact.weights, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(first.h, exact.h, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(first.x, exact.x, rtol=2**-7, atol=0)
        for a, b in ((first.x, again.x), (first.weights, again.weights), (first.ids, again.ids)):
            assert torch.equal(a, b)
        at, slots = first.ids.flatten().tolist(), first.routing.data.tolist()
        order = sorted(range(top_k), key=lambda slot: at[slot])
        assert slots[:2] == [top_k, top_k]
        tiles = [number for position, slot in enumerate(order) for number in (at[slot], position, 1, slot)]
        assert slots[4 : 4 + 4 * top_k] == tiles
        assert slots[4 + 4 * top_k :] == [*order, *([0] * top_k)]
    h[0, 5] = torch.nan
    lost = glue().choose(h, Added(y), norm, 1e-5, router, None, route=False).ids.tolist()
    assert lost == [list(range(top_k))]


@pytest.mark.gpu
@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("family", ["biases and sinks", "plain"])
@pytest.mark.parametrize(
    ("heads", "kv", "window", "capacity", "positions"),
    [(64, 8, 0, 640, [512]), (64, 8, 128, 640, [512]), (64, 8, 128, 640, [0]), (16, 2, 0, 736, [735, 256, 255]),
     (9, 3, 0, 700, [639, 640, 0]), (8, 1, 16, 200, [15, 16, 199])],
)  # fmt: skip
def test_new_tokens_attend_as_in_plain_torch_and_write_the_cache(heads, kv, window, capacity, positions, family):
    import torch
    from requant.validate.decode_glue import PlainGlue
    from requant.validate.decode_model import Attention, Matrix

    torch.manual_seed(heads + capacity)
    tokens, none = len(positions), Matrix(NumberFormat.BF16, 0, torch.zeros(1, 1))
    more = {"qkv_bias": randn((heads + 2 * kv) * 64), "sinks": randn(heads)} if family != "plain" else {}
    a = Attention(heads, kv, 64, 64**-0.5, none, none, window=window, **more)
    ours = tuple(randn(tokens, kv, capacity, 64) for _ in range(2))
    for cache, (stream, position) in product(ours, enumerate(positions)):
        cache[stream, :, position + 1 :] = torch.nan  # what lies behind is not looked at
    theirs = tuple(cache.nan_to_num(0.0) for cache in ours)
    angles, at = torch.randn(capacity, 32, device="cuda"), torch.tensor(positions, device="cuda").int()
    tables, qkv = (angles.cos(), angles.sin()), randn(tokens, (heads + 2 * kv) * 64)
    exact = PlainGlue().attend(qkv, a, theirs, at, tables, 1e-5).float()
    outs = []
    for _ in range(2):
        out = torch.full((tokens, heads * 64), torch.nan, dtype=torch.bfloat16, device="cuda")
        decode_cuda.attend(
            qkv, a.qkv_bias, a.sinks, tables, at, ours, out, scale=a.scale, window=window, early_start=True
        )
        outs.append(out)
    assert torch.equal(*outs)
    assert (outs[0].float() - exact).abs().max() < 2**-6 * exact.abs().max()
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.nan_to_num(0.0), wanted, rtol=2**-7, atol=2**-9)


@pytest.mark.gpu
@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "division"),
    [(5120, 2880, None), (2880, 4096, None), (5104, 2880, (12, 3)), (1000, 1024, (5, 2)), (47, 320, (3, 3)),
     (16, 256, (2, 2))],
)  # fmt: skip
def test_a_product_whose_weights_wait_in_registers_is_the_product(n, k, division, early):
    import torch

    torch.manual_seed(n)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x28, 0x48, (n, k // 16), dtype=torch.uint8, device="cuda")
    config = w4a16_configs.choose(NVFP4, 1, n, k)
    if division is not None:
        (warps, tiles), resident = division, w4a16_configs.RESIDENT
        blocks = -(-n // (16 * tiles))
        config = w4a16_configs.Config(warps, 1, blocks, row_tiles=tiles, depth=1, stream=resident)
    assert config.stream == w4a16_configs.RESIDENT
    exact = products(x := torch.randn(1, k).bfloat16(), dequantize(NVFP4, codes.cpu(), scales.cpu(), 0.37))
    for scale, dtype in ((0.37, torch.bfloat16), (torch.tensor([0.37], device="cuda"), torch.float32)):
        outs = []
        for _ in range(2):
            out = torch.full((1, n), torch.nan, dtype=dtype, device="cuda")
            w4a16.w4a16_matmul(
                x.cuda(), codes, scales, scale, fmt=NVFP4, out=out, config=config, constant_weights=early, path="cuda"
            )
            outs.append(out.cpu())
        assert torch.equal(*outs)
        assert excess(outs[0], *exact) <= 1
    x[0, 3] = torch.nan
    assert w4a16.w4a16_matmul(x.cuda(), codes, scales, 0.37, fmt=NVFP4, config=config, path="cuda").isnan().all()
