# Two commands do everything on a fresh machine with Python 3.11 or later:
#   make demo   install into .venv, generate text, measure accuracy
#   make test   install what the tests need, check the code, run the tests, also inside vLLM
# Both are fast the second time. PYTHON sets the interpreter, VENV and VLLM_VENV the folders.
#   make test-all        also the tests that CI leaves out: all combinations of parameters, more GPUs and shapes
#   make test-vllm       slow tests inside vLLM: compilation, two ranks, a server, lm-eval, LMCache
#   make docs            the pages of docs/ as a site, in site/
#   make release         a wheel and a source archive in dist/, tried in empty environments
#   make accuracy        accuracy of formats and recipes on two real models, downloaded into MODELS
#   make test-vllm-0.24  tests with the oldest supported vLLM, in its own environment (6 GB)

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
# Python compiles what is imported; pip would compile all modules, in as much time as it takes to install them.
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --no-compile
PIP := $(BIN)/python $(PIP_INSTALL) --constraint constraints.txt

# Where bytecode is not kept, every command that a test starts compiles PyTorch's modules again, for some ten seconds.
export PYTHONDONTWRITEBYTECODE :=

define PROMPT
class Counter:
    def __init__(self, name, value=0):
        self.name
endef
export PROMPT

MODELS ?= .models

.PHONY: demo test test-all check docs accuracy release test-vllm test-vllm-0.24 clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	@echo "==> halfbyte generate: K and V are read back from a 4-bit cache, the last 64 tokens' from 16 bits"
	@$(BIN)/halfbyte generate --max-tokens 60 --temperature 0.7 --seed 2 --prompt "$$PROMPT"
	@echo
	@echo "==> halfbyte eval: what the formats cost on text the model has not seen"
	@$(BIN)/halfbyte eval --kv-recipe plain,balanced --max-tokens 2048

# The environments side by side: most of an installation waits for one core or the network.
test:
	@$(MAKE) --no-print-directory --jobs 2 $(VLLM_VENV)/.dependencies $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory --jobs 2 check docs $(VLLM_VENV)/.installed
	@echo "==> pytest"
	@$(BIN)/pytest --numprocesses auto --quiet -m "not slow" --each-value
	@echo "==> pytest inside vLLM"
	@$(VLLM_PYTEST) --numprocesses 2 --dist loadfile -m "not slow"

test-all: $(VENV)/.installed-dev
	@$(BIN)/pytest --numprocesses auto --quiet

test-vllm: $(VLLM_VENV)/.installed
	@$(VLLM_PIP) lm-eval==0.4.13
	@$(VLLM_PIP) --no-deps --requirement requirements-vllm-lmcache.txt
	@$(VLLM_PYTEST) -m slow

test-vllm-0.24:
	@$(MAKE) --no-print-directory VLLM_VENV=.venv-vllm-0.24 VLLM_TORCH=2.11.0 \
		VLLM_PINS=requirements-vllm-0.24.txt .venv-vllm-0.24/.installed
	@OMP_NUM_THREADS=1 .venv-vllm-0.24/bin/python -m pytest --quiet --disable-warnings -p no:cacheprovider \
		tests/plugins/vllm/engine -m "not slow"

accuracy: $(VENV)/.installed-dev
	@$(PIP) gguf accelerate
	@$(BIN)/python -m benchmarks.kv_recipes $(MODELS)

docs: $(VENV)/.installed-docs
	@echo "==> mkdocs"
	@NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict
	@if grep -rlE '<(script|link|img)[^>]* (src|href)="(https?:)?//' site --include='*.html'; then \
		echo "these pages would fetch from a network"; exit 1; fi

release: $(VENV)/.installed-dev
	@echo "==> building the source archive, and the wheel from it"
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist . > /dev/null
	@$(BIN)/python dev/check_release.py dist

check: $(VENV)/.installed-dev
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@echo "==> mypy (the first run takes a minute)"
	@$(BIN)/mypy

VLLM_TORCH ?= 2.13.0
VLLM_PINS ?= requirements-vllm.txt
VLLM_PIP = $(VLLM_VENV)/bin/python $(PIP_INSTALL)
# One thread: with more, vLLM's and PyTorch's threads wait for one another on a busy machine.
VLLM_PYTEST = OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest --quiet --disable-warnings -p no:cacheprovider \
	tests/plugins/vllm/engine

# The C++ library lies beside the sources, for both environments: it is compiled once.
LIBRARY = $(wildcard src/halfbyte/kernels/_cpu*.so)

$(VLLM_VENV)/.dependencies: $(VLLM_PINS)
	@echo "==> installing vLLM into $(VLLM_VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_PIP) torch==$(VLLM_TORCH)
	@$(VLLM_PIP) --no-deps --requirement $(VLLM_PINS)
	@touch $@

$(VLLM_VENV)/.installed: $(VLLM_VENV)/.dependencies pyproject.toml
	@$(if $(LIBRARY),CC=false CXX=false) $(VLLM_PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.venv:
	@echo "==> making a virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "==> installing halfbyte and PyTorch (a few minutes the first time)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "==> installing what the tests need"
	@$(BIN)/python dev/extra.py dev | $(PIP) --requirement /dev/stdin
	@touch $@

# The site is built from the source tree: halfbyte need not be installed.
$(VENV)/.installed-docs: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "==> installing what the docs need"
	@$(BIN)/python dev/extra.py docs | $(PIP) --requirement /dev/stdin
	@touch $@

clean:
	rm -rf site $(VENV) .venv-vllm* .mypy_cache .pytest_cache .ruff_cache .hypothesis
