# Every target sets up what it needs in .venv, once; a stamp file per extra remembers it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install test lint demo bench clean

install: $(VENV)/.train  ## the package with everything a training run needs

test: $(VENV)/.dev  ## the whole test suite
	$(BIN)/python -m pytest

lint: $(VENV)/.dev  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

demo: $(VENV)/.train  ## plain training against LogicMix: a table, and a page in demo/
	$(BIN)/python train.py demo

bench: $(VENV)/.bench  ## the speed tables of docs/benchmarks.md
	$(BIN)/python bench/mix.py
	$(BIN)/python bench/randaugment.py
	$(BIN)/python bench/loader.py
	$(BIN)/python bench/cft.py
	$(BIN)/python bench/step.py

clean:  ## remove the environment and everything generated
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/.train $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$*]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else f"Python >= 3.10 is needed, $(PYTHON) is {sys.version.split()[0]}; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
