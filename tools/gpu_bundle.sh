#!/usr/bin/env bash
# Gathers what the GPU tests need into build/gpu-bundle, so that a machine with a GPU and nothing else can run them:
#   tools/gpu_bundle.sh && scp -r build/gpu-bundle host: && ssh host gpu-bundle/run
# needs the build of the preset cuda.
set -euo pipefail
cd "$(dirname "$0")/.."

bundle=build/gpu-bundle
rm -rf "$bundle"
mkdir -p "$bundle"
for program in build/cuda/tfla build/cuda/tests/tfla_tests; do
  strip -o "$bundle/$(basename "$program")" "$program"
  # Everything but the C library itself, which every Linux has.
  ldd "$program" | awk '/=> \// {print $3}' | grep -vE '/(libc|libm|ld-linux[^/]*)\.so' | xargs -I{} cp -u {} "$bundle"
done
cat >"$bundle/run" <<'RUN'
#!/usr/bin/env bash
# All tests that need a GPU, and every variant against float64 there.
set -euo pipefail
cd "$(dirname "$0")"
export LD_LIBRARY_PATH=$PWD
./tfla_tests --gtest_filter='*Cuda*' --gtest_brief=1
./tfla check --device cuda
RUN
chmod +x "$bundle/run"
cp tools/gpu_sanitize.sh "$bundle/sanitize"
echo "written: $bundle ($(du -sh "$bundle" | cut -f1))"
