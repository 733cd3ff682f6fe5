"""From a checkpoint folder to a `Decoder`: the family's transformers class says what there is, the files have it.

The class is built from config.json alone (kernels/empty_model.py): its modules tell heads, norms, biases, sinks and
experts apart, and its rotary module has the frequencies. Weights are read through validate's view of the layouts
(modules.py, pairing.py) and joined as a server joins them: q, k and v into one, gate and up into one, the experts of a
layer into one stack. On a GPU packed FP4 stays packed and everything else is BF16; on a CPU all is decoded to FP32.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from requant.kernels.empty_model import ModelUnavailableError, empty_model
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES, NumberFormat
from requant.kernels.w4a4_operands import Fp4Tensor
from requant.validate.collector import Collector
from requant.validate.decode_model import Attention, Decoder, Gate, Layer, Matrix, Mlp, Moe, Router
from requant.validate.modules import Kind, Module, modules_of
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import OpenedFolder, Tensor, open_folder
from requant.validate.pairing import UnreadableError, weight_of
from requant.validate.to_gpu import Transfer

__all__ = ["FAMILIES", "as_bf16", "decoded", "load_decoder"]

FAMILIES: Final = ("gpt_oss", "llama", "qwen3", "qwen3_moe")
"""model_type of the classes whose step this engine knows."""
_PACKED: Final = (Kind.NVFP4, Kind.MXFP4)
_READ_BUDGET: Final = 1 << 40
"""Bytes that may stay mapped: everything is read once, and goes to the GPU."""
_POSITIONS: Final = 4096
"""Rotary tables are made for as many, or for what is asked."""


def load_decoder(
    path: Path,
    *,
    device: str,
    positions: int = _POSITIONS,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Decoder:
    """The decoder in folder `path`. progress: (layers read, layers in all).

    ModelUnavailableError: transformers has no such class, this engine no such family, a weight is missing, or the model
    takes fewer positions.
    """
    folder = open_folder(path, Collector())
    kind = str((folder.config or {}).get("model_type"))
    if kind == "deepseek_v4":
        raise ModelUnavailableError(
            "the decode engine has no deepseek_v4: transformers keeps its compressed keys in tensors that grow with "
            "the text, which no static cache and no CUDA graph can hold"
        )
    if kind not in FAMILIES:
        raise ModelUnavailableError(f"the decode engine knows {', '.join(FAMILIES)}; config.json says {kind}")
    context = (folder.config or {}).get("max_position_embeddings")
    if isinstance(context, int) and positions > context:
        raise ModelUnavailableError(
            f"validate.speed asks for {positions:,} tokens in a row (prompt_tokens and output_tokens), the model takes "
            f"{context:,}"
        )
    return _Reader(folder, empty_model(path), device, positions).decoder(progress)


class _Reader:
    def __init__(self, folder: OpenedFolder, model: Any, device: str, positions: int) -> None:
        self._modules = modules_of(folder.tensors)
        self._tensors = folder.tensors
        self._config = folder.config
        self._reader = MappedReader(folder, _READ_BUDGET)
        self._transfer = Transfer(device)
        self._model = model
        self._device = device
        self._positions = positions
        self._dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def decoder(self, progress: Callable[[int, int], None]) -> Decoder:
        base, config = self._model.model, self._model.config
        layers: list[Layer] = []
        for index, module in enumerate(base.layers):
            layers.append(self._layer(f"model.layers.{index}", module))
            progress(index + 1, len(base.layers))
        embedding = self._values("model.embed_tokens.weight")
        rotary = base.rotary_emb
        angles = torch.arange(self._positions, dtype=torch.float32)[:, None] * rotary.inv_freq.float()[None]
        cos, sin = (
            f(angles).mul(rotary.attention_scaling).to(self._device).contiguous() for f in (torch.cos, torch.sin)
        )
        tied = bool(getattr(config, "tie_word_embeddings", False)) and "lm_head.weight" not in self._tensors
        head = Matrix(NumberFormat.BF16, 2 * embedding.numel(), embedding) if tied else self._joined(["lm_head"])
        return Decoder(
            type(self._model).__name__, embedding, tuple(layers), self._values("model.norm.weight"),
            float(config.rms_norm_eps), head, cos, sin,
        )  # fmt: skip

    def _layer(self, name: str, module: Any) -> Layer:
        experts = hasattr(module.mlp, "experts")
        mlp = self._moe(f"{name}.mlp", module.mlp) if experts else self._mlp(f"{name}.mlp", module.mlp)
        return Layer(
            self._values(f"{name}.input_layernorm.weight"),
            self._attention(f"{name}.self_attn", module.self_attn),
            self._values(f"{name}.post_attention_layernorm.weight"),
            mlp,
        )

    def _attention(self, name: str, module: Any) -> Attention:
        config, dim = self._model.config, int(module.head_dim)
        parts = [f"{name}.{leaf}_proj" for leaf in "qkv"]
        return Attention(
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
            head_dim=dim,
            scale=float(module.scaling),
            qkv=self._joined(parts),
            out=self._joined([f"{name}.o_proj"]),
            qkv_bias=self._bias(parts),
            out_bias=self._optional(f"{name}.o_proj.bias"),
            q_norm=self._optional(f"{name}.q_norm.weight"),
            k_norm=self._optional(f"{name}.k_norm.weight"),
            sinks=self._optional(f"{name}.sinks"),
            window=int(getattr(module, "sliding_window", None) or 0),
        )

    def _mlp(self, name: str, module: Any) -> Mlp:
        _only_silu(self._model.config)
        del module
        parts = [f"{name}.gate_proj", f"{name}.up_proj"]
        return Mlp(
            self._joined(parts), self._joined([f"{name}.down_proj"]), Gate(), self._bias(parts),
            self._optional(f"{name}.down_proj.bias"),
        )  # fmt: skip

    def _moe(self, name: str, module: Any) -> Moe:
        router = module.router if hasattr(module, "router") else module.gate
        leaf = "router" if hasattr(module, "router") else "gate"
        clamped = hasattr(module.experts, "limit")
        if not clamped:
            _only_silu(self._model.config)
        stacked = f"{name}.experts.gate_up_proj" in self._modules
        limit, alpha = (float(module.experts.limit), float(module.experts.alpha)) if clamped else (None, 1.0)
        gate_up, gate_up_bias = self._experts(
            f"{name}.experts", ("gate_up_proj",) if stacked else ("gate_proj", "up_proj")
        )
        down, down_bias = self._experts(f"{name}.experts", ("down_proj",))
        normalize = clamped or bool(getattr(router, "norm_topk_prob", True))
        return Moe(
            Router(
                self._values(f"{name}.{leaf}.weight"),
                int(router.top_k),
                self._optional(f"{name}.{leaf}.bias"),
                normalize,
            ),
            gate_up,
            down,
            Gate(stacked and clamped, limit, alpha),
            gate_up_bias,
            down_bias,
        )

    # --- weights ------------------------------------------------------------------------------------------------------

    def _experts(self, name: str, leaves: Sequence[str]) -> tuple[Matrix, torch.Tensor | None]:
        """The stack [E, N, K] of all experts, and the biases [E, N]."""
        whole = self._modules.get(f"{name}.{leaves[0]}")
        if whole is not None:
            bias = whole.parts.get("bias")
            return self._stack(whole), None if bias is None else self._values(bias.name)
        count = int(getattr(self._model.config, "num_experts", 0))
        count = count or int(self._model.config.num_local_experts)
        each = [self._joined([f"{name}.{index}.{leaf}" for leaf in leaves]) for index in range(count)]
        rows = [[self._optional(f"{name}.{index}.{leaf}.bias") for leaf in leaves] for index in range(count)]
        biases = [torch.cat([b for b in row if b is not None]) for row in rows if row[0] is not None]
        return _stacked(each), torch.stack(biases) if biases else None

    def _stack(self, module: Module) -> Matrix:
        """A module that holds all experts in one tensor, whichever way round."""
        try:
            one = weight_of(module, 0, config=self._config)
        except UnreadableError as error:
            raise ModelUnavailableError(str(error)) from error
        codes = self._plane(one.codes.tensor, turned=one.codes.transposed)
        if one.scales is None or one.decoded is not None:
            if one.decoded is not None:
                raise ModelUnavailableError(f"{module.name} is {one.label}: the decode engine reads FP4 and BF16")
            return Matrix(NumberFormat.BF16, 2 * codes.numel(), codes.to(self._dtype))
        experts = codes.shape[0]
        scales = self._plane(one.scales.tensor, turned=one.scales.transposed)
        found = None if one.global_scale is None else self._scales(one.global_scale, one.reciprocal, experts)
        return self._fp4(codes.reshape(experts, one.rows, -1), scales.reshape(experts, one.rows, -1), found)

    def _joined(self, names: Sequence[str]) -> Matrix:
        """Weights [N, K] one under the other."""
        parts = [self._one(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        if len({part.stored for part in parts}) > 1:
            raise ModelUnavailableError(f"{', '.join(names)} differ in format, and a server joins them")
        nbytes = sum(part.nbytes for part in parts)
        if parts[0].packed is None:
            return Matrix(parts[0].stored, nbytes, torch.cat([part.plain for part in parts if part.plain is not None]))
        packed = [part.packed for part in parts if part.packed is not None]
        scales = {None if p.global_scale is None else float(p.global_scale[0]) for p in packed}
        if len(scales) > 1:
            raise ModelUnavailableError(f"{', '.join(names)} differ in global scale, and a server joins them")
        made = Fp4Tensor(
            packed[0].format, torch.cat([p.codes for p in packed]), torch.cat([p.scales for p in packed]),
            packed[0].global_scale,
        )  # fmt: skip
        return Matrix(parts[0].stored, nbytes, packed=made)

    def _one(self, name: str) -> Matrix:
        module = self._modules.get(name)
        if module is None or module.weight is None:
            raise ModelUnavailableError(f"{type(self._model).__name__} has {name}, and the checkpoint lacks it")
        if module.kind is Kind.PLAIN:
            values = self._values(module.weight.name)
            return Matrix(NumberFormat.BF16, 2 * values.numel(), values)
        if module.kind not in _PACKED:
            raise ModelUnavailableError(f"{name} is {module.kind}: the decode engine reads FP4 and BF16")
        try:
            one = weight_of(module, None)
        except UnreadableError as error:
            raise ModelUnavailableError(str(error)) from error
        assert one.scales is not None  # FP4 has them
        found = None if one.global_scale is None else self._scales(one.global_scale, one.reciprocal, 1)
        codes, scales = self._plane(one.codes.tensor), self._plane(one.scales.tensor)
        return self._fp4(codes.reshape(one.rows, -1), scales.reshape(one.rows, -1), found)

    def _fp4(self, codes: torch.Tensor, scales: torch.Tensor, found: torch.Tensor | None) -> Matrix:
        fmt = NumberFormat.MXFP4 if found is None else NumberFormat.NVFP4
        packed = Fp4Tensor(fmt, codes.contiguous(), scales.contiguous(), found)
        nbytes = codes.numel() + scales.numel() + (0 if found is None else 4 * found.numel())
        if self._device != "cpu":
            return Matrix(fmt, nbytes, packed=packed)
        values = [decoded(packed, e) for e in range(codes.shape[0])] if codes.dim() == 3 else None
        plain = torch.stack(values) if values is not None else decoded(packed, None)
        return Matrix(fmt, nbytes, plain.float())

    def _plane(self, tensor: Tensor, *, turned: bool = False) -> torch.Tensor:
        """A tensor's bytes (or values, where it is a float) on the device; turned: last two axes swapped."""
        raw = cast("torch.Tensor", self._reader.tensor(tensor))
        if raw.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raw = raw.view(torch.uint8)
        moved = self._transfer.copy(raw)
        return moved.transpose(-1, -2).contiguous() if turned else moved

    def _scales(self, tensor: Tensor, reciprocal: bool, experts: int) -> torch.Tensor:
        values = cast("torch.Tensor", self._reader.tensor(tensor)).float().reshape(-1)
        values = 1 / values if reciprocal else values.clone()
        return values.expand(experts).contiguous().to(self._device)

    def _values(self, name: str) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelUnavailableError(f"{type(self._model).__name__} has {name}, and the checkpoint lacks it")
        if tensor.dtype not in ("BF16", "F16", "F32"):
            raise ModelUnavailableError(f"{name} is {tensor.dtype}: the decode engine reads FP4 and BF16")
        return self._transfer.copy(cast("torch.Tensor", self._reader.tensor(tensor))).to(self._dtype)

    def _bias(self, names: Sequence[str]) -> torch.Tensor | None:
        """Their biases one after the other, if they have any."""
        biases = [self._optional(f"{name}.bias") for name in names]
        found = [bias for bias in biases if bias is not None]
        if found and len(found) < len(names):
            raise ModelUnavailableError(f"{', '.join(names)}: some have a bias and some none, and a server joins them")
        return torch.cat(found) if found else None

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._values(name) if name in self._tensors else None


def _only_silu(config: Any) -> None:
    if config.hidden_act != "silu":
        raise ModelUnavailableError(f"hidden_act is {config.hidden_act}: the decode engine knows silu")


def _stacked(each: Sequence[Matrix]) -> Matrix:
    """Experts one by one, as a stack."""
    nbytes = sum(matrix.nbytes for matrix in each)
    if each[0].packed is None:
        return Matrix(each[0].stored, nbytes, torch.stack([m.plain for m in each if m.plain is not None]))
    packed = [m.packed for m in each if m.packed is not None]
    found = [p.global_scale for p in packed if p.global_scale is not None]
    made = Fp4Tensor(
        packed[0].format, torch.stack([p.codes for p in packed]), torch.stack([p.scales for p in packed]),
        torch.cat(found) if found else None,
    )  # fmt: skip
    return Matrix(each[0].stored, nbytes, packed=made)


def decoded(packed: Fp4Tensor, expert: int | None) -> torch.Tensor:
    """The numbers of a weight [N, K], or of one expert's, float64, exact."""
    codes, scales = (packed.codes, packed.scales) if expert is None else (packed.codes[expert], packed.scales[expert])
    table = torch.as_tensor(E2M1_VALUES, dtype=torch.float64, device=codes.device)
    steps = E4M3_VALUES if packed.format is NumberFormat.NVFP4 else E8M0_VALUES
    step = torch.as_tensor(steps, dtype=torch.float64, device=codes.device)[scales.int()]
    values = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]
    values = values * step.repeat_interleave(packed.format.group, dim=-1)
    return values if packed.global_scale is None else values * packed.global_scale[expert or 0].double()


def as_bf16(matrix: Matrix) -> Matrix:
    """The same weight in BF16 (its numbers rounded), as the baseline multiplies it."""
    if matrix.packed is None:
        return matrix
    packed = matrix.packed
    if packed.codes.is_cuda:  # by one launch, where the rest goes through float64 expert by expert
        from requant.kernels.triton.dequantize import to_bf16

        plain = to_bf16(packed)
    elif packed.codes.dim() == 2:
        plain = decoded(packed, None).bfloat16()
    else:
        plain = torch.empty(matrix.shape, dtype=torch.bfloat16)
        for expert in range(packed.codes.shape[0]):
            plain[expert] = decoded(packed, expert)
    return Matrix(NumberFormat.BF16, 2 * plain.numel(), plain)
