"""A Hugging Face Hub on loopback: a real HTTP server that speaks what huggingface_hub 2.4 uses.

    with HubServer(tmp_path) as hub:
        os.environ["HF_ENDPOINT"] = hub.url
        HfApi(endpoint=hub.url, token=hub.token).create_repo("tester/model")

Repositories with branches and pull requests, preupload, LFS (basic and multipart) and Xet (hf_xet's own local store),
commits with parents, tree, paths-info, resolve with Range, tokens that expire, private and gated repositories. The
client in the tests is the real library: what is not spoken right here fails there.

Trouble on request: `hub.faults` holds what goes wrong and how often; `hub.rate` is bytes per second in each direction;
`hub.cdn` sends downloads of large files through a redirect to another host; `hub.requests` says what was asked for.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hub_protocol import Handler
from hub_state import BURST, CHUNK, GITATTRIBUTES, LARGE, Commit, Entry, Fault, Repo, Request, git_oid, now
from loopback import Loopback

__all__ = ["Fault", "HubServer"]


class HubServer(Loopback):
    """The server; a context manager. `url` is HF_ENDPOINT, `token` a token that may write."""

    def __init__(self, root: Path, *, multipart: int = 0, xet: bool = False) -> None:
        self.root = root
        self.multipart = multipart
        self.xet = root / "xet" if xet else None
        self.token = "hf_" + "T" * 34
        self.reader = "hf_" + "R" * 34
        self.expired: set[str] = set()
        self.quota: int | None = None
        self.rate: float | None = None
        self.cdn = False
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.granted: set[str] = set()
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.RLock()
        self._xet_files: dict[str, tuple[str, int]] = {}
        self._paced = {"in": 0.0, "out": 0.0}
        for folder in ("lfs", "parts"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        super().__init__(Handler, "hub")
        self.other_host = f"http://localhost:{self.port}"

    # for tests

    def tree(self, repo: str, revision: str = "main") -> dict[str, Entry]:
        """The files of a revision."""
        found = self.repos[repo]
        return found.commits[found.refs[revision]].tree

    def content(self, repo: str, path: str, revision: str = "main") -> bytes:
        """The bytes of a file."""
        return b"".join(self.read(self.tree(repo, revision)[path], 0, None))

    def put(self, repo: str, files: dict[str, bytes], revision: str = "main", title: str = "put") -> str:
        """Commit files past the API, making the repository; returns the commit."""
        found = self.repos.get(repo) or self.new_repo(repo)
        tree = dict(found.commits[found.refs[revision]].tree)
        for path, data in files.items():
            if LARGE.search(path):
                digest = hashlib.sha256(data).hexdigest()
                self.lfs_path(digest).write_bytes(data)
                tree[path] = self.large_entry(digest, len(data))
            else:
                oid = git_oid(data)
                self.blobs[oid] = data
                tree[path] = Entry(oid, len(data))
        return self.commit(found, revision, tree, title)

    def put_folder(self, repo: str, folder: Path) -> str:
        """Commit a folder past the API; large files are linked, not read into memory."""
        names = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
        self.put(repo, {name: path.read_bytes() for name, path in names.items() if not LARGE.search(name)})
        found = self.repos[repo]
        tree = dict(found.commits[found.refs["main"]].tree)
        for name, path in names.items():
            if LARGE.search(name):
                with path.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
                if not self.lfs_path(digest).exists():
                    self.lfs_path(digest).hardlink_to(path)
                tree[name] = self.large_entry(digest, path.stat().st_size)
        return self.commit(found, "main", tree, "put the large files")

    def sent(self, pattern: str = "") -> int:
        """Bytes of bodies sent for paths that match."""
        return sum(r.sent for r in self.requests if re.search(pattern, f"{r.method} {r.path}"))

    def received(self, pattern: str = "") -> int:
        """Bytes of bodies received for paths that match."""
        return sum(r.received for r in self.requests if re.search(pattern, f"{r.method} {r.path}"))

    def asked(self, pattern: str) -> list[Request]:
        """Requests whose `METHOD path` matches."""
        return [r for r in self.requests if re.search(pattern, f"{r.method} {r.path}")]

    # storage

    def new_repo(self, repo: str, private: bool = False) -> Repo:
        """A repository with the Hub's first commit."""
        found = self.repos[repo] = Repo(private=private)
        oid = git_oid(GITATTRIBUTES)
        self.blobs[oid] = GITATTRIBUTES
        self.commit(found, "main", {".gitattributes": Entry(oid, len(GITATTRIBUTES))}, "initial commit")
        return found

    def commit(self, repo: Repo, ref: str, tree: dict[str, Entry], title: str) -> str:
        """Move `ref` to a new commit."""
        parent = repo.refs.get(ref)
        seed = [sorted((p, e.oid) for p, e in tree.items()), parent, title, len(repo.commits)]
        oid = hashlib.sha1(json.dumps(seed).encode()).hexdigest()
        repo.commits[oid] = Commit(tree, parent, title, now())
        repo.refs[ref] = oid
        return oid

    def lfs_path(self, sha256: str) -> Path:
        return self.root / "lfs" / sha256

    def large_entry(self, sha256: str, size: int, xet: str | None = None) -> Entry:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        return Entry(git_oid(pointer), size, sha256, xet)

    def read(self, entry: Entry, begin: int, end: int | None) -> Iterator[bytes]:
        """Bytes begin..end of a file in chunks."""
        end = entry.size if end is None else end
        if entry.lfs is None:
            yield self.blobs[entry.oid][begin:end]
            return
        self.materialize(entry)
        with self.lfs_path(entry.lfs).open("rb") as stream:
            stream.seek(begin)
            while begin < end:
                data = stream.read(min(CHUNK, end - begin))
                begin += len(data)
                yield data

    def pace(self, direction: str, nbytes: int) -> None:
        """Wait so that the sum over all connections keeps to `rate`."""
        if self.rate is None:
            return
        with self.lock:
            start = max(self._paced[direction], time.monotonic() - BURST)
            self._paced[direction] = start + nbytes / self.rate
        time.sleep(max(self._paced[direction] - time.monotonic(), 0))

    # Xet: hf_xet writes its local store itself; the server only looks up what became of a file

    def xet_of(self, sha256: str) -> tuple[str, int] | None:
        """(Xet hash, size) of a file in the local store."""
        if self.xet is None:
            return None
        if sha256 not in self._xet_files:
            self._scan_xet()
        return self._xet_files.get(sha256)

    def _scan_xet(self) -> None:
        """Read the store's shard files: records of 48 bytes, per file a header, its segments, proofs, its sha256."""

        def hexed(raw: bytes) -> str:
            return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))

        assert self.xet is not None
        for path in self.xet.glob("xet/xorbs/shards/*.mdb"):
            data, at = path.read_bytes(), 48
            while data[at : at + 32] != b"\xff" * 32:
                xet = hexed(data[at : at + 32])
                flags, segments = struct.unpack_from("<II", data, at + 32)
                at += 48
                size = sum(struct.unpack_from("<I", data, at + 48 * i + 36)[0] for i in range(segments))
                at += 48 * segments * (2 if flags >> 31 & 1 else 1)
                if flags >> 30 & 1:
                    for name in (hexed(data[at : at + 32]), data[at : at + 32].hex()):
                        self._xet_files[name] = (xet, size)
                    at += 48

    def materialize(self, entry: Entry) -> None:
        """Fetch a Xet file out of the local store, so that it can be read by range."""
        if entry.xet is None or entry.lfs is None or self.lfs_path(entry.lfs).exists():
            return
        from hf_xet import XetFileInfo, XetSession

        target = self.lfs_path(entry.lfs)
        temporary = target.with_suffix(".tmp")
        group = XetSession().new_file_download_group(
            endpoint=f"local://{self.xet}", token="x", token_expiry_unix_secs=int(time.time()) + 3600
        )
        with group as downloads:
            downloads.start_download_file(XetFileInfo(entry.xet, entry.size), str(temporary))
        temporary.replace(target)
