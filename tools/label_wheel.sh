#!/usr/bin/env bash
# Puts a local label behind the version of a wheel: tfla-0.1.0-... becomes tfla-0.1.0+LABEL-... beside it.
# usage: tools/label_wheel.sh VENV WHEEL LABEL
set -euo pipefail

python=$1/bin/python
wheel=$2
label=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m wheel unpack --dest "$work" "$wheel" >/dev/null
information=$(echo "$work"/*/tfla-*.dist-info)
sed -i "s/^Version: .*/&+$label/" "$information/METADATA"
mv "$information" "${information%.dist-info}+$label.dist-info"
"$python" -m wheel pack --dest-dir "$(dirname "$wheel")" "$work"/* >/dev/null
