"""The sign-off: which gates stand, what each stage measured, and the sha256 of every file that was judged.

A gate is `passed`, `failed` or `not run`, each with its reason. Contract and numerics are always required; the others
are gates if the manifest names them, and required unless it says otherwise. A stage that ran on another device than its
gate asks for did not run, as far as that gate is concerned. The output is signed off only if every required gate
passed: there is no "passed with skips".

Written as `requant.signoff.json` (for `publish`, which compares the hashes), `requant.signoff.md` and
`requant.signoff.html` (for people), and its charts as `requant.signoff.NAME.svg` (for the model card), each through a
temporary name. None holds an absolute path, a host name or a token: they are meant to be published.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

from requant.manifests.errors import SourceError
from requant.manifests.schema import Manifest
from requant.validate.hashing import hash_files, judged_files
from requant.validate.report import render_markdown
from requant.validate.report_html import render_html
from requant.validate.report_plots import PLOT_PREFIX, plots_of
from requant.validate.results import StageResult, Status
from requant.validate.verdict import ALWAYS_REQUIRED, VERSION, Gate, SignOff

__all__ = [
    "HTML_NAME",
    "JSON_NAME",
    "MARKDOWN_NAME",
    "Gate",
    "SignOff",
    "cpu_name",
    "load_signoff",
    "sign_off",
    "verify_signoff",
    "write_signoff",
]

JSON_NAME: Final = "requant.signoff.json"
HTML_NAME: Final = "requant.signoff.html"
MARKDOWN_NAME: Final = "requant.signoff.md"
_DECLARED: Final = ("kernels", "model", "speed", "serving")
_PACKAGES: Final = ("requant", "torch", "numpy", "numba", "safetensors", "triton")


def sign_off(
    output: Path,
    manifest: Manifest | None,
    stages: Sequence[StageResult],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> SignOff:
    """Judge the stages against the manifest's gates and hash every file of `output`.

    progress: called with (bytes hashed, bytes in all). Raises SourceError if the folder is gone or unreadable.
    """
    if not output.is_dir():
        raise SourceError("there is no such folder", where=str(output), hint="give the folder of a finished conversion")
    return SignOff(
        name=manifest.name if manifest is not None else output.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        gates=tuple(_gates(manifest, stages)),
        stages=tuple(stages),
        files=hash_files(output, judged_files(output), progress=progress),
        environment=_environment(),
        source=_source(output),
    )


def write_signoff(output: Path, signoff: SignOff) -> None:
    """Write page, charts, Markdown and then `requant.signoff.json` into `output`, each at once or not at all."""
    published = signoff.to_json()  # without paths and tokens, in all files
    shown = SignOff.from_json(published)
    _write(output / HTML_NAME, render_html(shown))
    plots = plots_of(shown)
    for stale in output.glob(f"{PLOT_PREFIX}*.svg"):
        if stale.name not in plots:
            stale.unlink()
    for name, svg in plots.items():
        _write(output / name, svg)
    _write(output / MARKDOWN_NAME, render_markdown(shown))
    _write(output / JSON_NAME, _dump(published) + "\n")


def load_signoff(output: Path) -> SignOff:
    """The sign-off that lies in `output`; SourceError if there is none or it cannot be read."""
    file = output / JSON_NAME
    hint = "run `requant validate` on the folder"
    try:
        raw = cast("dict[str, object]", json.loads(file.read_text(encoding="utf-8")))
        if raw["version"] != VERSION:
            raise SourceError(
                f"has version {raw['version']!r}, this program reads {VERSION}", where=JSON_NAME, hint=hint
            )
        return SignOff.from_json(raw)
    except FileNotFoundError as error:
        raise SourceError("there is no sign-off", where=str(file), hint=hint) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"cannot be read: {error}", where=JSON_NAME, hint=hint) from error


def verify_signoff(output: Path, *, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """What is different in `output` from what its sign-off covers; empty if every file is what was judged.

    Says nothing about the verdict: see `SignOff.signed_off`. Raises SourceError without a readable sign-off.
    """
    covered = {file.name: file for file in load_signoff(output).files}
    present = judged_files(output)
    wrong = [f"{name}: was judged and is gone" for name in covered if name not in present]
    wrong += [f"{name}: is not covered by the sign-off" for name in present if name not in covered]
    known = [name for name in present if name in covered]
    for file in hash_files(output, known, progress=progress):
        if file.size != covered[file.name].size:
            wrong.append(f"{file.name}: was {covered[file.name].size:,} bytes when judged, is {file.size:,}")
        elif file.sha256 != covered[file.name].sha256:
            wrong.append(f"{file.name}: has changed since it was judged")
    return wrong


# --- gates ------------------------------------------------------------------------------------------------------------


def _gates(manifest: Manifest | None, stages: Sequence[StageResult]) -> list[Gate]:
    results = {stage.stage: stage for stage in stages}
    gates = [_gate(name, results.get(name), required=True, device="any") for name in ALWAYS_REQUIRED]
    for name in _DECLARED:
        declared = getattr(manifest.validation, name) if manifest is not None else None
        if declared is not None:
            gates.append(_gate(name, results.get(name), required=declared.required, device=declared.device))
    named = {gate.name for gate in gates}
    gates += [_gate(stage.stage, stage, required=False, device="any") for stage in stages if stage.stage not in named]
    return gates


def _gate(name: str, result: StageResult | None, *, required: bool, device: str) -> Gate:
    if result is None:
        return Gate(name, required, device, Status.NOT_RUN, "this stage was not part of the run")
    if result.status is Status.NOT_RUN:
        return Gate(name, required, device, Status.NOT_RUN, result.reason)
    if device != "any" and not result.device.startswith(device):
        reason = f"ran on {result.device}, the gate asks for {device} (there: {result.status.value}, {result.reason})"
        return Gate(name, required, device, Status.NOT_RUN, reason, result.device)
    return Gate(name, required, device, result.status, result.reason, result.device)


# --- what it rests on -------------------------------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    """Versions and the kind of machine; nothing that names the machine."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    found["cpu"] = f"{cpu_name()}, {os.cpu_count() or 1} logical"
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _source(output: Path) -> dict[str, str]:
    """Where the weights came from, as the lock has it: repository, commit, layout; hashes of manifest and plan."""
    try:
        lock = cast("dict[str, object]", json.loads((output / "requant.lock.json").read_text(encoding="utf-8")))
        source = cast("dict[str, object]", lock.get("source") or {})
        facts = {key: source.get(key) for key in ("repo", "commit", "layout")}
        facts |= {key: lock.get(key) for key in ("tool", "manifest_sha256", "plan_sha256")}
    except (OSError, ValueError, AttributeError):
        return {}
    return {key: value for key, value in facts.items() if isinstance(value, str) and value}


# --- files ------------------------------------------------------------------------------------------------------------


def _write(path: Path, text: str) -> None:
    """Replace path by text, through a temporary name, so that no reader meets half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _dump(value: object, indent: str = "") -> str:
    """JSON with one line per key and per row: a report on 30,000 tensors stays readable and comparable."""
    deeper = indent + "  "
    if isinstance(value, Mapping) and value:
        pairs = cast("Mapping[str, object]", value).items()
        inner = ",\n".join(f"{deeper}{json.dumps(key)}: {_dump(item, deeper)}" for key, item in pairs)
        return f"{{\n{inner}\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in cast("list[object]", value)):
        inner = ",\n".join(f"{deeper}{_dump(item, deeper)}" for item in cast("list[object]", value))
        return f"[\n{inner}\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
