"""HTTP_PROXY, HTTPS_PROXY and NO_PROXY hold as they do for `hf`: a real forward proxy before the test server."""

import hashlib
import re
import socket
import ssl
import threading
from pathlib import Path

import forward_proxy
import pytest

SOURCE, REPO, PR = "upstream/tiny", "tester/tiny-mxfp4", "refs/pr/1"
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture
def proxy(monkeypatch, client):
    """The proxy; nothing leads to it yet. A session takes its proxies from the environment when it is made."""
    from huggingface_hub.utils import _http

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with forward_proxy.ForwardProxy() as server:
        _http.close_session()
        yield server


def carried(hub, kit, **publish):
    """From the Hub through a small disk back to the Hub; the requests that the server saw meanwhile."""
    source = kit.source()
    hub.put_folder(SOURCE, source)
    hub.requests.clear()
    manifest = kit.manifest(SOURCE, publish={"repo": REPO}, stream=True)
    assert kit.requant("convert", manifest, "--push", "--quiet") == 0
    assert kit.requant("run", kit.manifest(source, "ordinary"), "--quiet") == 0
    whole = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (kit.tmp / "ordinary").glob("*.safetensors")}
    assert {n: e.lfs for n, e in hub.tree(REPO, PR).items() if n.endswith(".safetensors")} == whole
    return [f"{request.method} {request.path}" for request in hub.requests]


def test_everything_goes_through_the_proxy(hub, proxy, kit, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    seen = carried(hub, kit)
    assert len(seen) > 20
    assert sorted(line.replace(hub.url, "") for line in proxy.lines) == sorted(seen)


def test_no_proxy_names_hosts_that_are_asked_directly(hub, proxy, kit, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("NO_PROXY", "example.org,127.0.0.1")
    assert len(carried(hub, kit)) > 20
    assert proxy.lines == []


def test_a_password_of_the_proxy_is_used_and_never_said(hub, proxy, kit, monkeypatch, capsys):
    from huggingface_hub.utils import _http

    proxy.password = "quite-a-secret"
    hub.put_folder(SOURCE, kit.source())
    monkeypatch.setenv("HTTP_PROXY", f"http://user:wrong-secret@{proxy.address}")
    assert kit.requant("plan", kit.manifest(SOURCE), "-v") == 6
    err = capsys.readouterr().err
    assert f"error: {SOURCE}: the Hub answers with status 407" in err
    assert "wrong-secret" not in err
    monkeypatch.setenv("HTTP_PROXY", f"http://user:quite-a-secret@{proxy.address}")
    _http.close_session()
    assert kit.requant("convert", kit.manifest(SOURCE), "-v", "--log-file", kit.tmp / "log") == 0
    said = capsys.readouterr()
    assert "quite-a-secret" not in said.out + said.err + (kit.tmp / "log").read_text()
    assert not [p for p in (kit.tmp / "out").rglob("*") if p.is_file() and b"quite-a-secret" in p.read_bytes()]


def test_a_proxy_that_is_down_is_one_error(hub, client, kit, monkeypatch, capsys):
    from huggingface_hub.utils import _http

    hub.put_folder(SOURCE, kit.source())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{probe.getsockname()[1]}")
        _http.close_session()
        assert kit.requant("plan", kit.manifest(SOURCE)) == 6
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {SOURCE}: ")
    assert hub.requests == []


class Tls:
    """The test server under https://localhost: a port that unwraps TLS and passes the bytes on.

    Its certificate, with the key, was made by `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1
    -nodes -days 36500 -subj /CN=localhost -addext subjectAltName=DNS:localhost`; nobody else trusts it.
    """

    certificate = Path(__file__).with_name("localhost.pem")

    def __init__(self, port):
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificate)
        self._upstream = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://localhost:{self._listener.getsockname()[1]}"

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._listener.close()

    def _accept(self):
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain):
        try:
            inside = self._context.wrap_socket(plain, server_side=True)
        except OSError:
            plain.close()
            return
        outside = socket.create_connection(self._upstream)
        back = threading.Thread(target=self._pump, args=(outside, inside), daemon=True)
        back.start()
        self._pump(inside, outside)
        back.join()
        inside.close()
        outside.close()

    @staticmethod
    def _pump(source, target):
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


def test_https_goes_through_tunnels_whose_inside_the_proxy_does_not_see(hub, proxy, kit, monkeypatch):
    with Tls(hub.port) as tls:
        hub.url = tls.url  # of the addresses that it hands out
        monkeypatch.setenv("HF_ENDPOINT", tls.url)
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(tls.certificate))
        seen = carried(hub, kit)
        assert len(seen) > 20
        assert {line for line in proxy.lines if not re.fullmatch(r"CONNECT localhost:\d+", line)} == set()
        assert proxy.lines
