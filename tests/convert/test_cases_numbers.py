"""What others got wrong with block scales, E8M0 and packed halves (catalogue sections 1 to 5), on whole checkpoints.

Ids in the docstrings are those of the failure catalogue. Values are decoded here with tables of their own, not with the
code under test.
"""

import json
import struct

import numpy as np
import pytest
from requant.manifests.errors import ManifestError, SourceError, UsageError

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPERT = "layers.0.ffn.experts.0"
RULE = [{"match": "*", "to": "nvfp4"}]


def e4m3(byte):
    """Value of an E4M3 byte (OCP: bias 7, subnormals m/8 * 2^-6, 0x7F and 0xFF NaN)."""
    byte = np.asarray(byte, np.uint8).astype(int)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value = np.where(byte & 127 == 127, np.nan, value)
    return np.where(byte & 128, -value, value)


def nibbles(codes):
    """Codes [N, K] of packed bytes: the low nibble is the even element."""
    codes = np.asarray(codes, np.uint8)
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)


def mx_values(codes, scales):
    return E2M1[nibbles(codes)] * 2.0 ** (np.repeat(np.asarray(scales, int), 32, axis=1) - 127)


def weight(codes, scales, dtype="I8", scale_dtype="F8_E8M0"):
    """(codes tensor, scale tensor) for packed codes [N, K/2] and E8M0 bytes [N, K/32]."""
    codes, scales = np.asarray(codes, np.uint8), np.asarray(scales, np.uint8)
    return (dtype, codes.shape, codes.tobytes()), (scale_dtype, scales.shape, scales.tobytes())


class Converted:
    """An output's weights with their values."""

    def __init__(self, folder, load):
        self.tensors = load(folder)
        self.lock = json.loads((folder / "requant.lock.json").read_text())
        self.groups = self.lock["groups"]

    def codes(self, module):
        _, shape, data = self.tensors[f"{module}.weight"]
        return np.frombuffer(data, np.uint8).reshape(shape)

    def scales(self, module):
        dtype, shape, data = self.tensors[f"{module}.weight_scale"]
        assert dtype == "F8_E4M3"
        return np.frombuffer(data, np.uint8).reshape(shape)

    def global_scale(self, module):
        dtype, shape, data = self.tensors[f"{module}.weight_scale_2"]
        assert (dtype, shape) == ("F32", ())
        return struct.unpack("<f", data)[0]

    def values(self, module):
        scales = np.repeat(e4m3(self.scales(module)), 16, axis=1)
        return E2M1[nibbles(self.codes(module))] * scales * self.global_scale(module)


@pytest.fixture
def convert(kit):
    """Converts {leaf: (codes, scales)} of one expert; the output."""

    def call(weights, **target):
        tensors = {}
        for leaf, (codes, scales) in weights.items():
            name = f"{EXPERT}.{leaf}"
            tensors[f"{name}.weight"], tensors[f"{name}.scale"] = weight(codes, scales)
        source = kit.write_checkpoint(kit.tmp / "src", [tensors], kit.DSV4_CONFIG)
        return Converted(kit.convert(source, RULE, **target)[0], kit.load)

    return call


def random_codes(kit, n, k):
    return kit.rng.integers(0, 256, (n, k // 2), dtype=np.uint8)


# --- block and global scales ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [0, 5, 14, 15, 17, 18, 25, 60, 254])
def test_no_written_block_scale_is_nan_negative_or_zero_over_values(kit, convert, span):
    """C01, C03, C05."""
    codes = random_codes(kit, 32, 256)
    codes[3] = 0  # dead rows, live rows, and half-dead blocks
    codes[:, :4] = 0x80
    scales = (
        kit.rng.integers(254 - span, 255, (32, 8), dtype=np.uint8) if span < 254 else kit.rng.integers(0, 255, (32, 8))
    )
    out = convert({"w2": (codes, scales)})
    written = out.scales(f"{EXPERT}.w2")
    assert ((written & 0x7F) != 0x7F).all()
    assert (written < 0x80).all()
    live = (nibbles(out.codes(f"{EXPERT}.w2")).reshape(32, 16, 16) & 7 != 0).any(-1)
    assert (written[live] > 0).all()
    assert np.isfinite(out.global_scale(f"{EXPERT}.w2"))
    assert out.global_scale(f"{EXPERT}.w2") > 0


def test_the_largest_block_scale_is_256_so_that_marlin_need_not_guess(kit, convert):
    """C04."""
    out = convert({"w2": (random_codes(kit, 16, 64), kit.rng.integers(100, 115, (16, 2)).clip(100, 114))})
    assert e4m3(out.scales(f"{EXPERT}.w2")).max() == 256.0
    assert e4m3(out.scales(f"{EXPERT}.w2")).min() >= 2.0**-6


def test_a_dead_tensor_has_a_global_scale_of_one_and_its_codes(kit, convert):
    """C05: zeros under exponents that differ, so that codes are looked at."""
    codes = np.full((16, 32), 0x80, np.uint8)
    out = convert({"w2": (codes, [[90, 127]] * 16)})
    assert out.global_scale(f"{EXPERT}.w2") == 1.0
    assert (out.codes(f"{EXPERT}.w2") == codes).all()
    assert (out.scales(f"{EXPERT}.w2") == 0x08).all()


def test_all_256_code_bytes_survive_with_their_negative_zeros(kit, convert):
    """C09."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (2, 1))
    out = convert({"w2": (codes, kit.rng.integers(110, 120, (2, 16)))})
    assert (out.codes(f"{EXPERT}.w2") == codes).all()
    assert nibbles(out.codes(f"{EXPERT}.w2"))[0, 16] == 8


@pytest.mark.parametrize("delta", range(18))
def test_every_e4m3_power_of_two_that_is_written_has_its_value(convert, delta):
    """C08: subnormal block scales included."""
    codes = np.full((1, 32), 0x71, np.uint8)  # 0.5 and 6: no half of them can be shifted
    out = convert({"w2": (codes, [[127, 127 - delta]])})
    assert (out.values(f"{EXPERT}.w2") == mx_values(codes, [[127, 127 - delta]])).all()
    assert out.groups["lossy"] == 0


def test_two_runs_give_the_same_bytes_whatever_the_number_of_rows(kit, convert):
    """C06: there is no padding that could hold anything."""
    codes, scales = random_codes(kit, 20, 64), kit.rng.integers(100, 125, (20, 2))
    first = convert({"w2": (codes, scales)}).tensors
    second = Converted(kit.convert(kit.tmp / "src", RULE, output="again")[0], kit.load).tensors
    assert first == second
    assert first[f"{EXPERT}.w2.weight_scale"][1] == (20, 4)


# --- E8M0 -------------------------------------------------------------------------------------------------------------


def test_scale_byte_0_is_2_to_the_minus_127(kit, convert):
    """C10, C12: neither zero nor a mark of an empty block."""
    codes = random_codes(kit, 4, 64) | 0x11
    scales = np.array([[0, 1], [0, 0], [2, 1], [0, 2]])
    out = convert({"w2": (codes, scales)})
    assert (out.values(f"{EXPERT}.w2") == mx_values(codes, scales)).all()
    assert out.groups["exact"] == 16


def test_a_live_block_of_scale_0_far_below_the_others_is_counted_lossy(convert):
    """C12."""
    codes = np.full((1, 32), 0x75, np.uint8)
    out = convert({"w2": (codes, [[127, 0]])})
    assert (out.groups["exact"], out.groups["lossy"]) == (2, 2)
    assert out.groups["notable"][0]["group"] == f"{EXPERT}.w2"


def test_scale_byte_254_is_exact_too(kit, convert):
    codes = random_codes(kit, 2, 64)
    out = convert({"w2": (codes, [[254, 250], [247, 254]])})
    assert (out.values(f"{EXPERT}.w2") == mx_values(codes, [[254, 250], [247, 254]])).all()


@pytest.mark.parametrize(("row", "block"), [(0, 0), (7, 3), (15, 1)])
def test_a_nan_scale_stops_the_run_naming_tensor_row_and_block(kit, convert, row, block):
    """C10: even over zeros; 255 is neither infinity nor a large exponent."""
    codes, scales = np.zeros((16, 64), np.uint8), np.full((16, 4), 120)
    scales[row, block] = 255
    with pytest.raises(
        SourceError, match=rf"model.safetensors: {EXPERT}.w1.scale: E8M0 scale 255 \(NaN\) at row {row}, block {block}"
    ):
        convert({"w1": (codes, scales)})
    assert not (kit.tmp / "out").exists()


def test_a_dead_blocks_huge_exponent_does_not_flush_the_live_ones(kit, convert):
    """C11: error was 1e32 where k_max was taken over scale bytes."""
    codes = random_codes(kit, 1, 64)
    codes[:, :16] = 0x08  # zeros, one of them negative
    out = convert({"w2": (codes, [[250, 120]])})
    assert (out.values(f"{EXPERT}.w2") == mx_values(codes, [[250, 120]])).all()
    assert (out.codes(f"{EXPERT}.w2") == codes).all()
    assert (out.groups["exact"], out.groups["lossy"]) == (4, 0)


def test_the_window_ends_at_17_and_what_lies_outside_is_re_encoded_not_clamped(convert):
    """C13: verbatim codes under a clamped scale turned 4.5e-8 into 4.6e-5."""
    codes = np.full((1, 32), 0x75, np.uint8)  # 3 and 6: halving gives 1.5 and 3
    codes[:, ::4] = 0x71  # 0.5 and 6: cannot be shifted either way
    inside = convert({"w2": (codes, [[127, 110]])})
    assert (inside.groups["exact"], inside.groups["lossy"]) == (4, 0)
    assert (inside.values(f"{EXPERT}.w2") == mx_values(codes, [[127, 110]])).all()


def test_one_octave_outside_the_window_is_lossy_small_and_counted(convert):
    """C13."""
    codes = np.full((1, 32), 0x75, np.uint8)
    codes[:, ::4] = 0x71
    out = convert({"w2": (codes, [[127, 109]])})
    want = mx_values(codes, [[127, 109]])
    error = np.abs(out.values(f"{EXPERT}.w2") - want)
    assert (out.groups["exact"], out.groups["shifted"], out.groups["lossy"]) == (2, 0, 2)
    assert (error[:, :32] == 0).all()
    assert error.max() <= 0.25 * 2.0 ** (109 - 127) * 2  # half a step of the code grid one octave up
    clamped = 6 * 2.0 ** (110 - 127) - 6 * 2.0 ** (109 - 127)
    assert error.max() < clamped / 8


def test_blocks_outside_the_window_shift_exactly_where_their_codes_allow(convert):
    codes = np.full((1, 32), 0x75, np.uint8)  # 3 and 6 halve to 1.5 and 3
    out = convert({"w2": (codes, [[127, 109]])})
    assert (out.groups["exact"], out.groups["shifted"], out.groups["lossy"]) == (2, 2, 0)
    assert (out.values(f"{EXPERT}.w2") == mx_values(codes, [[127, 109]])).all()


def test_small_scale_bytes_are_kept_exactly(kit, convert):
    """C17."""
    codes, scales = random_codes(kit, 4, 64), np.arange(100, 108).reshape(4, 2) + 4
    out = convert({"w2": (codes, scales)})
    assert (out.values(f"{EXPERT}.w2") == mx_values(codes, scales)).all()


def test_nibbles_and_fp8_of_one_byte_each_are_told_apart(kit):
    """C19, C61."""
    tensors = kit.deepseek(kit.rng, experts=1, hidden=64, inter=32)
    wo_b = kit.rng.bytes(64 * 64)
    tensors["layers.0.attn.wo_b.weight"] = ("F8_E4M3", (64, 64), wo_b)
    output, _ = kit.convert(kit.write_checkpoint(kit.tmp / "src", [tensors], kit.DSV4_CONFIG))
    found = kit.load(output)
    assert found["layers.0.attn.wo_b.weight"] == ("F8_E4M3", (64, 64), wo_b)
    assert found["layers.0.attn.wo_b.scale"] == tensors["layers.0.attn.wo_b.scale"]
    assert found[f"{EXPERT}.w1.weight"][:2] == ("U8", (32, 32))
    assert f"{EXPERT}.w1.scale" not in found
    assert not [n for n in found if n.endswith("_inv")]


# --- nibbles, rows, dialects ------------------------------------------------------------------------------------------


def test_the_low_nibble_is_the_even_element(convert):
    """C29, C30: 0x21 is 0.5, then 1.0."""
    out = convert({"w2": (np.full((1, 16), 0x21, np.uint8), [[127]])})
    assert out.values(f"{EXPERT}.w2")[0, :4].tolist() == [0.5, 1.0, 0.5, 1.0]


def gpt_oss_with_marks(kit, experts=2, hidden=64, inter=32):
    """gate_up rows g0, u0, g1, u1, ...: gate codes 2 (+1), up codes 9 (-0.5); scale and bias tell the row."""
    tensors = kit.gpt_oss(kit.rng, experts=experts, hidden=hidden, inter=inter)
    base = "model.layers.0.mlp.experts.gate_up_proj"
    rows = np.tile(np.array([0x22, 0x99], np.uint8), inter)
    blocks = np.broadcast_to(rows[None, :, None, None], (experts, 2 * inter, hidden // 32, 16))
    scales = np.broadcast_to(
        (100 + np.arange(2 * inter) % 14).astype(np.uint8)[None, :, None], (experts, 2 * inter, hidden // 32)
    )
    bias = np.broadcast_to(np.arange(2 * inter, dtype=np.uint16), (experts, 2 * inter))
    tensors[f"{base}_blocks"] = ("U8", blocks.shape, blocks.tobytes())
    tensors[f"{base}_scales"] = ("U8", scales.shape, scales.tobytes())
    tensors[f"{base}_bias"] = ("BF16", bias.shape, bias.astype("<u2").tobytes())
    return kit.write_checkpoint(kit.tmp / "src", [tensors], kit.GPT_OSS_CONFIG)


GPT_OSS_RULES = [{"match": "*.experts.*_proj", "to": "nvfp4"}, {"match": "*", "to": "keep"}]


def test_gate_and_up_rows_their_scales_and_biases_are_taken_apart_together(kit):
    """C23, C24, C28: even rows are gate, odd rows up; each under its own name."""
    out = Converted(kit.convert(gpt_oss_with_marks(kit), GPT_OSS_RULES, layout="modelopt-experts")[0], kit.load)
    for expert in range(2):
        for offset, leaf, value in ((0, "gate_proj", 1.0), (1, "up_proj", -0.5)):
            module = f"model.layers.0.mlp.experts.{expert}.{leaf}"
            rows = np.arange(offset, 64, 2)
            want = np.broadcast_to((value * 2.0 ** (100 + rows % 14 - 127))[:, None], (32, 64))
            assert (out.values(module) == want).all()
            assert out.tensors[f"{module}.bias"] == ("BF16", (32,), rows.astype("<u2").tobytes())


def test_every_packed_weight_has_its_three_scales(kit):
    """C23, C43: the same set of tensors for every expert."""
    out = Converted(
        kit.convert(gpt_oss_with_marks(kit, experts=3), GPT_OSS_RULES, layout="modelopt-experts")[0], kit.load
    )
    sets = {}
    for name in out.tensors:
        if ".experts." in name:
            module, _, leaf = name.rpartition(".")
            sets.setdefault(module, set()).add(leaf)
    assert len(sets) == 9
    assert set(map(frozenset, sets.values())) == {
        frozenset({"weight", "weight_scale", "weight_scale_2", "input_scale", "bias"})
    }


def test_square_projections_are_not_transposed_by_their_shape(kit):
    """C25: hidden equals intermediate; orientation comes from the layout."""
    tensors = kit.gpt_oss(kit.rng, experts=1, hidden=64, inter=64)
    source = kit.write_checkpoint(kit.tmp / "src", [tensors], kit.GPT_OSS_CONFIG)
    out = Converted(kit.convert(source, GPT_OSS_RULES, layout="modelopt-experts")[0], kit.load)
    base = "model.layers.0.mlp.experts"
    blocks = np.frombuffer(tensors[f"{base}.down_proj_blocks"][2], np.uint8).reshape(64, 32)
    scales = np.frombuffer(tensors[f"{base}.down_proj_scales"][2], np.uint8).reshape(64, 2)
    assert (out.values(f"{base}.0.down_proj") == mx_values(blocks, scales)).all()
    stacked, _ = kit.convert(source, GPT_OSS_RULES, output="stacked")
    _, shape, data = kit.load(stacked)[f"{base}.down_proj"]
    assert shape == (1, 32, 64)
    assert (np.frombuffer(data, np.uint8).reshape(32, 64) == blocks.T).all()


def test_compressed_tensors_globals_are_the_reciprocals_of_modelopts(kit):
    """C31: a divisor there, a multiplier here; everything else equal."""
    source = kit.dsv4()
    name = f"{EXPERT}.w1"
    codes, scales = kit.mx(kit.rng, 32, 64, low=100, high=110, codes="U8", scales="U8")
    tensors = {f"{name}.weight_packed": codes, f"{name}.weight_scale": scales}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}
    source = kit.write_checkpoint(kit.tmp / "ct", [tensors], config)
    theirs = kit.load(kit.convert(source, RULE, output="ct-out", layout="compressed-tensors")[0])
    ours = kit.load(kit.convert(source, RULE, output="mo-out")[0])
    multiplier = struct.unpack("<f", ours[f"{name}.weight_scale_2"][2])[0]
    divisor = struct.unpack("<f", theirs[f"{name}.weight_global_scale"][2])[0]
    assert theirs[f"{name}.weight_global_scale"][:2] == ("F32", (1,))
    assert multiplier == 2.0 ** (int(np.frombuffer(scales[2], np.uint8).max()) - 127 - 8)
    assert divisor * multiplier == 1.0
    assert divisor > 1 > multiplier
    assert theirs[f"{name}.weight_packed"] == ours[f"{name}.weight"]
    assert theirs[f"{name}.weight_scale"] == ours[f"{name}.weight_scale"]


def test_scale_planes_are_linear_and_unpadded(kit, convert):
    """C32."""
    codes, scales = random_codes(kit, 40, 96), np.arange(120).reshape(40, 3) % 14 + 100
    out = convert({"w2": (codes, scales)})
    assert out.tensors[f"{EXPERT}.w2.weight_scale"][1] == (40, 6)
    m = 113 - 127 - 8
    want = np.repeat(2.0 ** (scales - 127 - m), 2, axis=1)
    assert (e4m3(out.scales(f"{EXPERT}.w2")) == want).all()


def test_scalars_are_little_endian_f32_whatever_the_host(convert):
    """C105."""
    out = convert({"w2": (np.full((1, 16), 0x21, np.uint8), [[127]])}, activations={"input_scale": 0.75})
    assert out.tensors[f"{EXPERT}.w2.weight_scale_2"] == ("F32", (), bytes.fromhex("0000803b"))  # 2^-8
    assert out.tensors[f"{EXPERT}.w2.input_scale"] == ("F32", (), bytes.fromhex("0000403f"))


# --- shared scales ----------------------------------------------------------------------------------------------------


def test_gate_and_up_share_the_global_scale_that_holds_both(kit, convert):
    """C36, C37: w1 around 127, w3 around 120."""
    weights = {"w1": (random_codes(kit, 8, 64), [[127, 126]] * 8), "w3": (random_codes(kit, 8, 64), [[120, 119]] * 8)}
    out = convert(weights)
    assert out.global_scale(f"{EXPERT}.w1") == out.global_scale(f"{EXPERT}.w3") == 2.0**-8
    for leaf, (codes, scales) in weights.items():
        assert (out.values(f"{EXPERT}.{leaf}") == mx_values(codes, scales)).all()


def test_what_sharing_costs_is_counted(convert):
    """C37: alone each would be exact; together w3 lies outside w1's window."""
    codes = np.full((1, 16), 0x71, np.uint8)
    out = convert({"w1": (codes, [[127]]), "w3": (codes, [[100]]), "w2": (codes, [[100]])})
    assert out.groups["lossy"] == 2
    assert [g["group"] for g in out.groups["notable"]] == [f"{EXPERT}.w1+w3"]


@pytest.mark.parametrize("shards", [[("q_proj",), ("k_proj", "v_proj")], [("v_proj",), ("k_proj",), ("q_proj",)]])
def test_partners_in_different_shards_share_too(kit, shards):
    """C36, C39: q x1, k x4, v x0.25."""
    exponents = {"q_proj": 120, "k_proj": 122, "v_proj": 118}
    parts = []
    for leaves in shards:
        part = {}
        for leaf in leaves:
            name = f"model.layers.0.self_attn.{leaf}"
            codes = kit.rng.integers(0, 256, (16, 32), dtype=np.uint8)
            part[f"{name}.weight"], part[f"{name}.weight_scale"] = weight(
                codes, [[exponents[leaf]] * 2] * 16, "U8", "U8"
            )
        parts.append(part)
    source = kit.write_checkpoint(kit.tmp / "src", parts, {"quantization_config": {"quant_method": "quark"}})
    out = Converted(kit.convert(source, RULE)[0], kit.load)
    assert {out.global_scale(f"model.layers.0.self_attn.{leaf}") for leaf in exponents} == {2.0 ** (122 - 127 - 8)}
    tops = {leaf: e4m3(out.scales(f"model.layers.0.self_attn.{leaf}")).max() for leaf in exponents}
    assert tops == {"q_proj": 64.0, "k_proj": 256.0, "v_proj": 16.0}


# --- activation scales ------------------------------------------------------------------------------------------------


def calibrated(kit, values, reciprocal=False, broken=None):
    """Another NVFP4 checkpoint of the model, of which only the activation scales matter."""
    tensors = {}
    for leaf, value in values.items():
        suffix = "input_global_scale" if reciprocal else "input_scale"
        raw = np.float32(1 / value if reciprocal else value).tobytes()
        tensors[f"{EXPERT}.{leaf}.{suffix}"] = broken or ("F32", (1,) if reciprocal else (), raw)
    return kit.write_checkpoint(kit.tmp / "calibrated", [tensors], {})


def expert_source(kit):
    tensors = {}
    for leaf in ("w1", "w2", "w3"):
        tensors[f"{EXPERT}.{leaf}.weight"], tensors[f"{EXPERT}.{leaf}.scale"] = kit.mx(kit.rng, 32, 32)
    return kit.write_checkpoint(kit.tmp / "src", [tensors], kit.DSV4_CONFIG)


@pytest.mark.parametrize("reciprocal", [False, True], ids=["modelopt", "compressed-tensors"])
def test_activation_scales_of_another_checkpoint_are_copied_and_shared_by_the_larger(kit, reciprocal):
    """C31, C36."""
    other = calibrated(kit, {"w1": 0.5, "w2": 0.125, "w3": 2.0}, reciprocal)
    output, _ = kit.convert(expert_source(kit), RULE, activations={"input_scale": {"from": str(other)}})
    found = kit.load(output)
    scales = {leaf: struct.unpack("<f", found[f"{EXPERT}.{leaf}.input_scale"][2])[0] for leaf in ("w1", "w2", "w3")}
    assert scales == {"w1": 2.0, "w2": 0.125, "w3": 2.0}
    note = json.loads((output / "requant.lock.json").read_text())["input_scale"]
    assert "3 scales" in note


def test_a_missing_activation_scale_is_an_error_that_names_the_module(kit):
    """C43: experts never routed to have none; 1/0 made them NaN for some prompts."""
    other = calibrated(kit, {"w1": 0.5, "w3": 2.0})
    with pytest.raises(SourceError, match=rf"no input_scale for 1 modules: {EXPERT}.w2"):
        kit.convert(expert_source(kit), RULE, activations={"input_scale": {"from": str(other)}})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_an_activation_scale_that_is_not_positive_and_finite_is_an_error(kit, value):
    """C46."""
    other = calibrated(kit, {"w1": 0.5, "w2": value, "w3": 2.0})
    with pytest.raises(SourceError, match=rf"{EXPERT}.w2.input_scale: activation scale is"):
        kit.convert(expert_source(kit), RULE, activations={"input_scale": {"from": str(other)}})


@pytest.mark.parametrize("broken", [("BF16", (), b"\x80\x3f"), ("F32", (2,), bytes(8))])
def test_an_activation_scale_of_another_dtype_or_shape_is_an_error(kit, broken):
    other = calibrated(kit, {"w1": 0.5}, broken=broken)
    with pytest.raises(SourceError, match=r"expected one F32"):
        kit.convert(expert_source(kit), RULE, activations={"input_scale": {"from": str(other)}})


def test_nvfp4_without_an_activation_scale_is_an_error_not_a_guess(kit):
    """C45."""
    with pytest.raises((ManifestError, UsageError), match="input_scale") as caught:
        kit.convert(expert_source(kit), RULE, activations={"input_scale": None})
    assert caught.value.exit_code == 2


def test_weight_only_output_has_no_activation_scales_anywhere(kit):
    """C44, C45."""
    source = kit.write_checkpoint(kit.tmp / "gpt-oss", [kit.gpt_oss(kit.rng)], kit.GPT_OSS_CONFIG)
    rules = [{"match": "*.experts.*", "to": "nvfp4"}, {"match": "*", "to": "keep"}]
    output, _ = kit.convert(source, rules, format="nvfp4-w4a16")
    assert not [n for n in kit.load(output) if "input" in n]


def test_bits_per_weight_are_what_the_format_has(kit):
    """C79, C80: 4.5 bits for NVFP4, and no weight of another kind."""
    codes, scales = kit.mx(kit.rng, 512, 1024)
    tensors = {f"{EXPERT}.w2.weight": codes, f"{EXPERT}.w2.scale": scales}
    source = kit.write_checkpoint(kit.tmp / "src", [tensors], kit.DSV4_CONFIG)
    found = kit.load(kit.convert(source, RULE)[0])
    bits = sum(len(data) for _, _, data in found.values()) * 8 / (512 * 1024)
    assert bits == pytest.approx(4.5, abs=0.001)
    assert sorted(dtype for dtype, _, _ in found.values()) == ["F32", "F32", "F8_E4M3", "U8"]
