#!/usr/bin/env bash
# Installs a build into a temporary prefix, then builds and runs examples/consumer against it, once through
# find_package and once through pkg-config, and examples/c_api.c by a C compiler.
# usage: tools/test_package.sh BUILD_DIRECTORY [CXX [CC]]
set -euo pipefail

build=$1
cxx=${2:-c++}
cc=${3:-cc}
examples=$(cd "$(dirname "$0")/../examples" && pwd)
consumer=$examples/consumer
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix

cmake --install "$build" --prefix "$prefix" >"$work/install.log"
"$prefix/bin/tfla" --version

echo "== find_package"
cmake -S "$consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_COMPILER="$cxx" >"$work/configure.log"
cmake --build "$work/build" >"$work/build.log"
"$work/build/consumer"

echo "== pkg-config"
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name tfla.pc)")
export PKG_CONFIG_PATH
libdir=$(pkg-config --variable=libdir tfla)
# shellcheck disable=SC2046  # the flags are words
"$cxx" -std=c++20 "$consumer/main.cc" $(pkg-config --cflags --libs tfla) -o "$work/consumer"
LD_LIBRARY_PATH=$libdir "$work/consumer"

echo "== C"
# shellcheck disable=SC2046
"$cc" -std=c11 -Wall -Wextra -pedantic -Werror "$examples/c_api.c" $(pkg-config --cflags --libs tfla) -lm -o "$work/c_api"
printf '#include <tfla/tfla_c_%s.h>\n' delta ssd |
  "$cc" -std=c11 -Wall -Wextra -pedantic -Werror $(pkg-config --cflags tfla) -fsyntax-only -x c -
LD_LIBRARY_PATH=$libdir "$work/c_api"
