# Two commands, each from a fresh clone with only Python >= 3.10 and make.
#   make reproduce   install, execute the notebooks, train what has no record, build _site/, print the headline table
#   make reproduce-all   the same, and train the long experiments too, whose outputs are kept in nbs/
#   make test        install, check that notebooks and package are in step, run the quick tests of both: minutes on two cores
#   make test-slow   the cells marked `#| slow` (with the cells that they need) and the tests marked slow; make test-all: both
PYTHON  ?= python3
PROFILE ?= digits
VENV    := .venv
BIN     := $(VENV)/bin

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Where this is set nothing keeps compiled modules, and every notebook's kernel compiles PyTorch again: ten seconds instead of four
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install reproduce reproduce-all test test-slow test-all bench readme pages clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(VENV)/installed

$(VENV)/installed: settings.ini setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else f"Python must be >= 3.10, got {sys.version.split()[0]}; say which with PYTHON=...")'
	@echo "Installing into $(VENV) (the first time this downloads PyTorch, a few GB) ..."
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear --upgrade-deps $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	@touch $@

reproduce: install
	@$(BIN)/dp-companion reproduce --profile $(PROFILE)

reproduce-all: install
	@$(BIN)/dp-companion reproduce --profile $(PROFILE) --all

# Quick is what fits in five minutes. A slow cell is besides executed whenever its page is stale, and .ci/run runs everything.
test: install
	@$(BIN)/python -m pytest tests/test_in_step.py
	@$(BIN)/ruff check .
	@$(BIN)/nbdev_test --n_workers 2
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" --ignore tests/test_in_step.py

test-slow: install
	@$(BIN)/nbdev_test --n_workers 2 --flags slow
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

test-all: test test-slow

bench: install
	@for script in tests/bench/*.py; do $(BIN)/python $$script; done

clean:
	rm -rf _site _proc _docs build dist *.egg-info

readme: install
	@$(BIN)/python -c 'from pathlib import Path; from dp_companion.site.notebooks import readme_text; Path("README.md").write_text(readme_text("nbs/index.ipynb"), encoding="utf-8")'

# For whoever changes a notebook or a module: execute the stale pages, put their outputs into nbs/, and the README and the package in step
pages: install
	@$(BIN)/nbdev_export
	@$(BIN)/python -c 'from dp_companion.site.notebooks import refresh_pages; refresh_pages()'
	@$(BIN)/nbdev_clean
	@$(MAKE) --no-print-directory readme
