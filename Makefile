# leadline: set-up, the demonstration, and every check, from a fresh clone.
#
#   make install   own .venv, every package pinned and hashed, leadline itself editable
#   make demo      install, then gate, train and tap a tiny model on this machine
#   make test      install, then lint, types and tests
#
# PYTHON=python3.12 picks the interpreter, TORCH=2.11.0 the torch release, ARGS="..." goes to the
# demo or to pytest. Nothing outside this folder is written, and an active environment is ignored.

PYTHON ?= python3
TORCH ?= 2.13.0
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
LEADLINE_PATHS := src tests scripts/lock $(wildcard bench) $(wildcard examples)

# An environment of the caller's must not leak into ours.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# A moved clone or a removed interpreter leaves a .venv that cannot run: build it anew.
VENV_HOME := $(shell cat $(STAMPS)/home 2>/dev/null)
VENV_RUNS := $(shell $(BIN)/python -c "print('yes')" 2>/dev/null)
ifneq ($(VENV_HOME)|$(VENV_RUNS),$(CURDIR)|yes)
REBUILD := rebuild
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types check clean rebuild

help:
	@sed -n 's/^#   //p' Makefile

install: $(STAMPS)/leadline
	@echo "leadline: ready in $(VENV), $$($(BIN)/leadline --version)"

demo: install
	@$(BIN)/leadline demo $(ARGS)

test: lint types
	@echo "leadline: tests"
	@$(BIN)/python -m pytest -n 2 --cov --cov-report=term:skip-covered $(ARGS)

lint: install
	@echo "leadline: lint"
	@$(BIN)/ruff check $(LEADLINE_PATHS)
	@$(BIN)/ruff format --check $(LEADLINE_PATHS)

types: install
	@echo "leadline: types"
	@$(BIN)/mypy -p leadline

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/home: $(REBUILD)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "leadline needs Python 3.11 or newer and '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1 | head -1); name another one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "leadline: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@mkdir -p $(STAMPS) && printf '%s\n' "$(CURDIR)" > $@

$(STAMPS)/packages: $(STAMPS)/home requirements.lock
	@echo "leadline: installing the pinned packages (a minute or two)"
	@$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements.lock
	@touch $@

$(STAMPS)/torch-$(TORCH): $(STAMPS)/packages
	@echo "leadline: installing torch $(TORCH)"
	@$(BIN)/python -m pip install torch==$(TORCH)
	@rm -f $(STAMPS)/torch-* && touch $@

$(STAMPS)/leadline: $(STAMPS)/torch-$(TORCH) pyproject.toml src/leadline/_version.py
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@
