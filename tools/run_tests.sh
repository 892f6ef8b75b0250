#!/usr/bin/env bash
# Builds and tests each preset, and with the word python the Python package, then adds up what was reported.
# usage: tools/run_tests.sh PRESET|python...
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

# awk reads to the end of its input. With head or grep -m the program before it in the pipe may die of SIGPIPE, and with
# pipefail so would this.

# count REPORT NAME: an attribute of ctest's JUnit report, such as failures="3".
count() { sed -n "s/^\s*$2=\"\([0-9]*\)\"$/\1/p" "$1" | awk 'NR == 1'; }

# Each sets `passed` and `failed`.
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
  failed=$(count "$report" failures)
  passed=$(($(count "$report" tests) - failed - $(count "$report" skipped) - $(count "$report" disabled)))
  # A test whose program is missing is not a failure in the report, but it is to ctest.
  if ((status != 0 && failed == 0)); then failed=1; fi
}

test_python() {
  local report=$PWD/build/python-tests.xml status=0
  rm -f "$report"
  tools/test_python.sh "$report" || status=$?
  if [[ ! -s $report ]]; then
    echo "tfla: tools/test_python.sh ended with status $status and left no report." >&2
    exit 1
  fi
  # pytest has all attributes in one line.
  local suite
  suite=$(tr '>' '\n' <"$report" | awk '/<testsuite / && !found++')
  attribute() { sed -n "s/.* $1=\"\([0-9]*\)\".*/\1/p" <<<"$suite"; }
  failed=$(($(attribute failures) + $(attribute errors)))
  passed=$(($(attribute tests) - failed - $(attribute skipped)))
  if ((status != 0 && failed == 0)); then failed=1; fi
}

for preset in "$@"; do
  echo "== $preset"
  if [[ $preset == python ]]; then test_python; else test_preset "$preset"; fi
  total_passed=$((total_passed + passed))
  total_failed=$((total_failed + failed))
  summary+=("$(printf '%-8s %5d passed, %d failed' "$preset" "$passed" "$failed")")
done

echo
printf '%s\n' "${summary[@]}"
echo "$total_passed passed, $total_failed failed"
((total_failed == 0 && total_passed > 0))
