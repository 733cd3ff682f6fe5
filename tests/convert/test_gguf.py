"""GGUF sources: names, shapes, the rotary order, every block format against its text, and what is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from requant.convert.checkpoint import open_checkpoint
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES
from requant.kernels.reference import encode_nvfp4, nvfp4_global_scale
from requant.manifests.errors import SourceError, UsageError

HIDDEN, HEADS, KV = 256, 4, 2
TO_BF16 = [{"match": "*", "to": "bf16"}]


def halves(n, rng):
    """n F16 numbers of a scale's size, as bytes [n, 2]."""
    return (rng.random(n) * 0.1 + 0.01).astype("<f2").view(np.uint8).reshape(n, 2)


def half(raw):
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def nibbles(raw):
    """Low nibbles of a run of bytes, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


# Each format: random blocks as bytes, and the values by the format's own text (ggml-common.h, ggml-quants.c).


def q4_0(n, rng):
    raw = np.concatenate([halves(n, rng), rng.integers(0, 256, (n, 16), dtype=np.uint8)], axis=1)
    return raw, half(raw[:, :2]) * (nibbles(raw[:, 2:]).astype(np.float32) - 8)


def q4_1(n, rng):
    raw = np.concatenate([halves(n, rng), halves(n, rng), rng.integers(0, 256, (n, 16), dtype=np.uint8)], axis=1)
    return raw, half(raw[:, :2]) * nibbles(raw[:, 4:]).astype(np.float32) + half(raw[:, 2:4])


def q8_0(n, rng):
    raw = np.concatenate([halves(n, rng), rng.integers(0, 256, (n, 32), dtype=np.uint8)], axis=1)
    return raw, half(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


def q4_k(n, rng):
    """256 = 8 groups of 32, six-bit scales and minima packed into 12 bytes."""
    raw = np.concatenate([halves(n, rng), halves(n, rng), rng.integers(0, 256, (n, 140), dtype=np.uint8)], axis=1)
    d, dmin, packed, codes = half(raw[:, :2]), half(raw[:, 2:4]), raw[:, 4:16], raw[:, 16:].reshape(n, 4, 32)
    scale, minimum = np.zeros((n, 8), np.float32), np.zeros((n, 8), np.float32)
    for j in range(8):
        if j < 4:
            scale[:, j], minimum[:, j] = packed[:, j] & 63, packed[:, j + 4] & 63
        else:
            scale[:, j] = (packed[:, j + 4] & 15) | (packed[:, j - 4] >> 6) << 4
            minimum[:, j] = (packed[:, j + 4] >> 4) | (packed[:, j] >> 6) << 4
    q = np.stack([codes & 15, codes >> 4], axis=2).reshape(n, 8, 32).astype(np.float32)
    return raw, ((d * scale)[..., None] * q - (dmin * minimum)[..., None]).reshape(n, 256)


def q6_k(n, rng):
    """256 = two halves of 128, four low bits and two high bits apart, int8 scales per 16."""
    raw = np.concatenate([rng.integers(0, 256, (n, 208), dtype=np.uint8), halves(n, rng)], axis=1)
    low, high = raw[:, :128].reshape(n, 2, 64), raw[:, 128:192].reshape(n, 2, 32)
    scales, d = raw[:, 192:208].view(np.int8).astype(np.float32), half(raw[:, 208:])
    q = np.zeros((n, 2, 128), np.int32)
    for quarter in range(4):
        part = low[:, :, 32 * (quarter % 2) : 32 * (quarter % 2) + 32] >> (4 * (quarter // 2)) & 15
        q[:, :, 32 * quarter : 32 * quarter + 32] = part | ((high >> (2 * quarter)) & 3).astype(np.int32) << 4
    return raw, d * np.repeat(scales, 16, axis=1) * (q.reshape(n, 256) - 32).astype(np.float32)


def mxfp4(n, rng):
    """Byte j holds elements j and j + 16; the scale comes first."""
    scales = rng.integers(110, 130, (n, 1), dtype=np.uint8)
    raw = np.concatenate([scales, rng.integers(0, 256, (n, 16), dtype=np.uint8)], axis=1)
    return raw, E2M1_VALUES[nibbles(raw[:, 1:])] * E8M0_VALUES[scales]


def nvfp4(n, rng):
    """64 = 4 groups of 16; in each byte j holds elements j and j + 8."""
    scales = rng.integers(1, 127, (n, 4), dtype=np.uint8)
    codes = rng.integers(0, 256, (n, 32), dtype=np.uint8)
    values = E2M1_VALUES[nibbles(codes.reshape(n, 4, 8))] * E4M3_VALUES[scales][..., None]
    return np.concatenate([scales, codes], axis=1), values.reshape(n, 64)


FORMATS = {"Q4_0": q4_0, "Q4_1": q4_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q6_K": q6_k, "MXFP4": mxfp4, "NVFP4": nvfp4}


def matrix(kind, rows, cols, rng):
    """(bytes [rows, row bytes], values [rows, cols])."""
    probe = FORMATS[kind](1, np.random.default_rng(0))[1].shape[1]
    raw, values = FORMATS[kind](rows * cols // probe, rng)
    return raw.reshape(rows, -1), values.reshape(rows, cols)


@pytest.mark.parametrize("kind", list(FORMATS))
def test_the_package_decodes_every_format_as_its_text_says(kind):
    raw, values = matrix(kind, 8, 512, np.random.default_rng(1))
    decoded = quants.dequantize(raw, GGMLQuantizationType[kind])
    np.testing.assert_allclose(decoded, values, rtol=1e-6, atol=1e-7)


def interleaved(values, heads):
    """As convert_hf_to_gguf.py permutes q and k: rows i and i + d/2 of a head side by side."""
    rows, cols = values.shape
    return values.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def write(kit, architecture="llama", kinds=None, extra=(), config=None):
    """A GGUF with one layer; {HF name: values}."""
    rng, want = kit.rng, {}
    kinds = kinds or {}
    folder = kit.tmp / "src"
    folder.mkdir()
    writer = GGUFWriter(folder / "model.gguf", architecture)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)

    def add(name, hf, rows, cols, default, heads=0):
        kind = kinds.get(name, default)
        if kind in FORMATS:
            raw, values = matrix(kind, rows, cols, rng)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=GGMLQuantizationType[kind])
        else:
            values = rng.standard_normal((rows, cols)).astype(np.float32 if kind == "F32" else np.float16)
            writer.add_tensor(f"{name}.weight", values)
            values = values.astype(np.float32)
        if heads and architecture == "llama":  # what the file holds is permuted; the model's row order is the inverse
            half_rows = rows // heads // 2
            values = values.reshape(heads, half_rows, 2, cols).swapaxes(1, 2).reshape(rows, cols)
        want[hf] = values

    add("token_embd", "model.embed_tokens", 64, HIDDEN, "Q6_K")
    base = "model.layers.0"
    add("blk.0.attn_q", f"{base}.self_attn.q_proj", HIDDEN, HIDDEN, "Q4_K", HEADS)
    add("blk.0.attn_k", f"{base}.self_attn.k_proj", HIDDEN // 2, HIDDEN, "Q4_K", KV)
    add("blk.0.attn_v", f"{base}.self_attn.v_proj", HIDDEN // 2, HIDDEN, "Q6_K")
    add("blk.0.ffn_up", f"{base}.mlp.up_proj", 512, HIDDEN, "Q8_0")
    norm = rng.standard_normal(HIDDEN).astype(np.float32)
    writer.add_tensor("output_norm.weight", norm)
    for name, values in extra:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    own = {"model_type": "llama", "tie_word_embeddings": True, "num_hidden_layers": 1} | (config or {})
    (folder / "config.json").write_text(json.dumps(own))
    return folder, want, norm


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_bf16_has_the_models_names_shapes_and_row_order(kit, architecture):
    folder, want, norm = write(kit, architecture)
    output, _ = kit.convert(folder, TO_BF16, format="bf16")
    found = kit.load(output)
    assert set(found) == {*(f"{name}.weight" for name in want), "model.norm.weight"}
    for name, values in want.items():
        dtype, shape, data = found[f"{name}.weight"]
        assert (dtype, shape) == ("BF16", values.shape)
        got = np.frombuffer(data, ml_dtypes.bfloat16).astype(np.float32).reshape(shape)
        np.testing.assert_allclose(got, values, rtol=2**-8, atol=1e-6)
    assert found["model.norm.weight"] == ("F32", (HIDDEN,), norm.tobytes())


def test_the_rotary_order_is_the_inverse_of_llama_cpps(kit):
    folder, want, _ = write(kit, kinds={"blk.0.attn_q": "F32"})
    values = want["model.layers.0.self_attn.q_proj"]
    stored = next(t for t in open_checkpoint(folder).tensors.values() if t.name.endswith("q_proj.weight"))
    raw = (folder / "model.gguf").read_bytes()[stored.begin : stored.begin + stored.nbytes]
    assert raw == interleaved(values, HEADS).astype("<f4").tobytes()


def test_nvfp4_is_the_encoding_of_what_the_package_decodes(kit):
    folder, _, _ = write(kit)
    rules = [{"match": "*.mlp.*", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "bf16"}]
    output, _ = kit.convert(folder, rules, format="nvfp4-w4a16")
    tensor = open_checkpoint(folder).tensors["model.layers.0.mlp.up_proj.weight"]
    raw = np.frombuffer((folder / "model.gguf").read_bytes()[tensor.begin :][: tensor.nbytes], np.uint8)
    values = quants.dequantize(raw.reshape(512, -1), GGMLQuantizationType.Q8_0)
    codes, plane = encode_nvfp4(values, nvfp4_global_scale([values]))
    found = kit.load(output)
    assert found["model.layers.0.mlp.up_proj.weight"][2] == codes.tobytes()
    assert found["model.layers.0.mlp.up_proj.weight_scale"][2] == plane.tobytes()


def test_tiles_of_whole_heads_change_no_byte(kit, monkeypatch):
    from requant.convert import decode

    folder, _, _ = write(kit)
    whole, _ = kit.convert(folder, TO_BF16, output="whole", format="bf16")
    monkeypatch.setattr(decode, "TILE_WEIGHTS", HIDDEN * 70)
    tiled, _ = kit.convert(folder, TO_BF16, output="tiled", format="bf16")
    assert kit.load(tiled) == kit.load(whole)


def test_stacked_experts_become_modules(kit):
    rng = kit.rng
    experts = {leaf: rng.standard_normal((3, *shape)).astype(np.float16) for leaf, shape in
               {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items()}  # fmt: skip
    extra = [(f"blk.0.ffn_{leaf}_exps.weight", values) for leaf, values in experts.items()]
    folder, _, _ = write(kit, "qwen3moe", extra=extra)
    rules = [{"match": "*.experts.*", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "bf16"}]
    output, _ = kit.convert(folder, rules, format="nvfp4-w4a16")
    found = kit.load(output)
    pair = [experts[leaf][2].astype(np.float32) for leaf in ("gate", "up")]
    codes, _ = encode_nvfp4(pair[1], nvfp4_global_scale(pair))
    assert found["model.layers.0.mlp.experts.2.up_proj.weight"] == ("U8", (32, 32), codes.tobytes())


def test_what_is_llama_cpps_own_is_left_out_and_said(kit):
    folder, _, _ = write(kit, extra=[("rope_freqs.weight", np.ones(8, np.float32))])
    ignored = open_checkpoint(folder).ignored
    assert ("model.gguf: rope_freqs.weight", "llama.cpp's own: config.json says it as rope_scaling") in ignored


def test_rows_in_llama_cpps_order_are_never_copied(kit):
    folder, _, _ = write(kit, kinds={"blk.0.attn_q": "F16", "blk.0.attn_k": "F16"})
    rules = [{"match": "*.mlp.*", "to": "bf16"}, {"match": "*.[qk]_proj", "to": "keep", "optional": True}]
    with pytest.raises(UsageError, match=r"has its rows in llama.cpp's order|would stay GGUF"):
        kit.job(folder, rules, format="bf16")


def test_other_architectures_types_and_names_are_refused(kit):
    folder, _, _ = write(kit, "gemma3")
    with pytest.raises(SourceError, match="architecture 'gemma3' is not one whose names are known"):
        open_checkpoint(folder)
    (folder / "model.gguf").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(SourceError, match="not a readable GGUF file"):
        open_checkpoint(folder)


def test_an_unknown_tensor_is_refused(kit):
    folder, _, _ = write(kit, extra=[("blk.0.surprise.weight", np.ones((4, 4), np.float32))])
    with pytest.raises(SourceError, match=r"blk.0.surprise.weight: is a tensor whose place in the model is not known"):
        open_checkpoint(folder)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("target", ["bf16", "nvfp4-w4a16"])
def test_the_second_opinion_reads_the_file_by_itself(kit, architecture, target):
    """And sees a row in the wrong place."""
    from requant.validate.numerics import check_numerics

    folder, want, _ = write(kit, architecture, kinds={"blk.0.attn_k": "F16"})
    fp4 = [{"match": "*_proj", "to": "nvfp4", "scale": "nearest"}] if target != "bf16" else []
    output, _ = kit.convert(folder, [*fp4, *TO_BF16], format=target)
    result = check_numerics(folder, output, None)
    assert [f.rule for f in result.findings if f.severity == "error"] == []
    rows = [dict(zip(result.data["tensors"]["columns"], r, strict=True)) for r in result.data["tensors"]["rows"]]
    assert {row["tensor"] for row in rows} == set(want)
    assert {row["source"] for row in rows} == {"gguf"}
    path = output / "model.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + length])["model.layers.0.self_attn.q_proj.weight"]["data_offsets"]
    begin, width = begin + 8 + length, (end - begin) // HIDDEN
    raw[begin : begin + 2 * width] = raw[begin + width : begin + 2 * width] + raw[begin : begin + width]
    path.write_bytes(raw)
    assert "misrounded" in {f.rule for f in check_numerics(folder, output, None).findings}


def test_the_second_opinion_reads_stacked_experts(kit):
    from requant.validate.numerics import check_numerics

    extra = [(f"blk.0.ffn_{leaf}_exps.weight", kit.rng.standard_normal((3, *shape)).astype(np.float16))
             for leaf, shape in {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items()]  # fmt: skip
    folder, _, _ = write(kit, "qwen3moe", extra=extra)
    rules = [{"match": "*.experts.*", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "bf16"}]
    output, _ = kit.convert(folder, rules, format="nvfp4-w4a16")
    result = check_numerics(folder, output, None)
    assert [f.rule for f in result.findings if f.severity == "error"] == []
    assert len(result.data["tensors"]["rows"]) == 9 + 5
