# Everything runs inside .venv; `make setup` makes it and every other target depends on it.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.setup-done
# With a GPU's own Python, where its packages are and nothing can be installed; .venv if it is there.
GPU_PY = PYTHONPATH="python:sgl-kernel/python:$$PYTHONPATH" $(or $(wildcard $(PY)),$(PYTHON))
SEED ?= 1
# One process per core, few where there are many; whoever is done takes over from the others.
PARALLEL ?= --numprocesses auto --maxprocesses 8 --dist worksteal
HOST ?= 127.0.0.1
PORT ?= 30000
MODEL ?= embedded

.PHONY: setup demo demo-peers serve check test test-all test-gpu bench-gpu fuzz bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 setup")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(PY) -m sglang.demo

demo-peers: setup
	$(PY) -m sglang.demo_peers

serve: setup
	$(PY) -m sglang.launch_server --model-path $(MODEL) --hicache --host $(HOST) --port $(PORT)

check: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy python/sglang sgl-kernel/python/sgl_kernel
	$(PY) -m pytest -x test/test_smallest.py

test: setup
	$(PY) -m pytest $(PARALLEL) -m 'not slow and not gpu'

test-all: setup
	$(PY) -m pytest $(PARALLEL) -m 'not gpu'

test-gpu:
	$(GPU_PY) -m pytest -m gpu

bench-gpu:
	$(GPU_PY) benchmark/bench_attention.py
	$(GPU_PY) benchmark/bench_kvcacheio.py --page-sizes 1,16,64,1024

fuzz: setup
	$(PY) -m sglang.test.soak --seed $(SEED) --seeds 40 --steps 2000

bench: setup
	for script in benchmark/bench_*.py; do $(PY) $$script || exit 1; done

clean:
	rm -rf $(VENV) build bench-out .pytest_cache .ruff_cache .mypy_cache
