# gendurable. `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= auto

.DEFAULT_GOAL := help
.PHONY: help install demo dev check format lint imports types test newcomer bench test-slow test-all-pg test-all-python \
  deploy-tools deploy-check schema wheel reference clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

dev: $(STAMP) ## a private Postgres and a worker with the demo's machines, to play with
	$(BIN)/gendurable dev

# The part of the suite that is run: make test TESTS=tests/e2e
TESTS  ?= tests

test: $(STAMP) ## run the tests against a private Postgres that is started and stopped for them
	$(BIN)/python -m pytest -n $(JOBS) $(TESTS)

newcomer: ## demo and some tests from a clean clone without Postgres on PATH, as root and as an ordinary user
	@$(PYTHON) tests/newcomer.py

bench: $(STAMP) ## measure this machine and its Postgres (BENCH="--quick": a short look)
	$(BIN)/gendurable bench $(BENCH)

test-slow: $(STAMP) ## the tests that search at random, much longer
	GENDURABLE_HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n $(JOBS) tests/db/test_engine_machine.py

# The same on every supported server and every supported Python.
PG_MAJORS ?= 14 15 16 17 18
PYTHONS   ?= 3.11 3.12 3.13

test-all-pg: $(STAMP) ## the tests on PostgreSQL 14 to 18, fetched into .cache
	@failed=; for major in $(PG_MAJORS); do \
	  echo "== PostgreSQL $$major"; \
	  bin=$$($(BIN)/python tests/fetch_postgres.py $$major) \
	    && GENDURABLE_PG_BIN=$$bin $(BIN)/python -m pytest -n $(JOBS) $(TESTS) || failed="$$failed $$major"; \
	done; [ -z "$$failed" ] || { echo "failed on PostgreSQL$$failed"; exit 1; }

test-all-python: ## the tests on Python 3.11 to 3.13, as far as they are here
	@failed=; for version in $(PYTHONS); do \
	  echo "== Python $$version"; python=; \
	  for each in python$$version $$HOME/.pyenv/versions/$$version.*/bin/python3; do \
	    if "$$each" -c 'import venv' 2>/dev/null; then python=$$each; break; fi; \
	  done; \
	  if [ -z "$$python" ]; then echo "not here"; continue; fi; \
	  venv=.cache/python/$$version; \
	  "$$python" -m venv $$venv \
	    && $$venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' \
	    && $$venv/bin/python -m pytest -n $(JOBS) $(TESTS) || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "failed on Python$$failed"; exit 1; }

DEPLOY_STAMP := $(VENV)/.deploy-tools
$(DEPLOY_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[deploy]'
	@touch $@

deploy-tools: $(DEPLOY_STAMP) ## get the tools that judge deploy/, as far as they can be fetched
	@sh tests/deploy/fetch_tools.sh

deploy-check: deploy-tools ## judge deploy/ with every tool that is here or can be fetched
	$(BIN)/python -m pytest -rs tests/deploy

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
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	find gendurable tests -name __pycache__ -type d -exec rm -rf {} +
