"""One HTTP connection to the Hub of hub_server.py: its log, faults, pace, bodies and users; routes are not here."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from hub_state import CHUNK, USER, Aborted, Fault, Repo, Request


class Transport(BaseHTTPRequestHandler):
    """One connection."""

    hub: Any
    """The HubServer that it belongs to."""
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
