"""What belongs to this machine, kept apart from what may be published.

An output holds no path of the machine that made it: `requant.manifest.yaml` names folders by their last part, and the
lock names the source folder or the repository and its commit. What `requant validate` and `requant publish` need to
find again lies in `.requant-local/` inside the output, which is neither judged nor uploaded:

    .requant-local/manifest.yaml   the resolved manifest with its paths, made absolute
    .requant-local/run.json        how fast the run was, on which nodes (runrecord.py)
    .requant-local/publish.json    which pull request or branch an upload went into
    .requant-local/uploaded.json   shards that were uploaded to the Hub while converting and freed (uploads.py)
    .requant-local/stored.json     shards that are in the object store of target.output (uploads.py)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from requant.manifests.load import dump_manifest
from requant.manifests.schema import Manifest
from requant.manifests.urls import is_url, last_part

__all__ = [
    "LOCAL_FOLDER",
    "LOCAL_MANIFEST",
    "LOCATIONS",
    "STORED_FILE",
    "UPLOADED_FILE",
    "local_manifest",
    "public_manifest",
    "redact",
]

LOCAL_FOLDER: Final = ".requant-local"
LOCAL_MANIFEST: Final = f"{LOCAL_FOLDER}/manifest.yaml"
UPLOADED_FILE: Final = f"{LOCAL_FOLDER}/uploaded.json"
STORED_FILE: Final = f"{LOCAL_FOLDER}/stored.json"

LOCATIONS: Final = (
    ("source", "path"),
    ("target", "output"),
    ("execute", "work"),
    ("activations", "input_scale", "from"),
    ("activations", "calibrate", "text"),
    ("validate", "model", "text"),
    ("validate", "model", "prompts"),
    ("validate", "model", "lm_eval", "folder"),
    ("validate", "serving", "prompts"),
)
"""Every key of a manifest whose value is a place on this machine (a test compares this with the schema)."""

_TOKEN: Final = re.compile(r"\b(?:hf|api|ghp|github_pat)_[A-Za-z0-9_]{16,}")
_QUERY: Final = re.compile(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>]*")
_USERINFO: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@]+@")
_AWS: Final = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b")
_SECRETS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN")
"""Variables whose values never stand in a message."""
_FOLDERS: Final = re.compile(r"(?<![\w.:/])/(?:[^\s/'\",:;()\[\]]+/)+(?=[^\s/])")


def redact(text: str) -> str:
    """`text` without access tokens, without the queries of addresses (signatures), without names and passwords."""
    for name in _SECRETS:
        value = os.environ.get(name, "")
        text = text.replace(value, "***") if len(value) >= 8 else text
    return _AWS.sub("***", _TOKEN.sub("***", _USERINFO.sub(r"\1", _QUERY.sub(r"\1", text))))


def public_manifest(manifest: Manifest) -> str:
    """The resolved manifest as it may be published: folders by their last part, no address of a server."""

    def last(path: str) -> str:
        return last_part(path) or "folder"

    raw = _with_locations(manifest, last)
    raw["execute"]["work"] = None
    if raw["source"]["path"]:  # a folder to whoever reads this, wherever it was
        raw["execute"] |= {"stream": False, "max_disk": None}
    if raw["source"]["path"] == raw["target"]["output"]:  # two folders of one name, and a manifest must tell them apart
        raw["target"]["output"] = f"out/{raw['target']['output']}"
    serving = raw["validate"].get("serving")
    if serving and serving["endpoint"]:
        serving["endpoint"] = "http://localhost"
    if serving and serving["launch"]:
        serving["launch"] = _FOLDERS.sub("", redact(serving["launch"]))
    if raw["execute"].get("ray_address"):
        raw["execute"]["ray_address"] = "auto"
    return dump_manifest(Manifest.model_validate(raw))


def local_manifest(manifest: Manifest) -> str:
    """The resolved manifest as this machine needs it later, from any folder: its paths absolute."""

    def whole(path: str) -> str:
        return path if is_url(path) else str(Path(path).absolute())

    return dump_manifest(Manifest.model_validate(_with_locations(manifest, whole)))


def _with_locations(manifest: Manifest, change: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    """The manifest as plain data, `change` applied to every location."""
    raw = cast("dict[str, dict[str, Any]]", manifest.model_dump(mode="json", by_alias=True))
    for *parents, key in LOCATIONS:
        holder: Any = raw
        for parent in parents:
            holder = holder.get(parent) if isinstance(holder, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(holder, dict) and isinstance(holder.get(key), str):  # pyright: ignore[reportUnknownMemberType]
            holder[key] = change(cast("str", holder[key]))
    return raw
