# Every target runs in .venv, which the first one creates; quickstart installs less than the others. You need Python only.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart reference test kernels check docs serving soak gpu

quickstart: .venv/for-training
	$(BIN)/speculator train

# Heads of SmolLM2-135M-Instruct, trained and measured on a CPU in two and a quarter hours on two cores. Finished parts
# are kept and interrupted ones resume: type it again.
# Needs spec_bench.jsonl: https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl
REFERENCE ?= runs/reference
REFERENCE_TARGET ?= HuggingFaceTB/SmolLM2-135M-Instruct
REFERENCE_TRAIN_FLAGS ?=
reference_reports :=

$(REFERENCE)/text/manifest.json: | .venv/installed
	$(BIN)/python -m data generate --target $(REFERENCE_TARGET) --dtype bfloat16 --sources self --temperature 0 1 \
		--max_rows 2688 --max_prompt_tokens 160 --max_new_tokens 256 --batch_size 32 --output $(@D)

$(REFERENCE)/mlp/eval/report.json $(REFERENCE)/eagle3/eval/report.json: \
$(REFERENCE)/%/eval/report.json: $(REFERENCE)/text/manifest.json
	$(BIN)/python train.py --config configs/smollm2-135m-$*.yaml --target.name_or_path $(REFERENCE_TARGET) \
		--data.sources '["$(REFERENCE)/text"]' --output_dir $(REFERENCE)/$* $(REFERENCE_TRAIN_FLAGS)

# $(call reference_report,HEAD,NUMBER,SUITE,PROMPTS,FLAGS)
define reference_report
reference_reports += $(REFERENCE)/eval-$(1)-$(2)/report.json
$(REFERENCE)/eval-$(1)-$(2)/report.json: $(REFERENCE)/$(1)/eval/report.json
	$(BIN)/python -m eval --target $(REFERENCE_TARGET) --dtype bfloat16 --speculator $(REFERENCE)/$(1)/speculator \
		--suite $(3) --max_prompts $(4) --max_new_tokens 16 $(5) --output $$(@D)
endef
$(eval $(call reference_report,eagle3,1,spec_bench.jsonl,130,--baseline hf_prompt_lookup))
$(eval $(call reference_report,eagle3,2,openai/gsm8k/main:test,20,--baseline hf_prompt_lookup))
$(eval $(call reference_report,eagle3,3,openai/openai_humaneval:test,20,--baseline hf_prompt_lookup))
$(eval $(call reference_report,mlp,1,spec_bench.jsonl,26))
$(eval $(call reference_report,mlp,2,openai/gsm8k/main:test,4))
$(eval $(call reference_report,mlp,3,openai/openai_humaneval:test,4))

reference: $(reference_reports)

# Exported heads in other servers, each with its own environment (4 GB in all, kept). Servers that can't be installed
# are skipped.
SPECULATOR_SERVING ?= .venv-serving
serving: .venv/installed
	for part in speculators/installed vllm/installed vllm/plugin llama_cpp/server; do \
		$(MAKE) --no-print-directory $(SPECULATOR_SERVING)/$$part || true; done
	HF_HUB_CACHE=$${HF_HUB_CACHE:-$${HF_HOME:-$$HOME/.cache/huggingface}/hub} \
		REFERENCE_TARGET=$(REFERENCE_TARGET) SPECULATOR_SERVING=$(SPECULATOR_SERVING) $(BIN)/python -m pytest -q -rs -s tests/serving

# Remove packages that may come with another version of torch, which breaks the import; no test needs them.
$(SPECULATOR_SERVING)/%/installed: tests/serving/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

$(SPECULATOR_SERVING)/vllm/plugin: $(SPECULATOR_SERVING)/vllm/installed $(wildcard integrations/vllm/*.toml integrations/vllm/*/*.py)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall ./integrations/vllm
	touch $@

# llama.cpp's sources come with its Python binding; building them takes a quarter of an hour.
LLAMA_CPP = -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
	-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
$(SPECULATOR_SERVING)/llama_cpp/server: $(SPECULATOR_SERVING)/llama_cpp/installed
	$(@D)/bin/pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: \
		--dest $(@D) llama-cpp-python==0.3.36
	mkdir -p $(@D)/source
	tar xzf $(@D)/llama_cpp_python-0.3.36.tar.gz --strip-components 1 -C $(@D)/source
	PATH=$(abspath $(@D)/bin):$$PATH cmake -S $(@D)/source/vendor/llama.cpp -B $(@D)/source/build -G Ninja $(LLAMA_CPP)
	PATH=$(abspath $(@D)/bin):$$PATH cmake --build $(@D)/source/build --target llama-server
	touch $@

test: .venv/installed
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# The numerical tests again, as a processor without AVX-512 computes. Compiled code has a cache of its own: torch's does not
# tell the two processors apart, and what was compiled for AVX-512 skips values under AVX2.
kernels: .venv/installed
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	TORCHINDUCTOR_CACHE_DIR=$(abspath build/compiled-for-avx2) $(BIN)/python -m pytest -q -n 2 --dist worksteal \
		tests/speculator/target tests/speculator/heads tests/train/test_losses.py tests/train/test_overfit.py

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) docs
	$(MAKE) test

# The documentation's pages, in build/docs. A broken link or anchor is an error.
docs: .venv/installed
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs

# Long tests: kills, damaged files, memory growth, interrupts. They take under two hours on two cores. Run one part with
# `make soak PART=kills`, or whole journeys over a covering matrix, an hour of one core, with `make soak PART=matrix`.
soak: .venv/installed
	$(BIN)/python -m pytest -v -m soak -n 2 --dist loadfile tests -k "$(PART)"

# What to measure when a GPU is at hand, in eight minutes: runs/gpu/results.jsonl. Type it again for the rest. Nothing is
# installed: without .venv it runs in PYTHON's own environment (benchmarks/gpu.py lists the packages).
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu $(GPU_FLAGS)

# Without compiling all modules for Python, which takes as long as the rest: each is compiled when it is imported first.
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e

.venv/for-training: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) ".[train]"
	touch $@

.venv/installed: .venv/for-training
	$(INSTALL) ".[dev]"
	touch $@
