"""A forward proxy on loopback: requests for http:// addresses, and tunnels (CONNECT) for https:// ones.

    with ForwardProxy() as proxy:
        os.environ["HTTP_PROXY"] = os.environ["HTTPS_PROXY"] = proxy.url

`proxy.lines` is what it was asked for; with `proxy.password` set, others than `user:<password>` get 407.
"""

from __future__ import annotations

import base64
import select
import socket
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from loopback import Loopback

CHUNK = 64 * 1024


class ForwardProxy(Loopback):
    """A context manager. `url` is what HTTP_PROXY and HTTPS_PROXY take."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.password: str | None = None
        super().__init__(Handler, "proxy")
        self.address = f"127.0.0.1:{self.port}"


class Handler(BaseHTTPRequestHandler):
    """One connection of a client. A new one goes out for every request, and its bytes are passed on as they are."""

    proxy: ForwardProxy
    protocol_version = "HTTP/1.1"
    rbufsize = 0  # a body that comes with its head stays in the socket, for the relay

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _refused(self) -> bool:
        """Whether the client lacks the password, which it is told."""
        self.proxy.lines.append(f"{self.command} {self.path}")
        if self.proxy.password is None:
            return False
        expected = "Basic " + base64.b64encode(f"user:{self.proxy.password}".encode()).decode()
        if self.headers.get("Proxy-Authorization") == expected:
            return False
        self.close_connection = True
        self.send_response_only(407)
        self.send_header("Proxy-Authenticate", 'Basic realm="test"')
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def do_CONNECT(self) -> None:
        if self._refused():
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port))) as upstream:
            self.send_response_only(200)
            self.end_headers()
            self._relay(upstream, b"")
        self.close_connection = True

    def _forward(self) -> None:
        if self._refused():
            return
        target = urlsplit(self.path)
        path = target.path + (f"?{target.query}" if target.query else "")
        lines = [f"{self.command} {path} HTTP/1.1"]
        lines += [f"{k}: {v}" for k, v in self.headers.items() if not k.lower().startswith(("proxy-", "connection"))]
        lines.append("Connection: close")
        with socket.create_connection((target.hostname or "", target.port or 80)) as upstream:
            upstream.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            self._relay(upstream, b"\r\nConnection: close\r\n")  # or the client would send its next request here
        self.close_connection = True

    def _relay(self, upstream: socket.socket, first_break: bytes) -> None:
        """Bytes in both directions until one side closes. first_break: for the first line break of the answer."""
        while True:
            ready, _, _ = select.select([self.connection, upstream], [], [], 60)
            if not ready:
                return
            for side in ready:
                try:
                    data = side.recv(CHUNK)
                    if not data:
                        return
                    if side is upstream and first_break:
                        ahead, answer = _split_continue(data)
                        data = ahead + answer.replace(b"\r\n", first_break, 1)
                        first_break = b"" if answer else first_break
                    (upstream if side is self.connection else self.connection).sendall(data)
                except OSError:
                    return

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward  # noqa: N815


def _split_continue(data: bytes) -> tuple[bytes, bytes]:
    """(an answer 100 that comes before the real one, the rest)."""
    if not data.startswith(b"HTTP/1.1 100"):
        return b"", data
    head, mark, rest = data.partition(b"\r\n\r\n")
    return head + mark, rest
