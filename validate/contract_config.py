"""Contract, metadata: what the two config files say agrees with itself and with the tensors.

Rules about places (top level, nested, both files), about algorithms and group sizes, about activations (W4A4 or W4A16),
KV-cache scales, MTP blocks and tied heads, and about the size of the result. Exclude lists have a file of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from requant.validate.collector import Collector
from requant.validate.contract_scales import ScaleFacts
from requant.validate.declared import ALGO_KINDS, Declared, Dialect, nested_configs, read_quantization_config
from requant.validate.modules import Kind, is_mtp
from requant.validate.opened import as_object
from requant.validate.output_view import OutputView, config_int

__all__ = ["bits_per_weight", "check_activations", "check_declared", "check_kv", "check_places", "check_special"]

NOMINAL_BITS = {Kind.NVFP4: 4.5, Kind.MXFP4: 4.25}
"""Codes and block scales per weight; the global scales do not count."""
BITS_TOLERANCE = 0.1
HEADS = ("lm_head.weight", "head.weight", "output.weight", "embed_out.weight")
EMBED_TENSORS = ("embed_tokens.weight", "embed.weight", "wte.weight", "tok_embeddings.weight")


def check_places(view: OutputView, found: Collector) -> None:
    """A quantization_config stands at the top level of config.json, once, and only where something is quantized."""
    config = view.folder.config
    if config is None:
        return
    nested = nested_configs(config)
    if not view.quantized:
        if view.in_config is not None or nested or view.in_hf_quant is not None:
            where = next(iter(nested), "quantization_config") if view.in_hf_quant is None else "hf_quant_config.json"
            message = "the metadata declares quantized weights and no tensor is quantized"
            found.error("leftover-quantization-config", message, where=where, hint="remove it, nested copies too")
        return
    if view.in_config is None and view.in_hf_quant is None and not nested:
        weight = next(weight for module in view.quantized if (weight := module.weight) is not None)
        example = f"{weight.name} {weight.dtype}{list(weight.shape)}"
        message = f"weights are quantized ({example}) and no file says so: loaders expect other shapes or raw values"
        found.error("quantization-config-missing", message, where="config.json", hint="write quantization_config")
        return
    for place, inner in nested.items():
        if view.in_config is None:
            message = "the only quantization_config is nested: loaders of wrapper models look at the top level"
            found.error("quantization-config-nested", message, where=place, hint="move it to the top level")
        elif inner != view.in_config.raw:
            algo = read_quantization_config(inner).algo or read_quantization_config(inner).method
            message = f"contradicts the top level ({algo or 'unnamed'} against {view.in_config.algo})"
            found.error("quantization-config-conflict", message, where=place, hint="remove the nested one")
        else:
            message = "repeats the top-level quantization_config"
            found.warning("quantization-config-twice", message, where=place, hint="keep the one at the top level")
    _check_both_files(view, found)


def _check_both_files(view: OutputView, found: Collector) -> None:
    ours, theirs = view.in_config, view.in_hf_quant
    if ours is None and theirs is not None:
        message = "only hf_quant_config.json declares the format: SGLang and Transformers follow config.json"
        found.error("quantization-config-one-sided", message, where="config.json", hint="write quantization_config too")
    if ours is None or theirs is None:
        if ours is not None and ours.dialect in (Dialect.MODELOPT, Dialect.MODELOPT_MIXED, Dialect.HYBRID):
            message = "is absent: TensorRT-LLM and older runtimes read it"
            found.warning("hf-quant-config-missing", message, where="hf_quant_config.json", hint="write both files")
        return
    if ours.dialect in (Dialect.COMPRESSED_TENSORS, Dialect.OTHER):
        message = f"belongs to modelopt layouts, config.json says {ours.method or 'nothing'}"
        found.error("metadata-disagree", message, where="hf_quant_config.json", hint="remove it")
        return
    facts: Sequence[tuple[str, object, object]] = (
        ("quant_algo", ours.algo, theirs.algo),
        ("kv cache", ours.kv, theirs.kv),
        ("exclude list", set(ours.exclude or ()), set(theirs.exclude or ())),
        ("quantized_layers", dict(ours.layers), dict(theirs.layers)),
        ("producer", ours.producer, theirs.producer),
    )
    for label, here, there in facts:
        if here != there:
            message = f"{label}: config.json says {_brief(here)}, hf_quant_config.json says {_brief(there)}"
            found.error("metadata-disagree", message, where=label, hint="both state the same facts: write both anew")
    if ours.group_sizes and theirs.group_sizes and not theirs.group_sizes <= ours.group_sizes:
        message = f"group_size: config.json says {sorted(ours.group_sizes)}, the other {sorted(theirs.group_sizes)}"
        found.error("metadata-disagree", message, where="group_size", hint="NVFP4 is 16, MXFP4 is 32")


def _brief(value: object) -> str:
    text = repr(sorted(value)) if isinstance(value, set) else repr(value)  # pyright: ignore[reportUnknownArgumentType]
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_declared(view: OutputView, found: Collector) -> None:
    """Each quantized module is what the metadata says it is, and a MIXED_PRECISION map lists exactly the modules."""
    declared = view.declared
    if declared is None or not view.quantized:
        return
    if declared.dialect is Dialect.OTHER:
        message = (
            f"quant_method {declared.method or '(none)'} is not one that this tool knows: only tensors were checked"
        )
        if any(module.kind is Kind.NVFP4 for module in view.quantized):
            message = f"quant_method {declared.method or '(none)'} says nothing of the NVFP4 weights that are there"
            hint = "write the target layout's keys; beside quant_method fp8: quant_algo, moe_quant_algo, group_size"
            found.error("dialect-unknown", message, where="config.json", hint=hint)
        else:
            found.warning("dialect-unknown", message, where="config.json")
        return
    wrong = {size for size in declared.group_sizes if declared.kind in NOMINAL_BITS and size != _group(declared)}
    if wrong:
        message = f"group_size {sorted(wrong)} with {declared.algo}, which has {_group(declared)}"
        found.error("group-size", message, where="quantization_config", hint="NVFP4 is 16, MXFP4 is 32")
    for module in view.quantized:
        claim = view.claimed_kind(module.name) if declared.mixed else declared.kind
        if declared.dialect is Dialect.HYBRID:
            claim = claim if claim is not None else _hybrid_kind(view, module.name, module.kind)
        if claim is not None and module.kind is not claim:
            _report_mismatch(view, module.name, module.kind, claim, found)
        elif claim is None and declared.mixed:
            message = f"is {module.kind.value} and not in quantized_layers: runtimes build it plain"
            found.error("quantized-not-listed", message, where=module.name, hint="list every quantized module")
    if declared.mixed and declared.dialect is Dialect.MODELOPT and len(set(declared.layers.values())) == 1:
        message = f"MIXED_PRECISION with nothing but {next(iter(declared.layers.values()))}"
        hint = "declare that algorithm itself with an exclude list: runtimes choose faster kernels for it"
        found.warning("mixed-precision-uniform", message, where="quantization_config", hint=hint)
    for name, algo in declared.layers.items() if declared.mixed else ():
        if declared.dialect is not Dialect.MODELOPT_MIXED and not _listed_exists(view, name):
            message = f"quantized_layers lists it as {algo} and no such quantized module is there"
            found.error("listed-not-quantized", message, where=name, hint="list only what was quantized")


def _group(declared: Declared) -> int:
    return 16 if declared.kind is Kind.NVFP4 else 32


def _hybrid_kind(view: OutputView, name: str, actual: Kind) -> Kind:
    """Outside quantized_layers the DeepSeek-V4 hybrid is FP8, and MXFP4 where the experts of MTP blocks stayed."""
    return Kind.MXFP4 if actual is Kind.MXFP4 and is_mtp(name, view.hidden_layers) else Kind.FP8


def _listed_exists(view: OutputView, name: str) -> bool:
    if name in view.modules:
        return view.modules[name].kind in ALGO_KINDS.values() and view.modules[name].kind is not Kind.PLAIN
    return any(module.name.startswith(f"{name}.") for module in view.quantized)


def _report_mismatch(view: OutputView, name: str, actual: Kind, claim: Kind, found: Collector) -> None:
    if actual is Kind.MXFP4 and claim is Kind.NVFP4:
        scale = view.modules[name].block_scale
        message = f"still holds MXFP4 scales ({scale.dtype if scale else '?'}, one per 32) and is declared NVFP4"
        hint = "such tensors load without an error and give garbage: convert the module or exclude it"
        found.error("scale-is-e8m0", message, where=name, hint=hint)
    else:
        message = f"is {actual.value} and declared {claim.value}"
        found.error("declared-algo-mismatch", message, where=name, hint="convert the module or correct the metadata")


def check_activations(view: OutputView, found: Collector) -> None:
    """Input scales stand exactly where the metadata announces quantized activations."""
    declared = view.declared
    if declared is None:
        return
    for module in view.quantized:
        if module.kind is not Kind.NVFP4:
            continue
        algo = (view.claimed(module.name) or "") if declared.mixed else declared.algo
        weight_only = algo == "W4A16_NVFP4" or (
            declared.dialect is Dialect.COMPRESSED_TENSORS and declared.activations is False
        )
        if weight_only and module.input_scale is not None:
            message = "carries an input scale and is declared weight-only (W4A16)"
            found.error("w4a16-has-input-scale", message, where=module.input_scale.name, hint="drop it or declare W4A4")
        elif not weight_only and module.input_scale is None and algo != "NVFP4_AWQ":
            message = "has no input_scale and is declared W4A4"
            hint = "vLLM would compute NaN or zeros, SGLang takes 1.0: write the scale, or declare W4A16_NVFP4"
            found.error("input-scale-missing", message, where=module.name, hint=hint)
    if declared.dialect in (Dialect.MODELOPT, Dialect.MODELOPT_MIXED) and not declared.mixed:
        if declared.algo == "NVFP4" and declared.activations is False:
            message = "quant_algo is NVFP4 and no config group has input_activations: runtimes disagree on what that is"
            found.error("w4a16-not-declared", message, where="quantization_config", hint="declare W4A16_NVFP4")
        if declared.algo == "W4A16_NVFP4" and declared.activations:
            message = "quant_algo is W4A16_NVFP4 and config_groups quantize input_activations"
            found.error("w4a16-not-declared", message, where="quantization_config", hint="remove input_activations")


def check_kv(view: OutputView, facts: ScaleFacts, found: Collector) -> None:
    """KV-cache scales are there if and only if a KV format is declared, in pairs, under a name that loaders know."""
    declared = view.declared
    keys = sorted(name for name in facts.kv if name.endswith("k_scale"))
    values = sorted(name for name in facts.kv if name.endswith("v_scale"))
    kv = declared.kv if declared is not None else None
    if kv is not None and not facts.kv:
        message = f"the KV cache is declared {kv} and no k_scale or v_scale is there: runtimes would use 1.0"
        found.error("kv-scales-missing", message, where="quantization_config", hint="declare no KV format")
    if kv is None and facts.kv:
        message = f"{len(facts.kv)} KV scales are there and no KV format is declared: runtimes ignore them"
        found.error("kv-scales-undeclared", message, where=keys[0] if keys else values[0], hint="declare kv_cache FP8")
    if len(keys) != len(values):
        message = f"{len(keys)} k_scale and {len(values)} v_scale"
        found.error("kv-scales-unpaired", message, where=(keys or values)[0], hint="every layer needs both")
    if facts.kv and all(value == 1.0 for value in facts.kv.values()):
        message = f"all {len(facts.kv)} KV scales are 1.0: were they calibrated?"
        found.warning("kv-scales-all-one", message, where=(keys or values)[0], hint="calibrate or drop them")
    for name in [*keys, *values]:
        if not name.endswith(("k_proj.k_scale", "v_proj.v_scale", "attn.k_scale", "attn.v_scale")):
            message = "is a name that vLLM's and SGLang's KV remapping does not know"
            found.warning("kv-scale-name", message, where=name, hint="name them k_proj.k_scale and v_proj.v_scale")


def check_special(view: OutputView, found: Collector) -> None:
    """Tied or missing output heads, and multi-token-prediction blocks that the config promises."""
    config, tensors = view.folder.config, view.folder.tensors
    if config is None:
        return
    text = as_object(config.get("text_config")) or {}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    heads = [name for name in tensors if name in HEADS or name.endswith(".lm_head.weight")]
    embeds = [name for name in tensors if name.endswith(EMBED_TENSORS)]
    if tied is True:
        for module in view.quantized:
            leaf = module.name.rpartition(".")[2]
            if leaf in ("lm_head", "head", "embed_tokens", "embed"):
                message = "is quantized although the head is tied to the embedding: runtimes use one of them for both"
                hint = "leave both plain, or untie: write both and set tie_word_embeddings to false"
                found.error("tied-head-quantized", message, where=module.name, hint=hint)
    packed_head = any(m.name.rpartition(".")[2] in ("lm_head", "head") for m in view.quantized)
    if tied is False and embeds and not heads and not packed_head:
        message = "tie_word_embeddings is false and there is no output head"
        found.error("lm-head-missing", message, where="config.json", hint="restore lm_head.weight")
    promised = config_int(config, "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers") or 0
    layers = view.hidden_layers
    present = any(is_mtp(name, layers) for name in tensors)
    if promised and not present:
        message = f"the config promises {promised} MTP layer(s) and no tensor of one is there"
        hint = "keep mtp.* from the source, or set the number to 0: speculative decoding would fail to start"
        found.warning("mtp-declared-absent", message, where="config.json", hint=hint)
    if present and not promised:
        found.info("mtp-undeclared", "MTP tensors are there and the config promises none", where="config.json")


def bits_per_weight(view: OutputView, left_plain: Sequence[str], found: Collector) -> float | None:
    """Bits per weight over everything that the metadata says is FP4; None where nothing is.

    left_plain: modules that the metadata makes runtimes expect packed and that are stored plain. They count as they
    are, so that an output whose experts were skipped does not pass for a 4-bit one.
    """
    declared = view.declared
    kinds = {module.kind for module in view.quantized}
    kind = next((kind for kind in NOMINAL_BITS if kind in kinds), None)  # beside NVFP4, MXFP4 is a passed-on MTP block
    if declared is None or kind is None:
        return None
    bits = weights = 0
    for module in view.quantized:
        if module.kind is kind and module.weight is not None:
            weights += module.weight.nbytes * 2
            bits += 8 * (module.weight.nbytes + (module.block_scale.nbytes if module.block_scale else 0))
    for name in left_plain:
        weight = view.modules[name].weight
        if weight is not None:
            weights += weight.elements
            bits += 8 * weight.nbytes
    if not weights:
        return None
    measured = bits / weights
    if abs(measured - NOMINAL_BITS[kind]) > BITS_TOLERANCE:
        message = f"{measured:.2f} bits per weight over what is declared {kind.value}, expected {NOMINAL_BITS[kind]}"
        hint = "a kind of layer was skipped, or scale planes are padded: see the other findings"
        found.error("bits-per-weight", message, where="model", hint=hint)
    return round(measured, 4)
