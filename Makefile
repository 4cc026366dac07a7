# `make demo` and `make test` do all their own set-up: they need python3 with venv, and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test fast lint clean

demo: $(VENV)/ready
	$(BIN)/shardconv demo

test: lint
	$(BIN)/python -m pytest

fast: lint
	$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first and alone, from where a CPU build is to be had: another package would pull gigabytes of CUDA with it.
$(VENV)/ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
