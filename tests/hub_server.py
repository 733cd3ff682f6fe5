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

import base64
import hashlib
import json
import re
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

CHUNK = 64 * 1024
BURST = 0.5
"""Seconds of its rate that a limited server may catch up, so that a late thread does not lower the rate."""
USER = "tester"
GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
LARGE = re.compile(r"\.(safetensors|bin|pt|gguf|npz|model|zip)$|(^|/)tokenizer\.json$")
"""Names that the Hub's default .gitattributes and size rules make LFS files."""


# --- what the server holds --------------------------------------------------------------------------------------------


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


class HubServer:
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
        server = self
        handler = type("BoundHandler", (Handler,), {"hub": server})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.other_host = f"http://localhost:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

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


# --- the protocol -----------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do(self) -> None:
        """Answer one request: faults first, then the route."""
        split = urllib.parse.urlsplit(self.path)
        self.route, self.query = split.path, urllib.parse.parse_qs(split.query)
        self.got = self.gave = self.code = 0
        self.cut: int | None = None
        self._read = False
        fault = self._fault()
        try:
            if fault is not None and fault.status is not None and not fault.after_applying:
                self.body()
                fault.then()
                self.error(fault.status, "", fault.message, **fault.headers)
            else:
                if fault is not None and not fault.after_applying:
                    fault.then()
                    self.cut = fault.cut_after
                if fault is not None and fault.after_applying:
                    self.silent = fault
                self._dispatch()
        except (Aborted, BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            self.connection.close()
        finally:
            self._log()

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do  # noqa: N815 - http.server looks these up
    silent: Fault | None = None

    def _log(self) -> None:
        self.hub.requests.append(
            Request(
                self.command,
                self.path,
                "Authorization" in self.headers,
                self.headers.get("Host", ""),
                self.headers.get("Range", ""),
                self.got,
                self.gave,
                self.code,
            )
        )

    def _fault(self) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if fault.times > 0 and re.search(fault.match, f"{self.command} {self.path}"):
                    if fault.skip > 0:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    # bodies

    def chunks(self) -> Iterator[bytes]:
        """The request's body, piece by piece."""
        self._read = True
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self._take(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            data = self._take(min(CHUNK, left))
            left -= len(data)
            yield data

    def _take(self, size: int) -> bytes:
        if self.cut is not None and self.got + size > self.cut:
            self.rfile.read(max(self.cut - self.got, 0))
            raise Aborted
        data = self.rfile.read(size)
        if len(data) < size:
            raise Aborted
        self.got += len(data)
        self.hub.pace("in", len(data))
        return data

    def body(self) -> bytes:
        return b"" if self._read else b"".join(self.chunks())

    def reply(self, code: int, value: Any = b"", kind: str = "application/json", **headers: Any) -> None:
        """Answer with JSON or bytes. Underscores in header names stand for dashes."""
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.stream(code, iter([data]), len(data), kind, **headers)

    def stream(self, code: int, pieces: Iterator[bytes], length: int, kind: str, **headers: Any) -> None:
        """Answer with a body of known length."""
        if not self._read and self.command in ("POST", "PUT"):
            self.body()
        if self.silent is not None:
            self.silent, fault = None, self.silent
            fault.then()
            if fault.status is None:
                raise Aborted
            return self.error(fault.status, "", fault.message, **fault.headers)
        self.code = code
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command == "HEAD":
            return None
        for piece in pieces:
            if self.cut is not None and self.gave + len(piece) > self.cut:
                kept = piece[: max(self.cut - self.gave, 0)]
                self.wfile.write(kept)
                self.wfile.flush()
                self.gave += len(kept)
                raise Aborted
            self.wfile.write(piece)
            self.gave += len(piece)
            self.hub.pace("out", len(piece))
        return None

    def error(self, code: int, kind: str, message: str, **headers: str) -> None:
        """Answer as the Hub does: the reason in X-Error-Code and X-Error-Message."""
        extra = {"X_Error_Code": kind} if kind else {}
        self.reply(code, {"error": message}, X_Error_Message=message, **extra, **headers)

    # rights

    @property
    def user(self) -> str | None:
        """Who asks: a token's name, or None."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        known = {self.hub.token: USER, self.hub.reader: "reader"}
        return known.get(given) if given not in self.hub.expired else None

    @property
    def bad_token(self) -> bool:
        return "Authorization" in self.headers and self.user is None

    def may_write(self) -> bool:
        if self.bad_token:
            self.error(401, "", "Invalid credentials in Authorization header")
        elif self.user != USER:
            self.error(403, "", "Forbidden: you must use a write token to upload to a repository.")
        else:
            return True
        return False

    def visible(self, name: str, *, content: bool = False) -> Repo | None:
        """The repository, or an answer that it is not to be seen."""
        repo = self.hub.repos.get(name)
        if self.bad_token:
            self.error(401, "", "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and self.user is None):
            self.error(404 if self.user else 401, "RepoNotFound", "Repository not found")
        elif content and repo.gated and self.user != USER and self.user not in self.hub.granted:
            self.error(403 if self.user else 401, "GatedRepo", f"Access to model {name} is restricted.")
        else:
            return repo
        return None

    def commit_of(self, repo: Repo, revision: str) -> str | None:
        if revision in repo.refs:
            return repo.refs[revision]
        found = [oid for oid in repo.commits if oid.startswith(revision) and len(revision) >= 7]
        if found:
            return found[0]
        self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    # routes

    def _dispatch(self) -> None:
        un = urllib.parse.unquote
        path = self.route
        if path == "/api/whoami-v2":
            return self._whoami()
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create()
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._lfs_batch(found[1])
        if found := re.fullmatch(r"/lfs/(put|part|complete|verify)/([0-9a-f]*)(?:/(\d+))?", path):
            return self._lfs(found[1], found[2], found[3])
        if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)", path):
            repo = self.hub.repos[found[1]]
            return self._send_file(repo, found[2], un(found[3]), {})
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(found[1], un(found[2]), un(found[3]))
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([^/]+))?(?:/(.*))?", path):
            return self._api(un(found[1]), found[2] or "", found[3] or "")
        return self.error(404, "", f"unknown route {path}")

    def _whoami(self) -> None:
        if self.user is None:
            return self.error(401, "", "Invalid credentials in Authorization header")
        role = "write" if self.user == USER else "read"
        auth = {"type": "access_token", "accessToken": {"role": role, "displayName": "t"}}
        return self.reply(200, {"type": "user", "id": "1", "name": self.user, "orgs": [], "auth": auth})

    def _create(self) -> None:
        asked = json.loads(self.body())
        if not self.may_write():
            return None
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        url = f"{self.hub.url}/{name}"
        with self.hub.lock:
            if name in self.hub.repos:
                note = "You already created this model repo"
                return self.reply(409, {"error": note, "url": url}, X_Error_Message=note)
            private = asked.get("private") or asked.get("visibility") == "private"
            self.hub.new_repo(name, private=bool(private))
        return self.reply(200, {"url": url, "name": name, "id": name})

    # LFS

    def _lfs_batch(self, name: str) -> None:
        asked = json.loads(self.body())
        if not self.may_write():
            return None
        hub, objects = self.hub, []
        for item in asked["objects"]:
            oid, size = item["oid"], item["size"]
            if hub.quota is not None and size > hub.quota:
                return self.error(403, "", "Storage quota exceeded: upgrade your plan to store more private data.")
            if hub.lfs_path(oid).exists():
                objects.append({"oid": oid, "size": size})
                continue
            verify = {"href": f"{hub.url}/lfs/verify/"}
            upload: dict[str, Any] = {"href": f"{hub.url}/lfs/put/{oid}?X-Amz-Signature=SECRETSIGNATURE", "header": {}}
            if hub.multipart and size > hub.multipart and "multipart" in asked.get("transfers", []):
                count = -(-size // hub.multipart)
                parts = {f"{i + 1:05d}": f"{hub.url}/lfs/part/{oid}/{i + 1}" for i in range(count)}
                header = {"chunk_size": str(hub.multipart), **parts}
                upload = {"href": f"{hub.url}/lfs/complete/{oid}", "header": header}
            objects.append(
                {"oid": oid, "size": size, "authenticated": True, "actions": {"upload": upload, "verify": verify}}
            )
        transfer = "multipart" if hub.multipart else "basic"
        return self.reply(200, {"transfer": transfer, "objects": objects}, "application/vnd.git-lfs+json")

    def _lfs(self, what: str, oid: str, part: str | None) -> None:
        hub = self.hub
        if what == "verify":
            asked = json.loads(self.body())
            path = hub.lfs_path(asked["oid"])
            good = path.exists() and path.stat().st_size == asked["size"]
            return self.reply(200, {"success": True}) if good else self.error(404, "", "not uploaded")
        if what == "complete":
            asked = json.loads(self.body())
            numbers = sorted(entry["partNumber"] for entry in asked["parts"])
            return self._store(oid, ((hub.root / "parts" / f"{oid}.{n}").read_bytes() for n in numbers))
        if what == "part":
            data = b"".join(self.chunks())
            (hub.root / "parts" / f"{oid}.{part}").write_bytes(data)
            return self.reply(200, b"", ETag=f'"{hashlib.md5(data).hexdigest()}"')
        return self._store(oid, self.chunks())

    def _store(self, oid: str, pieces: Iterator[bytes]) -> None:
        """A large file gets its name only when it is whole and is what it was said to be."""
        digest, target = hashlib.sha256(), self.hub.lfs_path(oid)
        temporary = target.with_name(f"{oid}.{threading.get_ident()}.tmp")
        try:
            with temporary.open("wb") as stream:
                for data in pieces:
                    digest.update(data)
                    stream.write(data)
            if digest.hexdigest() != oid:
                return self.error(400, "", "the content is not that of the oid")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        return self.reply(200, {"success": True}, ETag='"0"')

    # downloads

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.visible(name, content=True)
        if repo is None:
            return None
        oid = self.commit_of(repo, revision)
        if oid is None:
            return None
        entry = repo.commits[oid].tree.get(path)
        if entry is None:
            headers = {"X_Error_Code": "EntryNotFound", "X_Error_Message": "Entry not found", "X_Repo_Commit": oid}
            return self.reply(404, b"Entry not found", "text/plain", **headers)
        extra: dict[str, Any] = {"X_Repo_Commit": oid}
        if entry.lfs:
            extra |= {"X_Linked_Size": entry.size, "X_Linked_Etag": f'"{entry.lfs}"'}
        if entry.xet:
            refresh = f"{self.hub.url}/api/models/{name}/xet-read-token/{oid}"
            extra |= {"X_Xet_Hash": entry.xet, "X_Xet_Refresh_Route": refresh}
        if self.hub.cdn and entry.lfs:
            where = f"{self.hub.other_host}/cdn/{name}/{oid}/{urllib.parse.quote(path)}?Signature=SECRETSIGNATURE"
            return self.reply(302, b"", Location=where, **extra)
        return self._send_file(repo, oid, path, extra)

    def _send_file(self, repo: Repo, oid: str, path: str, extra: dict[str, Any]) -> None:
        entry = repo.commits[oid].tree[path]
        headers = {"ETag": f'"{entry.lfs or entry.oid}"', "Accept_Ranges": "bytes", **extra}
        begin, end, code = 0, entry.size, 200
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if asked and entry.size:
            if asked[1]:
                begin, end = int(asked[1]), min(int(asked[2] or entry.size - 1), entry.size - 1) + 1
            else:
                begin = max(0, entry.size - int(asked[2]))
            if begin >= entry.size:
                return self.reply(416, b"", Content_Range=f"bytes */{entry.size}")
            code = 206
            headers["Content_Range"] = f"bytes {begin}-{end - 1}/{entry.size}"
        pieces = self.hub.read(entry, begin, end) if self.command != "HEAD" else iter(())
        return self.stream(code, pieces, end - begin, "application/octet-stream", **headers)

    # the API of one repository

    def _api(self, name: str, verb: str, rest: str) -> None:
        repo = self.visible(name)
        if repo is None:
            return None
        first, _, tail = rest.partition("/")
        revision, un = urllib.parse.unquote(first) or "main", urllib.parse.unquote
        routes: dict[tuple[str, str], Callable[[], None]] = {
            ("GET", ""): lambda: self._info(name, repo, "main"),
            ("GET", "revision"): lambda: self._info(name, repo, revision),
            ("GET", "tree"): lambda: self._tree(repo, revision, un(tail)),
            ("POST", "paths-info"): lambda: self._paths_info(repo, revision),
            ("GET", "refs"): lambda: self._refs(repo),
            ("GET", "commits"): lambda: self._commits(repo, revision),
            ("POST", "preupload"): lambda: self._preupload(repo, revision),
            ("POST", "commit"): lambda: self._commit(name, repo, revision),
            ("POST", "branch"): lambda: self._branch(repo, revision),
            ("GET", "discussions"): lambda: self._discussions(name, repo, rest),
            ("POST", "discussions"): lambda: self._discuss(name, repo, first, tail),
            ("GET", "xet-write-token"): self._xet_token,
            ("GET", "xet-read-token"): self._xet_token,
        }
        route = routes.get((self.command if self.command != "HEAD" else "GET", verb))
        return route() if route else self.error(404, "", f"unknown route {self.command} {self.route}")

    def _entry_json(self, path: str, entry: Entry) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "file", "oid": entry.oid, "size": entry.size, "path": path}
        if entry.lfs:
            found["lfs"] = {"oid": entry.lfs, "size": entry.size, "pointerSize": 130}
        if entry.xet:
            found["xetHash"] = entry.xet
        return found

    def _info(self, name: str, repo: Repo, revision: str) -> None:
        oid = self.commit_of(repo, revision)
        if oid is None:
            return None
        siblings: list[dict[str, Any]] = []
        for path, entry in sorted(repo.commits[oid].tree.items()):
            sibling: dict[str, Any] = {"rfilename": path}
            if "blobs" in self.query:
                sibling |= {"size": entry.size, "blobId": entry.oid}
                if entry.lfs:
                    sibling["lfs"] = {"sha256": entry.lfs, "size": entry.size, "pointerSize": 130}
            siblings.append(sibling)
        facts = {
            "_id": "0",
            "id": name,
            "modelId": name,
            "author": name.split("/", maxsplit=1)[0],
            "sha": oid,
            "tags": [],
        }
        facts |= {"private": repo.private, "gated": "auto" if repo.gated else False, "disabled": False}
        date = repo.commits[oid].date
        return self.reply(200, {**facts, "lastModified": date, "createdAt": date, "siblings": siblings})

    def _tree(self, repo: Repo, revision: str, folder: str) -> None:
        oid = self.commit_of(repo, revision)
        if oid is None:
            return None
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        found: dict[str, dict[str, Any]] = {}
        for path, entry in sorted(repo.commits[oid].tree.items()):
            if folder and not path.startswith(folder + "/"):
                continue
            parts = path[len(folder) + 1 if folder else 0 :].split("/")
            for depth in range(1, len(parts)):
                if depth == 1 or recursive:
                    name = "/".join(([folder] if folder else []) + parts[:depth])
                    found.setdefault(name, self._folder_json(name))
            if recursive or len(parts) == 1:
                found[path] = self._entry_json(path, entry)
        if folder and not found:
            return self.error(404, "EntryNotFound", f"{folder} does not exist")
        return self.reply(200, list(found.values()))

    def _folder_json(self, name: str) -> dict[str, Any]:
        return {"type": "directory", "oid": hashlib.sha1(name.encode()).hexdigest(), "size": 0, "path": name}

    def _paths_info(self, repo: Repo, revision: str) -> None:
        raw = self.body()
        oid = self.commit_of(repo, revision)
        if oid is None:
            return None
        asked = json.loads(raw) if raw[:1] == b"{" else urllib.parse.parse_qs(raw.decode())
        tree, found = repo.commits[oid].tree, []
        for path in asked.get("paths", []):
            if path in tree:
                found.append(self._entry_json(path, tree[path]))
            elif any(name.startswith(path + "/") for name in tree):
                found.append(self._folder_json(path))
        return self.reply(200, found)

    def _refs(self, repo: Repo) -> None:
        def listed(pulls: bool) -> list[dict[str, str]]:
            refs = {n: oid for n, oid in repo.refs.items() if n.startswith("refs/pr/") is pulls}
            return [
                {"name": n, "ref": n if pulls else f"refs/heads/{n}", "targetCommit": oid} for n, oid in refs.items()
            ]

        return self.reply(200, {"branches": listed(False), "pullRequests": listed(True), "tags": [], "converts": []})

    def _commits(self, repo: Repo, revision: str) -> None:
        oid, found = self.commit_of(repo, revision), []
        while oid:
            commit = repo.commits[oid]
            found.append({"id": oid, "title": commit.title, "message": "", "authors": [], "date": commit.date})
            oid = commit.parent
        return self.reply(200, found) if found else None

    # changes

    def _branch(self, repo: Repo, name: str) -> None:
        asked = json.loads(self.body() or b"{}")
        if not self.may_write():
            return None
        with self.hub.lock:
            if name in repo.refs:
                return self.error(409, "", "Reference already exists")
            start = self.commit_of(repo, asked.get("startingPoint") or "main")
            if start is None:
                return None
            repo.refs[name] = start
        return self.reply(201, {})

    def _preupload(self, repo: Repo, revision: str) -> None:
        asked = json.loads(self.body())
        if not self.may_write():
            return None
        oid = self.commit_of(repo, revision)
        if oid is None:
            return None
        answers: list[dict[str, Any]] = []
        for item in asked["files"]:
            large = item["size"] > 10 * 2**20 or LARGE.search(item["path"]) or b"\0" in base64.b64decode(item["sample"])
            answer = {"path": item["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if entry := repo.commits[oid].tree.get(item["path"]):
                answer["oid"] = entry.lfs or entry.oid
            answers.append(answer)
        return self.reply(200, {"files": answers})

    def _commit(self, name: str, repo: Repo, revision: str) -> None:
        lines = [json.loads(line) for line in self.body().splitlines() if line.strip()]
        if not self.may_write():
            return None
        head = lines[0]["value"]
        with self.hub.lock:
            current = repo.refs.get(revision)
            if current is None:
                return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            if head.get("parentCommit") and not current.startswith(head["parentCommit"]):
                return self.error(412, "", "A commit has happened since. Please refresh and try again.")
            tree = dict(repo.commits[current].tree)
            for line in lines[1:]:
                if not self._apply(tree, line["key"], line["value"]):
                    return None
            oid = self.hub.commit(repo, revision, tree, head["summary"])
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"}
        return self.reply(200, {**answer, "hookOutput": ""})

    def _apply(self, tree: dict[str, Entry], kind: str, value: dict[str, Any]) -> bool:
        """One operation of a commit; False once the refusal is sent."""
        path = value["path"]
        if kind == "file":
            data = base64.b64decode(value["content"])
            oid = git_oid(data)
            self.hub.blobs[oid] = data
            tree[path] = Entry(oid, len(data))
        elif kind == "lfsFile":
            stored, xet = self.hub.lfs_path(value["oid"]), self.hub.xet_of(value["oid"])
            if not stored.exists() and xet is None:
                self.error(400, "", "LFS pointer pointed to a file that does not exist")
                return False
            size = stored.stat().st_size if stored.exists() else xet[1]
            tree[path] = self.hub.large_entry(value["oid"], size, xet[0] if xet else None)
        elif kind == "deletedFile":
            if path not in tree:
                self.error(404, "EntryNotFound", "A file with this name doesn't exist")
                return False
            del tree[path]
        return True

    # pull requests

    def _pull_json(self, name: str, pull: PullRequest) -> dict[str, Any]:
        facts = {"num": pull.num, "title": pull.title, "author": {"name": USER}, "status": pull.status}
        facts |= {"repo": {"name": name, "type": "model"}, "isPullRequest": True, "createdAt": pull.created}
        return facts

    def _discussions(self, name: str, repo: Repo, number: str) -> None:
        if number:
            pull = repo.pulls.get(int(number))
            if pull is None:
                return self.error(404, "", "no such discussion")
            event = {"id": "0", "type": "comment", "createdAt": pull.created, "author": {"name": USER}}
            data = {"latest": {"raw": pull.description, "html": "", "updatedAt": pull.created}, "edited": False}
            more = {"changes": {"base": "refs/heads/main"}, "filesWithConflicts": [], "diff": ""}
            data |= {"hidden": False, "history": []}
            return self.reply(200, {**self._pull_json(name, pull), **more, "events": [{**event, "data": data}]})
        asked = self.query.get("status", [""])[0]
        shown = [p for p in repo.pulls.values() if asked != "open" or p.status in ("open", "draft")]
        found = [self._pull_json(name, pull) for pull in reversed(shown)]
        return self.reply(
            200, {"discussions": found if self.query.get("p", ["0"])[0] == "0" else [], "count": len(found), "start": 0}
        )

    def _discuss(self, name: str, repo: Repo, number: str, what: str) -> None:
        asked = json.loads(self.body() or b"{}")
        if not self.may_write():
            return None
        with self.hub.lock:
            if not number:
                num = len(repo.pulls) + 1
                repo.pulls[num] = PullRequest(num, asked["title"], asked.get("description", ""), created=now())
                repo.refs[f"refs/pr/{num}"] = repo.refs["main"]
                return self.reply(200, {"num": num, "url": f"{self.hub.url}/{name}/discussions/{num}"})
            pull = repo.pulls[int(number)]
            event = {"id": "1", "type": "status-change", "createdAt": now(), "author": {"name": USER}}
            if what == "status":
                pull.status = asked["status"]
                return self.reply(200, {"newStatus": {**event, "data": {"status": pull.status}}})
            if what == "merge":
                repo.refs["main"] = repo.refs[f"refs/pr/{number}"]
                pull.status = "merged"
                return self.reply(200, {"success": True})
        return self.error(404, "", f"unknown route {self.route}")

    def _xet_token(self) -> None:
        if self.hub.xet is None:
            return self.error(404, "", "this server has no Xet store")
        expiry = int(time.time()) + 3600
        facts = {"casUrl": f"local://{self.hub.xet}", "exp": expiry, "accessToken": "x"}
        headers = {"X_Xet_Cas_Url": facts["casUrl"], "X_Xet_Token_Expiration": expiry, "X_Xet_Access_Token": "x"}
        return self.reply(200, facts, **headers)
