#!/usr/bin/env bash
# Builds and tests each preset, and with the word python the Python package, then adds up what was reported.
# usage: tools/run_tests.sh PRESET|python...
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=$(nproc)
total_passed=0
total_failed=0
total_skipped=0
summary=()

# The sanitizers of clang 14 map fixed address ranges, which a kernel with much address randomisation may already
# have given away; without randomisation they always fit.
still=()
if setarch -R true 2>/dev/null; then still=(setarch -R); fi

# read_report REPORT STATUS: sets `passed`, `failed`, `skipped` and `why`. A program that failed without a failed test, by
# a test of which nothing is left in the report say, counts as one.
read_report() {
  read -r passed failed skipped why < <(tools/count_tests.py "$1")
  if (($2 != 0 && failed == 0)); then failed=1; fi
}

# Each ends with read_report.
test_preset() {
  local preset=$1 report=$PWD/build/$1/tests.xml launcher=() status=0
  cmake --preset "$preset" >/dev/null
  cmake --build --preset "$preset" --parallel "$jobs"
  rm -f "$report"
  [[ $preset == release || $preset == debug ]] || launcher=("${still[@]}")
  "${launcher[@]}" ctest --preset "$preset" --parallel "$jobs" --progress --no-tests=error --output-junit "$report" ||
    status=$?
  if [[ ! -s $report ]]; then
    echo "tfla: ctest --preset $preset ended with status $status and left no report." >&2
    exit 1
  fi
  read_report "$report" "$status"
}

test_python() {
  local report=$PWD/build/python-tests.xml status=0
  rm -f "$report"
  tools/test_python.sh "$report" || status=$?
  if [[ ! -s $report ]]; then
    echo "tfla: tools/test_python.sh ended with status $status and left no report." >&2
    exit 1
  fi
  read_report "$report" "$status"
}

for preset in "$@"; do
  echo "== $preset"
  if [[ $preset == python ]]; then test_python; else test_preset "$preset"; fi
  total_passed=$((total_passed + passed))
  total_failed=$((total_failed + failed))
  total_skipped=$((total_skipped + skipped))
  summary+=("$(printf '%-8s %5d passed, %d failed, %d skipped' "$preset" "$passed" "$failed" "$skipped")${why:+ ($why)}")
done

echo
printf '%s\n' "${summary[@]}"
echo "$total_passed passed, $total_failed failed, $total_skipped skipped"
((total_failed == 0 && total_passed > 0))
