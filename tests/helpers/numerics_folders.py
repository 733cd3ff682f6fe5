"""Checkpoint folders for the tests of the stage numerics, written byte by byte: any dtype, any fault."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from requant.kernels.reference_repack import repack_oracle
from requant.manifests.schema import NumericsGate
from requant.validate.numerics import check_numerics
from requant.validate.results import StageResult

GOLDENS = Path(__file__).parents[1] / "goldens" / "modelopt"
LOSSLESS = NumericsGate(lossless="required")
Entry = tuple[str, tuple[int, ...], bytes]


def write(folder: Path, tensors: dict[str, Entry], shards: int = 1) -> Path:
    """A checkpoint folder, written byte by byte so that any dtype and any fault can be expressed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        body = b""
        for name in names[shard::shards]:
            dtype, shape, data = tensors[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
            body += data
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + body)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def u8(array: np.ndarray, dtype: str = "U8") -> Entry:
    return dtype, array.shape, array.tobytes()


def f32(value: float, shape: tuple[int, ...] = ()) -> Entry:
    return "F32", shape, np.float32(value).tobytes()


def bf16(array: np.ndarray) -> Entry:
    return "BF16", array.shape, (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def random_mx(rng: np.random.Generator, rows: int, k: int, low: int = 112, high: int = 124) -> tuple[np.ndarray, ...]:
    return (
        rng.integers(0, 256, (rows, k // 2), dtype=np.uint8),
        rng.integers(low, high + 1, (rows, k // 32), dtype=np.uint8),
    )


def modelopt(module: str, codes: np.ndarray, scales: np.ndarray, m: int) -> dict[str, Entry]:
    return {
        f"{module}.weight": u8(codes),
        f"{module}.weight_scale": u8(scales, "F8_E4M3"),
        f"{module}.weight_scale_2": f32(2.0**m),
        f"{module}.input_scale": f32(1.0),
    }


def rules(result: StageResult) -> set[str]:
    return {finding.rule for finding in result.errors}


def rows_of(result: StageResult) -> dict[str, dict]:
    tensors = result.data["tensors"]
    return {row[0]: dict(zip(tensors["columns"], row, strict=True)) for row in tensors["rows"]}


class Dsv4:
    """One DeepSeek-V4 expert pair and its output: w1 and w3 in different shards, an MTP expert, an FP8 weight."""

    def __init__(self, path: Path, low: int = 112) -> None:
        rng = np.random.default_rng(3)
        self.path = path
        self.pair = [random_mx(rng, 64, 128, low) for _ in range(2)]
        for codes, _ in self.pair:
            codes[:8] &= 0xAA  # 0 and 1 only: these rows halve exactly
        mtp = random_mx(rng, 16, 64)
        self.source: dict[str, Entry] = {}
        for name, (codes, scales) in zip(("w1", "w3"), self.pair, strict=True):
            self.source[f"layers.0.ffn.experts.0.{name}.weight"] = u8(codes, "I8")
            self.source[f"layers.0.ffn.experts.0.{name}.scale"] = u8(scales, "F8_E8M0")
        kept = {
            "mtp.0.ffn.experts.0.w1.weight": u8(mtp[0], "I8"),
            "mtp.0.ffn.experts.0.w1.scale": u8(mtp[1], "F8_E8M0"),
            "layers.0.attn.wo_b.weight": u8(rng.integers(0, 120, (64, 64), dtype=np.uint8), "F8_E4M3"),
            "layers.0.attn.wo_b.scale": u8(np.array([[120]], np.uint8), "F8_E8M0"),
            "layers.0.norm.weight": bf16(rng.standard_normal(64)),
            "layers.0.step": ("I64", (), struct.pack("<q", 7)),
        }
        self.source |= kept
        self.repacked = repack_oracle(self.pair)
        self.output = dict(kept)
        for name, (codes, scales) in zip(("w1", "w3"), self.repacked.members, strict=True):
            self.output |= modelopt(f"layers.0.ffn.experts.0.{name}", codes, scales, self.repacked.m)

    def check(self, gate: NumericsGate | None = LOSSLESS, layers: str = "") -> StageResult:
        source = write(self.path / "src", self.source, shards=2)
        output = write(self.path / "out", self.output)
        if layers:
            (output / "requant.manifest.yaml").write_text(f"layers:\n{layers}")
        return check_numerics(source, output, gate)
