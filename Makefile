# Two commands, each from a fresh clone with only Python >= 3.10 and make.
#   make reproduce   install, execute the notebooks, train what has no record, build _site/, print the headline table
#   make reproduce-all   the same, and train the long experiments too, whose outputs are kept in nbs/
#   make test        install, check that notebooks and package are in step, run the quick tests of both: minutes on two cores
#   make quick       its first half, for every change: lint, in step, the package's quick tests; within five minutes
#   make test-slow   every cell of the notebooks, those marked `#| slow` too, and the tests marked slow; make test-all: both
#   make gpu         on a GPU, within GPU_MINUTES: checks, step times, part of Table 4, into OUT; DEVICE=cpu: in small, without one
#   make pages       execute the notebooks that are stale and keep their outputs in nbs/
PYTHON  ?= python3
PROFILE ?= digits
VENV    := .venv
BIN     := $(VENV)/bin

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Where this is set nothing keeps compiled modules, and every notebook's kernel compiles PyTorch again: ten seconds instead of four
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install reproduce reproduce-all quick test test-slow test-all bench readme pages gpu gpu-wheels clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(VENV)/installed

$(VENV)/installed: settings.ini setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else f"Python must be >= 3.10, got {sys.version.split()[0]}; say which with PYTHON=...")'
	@echo "Installing into $(VENV) (the first time this downloads PyTorch, a few GB) ..."
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear --upgrade-deps $(VENV)
	@$(BIN)/python -m pip install --quiet --no-compile --editable '.[all]'
	@touch $@

reproduce: install
	@$(BIN)/dp-companion reproduce --profile $(PROFILE)

reproduce-all: install
	@$(BIN)/dp-companion reproduce --profile $(PROFILE) --all

quick: install
	@$(BIN)/ruff check .
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test: quick
	@$(BIN)/nbdev_test --n_workers 2

test-slow: install
	@$(BIN)/nbdev_test --n_workers 2 --flags slow
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m slow --durations 20

test-all: test test-slow

bench: install
	@for script in tests/bench/*.py; do $(BIN)/python $$script; done

clean:
	rm -rf _site _proc _docs build dist *.egg-info

readme: install
	@$(BIN)/python -c 'from pathlib import Path; from dp_companion.site.notebooks import readme_text; Path("README.md").write_text(readme_text("nbs/index.ipynb"), encoding="utf-8")'

# After a change of a notebook or a module: execute stale pages on both cores. Each page's outputs are in nbs/ as soon as it is finished;
# a page that fails loses no other, and the same command goes on where it stopped.
pages: install
	@$(BIN)/nbdev_export
	@$(BIN)/python -c 'from dp_companion.site.notebooks import refresh_pages; refresh_pages()'
	@$(BIN)/nbdev_clean
	@$(MAKE) --no-print-directory readme

# On a machine that has Python and torch: what it lacks comes from gpu_wheels/, which `make gpu-wheels` fills where a registry is at hand
DEVICE      ?= cuda
GPU_MINUTES ?= 8
OUT         ?= gpu_results

gpu:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) workflow/gpu.py --device $(DEVICE) --minutes $(GPU_MINUTES) --out $(OUT)

gpu-wheels:
	@PIP="$(PYTHON) -m pip" workflow/gpu_wheels.sh gpu_wheels
