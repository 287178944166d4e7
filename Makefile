# Every target but `help` and `clean` sets up first: a virtual environment in .venv with this
# checkout installed in it. The stamp is written last, so a set-up that failed half-way is redone.

PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check
BIN := .venv/bin
STAMP := .venv/.set-up

PYTEST := $(BIN)/python -m pytest -n 2

.PHONY: help setup demo test test-slow lint check format golden bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv with the mllm-compile command in it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name another one: make PYTHON=python3.12 ..."; exit 2; }
	@test -e $@ || { echo "setting up .venv (once)"; $(PYTHON) -m venv --clear .venv; }
	@rm -f $@
	@$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt torch
	@$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## plan, verify and train a small LLaVA on photographs, on three ranks
	@HF_HUB_OFFLINE=1 $(BIN)/python -m examples.demo

test: $(STAMP)  ## run the fast tests
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(STAMP)  ## run the tests that take minutes
	$(PYTEST) -m "slow and not gpu"

lint: $(STAMP)  ## format check, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test  ## all that a change must pass: lint and the fast tests

format: $(STAMP)  ## rewrite the sources in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: $(STAMP)  ## rewrite the golden files and show what changed
	$(PYTEST) -m golden --update-golden
	@git --no-pager diff --stat -- tests/golden
	@git --no-pager diff -- tests/golden

bench: $(STAMP)  ## capture and step times against torch's own, as ratios
	@set -e; for file in $$(grep -l __main__ benchmarks/*.py); do echo "== $$file"; HF_HUB_OFFLINE=1 $(BIN)/python $$file; done

clean:  ## remove the environment and everything built
	rm -rf .venv build dist *.egg-info out .mypy_cache .ruff_cache .pytest_cache
