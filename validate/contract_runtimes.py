"""Contract, runtimes: what each declared runtime's loader would do with the output, by its published source.

Simulated, never loaded: a result says `simulated`, or `unverified` where the loader's rules are not known to us.
Versions read: vLLM 0.32, SGLang 0.5.23, transformers 5.24, compressed-tensors 0.20.

| layout                        | vllm | sglang | trtllm     | transformers                        |
|-------------------------------|------|--------|------------|-------------------------------------|
| modelopt NVFP4                | yes  | yes    | unverified | no (no modelopt quantizer)          |
| modelopt W4A16_NVFP4          | yes  | unverified | unverified | no                              |
| modelopt MXFP4                | no   | no     | unverified | no                                  |
| DeepSeek-V4 hybrid            | yes  | yes    | unverified | unverified                          |
| modelopt_mixed (Kimi-K3)      | unverified everywhere: no published example exists               |
| gpt-oss NVFP4, both layouts   | no   | no     | no         | no                                  |
| compressed-tensors NVFP4      | yes  | yes    | unverified | dense yes, fused-expert MoE no      |
| compressed-tensors MXFP4      | yes  | unverified | unverified | unverified                      |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from requant.validate.collector import Collector
from requant.validate.contract_scales import MARLIN_MAX_GLOBAL, ScaleFacts
from requant.validate.declared import Declared, Dialect
from requant.validate.modules import Kind, Module, expert_of, is_mtp
from requant.validate.output_view import OutputView, aliases, config_int
from requant.validate.results import JSON

__all__ = ["RUNTIMES", "check_hybrid", "check_runtimes", "marlin_table", "tensor_parallel_table"]

RUNTIMES = ("vllm", "sglang", "trtllm", "transformers")
VLLM_ALGOS = frozenset(
    {"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8"} | {"MIXED_PRECISION"}
)
"""vLLM's quantization/modelopt.py, QUANT_ALGOS."""
SGLANG_ALGOS = frozenset({"FP8", "NVFP4", "MIXED_PRECISION"})
"""SGLang's quantization/modelopt_quant.py, those seen accepted."""
NESTED_KEYS = ("group_size", "kv_cache_quant_algo", "exclude_modules")
"""Keys of hf_quant_config.json that vLLM requires for NVFP4."""
HYBRID_KEYS = ("quant_algo", "moe_quant_algo", "group_size", "quantized_layers")
ROW_PARALLEL = ("down_proj", "o_proj", "w2", "out_proj", "wo_b")
"""Layers whose K is divided among tensor-parallel ranks."""
CUTLASS_ALIGNMENT = 128
"""flashinfer's CUTLASS and CuTe-DSL MoE kernels need (2*I/TP) to be a multiple of this."""
UNLOADABLE_GPT_OSS = (
    "gpt-oss in NVFP4 is loaded by no runtime today: neither modelopt's stacked layout nor per-expert names"
)
TABLE_ROWS = 1000
"""Modules listed by name in a report's tables."""


def check_runtimes(view: OutputView, runtimes: Sequence[str], facts: ScaleFacts, found: Collector) -> dict[str, str]:
    """Apply each runtime's rules; the standing of each: `simulated: ok`, `simulated: would fail` or `unverified`."""
    _check_gpt_oss(view, runtimes, found)
    unverified: set[str] = set()
    for runtime in runtimes:
        if view.declared is not None and view.quantized:
            check = {"vllm": _check_vllm, "sglang": _check_sglang, "transformers": _check_transformers}.get(runtime)
            sure = check(view, view.declared, found) if check is not None else False
        else:
            sure = runtime != "trtllm"
        if runtime == "trtllm" and view.declared is not None and view.declared.layers:
            message = "TensorRT-LLM has refused quantized_layers in hf_quant_config.json"
            hint = "declare NVFP4 with an exclude list where one format is all there is"
            found.warning("trtllm-quantized-layers", message, where="quantized_layers", runtime=runtime, hint=hint)
        if not sure:
            unverified.add(runtime)
            message = (
                f"whether {runtime} loads this layout is not known to this tool: only the common rules were applied"
            )
            found.info("runtime-unverified", message, runtime=runtime, hint="load it there before publishing")
    if "transformers" not in runtimes and view.declared is not None and _drops_globals(view, view.declared):
        hint = "do not load it there; dense models are fine"
        found.warning("transformers-moe-global-scale", _DROPPED, runtime="transformers", hint=hint)
    _check_marlin(view, facts, found)
    return {runtime: _standing(runtime, unverified, found) for runtime in runtimes}


def _standing(runtime: str, unverified: set[str], found: Collector) -> str:
    if found.errors_for(runtime):
        return "simulated: would fail"
    return "unverified" if runtime in unverified else "simulated: ok"


def _check_gpt_oss(view: OutputView, runtimes: Sequence[str], found: Collector) -> None:
    model = str((view.folder.config or {}).get("model_type", ""))
    experts = [
        m for m in view.quantized if m.kind is Kind.NVFP4 and (m.stacked or (model == "gpt_oss" and expert_of(m.name)))
    ]
    if not experts:
        return
    where = experts[0].name
    if not runtimes:
        found.info("gpt-oss-layout-unloadable", UNLOADABLE_GPT_OSS, where=where, hint="serve the MXFP4 source")
    for runtime in runtimes:
        hint = "declare no runtime for this output, or serve the MXFP4 source"
        found.error("gpt-oss-layout-unloadable", UNLOADABLE_GPT_OSS, where=where, runtime=runtime, hint=hint)


def check_hybrid(view: OutputView, found: Collector) -> None:
    """The DeepSeek-V4 hybrid: all its keys in config.json itself, and each Kimi-K3 expert listed under an alias."""
    declared = view.declared
    if declared is None:
        return
    if declared.dialect is Dialect.HYBRID:
        missing = [key for key in HYBRID_KEYS if not declared.raw.get(key)]
        if missing:
            message = f"quantization_config lacks {', '.join(missing)}: SGLang and vLLM read them there only"
            found.error("hybrid-keys-missing", message, where="quantization_config", hint="write all of them")
        wrong = str(declared.raw.get("moe_quant_algo", "")).upper()
        if wrong not in ("NVFP4", ""):
            message = f"moe_quant_algo is {wrong}: beside quant_method fp8 runtimes know NVFP4 (W4A4) alone"
            found.error("hybrid-keys-missing", message, where="quantization_config.moe_quant_algo", hint="write NVFP4")
        if declared.group_sizes - {16}:
            message = f"group_size is {sorted(declared.group_sizes)}, NVFP4's is 16"
            found.error("group-size", message, where="quantization_config.group_size", hint="write 16")
    if declared.dialect is Dialect.MODELOPT_MIXED:
        for parent in dict.fromkeys(e[0] for m in view.quantized if (e := expert_of(m.name))):
            absent = [name for name in aliases(parent) if name not in declared.layers]
            if absent:
                message = f"quantized_layers lists it, but not under {', '.join(absent[:3])}"
                found.warning("mixed-alias-missing", message, where=parent, hint="list it under all aliases")


def _check_vllm(view: OutputView, declared: Declared, found: Collector) -> bool:
    if declared.dialect is Dialect.MODELOPT and declared.algo not in VLLM_ALGOS:
        message = f"vLLM's modelopt loader refuses quant_algo {declared.algo or '(none)'}"
        hint = f"it takes {', '.join(sorted(VLLM_ALGOS))}"
        found.error("algo-unsupported", message, where="quant_algo", runtime="vllm", hint=hint)
    hf_quant = view.in_hf_quant
    if hf_quant is not None and "NVFP4" in hf_quant.algo:
        missing = [key for key in NESTED_KEYS if key not in hf_quant.raw]
        if missing:
            message = f"hf_quant_config.json lacks {', '.join(missing)}, which vLLM requires for NVFP4"
            found.error("nested-keys-missing", message, where="hf_quant_config.json", runtime="vllm", hint="write them")
    scheme = declared.raw.get("kv_cache_scheme")
    if declared.dialect is Dialect.MODELOPT and declared.kv not in (None, "FP8") and scheme is not None:
        message = f"vLLM does not read a {declared.kv} kv_cache_scheme: the KV cache would stay plain"
        found.warning("kv-scheme-ignored", message, where="kv_cache_scheme", runtime="vllm", hint="declare FP8")
    if declared.dialect is Dialect.HYBRID:
        draft = next((m for m in view.quantized if m.kind is Kind.MXFP4 and is_mtp(m.name, view.hidden_layers)), None)
        if draft is not None:
            message = "the MTP experts stayed MXFP4; a draft model that takes over moe_quant_algo reads them as NVFP4"
            hint = "without speculative decoding nothing is affected; see vllm#49133"
            found.warning("mtp-draft-inherits-target", message, where=draft.name, runtime="vllm", hint=hint)
    return declared.dialect in (Dialect.MODELOPT, Dialect.HYBRID, Dialect.COMPRESSED_TENSORS)


def _check_sglang(view: OutputView, declared: Declared, found: Collector) -> bool:
    modelopt = declared.dialect in (Dialect.MODELOPT, Dialect.HYBRID, Dialect.MODELOPT_MIXED)
    if modelopt and not declared.producer.startswith("modelopt"):
        message = f"producer.name is {declared.producer or '(none)'}: SGLang checks that it starts with modelopt"
        hint = "write producer.name modelopt and this tool's name in producer.version"
        found.error("sglang-producer", message, where="producer.name", runtime="sglang", hint=hint)
    if declared.dialect is Dialect.MODELOPT and declared.kind is Kind.NVFP4 and not declared.group_sizes:
        message = "no group_size, neither at the top nor in config_groups: SGLang refuses NVFP4 without it"
        found.error(
            "sglang-group-size", message, where="quantization_config", runtime="sglang", hint="write group_size 16"
        )
    if declared.dialect is Dialect.MODELOPT and declared.algo not in SGLANG_ALGOS | {"W4A16_NVFP4"}:
        message = f"SGLang's modelopt loader refuses quant_algo {declared.algo or '(none)'}"
        hint = f"it takes {', '.join(sorted(SGLANG_ALGOS))}"
        found.error("algo-unsupported", message, where="quant_algo", runtime="sglang", hint=hint)
    if declared.dialect is Dialect.COMPRESSED_TENSORS:
        return declared.kind is Kind.NVFP4
    known = {declared.algo, *declared.layers.values()} <= SGLANG_ALGOS
    return declared.dialect in (Dialect.MODELOPT, Dialect.HYBRID) and known


_DROPPED = "transformers 5.24 fuses the experts and drops weight_global_scale without a word"


def _drops_globals(view: OutputView, declared: Declared) -> bool:
    return declared.dialect is Dialect.COMPRESSED_TENSORS and declared.kind is Kind.NVFP4 and view.is_moe


def _check_transformers(view: OutputView, declared: Declared, found: Collector) -> bool:
    if declared.dialect in (Dialect.MODELOPT, Dialect.MODELOPT_MIXED):
        message = "transformers has no modelopt quantizer: it would read packed bytes as plain weights"
        found.error("transformers-modelopt", message, runtime="transformers", hint="write layout compressed-tensors")
    if _drops_globals(view, declared):
        hint = "declare vllm or sglang for this output; dense models are fine"
        found.error("transformers-moe-global-scale", _DROPPED, runtime="transformers", hint=hint)
    return declared.dialect in (Dialect.MODELOPT, Dialect.COMPRESSED_TENSORS) and declared.kind is not Kind.MXFP4


def _check_marlin(view: OutputView, facts: ScaleFacts, found: Collector) -> None:
    """vLLM and SGLang run NVFP4 through Marlin on SM75-90: every NVFP4 MoE there, and dense W4A16."""
    if facts.below_marlin:
        total = sum(facts.below_marlin.values())
        worst = max(facts.below_marlin, key=lambda name: facts.below_marlin[name])
        message = (
            f"{total} of {facts.block_scales} block scales in {len(facts.below_marlin)} tensors lie below 2^-6: "
            f"on SM75-90 Marlin flushes them to zero (most in {worst}: {facts.below_marlin[worst]})"
        )
        found.warning("marlin-scale-flush", message, where=worst, hint="SM100 and later are not affected")
    large = [name for name, s2 in facts.s2.items() if s2 >= MARLIN_MAX_GLOBAL]
    if large:
        message = f"{len(large)} global scales are 2^9 or more, which Marlin (SM75-90) cannot hold"
        found.warning("marlin-global-scale", message, where=large[0], hint="SM100 and later are not affected")
    rounded = [name for name, s2 in facts.s2.items() if s2 and not _is_bf16(s2)]
    if rounded and any(view.modules[name].kind is Kind.NVFP4 for name in rounded):
        message = f"{len(rounded)} global scales are no BF16 numbers: SGLang's Marlin path rounds them (up to 0.4 %)"
        found.info("marlin-global-scale-rounded", message, where=rounded[0], runtime="sglang")


def _is_bf16(value: float) -> bool:
    import numpy as np

    return int(np.float32(value).view(np.uint32)) & 0xFFFF == 0


def marlin_table(facts: ScaleFacts) -> dict[str, JSON]:
    """Block scales below 2^-6 per module, the most affected first."""
    worst = sorted(facts.below_marlin.items(), key=lambda item: (-item[1], item[0]))
    return {
        "block_scales": facts.block_scales,
        "below_2^-6": sum(facts.below_marlin.values()),
        "modules": dict(worst[:TABLE_ROWS]),
        "modules_omitted": max(0, len(worst) - TABLE_ROWS),
    }


def tensor_parallel_table(view: OutputView, degrees: Sequence[int], runtimes: Sequence[str], found: Collector) -> JSON:
    """For each degree: do row-parallel layers split on 16-groups, and is the MoE's I aligned for CUTLASS?

    K % (16*TP) for row-parallel layers, I/TP % 16 for experts, (2*I/TP) % 128 for flashinfer's CUTLASS and CuTe-DSL.
    """
    rows = _row_parallel(view)
    inner = _expert_width(view)
    table: dict[str, JSON] = {}
    for degree in degrees:
        bad = {label: k for label, k in rows.items() if k % (16 * degree)}
        entry: dict[str, JSON] = {"row_parallel_ok": not bad, "row_parallel_bad": dict(list(bad.items())[:TABLE_ROWS])}
        if inner is not None:
            entry["expert_width"] = inner
            entry["expert_groups_ok"] = inner % (16 * degree) == 0
            entry["cutlass_moe_ok"] = (2 * inner) % (CUTLASS_ALIGNMENT * degree) == 0
        table[str(degree)] = entry
        if bad and degree > 1:
            label, k = next(iter(bad.items()))
            message = f"tensor parallel {degree} splits 16-groups: {label} has K = {k}, {k}/{degree} = {k / degree:g}"
            found.warning("tensor-parallel-splits-groups", message, where=label, hint="use fewer ranks")
        if inner is not None and degree == 1 and not entry["cutlass_moe_ok"] and "sglang" in runtimes:
            message = (
                f"2*I = {2 * inner} is no multiple of {CUTLASS_ALIGNMENT}: flashinfer cutlass and cutedsl refuse it"
            )
            found.warning(
                "cutlass-moe-alignment", message, runtime="sglang", hint="choose another --moe-runner-backend"
            )
    return table


def _row_parallel(view: OutputView) -> Mapping[str, int]:
    """K by layer name with indices folded to `*`, so that 61 layers of 256 experts are one line."""
    rows: dict[str, int] = {}
    for module in view.quantized:
        if module.kind is Kind.NVFP4 and module.name.rpartition(".")[2] in ROW_PARALLEL:
            folded = ".".join("*" if part.isdigit() else part for part in module.name.split("."))
            rows[folded if rows.get(folded, module.k) == module.k else module.name] = module.k
    return rows


def _expert_width(view: OutputView) -> int | None:
    widths: set[int] = {
        _width(m) for m in view.quantized if m.kind is Kind.NVFP4 and (m.stacked or expert_of(m.name))
    } - {0}
    if widths:
        return min(widths)
    has_experts = any(expert_of(module.name) for module in view.quantized)
    return config_int(view.folder.config, "moe_intermediate_size") if has_experts else None


def _width(module: Module) -> int:
    return module.k if module.name.rpartition(".")[2] in ("down_proj", "w2") else 0
