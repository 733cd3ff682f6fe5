"""What stands beside the weights: config.json, hf_quant_config.json, the index.

The source's config is kept key by key; only quantization_config (wherever it stood) is replaced. The exclude list names
the modules that were in fact left plain, in full, so that no runtime's matcher can read more or less into it; a whole
attention block left plain is written `prefix.self_attn*`, as modelopt does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, Final, cast

from requant.convert.checkpoint import Catalogue
from requant.convert.input_scales import KV_SUFFIXES
from requant.convert.layouts.reading import PLAIN_DTYPES
from requant.convert.layouts.writing import FP8_BLOCK, Form
from requant.convert.plan import Plan

__all__ = ["exclude_modules", "index_json", "metadata_files"]

DSV4_IGNORE: Final = ("*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*")
"""nvidia/DeepSeek-V4-Flash-NVFP4, config.json: the four globs that vLLM and SGLang know the hybrid by."""

_ATTENTION: Final = "self_attn"


def producer() -> dict[str, str]:
    """SGLang takes only producers whose name starts with modelopt; the version says who really wrote it."""
    return {"name": "modelopt", "version": f"requant-{version('requant')}"}


def metadata_files(plan: Plan) -> dict[str, dict[str, Any]]:
    """File name -> JSON content of every metadata file of the output."""
    if not plan.groups:
        return _unconverted(plan)
    config = copy.deepcopy(dict(plan.catalogue.config))
    source_quant = dict(plan.catalogue.quantization_config)
    config.pop("quantization_config", None)
    text = config.get("text_config")
    if isinstance(text, dict):
        text.pop("quantization_config", None)  # pyright: ignore[reportUnknownMemberType]
    files: dict[str, dict[str, Any]] = {}
    if not plan.converted:
        config.pop("expert_dtype", None)  # DeepSeek-V4: says that experts are FP4, and nothing is any more
    elif plan.layout == "deepseek-v4":
        config["quantization_config"], files["hf_quant_config.json"] = _deepseek_v4(plan, source_quant)
    elif plan.manifest.target.layout == "compressed-tensors":
        config["quantization_config"] = _compressed_tensors(plan)
    elif plan.manifest.target.layout == "deepseek-v3":
        config["quantization_config"] = _deepseek_v3(plan)
    elif len(formats_of(plan)) > 1:
        config["quantization_config"], files["hf_quant_config.json"] = _mixed_formats(plan)
    elif plan.layout == "compressed-tensors" and _is_mixed(plan):
        config["quantization_config"], files["hf_quant_config.json"] = _mixed_experts(plan)
    else:
        config["quantization_config"], files["hf_quant_config.json"] = _modelopt(plan)
    files["config.json"] = config
    if len(plan.shards) > 1:
        files["model.safetensors.index.json"] = index_json(plan)
    return files


def _unconverted(plan: Plan) -> dict[str, dict[str, Any]]:
    """An output in which nothing was converted says of itself what its source said."""
    files: dict[str, dict[str, Any]] = {"config.json": dict(plan.catalogue.config)}
    if plan.catalogue.hf_quant_config is not None:
        files["hf_quant_config.json"] = dict(plan.catalogue.hf_quant_config)
    if len(plan.shards) > 1:
        files["model.safetensors.index.json"] = index_json(plan)
    return files


def index_json(plan: Plan) -> dict[str, Any]:
    """The index: total_size counts the tensors' bytes as written."""
    total = sum(tensor.nbytes for tensor in plan.tensors)
    names = sorted(range(len(plan.tensors)), key=lambda i: plan.tensors[i].name)
    return {
        "metadata": {"total_size": total},
        "weight_map": {plan.tensors[i].name: plan.shards[plan.tensors[i].shard].file for i in names},
    }


_NO_WEIGHTS: Final = ("bias", "weight_scale", "weight_scale_inv")
"""Ends of the names of float tensors with two dimensions that are nobody's weight: FP8's scale grids are F32."""


def plain_modules(plan: Plan) -> list[str]:
    """Modules whose weight has two dimensions or more and was not converted, sorted.

    Weights that are bare parameters count too: stacked experts by the module that holds them, others by their name.
    """
    converted = set(plan.converted)
    plain: set[str] = set()
    for tensor in plan.tensors:
        if len(tensor.shape) < 2 or tensor.dtype not in PLAIN_DTYPES or tensor.name.endswith(_NO_WEIGHTS):
            continue
        module = tensor.name.removesuffix(".weight")
        if module == tensor.name and len(tensor.shape) > 2:
            module = module.rpartition(".")[0] or module
        if module not in converted:
            plain.add(module)
    return sorted(plain | tied_heads(plan.catalogue))


def tied_heads(catalogue: Catalogue) -> set[str]:
    """The output head of a model that ties it to its embedding: a module without a tensor, and a plain one.

    Runtimes build it all the same, and with the target's format unless the exclude list names it.
    """
    text: Mapping[str, Any] = catalogue.config.get("text_config") or {}
    if not catalogue.config.get("tie_word_embeddings", text.get("tie_word_embeddings")):
        return set()
    heads: set[str] = set()
    for name in catalogue.tensors:
        if name.endswith("embed_tokens.weight"):
            prefix = name.removesuffix("embed_tokens.weight").removesuffix("model.").removesuffix("model.language_")
            if f"{prefix}lm_head.weight" not in catalogue.tensors:
                heads.add(f"{prefix}lm_head")
    return heads


def exclude_modules(plain: Iterable[str], converted: Iterable[str]) -> list[str]:
    """The exclude list: full names, and `prefix.self_attn*` where nothing under that prefix was converted."""
    busy = {m.rpartition(f".{_ATTENTION}.")[0] for m in converted if f".{_ATTENTION}." in m}
    names: set[str] = set()
    for module in plain:
        prefix, mark, _ = module.rpartition(f".{_ATTENTION}.")
        names.add(f"{prefix}.{_ATTENTION}*" if mark and prefix not in busy else module)
    return sorted(names)


def formats_of(plan: Plan) -> dict[str, list[Form]]:
    """The forms in the output by quantized format; one list per format, in the plan's order."""
    found: dict[str, list[Form]] = {}
    for unit in plan.groups:
        for member in unit.members:
            if member.form.number != "bf16":
                found.setdefault(member.form.number, []).append(member.form)
    return found


def kv_algo(plan: Plan) -> str | None:
    """FP8 where the output holds KV-cache scales, or what the source said of its own; None without scales."""
    if not any(tensor.name.endswith(KV_SUFFIXES) for tensor in plan.tensors):
        return None
    inner: Any = (plan.catalogue.hf_quant_config or {}).get("quantization")
    stated: Any = cast("dict[str, Any]", inner).get("kv_cache_quant_algo") if isinstance(inner, dict) else None
    return str(stated) if stated else "FP8"


_FP8_KV: Final = {"dynamic": False, "num_bits": 8, "type": "float"}


def _weights(group: int) -> dict[str, Any]:
    return {"dynamic": False, "num_bits": 4, "type": "float", "group_size": group}


def _group_of(number: str, with_input: bool, targets: list[str]) -> dict[str, Any]:
    """One of modelopt's config groups."""
    weights = _weights(16) if number == "nvfp4" else {"dynamic": False, "num_bits": 8, "type": "float"}
    group: dict[str, Any] = {"weights": weights, "targets": targets}
    return {"input_activations": dict(weights), **group} if with_input else group


def _modelopt(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """modelopt 0.47's two forms of the same statement."""
    ignore = exclude_modules(plain_modules(plan), plan.converted)
    kv = kv_algo(plan)
    names = {"nvfp4": "NVFP4", "nvfp4-w4a16": "W4A16_NVFP4", "mxfp4": "mxfp4"}
    algo = names.get(plan.target_format) or _fp8_algo(formats_of(plan)["fp8"][0])
    nested: dict[str, Any] = {"quant_algo": algo, "kv_cache_quant_algo": kv}
    flat: dict[str, Any] = {}
    if "NVFP4" in algo:
        nested["group_size"] = 16
        flat["config_groups"] = {"group_0": _group_of("nvfp4", algo == "NVFP4", ["Linear"])}
    elif algo == "FP8":
        flat["config_groups"] = {"group_0": _group_of("fp8", True, ["Linear"])}
    nested["exclude_modules"] = ignore
    if kv:
        flat["kv_cache_scheme"] = dict(_FP8_KV) if kv == "FP8" else kv
    flat |= {"ignore": ignore, "quant_algo": algo, "producer": producer(), "quant_method": "modelopt"}
    return flat, {"producer": producer(), "quantization": nested}


def _fp8_algo(form: Form) -> str:
    """modelopt's name by the shape of the weight's scale: one, [N], or [N/128, 1, K/128, 1]."""
    ranks = {0: "FP8", 1: "FP8_PER_CHANNEL_PER_TOKEN", 4: "fp8_pb_wo"}
    return ranks[len(form.scales.shape) if form.scales else 0]


def _mixed_formats(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """modelopt's MIXED_PRECISION: every quantized module by name; what is not named is plain."""
    number_of = {m.module: m.form.number for u in plan.groups for m in u.members if m.form.number != "bf16"}
    entries: dict[str, dict[str, Any]] = {
        "fp8": {"quant_algo": "FP8"},
        "nvfp4": {"quant_algo": "NVFP4", "group_size": 16},
    }
    layers = {module: dict(entries[number]) for module, number in number_of.items()}
    groups = {
        f"group_{index}": _group_of(number, True, sorted(m for m, n in number_of.items() if n == number))
        for index, number in enumerate(n for n in entries if n in number_of.values())
    }
    kv = kv_algo(plan)
    flat: dict[str, Any] = {"config_groups": groups, "quantized_layers": layers, "ignore": []}
    if kv:
        flat["kv_cache_scheme"] = dict(_FP8_KV) if kv == "FP8" else kv
    flat |= {"quant_algo": "MIXED_PRECISION", "producer": producer(), "quant_method": "modelopt"}
    nested = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": kv, "quantized_layers": layers}
    return flat, {"producer": producer(), "quantization": nested}


def _deepseek_v3(plan: Plan) -> dict[str, Any]:
    """Fine-grained FP8 as vLLM, SGLang and transformers read it; modules left plain by name, as transformers lists."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(FP8_BLOCK),
        "modules_to_not_convert": [m for m in plain_modules(plan) if not m.endswith("embed_tokens")],
    }


def expert_modules(converted: Iterable[str]) -> list[str]:
    """The `...experts` modules that hold converted experts."""
    return sorted({module.partition(".experts.")[0] + ".experts" for module in converted if ".experts." in module})


def _deepseek_v4(plan: Plan, source: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hybrid that vLLM and SGLang load: still `fp8`, NVFP4 experts named layer by layer, never weight-only."""
    layers = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in expert_modules(plan.converted)}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": _weights(16), "input_activations": _weights(16)}
    flat: dict[str, Any] = {
        **source,
        "config_groups": {"group_0": group},
        "group_size": 16,
        "ignore": list(DSV4_IGNORE),
        "kv_cache_quant_algo": None,
        "moe_quant_algo": "NVFP4",
        "producer": producer(),
        "quant_algo": "MIXED_PRECISION",
        "quant_method": "fp8",
        "quantized_layers": layers,
    }
    nested = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "quantized_layers": layers,
        "exclude_modules": list(DSV4_IGNORE),
    }
    return flat, {"producer": producer(), "quantization": nested}


def _is_mixed(plan: Plan) -> bool:
    """A wrapper model whose text part was quantized (Kimi-K3): described layer by layer, under all its aliases."""
    text = plan.catalogue.config.get("text_config")
    return isinstance(text, dict) and bool(expert_modules(plan.converted))


_WRAPPERS: Final = ("language_model.model.", "model.language_model.", "language_model.", "model.")
_BLOCKS: Final = ("block_sparse_moe", "mlp")


def aliases(module: str) -> list[str]:
    """The names under which runtimes look an expert module up: each wrapper prefix or none, each block name."""
    bare = module
    for prefix in _WRAPPERS:
        if bare.startswith(prefix):
            bare = bare.removeprefix(prefix)
            break
    names: dict[str, None] = {module: None}
    for prefix in ("language_model.model.", "model.", ""):
        for block in _BLOCKS:
            name = prefix + bare
            for other in _BLOCKS:
                name = name.replace(f".{other}.", f".{block}.")
            names[name] = None
    return list(names)


def _mixed_experts(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Kimi-K3: quant_method modelopt_mixed, expert modules under each alias. Nothing published to compare it with."""
    algo = "NVFP4" if plan.target_format == "nvfp4" else "W4A16_NVFP4"
    layers = {
        alias: {"quant_algo": algo, "group_size": 16}
        for module in expert_modules(plan.converted)
        for alias in aliases(module)
    }
    ignore = exclude_modules(plain_modules(plan), plan.converted)
    flat = {
        "quant_algo": "MIXED_PRECISION",
        "quant_method": "modelopt_mixed",
        "ignore": ignore,
        "producer": producer(),
        "quantized_layers": layers,
    }
    nested = {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "quantized_layers": layers,
        "exclude_modules": ignore,
    }
    return flat, {"producer": producer(), "quantization": nested}


def _compressed_tensors(plan: Plan) -> dict[str, Any]:
    """compressed-tensors 0.20: nvfp4-pack-quantized, mxfp4-pack-quantized, float-quantized."""
    (number, forms), *_ = formats_of(plan).items()
    kind, weights, activations = _ct_fp8(forms[0]) if number == "fp8" else _ct_fp4(plan, number)
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "version": "0.20.0",
        "config_groups": {
            "group_0": {
                "format": kind,
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": [m for m in plain_modules(plan) if not m.endswith("embed_tokens")],
        "kv_cache_scheme": kv if kv_algo(plan) else None,
    }


def _ct_fp4(plan: Plan, number: str) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    nvfp4 = number == "nvfp4"
    weights: dict[str, Any] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if nvfp4 else "group",
        "group_size": 16 if nvfp4 else 32,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8",
    }
    activations = {**weights, "dynamic": "local"} if plan.target_format == "nvfp4" else None
    return f"{number}-pack-quantized", weights, activations


def _ct_fp8(form: Form) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Weights per tensor, channel or block; activations by the scale that stands beside, or anew for every token."""
    static = form.input_scale is not None
    grain = {1: "channel", form.rows: "tensor"}.get(form.block[0], "block")
    weights: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "strategy": grain,
        "symmetric": True,
        "dynamic": False,
        **({"block_structure": list(form.block)} if grain == "block" else {}),
    }
    activations: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor" if static else {"tensor": "tensor", "channel": "token"}.get(grain, "group"),
        "symmetric": True,
        "dynamic": not static,
        **({"group_size": form.block[1]} if grain == "block" else {}),
    }
    return "float-quantized", weights, activations
