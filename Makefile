# A fresh clone needs only Python and make: each target first sets up .venv, once.
PYTHON ?= python3
# Another place for the environment, such as one without a space in its path, where Inductor cannot link with torch.
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
BENCH_INSTALLED := $(VENV)/bench-installed
BROWSER_INSTALLED := $(VENV)/browser/package.json
DOCS_INSTALLED := $(VENV)/docs-installed
# Another version of torch than constraints.txt has, in an environment of its own: make test-torch TORCH=2.11.0
TORCH ?=
OTHER := .venv-torch-$(TORCH)
# An interpreter that has torch for its GPU already, and what tests need, can be taken as it is: make gpu GPU_PYTHON=python3
GPU_PYTHON ?=
# Some parts of it, and the folder for logs and the tar: make gpu GPU_PARTS="probes tests" GPU_OUT=build/gpu
GPU_PARTS ?=
GPU_OUT ?=
ON_GPU = PYTHONPATH="$(CURDIR)" $(or $(GPU_PYTHON),$(BIN)/python)

# Packages are installed without bytecode: it must be written when they are imported first, and not anew each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-torch lint style types soak bench gpu browser docs clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile

demo: $(INSTALLED) ## train a small network on one CPU and two GPUs, real or emulated
	$(BIN)/autosched demo

test: style ## check style and types, and run all tests and the examples in docstrings and documents
	@$(MAKE) --no-print-directory types & types=$$!; \
	echo '$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"'; $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"; tests=$$?; \
	wait $$types && exit $$tests

test-torch: $(OTHER)/installed ## run all tests with another version of torch: make test-torch TORCH=2.11.0
	$(OTHER)/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

lint: style types ## check style and types

style: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/mypy --strict autosched

soak: $(INSTALLED) ## try to break tens of thousands of programs, then all tests, with a thousand examples each
	$(BIN)/python benchmarks/soak.py --write
	$(BIN)/python benchmarks/soak_loops.py --write
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=deep

bench: $(BENCH_INSTALLED) ## run every benchmark, in its quick form
	@set -e; for script in $(sort $(wildcard benchmarks/[a-z]*.py)) benchmarks/planning; do $(BIN)/python $$script --quick; done

gpu: $(if $(GPU_PYTHON),,$(INSTALLED)) ## on a machine with a GPU: the tests that need one, its benchmarks and their report
	@$(ON_GPU) -c 'import sys, torch; torch.accelerator.is_available() or sys.exit("make gpu: there is no GPU here that torch can use. To run its benchmarks in small on the CPU: python benchmarks/gpu --rehearse")'
	$(ON_GPU) benchmarks/gpu/sequence.py $(if $(GPU_OUT),--out "$(GPU_OUT)") $(GPU_PARTS)

browser: $(BROWSER_INSTALLED) ## open pages and traces in a real browser without a display; needs node and npm
	$(BIN)/python -m pytest tests/viz/test_page.py tests/viz/test_perfetto.py

docs: $(DOCS_INSTALLED) ## bring the documents up to date with what their code prints, and build docs/_build/html
	$(BIN)/python docs/pages.py --notebook
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html

clean: ## remove .venv and all that was built or cached
	rm -rf $(VENV) .venv-torch-* docs/_build build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("autosched needs Python 3.11 or newer and this is %d.%d; name another: make PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[demo,exact,hf,lint,test,viz]'
	@touch $@

$(OTHER)/installed: setup.cfg pyproject.toml constraints.txt
	@$(if $(TORCH),,$(error make test-torch needs a version of torch, for example: make test-torch TORCH=2.11.0))
	$(PYTHON) -m venv $(OTHER)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --constraint $(OTHER)/constraints.txt --editable '.[demo,exact,hf,test,viz]'
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

$(BROWSER_INSTALLED): tests/browser/package.json $(INSTALLED)
	@mkdir -p $(@D)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	npm install --prefix $(@D) --silent --no-save $$(sed -n 's/^    "\(.*\)": "\([0-9.]*\)",*$$/\1@\2/p' $<)
	@cp $< $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@
