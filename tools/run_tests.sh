#!/usr/bin/env bash
# Builds and tests each preset, then adds up what ctest reported.
# usage: tools/run_tests.sh PRESET...
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=$(nproc)
total_passed=0
total_failed=0
summary=()

# The sanitizers of clang 14 map fixed address ranges, which a kernel with much address randomisation may already
# have given away; without randomisation they always fit.
still=()
if setarch -R true 2>/dev/null; then still=(setarch -R); fi

# count REPORT NAME: an attribute of ctest's JUnit report, such as failures="3".
count() { sed -n "s/^\s*$2=\"\([0-9]*\)\"$/\1/p" "$1" | head -n 1; }

for preset in "$@"; do
  echo "== $preset"
  cmake --preset "$preset" >/dev/null
  cmake --build --preset "$preset" --parallel "$jobs"
  report=$PWD/build/$preset/tests.xml
  rm -f "$report"
  launcher=()
  [[ $preset == release || $preset == debug ]] || launcher=("${still[@]}")
  status=0
  "${launcher[@]}" ctest --preset "$preset" --parallel "$jobs" --progress --no-tests=error --output-junit "$report" ||
    status=$?
  if [[ ! -s $report ]]; then
    echo "tfla: ctest --preset $preset ended with status $status and left no report." >&2
    exit 1
  fi
  failed=$(count "$report" failures)
  passed=$(($(count "$report" tests) - failed - $(count "$report" skipped) - $(count "$report" disabled)))
  # A test whose program is missing is not a failure in the report, but it is to ctest.
  if ((status != 0 && failed == 0)); then failed=1; fi
  total_passed=$((total_passed + passed))
  total_failed=$((total_failed + failed))
  summary+=("$(printf '%-8s %5d passed, %d failed' "$preset" "$passed" "$failed")")
done

echo
printf '%s\n' "${summary[@]}"
echo "$total_passed passed, $total_failed failed"
((total_failed == 0 && total_passed > 0))
