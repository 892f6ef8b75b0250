#!/usr/bin/env bash
# All tests that need a GPU, several processes at a time, and every variant against float64 there. Lies in the folder
# that `tools/gpu_bundle.sh` makes, as `run`.
set -euo pipefail
cd "$(dirname "$0")"
export LD_LIBRARY_PATH=$PWD

shards=$(($(nproc) < 10 ? 1 : 5))
export OMP_NUM_THREADS=$(($(nproc) / shards))
longest=1200  # seconds; a kernel that hangs is a failure
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

for ((shard = 0; shard < shards; ++shard)); do
  (
    export GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard
    timeout "$longest" ./tfla_tests --gtest_filter='*Cuda*' >"$logs/$shard" 2>&1 ||
      echo "shard $shard of $shards: exit status $?" >>"$logs/failed"
  ) &
done
wait
# sum_of WORD: over all processes.
sum_of() { sed -n "s/.*\[  $1 *\] \([0-9]*\) test.*/\1/p" "$logs"/[0-9]* | awk '{sum += $1} END {print sum + 0}'; }
echo "$(sum_of PASSED) passed, $(sum_of FAILED) failed, $(sum_of SKIPPED) skipped, $SECONDS s"
if [[ -e $logs/failed ]]; then
  awk '/Failure/ {lines = 12} lines-- > 0 || /FAILED/' "$logs"/[0-9]* | awk 'NR <= 120'
  # Where a process ended before its tests did: the one it was at.
  for log in $(grep -L 'suites\? ran\.' "$logs"/[0-9]*); do
    echo "process $(basename "$log") ends in: $(grep '\[ RUN' "$log" | tail -n 1)"
  done
  cat "$logs/failed"
  exit 1
fi
./tfla check --device cuda
