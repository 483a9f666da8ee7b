# `make demo` and `make test` need Python >= 3.12 somewhere, make and a package index; they bring the rest.
SHELL := /bin/bash
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .uv/bin/uv)
RUN := .venv/bin
STAMP := .venv/.forebay-setup
DEMO_RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: setup demo test lint types unit format benchmarks clean

setup: $(STAMP)

# The interpreter of .python-version where there is one, otherwise any that the project supports.
$(STAMP): pyproject.toml uv.lock .python-version $(if $(filter .uv/%,$(UV)),$(UV))
	@python=$$($(UV) python find --no-python-downloads 2>/dev/null \
	  || $(UV) python find --no-python-downloads --no-config --no-project '>=3.12' 2>/dev/null) \
	  || { echo 'forebay needs Python 3.12 or newer: install it and run make again' >&2; exit 2; }; \
	$(UV) sync --locked --no-python-downloads --python "$$python" --extra dev --extra train --extra aot
	@touch $@

.uv/bin/uv:
	@for python in python3.12 python3.13 python3.14 python3; do \
	  if $$python -m venv .uv >/dev/null 2>&1; then break; fi; done; \
	.uv/bin/python -m pip install --quiet --disable-pip-version-check uv

demo: setup
	$(RUN)/forebay train --config configs/demo.yaml --run_dir $(DEMO_RUN)
	$(RUN)/forebay compile --config configs/demo.yaml --hardware h200 --devices 8

test: lint types unit

lint: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

types: setup
	$(RUN)/pyright

unit: setup
	$(RUN)/pytest

format: setup
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

clean:
	rm -rf .venv .uv .pytest_cache .ruff_cache .hypothesis
