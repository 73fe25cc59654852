# Two commands do everything on a fresh machine with Python 3.11 or later:
#   make demo   install into .venv, generate text, measure accuracy
#   make test   install what the tests need, check the code, run the tests
# Both are quick the second time. PYTHON chooses another interpreter, VENV another folder.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

define PROMPT
class Counter:
    def __init__(self, name, value=0):
        self.name
endef
export PROMPT

.PHONY: demo test check clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	@echo "==> halfbyte generate: every K and V is read back from a 4-bit cache"
	@$(BIN)/halfbyte generate --max-tokens 60 --temperature 0.7 --seed 2 --prompt "$$PROMPT"
	@echo
	@echo "==> halfbyte eval: what the formats cost on text the model has not seen"
	@$(BIN)/halfbyte eval --max-tokens 2048

test: $(VENV)/.installed-dev check
	@echo "==> pytest"
	@$(BIN)/pytest --numprocesses auto --quiet

check: $(VENV)/.installed-dev
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@echo "==> mypy (the first run takes a minute)"
	@$(BIN)/mypy

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
	@$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
