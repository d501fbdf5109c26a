# Everything runs in .venv, with the exact versions of constraints.txt. `make` shows the targets.
# Another interpreter: `make demo PYTHON=/path/to/python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SGLANG := .venv-sglang
SGLANG_VERSION := 0.5.23
SCENARIO ?= guess
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help venv demo test sglang test-sglang sim lint types format bench clean

help:
	@echo "make demo     install what training needs and train the '$(SCENARIO)' scenario here (SCENARIO=name for another)"
	@echo "make venv     only make .venv with the package and its training dependencies"
	@echo "make test     lint, types and all tests (installs the development tools first)"
	@echo "make sglang   make .venv-sglang with a real SGLang for this CPU (3 GB, some minutes)"
	@echo "make test-sglang   tests with a real SGLang server (skipped, loudly, where it cannot be installed)"
	@echo "make sim      the whole system under a virtual clock: SEEDS=N histories, SEEDS=A..B, or SEEDS='core STEPS'"
	@echo "make lint     ruff: rules and formatting, changes nothing"
	@echo "make types    mypy --strict"
	@echo "make format   format the code and apply safe fixes"
	@echo "make bench    rollout throughput against PEFT, printed as markdown"
	@echo "make clean    remove .venv, .venv-sglang and all caches; runs/ stays"

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
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal || failed=1; \
	exit $$failed

# An environment of its own: SGLang wants other versions than we do. Its own list of requirements is for CUDA, so ours is used instead.
sglang: $(SGLANG)/.installed

$(SGLANG)/.installed: tinker/engines/sglang/requirements-cpu.txt Makefile
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check -r tinker/engines/sglang/requirements-cpu.txt
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==$(SGLANG_VERSION) torchvision==0.28.0
	@touch $@

# Only what cannot be installed may be skipped; what can, must pass.
test-sglang: $(VENV)/.dev
	@if $(MAKE) --no-print-directory sglang; then \
	  OPENTINKER_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 \
	    $(BIN)/python -m pytest -q tests/sglang tests/tinker/engines/test_sglang_contract.py; \
	else \
	  printf '\n%s\n' "########## SKIPPED: make test-sglang ##########" \
	    "SGLang $(SGLANG_VERSION) could not be installed here, so NOTHING was tested with a real server." \
	    "What the engine does without one is tested with a stand-in, in make test."; \
	fi

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
	$(BIN)/python bench/rollout.py --only demo

clean:
	rm -rf $(VENV) $(SGLANG) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
