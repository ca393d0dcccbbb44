# Needs Python 3.11 (to 3.14), Java 17 or newer, and make. All else is installed into .venv and a cache.
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
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.PHONY: machine
machine:
	@test -n "$(PYTHON)" || { echo "pgcdc: Python is not installed; install Python 3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
	  || { echo "pgcdc: $(PYTHON) is `$(PYTHON) -V 2>&1`; install Python 3.11 or name one: make PYTHON=..." >&2; exit 1; }
	@test -w . || { echo "pgcdc: no write access to `pwd`; run make in a folder of your own" >&2; exit 1; }
	@command -v $${JAVA_HOME:+$$JAVA_HOME/bin/}java >/dev/null 2>&1 \
	  || { echo "pgcdc: Java is not installed; install Java 17, or set JAVA_HOME" >&2; exit 1; }

$(READY): requirements.lock pyproject.toml | machine
	@$(PYTHON) -m venv $(VENV) || { echo "pgcdc: no virtual environment could be made; install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements.lock \
	  || { echo "pgcdc: packages could not be installed; the first use needs the network" >&2; exit 1; }
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(READERS): tests/readers.lock | $(READY)
	@$(BIN)/python -m pip install --quiet --require-hashes --requirement tests/readers.lock \
	  || { echo "pgcdc: packages could not be installed; the first use needs the network" >&2; exit 1; }
	@touch $@

.PHONY: readers
readers: install $(READERS) ## Other engines that read mirrors, for tests (300 MB)

.PHONY: install
install: machine $(READY) ## A virtual environment with all that is needed

.PHONY: demo
demo: install ## PostgreSQL into Delta tables in one go, with proof at the end
	@$(BIN)/pgcdc demo

.PHONY: up
up: install ## Dagster's UI with the sensor on
	@test -f pgcdc.yaml || export PGCDC_SOURCE="$${PGCDC_SOURCE:-embedded}"; $(BIN)/pgcdc up

.PHONY: test
test: install ## The default tests (8 minutes on two cores)
	@$(BIN)/python -m pytest $(PARALLEL)

.PHONY: test-long
test-long: readers ## All tests, the long ones too (about an hour on two cores)
	@$(BIN)/python -m pytest $(PARALLEL) --run-long --durations=60

.PHONY: test-crash
test-crash: N ?= 100
test-crash: install ## Crashes at every durable step: N=100 cycles of the receiver, N/4 of whole runs, the command at each
	@PGCDC_TEST_CRASH_CYCLES=$(N) PGCDC_TEST_SEED=$(SEED) $(BIN)/python -m pytest tests/crash --run-long \
	  --log-file=build/crash.log --log-file-level=INFO
	@echo "build/crash.md"

.PHONY: test-power
test-power: N ?= 100
test-power: install ## Power cuts: N=100 images that lose what was not synced, each recovered and read at every point
	@PGCDC_TEST_POWER_IMAGES=$(N) PGCDC_TEST_SEED=$(SEED) $(BIN)/python -m pytest tests/power -s --run-long

.PHONY: test-cluster
test-cluster: install ## A Spark master and two workers as processes: executors killed, archives, secrets, an S3 server
	@$(BIN)/python -m pytest tests/cluster --run-long

.PHONY: overrides
overrides: install ## Each promise taken out of the code, and its test that must fail (some 20 minutes)
	@$(BIN)/python -m tests.overrides.run $(ONLY)

# Not among the locked packages, which it takes from the virtual environment where it can.
$(MUTMUT)/.ready: | $(READY)
	@$(BIN)/python -m venv $(MUTMUT)
	@$(MUTMUT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(MUTMUT)/folder
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "`cat $(MUTMUT)/folder`/checkout.pth"
	@$(MUTMUT)/bin/python -m pip install --quiet mutmut==3.8.1 \
	  || { echo "pgcdc: mutmut could not be installed; the first use needs the network" >&2; exit 1; }
	@touch $@

.PHONY: mutation
mutation: install $(MUTMUT)/.ready ## Mutants of the pure packages (hours; ONLY="pgcdc_assets.core.lsn*" for some)
	@$(MUTMUT)/bin/mutmut run --max-children 2 $(ONLY)
	@$(MUTMUT)/bin/mutmut results

.PHONY: bench
bench: install ## Rates, latency and growth beside PostgreSQL's own tools (some two hours): build/bench
	@$(BIN)/python -m bench --workloads W1,W2,W3,W4,W6,L,S1,S2,S3,S4

.PHONY: bench-small
bench-small: install ## The rates alone, at a twentieth of the size (some minutes): build/bench
	@$(BIN)/python -m bench --scale 0.05 --repeat 1

.PHONY: docs
docs: install ## The documentation as a site: build/docs/index.html
	@$(BIN)/python -m docs.hooks.generated
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/docs/index.html"

.PHONY: check
check: install ## ruff, mypy and codespell
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/codespell

.PHONY: lock
lock: install ## Lock the dependencies anew, those of the image too
	@$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --no-strip-extras --extra dev --no-emit-index-url \
	  --no-emit-find-links --no-emit-options --no-emit-trusted-host --output-file requirements.lock pyproject.toml
	@$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --no-strip-extras --extra deploy --no-emit-index-url \
	  --no-emit-find-links --no-emit-options --no-emit-trusted-host --constraint requirements.lock \
	  --output-file deploy/requirements.lock pyproject.toml
	@$(BIN)/pip-compile --quiet --generate-hashes --allow-unsafe --no-strip-extras --no-emit-index-url \
	  --no-emit-find-links --no-emit-options --no-emit-trusted-host --constraint requirements.lock \
	  --output-file tests/readers.lock tests/readers.in

.PHONY: clean
clean: ## Removes the virtual environment and caches of the checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build mutants *.egg-info
