"""An S3 server in a process of its own (moto), behind a proxy that makes trouble and keeps an access log.

    with S3Server() as s3:
        os.environ["AWS_ENDPOINT_URL"] = s3.url
        s3.put_folder("models", "tiny", folder)

The client in the tests is the real s3fs. `s3.faults` holds what goes wrong and how often; `s3.requests` what was asked;
`s3.client` is boto3 past the proxy, for looking at what is there.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

CHUNK = 64 * 1024
ACCESS, SECRET = "AKIATESTTESTTESTTEST", "secret-key-of-the-tests-0123456789"
HOP = {"connection", "transfer-encoding", "keep-alive"}


@dataclass
class Fault:
    """What goes wrong with requests whose `METHOD path?query` matches, the next `times` times, after `skip` good ones.

    status, code: answer so, as S3 does. cut_after: let so many bytes of the answer's body through, then close the
    connection; with before=True of the request's. then: called as the fault strikes.
    """

    match: str
    times: int = 1
    skip: int = 0
    status: int | None = None
    code: str = "InternalError"
    cut_after: int | None = None
    then: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Request:
    """One line of the access log."""

    line: str
    range: str
    received: int
    sent: int
    status: int


@dataclass
class S3Server:
    """A context manager. `url` is AWS_ENDPOINT_URL."""

    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        self.backend = _free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.backend)]
        environ = {**os.environ, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**20)}
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)
        _wait_for(f"http://127.0.0.1:{self.backend}/moto-api/", self._process)
        handler = type("BoundHandler", (Handler,), {"s3": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        import boto3

        self.client: Any = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.backend}",
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._http.shutdown()
        self._http.server_close()
        self._process.terminate()
        self._process.wait()

    def environ(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def reset(self) -> None:
        """An empty server without faults."""
        self.faults, self.requests = [], []
        request = urllib.request.Request(f"http://127.0.0.1:{self.backend}/moto-api/reset", method="POST")
        urllib.request.urlopen(request).close()

    def put_folder(self, bucket: str, prefix: str, folder: Path) -> None:
        """Upload a folder past the proxy, making the bucket."""
        self.client.create_bucket(Bucket=bucket)
        for path in folder.rglob("*"):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder).as_posix()}"
                self.client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())

    def objects(self, bucket: str, prefix: str) -> dict[str, int]:
        """Sizes of the objects below a prefix, by name."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        return {e["Key"].removeprefix(f"{prefix}/"): e["Size"] for page in pages for e in page.get("Contents", [])}

    def content(self, bucket: str, key: str) -> bytes:
        """An object's bytes."""
        return self.client.get_object(Bucket=bucket, Key=key)["Body"].read()

    def uploads(self, bucket: str) -> list[str]:
        """Keys of multipart uploads that were begun and not ended."""
        return [entry["Key"] for entry in self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]

    def asked(self, pattern: str) -> list[Request]:
        """Requests whose `METHOD path?query` matches."""
        return [request for request in self.requests if re.search(pattern, request.line)]

    def sent(self, pattern: str) -> int:
        """Bytes of bodies sent for requests that match."""
        return sum(request.sent for request in self.asked(pattern))

    def struck(self, line: str) -> Fault | None:
        """The fault that this request meets, if any."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.match, line):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


class Handler(BaseHTTPRequestHandler):
    """One connection: forwards, but for the faults."""

    s3: S3Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _forward(self) -> None:
        line = f"{self.command} {self.path}"
        if "100-continue" in self.headers.get("Expect", ""):
            self.send_response_only(100)
            self.end_headers()
        body = self._body()
        fault = self.s3.struck(line)
        if fault is not None:
            fault.then()
            if fault.status is not None:
                self._refuse(line, fault, len(body))
                return
        upstream = http.client.HTTPConnection("127.0.0.1", self.s3.backend, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in {*HOP, "expect", "content-length"}}
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            upstream.putheader(name, value)
        upstream.endheaders()
        upstream.send(body)
        answer = upstream.getresponse()
        data = b"" if self.command == "HEAD" else answer.read()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {*HOP, "content-length"}:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        upstream.close()
        if fault is not None and fault.cut_after is not None:
            data = data[: fault.cut_after]
            self.close_connection = True
        self.wfile.write(data)
        self.wfile.flush()
        if self.close_connection:
            self.connection.shutdown(socket.SHUT_RDWR)
        self._log(line, len(body), len(data), answer.status)

    def _body(self) -> bytes:
        """The request's body, as it stands: what is chunked for S3's signatures is not chunked for HTTP."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts: list[bytes] = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _refuse(self, line: str, fault: Fault, received: int) -> None:
        text = f"<Error><Code>{fault.code}</Code><Message>injected {fault.code}</Message></Error>".encode()
        self.send_response_only(fault.status or 500)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)
        self._log(line, received, len(text), fault.status or 500)

    def _log(self, line: str, received: int, sent: int, status: int) -> None:
        with self.s3.lock:
            self.s3.requests.append(Request(line, self.headers.get("Range", ""), received, sent, status))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward  # noqa: N815


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the S3 server did not start")
