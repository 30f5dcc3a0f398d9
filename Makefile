# `make pretrain` goes from nothing to a trained small DeepLoop model; `make test` checks the project.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DATA   := data/python-stdlib
RUN    := runs/small
ARGS   ?=

.PHONY: setup setup-dev data pretrain test tensorboard

setup: $(VENV)/.installed
$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -r requirements.txt
	touch $@

setup-dev: $(VENV)/.installed-dev
$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check -r requirements-dev.txt
	touch $@

# The corpus is the standard library of the machine's own Python; nothing is downloaded.
data: $(DATA)/manifest.json
$(DATA)/manifest.json: | setup
	$(BIN)/python -m data_prep train-tokenizer --source python-stdlib --vocab-size 1024 --out $(DATA)/tokenizer.model
	$(BIN)/python -m data_prep tokenize --source python-stdlib --tokenizer $(DATA)/tokenizer.model \
		--out $(DATA) --validation-fraction 0.05

# All GPUs, or two ranks on the CPU. ARGS="train.steps=1000" changes values of the YAML.
pretrain: setup data
	@if [ "$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())')" -gt 0 ]; then \
		$(BIN)/deepspeed pretrain/run.py --ds_config ds_configs/zero2_bf16.json \
			--config pretrain/configs/small.yaml out=$(RUN) data.path=$(DATA) $(ARGS); \
	else \
		OMP_NUM_THREADS=$$(( ($$(nproc) + 1) / 2 )) $(BIN)/deepspeed --num_gpus 2 pretrain/run.py \
			--ds_config ds_configs/zero2_bf16_cpu.json --config pretrain/configs/small.yaml \
			out=$(RUN) data.path=$(DATA) train.micro_batch_size=8 $(ARGS); \
	fi

# On localhost only: TensorBoard has no password.
tensorboard: setup
	$(BIN)/tensorboard --host 127.0.0.1 --logdir runs

test: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest
