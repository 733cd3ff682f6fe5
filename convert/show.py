"""Plans, forecasts and results as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from requant.convert.device import shares_of
from requant.convert.engine import worker_bytes
from requant.convert.execute import RunResult, default_workers
from requant.convert.pipeline import summarize
from requant.convert.plan import CopyUnit, Plan
from requant.convert.predict import ASSUMED_WORKER_GBPS, ASSUMPTIONS, Fleet, Load, predict, prediction_text
from requant.convert.runrecord import measured_rate, run_text
from requant.convert.scan import GroupForecast
from requant.kernels.gpu_lane import PINNED_BYTES
from requant.manifests.errors import UsageError
from requant.manifests.urls import is_url

__all__ = [
    "forecast_json",
    "forecast_text",
    "plan_json",
    "plan_text",
    "predicted",
    "result_json",
    "result_text",
    "size_text",
    "table",
]

ASSUMED_GBPS: Final = 1.0
"""Disk throughput (GB of source per second) behind the time estimate, said in the plan."""
BASE_MEMORY: Final = 120 * 2**20
"""Interpreter, numpy, and the compiled kernels."""
GPU_MEMORY: Final = 2 * 2**30
"""torch and a CUDA context, on this side of PCIe, roughly."""
PER_TENSOR: Final = 320
"""Bytes of plan for each tensor of source and output: 0.48 GB for the 1.5 million of Kimi-K3 (test_plan_scale.py)."""


def size_text(nbytes: int) -> str:
    """A size as people write it, decimal units."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned; those after the first two to the right where they hold numbers."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    numeric = [
        bool(rows) and all(row[i][:1].isdigit() or row[i] in ("", "-") for row in rows) for i in range(len(head))
    ]
    lines = [
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True)).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _memory(plan: Plan) -> int:
    tensors = len(plan.catalogue.tensors) + len(plan.tensors)
    lanes = GPU_MEMORY + _workers(plan) * PINNED_BYTES if plan.manifest.execute.device == "cuda" else 0
    return BASE_MEMORY + tensors * PER_TENSOR + _workers(plan) * worker_bytes(plan) + lanes


def _workers(plan: Plan) -> int:
    workers = plan.manifest.execute.workers
    return default_workers() if workers == "auto" else workers


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan's facts."""
    copied = sum(u.nbytes for u in plan.units if isinstance(u, CopyUnit))
    return {
        "name": plan.manifest.name,
        "source": {
            "layout": plan.layout,
            "reason": plan.layout_reason,
            "shards": len(plan.catalogue.shards),
            "tensors": len(plan.catalogue.tensors),
            "bytes": plan.catalogue.total_bytes,
            "ignored": [list(entry) for entry in plan.catalogue.ignored],
            "sidecars": len(plan.catalogue.sidecars),
        },
        "target": {
            "format": plan.target_format,
            "layout": plan.manifest.target.layout,
            "output": _output_of(plan),
            "shards": len(plan.shards),
            "tensors": len(plan.tensors),
            "bytes": plan.bytes_out,
            "input_scale": plan.input_scale_note,
        },
        "rules": [
            {
                "match": rule.match,
                "to": rule.to,
                "scale": rule.scale,
                "tensors": use.tensors,
                "bytes_in": use.bytes_in,
                "bytes_out": use.bytes_out,
                "notes": use.notes,
            }
            for rule, use in zip(plan.manifest.layers, plan.rules, strict=True)
        ],
        "units": {"groups": len(plan.groups), "copied_bytes": copied},
        "dropped": list(plan.dropped),
        "needs": {
            "disk_bytes": plan.bytes_out,
            "memory_bytes": _memory(plan),
            "workers": _workers(plan),
            "seconds": round(plan.bytes_in / ASSUMED_GBPS / 1e9, 1),
            "assumed_gb_per_s": ASSUMED_GBPS,
        },
        "plan_sha256": plan.sha256,
        **({"device": asdict(shares_of(plan))} if plan.manifest.execute.device == "cuda" else {}),
    }


def _output_of(plan: Plan) -> str:
    """Folder or address of the output."""
    target = plan.manifest.target.output
    return target if is_url(target) else str(plan.output)


def plan_text(plan: Plan, seconds: float) -> str:
    """The plan as a page."""
    facts = plan_json(plan)
    source, target, needs = facts["source"], facts["target"], facts["needs"]
    lines = [
        f"{plan.manifest.name}: {plan.layout} -> {plan.target_format} ({target['layout']})",
        f"  source  {plan.catalogue.root}",
        f"          {source['tensors']:,} tensors, {source['shards']} shards, {size_text(source['bytes'])}; "
        f"layout {plan.layout} ({plan.layout_reason})",
        f"  output  {_output_of(plan)}" + (f" by way of {plan.output}" if _output_of(plan) != str(plan.output) else ""),
        f"          {target['tensors']:,} tensors, {target['shards']} shards, {size_text(target['bytes'])}",
        "",
    ]
    rows = [
        [
            f"{index}",
            rule.match,
            rule.to + (f" ({rule.scale})" if rule.to not in ("keep", "drop") else ""),
            f"{use.tensors:,}",
            size_text(use.bytes_in),
            size_text(use.bytes_out),
        ]
        for index, (rule, use) in enumerate(zip(plan.manifest.layers, plan.rules, strict=True))
    ]
    lines.append(table(["rule", "match", "to", "tensors", "bytes in", "bytes out"], rows))
    for index, use in enumerate(plan.rules):
        lines += [f"  rule {index}: {count:,} tensors, {note}" for note, count in use.notes.items()]
    lines.append("")
    if plan.groups:
        lines.append(f"  {len(plan.groups):,} fused groups to compute; activation scale: {plan.input_scale_note}")
    if plan.manifest.execute.device == "cuda":
        lines += [f"  {line}" for line in shares_of(plan).text.splitlines()]
    if plan.dropped:
        lines.append(f"  dropped by rule: {', '.join(plan.dropped[:5])}{' ...' if len(plan.dropped) > 5 else ''}")
    lines += [f"  not taken: {path} ({reason})" for path, reason in plan.catalogue.ignored]
    lines.append(
        f"  needs {size_text(needs['disk_bytes'])} of disk, about {size_text(needs['memory_bytes'])} of memory with "
        f"{needs['workers']} workers, about {needs['seconds']:.0f} s at {ASSUMED_GBPS:g} GB/s"
    )
    lines.append(f"  planned in {seconds:.2f} s")
    return "\n".join(lines)


def predicted(
    plan: Plan,
    nodes: int,
    per_node: int | None,
    *,
    rate: float | None,
    rate_from: Path | None,
    network: float | None,
    storage: float | None,
) -> tuple[dict[str, Any], str]:
    """The time on a cluster, as JSON and as text. UsageError for figures that cannot be."""
    if rate is not None and rate_from is not None:
        raise UsageError("--rate and --rate-from exclude each other", hint="give one of them")
    if any(figure is not None and not 0 < figure < float("inf") for figure in (rate, network, storage)):
        raise UsageError("--rate, --gbps and --storage are positive numbers", hint="correct it, or leave it out")
    origin = "as given" if rate is not None else "assumed, not measured: give --rate or --rate-from"
    if rate_from is not None:
        rate, origin = measured_rate(rate_from), f"measured by the run that made {rate_from}"
    fleet = Fleet(nodes, per_node or _workers(plan), rate or ASSUMED_WORKER_GBPS, network, storage)
    load = Load(plan.bytes_in, plan.bytes_out, max((unit.nbytes for unit in plan.units), default=0))
    prediction = predict(load, fleet)
    facts = {
        "seconds": round(prediction.seconds, 1),
        "bound": prediction.bound,
        "parts": {name: round(seconds, 1) for name, seconds in prediction.parts.items()},
        "start_seconds": prediction.start,
        "tail_seconds": round(prediction.tail, 2),
        "fleet": asdict(fleet),
        "rate_origin": origin,
        "assumptions": list(ASSUMPTIONS),
    }
    return facts, prediction_text(prediction, fleet, origin)


def forecast_json(forecasts: Sequence[GroupForecast]) -> dict[str, Any]:
    """Totals and the groups that are not certain."""
    open_groups = [f for f in forecasts if not f.certain]
    return {
        "groups": len(forecasts),
        "certainly_lossless": len(forecasts) - len(open_groups),
        "blocks": sum(f.blocks for f in forecasts),
        "outside_native_at_most": sum(f.outside_native for f in forecasts),
        "outside_marlin_at_most": sum(f.outside_marlin for f in forecasts),
        "not_certain": [
            {
                "group": f.group,
                "modules": list(f.modules),
                "k_min": f.k_min,
                "k_max": f.k_max,
                "blocks": f.blocks,
                "outside_native_at_most": f.outside_native,
                "outside_marlin_at_most": f.outside_marlin,
            }
            for f in open_groups
        ],
    }


def forecast_text(forecasts: Sequence[GroupForecast], limit: int = 20) -> str:
    """The forecast as a table of the groups that need a look at their codes."""
    facts = forecast_json(forecasts)
    lines = [
        f"scan: {facts['certainly_lossless']:,} of {facts['groups']:,} fused groups are certainly lossless under both "
        f"windows (span of exponents <= 14)",
    ]
    worst = sorted((f for f in forecasts if not f.certain), key=lambda f: -f.outside_native)
    if worst:
        lines.append("  the others depend on their codes; upper bounds, in 32-blocks:")
        rows = [
            [
                f.group,
                f"{f.k_max - f.k_min}",
                f"{f.blocks:,}",
                f"{f.outside_native:,}",
                f"{f.outside_marlin:,}",
            ]
            for f in worst[:limit]
        ]
        lines.append(table(["group", "span", "blocks", "outside native", "outside Marlin"], rows))
        if len(worst) > limit:
            lines.append(f"  ... and {len(worst) - limit} more (--format json lists all)")
    return "\n".join(lines)


def result_json(plan: Plan, result: RunResult) -> dict[str, Any]:
    """What a run did."""
    summary = summarize(plan, result)
    return {"output": _output_of(plan), "resumed_units": result.resumed, **summary, "run": result.record}


def result_text(plan: Plan, result: RunResult) -> str:
    """What a run did, in a few lines."""
    facts = summarize(plan, result)
    lines = [f"wrote {_output_of(plan)}: {len(plan.shards)} shards, {size_text(plan.bytes_out)}"]
    blocks = facts["exact"] + facts["shifted"] + facts["lossy"]
    if blocks:
        lines.append(
            f"  16-blocks: {facts['exact']:,} exact, {facts['shifted']:,} exact by shift, {facts['lossy']:,} lossy "
            f"of {blocks:,}; {facts['below_marlin']:,} scales below Marlin's 2^-6"
        )
    if facts["weights_quantized"]:
        lines.append(f"  weights quantized: {facts['weights_quantized']:,}")
    if result.resumed:
        lines.append(f"  {result.resumed} units had been done by an earlier run")
    if result.record.get("nodes"):
        lines.append(run_text(result.record))
    from requant.convert.uploads import read_freed

    where = _output_of(plan) if read_freed(result.output) else result.output
    lines.append(f"  next: requant validate {where}")
    return "\n".join(lines)
