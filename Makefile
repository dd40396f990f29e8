# Every target sets up what it needs in an environment of its own, once; a stamp file per extra remembers it.
#   make test              with the locked versions (gpu_logicmix/constraints.txt), in .venv
#   make test LATEST=1     with the latest ones, in .venv-latest
#   make test-floor        with the lowest ones that pyproject.toml allows, in .venv-floor
PYTHON ?= python3
ifdef LATEST
VENV := .venv-latest
LIMITS :=
else ifdef FLOOR
VENV := .venv-floor
LIMITS := $(VENV)/floors.txt
else
VENV := .venv
LIMITS := gpu_logicmix/constraints.txt
endif
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One thread for each process: there are as many processes as cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: help install test test-fast test-floor test-quick lint docs study-docs demo bench lock dist clean always

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

install: $(VENV)/.train  ## the package with everything a training run needs

test: $(VENV)/.dev  ## the whole test suite
	$(PYTEST)

test-fast: $(VENV)/.dev  ## what takes seconds: no kills, no torchrun, no compilation, a tenth of the random cases
	GPU_LOGICMIX_EXAMPLES=0.1 $(PYTEST) -m "not slow"

test-quick: $(VENV)/.dev  ## imports, the transform, one tiny run: has a new version of a package broken us?
	$(PYTEST) tests/test_package.py tests/test_quick.py

test-floor:  ## the whole suite with the lowest versions that pyproject.toml allows
	$(MAKE) test FLOOR=1

lint: $(VENV)/.dev  ## ruff: rules and formatting; mypy: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs  ## the documentation as a site, in site/
	$(BIN)/mkdocs build --strict

study-docs: $(VENV)/.train  ## tables, plots and figures in the docs, from studies/results
	$(BIN)/python scripts/study_docs.py

demo: $(VENV)/.train  ## plain training against LogicMix: a table, and a page in demo/
	$(BIN)/python train.py demo

# Without bench/aot.py (cuobjdump) and bench/presets.py (20 GB of memory). As the tables were made: see the pages.
bench: $(VENV)/.bench  ## the speeds of README.md and docs/benchmarks.md, measured here, into bench/results
	$(BIN)/python bench/mix.py --clock cpu --threads 1 --rounds 5
	$(BIN)/python bench/mix.py --compile --clock cpu --threads 1 --rounds 7
	$(BIN)/python bench/bytes.py
	$(BIN)/python bench/randaugment.py
	$(BIN)/python bench/augment_peers.py --rounds 9
	$(BIN)/python bench/loader.py
	$(BIN)/python bench/cft.py
	$(BIN)/python bench/step.py

lock:  ## lock what pyproject.toml asks for since; UPGRADE=1: everything anew
	$(PYTHON) scripts/lock.py $(if $(UPGRADE),--upgrade)

dist: $(VENV)/.dev  ## dist/: the sdist and the wheel
	$(BIN)/python -m build --outdir dist .

clean:  ## remove the environments and everything generated
	rm -rf .venv .venv-latest .venv-floor demo site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/.train $(VENV)/.dev $(VENV)/.bench $(VENV)/.docs: $(VENV)/.%: pyproject.toml $(LIMITS) $(if $(LATEST),always) | $(BIN)/python
	$(PIP) install --quiet $(if $(LIMITS),-c $(LIMITS),--upgrade --upgrade-strategy eager) -e ".[$*]"
	@touch $@

.venv-floor/floors.txt: pyproject.toml scripts/floors.py | $(BIN)/python
	$(BIN)/python scripts/floors.py > $@.part && mv $@.part $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else f"Python >= 3.10 is needed, $(PYTHON) is {sys.version.split()[0]}; name another with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
