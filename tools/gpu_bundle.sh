#!/usr/bin/env bash
# Gathers what the GPU tests need into build/gpu-bundle, so that a machine with a GPU and nothing else can run them:
#   tools/gpu_bundle.sh && scp -r build/gpu-bundle host: && ssh host gpu-bundle/run
# needs the build of the preset cuda. With the word sanitize it is build/gpu-sanitize-bundle, of the preset
# cuda-sanitize: what compute-sanitizer needs there.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ${1:-} == sanitize ]]; then
  bundle=build/gpu-sanitize-bundle
  run=tools/gpu_sanitize.sh
  programs=(build/cuda-sanitize/tests/tfla_tests)
else
  bundle=build/gpu-bundle
  run=tools/gpu_test.sh
  programs=(build/cuda/tfla build/cuda/tests/tfla_tests)
fi
rm -rf "$bundle"
mkdir -p "$bundle"
for program in "${programs[@]}"; do
  strip -o "$bundle/$(basename "$program")" "$program"
  # Everything but the C library itself, which every Linux has.
  ldd "$program" | awk '/=> \// {print $3}' | grep -vE '/(libc|libm|ld-linux[^/]*)\.so' | xargs -I{} cp -u {} "$bundle"
done
cp "$run" "$bundle/run"
chmod +x "$bundle/run"
echo "written: $bundle ($(du -sh "$bundle" | cut -f1))"
