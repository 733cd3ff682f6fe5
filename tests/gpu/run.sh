#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one go: the tests marked `gpu`, the GPU quantizers against a copy, and on
# converted checkpoints of DeepSeek-V4-Flash's and gpt-oss-120b's shapes `requant bench` and `requant validate --only
# kernels`. From the repository's root, in an environment that has requant and pytest:
#
#   tests/gpu/run.sh OUT COMMIT [WORK]     results in OUT (to be committed under docs/), checkpoints (12 GB) in WORK
#
# STEPS chooses among doctor, sanitize, quantizers, convert, deepseek-v4, gpt-oss and tests (default: all, in that order; all
# but the last take about three minutes on an H200). GPU_TESTS narrows the tests (default: tests), CHECKED the matrices of the kernels stage
# (default: 32).
#
# Each step has its own time limit and goes on after a failure; the last lines say what failed. Exit status: failures.
set -uo pipefail
out=$1 commit=$2 work=${3:-$(mktemp -d)}
failures=0
steps=" ${STEPS:-doctor sanitize quantizers convert deepseek-v4 gpt-oss tests} "
mkdir -p "$out" "$work"
requant() { python3 -P -m requant.convert.cli "$@"; } # -P: the folder `convert` here is not the package

wanted() { [[ $steps == *" $1 "* ]]; }

step() { # step NAME SECONDS COMMAND...
  local name=$1 limit=$2 begin status
  shift 2
  begin=$(date +%s)
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1
  status=$?
  echo "$name: exit $status, $(($(date +%s) - begin)) s"
  [ "$status" -eq 0 ] || { failures=$((failures + 1)); tail -n 25 "$out/$name.txt"; }
}

{
  echo "commit: $commit"
  nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv,noheader
  python3 -c 'import platform, torch; print("python", platform.python_version(), "torch", torch.__version__)'
  python3 -c 'import triton; print("triton", triton.__version__)'
  "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" --version | tail -n 2
} >"$out/machine.txt" 2>&1

wanted doctor && step doctor 60 python3 -P -m requant.convert.cli doctor
wanted sanitize && step sanitize 300 tests/gpu/sanitize.sh "$out/sanitize.md" "$commit" "$work/sanitize"
wanted quantizers && step quantizers 60 python3 -P tests/gpu/bench_gpu_quantize.py --json "$out/quantizers.json"

wanted convert && step convert 120 python3 -P tests/gpu/bench_convert.py "$work/convert" --gb 4 --json "$out/convert.json"

# The numerics stage reads 8 GB in exact arithmetic and has its own tests: here only the kernels are judged (exit 5: the
# stages left out are `not run`, so this is no sign-off).
judge() {
  requant validate "$1" --only kernels --quiet --set validate.kernels.modules="$2" --set validate.kernels.device=cuda
  local status=$?
  [ "$status" -eq 5 ] && python3 -c 'import json, sys
gate = next(g for g in json.load(open(sys.argv[1]))["gates"] if g["gate"] == "kernels")
print("GATE kernels:", gate["status"], "on", gate["measured_on"])
sys.exit(gate["status"] != "passed")' "$1/requant.signoff.json"
}

export -f judge requant
wanted deepseek-v4 && [ ! -e "$work/ds" ] && python3 tests/bench/make_checkpoint.py "$work/ds" --gb 3.7
wanted gpt-oss && [ ! -e "$work/go" ] && python3 tests/gpu/make_gpt_oss.py "$work/go"
for model in deepseek-v4:deepseek-v4-flash:ds gpt-oss:gpt-oss-120b:go; do
  IFS=: read -r name manifest source <<<"$model"
  wanted "$name" || continue
  step "$name-run" 120 python3 -P -m requant.convert.cli run "$manifest" --quiet --set "source.path=$work/$source" \
    --set "target.output=$work/$name-nvfp4"
  step "$name-bench" 120 python3 -P -m requant.convert.cli bench "$work/$name-nvfp4" --quiet --out "$out/$name"
  step "$name-kernels" 120 bash -c "judge '$work/$name-nvfp4' ${CHECKED:-32}"
done
if wanted tests; then
  # shellcheck disable=SC2086  # several paths
  step tests 400 python3 -P -m pytest -q -m gpu -p no:cacheprovider --override-ini addopts= --import-mode=importlib \
    --strict-markers --durations=10 ${GPU_TESTS:-tests}
  tail -n 3 "$out/tests.txt"
fi
echo "failures: $failures"
exit "$failures"
