# Relatum's own commands. Each does its set-up first: an environment in .venv, and RabbitMQ's binary where it is missing.
#
#   make demo          publish, record and look up real data               (DEMO="--all" for its options)
#   make test          all tests, on private servers                       (TEST="tests/unit -k chunk")
#   make test-docker   all tests, on the servers of docker/compose.yaml
#   make check         lint, format, types, arrows between packages
#   make bench         the table of speeds                                 (BENCH="--help")
#   make clean         remove what was made here

PYTHON ?= python3
DEMO ?=
TEST ?=
BENCH ?=

bin := .venv/bin
made := .venv/.made

# Nothing is written outside the checkout.
export TMPDIR := $(CURDIR)/.venv/tmp
export PIP_NO_CACHE_DIR := 1
export PYTHON

.PHONY: demo test test-docker check bench clean rabbitmq
.DELETE_ON_ERROR:

demo: $(made) rabbitmq
	$(bin)/relatum demo $(DEMO)

test: $(made) rabbitmq
	$(bin)/python -m pytest $(TEST)

test-docker: $(made)
	$(bin)/python -m pytest --docker $(TEST)

check: $(made)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports

bench: $(made) rabbitmq
	$(bin)/python -m benchmarks $(BENCH)

clean:
	rm -rf .venv .servers dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

rabbitmq:
	@tools/install-rabbitmq

$(made): pyproject.toml tools/make-environment
	@mkdir -p .venv/tmp
	@tools/make-environment .venv
	@touch $@
