"""What the Hub of hub_server.py holds: repositories, commits, files, pull requests, and the faults asked of it."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

CHUNK = 64 * 1024
BURST = 0.5
"""Seconds of its rate that a limited server may catch up, so that a late thread does not lower the rate."""
USER = "tester"
GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
LARGE = re.compile(r"\.(safetensors|bin|pt|gguf|npz|model|zip)$|(^|/)tokenizer\.json$")
"""Names that the Hub's default .gitattributes and size rules make LFS files."""


@dataclass(frozen=True)
class Entry:
    """A file of a commit. oid: git's. lfs: sha256 of a large file. xet: its hash in Xet's store."""

    oid: str
    size: int
    lfs: str | None = None
    xet: str | None = None


@dataclass
class Commit:
    """A tree with its parent."""

    tree: dict[str, Entry]
    parent: str | None
    title: str
    date: str


@dataclass
class PullRequest:
    """Its branch is refs/pr/<num>. status: draft, open, merged or closed, as the Hub names them."""

    num: int
    title: str
    description: str
    status: str = "draft"
    created: str = ""


@dataclass
class Repo:
    """refs: branch name (or refs/pr/N) -> commit."""

    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    pulls: dict[int, PullRequest] = field(default_factory=dict)


@dataclass
class Fault:
    """What goes wrong with requests whose `METHOD path` matches, the next `times` times, after `skip` good ones.

    status: answer so, with headers and message. cut_after: let so many bytes of the body through (sent for a download,
    received for an upload), then close the connection. then: called as the fault strikes.
    """

    match: str
    times: int = 1
    skip: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "injected"
    cut_after: int | None = None
    after_applying: bool = False
    then: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Request:
    """One line of the access log."""

    method: str
    path: str
    authorized: bool
    host: str
    range: str
    received: int
    sent: int
    status: int


class Aborted(Exception):  # noqa: N818 - not an error of the program under test
    """The connection was cut on purpose."""


def git_oid(data: bytes) -> str:
    """git's name of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
