#!/usr/bin/env bash
# The stage `model` on a GPU: random checkpoints of three families are converted and judged with `device: cuda`, weights
# W4A16 by the FP4 kernels, and the tests marked `gpu` in tests/model run. From the repository's root, in an environment
# that has requant, transformers and pytest:
#
#   tests/gpu/model_stage.sh OUT COMMIT [WORK]      results in OUT (to be committed under docs/), checkpoints in WORK
#
# Exit status: how many steps failed.
set -uo pipefail
out=$1 work=${3:-$(mktemp -d)}
failures=0
mkdir -p "$out" "$work"
{
  echo "commit: $2"
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  python3 -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
} >"$out/machine.txt" 2>&1

python3 -P tests/gpu/make_models.py "$work" >"$out/make.txt" 2>&1 || { tail "$out/make.txt"; exit 1; }
python3 -c 'import sys; open(sys.argv[1], "w").write("".join(chr(97 + (i * i + i // 7) % 26) for i in range(40000)))' "$work/text.txt"

job() { # job NAME SOURCE FORMAT TO LAYOUT PATTERN MODEL-GATE [NUMERICS-GATE [RULE]]: convert, judge, note the figures
  local name=$1 source=$2 begin status rule=${9:-}
  begin=$(date +%s)
  cat >"$work/$name.yaml" <<EOF
version: 1
name: $name
source: {path: $work/$source}
target: {format: $3, layout: $5, output: $work/$name}
layers:
  - {match: "$6", to: $4$rule}
  - {match: "*", to: keep}
validate:
  numerics: {${8:-}}
  model: {text: $work/text.txt, tokens: 4096, device: cuda$7}
EOF
  ${BEFORE:-python3 -P -m requant.convert.cli} "$work/$name.yaml" --quiet >"$out/$name.txt" 2>&1
  status=$?
  python3 - "$work/$name/requant.signoff.json" >>"$out/summary.txt" <<'PY' || status=1
import json, sys
signed = json.load(open(sys.argv[1]))
gate = next(g for g in signed["gates"] if g["gate"] == "model")
data = next(s for s in signed["stages"] if s["stage"] == "model")["data"]
print(signed["name"], "| signed off" if signed["signed_off"] else "| NOT signed off", "| model", gate["status"], "on", gate["measured_on"])
print("  ", gate["reason"])
for arm, kernels in data.get("kernels", {}).items():
    print("  ", arm, data[arm]["fp4_layers"], "FP4 layers:", "; ".join(kernels) or "none")
for line in data.get("reduced", []):
    print("  ", line)
PY
  echo "$name: exit $status, $(($(date +%s) - begin)) s"
  [ "$status" -eq 0 ] || { failures=$((failures + 1)); tail -n 12 "$out/$name.txt"; }
}

: >"$out/summary.txt"
job llama-mxfp4 llama mxfp4 mxfp4 compressed-tensors "model.layers.*_proj" ""
job llama-nvfp4 llama-mxfp4 nvfp4 nvfp4 modelopt "model.layers.*_proj" "" "lossless: required"
job llama-w4a4 llama-mxfp4 nvfp4 nvfp4 modelopt "model.layers.*_proj" ", w4a4: true"
job qwen3moe-nvfp4 qwen3moe nvfp4 nvfp4 modelopt "model.layers.*.experts.*" "" "" ", scale: nearest"
job gptoss-nvfp4 gptoss nvfp4 nvfp4 modelopt "*.experts.*" "" "lossless: required"
# Too little memory for four stretches at a time: 1.1 GB for weights and all.
cat >"$work/cramped.py" <<'EOF'
import sys, torch
torch.cuda.set_per_process_memory_fraction(float(sys.argv.pop(1)) / torch.cuda.mem_get_info()[1])
from requant.convert.cli import main
main(sys.argv[1:])
EOF
BEFORE="python3 -P $work/cramped.py 1.1e9" job llama-cramped llama-mxfp4 nvfp4 nvfp4 modelopt "model.layers.*_proj" "" "lossless: required"
timeout 60 python3 -P -m pytest -q -m gpu -p no:cacheprovider --override-ini addopts= --import-mode=importlib --strict-markers \
  tests/model/test_model_gpu.py >"$out/tests.txt" 2>&1 || failures=$((failures + 1))
tail -n 3 "$out/tests.txt"
cat "$out/summary.txt"
exit "$failures"
