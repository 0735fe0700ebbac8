# Every command of the project; `make help` lists them. Each target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint bench experiments notebooks gpu-check clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(STAMP)  ## make .venv with everything pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install  ## train a CNN privately on handwritten digits; report in reports/demo
	$(BIN)/python -m ghostclip train --model cnn --data digits --report reports/demo

test: install  ## the test suite (a few minutes)
	$(BIN)/python -m pytest -m "not slow"

test-all: install  ## the test suite with the long checks
	$(BIN)/python -m pytest

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install  ## step times beside non-private training and the naive loop, one core
	OMP_NUM_THREADS=1 $(BIN)/python -m ghostclip.bench --out experiments/results/bench.json
	$(BIN)/python experiments/readme_table.py

experiments: install  ## rerun every script behind a published figure
	for script in experiments/*.py; do OMP_NUM_THREADS=1 $(BIN)/python $$script || exit 1; done

notebooks: install  ## execute the notebooks in place
	$(BIN)/python notebooks/execute.py

gpu-check:  ## CUDA exactness, then the GPU benchmark; uses the machine's own python3, installs nothing
	python3 -m pytest -p no:cacheprovider tests/gpu
	python3 -m ghostclip.bench --device cuda --seconds 8 --out $${OUT:-experiments/results}/gpu.json

clean:  ## remove what the other commands made
	rm -rf $(VENV) build dist reports .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
