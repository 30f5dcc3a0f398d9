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
	$(BIN)/python -m data_prep train-tokenizer --source python-stdlib --vocab-size 384 --out $(DATA)/tokenizer.model
	$(BIN)/python -m data_prep tokenize --source python-stdlib --tokenizer $(DATA)/tokenizer.model \
		--out $(DATA) --validation-fraction 0.05

# All GPUs, or two ranks on the CPU; about 16 sequences a step. ARGS="train.steps=1000" changes values of the YAML.
pretrain: setup data
	@ranks=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())'); ds_config=zero2_bf16; \
	if [ $$ranks -eq 0 ]; then \
		ranks=2; ds_config=zero2_bf16_cpu; export OMP_NUM_THREADS=$$(( ($$(nproc) + 1) / 2 )); \
	fi; \
	micro=$$(( (16 + ranks - 1) / ranks )); \
	$(BIN)/deepspeed --num_gpus $$ranks pretrain/run.py --ds_config ds_configs/$$ds_config.json \
		--config pretrain/configs/small.yaml out=$(RUN) data.path=$(DATA) \
		train.micro_batch_size=$$micro train.global_batch_size=$$(( micro * ranks )) $(ARGS)

# On localhost only: TensorBoard has no password.
tensorboard: setup
	$(BIN)/tensorboard --host 127.0.0.1 --logdir runs

test: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest
