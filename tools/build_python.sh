#!/usr/bin/env bash
# Builds the bindings and puts them into python/tfla/lib, so that PYTHONPATH=python runs the package from its sources.
# usage: tools/build_python.sh VENV [CMAKE_OPTION...]     VENV: an environment that holds torch
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
cmake -S . -B build/bindings -G Ninja -DPython3_EXECUTABLE="$PWD/$venv/bin/python" -DBUILD_SHARED_LIBS=ON \
  -DTFLA_BUILD_PYTHON=ON -DTFLA_BUILD_CLI=OFF -DTFLA_BUILD_TESTS=OFF -DTFLA_WERROR=ON "${@:2}" >/dev/null
cmake --build build/bindings --parallel "$(nproc)"
cmake --install build/bindings --component python --prefix "$PWD/python" >/dev/null
