"""Stands in for guidellm, which the development environment has not: same options, same report, far less inside.

It sends real streamed requests to the server it is given and writes a report of the shape of tests/goldens/guidellm.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

arguments = sys.argv[1:]
assert arguments.pop(0) == "run"
assert arguments.pop() == "--disable-console"
given = {key: json.loads(value) for key, value in zip(arguments[::2], arguments[1::2], strict=True)}
backend, data = given["--backend"], given["--data"]
assert backend["kind"] == "openai_http"
assert given["--profile"]["kind"] == "concurrent"
body = {"model": backend["model"], "prompt": "x", "stream": True}
if "output_tokens" in data:
    body |= {"max_tokens": data["output_tokens"], "ignore_eos": True}
else:
    body["max_tokens"] = int(backend["max_tokens"])


def one(_):
    begin = time.perf_counter()
    request = urllib.request.Request(backend["target"] + backend["request_format"], json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            times = [time.perf_counter() - begin for line in answer if b'"text"' in line]
    except OSError as error:
        return {"info": {"error": repr(error)}}
    gaps = [b - a for a, b in pairwise(times)]
    return {
        "output_tokens": len(times) or None,
        "request_latency": time.perf_counter() - begin,
        "time_to_first_token_ms": 1e3 * times[0] if times else None,
        "inter_token_latency_ms": 1e3 * statistics.mean(gaps) if gaps else None,
        "info": {"error": None},
    }


begin = time.perf_counter()
with ThreadPoolExecutor(given["--profile"]["streams"]) as pool:
    results = list(pool.map(one, range(given["--constraint"]["count"])))
seconds = time.perf_counter() - begin
done = [result for result in results if not result["info"]["error"]]


def summary(values):
    values = [value for value in values if value is not None]
    if not values:
        return {"successful": {"count": 0}}
    middle = statistics.median(values)
    return {
        "successful": {
            "mean": statistics.mean(values), "median": middle, "count": len(values), "percentiles": {"p95": max(values)}
        }
    }  # fmt: skip


tokens = sum(result["output_tokens"] or 0 for result in done)
report = {
    "benchmarks": [
        {
            "requests": {
                "successful": done,
                "errored": [result for result in results if result["info"]["error"]],
                "incomplete": [],
            },
            "metrics": {
                "output_tokens_per_second": summary([tokens / seconds] if tokens else []),
                "time_to_first_token_ms": summary([result["time_to_first_token_ms"] for result in done]),
                "inter_token_latency_ms": summary([result["inter_token_latency_ms"] for result in done]),
            },
        }
    ]
}
Path(given["--output"]["path"]).write_text(json.dumps(report))
