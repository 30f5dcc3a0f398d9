# `make pretrain` goes from nothing to a trained small DeepLoop model; `make test` checks the project.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DATA   := data/python-stdlib
RUN    := runs/small

export DS_ACCELERATOR ?= $(shell $(BIN)/python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")' 2>/dev/null)

.PHONY: setup data pretrain test tensorboard

setup: $(VENV)/.installed
$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -r requirements.txt
	touch $@

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest
