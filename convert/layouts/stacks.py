"""Fused experts of unquantized checkpoints: one tensor [E, ., .] for all experts of a layer, without `.weight`.

Which axis is K, and how gate and up share the rows, differs by family and cannot be seen from the shape (gpt-oss-20b
has hidden = 2880 = intermediate), so the model's type decides and the config's sizes must agree.

| model_type                                | gate_up_proj | down_proj   | gate, up         |
|-------------------------------------------|--------------|-------------|------------------|
| gpt_oss                                   | [E, H, 2I]   | [E, I, H]   | alternate rows   |
| llama4, qwen3_vl_moe                      | [E, H, 2I]   | [E, I, H]   | first, then second half |
| qwen3_moe, qwen3_5_moe, qwen3_next, ...   | [E, 2I, H]   | [E, H, I]   | first, then second half |

(transformers 5.24, the model files' `*Experts` classes and the checkpoints their owners published.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, cast

from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.base import More, SourceWeight
from requant.convert.layouts.checks import FLOATS, place
from requant.convert.shards import TensorInfo
from requant.manifests.errors import SourceError

__all__ = ["stacked_weights"]


class _Family(NamedTuple):
    turned: bool
    interleaved: bool


_GPT_OSS: Final = _Family(True, True)
_TURNED_HALVES: Final = _Family(True, False)
_HALVES: Final = _Family(False, False)
FAMILIES: Final[dict[str, _Family]] = {
    "gpt_oss": _GPT_OSS,
    "llama4": _TURNED_HALVES,
    "llama4_text": _TURNED_HALVES,
    "qwen3_vl_moe": _TURNED_HALVES,
    "qwen3_vl_moe_text": _TURNED_HALVES,
    **dict.fromkeys(
        (
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "mixtral",
            "deepseek_v3",
            "glm4_moe",
            "minimax_m2",
        ),
        _HALVES,
    ),
}
"""How each model type stacks its experts."""
_ENDS: Final = (".experts.gate_up_proj", ".experts.down_proj")


def stacked_weights(catalogue: Catalogue, taken: set[str]) -> Iterator[SourceWeight]:
    """The stacked experts among the float tensors, where the model's type says how to read them."""
    stacks = [
        t for t in catalogue.tensors.values()
        if t.name.endswith(_ENDS) and t.dtype in FLOATS and len(t.shape) == 3 and t.name not in taken
    ]  # fmt: skip
    if not stacks:
        return
    config = cast("dict[str, Any]", catalogue.config)
    inner: Any = config.get("text_config")
    text = cast("dict[str, Any]", inner) if isinstance(inner, dict) else config
    family = FAMILIES.get(str(text.get("model_type", ""))) or FAMILIES.get(str(config.get("model_type", "")))
    if family is None:
        return  # left to the rules, which say that stacked weights of an unknown kind are kept
    hidden, inter = text.get("hidden_size"), text.get("moe_intermediate_size") or text.get("intermediate_size")
    for tensor in stacks:
        bias = catalogue.tensors.get(f"{tensor.name}_bias")
        yield _stack(tensor, bias, family, hidden, inter)


def _stack(tensor: TensorInfo, bias: TensorInfo | None, family: _Family, hidden: object, inter: object) -> SourceWeight:
    experts, first, second = tensor.shape
    rows, cols = (second, first) if family.turned else (first, second)
    both = tensor.name.endswith("gate_up_proj")
    if isinstance(hidden, int) and isinstance(inter, int):
        expected = (2 * inter, hidden) if both else (hidden, inter)
        if (rows, cols) != expected:
            stored = expected[::-1] if family.turned else expected
            raise SourceError(
                f"is {list(tensor.shape)}, expected {[experts, *stored]} by the config's hidden and intermediate size",
                where=place(tensor),
                hint="the experts are stacked in another way than this model type's: convert them to that first",
            )
    if 0 in tensor.shape or (both and rows % 2):
        raise SourceError(f"is {list(tensor.shape)}: no experts of gate and up", where=place(tensor))
    if bias is not None and bias.shape != (experts, rows):
        raise SourceError(f"bias is {list(bias.shape)}, expected {[experts, rows]}", where=place(bias))
    more = More(turned=family.turned, split=not family.interleaved)
    return SourceWeight(
        tensor.name, "plain", rows, cols, tensor, None, experts, family.interleaved and both, bias, more=more
    )
