"""Run a source checkpoint's model over many sequences with one decoder layer in memory at a time.

The transformers class is built empty (kernels/empty_model.py). What lies outside the decoder layers (embeddings, final
norm) is read once. Each decoder layer's `forward` is wrapped: when the model calls it with the hidden states of all
sequences, its weights are read from the source, whatever their format and layout (decode.py), it runs over a few
sequences at a time, and its weights are dropped. So memory is one layer and the hidden states, however large the model.

Fused expert stacks are replaced by `_Experts`, so that the input of every single expert can be seen. An `Observer` is
told the input of every linear layer, by the name that the weight has in the source, and the keys and values as the
cache would get them (after the rotary embedding: a wrapper around the class's own attention function).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

import numpy as np
import torch
from requant.convert.checkpoint import Catalogue
from requant.convert.decode import float_tiles
from requant.convert.files import Files
from requant.convert.layouts.base import SourceWeight
from requant.convert.layouts.layout import Layout
from requant.convert.rows import read_whole
from requant.kernels.empty_model import ModelUnavailableError, empty_model, meta_parameters, transformers_module
from torch import nn

__all__ = ["Observer", "SourceModel"]

_AT_ONCE: Final = 2048
"""Tokens that a layer takes at a time: its intermediate values stay below those of a large weight."""
_AT_ONCE_EXPERTS: Final = 16384
"""The same where there are experts: each is read anew for every such stretch."""
_LEAVES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_ATTENTION: Final = "requant_observed"


class Observer(Protocol):
    """What is told of a run.

    x [tokens, K] FP32, of any number of tokens, none too; names: the weights it goes into. same_as: a weight that was
    told of the very same input just before (q_proj for k_proj). routed: how many tokens an expert of a stack was given.
    """

    def linear(self, names: Sequence[str], x: torch.Tensor, same_as: str | None) -> None: ...

    def routed(self, experts: str, expert: int, tokens: int) -> None: ...

    def cache(self, attention: str, key: torch.Tensor, value: torch.Tensor) -> None: ...

    def layer_done(self, layer: str) -> None: ...


class _Source:
    """Weights of a checkpoint in FP32."""

    def __init__(self, catalogue: Catalogue, layout: Layout) -> None:
        self.catalogue = catalogue
        self.weights = {weight.module: weight for weight in layout.weights(catalogue)}
        self._fds = Files(catalogue.root, os.O_RDONLY)

    def source(self, file: str) -> int:
        return self._fds(file)

    def output(self, shard: int) -> int:
        raise ValueError(f"nothing is written: shard {shard}")

    def close(self) -> None:
        self._fds.close()

    def matrix(self, weight: SourceWeight, expert: int = 0) -> torch.Tensor:
        """[N, K] of one weight, or of one expert of a stack."""
        out = torch.empty(weight.rows, weight.cols)
        for first, tile in float_tiles(weight, expert * weight.rows, 1, weight.rows, self):
            out[first : first + len(tile)] = _wide(tile)
        return out

    def parameter(self, name: str) -> torch.Tensor | None:
        """A parameter of the model by its name there; None if the source has nothing of that name."""
        module, _, leaf = name.rpartition(".")
        weight = self.weights.get(module)
        if leaf == "weight" and weight is not None and not weight.experts:
            return self.matrix(weight)
        tensor = self.catalogue.tensors.get(name)
        if tensor is None:
            return None
        stored = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}.get(tensor.dtype)
        if stored is None:
            raise ModelUnavailableError(f"{name} is {tensor.dtype}, expected a plain tensor")
        return _wide(read_whole(tensor, self).view(stored)).reshape(tensor.shape)


def _wide(values: Any) -> torch.Tensor:
    """FP32 of BF16 bits, F16 or F32."""
    if values.dtype == np.uint16:
        return torch.as_tensor((values.astype(np.uint32) << np.uint32(16)).view(np.float32))
    return torch.as_tensor(values.astype(np.float32))


class SourceModel:
    """The model of a source folder. observer: told of every input. Use `close` when done."""

    def __init__(self, root: Path, catalogue: Catalogue, layout: Layout, observer: Observer) -> None:
        self._source = _Source(catalogue, layout)
        self._observer = observer
        self._model = empty_model(root)
        self._names = {id(module): name for name, module in self._model.named_modules()}
        self.layers = self._decoder_layers()
        self._seen: tuple[torch.Tensor, str] | None = None
        inside = tuple(f"{name}." for name in self.layers)
        for name, _ in list(meta_parameters(self._model)):
            if not name.startswith(inside) and not name.startswith("lm_head."):
                self._load(name)
        for name, layer in self.layers.items():
            self._wrap(name, layer)
        self._observe_attention()
        self._tick: Callable[[int], None] = lambda _: None

    def close(self) -> None:
        """Give the files back."""
        self._source.close()

    def run(self, ids: torch.Tensor, tick: Callable[[int], None] = lambda _: None) -> torch.Tensor:
        """ids [sequences, tokens] through all layers; the last hidden states. tick: tokens done in a layer."""
        self._tick = tick
        with torch.inference_mode():
            out = self._model.base_model(input_ids=ids, use_cache=False)
            hidden = out.last_hidden_state
            if "lm_head" in self._source.weights:
                self._observer.linear(["lm_head"], hidden.reshape(-1, hidden.shape[-1]), None)
        return hidden

    # --- weights ------------------------------------------------------------------------------------------------------

    def _decoder_layers(self) -> dict[str, Any]:
        config = self._model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        for name, module in self._model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == text.num_hidden_layers:
                return {f"{name}.{index}": layer for index, layer in enumerate(module)}
        raise ModelUnavailableError(f"{type(self._model).__name__} has no list of decoder layers")

    def _load(self, name: str) -> None:
        values = self._source.parameter(name)
        head, _, leaf = name.rpartition(".")
        parent: Any = self._model.get_submodule(head)
        if values is None:
            raise ModelUnavailableError(f"{type(self._model).__name__} has {name}, which the source lacks")
        if values.shape != parent._parameters[leaf].shape:
            shapes = f"{list(values.shape)}, the config asks for {list(parent._parameters[leaf].shape)}"
            raise ModelUnavailableError(f"{name} is {shapes}")
        parent._parameters[leaf] = nn.Parameter(values, requires_grad=False)

    def _wrap(self, name: str, layer: Any) -> None:
        forward = layer.forward
        experts = [(n, m) for n, m in layer.named_modules() if {"gate_up_proj", "down_proj"} <= set(m._parameters)]
        for inner, original in experts:
            count = int(original.down_proj.shape[0])
            layer.set_submodule(inner, _Experts(f"{name}.{inner}", original, count, self))
        for inner, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._hook(f"{name}.{inner}"))

        def streamed(hidden: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            for parameter, _ in list(meta_parameters(layer)):
                self._load(f"{name}.{parameter}")
            batch, tokens = hidden.shape[:2]
            step = max(1, (_AT_ONCE_EXPERTS if experts else _AT_ONCE) // tokens)
            done: list[torch.Tensor] = []
            for first in range(0, batch, step):
                part = slice(first, first + step)
                out: Any = forward(
                    hidden[part],
                    *(_sliced(value, batch, part) for value in args),
                    **{key: _sliced(value, batch, part) for key, value in options.items()},
                )
                done.append(cast("torch.Tensor", out[0] if isinstance(out, tuple) else out))
                self._tick(tokens * done[-1].shape[0])
            self._seen = None
            self._observer.layer_done(name)
            for inner in layer.modules():
                for leaf, value in list(inner._parameters.items()):
                    if value is not None:
                        inner._parameters[leaf] = nn.Parameter(value.to("meta"), requires_grad=False)
            return torch.cat(done)

        layer.forward = streamed

    # --- what is seen -------------------------------------------------------------------------------------------------

    def _hook(self, name: str) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        def before(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            self.observe([name], inputs[0])

        return before

    def observe(self, names: list[str], x: torch.Tensor) -> None:
        """Tell of an input."""
        same_as = self._seen[1] if self._seen is not None and self._seen[0] is x else None
        if same_as is None:
            self._seen = (x, names[0])
        self._observer.linear(names, x.reshape(-1, x.shape[-1]), same_as)

    def routed(self, experts: str, expert: int, tokens: int) -> None:
        """Tell how many tokens an expert was given."""
        self._observer.routed(experts, expert, tokens)

    def experts_of(self, name: str) -> Iterator[tuple[list[str], list[torch.Tensor], list[torch.Tensor | None]]]:
        """Of each expert of a stack: names, [gate, up, down] or [gate_up, down], and their biases."""
        weights = self._source.weights
        both, down = weights.get(f"{name}.gate_up_proj"), weights.get(f"{name}.down_proj")
        if both is not None and down is not None:
            biases = [None if w.bias is None else self._source.parameter(w.bias.name) for w in (both, down)]
            for expert in range(both.experts):
                yield (
                    [both.module, down.module],
                    [self._source.matrix(both, expert), self._source.matrix(down, expert)],
                    [None if b is None else b[expert] for b in biases],
                )
            return
        leaves = next((ls for ls in _LEAVES if f"{name}.0.{ls[0]}" in weights), None)
        if leaves is None:
            raise ModelUnavailableError(f"the source has no experts under {name}")
        expert = 0
        while f"{name}.{expert}.{leaves[0]}" in weights:
            names = [f"{name}.{expert}.{leaf}" for leaf in leaves]
            yield (
                names,
                [self._source.matrix(weights[n]) for n in names],
                [self._source.parameter(f"{n}.bias") for n in names],
            )
            expert += 1

    def _observe_attention(self) -> None:
        """Put a function in the place of attention that looks at keys and values and calls the class's own."""
        classes = transformers_module()

        def observed(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
            name = self._names.get(id(module))
            if name is not None:
                self._observer.cache(name, key, value)
            own = sys.modules[type(module).__module__].eager_attention_forward
            return own(module, query, key, value, mask, **options)

        try:
            masks: Any = importlib.import_module("transformers.masking_utils")
            classes.AttentionInterface.register(_ATTENTION, observed)
            classes.AttentionMaskInterface.register(_ATTENTION, masks.eager_mask)
            self._model.set_attn_implementation(_ATTENTION)
        except (AttributeError, ValueError, ImportError):
            return  # a class with attention of its own: no KV scales, which whoever needs them will say


def _sliced(value: Any, batch: int, part: slice) -> Any:
    """The part of an argument that belongs to some of the sequences."""
    if isinstance(value, torch.Tensor) and batch > 1 and value.dim() > 1 and value.shape[0] == batch:
        return value[part]
    return value


class _Experts(nn.Module):
    """The experts of a layer, one after the other, read when the first token comes."""

    def __init__(self, name: str, original: Any, count: int, owner: SourceModel) -> None:
        super().__init__()
        for leaf in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            original._parameters.pop(leaf, None)
        self._original = (original,)
        self._owner = (owner,)
        self._name = name
        self._count = count

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [..., H], index and weights [tokens, k] -> [..., H]; every expert is told of, chosen or not."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        out = torch.zeros_like(flat)
        original, owner = self._original[0], self._owner[0]
        for expert, (names, matrices, biases) in enumerate(owner.experts_of(self._name)):
            token, slot = torch.where(index == expert)
            x = flat[token]
            if len(names) == 2:  # the stack has one scale: only this tells which of its experts saw nothing
                owner.routed(self._name, expert, len(x))
            owner.observe(names[:-1], x)
            parts = [nn.functional.linear(x, m, b) for m, b in zip(matrices[:-1], biases[:-1], strict=True)]
            if len(parts) == 2:
                together = getattr(original, "is_concatenated", True)
                parts = [torch.cat(parts, -1) if together else torch.stack(parts, -1).flatten(-2)]
            inner = original._apply_gate(parts[0])
            owner.observe(names[-1:], inner)
            y = nn.functional.linear(inner, matrices[-1], biases[-1])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out.reshape(hidden.shape)
