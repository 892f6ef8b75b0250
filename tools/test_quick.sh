#!/usr/bin/env bash
# The tests to run between two changes: those of the preset release and of the Python package that are quick, on what was
# built before as far as it still holds. Ends with what it left out.
set -euo pipefail
cd "$(dirname "$0")/.."

# Of ctest: the accuracy at full size, the fuzzer's long table, and the programs run as a whole.
slow_tests='^(Documented/|Fuzz\.|cli$|analyse$|scale$|package\.)'
# Of python/tests: training, other packages and processes, compilers; and what needs a wheel or a GPU.
slow_python=(benchmarks build_choice compat_compile cuda distributed docs examples huggingface jax_cuda lm_cuda lm_data
  lm_data_refused lm_benchmarks lm_corpus lm_experiments lm_experiments_page lm_kinds lm_model lm_recipe lm_run lm_safety lm_scale lm_train lm_use lm_use_refused mutations training_cuda types wheel)

venv=.venv-python
start=$SECONDS
mkdir -p build
cat python/requirements.txt python/requirements-compat.txt python/requirements-lm.txt >build/python-requirements.txt
tools/make_venv.sh "$venv" build/python-requirements.txt
tools/build_preset.sh release
tools/build_python.sh "$venv"
built=$SECONDS

report=$PWD/build/quick
failed=0
ctest --preset release --parallel "$(nproc)" --progress --no-tests=error -E "$slow_tests" --output-junit "$report-ctest.xml" ||
  failed=1
ignored=("${slow_python[@]/#/--ignore-glob=*/test_}")
PYTHONPATH=python "$venv/bin/python" -m pytest "${ignored[@]/%/.py}" --junitxml "$report-python.xml" python/tests || failed=1

# line NAME REPORT: how many of its tests did what.
line() {
  read -r passed failures skipped why < <(tools/count_tests.py "$2")
  echo "$1: $passed passed, $failures failed, $skipped skipped${why:+ ($why)}"
}
echo
line release "$report-ctest.xml"
line python "$report-python.xml"
echo "in $((SECONDS - built)) s, after $((built - start)) s of building"
echo "left out, and in make test: the sanitizers, the fuzzer, the emulated GPU and the preset cuda; of release what matches $slow_tests;" \
  "of python/tests ${slow_python[*]}"
exit $failed
