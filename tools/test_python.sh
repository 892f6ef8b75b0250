#!/usr/bin/env bash
# Builds the wheel, installs it into .venv-python and runs the Python tests on it as installed. It has the CPU backend
# alone: `make test` builds the CUDA backend for the preset cuda, and once is enough.
# usage: tools/test_python.sh REPORT [PYTEST_OPTION...]     REPORT: where pytest's JUnit report goes
set -euo pipefail
cd "$(dirname "$0")/.."

report=$1
venv=.venv-python
wheels=build/wheel
mkdir -p build
cat python/requirements.txt python/requirements-compat.txt python/requirements-lm.txt >build/python-requirements.txt
tools/make_venv.sh "$venv" build/python-requirements.txt
rm -rf "$wheels"
tools/build_wheel.sh "$venv" "$wheels"
wheel=$(echo "$wheels"/tfla-*.whl)
echo "built $wheel ($(du -h "$wheel" | cut -f1))"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheel"
# From another folder, and without PYTHONPATH: the installed package, not the sources.
tests=$PWD/python/tests
export TFLA_WHEEL=$PWD/$wheel
cd build
env -u PYTHONPATH "../$venv/bin/python" -m pytest --rootdir "$tests" -c "$tests/../../pyproject.toml" --junitxml "$report" "${@:2}" "$tests"
