# Every command of the project; `make help` lists them. Each target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-demo

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-wheel test-trl test-quantized lint mutants fuzz bench experiments papers notebooks matrix docs gpu-check clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(STAMP)  ## make .venv with everything pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@

# The command line alone, unless everything is there already.
$(DEMO): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -e $(STAMP) || $(BIN)/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt --editable ".[cli]"
	touch $@

demo: $(DEMO)  ## train a network privately on handwritten digits, and a linear model beside it (under two minutes with the installation); report in reports/demo
	$(BIN)/python -m ghostclip train --model oriented --data digits --report reports/demo

# Each of the many processes that tests start imports torch in half the time if bytecode is kept, which an environment
# may forbid.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test test-all: export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache

test: install  ## the test suite, in two processes (4 to 7 minutes on two cores)
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist worksteal

test-all: install  ## the test suite with the long checks
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-wheel: install  ## build the wheel, test it where no C compiler is, and time its kernels beside none and those compiled here
	$(BIN)/python experiments/wheel.py

test-trl: install  ## the tests of TRL's trainers with the oldest TRL of the range, 1.0
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --no-deps --upgrade --target $(VENV)/oldest-trl "trl==1.0.0"
	PYTHONPATH=$(VENV)/oldest-trl $(BIN)/python -m pytest tests/integrations/test_trl.py tests/integrations/test_trl_refusals.py

test-quantized: install  ## the tests of adapters on weights in four and eight bits, by bitsandbytes
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --no-deps --upgrade --target $(VENV)/quantized "bitsandbytes==0.50.2"
	PYTHONPATH=$(VENV)/quantized $(BIN)/python -m pytest tests/clipper/test_quantized.py

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: install  ## plant bugs in a copy of the package, one at a time: which test finds each (half an hour)
	$(BIN)/python experiments/mutants.py

fuzz: install  ## random models, neighbouring pairs and collated data sets for an hour on two processes; FUZZ="--seconds 60" for less
	OMP_NUM_THREADS=1 $(BIN)/python experiments/fuzz.py --seconds 3600 --processes 2 $(FUZZ)

CONTENDERS := nonprivate,nonprivate-compiled,reweight,cached,per-layer,compiled,nxbp,opacus-ghost,opacus-hooks,opacus-functorch,fastdp,vmap,vmap-compiled,jax
BACKWARD := reweight-backward,cached-backward,per-layer-backward
bench: install  ## step times and memory beside non-private training and other libraries (an hour); writes the tables
	$(BIN)/python -m experiments.peers --seconds 25 --contenders $(CONTENDERS) --memory \
		--out experiments/results/bench.json $(BENCH)
	$(BIN)/python -m experiments.peers --seconds 4 --threads 2 --contenders nonprivate,reweight,cached,per-layer \
		--out experiments/results/bench-two-threads.json $(BENCH)
	$(BIN)/python -m experiments.peers --seconds 8 --workloads sizes --contenders nonprivate,reweight,cached,per-layer \
		--out experiments/results/bench-sizes.json $(BENCH)
	$(BIN)/python -m experiments.peers --seconds 6 --contenders nonprivate,$(BACKWARD) --memory nonprivate,$(BACKWARD) \
		--out experiments/results/bench-backward.json $(BENCH)
	$(BIN)/python experiments/readme_table.py

experiments: install  ## rerun every script behind a published figure
	for script in $(filter-out experiments/matrix.py,$(wildcard experiments/*.py)); do OMP_NUM_THREADS=1 $(BIN)/python $$script || exit 1; done

# The list of their results comes last.
PAPERS := $(filter-out index,$(basename $(notdir $(shell grep -l '__name__ == "__main__"' experiments/papers/*.py))))
papers: install  ## compute published claims anew, each in a small setting (under 40 minutes); PAPERS=epsilons for one
	for script in $(PAPERS) index; do OMP_NUM_THREADS=1 $(BIN)/python -m experiments.papers.$$script || exit 1; done

notebooks: install  ## execute the notebooks in place
	$(BIN)/python notebooks/execute.py

matrix: install  ## test the wheel with each Python and torch here; MATRIX=--download also those with CUDA's packages
	$(BIN)/python experiments/matrix.py $(MATRIX)

docs: install  ## build the documentation as a site in site/, with warnings as errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open site/index.html; mkdocs serve shows pages while they are written"

# Two calls: the large models, where compilation would take most of the time, then the small ones, compiled too. Inductor
# and CUDA have threads of their own, which one core would hold up.
gpu-check: RESULTS := $(or $(OUT),experiments/results)
gpu-check:  ## CUDA exactness, then the GPU benchmark; uses the machine's own python3, installs nothing
	python3 -m pytest -p no:cacheprovider tests/gpu
	python3 -m experiments.peers --device cuda --threads 8 --seconds 4 --minutes 3 --out $(RESULTS)/gpu.json \
		--workloads lstm-imdb,gpt2-124m,vit-b16,resnet50-224px --memory nonprivate,reweight,cached \
		--contenders nonprivate,reweight,cached,per-layer,nxbp,opacus-hooks,opacus-ghost,fastdp
	python3 -m experiments.peers --device cuda --threads 8 --seconds 2 --minutes 2 --out $(RESULTS)/gpu-small.json \
		--workloads mlp,cnn,embedding,lstm,transformer,fcnn-adult,cifar-cnn,rnn \
		--contenders nonprivate,nonprivate-compiled,reweight,cached,per-layer,compiled,nxbp,vmap,opacus-ghost

clean:  ## remove what the other commands made
	rm -rf $(VENV) build dist reports site .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
