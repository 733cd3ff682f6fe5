"""Weights that cannot be quantized, through the command line: one clear error, exit 3, the source untouched."""

import hashlib

import ml_dtypes
import numpy as np
import pytest
from requant.convert.cli import main

A = "model.layers.0.mlp"
NVFP4 = [{"match": "*_proj", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "keep"}]
PLAIN = {"model_type": "llama"}
FP8 = {**PLAIN, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MODELOPT = {**PLAIN, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def bf16_with(kit, value):
    w = np.frombuffer(kit.bf16(kit.rng, 16, 32)[2], ml_dtypes.bfloat16).copy()
    w[5 * 32 + 7] = value
    return {f"{A}.down_proj.weight": ("BF16", (16, 32), w.tobytes())}


def fp8_without_scale(kit):
    return {f"{A}.down_proj.weight": ("F8_E4M3", (128, 128), bytes(128 * 128))}


def packed(kit, scale="weight_scale_2"):
    return {
        f"{A}.down_proj.weight": ("U8", (16, 16), bytes(256)),
        f"{A}.down_proj.weight_scale": ("F8_E4M3", (16, 2), b"\x38" * 32),
        f"{A}.down_proj.{scale}": ("F32", (), kit.f32(1e-3)),
    }


def two_types(kit):
    f32 = ("F32", (16, 32), np.ones((16, 32), "<f4").tobytes())
    return {f"{A}.gate_proj.weight": kit.bf16(kit.rng, 16, 32), f"{A}.up_proj.weight": f32}


def mxfp4(kit):
    codes, scales = kit.mx(kit.rng, 16, 32, codes="U8", scales="U8")
    return {f"{A}.down_proj.weight": codes, f"{A}.down_proj.weight_scale": scales}


NAMED = [{"match": f"{A}.down_proj", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "keep"}]
QUARK = {**PLAIN, "quantization_config": {"quant_method": "quark"}}
UNKNOWN = {**PLAIN, "quantization_config": {"quant_method": "zzz_v9"}}
DOWN = f"{A}.down_proj.weight"
CASES = {
    "NaN": (lambda k: bf16_with(k, np.nan), PLAIN, NVFP4, [DOWN, "row 5, column 7 is NaN"]),
    "infinity": (lambda k: bf16_with(k, -np.inf), PLAIN, NVFP4, [DOWN, "row 5, column 7 is NaN, infinite"]),
    "empty": (lambda k: {DOWN: ("BF16", (0, 32), b"")}, PLAIN, NVFP4, [DOWN, "empty"]),
    "no columns": (lambda k: {DOWN: ("BF16", (16, 0), b"")}, PLAIN, NVFP4, [DOWN, "empty"]),
    "K demanded": (lambda k: {DOWN: k.bf16(k.rng, 16, 40)}, PLAIN, NAMED, ["down_proj", "K = 40 is not a multiple of"]),
    "FP8 scale missing": (fp8_without_scale, FP8, NVFP4, [f"has no scale tensor {DOWN}_scale_inv"]),
    "mixed dtypes": (two_types, PLAIN, NVFP4, ["of a fused group are of two types", f"{A}.up_proj.weight"]),
    "NVFP4 again": (packed, MODELOPT, NVFP4, ["down_proj", "is NVFP4 already", "lossless"]),
    "MXFP4 by rounding": (mxfp4, QUARK, NVFP4, ["down_proj", "is MXFP4 already", "lossless"]),
    "unknown method": (packed, UNKNOWN, NVFP4, ["config.json", "quant_method 'zzz_v9'", "known source layouts"]),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_one_error_exit_3_and_nothing_lost(kit, capsys, case):
    make, config, rules, words = CASES[case]
    source = kit.write_checkpoint(kit.tmp / "src", [{**make(kit), "model.norm.weight": kit.bf16(kit.rng, 32)}], config)
    before = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in source.iterdir()}
    manifest = kit.tmp / "m.yaml"
    manifest.write_text(kit.manifest_text(source, kit.tmp / "out", rules))
    with pytest.raises(SystemExit) as stop:
        main(["run", str(manifest), "--quiet"])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (3, ""), captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("error: ") == 1
    for each in words:
        assert each in captured.err
    assert not (kit.tmp / "out").exists()
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in source.iterdir()} == before


def test_k_that_does_not_fit_is_kept_plain_with_a_line_in_the_plan(kit, capsys):
    tensors = {f"{A}.down_proj.weight": kit.bf16(kit.rng, 16, 40), f"{A}.up_proj.weight": kit.bf16(kit.rng, 40, 32)}
    tensors["model.norm.weight"] = kit.bf16(kit.rng, 40)
    source = kit.write_checkpoint(kit.tmp / "src", [tensors], PLAIN)
    manifest = kit.tmp / "m.yaml"
    manifest.write_text(kit.manifest_text(source, kit.tmp / "out", NVFP4))
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(manifest)])
    assert stop.value.code == 0, capsys.readouterr().err
    assert "K is not a multiple of 16: kept plain" in capsys.readouterr().out
    output, _ = kit.convert(source, NVFP4)
    found = kit.load(output)
    assert found[f"{A}.down_proj.weight"] == tensors[f"{A}.down_proj.weight"]
    assert found[f"{A}.up_proj.weight"][0] == "U8"
