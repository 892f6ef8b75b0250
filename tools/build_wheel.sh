#!/usr/bin/env bash
# Builds a wheel that others can install, with the manylinux tag that its libraries hold.
# usage: tools/build_wheel.sh VENV DIRECTORY [cuda]     VENV: an environment that holds python/requirements.txt
#
# Without the word cuda it has the CPU backend alone, whatever compilers there are. With it, it has the CUDA backend with
# code for every generation of GPUs from Ampere on, and its version has the label +cuXY of the toolkit, as torch's has. Both
# wheels are the same package: pip installs one of them, and pip list says which.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
directory=$2
backend=${3:-cpu}
raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT

options=(--quiet --disable-pip-version-check --no-build-isolation --no-deps -w "$raw")
if [[ $backend == cuda ]]; then
  build=build/python-cuda
  # PTX of sm_90 serves what comes later and what lies between the others. sm_100 and sm_120 need nvcc 12.8.
  architectures='80-real;86-real;89-real;90;100-real;120-real'
  TFLA_CUDA=ON "$venv/bin/python" -m pip wheel "${options[@]}" "-Cbuild-dir=$build" \
    "-Ccmake.define.CMAKE_CUDA_ARCHITECTURES=$architectures" .
  toolkit=$(cat "$build"/CMakeFiles/*/CMakeCUDACompiler.cmake |
    sed -n 's/^set(CMAKE_CUDA_COMPILER_VERSION "\([0-9]*\)\.\([0-9]*\).*/\1\2/p')
  cpu=$(echo "$raw"/tfla-*.whl)
  tools/label_wheel.sh "$venv" "$cpu" "cu$toolkit"
  rm "$cpu"
else
  TFLA_CUDA=OFF "$venv/bin/python" -m pip wheel "${options[@]}" .
fi

# Everything that a wheel needs lies in tfla/lib and is found there; libtorch.so comes with torch. What is left is the tag:
# the oldest C library that has every version of a symbol that is asked for.
PATH=$PWD/$venv/bin:$PATH "$venv/bin/python" -m auditwheel repair --exclude libtorch.so -w "$directory" \
  "$raw"/tfla-*.whl
