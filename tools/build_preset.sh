#!/usr/bin/env bash
# Configures and builds a preset.
# usage: tools/build_preset.sh PRESET [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/.."

cmake --preset "$1" >/dev/null
cmake --build --preset "$1" --parallel "$(nproc)" ${2:+--target "${@:2}"}
