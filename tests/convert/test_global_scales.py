"""`scale: mse` shares one swept global scale in a fused group, and finds again what was MXFP4 before it became BF16."""

import numpy as np
import pytest
from requant.convert.global_scales import stretches
from requant.convert.layouts.base import More, SourceWeight
from requant.convert.layouts.writing import Form, leaf_of
from requant.convert.plan import Member
from requant.convert.shards import TensorInfo

LAYER = "model.layers.0"
SHAPES = {"q_proj": (128, 256), "k_proj": (64, 256), "v_proj": (64, 256), "o_proj": (256, 128)}
BF16 = [{"match": "*", "to": "bf16"}]
MSE = [{"match": "*_proj", "to": "nvfp4", "scale": "mse"}, {"match": "*", "to": "keep"}]


def values(tensor):
    """float32 of a BF16 tensor."""
    dtype, shape, data = tensor
    assert dtype == "BF16"
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


@pytest.fixture
def upcast(kit):
    """A BF16 checkpoint whose attention was MXFP4 once."""
    tensors = {"model.norm.weight": kit.bf16(kit.rng, 64)}
    for leaf, (n, k) in SHAPES.items():
        name = f"{LAYER}.self_attn.{leaf}"
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = kit.mx(kit.rng, n, k, 118, 124, "U8", "U8")
    config = {"model_type": "llama", "quantization_config": {"quant_method": "quark"}}
    source = kit.write_checkpoint(kit.tmp / "mx", [tensors], config)
    return kit.convert(source, BF16, output="upcast", format="bf16")[0]


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_weights_that_were_mxfp4_come_back_without_error(kit, upcast, layout):
    packed, _ = kit.convert(upcast, MSE, output="packed", format="nvfp4-w4a16", layout=layout)
    again, _ = kit.convert(packed, BF16, output="again", format="bf16")
    first, last = kit.load(upcast), kit.load(again)
    for leaf in SHAPES:
        name = f"{LAYER}.self_attn.{leaf}.weight"
        np.testing.assert_array_equal(values(first[name]), values(last[name]))


def test_fused_partners_share_the_swept_scale(kit, upcast):
    packed, _ = kit.convert(upcast, MSE, output="packed", format="nvfp4-w4a16")
    found = kit.load(packed)
    scales = [np.frombuffer(found[f"{LAYER}.self_attn.{x}_proj.weight_scale_2"][2], "<f4")[0] for x in "qkv"]
    assert scales[0] == scales[1] == scales[2]
    assert np.frexp(scales[0])[0] == 0.5


def test_a_swept_scale_does_not_depend_on_tiles(kit, upcast, monkeypatch):
    from requant.convert import decode

    one, _ = kit.convert(upcast, MSE, output="one", format="nvfp4-w4a16")
    monkeypatch.setattr(decode, "TILE_WEIGHTS", 256 * 3)
    other, _ = kit.convert(upcast, MSE, output="other", format="nvfp4-w4a16")
    assert kit.load(one) == kit.load(other)


def member(rows, cols, experts=0, rotary=0):
    codes = TensorInfo("w", "BF16", (max(experts, 1) * rows, cols), "f", 0, 2 * max(experts, 1) * rows * cols)
    weight = SourceWeight("w", "plain", rows, cols, codes, None, experts, more=More(rotary=rotary))
    form = Form("nvfp4", max(experts, 1) * rows, cols, leaf_of(".w", "U8", (rows, cols // 2)), transposed=experts)
    return Member("w", form, weight, 0, 1, 0, None, None)


@pytest.mark.parametrize("wanted", [1, 8, 100, 513, 1023, 1024, 5000])
@pytest.mark.parametrize(
    ("rows", "experts", "rotary"), [(1024, 0, 0), (256, 4, 0), (1000, 0, 0), (1024, 0, 16), (6, 9, 0)]
)
def test_samples_are_whole_words_and_heads_inside_one_expert(wanted, rows, experts, rotary):
    """Readers of integer formats want eight rows at a time, rotary ones whole heads, stacked ones a single expert."""
    one = member(rows, 64, experts, rotary)
    total = one.form.rows
    found = list(stretches(one, wanted))
    seen = sum(count for _, count in found)
    assert min(wanted, total) <= seen
    assert seen <= min(total, wanted + len(found) * max(8, rows // rotary if rotary else 1)) or wanted >= total
    grain = rows // rotary if rotary else 8 if not experts and rows % 8 == 0 else 1
    for first, count in found:
        assert 0 <= first < first + count <= total
        assert first % grain == 0
        assert first // rows == (first + count - 1) // rows
