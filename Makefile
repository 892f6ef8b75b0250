# A thin layer over CMake presets. Every target installs what it is missing first.

PREFIX ?= /usr/local
JOBS := $(shell nproc)
# Where there is nvcc, run, test and install build the CUDA backend too (tools/cuda_preset.sh says so); TFLA_CUDA=OFF leaves it
# out. Without a GPU its tests are reported as skipped.
export TFLA_CUDA ?= AUTO

.DEFAULT_GOAL := help
.PHONY: help run lm test test-quick wheel wheel-cuda gpu-test gpu-sanitize gpu-bundle bench bench-python paper experiments docs format lint install clean deps mutate release

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run:  ## build, compare every variant with float64, time them; with nvcc and a GPU there too
	@tools/install_deps.sh build bench
	@tools/first_run.sh

lm:  ## train a small language model on this CPU, five minutes, from text every Python has (build/lm)
	@tools/install_deps.sh build python
	@mkdir -p build
	@cat python/requirements.txt python/requirements-lm.txt examples/requirements.txt >build/lm-requirements.txt
	@tools/make_venv.sh .venv-python build/lm-requirements.txt
	@tools/build_python.sh .venv-python
	PYTHONPATH=python .venv-python/bin/python examples/language_model.py

test:  ## build and run all tests, smaller sets under each sanitizer, the fuzzer and on an emulated GPU, and the Python package's
	@tools/install_deps.sh build test python bench
	preset=$$(tools/cuda_preset.sh) && tools/run_tests.sh release asan tsan fuzz emulated python $$preset

test-quick:  ## the tests of a coffee break: release and Python without the slow ones; says what it left out
	@tools/install_deps.sh build python bench
	tools/test_quick.sh

wheel:  ## build a wheel that others can install into dist, with the CPU backend
	@tools/install_deps.sh build python
	@tools/make_venv.sh .venv-python python/requirements.txt
	tools/build_wheel.sh .venv-python dist

wheel-cuda:  ## the same with the CUDA backend for every GPU from Ampere on: version VERSION+cuXY, for an index of your own
	@tools/install_deps.sh build python
	@tools/make_venv.sh .venv-python python/requirements.txt
	tools/build_wheel.sh .venv-python dist cuda

gpu-test: gpu-bundle  ## build the CUDA backend and run its tests on this machine's GPU
	build/gpu-bundle/run

gpu-sanitize:  ## look for wrong addresses and races in every CUDA kernel on this machine's GPU, by compute-sanitizer
	@tools/install_deps.sh build
	@cmake --preset cuda-sanitize >/dev/null
	cmake --build --preset cuda-sanitize --parallel $(JOBS)
	tools/gpu_bundle.sh sanitize
	build/gpu-sanitize-bundle/run

gpu-bundle:  ## build the CUDA backend and its tests into a folder that any machine with a GPU can run
	@tools/install_deps.sh build
	@cmake --preset cuda >/dev/null
	cmake --build --preset cuda --parallel $(JOBS)
	tools/gpu_bundle.sh

mutate:  ## break the code on purpose, change by change, and see that a test notices (ONLY=NAME for some)
	@tools/install_deps.sh build test python
	@mkdir -p build
	@cat python/requirements.txt python/requirements-compat.txt python/requirements-lm.txt >build/python-requirements.txt
	@tools/make_venv.sh .venv-python build/python-requirements.txt
	tools/mutate.py $(if $(ONLY),--only $(ONLY))

bench: release  ## time tfla and mlstm_kernels side by side (PyTorch in .venv)
	@tools/make_venv.sh .venv benchmarks/cpu/requirements.txt
	.venv/bin/python -m benchmarks.cpu.compare

paper: release  ## every figure of the paper's analysis and docs/paper.md (matplotlib in .venv-paper)
	@tools/make_venv.sh .venv-paper benchmarks/paper/requirements.txt
	.venv-paper/bin/python -m benchmarks.paper.make_paper

experiments:  ## list the language model experiments with what is done and the seconds that the rest takes
	@tools/install_deps.sh build python
	@tools/make_venv.sh .venv-python python/requirements.txt
	@tools/build_python.sh .venv-python
	@PYTHONPATH=python .venv-python/bin/python -m benchmarks.lm.experiments list

bench-python:  ## host time that the Python package adds to a call
	@tools/install_deps.sh build python
	@tools/make_venv.sh .venv-python python/requirements.txt
	@tools/build_python.sh .venv-python
	@cmake --build build/bindings --target tfla_bare_calls
	PYTHONPATH=python .venv-python/bin/python -m benchmarks.host.python_overhead

docs:  ## build the pages as a site with search into build/site (mkdocs in .venv-docs)
	@tools/make_venv.sh .venv-docs docs/requirements.txt
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

format:  ## format C++ and Python in place
	@tools/install_deps.sh lint
	@tools/make_venv.sh .venv-lint tools/lint-requirements.txt
	tools/lint.sh format

lint:  ## check formatting, layers, clang-tidy, ruff
	@tools/install_deps.sh build lint bench
	@tools/make_venv.sh .venv-lint tools/lint-requirements.txt
	@cmake --preset release >/dev/null
	tools/lint.sh check

install:  ## install library, headers and program (PREFIX=/usr/local)
	@tools/install_deps.sh build bench
	@preset=$$(tools/cuda_preset.sh release) && tools/build_preset.sh $$preset tfla tfla_cli && \
		cmake --install build/$$preset --prefix "$(PREFIX)"

clean:  ## remove everything that was built
	rm -rf build

deps:  ## install every Debian package any target needs
	tools/install_deps.sh build test python lint bench

# The library and the program, without the tests.
release:
	@tools/install_deps.sh build bench
	@tools/build_preset.sh release tfla tfla_cli
