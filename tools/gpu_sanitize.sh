#!/usr/bin/env bash
# compute-sanitizer on every CUDA kernel: its tools memcheck and racecheck on the tests EveryKernel, many processes at a
# time. First both have to find what the tests SanitizerProbeCuda do wrong on purpose. Lies in the folder that
# `tools/gpu_bundle.sh sanitize` makes, as `run`.
set -euo pipefail
cd "$(dirname "$0")"
shards=$(($(nproc) < 16 ? $(nproc) : 16))  # before OMP_NUM_THREADS, which nproc heeds
export LD_LIBRARY_PATH=$PWD PATH=$PATH:/usr/local/cuda/bin OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive

filter='*EveryKernel*:StepCuda.Slots*:SanitizerProbeCuda.*'
longest=600  # seconds; a kernel that hangs is a failure
if ! command -v compute-sanitizer >/dev/null; then
  echo "tfla: compute-sanitizer is not in PATH; it comes with the CUDA toolkit." >&2
  exit 1
fi
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# check TOOL FILTER OPTION...: the tests under a tool, whose output it prints.
check() {
  local tool=$1 tests=$2
  shift 2
  timeout "$longest" compute-sanitizer --tool "$tool" --error-exitcode 9 \
    ./tfla_tests --gtest_filter="$tests" "$@" 2>&1
}
# sum_of PATTERN FILE...: the sum of the first number after the pattern.
sum_of() { sed -n "s/.*$1\([0-9]*\).*/\1/p" "${@:2}" | awk '{sum += $1} END {print sum + 0}'; }

failed=0
for tool in memcheck racecheck; do
  start=$SECONDS
  check "$tool" "SanitizerProbeCuda.DISABLED_$tool" --gtest_also_run_disabled_tests >"$logs/probe" || true
  if ! grep -q 'SUMMARY: [1-9]' "$logs/probe"; then
    echo "tfla: $tool does not see a mistake that is there, so what else it does not see means nothing. Its output:" >&2
    cat "$logs/probe" >&2
    exit 1
  fi
  for ((shard = 0; shard < shards; ++shard)); do
    (
      export GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard
      check "$tool" "$filter" >"$logs/$tool.$shard" || echo "shard $shard: exit status $?" >>"$logs/failed"
    ) &
  done
  wait
  passed=$(sum_of '\[  PASSED  \] ' "$logs/$tool".*)
  skipped=$(sum_of '\[  SKIPPED \] ' "$logs/$tool".*)
  found=$(sum_of 'SUMMARY: ' "$logs/$tool".*)
  clean=$(grep -h 'SUMMARY: 0 ' "$logs/$tool".* | wc -l || true)
  echo "$tool: $found reports, $passed tests passed, $skipped skipped, $((SECONDS - start)) s"
  if [[ -e $logs/failed ]] || ((found > 0 || clean < shards || passed == 0)); then
    ((passed > 0)) || echo "tfla: no test ran under $tool; is there a GPU?"
    awk '/^=========/ && !/SUMMARY|COMPUTE-SANITIZER/ || /Failure|FAILED/' "$logs/$tool".* | awk 'NR <= 60'
    # What was reported, without addresses and threads: which lines of which kernels, most often first.
    grep -hE '^========= +(Error|Warning|and|at) ' "$logs/$tool".* |
      sed -E 's/0x[0-9a-f]+/ADDRESS/g; s/\(([0-9]+,){2}[0-9]+\)/(...)/g; s/\[[0-9]+ hazards?\]//; s/block .*//' |
      sort | uniq -c | sort -rn | awk 'NR <= 40'
    grep -h 'SUMMARY' "$logs/$tool".* | sort | uniq -c
    # Where a process ended before its tests did: the one it was at.
    for log in $(grep -L '\[  PASSED  \]' "$logs/$tool".*); do
      echo "$(basename "$log") ends in: $(grep '\[ RUN' "$log" | tail -n 1)"
    done
    cat "$logs/failed" 2>/dev/null || true
    failed=1
  fi
  rm -f "$logs/failed"
done
exit $failed
