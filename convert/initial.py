"""`requant init`: a manifest for a checkpoint, from what its headers say. It loads as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast, get_args

from requant.convert.checkpoint import Catalogue, open_checkpoint
from requant.convert.hub import fetch, is_offline
from requant.convert.hub_remote import resolve
from requant.convert.inspect import pattern_of
from requant.convert.layouts.base import SourceWeight
from requant.convert.layouts.reading import recognise
from requant.convert.remote import remote_catalogue
from requant.manifests.errors import SourceError
from requant.manifests.render import CommentedRule, render_manifest
from requant.manifests.schema import LayerRule, Runtime, SourceLayout, TargetFormat, TargetLayout
from requant.manifests.urls import is_url, last_part

__all__ = ["initial_manifest"]

_LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def initial_manifest(source: str) -> str:
    """YAML for the checkpoint in folder `source`, in an object store, or on the Hub as owner/name. SourceError if
    nothing can be made."""
    path = Path(source).expanduser()
    if is_url(source):
        from requant.convert.object_remote import resolve_objects

        source = source.rstrip("/")
        catalogue, repo = remote_catalogue(resolve_objects(source)), None
    elif path.is_dir():
        catalogue, repo = open_checkpoint(path), None
    elif source.count("/") == 1 and not source.startswith((".", "/", "~")):
        catalogue, repo = _hub_catalogue(source), source
    else:
        raise SourceError(
            "is not a folder", where=source, hint="give a checkpoint folder, an address, or owner/name on the Hub"
        )
    layout, reason = recognise(catalogue, "auto")
    weights = list(layout.weights(catalogue))
    formats = {w.format for w in weights if w.format != "plain"}
    packed = [w for w in weights if w.format == "mxfp4"]
    if formats - {"mxfp4"} and layout.name != "deepseek-v4":
        rules, target, target_layout, runtimes = _requantized(weights, formats, layout.name)
    else:
        rules = _packed_rules(packed, layout.name) if packed else _plain_rules(weights)
        target = "nvfp4" if packed else "mxfp4"
        target_layout, runtimes = _target(catalogue, layout.name, bool(packed))
    base = last_part(repo or (source if is_url(source) else path.resolve().name))
    return render_manifest(
        f"{base.lower()}-{target}",
        layout=_known(layout.name),
        rules=rules,
        repo=repo,
        path=None if repo else source if is_url(source) else str(path),
        target_format=target,
        target_layout=target_layout,
        runtimes=runtimes,
        why=f"Recognised as {layout.name}: {reason}.",
    )


def _hub_catalogue(repo: str) -> Catalogue:
    """Headers only; offline, what the cache holds."""
    return open_checkpoint(fetch(repo, "main")[0]) if is_offline() else remote_catalogue(resolve(repo, "main"))


def _known(name: str) -> SourceLayout:
    names = {layout: layout for layout in get_args(SourceLayout)}
    return cast("SourceLayout", names[name])


def _target(catalogue: Catalogue, layout: str, packed: bool) -> tuple[TargetLayout, tuple[Runtime, ...]]:
    """The writing layout and the runtimes known to read it for this family."""
    if not packed:
        return "compressed-tensors", ("vllm", "transformers")
    if layout == "gpt-oss" or "text_config" in catalogue.config:
        return "modelopt", ()
    return "modelopt", ("vllm", "sglang")


def _requantized(
    weights: list[SourceWeight], formats: set[str], layout: str
) -> tuple[list[CommentedRule], TargetFormat, TargetLayout, tuple[Runtime, ...]]:
    """NVFP4 goes into the other dialect as it is; FP8 and integers are rounded, and all but linears made BF16.

    FP4 beside them is moved as it is.
    """
    if formats == {"nvfp4"}:
        packed = [w for w in weights if w.format == "nvfp4"]
        scaled: TargetFormat = "nvfp4" if all(w.input is not None for w in packed) else "nvfp4-w4a16"
        other: TargetLayout = "modelopt" if layout == "compressed-tensors" else "compressed-tensors"
        return _packed_rules(packed, layout), scaled, other, ("vllm", "sglang")
    exact = [w for w in weights if w.format in ("mxfp4", "nvfp4")]
    rest = [w for w in weights if w.format not in ("mxfp4", "nvfp4")]
    rules = [entry for entry in _plain_rules(rest) if entry.rule.to != "keep"]
    rounded = _packed_rules(exact, layout)[:-1] if exact else []
    rounded += [CommentedRule(LayerRule(match=e.rule.match, to="nvfp4", scale="nearest")) for e in rules]
    rounded.append(CommentedRule(LayerRule(match="*", to="bf16"), "everything else, in BF16"))
    return rounded, "nvfp4-w4a16", "modelopt", ("vllm",)


def _packed_rules(packed: list[SourceWeight], layout: str) -> list[CommentedRule]:
    """One rule per pattern of packed modules; draft layers of DeepSeek-V4 stay as their producer made them."""
    rules: list[CommentedRule] = []
    patterns = dict.fromkeys(_glob(w.module) for w in packed)
    for pattern in patterns:
        if layout == "deepseek-v4" and pattern.startswith("mtp."):
            continue
        rules.append(CommentedRule(LayerRule(match=pattern, to="nvfp4", scale="lossless")))
    if layout == "gguf":  # ggml's other blocks cannot be copied, nor can rows in llama.cpp's order
        rules.append(CommentedRule(LayerRule(match="*", to="bf16"), "everything else, in BF16"))
    else:
        rules.append(CommentedRule(LayerRule(match="*", to="keep"), "everything else, byte for byte"))
    return rules


def _glob(module: str) -> str:
    """The pattern of a module name; the last part of a name (w1, gate_proj) is opened up for routed experts."""
    pattern = pattern_of(module)
    head, mark, tail = pattern.partition(".experts.*.")
    return f"{head}.experts.*" if mark and "." not in tail else pattern


def _plain_rules(weights: list[SourceWeight]) -> list[CommentedRule]:
    """The linear layers of attention and MLP; embeddings, heads and norms stay."""
    found = dict.fromkeys(w.module.rpartition(".")[2] for w in weights if w.module.rpartition(".")[2] in _LINEARS)
    if not found:
        raise SourceError(
            "no linear layer of a known name",
            where="the checkpoint",
            hint="write the manifest by hand: `requant inspect` lists the modules",
        )
    rules = [CommentedRule(LayerRule(match=f"*.{leaf}", to="mxfp4", scale="nearest")) for leaf in found]
    rules.append(CommentedRule(LayerRule(match="*", to="keep"), "embeddings, heads and norms, byte for byte"))
    return rules
