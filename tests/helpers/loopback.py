"""An HTTP server on loopback for the length of a `with`."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class Loopback:
    """A context manager: serves with `handler`, whose attribute `name` is this object, on a free `port`."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], name: str) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (handler,), {name: self}))
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
