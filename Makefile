# Every target sets up .venv by itself; the second run starts at once. Another interpreter: make PYTHON=python3.12 demo
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help demo test check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and f"tilefold needs Python 3.10 or newer; $(PYTHON) is {v}. Try: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV), once; this takes a minute or a few ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## train, verify, measure and sample on this machine (options: make demo ARGS="--device cuda")
	@$(BIN)/python -m tilefold.demo $(ARGS)

test: $(STAMP)  ## run the tests that need neither a GPU nor patience (options: make test ARGS="-k masks")
	@# Test tensors are small: more threads would wait for each other longer than they work.
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q $(ARGS)

check: $(STAMP)  ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings --pythonpath $(BIN)/python

clean:  ## remove .venv and every cache
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
