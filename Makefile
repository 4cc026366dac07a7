# `make demo` and `make test` do all their own set-up: they need python3 with venv, and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test fast test-oldest lint clean

demo: $(VENV)/ready
	$(BIN)/shardconv demo

test: lint
	$(BIN)/python -m pytest

fast: lint
	$(BIN)/python -m pytest -m "not slow"

# Run-time and Hub tests with the lowest versions that pyproject.toml claims; not part of `test`.
OLDEST := .venv-oldest
test-oldest: $(OLDEST)/ready
	$(OLDEST)/bin/python -m pytest -m "not late" tests/contracts tests/loader tests/remote tests/source/test_hub_source.py \
		tests/commands/test_push.py tests/commands/test_push_guards.py tests/commands/test_convert_pipeline.py \
		tests/scenarios/test_run_pipelines.py

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

$(OLDEST)/ready: requirements-oldest.txt pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet torch==2.8.0
	$(OLDEST)/bin/pip install --quiet -r requirements-oldest.txt
	$(OLDEST)/bin/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache
