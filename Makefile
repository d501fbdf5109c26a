# Everything runs in .venv, with the exact versions of constraints.txt. `make` shows the targets.
# Another interpreter: `make demo PYTHON=/path/to/python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SCENARIO ?= guess
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv demo test sim lint types format bench clean

help:
	@echo "make demo     install what training needs and train the '$(SCENARIO)' scenario here (SCENARIO=name for another)"
	@echo "make venv     only make .venv with the package and its training dependencies"
	@echo "make test     lint, types and all tests (installs the development tools first)"
	@echo "make sim      the whole system under a virtual clock: SEEDS=N histories, or SEEDS=A..B"
	@echo "make lint     ruff: rules and formatting, changes nothing"
	@echo "make types    mypy --strict"
	@echo "make format   format the code and apply safe fixes"
	@echo "make bench    rollout throughput against PEFT, printed as markdown"
	@echo "make clean    remove .venv and all caches; runs/ stays"

venv: $(VENV)/.train

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "this is Python %d.%d, at least 3.11 is needed; say make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# Stamps: installed again only when what is to be installed has changed.
$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[train]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[train,dev]'
	@touch $(VENV)/.train $@

demo: venv
	$(BIN)/opentinker run $(SCENARIO)

# All three are run whatever the others say; pytest is last, so that its closing line is.
test: $(VENV)/.dev
	@failed=0; \
	$(MAKE) --no-print-directory lint || failed=1; \
	$(MAKE) --no-print-directory types || failed=1; \
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n $(WORKERS) || failed=1; \
	exit $$failed

SEEDS ?= 500
sim: $(VENV)/.dev
	@$(BIN)/python tests/sim/run.py $(SEEDS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python bench/rollout.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
