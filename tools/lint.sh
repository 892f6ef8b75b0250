#!/usr/bin/env bash
# Formatting, layers, clang-tidy and ruff on this project's own files.
# usage: tools/lint.sh format | check
#   format  rewrites C++ and Python files in place
#   check   changes nothing and fails when something is wrong; needs the compile commands of build/release
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t cxx < <(find include src cli tests examples bindings benchmarks -regex '.*\.\(c\|cc\|h\|cu\|cuh\)' | sort)
mapfile -t python < <(find benchmarks examples packaging tests tools python -name '*.py' | sort)
ruff=.venv-lint/bin/ruff

case ${1:-} in
  format)
    clang-format -i "${cxx[@]}"
    ((${#python[@]} == 0)) || "$ruff" format --quiet "${python[@]}"
    ;;
  check)
    tools/check_layers.py
    clang-format --dry-run -Werror "${cxx[@]}"
    if ((${#python[@]})); then
      "$ruff" format --check --quiet "${python[@]}"
      "$ruff" check --quiet "${python[@]}"
    fi
    # The sources the release build compiles; headers are checked through them.
    run-clang-tidy -quiet -p build/release -j "$(nproc)" "$PWD/(src|cli|tests)/.*\.cc$"
    ;;
  *)
    echo "tfla: lint.sh was given \"${1:-}\"; it must be format or check." >&2
    exit 2
    ;;
esac
