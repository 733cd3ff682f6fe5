"""Stage 1 of validation: would each declared runtime load this output, and load it right? Simulated on the files alone.

    containers -> modules -> metadata -> exclude lists -> scale values -> runtimes -> source

The second opinion on a conversion: the folder is read anew with the safetensors library and judged by the loaders'
rules; nothing of the code that wrote it is used. Most of what goes wrong in this field loads without an error and
serves garbage, so a rule here is an error whenever a runtime would be wrong, not only when it would refuse.

| module            | rules about                                                      |
|-------------------|------------------------------------------------------------------|
| opened            | shards, index, strays                                            |
| contract_tensors  | parts, dtypes, shapes, experts                                   |
| contract_scales   | values of block scales and scalars, fused groups                 |
| contract_config   | the two config files, activations, KV, MTP, tied heads, size     |
| contract_exclude  | exclude lists under both runtimes' matchers                      |
| contract_runtimes | vllm, sglang, trtllm, transformers; Marlin; tensor parallelism   |
| contract_source   | config keys and sidecar files of the source                      |
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from requant.manifests.errors import SourceError, UsageError
from requant.validate.collector import Collector
from requant.validate.contract_config import (
    bits_per_weight,
    check_activations,
    check_declared,
    check_kv,
    check_places,
    check_special,
)
from requant.validate.contract_exclude import check_exclude_lists
from requant.validate.contract_runtimes import (
    RUNTIMES,
    check_hybrid,
    check_runtimes,
    marlin_table,
    tensor_parallel_table,
)
from requant.validate.contract_scales import check_fused, check_scales
from requant.validate.contract_source import check_config_kept, check_sidecars
from requant.validate.contract_tensors import check_experts, check_modules
from requant.validate.opened import OpenedFolder, as_object, open_folder
from requant.validate.output_view import view_of
from requant.validate.results import JSON, Finding, StageResult, Status, status_of

__all__ = ["STAGE", "check_contract"]

STAGE = "contract"


def check_contract(
    output: Path,
    runtimes: Sequence[str],
    *,
    source: Path | None = None,
    tensor_parallel: Sequence[int] = (1, 2, 4, 8),
) -> StageResult:
    """Check `output` against the loader contracts of `runtimes` (of vllm, sglang, trtllm, transformers).

    source: the checkpoint it was made from, for the rules that compare. tensor_parallel: degrees for the table.
    Faults of the output are findings; only a folder that is not there and an unknown runtime raise.
    """
    started = time.perf_counter()
    for runtime in runtimes:
        if runtime not in RUNTIMES:
            raise UsageError(f"unknown runtime {runtime!r}", hint=f"one of {', '.join(RUNTIMES)}")
    if not output.is_dir():
        raise SourceError("there is no such folder", where=str(output), hint="give the folder of a finished conversion")
    found = Collector()
    folder = open_folder(output, found)
    view = view_of(folder, found)
    check_modules(view, found)
    check_experts(view, found)
    check_places(view, found)
    check_declared(view, found)
    check_activations(view, found)
    check_special(view, found)
    check_hybrid(view, found)
    left_plain = check_exclude_lists(view, found)
    bits = bits_per_weight(view, left_plain, found)
    facts = check_scales(view, found)
    check_fused(view, facts, found)
    check_kv(view, facts, found)
    standing = check_runtimes(view, runtimes, facts, found)
    parallel = tensor_parallel_table(view, tensor_parallel, runtimes, found)
    sidecars = _check_source(folder, source, found) if source is not None else None
    findings = found.findings()
    kinds = Counter(module.kind.value for module in view.modules.values())
    data: dict[str, JSON] = {
        "runtimes": dict(standing),
        "tensors": len(folder.tensors),
        "bytes": folder.nbytes,
        "modules": dict(sorted(kinds.items())),
        "declared": "" if view.declared is None else f"{view.declared.dialect.value} {view.declared.algo}".strip(),
        "bits_per_weight": bits,
        "kv_scales": len(facts.kv),
        "marlin": marlin_table(facts),
        "tensor_parallel": parallel,
        "sidecars_compared": sidecars,
        "rules": dict(sorted(found.counts.items())),
    }
    status = status_of(findings)
    reason = _reason(status, standing, findings)
    return StageResult(STAGE, status, reason, findings, data, "cpu", time.perf_counter() - started)


def _check_source(folder: OpenedFolder, source: Path, found: Collector) -> int:
    """Compare config keys and sidecars with the source's; the number of sidecars compared."""
    config = source / "config.json"
    if config.is_file():
        try:
            theirs = as_object(cast("object", json.loads(config.read_text(encoding="utf-8"))))
        except ValueError as error:
            raise SourceError(f"cannot be read as JSON: {error}", where=str(config), hint="mend the source") from error
        check_config_kept(folder, theirs or {}, found)
    return check_sidecars(folder.path, source, found)


def _reason(status: Status, standing: Mapping[str, str], findings: Sequence[Finding]) -> str:
    errors = [finding for finding in findings if finding.severity == "error"]
    if status is Status.FAILED:
        rules = ", ".join(dict.fromkeys(finding.rule for finding in errors))
        return f"errors under {rules}"
    spelled = ", ".join(f"{runtime} {how}" for runtime, how in standing.items())
    return spelled or "no runtime is declared: the common rules hold"
