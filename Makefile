# Every target runs in .venv, which the first one creates. You need Python only.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart reference test check serving soak

quickstart: .venv/installed
	$(BIN)/accelerate launch --config_file configs/accelerate/single.yaml train.py

# What docs/reference says. On a machine without a network: python3 -m benchmarks.reference
reference: .venv/installed
	$(BIN)/python -m benchmarks.reference

# Exported heads in other servers, each with its own environment (4 GB in all, kept). Servers that can't be installed
# are skipped.
SPECULATOR_SERVING ?= .venv-serving
serving: .venv/installed
	for part in speculators/installed vllm/installed vllm/plugin; do \
		$(MAKE) --no-print-directory $(SPECULATOR_SERVING)/$$part || true; done
	SPECULATOR_SERVING=$(SPECULATOR_SERVING) $(BIN)/python -m pytest -q -rs -s tests/serving

# Remove packages that may come with another version of torch, which breaks the import; no test needs them.
$(SPECULATOR_SERVING)/%/installed: tests/serving/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

$(SPECULATOR_SERVING)/vllm/plugin: $(SPECULATOR_SERVING)/vllm/installed $(wildcard integrations/vllm/*.toml integrations/vllm/*/*.py)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall ./integrations/vllm
	touch $@

test: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

# Long tests of docs/reliability.md: under an hour on two cores. Run one part with `make soak PART=kills`.
soak: .venv/installed
	$(BIN)/python -m pytest -v -m soak -n 2 --dist loadfile tests -k "$(PART)"

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@
