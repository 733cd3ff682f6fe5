"""Each source format through the whole converter to BF16 and FP4, against decoders written from the formats' texts."""

import json

import ml_dtypes
import numpy as np
import pytest
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES
from requant.kernels.reference import encode_mxfp4, encode_nvfp4, nvfp4_global_scale
from requant.manifests.errors import SourceError

TO_BF16 = [{"match": "*", "to": "bf16"}]
TO_NVFP4 = [{"match": "*_proj", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "bf16"}]
A = "model.layers.0.mlp"


def bf16_of(values):
    """float32 values as BF16 bytes, by another library's rounding."""
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).tobytes()


def words(nibbles):
    """[.., 8n] nibbles as [.., n] I32, the first lowest."""
    out = np.zeros((*nibbles.shape[:-1], nibbles.shape[-1] // 8), np.uint32)
    for i in range(8):
        out |= nibbles[..., i::8].astype(np.uint32) << np.uint32(4 * i)
    return out


def awq_words(nibbles):
    out = np.zeros((nibbles.shape[0], nibbles.shape[1] // 8), np.uint32)
    for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        out |= nibbles[:, column::8].astype(np.uint32) << np.uint32(4 * i)
    return out


def tensor(dtype, array):
    return (dtype, tuple(array.shape), np.ascontiguousarray(array).tobytes())


def e4m3(rng, *shape):
    """Finite E4M3 bytes."""
    values = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where(values & 0x7F == 0x7F, 0x30, values).astype(np.uint8)


def fp4(rng, n, k, group, scales, low, high):
    """(codes [n, k/2], plane [n, k/group], float32 values before any global scale)."""
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    plane = rng.integers(low, high, (n, k // group), dtype=np.uint8)
    values = E2M1_VALUES[codes] * np.repeat(scales[plane], group, axis=1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, plane, values


def fp8_blocks(rng, dtype, block, suffix, n=130, k=320):
    values = e4m3(rng, n, k)
    grid = -(-n // block[0]), -(-k // block[1])
    if dtype == "F8_E8M0":
        scales = rng.integers(115, 122, grid, dtype=np.uint8)
        steps = E8M0_VALUES[scales]
    else:
        scales = steps = (rng.random(grid) * 0.01 + 1e-4).astype("<f4")
    spread = np.repeat(np.repeat(steps, block[0], 0), block[1], 1)[:n, :k]
    tensors = {f"{A}.up_proj.weight": tensor("F8_E4M3", values), f"{A}.up_proj{suffix}": tensor(dtype, scales)}
    return tensors, {f"{A}.up_proj": E4M3_VALUES[values] * spread}


def deepseek_v3(rng):
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return *fp8_blocks(rng, "F32", (128, 128), ".weight_scale_inv"), quant


def small_blocks(rng):
    quant = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    return *fp8_blocks(rng, "F8_E8M0", (32, 32), ".weight_scale_inv"), quant


def mxfp8(rng):
    return *fp8_blocks(rng, "F8_E8M0", (1, 32), ".weight_scale"), {"quant_method": "modelopt", "quant_algo": "MXFP8"}


def modelopt_fp8(rng):
    values, scale = e4m3(rng, 48, 64), np.float32(0.0123)
    tensors = {
        f"{A}.up_proj.weight": tensor("F8_E4M3", values),
        f"{A}.up_proj.weight_scale": ("F32", (), scale.tobytes()),
        f"{A}.up_proj.input_scale": ("F32", (), np.float32(0.5).tobytes()),
    }
    return tensors, {f"{A}.up_proj": E4M3_VALUES[values] * scale}, {"quant_method": "modelopt", "quant_algo": "FP8"}


def channels(rng):
    values, scales = e4m3(rng, 48, 64), (rng.random((48, 1)) + 0.1).astype(ml_dtypes.bfloat16)
    tensors = {
        f"{A}.up_proj.weight": tensor("F8_E4M3", values),
        f"{A}.up_proj.weight_scale": ("BF16", (48, 1), scales.tobytes()),
    }
    want = E4M3_VALUES[values] * scales.astype(np.float32)
    return tensors, {f"{A}.up_proj": want}, {"quant_method": "compressed-tensors", "format": "float-quantized"}


def modelopt_nvfp4(rng):
    codes, plane, values = fp4(rng, 48, 64, 16, E4M3_VALUES, 1, 127)
    s2 = np.float32(3.3e-4)
    tensors = {
        f"{A}.up_proj.weight": tensor("U8", codes),
        f"{A}.up_proj.weight_scale": tensor("F8_E4M3", plane),
        f"{A}.up_proj.weight_scale_2": ("F32", (), s2.tobytes()),
        f"{A}.up_proj.input_scale": ("F32", (), np.float32(0.25).tobytes()),
    }
    return tensors, {f"{A}.up_proj": values * s2}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def quark_nvfp4(rng):
    tensors, want, _ = modelopt_nvfp4(rng)
    renamed = {name.replace("input_scale", "input_scale_2"): value for name, value in tensors.items()}
    return renamed, want, {"quant_method": "quark"}


def ct_nvfp4(rng):
    codes, plane, _ = fp4(rng, 48, 64, 16, E4M3_VALUES, 1, 127)
    divisor = np.float32(2917.3)
    tensors = {
        f"{A}.up_proj.weight_packed": tensor("U8", codes),
        f"{A}.up_proj.weight_scale": tensor("F8_E4M3", plane),
        f"{A}.up_proj.weight_global_scale": ("F32", (1,), divisor.tobytes()),
    }
    both = np.stack([codes & 15, codes >> 4], axis=-1).reshape(48, 64)
    want = E2M1_VALUES[both] * np.repeat(E4M3_VALUES[plane] / divisor, 16, axis=1)  # as compressed-tensors computes
    quant = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "version": "0.20.0"}
    return tensors, {f"{A}.up_proj": want}, quant


def kimi_int4(rng, symmetric=True):
    n, k, group = 16, 96, 32
    codes = rng.integers(0, 16, (n, k))
    scales = rng.random((n, k // group)).astype(ml_dtypes.bfloat16)
    zeros = np.full((n, k // group), 8) if symmetric else rng.integers(0, 16, (n, k // group))
    tensors = {
        f"{A}.up_proj.weight_packed": tensor("I32", words(codes)),
        f"{A}.up_proj.weight_scale": ("BF16", scales.shape, scales.tobytes()),
        f"{A}.up_proj.weight_shape": ("I32", (2,), np.array([n, k], "<i4").tobytes()),
    }
    if not symmetric:
        tensors[f"{A}.up_proj.weight_zero_point"] = tensor("I32", words(zeros.T).T)
    want = (codes - np.repeat(zeros, group, 1)) * np.repeat(scales.astype(np.float64), group, 1)
    weights = {"num_bits": 4, "type": "int", "group_size": group, "symmetric": symmetric}
    quant = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": weights}},
    }
    return tensors, {f"{A}.up_proj": want}, quant


def asymmetric_int4(rng):
    return kimi_int4(rng, symmetric=False)


def gptq(rng, version="gptq", shuffled=True):
    n, k, group = 24, 64, 16
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 15, (k // group, n))
    scales = rng.standard_normal((k // group, n)).astype("<f2")
    order = np.arange(k) // group
    if shuffled:
        rng.shuffle(order)
    tensors = {
        f"{A}.up_proj.qweight": tensor("I32", words(codes).T),
        f"{A}.up_proj.qzeros": tensor("I32", words(zeros)),
        f"{A}.up_proj.scales": tensor("F16", scales),
        f"{A}.up_proj.g_idx": tensor("I32", order.astype("<i4")),
    }
    stored = zeros + (0 if version == "gptq_v2" else 1)
    want = (codes - stored[order].T) * scales.astype(np.float64)[order].T
    quant = {"quant_method": "gptq", "bits": 4, "group_size": group, "checkpoint_format": version}
    return tensors, {f"{A}.up_proj": want}, quant


def gptq_v2(rng):
    return gptq(rng, "gptq_v2", shuffled=False)


def awq(rng):
    n, k, group = 24, 64, 16
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    scales = rng.standard_normal((k // group, n)).astype("<f2")
    tensors = {
        f"{A}.up_proj.qweight": tensor("I32", awq_words(codes)),
        f"{A}.up_proj.qzeros": tensor("I32", awq_words(zeros)),
        f"{A}.up_proj.scales": tensor("F16", scales),
    }
    order = np.arange(k) // group
    want = ((codes - zeros[order]) * scales.astype(np.float64)[order]).T
    return tensors, {f"{A}.up_proj": want}, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}


def half(rng):
    values = rng.standard_normal((32, 64)).astype("<f2")
    return {f"{A}.up_proj.weight": tensor("F16", values)}, {f"{A}.up_proj": values.astype(np.float32)}, None


SOURCES = [
    deepseek_v3, small_blocks, mxfp8, modelopt_fp8, channels, modelopt_nvfp4, quark_nvfp4, ct_nvfp4, kimi_int4,
    asymmetric_int4, gptq, gptq_v2, awq, half,
]  # fmt: skip


def checkpoint(kit, tensors, quant, **config):
    own = {"model_type": "llama", **config}
    if quant is not None:
        own["quantization_config"] = quant
    return kit.write_checkpoint(kit.tmp / "src", [{**tensors, "model.norm.weight": kit.bf16(kit.rng, 64)}], own)


@pytest.mark.parametrize("make", SOURCES)
def test_bf16_is_the_nearest_to_every_weight(kit, make):
    """C20, C21, C31: names, dtypes and nothing but weights are left; the config says nothing of quantization."""
    tensors, want, quant = make(kit.rng)
    output, _ = kit.convert(checkpoint(kit, tensors, quant), TO_BF16, format="bf16")
    found = kit.load(output)
    assert set(found) == {*(f"{module}.weight" for module in want), "model.norm.weight"}
    for module, values in want.items():
        dtype, shape, data = found[f"{module}.weight"]
        assert (dtype, shape) == ("BF16", values.shape)
        assert data == bf16_of(values)
    assert "quantization_config" not in json.loads((output / "config.json").read_text())
    assert not (output / "hf_quant_config.json").exists()


@pytest.mark.parametrize("make", [make for make in SOURCES if "nvfp4" not in make.__name__])
def test_nvfp4_is_the_encoding_of_the_decoded_values(kit, make):
    tensors, want, quant = make(kit.rng)
    output, _ = kit.convert(checkpoint(kit, tensors, quant), TO_NVFP4, format="nvfp4-w4a16")
    found = kit.load(output)
    for module, exact in want.items():
        values = exact.astype(np.float32)
        s2 = nvfp4_global_scale([values])
        codes, plane = encode_nvfp4(values, s2)
        assert found[f"{module}.weight"][2] == codes.tobytes()
        assert found[f"{module}.weight_scale"][2] == plane.tobytes()
        assert found[f"{module}.weight_scale_2"][2] == s2.tobytes()


@pytest.mark.parametrize("make", SOURCES)
def test_mxfp4_is_the_encoding_of_the_decoded_values(kit, make):
    tensors, want, quant = make(kit.rng)
    rules = [{"match": "*_proj", "to": "mxfp4"}, {"match": "*", "to": "bf16"}]
    output, _ = kit.convert(checkpoint(kit, tensors, quant), rules, format="mxfp4", layout="compressed-tensors")
    found = kit.load(output)
    for module, values in want.items():
        codes, plane = encode_mxfp4(values.astype(np.float32))
        assert found[f"{module}.weight_packed"][2] == codes.tobytes()
        assert found[f"{module}.weight_scale"][2] == plane.tobytes()


def test_tiles_and_workers_change_no_byte(kit, monkeypatch):
    """Rows cut anywhere, in blocks of scales too."""
    from requant.convert import decode

    tensors, want, quant = deepseek_v3(kit.rng)
    folder = checkpoint(kit, tensors, quant)
    monkeypatch.setattr(decode, "TILE_WEIGHTS", 320 * 7)
    output, _ = kit.convert(folder, TO_BF16, format="bf16")
    assert kit.load(output)[f"{A}.up_proj.weight"][2] == bf16_of(want[f"{A}.up_proj"])


# --- stacked experts --------------------------------------------------------------------------------------------------


def stack(kit, model_type, turned, interleaved, experts=3, hidden=64, inter=32):
    """(folder, {leaf: [E, N, K]}) of one layer of BF16 experts as the family stores them."""
    rng = kit.rng
    parts = {
        leaf: rng.standard_normal((experts, n, k)).astype(ml_dtypes.bfloat16)
        for leaf, n, k in (("gate_proj", inter, hidden), ("up_proj", inter, hidden), ("down_proj", hidden, inter))
    }
    both = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
    if interleaved:
        both = np.stack([parts["gate_proj"], parts["up_proj"]], axis=2).reshape(experts, 2 * inter, hidden)
    base = "model.layers.0.mlp.experts"
    tensors = {}
    for leaf, values in (("gate_up_proj", both), ("down_proj", parts["down_proj"])):
        stored = values.transpose(0, 2, 1) if turned else values
        tensors[f"{base}.{leaf}"] = ("BF16", stored.shape, np.ascontiguousarray(stored).tobytes())
        if interleaved:
            tensors[f"{base}.{leaf}_bias"] = kit.bf16(rng, experts, values.shape[1])
    config = {"model_type": model_type, "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": 1}
    return kit.write_checkpoint(kit.tmp / "src", [tensors], config), parts


STACKS = [("qwen3_moe", False, False), ("qwen3_vl_moe", True, False), ("llama4", True, False), ("gpt_oss", True, True)]


@pytest.mark.parametrize(("model_type", "turned", "interleaved"), STACKS)
def test_every_expert_becomes_its_own_gate_up_and_down(kit, model_type, turned, interleaved):
    """C24, C25, C26, C28, C79: along the true K, whatever the storage."""
    folder, parts = stack(kit, model_type, turned, interleaved)
    rules = [{"match": "*.experts.*", "to": "nvfp4", "scale": "nearest"}]
    layout = "modelopt-experts" if interleaved else "modelopt"
    output, _ = kit.convert(folder, rules, format="nvfp4-w4a16", layout=layout)
    found = kit.load(output)
    for expert in range(3):
        base = f"model.layers.0.mlp.experts.{expert}"
        pair = [parts[leaf][expert].astype(np.float32) for leaf in ("gate_proj", "up_proj")]
        shared = nvfp4_global_scale(pair)
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            values = parts[leaf][expert].astype(np.float32)
            s2 = nvfp4_global_scale([values]) if leaf == "down_proj" else shared
            codes, plane = encode_nvfp4(values, s2)
            assert found[f"{base}.{leaf}.weight"] == ("U8", codes.shape, codes.tobytes())
            assert found[f"{base}.{leaf}.weight_scale"] == ("F8_E4M3", plane.shape, plane.tobytes())
            assert found[f"{base}.{leaf}.weight_scale_2"][2] == s2.tobytes()
    assert ("model.layers.0.mlp.experts.0.gate_proj.bias" in found) == interleaved


def test_a_square_expert_is_turned_by_its_family_and_not_by_its_shape(kit):
    """C25: hidden = intermediate."""
    folder, parts = stack(kit, "gpt_oss", True, True, hidden=64, inter=64)
    rules = [{"match": "*.experts.*", "to": "nvfp4", "scale": "nearest"}]
    output, _ = kit.convert(folder, rules, format="nvfp4-w4a16", layout="modelopt-experts")
    values = parts["down_proj"][1].astype(np.float32)
    codes, _ = encode_nvfp4(values, nvfp4_global_scale([values]))
    assert kit.load(output)["model.layers.0.mlp.experts.1.down_proj.weight"][2] == codes.tobytes()


def test_experts_stacked_otherwise_than_their_family_are_refused(kit):
    folder, _ = stack(kit, "qwen3_moe", True, False)
    with pytest.raises(SourceError, match=r"is \[3, 64, 64\]|is \[3, 32, 64\], expected \[3, 64, 32\]"):
        kit.job(folder, [{"match": "*.experts.*", "to": "nvfp4", "scale": "nearest"}], format="nvfp4-w4a16")


def test_stacks_of_an_unknown_family_are_kept_and_said(kit):
    folder, _ = stack(kit, "zzz_v9", True, False)
    rules = [{"match": "*", "to": "nvfp4", "scale": "nearest", "optional": True}]
    plan = kit.job(folder, rules, format="nvfp4-w4a16").plan
    assert plan.rules[0].notes == {"stacked weights without scales: kept": 2}


# --- what a source must not be ----------------------------------------------------------------------------------------


def refused(kit, tensors, quant, rules=TO_NVFP4, **target):
    """The error of planning or running, which must be one of the source."""
    with pytest.raises(SourceError) as caught:
        kit.convert(checkpoint(kit, tensors, quant), rules, **{"format": "nvfp4-w4a16", **target})
    assert caught.value.exit_code == 3
    assert not (kit.tmp / "out").exists()
    return str(caught.value)


def test_a_missing_scale_names_weight_and_scale(kit):
    """C20."""
    tensors, _, quant = deepseek_v3(kit.rng)
    del tensors[f"{A}.up_proj.weight_scale_inv"]
    message = refused(kit, tensors, quant)
    assert f"{A}.up_proj.weight: F8_E4M3 weight has no scale tensor {A}.up_proj.weight_scale_inv" in message


def test_a_grid_that_contradicts_the_config_is_refused(kit):
    """C87: never guessed from the grid."""
    tensors, _, quant = deepseek_v3(kit.rng)
    message = refused(kit, tensors, {**quant, "weight_block_size": [100, 100]})
    assert "scale grid is [2, 3] for a weight [130, 320]: blocks of [100, 100] need [2, 4]" in message


@pytest.mark.parametrize(("value", "what"), [(np.nan, "nan"), (np.inf, "inf"), (-1.0, "-1.0")])
def test_scales_that_are_no_scales_are_named(kit, value, what):
    tensors, _, quant = deepseek_v3(kit.rng)
    scales = np.ones((2, 3), "<f4")
    scales[1, 2] = value
    tensors[f"{A}.up_proj.weight_scale_inv"] = tensor("F32", scales)
    message = refused(kit, tensors, quant)
    assert f"{A}.up_proj.weight_scale_inv: scale" in message
    assert what in message
    assert "at row 1, column 2" in message


@pytest.mark.parametrize("target", ["nvfp4-w4a16", "bf16", "fp8"])
def test_nan_weights_are_named_by_row_and_column(kit, target):
    tensors, _, quant = deepseek_v3(kit.rng)
    values = np.frombuffer(tensors[f"{A}.up_proj.weight"][2], np.uint8).reshape(130, 320).copy()
    values[129, 317] = 0xFF
    tensors[f"{A}.up_proj.weight"] = tensor("F8_E4M3", values)
    to = {"match": "*_proj", "to": target.partition("-")[0]} | ({"scale": "nearest"} if "nvfp4" in target else {})
    message = refused(kit, tensors, quant, [to, {"match": "*", "to": "keep"}], format=target)
    assert f"{A}.up_proj.weight: value at row 129, column 317 is NaN" in message


def test_a_global_scale_of_zero_is_refused(kit):
    """C05."""
    tensors, _, quant = modelopt_nvfp4(kit.rng)
    tensors[f"{A}.up_proj.weight_scale_2"] = ("F32", (), bytes(4))
    assert "global scale is np.float32(0.0)" in refused(kit, tensors, quant, TO_BF16, format="bf16")


def test_an_e4m3_plane_without_a_global_scale_is_no_nvfp4(kit):
    """C18, C22."""
    tensors, _, quant = modelopt_nvfp4(kit.rng)
    del tensors[f"{A}.up_proj.weight_scale_2"]
    assert f"no global scale {A}.up_proj.weight_scale_2" in refused(kit, tensors, quant)


def test_two_types_in_one_fused_group_are_refused(kit):
    tensors = {
        f"{A}.gate_proj.weight": kit.bf16(kit.rng, 32, 64),
        f"{A}.up_proj.weight": tensor("F32", kit.rng.standard_normal((32, 64)).astype("<f4")),
    }
    assert "the weights of a fused group are of two types" in refused(kit, tensors, None)


def test_packed_weights_are_never_taken_for_plain_ones(kit):
    """A second quantization of what is packed already, under a layout that does not know it."""
    tensors, _, quant = modelopt_nvfp4(kit.rng)
    path = kit.tmp / "m.yaml"
    text = kit.manifest_text(checkpoint(kit, tensors, quant), kit.tmp / "out", TO_NVFP4, format="nvfp4-w4a16")
    path.write_text(text.replace("source:\n", "source:\n  layout: plain\n"))
    from requant.convert.pipeline import prepare

    with pytest.raises(SourceError, match="which layout plain has no use for"):
        prepare(str(path))


@pytest.mark.parametrize(
    ("quant", "words_of_error"),
    [({"bits": 8}, "has 8 bits"), ({"bits": 3}, "has 3 bits")],
)
def test_gptq_of_other_bits_is_refused(kit, quant, words_of_error):
    tensors, _, own = gptq(kit.rng)
    assert words_of_error in refused(kit, tensors, {**own, **quant})


def test_awq_of_another_kernel_is_refused(kit):
    tensors, _, own = awq(kit.rng)
    assert "AWQ version is gemv" in refused(kit, tensors, {**own, "version": "gemv"})


def test_a_group_index_out_of_range_is_refused(kit):
    tensors, _, quant = gptq(kit.rng)
    tensors[f"{A}.up_proj.g_idx"] = tensor("I32", np.full(64, 4, "<i4"))
    assert "names group 4 or 4 of 4" in refused(kit, tensors, quant)


def test_awqs_vectors_beside_nvfp4_are_refused(kit):
    tensors, _, quant = modelopt_nvfp4(kit.rng)
    tensors[f"{A}.up_proj.pre_quant_scale"] = kit.bf16(kit.rng, 64)
    assert "belongs to the weight (AWQ)" in refused(kit, tensors, quant)
