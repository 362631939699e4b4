# Two commands are all a newcomer needs: `make demo` and `make test`. Each makes .venv if it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
ECOSYSTEM := .venv-ecosystem
# A notice of mkdocs-material about versions to come.
export NO_MKDOCS_2_WARNING := 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test site thorough check bench compat ecosystem clean
.DEFAULT_GOAL := test

# torch first and alone: with it installed, nothing else asks for another build of it.
$(RUNTIME): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[trainer]"
	@touch $@

$(STAMP): $(RUNTIME)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

demo: $(RUNTIME)
	$(BIN)/symbiosis demo

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 -m "not thorough" $(TESTS)

# The documentation, with changes while files change.
site: $(STAMP)
	$(BIN)/mkdocs serve

# What `make test` does less of or leaves out: property tests with all examples, in place of a quarter, and long tests.
thorough: $(STAMP)
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest --numprocesses 2 -m "hypothesis or thorough" tests

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict

bench: $(STAMP)
	$(BIN)/symbiosis bench all --output docs/benchmarks.md

# Every model and PEFT method of the table, against plain transformers + PEFT.
compat: $(STAMP)
	$(BIN)/symbiosis compat --page docs/compatibility.md

$(ECOSYSTEM)/.installed: pyproject.toml constraints.txt tests/ecosystem/requirements.txt
	$(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(ECOSYSTEM)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[testing]" \
		--requirement tests/ecosystem/requirements.txt
	@touch $@

# TRL, lm-eval-harness and others on opened models, against plain runs. Their packages are not in .venv.
ecosystem: $(ECOSYSTEM)/.installed
	$(ECOSYSTEM)/bin/python -m tests.ecosystem

clean:
	rm -rf $(VENV) $(ECOSYSTEM) build dist site *.egg-info
