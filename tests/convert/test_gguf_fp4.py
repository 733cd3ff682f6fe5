"""GGUF's MXFP4 and NVFP4: codes and scales moved, never rounded; the package's decoder is the judge, bit for bit."""

import json

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from requant.convert import encode
from requant.convert.ggml import planes_of
from requant.convert.initial import initial_manifest
from requant.convert.pipeline import prepare
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES
from requant.manifests.errors import SourceError

HIDDEN, HEADS, KV, EXPERTS, INTER = 128, 4, 2, 3, 64
SCALE_BYTES = {"MXFP4": (1, 17, 32), "NVFP4": (4, 36, 64)}
"""Type -> scale bytes, all bytes and weights of a block."""
LOSSLESS = [{"match": "*", "to": "nvfp4", "scale": "lossless"}]


def blocks(kind, shape, rng, low, high):
    """Random blocks of a type [..., bytes of K], scale bytes in [low, high]."""
    head, size, weights = SCALE_BYTES[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), dtype=np.uint8)
    raw[..., :head] = rng.integers(low, high + 1, (*raw.shape[:-1], head))
    return raw.reshape(*shape[:-1], -1)


def decoded(raw, kind):
    with np.errstate(over="ignore"):  # 6 * 2^127
        return quants.dequantize(raw, GGMLQuantizationType[kind])


def write(kit, kind, low, high, rotary=True, beside=()):
    """A llama's attention, or the stacked experts of qwen3moe; {module: values as the package decodes them}."""
    architecture = "llama" if rotary else "qwen3moe"
    folder, want = kit.tmp / "src", {}
    folder.mkdir()
    writer = GGUFWriter(folder / "model.gguf", architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN // 2, HIDDEN), "attn_v": (HIDDEN // 2, HIDDEN)}
    if not rotary:
        shapes = {"ffn_gate_exps": (EXPERTS, INTER, HIDDEN), "ffn_up_exps": (EXPERTS, INTER, HIDDEN)}
    for name, shape in shapes.items():
        raw = blocks(kind, shape, kit.rng, low, high)
        writer.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=GGMLQuantizationType[kind])
        values = decoded(raw, kind)
        leaf = name.removesuffix("_exps").rpartition("_")[2]
        if not rotary:
            want |= {f"model.layers.0.mlp.experts.{e}.{leaf}_proj": values[e] for e in range(EXPERTS)}
            continue
        heads = {"q": HEADS, "k": KV}.get(leaf)
        if heads:
            half = shape[0] // heads // 2
            values = values.reshape(heads, half, 2, HIDDEN).swapaxes(1, 2).reshape(shape)
        want[f"model.layers.0.self_attn.{leaf}_proj"] = values
    for name, raw, other in beside:
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[other])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "config.json").write_text(json.dumps({"model_type": architecture, "num_hidden_layers": 1}))
    return folder, want


def values_of(found, module):
    """An output weight as float64, exact: NVFP4 of modelopt."""
    _, (rows, half), codes = found[f"{module}.weight"]
    packed = np.frombuffer(codes, np.uint8).reshape(rows, half)
    plain = E2M1_VALUES[np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1, 16)].astype(np.float64)
    plane = E4M3_VALUES[np.frombuffer(found[f"{module}.weight_scale"][2], np.uint8)].reshape(rows, -1, 1)
    return (plain * plane * float(np.frombuffer(found[f"{module}.weight_scale_2"][2], "<f4")[0])).reshape(rows, -1)


@pytest.mark.parametrize(("kind", "top"), [("MXFP4", 254), ("NVFP4", 0x7E)])
def test_planes_are_the_packages_values_for_every_scale_and_every_byte(kind, top):
    head, size, weights = SCALE_BYTES[kind]
    scales = np.arange(top + 1, dtype=np.uint8)
    raw = np.zeros((256 // (size - head) * len(scales), size), np.uint8)
    raw[:, :head] = np.tile(scales, len(raw) // len(scales))[:, None]
    every = np.arange(256, dtype=np.uint8).reshape(-1, size - head)
    raw[:, head:] = np.repeat(every, len(scales), axis=0)
    codes, plane = planes_of(raw, kind.lower())
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(raw), -1)
    table = E8M0_VALUES if kind == "MXFP4" else E4M3_VALUES
    with np.errstate(over="ignore"):
        mine = E2M1_VALUES[nibbles] * np.repeat(table[plane], weights // plane.shape[1], axis=1)
    assert np.array_equal(mine.astype(np.float32), decoded(raw, kind))


def test_rows_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="18 bytes are no whole mxfp4 blocks of 17"):
        planes_of(np.zeros((2, 18), np.uint8), "mxfp4")


@pytest.mark.parametrize("rotary", [True, False], ids=["rotary", "stacked"])
@pytest.mark.parametrize(("low", "high"), [(110, 118), (100, 117)], ids=["window", "edge"])
def test_mxfp4_becomes_nvfp4_without_a_float(kit, monkeypatch, rotary, low, high):
    folder, want = write(kit, "MXFP4", low, high, rotary)
    monkeypatch.setattr(encode, "float_tiles", lambda *_: pytest.fail("through floats"))
    output, result = kit.convert(folder, LOSSLESS, format="nvfp4-w4a16")
    found = kit.load(output)
    assert {name.removesuffix(".weight") for name in found if name.endswith(".weight")} == set(want)
    for module, values in want.items():
        assert np.array_equal(values_of(found, module), values.astype(np.float64)), module
    assert {counts["lossy"] for counts in result.counts.values() if counts} == {0}


def test_what_no_window_holds_goes_half_by_half_and_is_counted(kit):
    folder, want = write(kit, "MXFP4", 90, 130)
    output, result = kit.convert(folder, LOSSLESS, format="nvfp4-w4a16")
    found, wrong = kit.load(output), 0
    for module, values in want.items():
        equal = values_of(found, module) == values.astype(np.float64)
        wrong += int((~equal.reshape(-1, 16).all(axis=1)).sum())
    counts = [counts for counts in result.counts.values() if counts]
    assert wrong == sum(c["lossy"] for c in counts) > 0
    assert sum(c["exact"] + c["shifted"] for c in counts) > 0


@pytest.mark.parametrize("rotary", [True, False], ids=["rotary", "stacked"])
def test_nvfp4_stays_what_it_is_under_a_global_scale_of_one(kit, rotary):
    folder, want = write(kit, "NVFP4", 0, 0x7E, rotary)
    output, _ = kit.convert(folder, LOSSLESS, format="nvfp4-w4a16")
    found = kit.load(output)
    for module, values in want.items():
        assert np.array_equal(values_of(found, module), values.astype(np.float64)), module
        assert found[f"{module}.weight_scale_2"] == ("F32", (), np.float32(1).tobytes())


def test_mxfp4_stays_mxfp4(kit):
    folder, want = write(kit, "MXFP4", 1, 254)
    rules = [{"match": "*", "to": "mxfp4", "scale": "lossless"}]
    found = kit.load(kit.convert(folder, rules, format="mxfp4")[0])
    for module, values in want.items():
        packed = np.frombuffer(found[f"{module}.weight"][2], np.uint8).reshape(len(values), -1)
        plane = np.frombuffer(found[f"{module}.weight_scale"][2], np.uint8).reshape(len(values), -1)
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(values.shape)
        with np.errstate(over="ignore"):
            assert np.array_equal(E2M1_VALUES[nibbles] * np.repeat(E8M0_VALUES[plane], 32, axis=1), values), module


@pytest.mark.parametrize(("kind", "byte", "said"), [("MXFP4", 255, "E8M0 scale 255"), ("NVFP4", 127, "E4M3 scale 127")])
def test_a_scale_that_is_none_is_named(kit, kind, byte, said):
    folder, _ = write(kit, kind, byte, byte)
    with pytest.raises(SourceError, match=r"model\.layers\.0\.self_attn") as caught:
        kit.convert(folder, LOSSLESS, format="nvfp4-w4a16")
    assert said in caught.value.message


def test_rounding_what_need_not_be_rounded_is_refused(kit):
    folder, _ = write(kit, "MXFP4", 110, 118)
    rules = [{"match": "*", "to": "nvfp4", "scale": "nearest"}]
    with pytest.raises(SourceError, match="is MXFP4 already, and scale: nearest would quantize it a second time"):
        kit.job(folder, rules, format="nvfp4-w4a16")


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4"])
def test_the_judge_finds_every_weight_equal(kit, kind):
    from requant.validate.numerics import check_numerics

    folder, want = write(kit, kind, 110, 118)
    output, _ = kit.convert(folder, LOSSLESS, format="nvfp4-w4a16")
    result = check_numerics(folder, output, None)
    assert [f.rule for f in result.findings if f.severity == "error"] == []
    rows = [dict(zip(result.data["tensors"]["columns"], r, strict=True)) for r in result.data["tensors"]["rows"]]
    assert {row["tensor"] for row in rows} == set(want)
    assert {(row["max_error"], row["lossy"]) for row in rows} == {(0.0, 0)}


def test_init_moves_the_experts_and_rounds_what_stands_beside_them(kit):
    """llama.cpp's MXFP4_MOE: experts MXFP4, the rest Q8_0."""
    raw = np.zeros((HIDDEN, HIDDEN // 32 * 34), np.uint8)
    beside = [("blk.0.attn_v.weight", raw, "Q8_0"), ("token_embd.weight", raw, "Q8_0")]
    folder, want = write(kit, "MXFP4", 110, 118, rotary=False, beside=beside)
    (kit.tmp / "m.yaml").write_text(initial_manifest(str(folder)))
    plan = prepare(str(kit.tmp / "m.yaml"), [f"target.output={kit.tmp / 'out'}"]).plan
    kinds = {member.module: (unit.kind, unit.scale) for unit in plan.groups for member in unit.members}
    assert {module: kinds[module] for module in want} == dict.fromkeys(want, ("repack", "lossless"))
    assert kinds["model.layers.0.self_attn.v_proj"] == ("encode", "nearest")
    assert {unit.members[0].form.number for unit in plan.groups if unit.scale == "lossless"} == {"nvfp4", "bf16"}
