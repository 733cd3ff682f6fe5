#!/usr/bin/env bash
# compute-sanitizer on every kernel of requant, all at once, into one table. From the repository's root, in an environment
# that has requant, on a machine with an NVIDIA GPU, nvcc and compute-sanitizer:
#
#   tests/gpu/sanitize.sh TABLE COMMIT [LOGS]     TABLE is to be committed under docs/; LOGS: what each run printed
#
# A run is one tool on one program; it is clean if the tool found nothing and the program, which checks its numbers or
# counts its launches, ended well. Programs run beside one another (JOBS at a time, default 8), each within LIMIT seconds
# (default 120); a run that does not end in time is written down as not finished. BIN may hold w4a4_sanitize and
# quantize_sanitize, REQUANT_W4A16_LIBRARY may name the W4A16 kernels, all with -lineinfo; what is missing is built. ONLY: a
# regular expression of runs, each "TOOL COMMAND".
#
# Exit status: runs that are not clean. Clusters are left out of racecheck (tests/gpu/cluster_race.cu says why).
set -uo pipefail
table=$1 commit=$2 logs=${3:-$(mktemp -d)}
bin=${BIN:-$logs} cuda=${CUDA_HOME:-/usr/local/cuda}/bin
sanitizer=$(command -v compute-sanitizer || echo "$cuda/compute-sanitizer")
mkdir -p "$logs" "$bin"
rm -f "$logs"/[0-9][0-9].md "$logs"/*-not-clean # of an earlier run
arch=$(python3 -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
[ "$arch" -lt 90 ] || arch=${arch}a
compile() { "$cuda/nvcc" -std=c++17 -O3 -lineinfo -gencode "arch=compute_$arch,code=sm_$arch" -Ikernels/csrc "$@"; }

# --- what is to be run -----------------------------------------------------------------------------------------------
for name in w4a4_sanitize quantize_sanitize; do
  { [ -n "${BIN:-}" ] && [ -x "$bin/$name" ]; } || compile "tests/kernels/$name.cu" -o "$bin/$name" &
done
if [ -z "${REQUANT_W4A16_LIBRARY:-}" ]; then
  export REQUANT_W4A16_LIBRARY=$logs/w4a16.so
  compile -Xcompiler -fPIC -shared kernels/csrc/w4a16.cu -o "$REQUANT_W4A16_LIBRARY" &
fi
# Triton compiles before, not under the tool, and in several processes at a time.
compiled() { timeout 120 python3 -P "$1" cuda "$2" >"$logs/$(basename "$1" .py)-$2.txt" 2>&1; }
for part in dense grouped broken; do compiled tests/kernels/w4a16_triton_program.py $part & done
for part in norms picks gates attention prompts decoded products; do compiled tests/validate/decode_fused_program.py $part & done
wait

export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # each tensor an allocation of its own: torch's cache would hide what lies beyond it
number=0
check() { # check KERNELS TOOL COMMAND...: one row of the table, in the background
  local kernels=$1 tool=$2 command log row status begin said result
  shift 2
  command="$*"
  [[ "$tool $command" =~ ${ONLY:-.} ]] || return 0
  number=$((number + 1))
  row=$logs/$(printf %02d $number)
  log=$row-$tool.txt
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-8}" ]; do wait -n; done
  {
    begin=$SECONDS
    # shellcheck disable=SC2046,SC2016  # the leading NAME=VALUE words go to env
    timeout -k 5 "${LIMIT:-120}" env "${@:1:$(environment "$@")}" "$sanitizer" --tool "$tool" --print-limit 20 "${@:$(($(environment "$@") + 1))}" >"$log" 2>&1
    status=$?
    said=$(grep -E "SUMMARY: " "$log" | tail -n 1 | sed -E 's/.*SUMMARY: //')
    result=${said:-no summary}
    if [ $status -eq 124 ] || [ $status -eq 137 ]; then  # the tool counts at the end, and tells as it goes
      result="not finished in ${LIMIT:-120} s; errors until then: $(grep -cE "^=+ (Error|Warning|Invalid|Misaligned|Barrier error|Fatal|Program hit)" "$log")"
    fi
    said=$(grep -v "^=====" "$log" | tail -n 1)
    [ $status -eq 0 ] || result="$result; the program ended with $status"
    [[ "$result" =~ ^0\ (errors|hazards\ displayed\ \(0\ errors,\ 0\ warnings\))$ ]] || touch "$row-not-clean"
    echo "| $kernels | $tool | $result | ${said:0:60} | $((SECONDS - begin)) s | \`${command//$bin\//}\` |" >"$row.md"
  } &
}
environment() { # how many of the words are NAME=VALUE
  local count=0
  for word in "$@"; do [[ $word =~ ^[A-Z_]+= ]] || break; count=$((count + 1)); done
  echo $count
}

for tool in memcheck racecheck; do
  alone=(); [ $tool = memcheck ] || alone=(NO_CLUSTER=1)
  check "W4A16, every variant, and its routing" $tool "${alone[@]}" python3 -P tests/gpu/w4a16_sweep.py sanitize
  for part in dense ragged experts fused; do
    check "W4A16 as it is dispatched, $part" $tool "${alone[@]}" python3 -P tests/gpu/w4a16_dispatched.py $part
  done
  check "W4A16, wgmma" $tool "${alone[@]}" python3 -P tests/gpu/w4a16_wgmma_sweep.py sanitize
  check "W4A16 in Triton, dense and grouped" $tool python3 -P tests/kernels/w4a16_triton_program.py cuda
  check "decoding's kernels, BF16 products" $tool "${alone[@]}" python3 -P tests/validate/decode_fused_program.py cuda
  check "W4A4, emulated, and its quantizer" $tool "$bin/w4a4_sanitize"
  check "repacking and quantizing" $tool "$bin/quantize_sanitize"
done
wait

# --- the table -------------------------------------------------------------------------------------------------------
{
  echo "# compute-sanitizer on every kernel"
  echo
  echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), $("$sanitizer" --version | grep -i version | head -n 1), commit $commit: \`tests/gpu/sanitize.sh TABLE COMMIT\`"
  echo
  echo "| kernels | tool | result | the program's last word | took | command, under \`compute-sanitizer --tool\` |"
  echo "|---|---|---|---|--:|---|"
  find "$logs" -name "[0-9][0-9].md" | sort | xargs -r cat
} >"$table"
# A run without a row is not clean either, nor are no runs at all.
failures=$(($(find "$logs" -name "*-not-clean" | wc -l) + number - $(find "$logs" -name "[0-9][0-9].md" | wc -l)))
[ "$number" -gt 0 ] || { echo "ONLY='$ONLY' names no run"; failures=1; }
cat "$table"
echo "not clean: $failures"
exit "$failures"
