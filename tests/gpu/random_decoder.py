"""Decoders with random weights at a family's real shapes, made where they are measured: every kind the same numbers.

Codes and power-of-two scales are drawn once for a matrix. MXFP4 stores them as they are, NVFP4 as the lossless
conversion writes them, and BF16 is their values, so that all kinds of one config compute the same, route tokens to the
same experts (up to rounding) and differ in bytes and kernels alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, cast

import torch
from requant.kernels.formats import NumberFormat, e4m3_pow2_byte
from requant.kernels.w4a4_operands import Fp4Tensor
from requant.validate.decode_load import as_bf16
from requant.validate.decode_model import Attention, Decoder, Gate, Layer, Matrix, Mlp, Moe, Router

NVFP4, MXFP4, BF16 = NumberFormat.NVFP4, NumberFormat.MXFP4, NumberFormat.BF16
KINDS: Final = {
    "nvfp4": (NVFP4, BF16, BF16, BF16),
    "nvfp4-head": (NVFP4, BF16, BF16, NVFP4),
    "nvfp4-out": (NVFP4, BF16, NVFP4, NVFP4),
    "nvfp4-all": (NVFP4, NVFP4, NVFP4, NVFP4),
    "mxfp4": (MXFP4, BF16, BF16, BF16),
    "bf16": (BF16, BF16, BF16, BF16),
}
"""Formats of experts (or the MLP), of attention's q, k and v, of its output projection, and of the head."""
_E2M1_RMS: Final = 2.93
"""Of the sixteen codes, each as likely."""
_EXPONENTS: Final = 4
"""Block scales span so many powers of two."""
_E8M0_BIAS: Final = 127


@dataclass(slots=True)
class RandomDecoders:
    """Of one config.json. `make(kind)` draws what it needs and keeps codes and scales for the next kind."""

    config: Mapping[str, object]
    positions: int
    device: str = "cuda"
    _drawn: dict[str, Fp4Tensor] = field(default_factory=dict)
    _plain: dict[str, torch.Tensor] = field(default_factory=dict)

    def make(self, kind: str) -> Decoder:
        """The decoder in the formats of KINDS[kind]."""
        c, hidden = self.config, self._int("hidden_size")
        heads, kv = self._int("num_attention_heads"), self._int("num_key_value_heads")
        dim = self._int("head_dim") if c.get("head_dim") else hidden // heads
        vocabulary, family = self._int("vocab_size"), str(c["model_type"])
        mlp_format, qkv_format, out_format, head_format = KINDS[kind]
        kinds = cast("list[str]", c.get("layer_types") or [])
        biased = bool(c.get("attention_bias"))
        layers: list[Layer] = []
        for index in range(self._int("num_hidden_layers")):
            at = f"{index}"
            sliding = index < len(kinds) and kinds[index] == "sliding_attention"
            attention = Attention(
                heads, kv, dim, dim**-0.5,
                self._matrix(f"{at}.qkv", qkv_format, (heads + 2 * kv) * dim, hidden),
                self._matrix(f"{at}.out", out_format, hidden, heads * dim),
                qkv_bias=self._vector(f"{at}.qkv_bias", (heads + 2 * kv) * dim) if biased else None,
                out_bias=self._vector(f"{at}.out_bias", hidden) if biased else None,
                q_norm=self._ones(dim) if family.startswith("qwen3") else None,
                k_norm=self._ones(dim) if family.startswith("qwen3") else None,
                sinks=self._vector(f"{at}.sinks", heads) if family == "gpt_oss" else None,
                window=self._int("sliding_window") if sliding else 0,
            )  # fmt: skip
            mlp = self._mlp(at, family, hidden, mlp_format)
            layers.append(Layer(self._ones(hidden), attention, self._ones(hidden), mlp))
        base = float(cast("float", c.get("rope_theta") or 10000.0))
        angles = torch.arange(self.positions)[:, None] / base ** (torch.arange(0, dim, 2) / dim)[None]
        return Decoder(
            str(cast("list[str]", c["architectures"])[0]), self._vector("embedding", vocabulary, hidden, 1.0),
            tuple(layers), self._ones(hidden), float(cast("float", c["rms_norm_eps"])),
            self._matrix("head", head_format, vocabulary, hidden),
            angles.cos().to(self.device), angles.sin().to(self.device),
        )  # fmt: skip

    def _mlp(self, at: str, family: str, hidden: int, fmt: NumberFormat) -> Moe | Mlp:
        experts = int(cast("int", self.config.get("num_local_experts") or self.config.get("num_experts") or 0))
        if not experts:
            inner = self._int("intermediate_size")
            pair = (self._matrix(f"{at}.up", fmt, 2 * inner, hidden), self._matrix(f"{at}.down", fmt, hidden, inner))
            return Mlp(*pair, Gate())
        ours = family == "gpt_oss"
        inner = self._int("intermediate_size" if ours else "moe_intermediate_size")
        bias = self._vector(f"{at}.router_bias", experts) if ours else None
        normalize = ours or bool(self.config.get("norm_topk_prob"))
        weight = self._vector(f"{at}.router", experts, hidden)
        return Moe(
            Router(weight, self._int("num_experts_per_tok"), bias, normalize),
            self._matrix(f"{at}.up", fmt, experts, 2 * inner, hidden),
            self._matrix(f"{at}.down", fmt, experts, hidden, inner),
            Gate(True, float(cast("float", self.config["swiglu_limit"])), 1.702) if ours else Gate(),
            self._vector(f"{at}.up_bias", experts, 2 * inner) if ours else None,
            self._vector(f"{at}.down_bias", experts, hidden) if ours else None,
        )

    def _matrix(self, name: str, fmt: NumberFormat, *shape: int) -> Matrix:
        """Numbers of about 1 / sqrt(K)."""
        k = shape[-1]
        lowest = round(math.log2(1 / math.sqrt(k) / _E2M1_RMS)) - _EXPONENTS // 2
        if name not in self._drawn:
            codes = torch.randint(0, 256, (*shape[:-1], k // 2), dtype=torch.uint8, device=self.device)
            size = (*shape[:-1], k // MXFP4.group)
            steps = torch.randint(0, _EXPONENTS, size, dtype=torch.uint8, device=self.device)
            self._drawn[name] = Fp4Tensor(MXFP4, codes, steps + (lowest + _E8M0_BIAS), None)
        drawn = self._drawn[name]
        if fmt is NVFP4:
            table = [e4m3_pow2_byte(step) for step in range(_EXPONENTS)]
            bytes_of = torch.tensor(table, dtype=torch.uint8, device=self.device)
            scales = bytes_of[(drawn.scales - (lowest + _E8M0_BIAS)).long()].repeat_interleave(2, -1)
            whole = torch.full((shape[0] if len(shape) == 3 else 1,), 2.0**lowest, device=self.device)
            packed = Fp4Tensor(NVFP4, drawn.codes, scales, whole)
            return Matrix(NVFP4, drawn.codes.numel() + scales.numel() + whole.nbytes, packed=packed)
        stored = Matrix(MXFP4, drawn.codes.numel() + drawn.scales.numel(), packed=drawn)
        if fmt is MXFP4:
            return stored
        if name not in self._plain:
            plain = as_bf16(stored).plain
            assert plain is not None
            self._plain[name] = plain
        plain = self._plain[name]
        return Matrix(BF16, plain.nbytes, plain)

    def _vector(self, name: str, *shape_and_std: float) -> torch.Tensor:
        """Normal values in BF16, drawn once; the last argument is their deviation if it is no size."""
        *sizes, last = shape_and_std
        shape, std = (sizes, last) if isinstance(last, float) else (shape_and_std, 0.02)
        if name not in self._plain:
            values = torch.empty([int(size) for size in shape], dtype=torch.bfloat16, device=self.device)
            self._plain[name] = values.normal_(0, std)
        return self._plain[name]

    def _ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16, device=self.device)

    def _int(self, key: str) -> int:
        return int(cast("int", self.config[key]))
