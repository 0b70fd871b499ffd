# Everything runs in .venv, made on first use; nothing needs to be there before.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart reference test check soak

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

# What docs/reliability.md says: under an hour on two cores. One part: make soak PART=kills
soak: .venv/installed
	$(BIN)/python -m pytest -v -m soak -n 2 --dist loadfile tests/soak -k "$(PART)"

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
