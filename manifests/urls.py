"""Addresses of checkpoints in object stores, as fsspec writes them: `s3://bucket/prefix`, `gs://...`, `memory://...`."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_url", "last_part", "url_fault"]

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(text: str) -> bool:
    """Whether `text` names a place in an object store, not a folder."""
    return _SCHEME.match(text) is not None


def last_part(text: str) -> str:
    """The last name of an address or a folder."""
    return text.rstrip("/").rpartition("/")[2]


def url_fault(text: str) -> str:
    """What is wrong with an address that `is_url` takes for one, or ""."""
    scheme, _, rest = text.partition("://")
    if scheme.lower() == "hf":
        return "the Hub has keys of its own: source.repo, publish.repo"
    if scheme.lower() in ("http", "https"):
        return f"{scheme}:// has no listing; name a bucket (s3://, gs://) or a folder"
    if "@" in rest.partition("/")[0] or "?" in rest or "#" in rest:
        return "an address holds no credentials and no options; those come from the environment"
    parts = rest.strip("/").split("/")
    if len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
        return f"is not {scheme}://BUCKET/PREFIX"
    return ""
