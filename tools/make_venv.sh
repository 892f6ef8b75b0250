#!/usr/bin/env bash
# Makes a Python virtual environment that holds what a requirements file lists; does nothing when it is up to date.
# usage: tools/make_venv.sh DIRECTORY REQUIREMENTS
set -euo pipefail

directory=$1
requirements=$2
stamp=$directory/installed-requirements.txt

cmp -s "$requirements" "$stamp" && exit 0
[[ -x $directory/bin/python ]] || python3 -m venv "$directory"
echo "tfla: installing $(basename "$requirements") into $directory"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$requirements"
cp "$requirements" "$stamp"
