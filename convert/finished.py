"""A finished output read back: its manifest, its lock, and where its source is.

The manifest that may be published knows no folders; on the machine that made the output a private copy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from requant.convert.checkpoint import PICKLE_SUFFIXES, read_json
from requant.convert.hub import fetch
from requant.convert.pipeline import LOCK_FILE, MANIFEST_FILE
from requant.convert.private import LOCAL_MANIFEST
from requant.manifests.errors import SourceError
from requant.manifests.load import load_manifest
from requant.manifests.schema import Manifest
from requant.manifests.urls import is_url

__all__ = ["Finished", "fetch_output", "manifest_of", "open_finished"]


@dataclass(frozen=True, slots=True)
class Finished:
    """An output with what it was made from."""

    output: Path
    source: Path
    manifest: Manifest


def manifest_of(output: Path, manifest_ref: str | None = None, sets: Sequence[str] = ()) -> Manifest:
    """The manifest of `output`, the private copy first. SourceError if it is no finished output of ours."""
    if not output.is_dir():
        raise SourceError("is not a folder", where=str(output), hint="give the folder that `requant run` wrote")
    if not (output / LOCK_FILE).exists():
        raise SourceError(
            f"{LOCK_FILE} is missing",
            where=str(output),
            hint="not a finished output of requant: only those have a source to be judged against",
        )
    local = output / LOCAL_MANIFEST
    return load_manifest(manifest_ref or (local if local.exists() else output / MANIFEST_FILE), sets).manifest


def fetch_output(address: str) -> Path:
    """A finished output in an object store, in the cache of this machine. SourceError if it is none of ours."""
    from requant.convert.object_remote import resolve_objects

    remote = resolve_objects(address.rstrip("/"))
    if LOCK_FILE not in remote.files:
        raise SourceError(f"{LOCK_FILE} is missing", where=address, hint="not a finished output of requant")
    return remote.fetch(list(remote.files))


def _fetched(address: str, recorded: dict[str, Any]) -> Path:
    """The source in an object store, whole. SourceError if it is not what the lock recorded."""
    from requant.convert.object_remote import changed_fault, resolve_objects

    remote = resolve_objects(address)
    changed = sorted(
        name
        for name, facts in recorded.items()
        if name not in remote.files or facts.get("version") not in (None, remote.files[name].version)
    )
    if changed:
        raise changed_fault(remote, changed)
    return remote.fetch([name for name in remote.files if not name.endswith(PICKLE_SUFFIXES)])


def open_finished(output: Path, manifest_ref: str | None = None, sets: Sequence[str] = ()) -> Finished:
    """Find manifest and source of `output`. SourceError if it is no finished output of ours or the source is gone."""
    manifest = manifest_of(output, manifest_ref, sets)
    lock = read_json(output / LOCK_FILE, LOCK_FILE)
    source = manifest.source
    recorded = cast("dict[str, Any]", lock.get("source") or {})
    if source.path is not None and is_url(source.path):
        root = _fetched(source.path, cast("dict[str, Any]", recorded.get("files") or {}))
    elif source.path is not None:
        root = Path(source.path).expanduser()
    else:
        root, _ = fetch(str(source.repo), str(recorded.get("commit") or source.revision))
    if not root.is_dir():
        raise SourceError(
            "the source is not there any more",
            where=str(root),
            hint="bring it back, or say where it is now with --set source.path=FOLDER (an output made elsewhere "
            "does not say)",
        )
    return Finished(output, root, manifest)
