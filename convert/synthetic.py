"""Which tensors a checkpoint of a family has: names, dtypes, shapes from its config.json, as its producer ships it.

| family (model_type)     | bf16                              | mxfp4                                               |
|-------------------------|-----------------------------------|-----------------------------------------------------|
| gpt_oss                 | experts stacked [E, K, N]         | `_blocks` [E, N, K/32, 16] and `_scales`, as OpenAI |
| deepseek_v4             | nobody ships it                   | I8 codes with E8M0, the rest FP8 in 128 x 128       |
| llama, qwen3, qwen3_moe | as published (experts one by one) | nobody ships it                                     |

For `requant init --random`: shapes are real, values are not (synthetic_write.py), which is enough to measure speed and
to rehearse a conversion. Of DeepSeek-V4's draft layer only what a layer has is made, under `mtp.0.`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast, get_args

from requant.manifests.errors import SourceError, UsageError

__all__ = ["Format", "Spec", "builtin_configs", "config_of", "specs_of"]

Format = Literal["bf16", "mxfp4"]
Config = Mapping[str, object]
_CONFIGS: Final = Path(__file__).parent / "configs"
_BYTES: Final = {"BF16": 2, "F32": 4, "I64": 8}
_BLOCK: Final = 128
"""DeepSeek's FP8 blocks are 128 x 128 (config.json: weight_block_size)."""
_MXFP4: Final = 32
_SHIPPED: Final[Mapping[str, tuple[str, ...]]] = {"gpt_oss": ("bf16", "mxfp4"), "deepseek_v4": ("mxfp4",)}
"""Formats of what is not BF16 alone."""
_CSA: Final = 4
"""compress_ratios: 4 has an indexer and two overlapping windows, 128 neither, 0 is a plain sliding window."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor. content: how its values are drawn (synthetic_write.py)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: Literal["normal", "ones", "codes", "exponents", "fp8", "expert ids"] = "normal"

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        count = _BYTES.get(self.dtype, 1)
        for size in self.shape:
            count *= size
        return count


def builtin_configs() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(path.stem for path in _CONFIGS.glob("*.json"))


def config_of(source: str, layers: int | None, form: str | None) -> tuple[dict[str, object], Format]:
    """(config.json to write, the format): of a built-in name, a config.json, or a folder that holds one.

    layers: only the first so many. form None: MXFP4 where the config says that experts are FP4, else BF16.
    """
    known = _CONFIGS / f"{source.lower()}.json"
    path = known if known.is_file() else Path(source).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        hint = f"give a config.json, or one of {', '.join(builtin_configs())}"
        raise UsageError("is neither a file nor a built-in config", where=source, hint=hint)
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"is no JSON: {error}", where=str(path)) from error
    if not isinstance(read, dict):
        raise SourceError("is no JSON object", where=str(path))
    config = dict(cast("dict[str, object]", read))
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        hint = f"families: {', '.join(sorted(_FAMILIES))}"
        raise SourceError(f"model_type is {family!r}: its tensors are not known here", where=str(path), hint=hint)
    if form is not None and form not in get_args(Format):
        raise UsageError(f"no format is called {form!r}", where="--as", hint="bf16, mxfp4")
    packed = family in ("gpt_oss", "deepseek_v4") and (
        config.get("expert_dtype") == "fp4" or "mxfp4" in json.dumps(config.get("quantization_config") or {})
    )
    chosen = cast("Format", form or ("mxfp4" if packed else "bf16"))
    if chosen not in _SHIPPED.get(family, ("bf16",)):
        hint = "make it in bf16, then `requant run` with a rule `to: mxfp4`" if chosen == "mxfp4" else "leave it out"
        raise UsageError(f"nobody ships {family} in {chosen.upper()}", where="--as", hint=hint)
    if chosen == "bf16":
        config.pop("quantization_config", None)
    elif family == "gpt_oss":
        config.setdefault("quantization_config", {"quant_method": "mxfp4"})
    return _cut(config, layers), chosen


def _cut(config: dict[str, object], layers: int | None) -> dict[str, object]:
    """The config of the first `layers` layers; lists with an entry for each layer are cut too."""
    if layers is None:
        return config
    before = _int(config, "num_hidden_layers")
    if not 1 <= layers <= before:
        raise UsageError(f"{layers} layers of {before}", where="--layers", hint=f"1 to {before}")
    config["num_hidden_layers"] = layers
    if isinstance(kinds := config.get("layer_types"), list):
        config["layer_types"] = cast("list[object]", kinds)[:layers]
    if isinstance(ratios := config.get("compress_ratios"), list):
        listed = cast("list[object]", ratios)
        config["compress_ratios"] = listed[:layers] + listed[before:]
    return config


def specs_of(config: Config, form: Format) -> list[Spec]:
    """Every tensor, in the order in which it is written."""
    return list(_FAMILIES[str(config["model_type"])](config, form))


# --- families ---------------------------------------------------------------------------------------------------------


def _llama(config: Config, form: Format) -> Iterator[Spec]:
    """Llama and Qwen3, dense or with experts one by one."""
    del form
    hidden, dim = _int(config, "hidden_size"), _head_dim(config)
    heads, kv = _int(config, "num_attention_heads"), _int(config, "num_key_value_heads")
    yield from _ends(config, "model.embed_tokens", "model.norm", "lm_head")
    for layer in range(_int(config, "num_hidden_layers")):
        name = f"model.layers.{layer}"
        yield from _norms(name, ("input_layernorm", "post_attention_layernorm"), hidden)
        if str(config["model_type"]).startswith("qwen3"):
            yield from _norms(f"{name}.self_attn", ("q_norm", "k_norm"), dim)
        biased = bool(config.get("attention_bias"))
        for leaf, rows, k in _attention(heads, kv, dim, hidden):
            yield from _plain(f"{name}.self_attn.{leaf}", rows, k, bias=biased)
        if _is_moe(config, layer):
            yield from _plain(f"{name}.mlp.gate", _int(config, "num_experts"), hidden)
            inner = _int(config, "moe_intermediate_size")
            for expert in range(_int(config, "num_experts")):
                yield from _swiglu(f"{name}.mlp.experts.{expert}", hidden, inner)
        else:
            yield from _swiglu(f"{name}.mlp", hidden, _int(config, "intermediate_size"))


def _gpt_oss(config: Config, form: Format) -> Iterator[Spec]:
    hidden, dim, inner = _int(config, "hidden_size"), _head_dim(config), _int(config, "intermediate_size")
    heads, kv, experts = (_int(config, k) for k in ("num_attention_heads", "num_key_value_heads", "num_local_experts"))
    yield from _ends(config, "model.embed_tokens", "model.norm", "lm_head")
    for layer in range(_int(config, "num_hidden_layers")):
        name = f"model.layers.{layer}"
        yield from _norms(name, ("input_layernorm", "post_attention_layernorm"), hidden)
        for leaf, rows, k in _attention(heads, kv, dim, hidden):
            yield from _plain(f"{name}.self_attn.{leaf}", rows, k, bias=True)
        yield Spec(f"{name}.self_attn.sinks", "BF16", (heads,))
        yield from _plain(f"{name}.mlp.router", experts, hidden, bias=True)
        for leaf, rows, k in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            stack = f"{name}.mlp.experts.{leaf}"
            yield Spec(f"{stack}_bias", "BF16", (experts, rows))
            if form == "bf16":
                yield Spec(stack, "BF16", (experts, k, rows))
            else:
                yield Spec(f"{stack}_blocks", "U8", (experts, rows, k // _MXFP4, _MXFP4 // 2), "codes")
                yield Spec(f"{stack}_scales", "U8", (experts, rows, k // _MXFP4), "exponents")


def _deepseek_v4(config: Config, form: Format) -> Iterator[Spec]:
    del form
    yield from _ends(config, "embed", "norm", "head")
    streams, hidden = _int(config, "hc_mult"), _int(config, "hidden_size")
    yield from _hyper("hc_head", streams, streams * hidden, 1)
    layers = _int(config, "num_hidden_layers")
    ratios = cast("list[int]", config.get("compress_ratios") or [0] * (layers + 1))
    if len(ratios) < layers:
        raise SourceError(f"compress_ratios has {len(ratios)} entries for {layers} layers", where="config.json")
    for layer in range(layers):
        yield from _deepseek_layer(
            f"layers.{layer}", config, ratios[layer], hashed=layer < _int(config, "num_hash_layers")
        )
    for draft in range(_int(config, "num_nextn_predict_layers")):
        ratio = ratios[layers + draft] if layers + draft < len(ratios) else 0
        yield from _deepseek_layer(f"mtp.{draft}", config, ratio, hashed=False)


def _deepseek_layer(name: str, config: Config, ratio: int, *, hashed: bool) -> Iterator[Spec]:
    hidden, dim, heads = _int(config, "hidden_size"), _head_dim(config), _int(config, "num_attention_heads")
    rank, out_rank = _int(config, "q_lora_rank"), _int(config, "o_lora_rank")
    groups = _int(config, "o_groups", least=1)
    streams, top_k = _int(config, "hc_mult"), _int(config, "num_experts_per_tok")
    experts, inner = _int(config, "n_routed_experts"), _int(config, "moe_intermediate_size")
    mixed = streams * (streams + 2)
    yield from _norms(name, ("attn_norm", "ffn_norm"), hidden)
    for part in ("hc_attn", "hc_ffn"):
        yield from _hyper(f"{name}.{part}", mixed, streams * hidden, 3)
    attention = f"{name}.attn"
    yield Spec(f"{attention}.attn_sink", "F32", (heads,))
    yield from _norms(attention, ("q_norm",), rank)
    yield from _norms(attention, ("kv_norm",), dim)
    for leaf, rows, k in (
        ("wq_a", rank, hidden),
        ("wq_b", heads * dim, rank),
        ("wkv", dim, hidden),
        ("wo_a", groups * out_rank, heads * dim // groups),
        ("wo_b", hidden, groups * out_rank),
    ):
        yield from _fp8(f"{attention}.{leaf}", rows, k)
    if ratio:
        yield from _compressor(f"{attention}.compressor", dim, hidden, ratio)
    if ratio == _CSA:
        index_dim, index_heads = _int(config, "index_head_dim"), _int(config, "index_n_heads")
        yield from _fp8(f"{attention}.indexer.wq_b", index_heads * index_dim, rank)
        yield from _plain(f"{attention}.indexer.weights_proj", index_heads, hidden)
        yield from _compressor(f"{attention}.indexer.compressor", index_dim, hidden, ratio)
    yield from _plain(f"{name}.ffn.gate", experts, hidden)
    if hashed:
        yield Spec(f"{name}.ffn.gate.tid2eid", "I64", (_int(config, "vocab_size"), top_k), "expert ids")
    else:
        yield Spec(f"{name}.ffn.gate.bias", "F32", (experts,))
    for leaf, rows, k in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
        yield from _fp8(f"{name}.ffn.shared_experts.{leaf}", rows, k)
        for expert in range(experts):
            one = f"{name}.ffn.experts.{expert}.{leaf}"
            yield Spec(f"{one}.weight", "I8", (rows, k // 2), "codes")
            yield Spec(f"{one}.scale", "F8_E8M0", (rows, k // _MXFP4), "exponents")


_FAMILIES: Final[Mapping[str, Callable[[Config, Format], Iterator[Spec]]]] = {
    "llama": _llama,
    "qwen3": _llama,
    "qwen3_moe": _llama,
    "gpt_oss": _gpt_oss,
    "deepseek_v4": _deepseek_v4,
}


# --- parts ------------------------------------------------------------------------------------------------------------


def _ends(config: Config, embedding: str, norm: str, head: str) -> Iterator[Spec]:
    vocabulary, hidden = _int(config, "vocab_size"), _int(config, "hidden_size")
    yield from _plain(embedding, vocabulary, hidden)
    if not config.get("tie_word_embeddings"):
        yield from _plain(head, vocabulary, hidden)
    yield Spec(f"{norm}.weight", "BF16", (hidden,), "ones")


def _norms(name: str, leaves: tuple[str, ...], size: int) -> Iterator[Spec]:
    for leaf in leaves:
        yield Spec(f"{name}.{leaf}.weight", "BF16", (size,), "ones")


def _plain(name: str, rows: int, k: int, *, bias: bool = False) -> Iterator[Spec]:
    yield Spec(f"{name}.weight", "BF16", (rows, k))
    if bias:
        yield Spec(f"{name}.bias", "BF16", (rows,))


def _fp8(name: str, rows: int, k: int) -> Iterator[Spec]:
    yield Spec(f"{name}.weight", "F8_E4M3", (rows, k), "fp8")
    yield Spec(f"{name}.scale", "F8_E8M0", (-(-rows // _BLOCK), -(-k // _BLOCK)), "exponents")


def _hyper(name: str, rows: int, k: int, scales: int) -> Iterator[Spec]:
    """The mixing of DeepSeek-V4's parallel residual streams."""
    for part, shape in (("fn", (rows, k)), ("base", (rows,)), ("scale", (scales,))):
        yield Spec(f"{name}_{part}", "F32", shape)


def _compressor(name: str, dim: int, hidden: int, ratio: int) -> Iterator[Spec]:
    wide = 2 * dim if ratio == _CSA else dim
    yield from _plain(f"{name}.wkv", wide, hidden)
    yield from _plain(f"{name}.wgate", wide, hidden)
    yield Spec(f"{name}.ape", "F32", (ratio, wide))
    yield from _norms(name, ("norm",), dim)


def _attention(heads: int, kv: int, dim: int, hidden: int) -> tuple[tuple[str, int, int], ...]:
    return (
        ("q_proj", heads * dim, hidden),
        ("k_proj", kv * dim, hidden),
        ("v_proj", kv * dim, hidden),
        ("o_proj", hidden, heads * dim),
    )


def _swiglu(name: str, hidden: int, inner: int) -> Iterator[Spec]:
    for leaf, rows, k in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        yield from _plain(f"{name}.{leaf}", rows, k)


def _is_moe(config: Config, layer: int) -> bool:
    """transformers, modeling_qwen3_moe.py: not in mlp_only_layers, and every decoder_sparse_step-th layer."""
    if config["model_type"] != "qwen3_moe" or layer in cast("list[int]", config.get("mlp_only_layers") or []):
        return False
    return (layer + 1) % cast("int", config.get("decoder_sparse_step") or 1) == 0


def _head_dim(config: Config) -> int:
    if isinstance(config.get("head_dim"), int):
        return _int(config, "head_dim")
    return _int(config, "hidden_size") // _int(config, "num_attention_heads", least=1)


def _int(config: Config, key: str, least: int = 0) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SourceError(f"{key} is {value!r}, expected a number from {least} on", where="config.json")
    return value
