# Needs Python 3.11 to 3.14, Java 17 or newer, and make. Everything else is installed into .venv and ~/.cache.
.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READERS := $(VENV)/.readers
MUTMUT := build/mutmut
PARALLEL := --numprocesses logical --maxprocesses 4 --dist loadgroup --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: machine
machine:
	@test -n "$(PYTHON)" || { echo "pgcdc: Python is not installed; install Python 3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
	  || { echo "pgcdc: $(PYTHON) is `$(PYTHON) -V 2>&1`; give Python 3.11 to 3.14: make PYTHON=..." >&2; exit 1; }
	@test -w . || { echo "pgcdc: no write access to `pwd`; run make in a checkout that you can write to" >&2; exit 1; }
	@command -v $${JAVA_HOME:+$$JAVA_HOME/bin/}java >/dev/null 2>&1 \
	  || { echo "pgcdc: Java is not installed; install Java 17, or set JAVA_HOME" >&2; exit 1; }

$(READY): requirements.lock pyproject.toml | machine
	@$(PYTHON) -m venv $(VENV) || { echo "pgcdc: cannot create a virtual environment; install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock \
	  || { echo "pgcdc: cannot install packages; the first run needs internet access" >&2; exit 1; }
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(READERS): tests/readers.lock | $(READY)
	@$(BIN)/python -m pip install --quiet --require-hashes --requirement tests/readers.lock \
	  || { echo "pgcdc: cannot install packages; the first run needs internet access" >&2; exit 1; }
	@touch $@

.PHONY: readers
readers: install $(READERS) ## Install other engines that read mirrors, for the long tests (300 MB)

.PHONY: install
install: machine $(READY) ## Create the virtual environment .venv with the locked packages

.PHONY: demo
demo: install ## Copy and follow a live sample shop, then compare every table
	@$(BIN)/pgcdc demo

.PHONY: up
up: install ## Run Dagster's UI and daemon, with the sensor on
	@test -f pgcdc.yaml || export PGCDC_SOURCE="$${PGCDC_SOURCE:-embedded}"; $(BIN)/pgcdc up

.PHONY: test
test: install ## Run the default tests (8 minutes on two cores)
	@$(BIN)/python -m pytest $(PARALLEL)

.PHONY: test-long
test-long: readers ## Run all tests, also the long ones (about an hour on two cores)
	@$(BIN)/python -m pytest $(PARALLEL) --run-long --hypothesis-profile=new_examples --durations=60

.PHONY: test-crash
test-crash: N ?= 100
test-crash: install ## Kill processes at every durable step: the receiver N=100 times, a whole run N/4 times
	@PGCDC_TEST_CRASH_CYCLES=$(N) PGCDC_TEST_SEED=$(SEED) $(BIN)/python -m pytest tests/crash --run-long \
	  --log-file=build/crash.log --log-file-level=INFO
	@echo "build/crash.md"

.PHONY: test-power
test-power: N ?= 100
test-power: install ## Simulate N=100 power cuts: lose unsynced files, recover the lake, read every consistent point
	@PGCDC_TEST_POWER_IMAGES=$(N) PGCDC_TEST_SEED=$(SEED) $(BIN)/python -m pytest tests/power -s --run-long

.PHONY: test-cluster
test-cluster: install ## Start a Spark master and two workers as processes, and kill executors
	@$(BIN)/python -m pytest tests/cluster --run-long

.PHONY: overrides
overrides: install ## Break the code for each promise, and check that the promise's test fails (20 minutes)
	@$(BIN)/python -m tests.overrides.run $(ONLY)

# mutmut is not in requirements.lock. It gets a separate virtual environment, which also finds the packages of .venv.
$(MUTMUT)/.ready: | $(READY)
	@$(BIN)/python -m venv $(MUTMUT)
	@$(MUTMUT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(MUTMUT)/folder
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "`cat $(MUTMUT)/folder`/checkout.pth"
	@$(MUTMUT)/bin/python -m pip install --quiet mutmut==3.8.1 \
	  || { echo "pgcdc: cannot install mutmut; the first run needs internet access" >&2; exit 1; }
	@touch $@

.PHONY: mutation
mutation: install $(MUTMUT)/.ready ## Test mutants of the pure packages (hours; some: ONLY="pgcdc_assets.core.lsn*")
	@$(MUTMUT)/bin/mutmut run --max-children 2 $(ONLY)
	@$(MUTMUT)/bin/mutmut results

.PHONY: bench
bench: install ## Measure rates, latency and growth, and compare with PostgreSQL's tools (2 hours): build/bench
	@$(BIN)/python -m bench --workloads W1,W2,W3,W4,W6,L,S1,S2,S3,S4

.PHONY: bench-small
bench-small: install ## Measure only rates, with a twentieth of the data (some minutes): build/bench
	@$(BIN)/python -m bench --scale 0.05 --repeat 1

.PHONY: docs
docs: install ## Build the documentation site: build/docs/index.html
	@$(BIN)/python -m docs.hooks.generated
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/docs/index.html"

.PHONY: check
check: install ## Run ruff, mypy and codespell
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/codespell

.PHONY: lock
lock: install ## Write the lock files again: of the checkout, the image and the other engines
	@$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --no-strip-extras --extra dev --no-emit-index-url \
	  --no-emit-find-links --no-emit-options --no-emit-trusted-host --output-file requirements.lock pyproject.toml
	@$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --no-strip-extras --extra deploy --no-emit-index-url \
	  --no-emit-find-links --no-emit-options --no-emit-trusted-host --constraint requirements.lock \
	  --output-file deploy/requirements.lock pyproject.toml
	@$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --no-strip-extras --no-emit-index-url \
	  --no-emit-find-links --no-emit-options --no-emit-trusted-host --constraint requirements.lock \
	  --output-file tests/readers.lock tests/readers.in

.PHONY: clean
clean: ## Delete the checkout's virtual environment, caches and build folder
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build mutants *.egg-info
