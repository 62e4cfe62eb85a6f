# Each target first installs what it needs, and nothing else: Python packages in .venv, with uv, and missing system
# packages, with apt-get. Only the latter are written outside the checkout.
#
#   make demo          publish, record and look up real data   (WEB=1: then in a browser; DEMO="--help" for its options)
#   make test          test every capability, in five processes with their own servers (PROCESSES=3;
#                      TEST="tests/unit": in one); .venv/suite.csv lists the time of each file
#   make test-all      what `make test` leaves out: test-spark, test-release, and tests that rarely fail
#   make test-spark    Spark in separate Java processes: a cluster, Spark Connect, programs
#   make test-release  the wheel, compiled and pure, as users install it
#   make test-long     the long variants: thousands of lookups, 1,000,000 rows, and 20 minutes of kills, freezes and
#                      cut connections for each engine (hours; before a release; TEST="--seed N" repeats a run)
#   make test-4        some of the tests on RabbitMQ 4, if it can be installed
#   make test-docker   the same as `make test`, on the servers of docker/compose.yaml
#   make check         lint, format, types, imports between subsystems, and metrics of the code
#   make docs          the documentation as a site, in .venv/site
#   make bench         the benchmarks                                      (BENCH="--help")
#   make bench-spark   the benchmarks of Spark                             (BENCH="--help")
#   make bench-short   some benchmarks, compared with the last run, in two minutes: prints, and never fails
#   make clean         remove everything made here; system packages stay

PYTHON ?= python3
DEMO ?=
WEB ?=
TEST ?=
OPTIONS ?=
PROCESSES ?= 5
BENCH ?=

# Tests wait for two thirds of their time: five at once keep two cores busy. tests/support/sharing_out.py decides which
# run together, and which first.
SIDE_BY_SIDE := --numprocesses $(PROCESSES) --no-loadscope-reorder

# Markers of tests that are expensive and rarely fail; a file named in TEST is run completely.
LEFT_OUT := own_jvms or release or rare

bin := .venv/bin
wheel := .venv/wheel/.made
classes := .venv/spark-classes.jsa

# For named test files, install only what they mention: Spark is 600 MB, and the browser's driver 170.
named := $(filter tests/%,$(foreach each,$(TEST),$(firstword $(subst ::, ,$(each)))))
speaks-of = $(if $(named),$(shell grep -rqs -e '$(1)' $(named) && echo yes),yes)
browser := $(call speaks-of,playwright)
spark := $(call speaks-of,pyspark\|pyarrow\|relatum_spark\|support.*spark\|support.decoding)
lint := $(call speaks-of,mypy)
test_needs := .venv/.made-test $(if $(lint),.venv/.made-lint) $(if $(browser),.venv/.made-browser) $(if $(spark),$(classes))
test_system := rabbitmq $(if $(browser),chromium) $(if $(spark),java) \
  $(foreach each,pgbouncer java-client,$(if $(call speaks-of,$(each)),$(each)))

# The wheel's modules come before those of the checkout: benchmarks measure what users install.
on_wheel := PYTHONPATH=$(CURDIR)/.venv/wheel $(bin)/python

# These test what differs between RabbitMQ 4 and 3.10.
ON_4 := cluster contract/test_reading.py contract/test_following.py \
  $(addprefix integration/test_,recorder.py relations.py receipts.py groups.py contexts.py)

export TMPDIR := $(CURDIR)/.venv/tmp
export PIP_NO_CACHE_DIR := 1
export UV_NO_CACHE := 1
export UV_PYTHON_DOWNLOADS := never
export PYTHON
# Where the environment forbids compiled modules, each process of a test compiles SQLAlchemy again, for a second or two.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-spark test-release test-long test-4 test-docker check docs bench bench-spark \
  bench-short clean rabbitmq java
.DELETE_ON_ERROR:

# System packages are installed while Python's are.
demo:
	@$(MAKE) -s -j2 rabbitmq $(addprefix .venv/.made-,$(or $(strip \
	  $(if $(WEB)$(findstring --web,$(DEMO)),web) $(if $(findstring --all,$(DEMO)),demo-all)),demo))
	@$(bin)/relatum demo $(if $(WEB),--web) $(DEMO)
	@$(if $(WEB),,echo "Here        make demo WEB=1      does the first, and the command is $(bin)/relatum" >&2)

test: $(test_needs)
	@tools/install $(test_system)
	$(bin)/python -u -m pytest $(or $(TEST),$(SIDE_BY_SIDE) -m 'not ($(LEFT_OUT))') $(OPTIONS)

test-all: MARKED := $(LEFT_OUT)
test-spark: MARKED := own_jvms
test-release: MARKED := release
test-all test-spark test-release: $(test_needs)
	@tools/install $(test_system)
	$(bin)/python -u -m pytest $(SIDE_BY_SIDE) -m '$(MARKED)' $(OPTIONS)

test-long: $(test_needs)
	@tools/install $(test_system)
	$(bin)/python -m pytest --long --override-ini timeout=21600 --override-ini faulthandler_timeout=0 $(TEST)

test-4: .venv/.made-test
	@if server=$$(tools/install-rabbitmq-4); then \
	  RELATUM_RABBITMQ_SERVER=$$server $(bin)/python -u -m pytest $(or $(TEST),$(SIDE_BY_SIDE) $(addprefix tests/,$(ON_4))); \
	fi

test-docker: $(test_needs)
	@tools/install $(filter-out rabbitmq,$(test_system))
	$(bin)/python -m pytest --docker --override-ini timeout=900 --override-ini faulthandler_timeout=0 \
	  $(or $(TEST),-m 'not ($(LEFT_OUT))')

check: .venv/.made-lint
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/mypy tests/unit/group_types.py
	$(bin)/lint-imports
	$(bin)/python tools/measure-house --check

# Links and anchors are checked. To read it with its search: python3 -m http.server --directory .venv/site
docs: .venv/.made-docs
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet
	@echo "The site is in .venv/site/index.html"

bench: .venv/.made-bench $(wheel) rabbitmq
	$(on_wheel) -m benchmarks $(BENCH)

bench-spark: .venv/.made-bench .venv/.made-spark $(wheel) rabbitmq java
	$(on_wheel) -m benchmarks.spark $(BENCH)

# It stops by itself after 95 s; this is the hard limit.
bench-short: .venv/.made-bench $(wheel) rabbitmq
	-timeout --signal=KILL 118 env $(on_wheel) -m benchmarks --short $(BENCH)

clean:
	rm -rf .venv .servers dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

rabbitmq java:
	@mkdir -p $(TMPDIR)
	@tools/install $@

.venv/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: install it, or name it (make PYTHON=python3.13)." >&2; exit 1; }
	@mkdir -p $(TMPDIR)
	@tools/install venv
	@$(PYTHON) -m venv .venv
	@$(bin)/pip install -q --disable-pip-version-check uv

# One environment, to which each purpose adds its dependency group. It runs the checkout's sources: nothing is
# compiled for it.
.venv/.made-%: pyproject.toml uv.lock | .venv/bin/uv
	@echo "Installing what $* needs into .venv …"
	@HATCH_BUILD_NO_HOOKS=true $(bin)/uv sync -q --locked --inexact --group $*
	@touch $@

# In a directory of its own: the environment runs the checkout.
$(wheel): tools/wheel_hook.py $(shell find plugin migrations consumer_api spark_connectors -type f -not -name '*.pyc') | .venv/bin/uv
	@rm -rf .venv/wheel
	@$(bin)/uv pip install -q --no-deps --target .venv/wheel .
	@touch $@

# With Spark's classes in an archive, the tests' JVMs start with half the work.
$(classes): .venv/.made-test .venv/.made-spark | java
	$(bin)/python -m tests.support.spark_classes $@
