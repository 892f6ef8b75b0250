#!/usr/bin/env bash
# Installs the Debian packages that are missing; does nothing when all are there.
# usage: tools/install_deps.sh GROUP...     groups: build test python lint bench
set -euo pipefail

build=(g++ cmake ninja-build pkg-config libhwy-dev libfmt-dev libcli11-dev nlohmann-json3-dev
  libgtest-dev python3)
test=(clang libclang-rt-14-dev libomp-14-dev # the sanitizers: clang 14 is Debian 12's
  libboost-context-dev)                        # threads of the emulated GPU
lint=(clang-format clang-tidy libomp-14-dev python3-venv)
bench=(python3-venv libopenblas-pthread-dev) # what tfla bench --gemm compares with
python=(python3-venv)

packages=()
for group in "$@"; do
  case $group in
    build) packages+=("${build[@]}") ;;
    test) packages+=("${test[@]}") ;;
    lint) packages+=("${lint[@]}") ;;
    bench) packages+=("${bench[@]}") ;;
    python) packages+=("${python[@]}") ;;
    *)
      echo "tfla: install_deps.sh was given the group \"$group\"; it must be build, test, python, lint or bench." >&2
      exit 2
      ;;
  esac
done

missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $state == installed ]] || missing+=("$package")
done
((${#missing[@]})) || exit 0

if ! command -v apt-get >/dev/null; then
  echo "tfla: this system has no apt-get; install by hand what these Debian packages hold: ${missing[*]}." >&2
  exit 1
fi
as_root=(env)
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "tfla: installing needs root and there is no sudo; as root run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo env)
fi
echo "tfla: installing ${missing[*]}"
if ! "${as_root[@]}" apt-get update -qq ||
  ! "${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
    >/dev/null; then
  echo "tfla: apt-get could not install ${missing[*]}; its own message is above." >&2
  exit 1
fi
