#!/usr/bin/env bash
# The stage `model` on a GPU: random checkpoints of three families are converted and judged with `device: cuda`, weights
# W4A16 by the FP4 kernels, and the tests marked `gpu` of the model and of the decode engine run. From the repository's
# root, in an environment that has requant, transformers and pytest:
#
#   tests/gpu/model_stage.sh OUT COMMIT [WORK]      results in OUT (to be committed under docs/), checkpoints in WORK
#
# Everything runs side by side, since nothing here is timed: most of it waits for Python, on cores of its own. DEVICE
# (default: cuda) is the gate's; `cpu` tries the script itself. GPU_TESTS narrows the tests, ONLY (a regular expression)
# the checkpoints. Exit status: how many failed.
set -uo pipefail
out=$1 work=${3:-$(mktemp -d)} device=${DEVICE:-cuda}
failures=0
mkdir -p "$out" "$work"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} # of each job: they share the cores
{
  echo "commit: $2"
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  python3 -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
} >"$out/machine.txt" 2>&1
requant() { python3 -P -m requant.convert.cli "$@"; } # -P: the folder `convert` here is not the package

begin=$(date +%s)
# shellcheck disable=SC2086  # several paths
timeout 110 python3 -P -m pytest -q -m gpu -p no:cacheprovider --override-ini addopts= --import-mode=importlib --strict-markers \
  --durations=8 ${GPU_TESTS:-tests/model/test_model_gpu.py tests/validate/test_decode.py} >"$out/tests.txt" 2>&1 &
tests=$!
python3 -P tests/gpu/make_models.py "$work" >"$out/make.txt" 2>&1 || { tail "$out/make.txt"; exit 1; }
# Letters that never come again in the same order: blocks of tokens that repeat others would make errors look small.
python3 -c 'import random, string, sys
open(sys.argv[1], "w").write("".join(random.Random(0).choices(string.ascii_lowercase + " ", k=70000)))' "$work/text.txt"
# Too little memory for four stretches at a time: 1.1 GB for weights and all.
cat >"$work/cramped.py" <<'EOF'
import sys, torch
if torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction(float(sys.argv.pop(1)) / torch.cuda.mem_get_info()[1])
else:
    sys.argv.pop(1)
from requant.convert.cli import main
main(sys.argv[1:])
EOF

wait_for() { while [ ! -e "$1/requant.lock.json" ] && kill -0 "$2" 2>/dev/null; do sleep 0.1; done; } # FOLDER WRITER

job() { # job NAME SOURCE FORMAT TO LAYOUT PATTERN MODEL-GATE [NUMERICS-GATE [RULE]]: convert, judge TOKENS (4096)
  local name=$1 source=$2 begin status rule=${9:-}
  [[ $name =~ ${ONLY:-.} ]] || return 0
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
  model: {text: $work/text.txt, tokens: ${TOKENS:-4096}, device: $device$7}
EOF
  ${BEFORE:-requant} "$work/$name.yaml" --quiet >"$out/$name.txt" 2>&1
  status=$?
  echo "$name: exit $status, $(($(date +%s) - begin)) s"
  [ "$status" -eq 0 ] || tail -n 12 "$out/$name.txt"
  return "$status"
}

noted() { # noted NAME: the figures of one sign-off, and the seconds of its stages
  python3 - "$work/$1/requant.signoff.json" <<'PY'
import json, sys
signed = json.load(open(sys.argv[1]))
gate = next(g for g in signed["gates"] if g["gate"] == "model")
stage = next(s for s in signed["stages"] if s["stage"] == "model")
data, said = stage["data"], "signed off" if signed["signed_off"] else "NOT signed off"
print(signed["name"], "|", said, "| model", gate["status"], "on", gate["measured_on"], f"| {stage['seconds']:.0f} s")
print("  ", gate["reason"])
for arm, kernels in data.get("kernels", {}).items():
    print("  ", arm, data[arm]["fp4_layers"], "FP4 layers:", "; ".join(kernels) or "none")
for line in data.get("reduced", []):
    print("  ", line)
PY
}

names=(llama-mxfp4 qwen3moe-nvfp4 gptoss-nvfp4 llama-nvfp4 llama-w4a4 llama-cramped)
job llama-mxfp4 llama mxfp4 mxfp4 compressed-tensors "model.layers.*_proj" "" & jobs=($!)
job qwen3moe-nvfp4 qwen3moe nvfp4 nvfp4 modelopt "model.layers.*.experts.*" "" "" ", scale: nearest" & jobs+=($!)
# Logits of its random weights are large, and BF16 moves them more: the error of the ratio of perplexities is 0.0006 at
# 4096 tokens, too much for a bound of 0.001.
TOKENS=32768 job gptoss-nvfp4 gptoss nvfp4 nvfp4 modelopt "*.experts.*" "" "lossless: required" & jobs+=($!)
wait_for "$work/llama-mxfp4" "${jobs[0]}" # the source of the rest; it is judged meanwhile
job llama-nvfp4 llama-mxfp4 nvfp4 nvfp4 modelopt "model.layers.*_proj" "" "lossless: required" & jobs+=($!)
job llama-w4a4 llama-mxfp4 nvfp4 nvfp4 modelopt "model.layers.*_proj" ", w4a4: true" & jobs+=($!)
BEFORE="python3 -P $work/cramped.py 1.1e9" job llama-cramped llama-mxfp4 nvfp4 nvfp4 modelopt "model.layers.*_proj" "" "lossless: required" & jobs+=($!)
: >"$out/summary.txt"
for index in "${!names[@]}"; do
  wait "${jobs[index]}" || failures=$((failures + 1))
  [[ ${names[index]} =~ ${ONLY:-.} ]] || continue
  noted "${names[index]}" >>"$out/summary.txt" 2>&1 || failures=$((failures + 1))
done
wait "$tests" || failures=$((failures + 1))
tail -n 3 "$out/tests.txt"
cat "$out/summary.txt"
echo "failures: $failures, $(($(date +%s) - begin)) s"
exit "$failures"
