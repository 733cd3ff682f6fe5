"""One output, parsed: its folder, its modules, and what it declares of them. What every contract rule is handed.

`claimed(module)` answers the one question on which most rules turn: what does the metadata make a runtime expect here?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from requant.validate.collector import Collector
from requant.validate.declared import ALGO_KINDS, Declared, Dialect, read_hf_quant, read_quantization_config
from requant.validate.modules import Kind, Module, expert_of, modules_of
from requant.validate.opened import OpenedFolder, as_object

__all__ = ["OutputView", "aliases", "config_int", "view_of"]

QUANTIZED = frozenset({Kind.NVFP4, Kind.MXFP4, Kind.FP8})
EMBEDDINGS = ("embed", "embedding", "embeddings", "embed_tokens", "embed_in", "wte", "wpe", "pos_emb")
"""Ends of the names of token and position embeddings, which runtimes never quantize whatever a list says."""


@dataclass(frozen=True, slots=True)
class OutputView:
    """The parsed output. in_config and in_hf_quant: the two statements; declared: the one that runtimes follow."""

    folder: OpenedFolder
    modules: Mapping[str, Module]
    in_config: Declared | None
    in_hf_quant: Declared | None

    @property
    def declared(self) -> Declared | None:
        """config.json wins; hf_quant_config.json only where it says nothing (SGLang and vLLM both)."""
        return self.in_config or self.in_hf_quant

    @property
    def quantized(self) -> list[Module]:
        """The modules with NVFP4, MXFP4 or FP8 weights, in the tensors' order."""
        return [module for module in self.modules.values() if module.kind in QUANTIZED]

    @property
    def hidden_layers(self) -> int | None:
        """num_hidden_layers, None where the config does not say."""
        return config_int(self.folder.config, "num_hidden_layers")

    @property
    def is_moe(self) -> bool:
        """Whether any quantized module is an expert."""
        return any(module.stacked or expert_of(module.name) for module in self.quantized)

    def linears(self) -> list[Module]:
        """Plain modules that a runtime builds as a linear layer: a 2-D `.weight` that is no embedding."""
        return [
            module
            for module in self.modules.values()
            if module.kind is Kind.PLAIN
            and (weight := module.parts.get("weight")) is not None
            and (len(weight.shape) == 2 or (module.stacked and len(weight.shape) == 3))
            and not module.name.endswith(EMBEDDINGS)
        ]

    def claimed(self, name: str) -> str | None:
        """The algorithm that `quantized_layers` gives a module, by its own name, an alias or a parent; else None."""
        declared = self.declared
        if declared is None:
            return None
        for alias in aliases(name) if declared.dialect is Dialect.MODELOPT_MIXED else (name,):
            prefix = alias
            while prefix:
                if prefix in declared.layers:
                    return declared.layers[prefix]
                prefix = prefix.rpartition(".")[0]
        return None

    def claimed_kind(self, name: str) -> Kind | None:
        """`claimed` as a kind; None where nothing is said or the algorithm is unknown."""
        return ALGO_KINDS.get(self.claimed(name) or "")


def view_of(folder: OpenedFolder, found: Collector) -> OutputView:
    """Parse an opened folder; a quantization_config that is no object goes to `found`."""
    config = folder.config or {}
    raw = config.get("quantization_config", config.get("compression_config"))
    in_config: Declared | None = None
    if raw is not None:
        parsed = as_object(raw)
        if parsed is None:
            found.error(
                "quantization-config-malformed",
                "quantization_config is not an object",
                where="config.json",
                hint="write the object of the target format",
            )
        else:
            in_config = read_quantization_config(parsed)
    in_hf_quant = read_hf_quant(folder.hf_quant) if folder.hf_quant is not None else None
    return OutputView(folder, modules_of(folder.tensors), in_config, in_hf_quant)


def config_int(config: Mapping[str, object] | None, *keys: str) -> int | None:
    """The first of `keys` that is an integer, at the top level or inside text_config."""
    places: list[Callable[[str], object]] = [(config or {}).get]
    text = as_object((config or {}).get("text_config"))
    if text is not None:
        places.append(text.get)
    for place in places:
        for key in keys:
            value = place(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def aliases(name: str) -> tuple[str, ...]:
    """The names under which modelopt_mixed lists one module of a wrapper model (Kimi-K3), the name itself first.

    With `language_model.model.`, with `model.` and bare; `block_sparse_moe` and `mlp` in turn.
    """
    wrapper = next((prefix for prefix in _WRAPPERS if name.startswith(prefix)), "")
    bare = name.removeprefix(wrapper)
    heads = (name, f"language_model.model.{bare}", f"model.{bare}", bare)
    names = [head.replace(old, new) for head in heads for old, new in _MOE_NAMES]
    return tuple(dict.fromkeys([*heads, *names]))


_WRAPPERS = ("language_model.model.", "model.language_model.", "language_model.", "model.")
_MOE_NAMES = ((".block_sparse_moe.", ".mlp."), (".mlp.", ".block_sparse_moe."))
