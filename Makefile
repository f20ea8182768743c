# Every target sets up .venv by itself; the second run starts at once. Another interpreter: make PYTHON=python3.12 demo
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
# The oldest Triton that the kernels support, in a folder that goes before the one of .venv, which is newer.
OLDEST_TRITON := 3.6.0
OLDEST := $(VENV)/triton-$(OLDEST_TRITON)
ARGS   ?=
TESTED := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q
INTERPRETED := TRITON_INTERPRET=1 PYTHONPATH=$(OLDEST) $(TESTED) -p no:cacheprovider tests/triton -m interpreter

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest-triton compile-all gpu-record check clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and f"tilefold needs Python 3.10 or newer; $(PYTHON) is {v}. Try: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV), once; this takes a minute or a few ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## train, verify, measure and sample on this machine (options: make demo ARGS="--device cuda")
	@$(BIN)/python -m tilefold.demo $(ARGS)

test: $(OLDEST)/.ready  ## run the tests that need neither a GPU nor patience (options: make test ARGS="-k masks")
	@# Test tensors are small: more threads would wait for each other longer than they work. The kernels are
	@# interpreted in a process of its own, beside the other tests; what it says comes behind what these say.
	@$(if $(ARGS),,$(INTERPRETED) > $(VENV)/interpreted.txt 2>&1 & beside=$$!;) \
	$(TESTED) $(ARGS); status=$$?; \
	$(if $(ARGS),,wait $$beside || status=$$?; echo "The kernels, interpreted:"; cat $(VENV)/interpreted.txt;) \
	exit $$status
	@$(BIN)/python benchmarks/gpu_record.py --check || true

# Where Triton cannot be had, its tests are skipped.
$(OLDEST)/.ready: $(STAMP) Makefile
	@rm -rf $(OLDEST)
	@$(BIN)/python -m pip install --quiet --no-deps --target $(OLDEST) 'triton==$(OLDEST_TRITON); sys_platform == "linux"'
	@mkdir -p $(OLDEST) && touch $@

test-oldest-triton: $(OLDEST)/.ready  ## compile the Triton kernels with the oldest supported Triton
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -q tests/triton/test_ahead.py tests/hopper/test_ahead.py $(ARGS)

gpu-record: $(STAMP)  ## run the GPU suite on this machine and record it (options: make gpu-record ARGS="--limit 3000")
	@$(BIN)/python benchmarks/gpu_record.py $(ARGS); status=$$?; $(BIN)/python benchmarks/readme_tables.py; exit $$status

compile-all: $(STAMP)  ## compile every kernel for every architecture (half an hour)
	$(BIN)/python -m pytest -q tests/triton/test_ahead.py tests/hopper/test_ahead.py -m "slow or not slow" $(ARGS)

check: $(STAMP)  ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --warnings --pythonpath $(BIN)/python

clean:  ## remove .venv and every cache
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
