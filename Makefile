# Two commands are all there is to know; both set up .venv first, and again only when something changed.
#
#   make demo    a real search on the best device here, compared with PyTorch, exported, imported and checked
#   make test    the tests that protect a change, in minutes
#   make test-all  those, and the slow ones: every test this machine can run
#   make lint    ruff, mypy, import-linter
#
#   PYTHON=/path/to/python3.12   the interpreter to build .venv from (3.11 to 3.14)
#   CUDA=cu12                    compile with NVRTC 12 instead of 13, for drivers older than 580
#   ARGS="-m gpu -x"             passed on to pytest
#   BUDGET=10m                   how long the demo searches

VENV ?= .venv
CUDA ?= cu13
BUDGET ?= 60s
WORKERS ?= auto
BIN := $(VENV)/bin

export PYTHON VENV CUDA BUDGET

.PHONY: help env demo test test-all lint ruff mypy imports

help:
	@sed -n 's/^#   //p' Makefile

env:
	@bash scripts/environment.sh

demo: env
	@bash scripts/demo.sh

# More than 8 workers only fight over memory; those on the GPU take turns where times matter (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup --no-loadscope-reorder

test: env
	$(PYTEST) -m "not slow" $(ARGS)

test-all: env
	$(PYTEST) $(ARGS)

lint: ruff mypy imports # apart, so that `make --keep-going lint` reports all of them

ruff: env
	$(BIN)/ruff check .

mypy: env
	$(BIN)/mypy

imports: env
	$(BIN)/lint-imports
