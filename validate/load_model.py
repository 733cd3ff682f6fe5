"""A checkpoint as a transformers model that computes with the weights as they are stored.

The class comes from config.json (kernels/empty_model.py); each of its linear layers and expert stacks whose weight is
packed FP4 becomes an `Nvfp4Linear` or `Nvfp4Experts` (fp4_modules.py), everything else is read to FP32. Names are read
through validate's own view of the layouts (modules.py, pairing.py): modelopt and compressed-tensors, NVFP4 and MXFP4,
experts one by one, stacked, interleaved or transposed. A parameter that the checkpoint does not have means that the two
do not belong together, and is an error that names it: a model with some random weights must never be judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from requant.kernels.cpu_dequant import dequantize_fp8_block
from requant.kernels.empty_model import ModelUnavailableError, empty_model, meta_parameters, tie_head
from requant.kernels.formats import NumberFormat, PackedTensor
from requant.validate.collector import Collector
from requant.validate.decoders import decoded_of
from requant.validate.fp4_gpu import Fp32Head
from requant.validate.fp4_modules import Expert, Matrix, Nvfp4Experts, Nvfp4Linear, Packed
from requant.validate.modules import Kind, Module, modules_of
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import OpenedFolder, Tensor, open_folder
from requant.validate.pairing import UnreadableError, weight_of
from torch import nn

__all__ = ["LoadedModel", "load_model"]

_PACKED: Final = frozenset({Kind.NVFP4, Kind.MXFP4})
_LEAVES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""gate, up, down of one expert, by the names that checkpoints use."""
_WIDENED: Final = frozenset({"BF16", "F16", "F32", "F8_E4M3"})
"""Dtypes of tensors that are held in FP32. NVFP4's block scales are E4M3 too: counted so, they err on the safe side."""
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """model: a causal language model in eval mode. packed, plain: weights held as FP4 and as FP32.

    layers: its FP4 modules. unused: tensors of the checkpoint that the class has no place for.
    """

    model: Any
    packed: int
    plain: int
    layers: int
    unused: tuple[str, ...]


def load_model(
    path: Path,
    *,
    trust_remote_code: bool = False,
    w4a4: bool = False,
    keep_decoded: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
) -> LoadedModel:
    """The model in folder `path`, its packed weights kept packed. w4a4: also round activations, by their input_scale.

    keep_decoded: decode each weight once, for speed; ignored where the memory for that is not free. device: on a GPU
    what is plain computes in BF16, but for the output head, which makes its logits in FP32.

    ModelUnavailableError: transformers lacks it, a weight is missing or unreadable, or memory does not suffice.
    """
    folder = open_folder(path, Collector())
    if device == "cpu":
        spare, model = _spare(folder), empty_model(path, trust_remote_code=trust_remote_code)
    else:
        model = empty_model(path, trust_remote_code=trust_remote_code)
        spare = _check_gpu(folder, model)
    return _Loader(folder, w4a4, keep_decoded and spare, device).fill(model)


class _Loader:
    def __init__(self, folder: OpenedFolder, w4a4: bool, keep: bool, device: str) -> None:
        self._folder = folder
        self._modules = modules_of(folder.tensors)
        self._reader = MappedReader(folder)
        self._w4a4 = w4a4
        self._keep = keep
        self._device = device
        self._used: set[str] = set()
        self._packed = 0
        self._plain = 0
        self._layers = 0

    def fill(self, model: Any) -> LoadedModel:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                self._linear(model, name, module)
            elif {"gate_up_proj", "down_proj"} <= set(module._parameters):
                self._experts(model, name, module)
        for name, parameter in list(meta_parameters(model)):
            found = self._find(name)
            if found is not None:
                _set(model, name, parameter, self._values(found))
        tied = tie_head(model)
        missing = [name for name, _ in meta_parameters(model)]
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (" ..." if len(missing) > _SHOWN else "")
            kind = type(model).__name__
            raise ModelUnavailableError(f"{kind} has {len(missing)} weights that the checkpoint lacks: {shown}")
        unused = tuple(n for n in self._folder.tensors if n not in self._used and not (tied and n == "lm_head.weight"))
        if self._device != "cpu":
            for module in model.modules():
                for key, buffer in module._buffers.items():
                    module._buffers[key] = None if buffer is None else buffer.to(self._device)
            head = model.get_output_embeddings()
            if isinstance(head, nn.Linear):
                model.set_output_embeddings(Fp32Head(head))
            elif isinstance(head, Nvfp4Linear):
                head.fp32 = True
        return LoadedModel(model, self._packed, self._plain, self._layers, unused)

    # --- one module ---------------------------------------------------------------------------------------------------

    def _linear(self, model: Any, name: str, linear: nn.Linear) -> None:
        module = self._module(name)
        if module is None or module.kind not in _PACKED:
            return
        packed = self._packed_of(module)
        if packed.shape != (linear.out_features, linear.in_features):
            want = [linear.out_features, linear.in_features]
            raise ModelUnavailableError(f"{module.name} does not have the shape {want} that the config asks for")
        bias = self._values(module.parts["bias"]) if "bias" in module.parts else None
        model.set_submodule(name, Nvfp4Linear(packed, bias, self._activation(module)))
        self._layers += 1

    def _experts(self, model: Any, name: str, original: Any) -> None:
        count = int(original.down_proj.shape[0])
        experts = list(self._stacked(name, count) or self._split(name, count) or ())
        if experts:
            model.set_submodule(name, Nvfp4Experts(original, experts))
            self._layers += 1

    def _stacked(self, name: str, count: int) -> list[Expert] | None:
        """Experts out of `experts.gate_up_proj` and `experts.down_proj`, each a stack of matrices."""
        both, down = self._module(f"{name}.gate_up_proj"), self._module(f"{name}.down_proj")
        if both is None or down is None or both.kind is Kind.PLAIN:
            return None  # plain stacks are the class's own parameters
        biases = [self._values(m.parts["bias"]) if "bias" in m.parts else None for m in (both, down)]
        scales = self._activation(both), self._activation(down)
        self._used.update(part.name for module in (both, down) for part in module.parts.values())
        return [
            Expert(
                self._matrix(both, index),
                self._matrix(down, index),
                None if biases[0] is None else biases[0][index],
                None if biases[1] is None else biases[1][index],
                None if None in scales else cast("tuple[np.float32, np.float32]", scales),
            )
            for index in range(count)
        ]

    def _split(self, name: str, count: int) -> list[Expert] | None:
        """Experts out of `experts.E.gate_proj`, `up_proj` and `down_proj` (or w1, w3, w2)."""
        leaves = next((ls for ls in _LEAVES if self._module(f"{name}.0.{ls[0]}") is not None), None)
        if leaves is None:
            return None
        experts: list[Expert] = []
        for index in range(count):
            found = [self._module(f"{name}.{index}.{leaf}") for leaf in leaves]
            if None in found:
                raise ModelUnavailableError(f"{name}.{index} has not all of {', '.join(leaves)}")
            gate, up, down = cast("list[Module]", found)
            biases = [self._values(m.parts["bias"]) if "bias" in m.parts else None for m in (gate, up, down)]
            scales = self._activation(gate), self._activation(down)
            pair = None if biases[0] is None or biases[1] is None else (biases[0], biases[1])
            experts.append(
                Expert(
                    (self._matrix(gate), self._matrix(up)),
                    self._matrix(down),
                    pair,
                    biases[2],
                    None if None in scales else cast("tuple[np.float32, np.float32]", scales),
                )
            )
        return experts

    # --- one weight ---------------------------------------------------------------------------------------------------

    def _matrix(self, module: Module, expert: int | None = None) -> Matrix:
        if module.kind in _PACKED:
            return self._packed_of(module, expert)
        tensor = cast("Tensor", module.weight)
        self._used.add(tensor.name)
        return self._values(tensor)

    def _packed_of(self, module: Module, expert: int | None = None) -> Packed:
        if "pre_quant_scale" in module.parts:
            raise ModelUnavailableError(f"{module.name} was smoothed (AWQ): its pre_quant_scale is not applied here")
        try:
            weight = weight_of(module, expert)
        except UnreadableError as error:
            raise ModelUnavailableError(str(error)) from error
        if weight.scales is None:
            raise ModelUnavailableError(f"{module.name} has no block scales")
        self._used.update(part.name for part in module.parts.values())
        scale: np.float32 | None = None
        if weight.global_scale is not None:
            scale = np.float32(self._scalar(weight.global_scale, expert))
            scale = np.float32(1.0) / scale if weight.reciprocal else scale
        elif weight.format is NumberFormat.NVFP4:
            raise ModelUnavailableError(f"{module.name} has no global scale")
        codes = self._reader.codes(weight.codes, 0, weight.rows)
        scales = self._reader.codes(weight.scales, 0, weight.rows)
        self._packed += weight.rows * weight.k
        return Packed(PackedTensor(weight.format, codes, scales, scale), keep=self._keep)

    def _activation(self, module: Module) -> np.float32 | None:
        """The static activation scale, if it is wanted and there is one."""
        tensor = module.input_scale
        if tensor is None:
            return None
        self._used.add(tensor.name)
        if not self._w4a4:
            return None
        value = np.float32(self._scalar(tensor, None))
        return np.float32(1.0) / value if "input_global_scale" in module.parts else value

    def _scalar(self, tensor: Tensor, expert: int | None) -> float:
        """An F32 scalar, or the expert's one of a vector."""
        if tensor.dtype != "F32":
            raise ModelUnavailableError(f"{tensor.name} is {tensor.dtype}, a scale must be F32")
        values = np.frombuffer(self._reader.rows(tensor, 0, max(1, tensor.shape[0] if tensor.shape else 1)), "<f4")
        return float(values[expert if expert is not None and values.size > 1 else 0])

    def _values(self, tensor: Tensor) -> torch.Tensor:
        """A plain or FP8 tensor in FP32."""
        self._used.add(tensor.name)
        raw = cast("torch.Tensor", self._reader.tensor(tensor))
        self._plain += tensor.elements
        if tensor.dtype != "F8_E4M3":
            return self._placed(raw.to(torch.float32).clone())
        module = self._modules[tensor.name.rpartition(".")[0]]
        scales = module.block_scale
        if scales is None or len(tensor.shape) != 2:
            raise ModelUnavailableError(f"{tensor.name} is FP8 and has no scales that could be read")
        self._used.add(scales.name)
        decoded = decoded_of(module, self._folder.config)
        if isinstance(decoded, str):
            raise ModelUnavailableError(f"{tensor.name} {decoded}")
        if module.input_scale is not None:
            self._used.add(module.input_scale.name)
        grid = cast("torch.Tensor", self._reader.tensor(scales))
        table = grid.view(torch.uint8) if scales.dtype in ("F8_E8M0", "U8") else grid.to(torch.float32)
        (rows, k), (high, wide) = tensor.shape, decoded.block
        table = table.reshape(-(-rows // high), -(-k // wide))
        out = np.empty((rows, k), dtype=np.float32)
        dequantize_fp8_block(raw.view(torch.uint8).numpy(), table.contiguous().numpy(), decoded.block, out)
        return self._placed(torch.as_tensor(out))

    def _placed(self, values: torch.Tensor) -> torch.Tensor:
        return values if self._device == "cpu" else values.to(self._device, torch.bfloat16)

    def _find(self, parameter: str) -> Tensor | None:
        for name in _aliases(parameter):
            if name in self._folder.tensors:
                return self._folder.tensors[name]
        return None

    def _module(self, name: str) -> Module | None:
        return next((self._modules[alias] for alias in _aliases(name) if alias in self._modules), None)


def _aliases(name: str) -> Iterator[str]:
    """The name, and what other producers call it."""
    yield name
    if ".mlp." in name:
        yield name.replace(".mlp.", ".block_sparse_moe.")  # Mixtral, MiniMax, Kimi


def _set(model: Any, name: str, parameter: Any, values: torch.Tensor) -> None:
    head, _, leaf = name.rpartition(".")
    if values.shape != parameter.shape:
        raise ModelUnavailableError(f"{name} is {list(values.shape)}, the config asks for {list(parameter.shape)}")
    setattr(model.get_submodule(head), leaf, nn.Parameter(values, requires_grad=False))


def _spare(folder: OpenedFolder) -> bool:
    """Whether memory would also hold the packed weights decoded, three times over.

    ModelUnavailableError if it does not even hold the weights, plain ones in FP32.
    """
    tensors = folder.tensors.values()
    plain = sum(tensor.elements * 4 for tensor in tensors if tensor.dtype in _WIDENED)
    packed = sum(tensor.nbytes for tensor in tensors if tensor.dtype not in _WIDENED)
    free = _free_memory()
    if free is None:
        return False
    if plain + packed > free:
        raise ModelUnavailableError(f"the model needs {(plain + packed) / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    return plain + 3 * 8 * packed < free


def _check_gpu(folder: OpenedFolder, model: Any) -> bool:
    """False: on a GPU nothing is kept decoded. ModelUnavailableError if the weights do not fit there."""
    tensors = folder.tensors.values()
    needed = sum(t.elements * 2 if t.dtype in _WIDENED else t.nbytes for t in tensors) + _fp32_head(folder, model)
    free = int(torch.cuda.mem_get_info()[0])
    if needed > free:
        raise ModelUnavailableError(f"the model needs {needed / 1e9:.1f} GB of the GPU, {free / 1e9:.1f} GB are free")
    return False


def _fp32_head(folder: OpenedFolder, model: Any) -> int:
    """Bytes of the FP32 copy that the output head becomes (`Fp32Head`) beside its BF16 weight, or the embedding's that
    it shares; 0 where it is packed, and stays so."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return 0
    name = next((name for name, module in model.named_modules() if module is head), "")
    stored = modules_of(folder.tensors).get(name)
    return 0 if stored is not None and stored.kind in _PACKED else 4 * head.weight.numel()


def _free_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux
    return None
