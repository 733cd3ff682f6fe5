"""The manifest that `requant init` writes for a recognised checkpoint: complete, commented, ready to be edited."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from requant.manifests.checks import UNSCALED_FORMATS
from requant.manifests.merge import quote_interpolation
from requant.manifests.schema import LayerRule, Runtime, SourceLayout, TargetFormat, TargetLayout
from requant.manifests.sizes import format_size

__all__ = ["CommentedRule", "render_manifest"]


@dataclass(frozen=True)
class CommentedRule:
    """A rule and the lines to write above it."""

    rule: LayerRule
    comment: str = ""


def _text(value: str) -> str:
    """Text in quotes: double, or single where a backslash would otherwise have to be doubled."""
    safe = quote_interpolation(value)
    if safe.isprintable() and "\\" in safe:
        return "'" + safe.replace("'", "''") + "'"
    return json.dumps(safe, ensure_ascii=not safe.isprintable())


def _comment(text: str, indent: str = "") -> list[str]:
    return [f"{indent}# {line}".rstrip() for line in text.splitlines()]


def _rule(entry: CommentedRule) -> list[str]:
    rule = entry.rule
    scale = "" if rule.to in ("keep", "drop", "bf16") else f", scale: {rule.scale}"
    optional = ", optional: true" if rule.optional else ""
    line = f"  - {{match: {_text(rule.match)}, to: {rule.to}{scale}{optional}}}"
    return [*_comment(entry.comment, "  "), line]


def render_manifest(
    name: str,
    *,
    layout: SourceLayout,
    rules: Sequence[CommentedRule],
    repo: str | None = None,
    path: str | None = None,
    target_format: TargetFormat = "nvfp4",
    target_layout: TargetLayout = "modelopt",
    output: str | None = None,
    shard_size: int = 5 * 10**9,
    runtimes: Sequence[Runtime] = (),
    why: str = "",
) -> str:
    """YAML of a manifest for a checkpoint, which loads as it stands.

    Exactly one of `repo` and `path` says where the checkpoint is; `why` is what it was recognised by, written at the
    top; `output` defaults to `out/NAME`. ValueError if there is no place or no rule.
    """
    if (repo is None) == (path is None):
        raise ValueError("exactly one of repo and path says where the checkpoint is")
    if not rules:
        raise ValueError("a manifest needs at least one rule")
    place = f"repo: {_text(repo)}" if repo is not None else f"path: {_text(path or '')}"
    lossless = all(entry.rule.scale == "lossless" for entry in rules)
    lines = [
        *_comment(why),
        "version: 1",
        f"name: {_text(name)}",
        "",
        "source:",
        f"  {place}",
        *(["  revision: main                 # the lock records the commit"] if repo is not None else []),
        f"  layout: {layout}",
        "",
        "target:",
        f"  format: {target_format}",
        f"  layout: {target_layout}",
        f"  output: {_text(output or f'out/{name}')}",
        f"  shard_size: {format_size(shard_size)}",
        "  # whose loader rules must hold: vllm, sglang, trtllm, transformers",
        f"  runtimes: [{', '.join(runtimes)}]",
        "",
        "layers:                          # module names without .weight; `*` is any run; the first match decides",
        *(line for entry in rules for line in _rule(entry)),
        "",
    ]
    if target_format not in UNSCALED_FORMATS:
        lines += ["activations: {input_scale: 1.0}   # or {from: FOLDER}: another NVFP4 checkpoint of the model", ""]
    gate = "{lossless: required}" if lossless else "{min_sqnr_db: 15}"
    lines += ["validate:", f"  numerics: {gate}"]
    return "\n".join(lines) + "\n"
