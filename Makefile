# Relatum's own commands. Each does its set-up first: an environment in .venv, and RabbitMQ's binary where it is missing.
#
#   make demo          publish, record and look up real data               (DEMO="--all" for its options)
#   make test          all tests, by five processes with servers of their own (PROCESSES=3; TEST="tests/unit": in one);
#                      .venv/suite.csv has what each file took
#   make test-long     the tests' long forms: thousands of look-ups, 50 kills, 1,000,000 rows (hours; before a release;
#                      it prints the seed of its deaths: TEST="--seed N" has them again)
#   make test-4        a part of the tests on a RabbitMQ 4, where one can be had
#   make test-docker   all tests, on the servers of docker/compose.yaml
#   make check         lint, format, types, arrows between rooms, twins, and the house in figures
#   make twins         write the blocking faces that are generated from asyncio ones
#   make docs          the documentation as a site, in .venv/site
#   make bench         the table of speeds                                 (BENCH="--help")
#   make bench-spark   the table of Spark's speeds                         (BENCH="--help")
#   make bench-short   some of the speeds beside those of the last run, in two minutes: prints, and never fails
#   make clean         remove what was made here

PYTHON ?= python3
DEMO ?=
TEST ?=
OPTIONS ?=
PROCESSES ?= 5
BENCH ?=

# Two thirds of a test is waiting: five at once keep two cores busy. What is run together, and first:
# tests/support/sharing_out.py.
SIDE_BY_SIDE := --numprocesses $(PROCESSES) --no-loadscope-reorder

bin := .venv/bin
made := .venv/.made
spark := .venv/.made-spark
site := .venv/docs/.made
wheel := .venv/.made-wheel
classes := .venv/spark-classes.jsa

# The wheel's modules come before those of the checkout: what is measured is what users install.
on_wheel := PYTHONPATH=$(CURDIR)/.venv/wheel $(bin)/python

# What RabbitMQ 4 does otherwise than 3.10 is met by these.
ON_4 := contract/test_reading.py contract/test_following.py \
  $(addprefix integration/test_,recorder.py relations.py receipts.py groups.py contexts.py)

# Nothing is written outside the checkout.
export TMPDIR := $(CURDIR)/.venv/tmp
export PIP_NO_CACHE_DIR := 1
export PYTHON
# Where the environment forbids compiled modules, each process of a test compiles SQLAlchemy anew, for a second or two.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long test-4 test-docker check docs twins bench bench-spark bench-short clean rabbitmq java pgbouncer chromium java-client
.DELETE_ON_ERROR:

demo: $(made) rabbitmq
	$(bin)/relatum demo $(DEMO)

test: $(classes) rabbitmq java java-client pgbouncer chromium
	$(bin)/python -u -m pytest $(or $(TEST),$(SIDE_BY_SIDE)) $(OPTIONS)

test-long: $(classes) rabbitmq java java-client pgbouncer chromium
	$(bin)/python -m pytest --long --override-ini timeout=21600 --override-ini faulthandler_timeout=0 $(TEST)

test-4: $(made)
	@if server=$$(tools/install-rabbitmq-4); then \
	  RELATUM_RABBITMQ_SERVER=$$server $(bin)/python -u -m pytest $(or $(TEST),$(SIDE_BY_SIDE) $(addprefix tests/,$(ON_4))); \
	fi

test-docker: $(classes) java pgbouncer chromium
	$(bin)/python -m pytest --docker --override-ini timeout=900 --override-ini faulthandler_timeout=0 $(TEST)

check: $(spark)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports
	$(bin)/python tools/measure-house --check
	$(bin)/python tools/make-twins --check

twins: $(made)
	$(bin)/python tools/make-twins

# Links and anchors are checked. To read it with its search: .venv/docs/bin/python -m http.server --directory .venv/site
docs: $(site)
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --strict --quiet
	@echo "The site is in .venv/site/index.html"

bench: $(wheel) rabbitmq
	$(on_wheel) -m benchmarks $(BENCH)

bench-spark: $(spark) $(wheel) rabbitmq java
	$(on_wheel) -m benchmarks.spark $(BENCH)

# It ends by itself after 95 s, and at the latest so.
bench-short: $(wheel) rabbitmq
	-timeout --signal=KILL 118 env $(on_wheel) -m benchmarks --short $(BENCH)

clean:
	rm -rf .venv .servers dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

rabbitmq:
	@tools/install-rabbitmq

java:
	@tools/install-java

java-client:
	@tools/install-java-client

pgbouncer:
	@tools/install-pgbouncer

chromium:
	@tools/install-chromium

$(made): pyproject.toml tools/make-environment
	@mkdir -p .venv/tmp
	@tools/make-environment .venv
	@touch $@

# In a directory of its own: the environment runs the checkout.
$(wheel): $(made) tools/wheel_hook.py $(shell find plugin migrations consumer_api spark_connectors -type f -not -name '*.pyc')
	@rm -rf .venv/wheel
	@$(bin)/python -m pip --disable-pip-version-check install -q --no-deps --target .venv/wheel .
	@touch $@

# Spark is 400 MB to download: only what needs it waits for it.
$(spark): pyproject.toml tools/make-environment
	@mkdir -p .venv/tmp
	@tools/make-environment .venv spark
	@touch $(made) $@

# With Spark's classes at hand the tests' JVMs start by half the work.
$(classes): $(spark) | java
	$(bin)/python -m tests.support.spark_classes $@

# mkdocs reads the sources and imports nothing of them, so it has an environment of its own.
$(site): pyproject.toml tools/make-environment
	@mkdir -p .venv/tmp
	@tools/make-environment .venv/docs --group docs
	@touch $@
