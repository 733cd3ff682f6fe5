"""Cut a JSON report of `guidellm run` down to what serving_load.py reads: python trim.py REPORT > report.json"""

import json
import sys
from pathlib import Path

REQUEST = ("output_tokens", "request_latency", "time_to_first_token_ms", "inter_token_latency_ms")
METRICS = ("output_tokens_per_second", "time_to_first_token_ms", "inter_token_latency_ms")
SUMMARY = ("mean", "median", "count", "percentiles")

raw = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
one = raw["benchmarks"][0]
requests = {
    status: [
        {**{key: r[key] for key in REQUEST}, "info": {"error": r["info"].get("error")}} for r in one["requests"][status]
    ]
    for status in ("successful", "errored", "incomplete")
}
metrics = {name: {"successful": {key: one["metrics"][name]["successful"][key] for key in SUMMARY}} for name in METRICS}
json.dump(
    {"metadata": raw["metadata"], "benchmarks": [{"requests": requests, "metrics": metrics}]}, sys.stdout, indent=1
)
