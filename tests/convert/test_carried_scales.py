"""What a source knows already goes along: static activation scales, and global scales, shared or not."""

import json

import ml_dtypes
import numpy as np
import pytest
from requant.kernels.reference import dequantize_nvfp4
from requant.manifests.errors import SourceError
from requant.validate.contract import check_contract
from requant.validate.numerics import check_numerics
from requant.validate.numerics_pieces import PiecewiseNumerics

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
KEEP = {"match": "*", "to": "keep"}
RULES = {
    to: [{"match": "*_proj", "to": to, **({"scale": "nearest"} if to == "nvfp4" else {})}, KEEP]
    for to in ("nvfp4", "fp8")
}
RELAYOUT = [{"match": "*_proj", "to": "nvfp4"}, KEEP]
N, K = 32, 64


def f32(found, name):
    dtype, _, data = found[name]
    assert dtype == "F32"
    return np.frombuffer(data, "<f4")[0]


def quant(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def checkpoint(kit, tensors, quantization, name="src"):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    return kit.write_checkpoint(kit.tmp / name, [{**tensors, "model.norm.weight": kit.bf16(kit.rng, 64)}], config)


# --- activation scales ------------------------------------------------------------------------------------------------

INPUTS = {"q_proj": 0.25, "k_proj": 0.5, "v_proj": 0.125, "o_proj": 0.75}


def static_fp8(kit, dialect, dtype="F32", inputs=INPUTS):
    """Per-tensor FP8 attention with static activation scales, as modelopt or compressed-tensors store it."""
    tensors = {}
    for leaf, scale in inputs.items():
        name = f"{ATTENTION}.{leaf}"
        tensors[f"{name}.weight"] = ("F8_E4M3", (N, K), kit.rng.integers(0, 0x7F, N * K, dtype=np.uint8).tobytes())
        shape = () if dialect == "modelopt" else (1,)
        tensors[f"{name}.weight_scale"] = ("F32", shape, kit.f32(0.01))
        if scale is not None:
            raw = kit.f32(scale) if dtype == "F32" else np.array(scale, ml_dtypes.bfloat16).tobytes()
            tensors[f"{name}.input_scale"] = (dtype, shape, raw)
    kinds = {
        "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
        "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    }
    return checkpoint(kit, tensors, kinds[dialect])


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(
    ("dialect", "dtype"), [("modelopt", "F32"), ("compressed-tensors", "F32"), ("compressed-tensors", "BF16")]
)
def test_static_fp8_scales_go_from_layout_to_layout(kit, dialect, dtype, target):
    rules = [{"match": "*_proj", "to": "fp8", "granularity": "tensor"}, KEEP]
    output, _ = kit.convert(static_fp8(kit, dialect, dtype), rules, format="fp8", layout=target)
    found = kit.load(output)
    for leaf, scale in INPUTS.items():
        assert f32(found, f"{ATTENTION}.{leaf}.input_scale") == np.float32(scale)
        assert found[f"{ATTENTION}.{leaf}.input_scale"][1] == (() if target == "modelopt" else (1,))
    group = quant(output)["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] is False
    if target == "compressed-tensors":
        assert group["input_activations"]["strategy"] == group["weights"]["strategy"] == "tensor"
    result = check_contract(output, [])
    assert [f.rule for f in result.findings if f.severity == "error"] == []
    result = check_numerics(kit.tmp / "src", output, None)
    assert result.status == "passed", result.findings


def test_fp8_scales_are_restated_for_nvfp4_and_shared_by_the_largest(kit):
    """amax = 448 s = 2688 s'; a fused group needs one that holds all of its members."""
    output, _ = kit.convert(static_fp8(kit, "modelopt"), RULES["nvfp4"])
    found = kit.load(output)
    for leaf in "qkv":
        assert f32(found, f"{ATTENTION}.{leaf}_proj.input_scale") == np.float32(0.5 * 448 / 2688)
    assert f32(found, f"{ATTENTION}.o_proj.input_scale") == np.float32(0.75 * 448 / 2688)
    packed, _ = kit.convert(kit.tmp / "src", RULES["nvfp4"], output="ct", layout="compressed-tensors")
    turned = f32(kit.load(packed), f"{ATTENTION}.o_proj.input_global_scale")
    assert turned == pytest.approx(2688 / (0.75 * 448), rel=1e-7)


def test_nvfp4_scales_are_restated_for_fp8(kit):
    nvfp4, _ = kit.convert(static_fp8(kit, "modelopt"), RULES["nvfp4"], output="nvfp4")
    output, _ = kit.convert(nvfp4, RULES["fp8"], format="fp8")
    found = kit.load(output)
    assert f32(found, f"{ATTENTION}.o_proj.input_scale") == pytest.approx(0.75, rel=1e-6)
    assert f32(found, f"{ATTENTION}.v_proj.input_scale") == pytest.approx(0.5, rel=1e-6)


def test_the_manifest_wins_over_the_sources_scales(kit):
    output, _ = kit.convert(static_fp8(kit, "modelopt"), RULES["nvfp4"], activations={"input_scale": 2.0})
    found = kit.load(output)
    assert {f32(found, n) for n in found if n.endswith("input_scale")} == {np.float32(2.0)}
    rules = [{"match": "*_proj", "to": "fp8", "granularity": "tensor"}, KEEP]
    dynamic, _ = kit.convert(
        kit.tmp / "src", rules, output="ct", format="fp8", layout="compressed-tensors", activations={"input_scale": 2.0}
    )
    assert not [n for n in kit.load(dynamic) if n.endswith("input_scale")]
    assert quant(dynamic)["config_groups"]["group_0"]["input_activations"]["dynamic"] is True


def test_targets_without_a_place_leave_the_scales_out(kit):
    source = static_fp8(kit, "modelopt")
    for layout, granularity in (("modelopt", "channel"), ("modelopt", "block"), ("deepseek-v3", "block")):
        rules = [{"match": "*_proj", "to": "fp8", "granularity": granularity}, KEEP]
        output, _ = kit.convert(source, rules, output=f"{layout}-{granularity}", format="fp8", layout=layout)
        assert not [n for n in kit.load(output) if "input" in n]


def test_the_plan_says_whose_scales_they_are(kit):
    source = static_fp8(kit, "modelopt")
    assert kit.job(source, RULES["fp8"], format="fp8").plan.input_scale_note == "the source's own"
    assert (
        kit.job(source, RULES["fp8"], format="fp8", activations={"input_scale": 1.0}).plan.input_scale_note
        == "constant 1.0"
    )


@pytest.mark.parametrize("to", ["nvfp4", "fp8"])
def test_half_a_calibration_is_refused(kit, to):
    """A fused group, or compressed-tensors' one statement for all, with a scale here and none there."""
    source = static_fp8(kit, "modelopt", inputs={**INPUTS, "k_proj": None})
    rules = [{**RULES[to][0], **({"granularity": "tensor"} if to == "fp8" else {})}, KEEP]
    with pytest.raises(SourceError, match="has no activation scale") as caught:
        kit.job(source, rules, format=to, layout="compressed-tensors")
    assert "k_proj" in str(caught.value)


@pytest.mark.parametrize("broken", [("F32", (2,), bytes(8)), ("I32", (), bytes(4))])
def test_an_activation_scale_that_is_no_single_float_is_named(kit, broken):
    source = static_fp8(kit, "modelopt")
    tensors = kit.load(source)
    tensors[f"{ATTENTION}.q_proj.input_scale"] = broken
    kit.save(source / "model.safetensors", tensors)
    with pytest.raises(SourceError, match="expected one float") as caught:
        kit.job(source, RULES["fp8"], format="fp8")
    assert f"{ATTENTION}.q_proj.input_scale" in str(caught.value)


def test_fp8_activations_beside_fp4_weights_are_told_by_the_algorithm(kit):
    """W4A8_NVFP4_FP8 stores amax / 448 where NVFP4 stores amax / 2688."""
    tensors = packed(kit, {"o_proj": 1.0})
    tensors[f"{ATTENTION}.o_proj.input_scale"] = ("F32", (), kit.f32(0.75))
    for algo, expected in (("NVFP4", 0.75), ("W4A8_NVFP4_FP8", 0.75 * 448 / 2688)):
        source = checkpoint(kit, tensors, {"quant_method": "modelopt", "quant_algo": algo}, algo)
        output, _ = kit.convert(source, RELAYOUT, output=f"out-{algo}")
        assert f32(kit.load(output), f"{ATTENTION}.o_proj.input_scale") == np.float32(expected)


# --- global scales ----------------------------------------------------------------------------------------------------


def packed(kit, scalars, dialect="modelopt", low=0x20, high=0x60):
    """NVFP4 attention whose members have these global scales, as multipliers."""
    tensors = {}
    for leaf, scalar in scalars.items():
        name = f"{ATTENTION}.{leaf}"
        codes = ("U8", (N, K // 2), kit.rng.integers(0, 256, N * K // 2, dtype=np.uint8).tobytes())
        plane = kit.rng.integers(low, high, N * K // 16, dtype=np.uint8).tobytes()
        compressed = dialect == "compressed-tensors"
        tensors[f"{name}.weight_packed" if compressed else f"{name}.weight"] = codes
        tensors[f"{name}.weight_scale"] = ("F8_E4M3", (N, K // 16), plane)
        second, value = ("weight_global_scale", 1 / scalar) if compressed else ("weight_scale_2", scalar)
        tensors[f"{name}.{second}"] = ("F32", (1,) if compressed else (), kit.f32(value))
    return tensors


QUANT = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
}
UNEQUAL = {"q_proj": 3e-4, "k_proj": 7e-5, "v_proj": 1.1e-3, "o_proj": 2e-4}
POWERS = {"q_proj": 3e-4, "k_proj": 3e-4 / 4, "v_proj": 3e-4 * 2, "o_proj": 2e-4}


def decoded(found, leaf):
    """float64 [N, K] of a member, in either dialect."""
    name = f"{ATTENTION}.{leaf}"
    compressed = f"{name}.weight_packed" in found
    codes = np.frombuffer(found[f"{name}.weight_packed" if compressed else f"{name}.weight"][2], np.uint8)
    plane = np.frombuffer(found[f"{name}.weight_scale"][2], np.uint8)
    scalar = f32(found, f"{name}.weight_global_scale" if compressed else f"{name}.weight_scale_2")
    values = dequantize_nvfp4(codes.reshape(N, -1), plane.reshape(N, -1), 1.0)
    return values / float(scalar) if compressed else values * float(scalar)


def scalars(found):
    ends = (".weight_scale_2", ".weight_global_scale")
    return {n.split(".")[-2]: np.frombuffer(v[2], "<f4")[0] for n, v in found.items() if n.endswith(ends)}


@pytest.mark.parametrize("runtimes", [[], ["transformers"]])
@pytest.mark.parametrize(("one", "other"), [("modelopt", "compressed-tensors"), ("compressed-tensors", "modelopt")])
def test_where_nothing_is_fused_unequal_global_scales_go_both_ways_bit_for_bit(kit, one, other, runtimes):
    source = checkpoint(kit, packed(kit, UNEQUAL, one), QUANT[one])
    there, _ = kit.convert(source, RELAYOUT, output="there", format="nvfp4-w4a16", layout=other, runtimes=runtimes)
    back, _ = kit.convert(there, RELAYOUT, output="back", format="nvfp4-w4a16", layout=one, runtimes=runtimes)
    first, last = kit.load(source), kit.load(back)
    wrong = {name for name in first if first[name] != last[name]}
    assert {name for name in wrong if "global" not in name and "scale_2" not in name} == set()
    for leaf, value in scalars(first).items():  # an arbitrary FP32 number need not have an FP32 reciprocal that returns
        assert abs(int(value.view(np.uint32)) - int(scalars(last)[leaf].view(np.uint32))) <= 1


@pytest.mark.parametrize("runtime", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_powers_of_two_apart_move_into_the_block_scales_and_no_number_changes(kit, dialect, target, runtime):
    source = checkpoint(kit, packed(kit, POWERS, dialect), QUANT[dialect])
    output, _ = kit.convert(source, RELAYOUT, format="nvfp4-w4a16", layout=target, runtimes=[runtime])
    before, after = kit.load(source), kit.load(output)
    found = scalars(after)
    assert found["q_proj"] == found["k_proj"] == found["v_proj"] != found["o_proj"]
    for leaf in POWERS:
        np.testing.assert_allclose(decoded(after, leaf), decoded(before, leaf), rtol=2e-7 if dialect != target else 0)
        ours, theirs = ((f"{ATTENTION}.{leaf}.weight{end}" for end in ("", "_packed")) for _ in range(2))
        codes = [next(found[n] for n in names if n in found) for names, found in ((ours, after), (theirs, before))]
        assert codes[0] == codes[1]
    rules = {finding.rule for finding in check_contract(output, [runtime]).findings}
    assert "fused-global-scale-differs" not in rules
    if dialect == target:
        result = check_numerics(source, output, None)
        assert result.status == "passed", result.findings
        record = kit.tmp / "judged.jsonl"
        for judge in (PiecewiseNumerics(source, output, record), PiecewiseNumerics(source, output, record)):
            judge.piece(source, output, judge.unjudged())  # nothing the second time: it goes on with the record
            piecewise = judge.result(None)
            assert (piecewise.status, piecewise.findings) == (result.status, result.findings)
            assert (piecewise.data, piecewise.reason) == (result.data, result.reason)


@pytest.mark.parametrize("given", [{"q_proj": 3e-4, "k_proj": 3e-4, "v_proj": 3e-4, "o_proj": 2e-4}, POWERS])
def test_a_relayout_that_shares_activation_scales_is_signed_off(kit, given):
    tensors = packed(kit, given)
    for leaf, scale in INPUTS.items():
        tensors[f"{ATTENTION}.{leaf}.input_scale"] = ("F32", (), kit.f32(scale))
    source = checkpoint(kit, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    output, _ = kit.convert(source, RELAYOUT, format="nvfp4", layout="modelopt", runtimes=["vllm"])
    after = kit.load(output)
    found = {leaf: f32(after, f"{ATTENTION}.{leaf}.input_scale") for leaf in INPUTS}
    assert found == {"q_proj": 0.5, "k_proj": 0.5, "v_proj": 0.5, "o_proj": 0.75}
    result = check_numerics(source, output, None)
    assert result.status == "passed", result.findings
    judge = PiecewiseNumerics(source, output, kit.tmp / "judged.jsonl")
    judge.piece(source, output, judge.unjudged())
    assert judge.result(None).data == result.data
    assert judge.result(None).status == "passed"


@pytest.mark.parametrize("wrong", ["k_proj", "o_proj"])
def test_an_activation_scale_that_is_nobodys_is_no_shared_one(kit, wrong):
    given = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), 3e-4)
    tensors = packed(kit, given)
    for leaf, scale in INPUTS.items():
        tensors[f"{ATTENTION}.{leaf}.input_scale"] = ("F32", (), kit.f32(scale))
    source = checkpoint(kit, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    tensors[f"{ATTENTION}.{wrong}.input_scale"] = ("F32", (), kit.f32(0.25))
    spoiled = checkpoint(kit, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "spoiled")
    found = {f.where for f in check_numerics(source, spoiled, None).findings if f.rule == "copy-differs"}
    assert f"{ATTENTION}.{wrong}.input_scale" in found


def test_the_common_scale_leaves_no_block_scale_out_of_range(kit):
    """Down where the largest scale allows it, else as far up as needed; here k's smallest scale cannot be halved."""
    tensors = packed(kit, {"q_proj": 2.0**-10, "k_proj": 2.0**-11, "v_proj": 2.0**-10}, low=0x01, high=0x60)
    source = checkpoint(kit, tensors, QUANT["modelopt"])
    output, _ = kit.convert(source, RELAYOUT, format="nvfp4-w4a16", runtimes=["vllm"])
    after = kit.load(output)
    assert set(scalars(after).values()) == {np.float32(2.0**-11)}
    for leaf in ("q_proj", "k_proj", "v_proj"):
        np.testing.assert_array_equal(decoded(after, leaf), decoded(kit.load(source), leaf))


@pytest.mark.parametrize(
    ("given", "span", "why"),
    [
        (UNEQUAL, (0x20, 0x60), "no power of two"),
        ({"q_proj": 1.0, "k_proj": 0.5, "v_proj": 1.0}, (0x01, 0x7F), "leave the range of E4M3"),
    ],
)
def test_what_no_fusing_runtime_could_read_right_is_refused(kit, given, span, why):
    source = checkpoint(kit, packed(kit, given, "modelopt", *span), QUANT["modelopt"])
    with pytest.raises(SourceError, match=why) as caught:
        kit.convert(source, RELAYOUT, format="nvfp4-w4a16", runtimes=["sglang"])
    assert "q_proj+k_proj+v_proj" in str(caught.value)
    assert "target.runtimes" in str(caught.value)
    assert not (kit.tmp / "out").exists()
