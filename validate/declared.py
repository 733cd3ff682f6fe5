"""What an output says about itself: config.json's quantization_config and hf_quant_config.json, read into one shape.

Both spell the same facts differently (`ignore` and `exclude_modules`, `kv_cache_scheme` and `kv_cache_quant_algo`,
group sizes in config_groups or at the top), so that they can only be compared after reading. Unknown methods are kept
by name: saying "not a format this tool writes" is better than guessing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

from requant.validate.modules import Kind
from requant.validate.opened import as_object

__all__ = [
    "ALGO_KINDS",
    "Declared",
    "Dialect",
    "nested_configs",
    "read_hf_quant",
    "read_quantization_config",
    "strings",
]

ALGO_KINDS: Mapping[str, Kind] = {
    "NVFP4": Kind.NVFP4,
    "NVFP4_AWQ": Kind.NVFP4,
    "W4A16_NVFP4": Kind.NVFP4,
    "W4A8_NVFP4_FP8": Kind.NVFP4,
    "MXFP4": Kind.MXFP4,
    "W4A8_MXFP4_FP8": Kind.MXFP4,
    "FP8": Kind.FP8,
    "FP8_PB_WO": Kind.FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": Kind.FP8,
}
"""modelopt's algorithm names and what the weights then are."""


class Dialect(StrEnum):
    """Whose metadata this is."""

    MODELOPT = "modelopt"
    MODELOPT_MIXED = "modelopt_mixed"
    HYBRID = "fp8 with modelopt experts"
    COMPRESSED_TENSORS = "compressed-tensors"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Declared:
    """One file's statement.

    exclude: modules said to be plain; None where the key is absent. kv: "FP8", "NVFP4" or None. layers: module -> algo
    of MIXED_PRECISION. activations: whether quantized activations (an input scale) are declared; None where not said.
    """

    dialect: Dialect
    method: str
    algo: str
    group_sizes: frozenset[int] = frozenset()
    exclude: tuple[str, ...] | None = None
    kv: str | None = None
    layers: Mapping[str, str] = field(default_factory=dict[str, str])
    activations: bool | None = None
    producer: str = ""
    raw: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def kind(self) -> Kind | None:
        """What the weights are that no list names; None for MIXED_PRECISION and for unknown algorithms."""
        return ALGO_KINDS.get(self.algo)

    @property
    def mixed(self) -> bool:
        """Whether each module has an entry of its own."""
        return self.algo == "MIXED_PRECISION"


def read_quantization_config(raw: Mapping[str, object]) -> Declared:
    """Read config.json's quantization_config, modelopt's or compressed-tensors' or the DeepSeek-V4 hybrid's."""
    method = str(raw.get("quant_method", "")).lower()
    groups = [group for value in (as_object(raw.get("config_groups")) or {}).values() if (group := as_object(value))]
    producer = str((as_object(raw.get("producer")) or {}).get("name", ""))
    if method == "compressed-tensors":
        style = str(raw.get("format", "")) or next((str(group.get("format", "")) for group in groups), "")
        algo = style.upper().removesuffix("-PACK-QUANTIZED").replace("FLOAT-QUANTIZED", "FP8")
        dialect = Dialect.COMPRESSED_TENSORS
    else:
        algo = str(raw.get("quant_algo", "") or "").upper()
        dialect = _dialect(method, raw)
    return Declared(
        dialect=dialect,
        method=method,
        algo=algo,
        group_sizes=_group_sizes(raw, groups),
        exclude=strings(raw["ignore"]) if "ignore" in raw else None,
        kv=_kv(raw.get("kv_cache_scheme")) or _kv(raw.get("kv_cache_quant_algo")),
        layers=_layers(raw.get("quantized_layers")),
        activations=any(as_object(group.get("input_activations")) for group in groups) if groups else None,
        producer=producer,
        raw=raw,
    )


def read_hf_quant(raw: Mapping[str, object]) -> Declared:
    """Read hf_quant_config.json (modelopt's nested form)."""
    inner = as_object(raw.get("quantization")) or {}
    return Declared(
        dialect=Dialect.MODELOPT,
        method="modelopt",
        algo=str(inner.get("quant_algo", "") or "").upper(),
        group_sizes=_group_sizes(inner, []),
        exclude=strings(inner["exclude_modules"]) if "exclude_modules" in inner else None,
        kv=_kv(inner.get("kv_cache_quant_algo")),
        layers=_layers(inner.get("quantized_layers")),
        producer=str((as_object(raw.get("producer")) or {}).get("name", "")),
        raw=inner,
    )


def nested_configs(config: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """Every quantization_config below the top level, by its dotted place (`text_config.quantization_config`)."""
    places: dict[str, Mapping[str, object]] = {}

    def walk(node: Mapping[str, object], place: str) -> None:
        for key, value in node.items():
            inner = as_object(value)
            if inner is None:
                continue
            if key in ("quantization_config", "compression_config") and place:
                places[f"{place}.{key}"] = inner
            elif key not in ("quantization_config", "compression_config"):
                walk(inner, f"{place}.{key}" if place else key)

    walk(config, "")
    return places


def strings(value: object) -> tuple[str, ...]:
    """The strings of a JSON list; empty for anything else."""
    if not isinstance(value, list):
        return ()
    return tuple(item for item in cast("Sequence[object]", value) if isinstance(item, str))


def _dialect(method: str, raw: Mapping[str, object]) -> Dialect:
    if method == "modelopt_mixed":
        return Dialect.MODELOPT_MIXED
    if method.startswith("modelopt"):
        return Dialect.MODELOPT
    if method == "fp8" and ("moe_quant_algo" in raw or "quant_algo" in raw):
        return Dialect.HYBRID
    return Dialect.OTHER


def _group_sizes(raw: Mapping[str, object], groups: Sequence[Mapping[str, object]]) -> frozenset[int]:
    weights = [inner for group in groups if (inner := as_object(group.get("weights")))]
    values = [raw.get("group_size"), *(weight.get("group_size") for weight in weights)]
    return frozenset(value for value in values if isinstance(value, int))


def _kv(value: object) -> str | None:
    scheme = as_object(value)
    if scheme is not None:
        bits = scheme.get("num_bits")
        return {8: "FP8", 4: "NVFP4"}.get(bits, "other") if isinstance(bits, int) else "other"
    return value.upper() if isinstance(value, str) and value else None


def _layers(value: object) -> dict[str, str]:
    entries = as_object(value) or {}
    return {name: str((as_object(entry) or {}).get("quant_algo", "")).upper() for name, entry in entries.items()}
