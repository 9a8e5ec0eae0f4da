# Every target sets up what it needs in .venv and build/; nothing else on the machine is touched.
.PHONY: help setup demo test test-emulated cuda-gates avx512 check format sanitize bench bench-engine bench-llama-cpp bench-torch bench-plots clean
PY := .venv/bin/python

help: ## this list
	@grep -hE '^[a-z0-9]+(-emulated|-gates)?:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /make \1\t/' | expand -t 16

setup: ## the package, editable, in .venv
	@scripts/setup

demo: setup ## a dispatcher and two replicas serve the shipped model; completions at 2, 4 and 8 loops
	@$(PY) scripts/demo.py

test: ## every test, C++ and Python (ARGS="-k word" reaches pytest)
	@scripts/setup test
	@scripts/cpp-tests
	@$(PY) -m pytest $(ARGS)

test-emulated: ## the engine's Python tests on the emulated GPU
	@scripts/setup test
	@scripts/emulated-tests $(ARGS)

cuda-gates: ## the CUDA plug-in without a GPU: every architecture, no spills, its instructions (needs nvcc)
	@scripts/setup cuda-gates
	@scripts/cuda_gates

avx512: setup ## the AVX-512 kernels on an emulated processor, a PC in Bochs (on Debian; 3 minutes)
	@$(PY) scripts/avx512_check.py $(ARGS)

check: ## format, lint, types, layering, documents
	@scripts/setup dev
	@scripts/check

format: ## rewrite the sources as `make check` wants them
	@scripts/setup dev
	@scripts/check --fix

sanitize: ## the C++ tests under ASan + UBSan, the threaded ones under TSan
	@scripts/setup
	@scripts/cpp-tests address
	@scripts/cpp-tests thread

bench: ## lists the benchmarks, one command each (docs/performance.md has their results)
	@grep -hE '^bench-[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 24

bench-engine: setup ## decode, prefill, loops, threads, contexts; shares of the machine's limits (5 minutes)
	@$(PY) scripts/bench/engine.py $(ARGS)

bench-llama-cpp: ## against llama.cpp, which is compiled first (15 minutes, once; then 15 more)
	@scripts/setup bench-llama-cpp
	@$(PY) scripts/bench/vs_llama_cpp.py $(ARGS)

bench-torch: ## against the looped model in eager torch (10 minutes)
	@scripts/setup bench-torch
	@$(PY) scripts/bench/vs_torch.py $(ARGS)

bench-plots: ## docs/performance/*.svg from the JSON beside them
	@scripts/setup bench-plots
	@$(PY) scripts/bench/plot.py

clean: ## remove .venv and build/
	rm -rf .venv build
