#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one go. From the repository's root, in an environment that has requant and
# pytest (transformers for `model` and `speed`):
#
#   tests/gpu/run.sh OUT COMMIT [WORK]     results in OUT (to be committed under docs/), checkpoints (44 GB) in WORK
#
# STEPS chooses among these (default: all, in this order):
#   doctor       what runs here
#   sanitize     compute-sanitizer on every kernel (sanitize.sh)
#   quantizers   the GPU quantizers against a copy
#   convert      conversions on the processor and on the GPU
#   deepseek-v4, gpt-oss   checkpoints of DeepSeek-V4-Flash's and gpt-oss-120b's shapes, converted:
#                `requant validate --only kernels`, then `requant bench`
#   w4a4         emulated W4A4 on converted layers: NVFP4 of DeepSeek-V4-Flash's experts, MXFP4 of Qwen3-30B-A3B's, and
#                with CAPTURED (what capture_layers.py wrote) those under captured activations
#   speed        gpt-oss-20b at full size, random weights, converted: `requant validate --only speed`
#   decode       the decode engine on random weights made on the GPU (bench_decode.py)
#   model        the stage `model` (model_stage.sh)
#   tests        the tests marked `gpu`
# What is timed runs alone. Checkpoints are made side by side, and so are judgements without a clock.
#
# GPU_TESTS narrows the tests (default: tests), CHECKED the matrices of the kernels stage (default: 16), SPEED is the gate
# of `speed` (default: {}, that is 8, 32 and 48 requests at 1, 8 and 16 streams). Each step has its own time limit and
# goes on after a failure; the last lines say what failed. Exit status: failures.
set -uo pipefail
out=$1 commit=$2 work=${3:-$(mktemp -d)}
failures=0 beside=()
all=" doctor sanitize quantizers convert deepseek-v4 gpt-oss w4a4 speed decode model tests "
steps=" ${STEPS:-$all} "
for name in $steps; do
  [[ $all == *" $name "* ]] || { echo "STEPS: no step is called $name; there are:$all" >&2; exit 2; }
done
mkdir -p "$out" "$work"
requant() { python3 -P -m requant.convert.cli "$@"; } # -P: the folder `convert` here is not the package

wanted() { [[ $steps == *" $1 "* ]]; }

run() { # run NAME SECONDS COMMAND...: its output goes to OUT/NAME.txt
  local name=$1 limit=$2 begin status tenths
  shift 2
  begin=${EPOCHREALTIME/./}
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1
  status=$?
  tenths=$(((${EPOCHREALTIME/./} - begin) / 100000))
  echo "$name: exit $status, $((tenths / 10)).$((tenths % 10)) s"
  [ "$status" -eq 0 ] || tail -n 25 "$out/$name.txt"
  return "$status"
}
step() { run "$@" || failures=$((failures + 1)); }
beside() { run "$@" & beside+=($!); }
together() { # wait for all that runs beside
  local pid
  for pid in ${beside[@]+"${beside[@]}"}; do wait "$pid" || failures=$((failures + 1)); done
  beside=()
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

# --- checkpoints made, converted and judged, side by side --------------------------------------------------------------
converted() { # converted MANIFEST SOURCE OUTPUT COMMAND...: COMMAND makes the source; what is there already stays
  local manifest=$1 source=$2 output=$3
  shift 3
  [ -e "$source" ] || "$@" || return 1
  [ -e "$output" ] || requant run "$manifest" --quiet --set "source.path=$source" --set "target.output=$output"
}
judge() { # The numerics stage reads 8 GB in exact arithmetic and has its own tests: here only the kernels are judged
  # (exit 5: the stages left out are `not run`, so this is no sign-off).
  requant validate "$1" --only kernels --quiet --set validate.kernels.modules="$2" --set validate.kernels.device=cuda
  local status=$?
  [ "$status" -eq 5 ] && passed "$1" kernels
}
speed() {
  requant validate "$1" --only speed --quiet --set "validate.speed=${SPEED:-{\}}"
  local status=$?
  cp "$1"/requant.signoff.json "$1"/requant.signoff.md "$1"/requant.signoff.html "$2"
  python3 -c 'import json, sys
stage = next(s for s in json.load(open(sys.argv[1]))["stages"] if s["stage"] == "speed")
spent = {"kernels": stage["data"].get("kernels", {}).get("seconds"), **stage["data"].get("seconds", {})}
print("SECONDS", stage["seconds"], "of the stage:", ", ".join(f"{part} {seconds}" for part, seconds in spent.items()))' "$1/requant.signoff.json"
  [ "$status" -eq 5 ] && passed "$1" speed
}
passed() {
  python3 -c 'import json, sys
gate = next(g for g in json.load(open(sys.argv[1]))["gates"] if g["gate"] == sys.argv[2])
print("GATE", sys.argv[2] + ":", gate["status"], "on", gate["measured_on"])
sys.exit(gate["status"] != "passed")' "$1/requant.signoff.json" "$2"
}
export -f converted judge speed passed requant
cat >"$work/qwen3-mxfp4.yaml" <<'EOF'
version: 1
name: qwen3-30b-a3b-mxfp4
source: {path: set-by-the-script}
target: {format: mxfp4, layout: compressed-tensors, output: set-by-the-script}
layers:
  - {match: "*.experts.*", to: mxfp4}
  - {match: "*", to: keep}
EOF

made() { beside "$1-run" 150 bash -c 'converted "$@"' _ "${@:2}"; }
made_and_judged() { # NAME MANIFEST SOURCE COMMAND...
  converted "$2" "$3" "$work/$1-nvfp4" "${@:4}" && { [ -z "$checked" ] || judge "$work/$1-nvfp4" "$checked"; }
}
export -f made_and_judged
export work checked=${CHECKED:-16}
judged() { beside "$1-kernels" 150 bash -c 'made_and_judged "$@"' _ "$@"; }
wanted speed && made gpt-oss-20b gpt-oss-20b "$work/go20" "$work/gpt-oss-20b-nvfp4" \
  requant init --random gpt-oss-20b "$work/go20" --quiet
wanted w4a4 && made qwen3 "$work/qwen3-mxfp4.yaml" "$work/q3" "$work/qwen3-mxfp4" \
  requant init --random qwen3-30b-a3b "$work/q3" --layers 1 --as bf16 --quiet
wanted gpt-oss && judged gpt-oss gpt-oss-120b "$work/go" python3 tests/gpu/make_gpt_oss.py "$work/go"
if wanted deepseek-v4; then
  judged deepseek-v4 deepseek-v4-flash "$work/ds" python3 tests/bench/make_checkpoint.py "$work/ds" --gb 3.7
elif wanted w4a4; then
  checked='' judged deepseek-v4 deepseek-v4-flash "$work/ds" python3 tests/bench/make_checkpoint.py "$work/ds" --gb 3.7
fi
together
wanted model && beside model 150 tests/gpu/model_stage.sh "$out/model" "$commit" "$work/model"
if wanted w4a4; then
  w4a4() { beside "w4a4-$1" 90 python3 -P tests/gpu/w4a4_layers.py "${@:2}"; }
  w4a4 deepseek-v4 "$work/deepseek-v4-nvfp4" --match layers.0.ffn.experts
  w4a4 qwen3-mxfp4 "$work/qwen3-mxfp4" --match experts
  [ -z "${CAPTURED:-}" ] || w4a4 captured "$CAPTURED/weights" --activations "$CAPTURED/activations.safetensors"
fi
together

# --- timed, one after the other ---------------------------------------------------------------------------------------
wanted speed && step speed 200 bash -c "speed '$work/gpt-oss-20b-nvfp4' '$out'"
wanted decode && step decode 150 python3 tests/gpu/bench_decode.py --json "$out/decode.json"
for model in deepseek-v4 gpt-oss; do
  wanted "$model" && step "$model-bench" 120 python3 -P -m requant.convert.cli bench "$work/$model-nvfp4" --quiet --out "$out/$model"
done
if wanted tests; then
  # shellcheck disable=SC2086  # several paths
  step tests 400 python3 -P -m pytest -q -m gpu -p no:cacheprovider --override-ini addopts= --import-mode=importlib \
    --strict-markers --durations=10 ${GPU_TESTS:-tests}
  tail -n 3 "$out/tests.txt"
fi
echo "failures: $failures, $SECONDS s"
exit "$failures"
