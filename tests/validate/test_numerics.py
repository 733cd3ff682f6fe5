"""The stage numerics on whole checkpoints: every tensor accounted for, every fault found under its own name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from numerics_folders import GOLDENS, LOSSLESS, Dsv4, Entry, bf16, f32, modelopt, random_mx, rows_of, rules, u8, write
from requant.kernels.reference_repack import repack_oracle
from requant.manifests.schema import NumericsGate
from requant.validate.collector import Collector
from requant.validate.numerics import check_numerics
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import open_folder
from requant.validate.results import Status


def test_a_lossless_deepseek_v4_conversion_passes_and_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    seen: list[tuple[int, int]] = []
    case.check()
    result = check_numerics(tmp_path / "src", tmp_path / "out", LOSSLESS, progress=lambda a, b: seen.append((a, b)))
    assert result.status is Status.PASSED
    assert result.findings == ()
    census = result.data["census"]
    assert (census["source_tensors"], census["output_tensors"]) == (10, 14)
    assert (census["converted"], census["copied"], census["added"], census["dropped"]) == (2, 6, 2, {})
    assert result.data["totals"]["exact"] == 2 * 64 * 128 // 16
    total = sum(len(data) for _, _, data in case.source.values())
    assert seen[-1] == (total, total)
    assert [a for a, _ in seen] == sorted(a for a, _ in seen)
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["status"] == "passed"


def test_lossless_required_fails_naming_tensors_and_counts_and_report_only_counts(tmp_path: Path) -> None:
    case = Dsv4(tmp_path, low=100)
    counts = case.repacked.counts
    assert counts.lossy > 0
    assert counts.shifted > 0
    failed, reported = case.check(), case.check(NumericsGate())
    assert (failed.status, reported.status) == (Status.FAILED, Status.PASSED)
    assert rules(failed) == {"lossy-blocks"}
    assert {f.where for f in failed.errors} <= {"layers.0.ffn.experts.0.w1", "layers.0.ffn.experts.0.w3"}
    assert f"{counts.lossy} of 1,024 blocks lossy in " in failed.reason
    totals = reported.data["totals"]
    assert (totals["exact"], totals["shifted"], totals["lossy"], totals["below_marlin"]) == counts[:4]
    assert totals["max_error"] == float(counts.max_error)
    lossy = totals["lossy_tensors"]
    assert case.check(NumericsGate(max_lossy_tensors=lossy)).status is Status.PASSED
    assert rules(case.check(NumericsGate(max_lossy_tensors=lossy - 1))) == {"lossy-tensors"}


def test_the_window_that_counts_is_that_of_the_fused_pair(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    case.pair[0][1][:] = 124
    case.pair[1][1][:] = 108
    case.pair[1][1][0, 0], case.pair[1][0][0, :16] = 60, 0  # dead, and far below: it does not count
    m, members, _ = repack_oracle(case.pair)
    for name, (codes, scales), source in zip(("w1", "w3"), members, case.pair, strict=True):
        case.output |= modelopt(f"layers.0.ffn.experts.0.{name}", codes, scales, m)
        case.source[f"layers.0.ffn.experts.0.{name}.weight"] = u8(source[0], "I8")
        case.source[f"layers.0.ffn.experts.0.{name}.scale"] = u8(source[1], "F8_E8M0")
    result = case.check()
    assert result.status is Status.PASSED
    rows = rows_of(result)
    assert [(row["span"], row["fused_span"]) for row in rows.values()] == [(0, 16), (0, 16)]
    assert result.data["totals"]["windows"] == {"tensors": 2, "native": 2, "marlin": 0}


@pytest.mark.parametrize(
    ("change", "rule", "where"),
    [
        ("flip a copied byte", "copy-differs", "layers.0.norm.weight"),
        ("flip an MTP scale", "copy-differs", "mtp.0.ffn.experts.0.w1.scale"),
        ("change a copied dtype", "copy-differs", "layers.0.norm.weight"),
        ("lose a tensor", "tensor-missing", "layers.0.attn.wo_b.scale"),
        ("invent a tensor", "tensor-extra", "layers.0.ffn.experts.9.w1.bias"),
        ("leave the source's scale", "tensor-leftover", "layers.0.ffn.experts.0.w1.scale"),
        ("write zeros", "all-zero", "layers.0.ffn.experts.0.w1"),
        ("zero a copied tensor", "copy-differs", "layers.0.norm.weight"),
        ("NaN block scale", "nan-scale", "layers.0.ffn.experts.0.w1"),
        ("global scale off by two", "lossy-blocks", "layers.0.ffn.experts.0.w1"),
        ("lose the global scale", "weight-unpaired", "layers.0.ffn.experts.0.w1"),
        ("swizzled scales", "weight-unpaired", "layers.0.ffn.experts.0.w1"),
        ("cut a row", "weight-unpaired", "layers.0.ffn.experts.0.w1"),
    ],
)
def test_every_fault_is_found_under_its_own_name(tmp_path: Path, change: str, rule: str, where: str) -> None:
    case = Dsv4(tmp_path)
    out = case.output
    w1 = "layers.0.ffn.experts.0.w1"

    def flip(name: str) -> Entry:
        dtype, shape, data = out[name]
        return dtype, shape, data[:-1] + bytes([data[-1] ^ 1])

    codes, scales = case.repacked.members[0]
    edits: dict[str, dict[str, Entry]] = {
        "flip a copied byte": {"layers.0.norm.weight": flip("layers.0.norm.weight")},
        "flip an MTP scale": {"mtp.0.ffn.experts.0.w1.scale": flip("mtp.0.ffn.experts.0.w1.scale")},
        "change a copied dtype": {"layers.0.norm.weight": ("F16", *out["layers.0.norm.weight"][1:])},
        "invent a tensor": {where: f32(1.0)},
        "leave the source's scale": {where: case.source[f"{w1}.scale"]},
        "write zeros": {f"{w1}.weight": u8(np.zeros_like(codes))},
        "zero a copied tensor": {where: ("BF16", (64,), bytes(128))},
        "NaN block scale": {
            f"{w1}.weight_scale": ("F8_E4M3", scales.shape, b"\x7f" + scales.tobytes()[1:]),
        },
        "global scale off by two": {f"{w1}.weight_scale_2": f32(2.0 ** (case.repacked.m + 1))},
        "swizzled scales": {f"{w1}.weight_scale": ("F8_E4M3", (128, 4), scales.tobytes())},
        "cut a row": {
            f"{w1}.weight": u8(codes[:-1]),
            f"{w1}.weight_scale": u8(scales[:-1], "F8_E4M3"),
        },
    }
    out |= edits.get(change, {})
    if change == "lose a tensor":
        del out[where]
    if change == "lose the global scale":
        del out[f"{w1}.weight_scale_2"]
    result = case.check()
    assert result.status is Status.FAILED
    assert where in {finding.where for finding in result.errors if finding.rule == rule}
    if change == "zero a copied tensor":
        assert "all zeros" in next(f.message for f in result.errors if f.where == where)


def test_a_tensor_is_dropped_only_by_a_rule_that_says_so(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    for name in [n for n in case.output if n.startswith("mtp.")]:
        del case.output[name]
    assert rules(case.check()) == {"tensor-missing"}
    drop = "  - {match: 'layers.0.attn.*', to: keep}\n  - {match: 'mtp.*', to: drop}\n"
    result = case.check(layers=drop)
    assert result.status is Status.PASSED
    assert sorted(result.data["census"]["dropped"]) == ["mtp.0.ffn.experts.0.w1.scale", "mtp.0.ffn.experts.0.w1.weight"]
    assert {f.rule for f in result.findings} == {"tensor-dropped"}
    shadowed = "  - {match: '*', to: keep}\n  - {match: 'mtp.*', to: drop}\n"
    assert rules(case.check(layers=shadowed)) == {"tensor-missing"}


def test_compressed_tensors_in_and_out_with_the_global_scale_as_a_divisor(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    codes, scales = random_mx(rng, 32, 64)
    m, [(new, block)], _ = repack_oracle([(codes, scales)])
    x = "language_model.model.layers.0.mlp.down_proj"
    source = write(tmp_path / "src", {f"{x}.weight_packed": u8(codes), f"{x}.weight_scale": u8(scales)})
    outputs = {
        "ct": {
            f"{x}.weight_packed": u8(new),
            f"{x}.weight_scale": u8(block, "F8_E4M3"),
            f"{x}.weight_global_scale": f32(2.0**-m, (1,)),
        },
        "modelopt": modelopt(x, new, block, m),
        "quark": {f"{x}.weight": u8(codes), f"{x}.weight_scale": u8(scales)},
    }
    for name, tensors in outputs.items():
        result = check_numerics(source, write(tmp_path / name, tensors), LOSSLESS)
        assert result.status is Status.PASSED, name
        assert result.data["totals"]["exact"] == 32 * 64 // 16, name
    wrong = {**outputs["ct"], f"{x}.weight_global_scale": f32(2.0**m, (1,))}
    assert "misrounded" in rules(check_numerics(source, write(tmp_path / "wrong", wrong), LOSSLESS))


def test_an_activation_scale_that_was_widened_is_still_the_sources_number(tmp_path: Path) -> None:
    weight = np.random.default_rng(7).integers(0, 120, (32, 64), dtype=np.uint8)
    x = "model.layers.0.mlp.down_proj"
    kept = {f"{x}.weight": u8(weight, "F8_E4M3"), f"{x}.weight_scale": f32(0.5)}
    source = write(tmp_path / "s", {**kept, f"{x}.input_scale": bf16(np.array([0.15625]))})
    for number, wrong in ((0.15625, set()), (0.15626, {f"{x}.input_scale"})):
        output = write(tmp_path / f"o{number}", {**kept, f"{x}.input_scale": f32(number)})
        result = check_numerics(source, output, None)
        assert {f.where for f in result.errors} == wrong
        assert result.status is (Status.FAILED if wrong else Status.PASSED)


def test_a_widened_activation_scale_may_be_that_of_the_weights_it_is_fused_with(tmp_path: Path) -> None:
    weight = np.random.default_rng(7).integers(0, 120, (32, 64), dtype=np.uint8)
    names = [f"model.layers.0.mlp.{leaf}_proj" for leaf in ("gate", "up")]
    kept = {f"{x}.weight": u8(weight, "F8_E4M3") for x in names} | {f"{x}.weight_scale": f32(0.5) for x in names}
    theirs = {f"{x}.input_scale": bf16(np.array([s])) for x, s in zip(names, (0.5, 0.75), strict=True)}
    source = write(tmp_path / "s", {**kept, **theirs})
    for shared, wrong in ((0.75, set()), (0.5, {f"{names[1]}.input_scale"})):
        output = write(tmp_path / f"o{shared}", {**kept, **{f"{x}.input_scale": f32(shared) for x in names}})
        assert {f.where for f in check_numerics(source, output, None).errors} == wrong


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_kept_global_scale_that_is_no_f32_is_compared_by_its_bytes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    codes, scales = random_mx(np.random.default_rng(8), 32, 64)
    m, [(new, block)], _ = repack_oracle([(codes, scales)])
    x = "model.layers.0.mlp.down_proj"
    kept = {**modelopt(x, new, block, m), f"{x}.weight_scale_2": bf16(np.full(shape, 0.5))}
    result = check_numerics(write(tmp_path / "s", kept), write(tmp_path / "o", kept), None)
    assert result.status is Status.PASSED


def test_f4_and_e8m0_dtypes_are_read_as_the_bytes_they_are(tmp_path: Path) -> None:
    codes, scales = random_mx(np.random.default_rng(6), 32, 64)
    m, [(new, block)], _ = repack_oracle([(codes, scales)])
    x = "model.layers.0.mlp.down_proj"
    source = {f"{x}.weight": ("F4", (32, 64), codes.tobytes()), f"{x}.weight_scale": u8(scales, "F8_E8M0")}
    result = check_numerics(write(tmp_path / "s", source), write(tmp_path / "o", modelopt(x, new, block, m)), LOSSLESS)
    assert result.status is Status.PASSED
    assert result.data["totals"]["exact"] == 128


def test_an_unreadable_source_shard_fails_the_stage_instead_of_shrinking_it(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    case.check()
    shard = tmp_path / "src" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    result = check_numerics(tmp_path / "src", tmp_path / "out", None)
    assert "shard-unreadable" in rules(result)


def test_a_small_mapping_budget_changes_nothing_but_the_memory(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    case.check()
    folder = open_folder(tmp_path / "src", Collector())
    thrifty = MappedReader(folder, budget=1)
    for tensor in folder.tensors.values():
        rows = tensor.shape[0] if tensor.shape else 1
        read = b"".join(thrifty.rows(tensor, row, row + 1).tobytes() for row in range(rows))
        assert read == case.source[tensor.name][2]


def test_an_untouched_copy_has_nothing_converted_and_says_so(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    case.check()
    shutil.copytree(tmp_path / "src", tmp_path / "same")
    result = check_numerics(tmp_path / "src", tmp_path / "same", LOSSLESS)
    assert result.status is Status.PASSED
    assert "nothing was converted" in result.reason
    assert result.data["census"]["copied"] == 10


def test_the_second_opinion_never_imports_what_wrote_the_output() -> None:
    for file in (Path(__file__).parents[2] / "validate").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) requant\.convert", file.read_text(), re.MULTILINE), file


def test_codes_that_gptq_chose_are_told_and_not_held_against_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "out"
    shutil.copytree(GOLDENS / "llama_w4a16_nvfp4", folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.weight"][:2] = tensors[f"{name}.weight"][:2] ^ 0x11  # one code up or down
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = GOLDENS / "_src_llama_bf16"
    assert {f.rule for f in check_numerics(source, folder, None).errors} == {"misrounded"}
    rules = "layers: [{match: '*up_proj', to: nvfp4, rounding: gptq}, {match: '*', to: nvfp4}]\n"
    (folder / "requant.manifest.yaml").write_text(rules)
    result = check_numerics(source, folder, None)
    assert result.status is Status.PASSED, result.reason
    assert [f.where for f in result.findings if f.rule == "compensated"] == [name]
    tensors[f"{name}.weight"] = (tensors[f"{name}.weight"] << 4) | (tensors[f"{name}.weight"] >> 4)  # nibbles swapped
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert {f.rule for f in check_numerics(source, folder, None).errors} == {"misrounded"}
