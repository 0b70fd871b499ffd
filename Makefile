# Everything runs in .venv, made on first use; nothing needs to be there before.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart reference test check

quickstart: .venv/installed
	$(BIN)/accelerate launch --config_file configs/accelerate/single.yaml train.py

# What docs/reference says. On a machine without a network: python3 -m train.reference
reference: .venv/installed
	$(BIN)/python -m train.reference

test: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
