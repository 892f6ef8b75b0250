#!/usr/bin/env bash
# Prints cuda, the preset with the CUDA backend, where that is to be built (cmake/DecideCuda.cmake; TFLA_CUDA=ON|OFF in the
# environment has the last word), and OTHERWISE where it is not.
# usage: tools/cuda_preset.sh [OTHERWISE]
set -euo pipefail
cd "$(dirname "$0")/.."

enabled=$(cmake -DTFLA_CUDA="${TFLA_CUDA:-AUTO}" -P cmake/DecideCuda.cmake)
if [[ $enabled == ON ]]; then echo cuda; else echo "${1:-}"; fi
