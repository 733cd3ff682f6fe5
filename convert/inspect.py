"""`requant inspect`: what a checkpoint holds, from its headers."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.reading import recognise
from requant.convert.show import size_text, table
from requant.manifests.errors import SourceError

__all__ = ["census", "census_text"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def pattern_of(name: str) -> str:
    """The name with every number between dots replaced by `*`."""
    return _NUMBER.sub("*", name)


def census(catalogue: Catalogue) -> dict[str, Any]:
    """Counts by dtype and by name pattern; the layout and why."""
    by_dtype: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    patterns: dict[tuple[str, str], list[Any]] = {}
    for tensor in catalogue.tensors.values():
        entry = by_dtype[tensor.dtype]
        entry[0] += 1
        entry[1] += tensor.nbytes
        key = (pattern_of(tensor.name), tensor.dtype)
        row = patterns.setdefault(key, [0, 0, set[tuple[int, ...]]()])
        row[0] += 1
        row[1] += tensor.nbytes
        row[2].add(tensor.shape)
    try:
        layout, reason = recognise(catalogue, "auto")
        name = layout.name
        packed = [w for w in layout.weights(catalogue) if w.format != "plain"]
    except SourceError as error:
        name, reason, packed = "unknown", error.message, []
    return {
        "folder": str(catalogue.root),
        "model_type": catalogue.config.get("model_type"),
        "layout": name,
        "reason": reason,
        "shards": len(catalogue.shards),
        "tensors": len(catalogue.tensors),
        "bytes": catalogue.total_bytes,
        "formats": {
            kind: {
                "weights": sum(w.format == kind for w in packed),
                "parameters": sum(w.rows * w.cols * max(w.experts, 1) for w in packed if w.format == kind),
            }
            for kind in dict.fromkeys(w.format for w in packed)
        },
        "dtypes": {d: {"tensors": n, "bytes": b} for d, (n, b) in sorted(by_dtype.items())},
        "patterns": [
            {"name": p, "dtype": d, "tensors": n, "bytes": b, "shapes": [list(s) for s in sorted(shapes)][:4]}
            for (p, d), (n, b, shapes) in patterns.items()
        ],
        "sidecars": list(catalogue.sidecars),
        "ignored": [list(entry) for entry in catalogue.ignored],
    }


def census_text(facts: dict[str, Any], verbose: bool) -> str:
    """The census as a page; every pattern if verbose, else the forty largest."""
    lines = [
        f"{facts['folder']}: {facts['model_type']}, layout {facts['layout']} ({facts['reason']})",
        f"  {facts['tensors']:,} tensors in {facts['shards']} shards, {size_text(facts['bytes'])}",
    ]
    for kind, entry in facts["formats"].items():
        lines.append(f"  {entry['weights']:,} {kind.upper()} weights, {entry['parameters']:,} parameters")
    lines += ["", table(["dtype", "tensors", "bytes"], [
        [dtype, f"{entry['tensors']:,}", size_text(entry["bytes"])] for dtype, entry in facts["dtypes"].items()
    ])]  # fmt: skip
    patterns = sorted(facts["patterns"], key=lambda p: -p["bytes"])
    shown = patterns if verbose else patterns[:40]
    rows = [
        [
            p["name"],
            p["dtype"],
            " ".join("x".join(map(str, s)) or "scalar" for s in p["shapes"]),
            f"{p['tensors']:,}",
            size_text(p["bytes"]),
        ]
        for p in shown
    ]
    lines += ["", table(["tensors", "dtype", "shapes", "count", "bytes"], rows)]
    if len(patterns) > len(shown):
        lines.append(f"... and {len(patterns) - len(shown)} smaller patterns (-v shows all)")
    lines += [f"not part of the checkpoint: {path} ({reason})" for path, reason in facts["ignored"]]
    return "\n".join(lines)
