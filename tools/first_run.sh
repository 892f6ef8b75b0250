#!/usr/bin/env bash
# Builds the library and the program, compares every variant with float64 and times them; with the CUDA backend on this
# machine's GPU too.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=$(tools/cuda_preset.sh release)
tfla=build/$preset/tfla
tools/build_preset.sh "$preset" tfla tfla_cli
"$tfla" check
"$tfla" bench --quick
[[ $preset == cuda ]] || exit 0
# The devices of NVIDIA's driver, on Linux and inside Windows. Where there is one, a failure to use it is a failure.
if [[ ! -e /dev/nvidiactl && ! -e /dev/dxg ]]; then
  echo "tfla: no GPU is here; the CUDA backend is built and was not run."
  exit 0
fi
"$tfla" check --device cuda
"$tfla" bench --quick --device cuda --dtype bfloat16
