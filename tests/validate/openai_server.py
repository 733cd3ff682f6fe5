"""A small OpenAI-compatible server, as a program of its own: python openai_server.py PORT BEHAVIOUR

BEHAVIOUR: sound; silent (listens, is never healthy); failing (500 on completions); empty (streams without a token);
wrong (another answer); mute (an empty answer); dying (ends at its tenth completion); strict (refuses ignore_eos);
exits (at once, with last words); stubborn (ignores SIGTERM, and has a child that does).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, BEHAVIOUR = int(sys.argv[1]), sys.argv[2]
COUNT = iter(range(1, 1 << 30))
LOCK = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def reply(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if BEHAVIOUR == "silent":
            self.reply(503, {"status": "loading"})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "served"}]})
        elif self.path == "/version":
            self.reply(200, {"version": "0.30.0"})
        else:
            self.reply(200 if self.path == "/health" else 404, {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "served"
        with LOCK:
            number = next(COUNT)
        if BEHAVIOUR == "dying" and number >= 10:
            print("CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(3)
        if BEHAVIOUR == "failing" and body.get("max_tokens", 0) != 64:
            return self.reply(500, {"error": "out of memory"})
        if BEHAVIOUR == "strict" and "ignore_eos" in body:
            return self.reply(422, {"detail": "Unexpected fields in the request: {'ignore_eos'}"})
        if body.get("stream"):
            return self.stream(0 if BEHAVIOUR == "empty" else body["max_tokens"])
        text = {"wrong": "London!!!!", "mute": "  "}.get(BEHAVIOUR, "It is Paris.")
        message = {"message": {"content": text}} if "messages" in body else {"text": text}
        return self.reply(200, {"choices": [message]})

    def stream(self, tokens):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(tokens):
            time.sleep(0.001)
            self.wfile.write(b"data: " + json.dumps({"choices": [{"text": "x"}]}).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


if BEHAVIOUR == "exits":
    sys.exit("ValueError: weight_scale_2 not found\nEngine core initialization failed")
if BEHAVIOUR == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    print(f"child {child.pid}", flush=True)
print("INFO vLLM API server version 0.30.0", flush=True)
print(
    "INFO [nvfp4.py:291] Using 'FLASHINFER_CUTLASS' NvFp4 MoE backend out of potential backends: ['MARLIN']", flush=True
)
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
