# gendurable. `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= auto

.DEFAULT_GOAL := help
.PHONY: help install demo check format lint imports types test test-slow schema wheel reference clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gendurable needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

install: $(STAMP) ## set up the virtual environment

demo: $(STAMP) ## run the demo: real workers on a private Postgres, one killed on the way
	$(BIN)/python -m gendurable.demo

test: $(STAMP) ## run the tests against a private Postgres that is started and stopped for them
	$(BIN)/python -m pytest -n $(JOBS)

test-slow: $(STAMP) ## the tests that search at random, much longer
	GENDURABLE_HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n $(JOBS) tests/db/test_engine_machine.py

check: $(STAMP) format lint imports types ## everything that must hold before a commit, except the tests

format: $(STAMP) ## is the code formatted? (fix: .venv/bin/ruff format)
	$(BIN)/ruff format --check

lint: $(STAMP) ## ruff, all rules
	$(BIN)/ruff check

imports: $(STAMP) ## the import contract: who may know whom
	$(BIN)/lint-imports

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

schema: $(STAMP) ## write sql/schema.sql anew from the migrations
	$(BIN)/python tests/db/dump_schema.py

wheel: $(STAMP) ## build the wheel into dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

reference: $(STAMP) ## write the reference parts of README.md anew from the code
	$(BIN)/python tests/docs/reference.py

clean: ## remove what make made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	find gendurable tests -name __pycache__ -type d -exec rm -rf {} +
