"""The plans of lookups at 1,000,000 rows in 30 parts: an index each, whatever the planner knows of the parameters."""

import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

import relatum
import relatum_consumer
from relatum.store.coverage import COVERAGE_OF
from relatum_consumer import _missing as missing_steps
from relatum_consumer import _trace_values as traces
from relatum_consumer._known_spans import TIMES_AT
from relatum_consumer._missing import UNFOLLOWED
from relatum_consumer.lookups import by_time, proof, time_index
from relatum_consumer.lookups.by_key import VALUES_OF_KEY, probe_statement, values_parameters
from relatum_consumer.lookups.catalog import present_streams
from relatum_consumer.lookups.time_index import WIDTH_CLASSES, WIDTHS_US
from relatum_consumer.lookups.waiting import WATCHED, Watch, parameters_of
from tests.support import in_a_try
from tests.support.plans import (
    CATALOG,
    CLOSE_PARTS,
    EACH_MODE,
    MAKE_PARTS,
    PARTS,
    filled_database,
    nodes_of,
    pages_in,
    plan_of,
    scanned_in,
    text_of,
)

ROWS = 1_000_000
STREAMS = 2_000
AT = ROWS // 2 * 1_000

INDEXES = {
    "relationships_lookup": ["key_id", "value", "stream_id"],
    "time_blocks_offsets": ["stream_id", "first_offset"],
    "time_blocks_lookup": ["stream_id", "width_class", "min_us"],
    "coverage_stream": ["stream_id"],
    "streams_current": ["vhost", "name"],
    "streams_pkey": ["stream_id"],
    "recorder_members_holder": ["holder"],
    "streams_super_stream": ["vhost", "super_stream"],
}
"""Each index that may be used, with the columns a probe of it must be limited by."""

OF_PARTS = {"table_parts_pkey", "part_keys_place"}
"""Those of a few rows for each part."""


@dataclass(frozen=True)
class Plan:
    """A statement, and what it may cost: pages, and tables of which all may be read, by a scan or an index."""

    statement: Any
    values: dict[str, Any]
    pages: int = 400
    scans: tuple[str, ...] = ()
    indexes: tuple[tuple[str, list[str]], ...] = ()
    """Indexes of which a probe may be limited by other columns than those above."""
    rows: int | None = None
    """How many rows it gives, where that is looked at."""

    @property
    def sql(self) -> str:
        return text_of(self.statement)

    def check(self, plan: dict[str, Any]) -> None:
        """No other table is scanned, nothing big is sorted, indexes are probed by what is known, few pages are read."""
        nodes, may = list(nodes_of(plan)), INDEXES | dict(self.indexes)
        assert scanned_in(plan) - CATALOG <= set(self.scans), plan
        probes = [node for node in nodes if node.get("Index Name") not in {None} | OF_PARTS]
        assert {node["Index Name"] for node in probes} <= set(may), plan
        for node in probes:
            is_limited = all(column in node.get("Index Cond", "") for column in may[node["Index Name"]])
            assert is_limited or node["Index Name"].startswith(self.scans), node
        asked = {node["Node Type"] for node in nodes if node.get("Relation Name") == "relationships"}
        assert asked <= {"Index Only Scan", "Index Scan"}, plan
        assert max((node["Actual Rows"] for node in nodes if node["Node Type"] == "Sort"), default=0) < 2_500, plan
        assert self.rows in (None, plan["Actual Rows"]), plan
        assert pages_in(plan) < self.pages, plan


def probe(which: Any, values: dict[str, Any], keys: int = 1, names: int | None = 1, **how: bool) -> Any:
    return probe_statement(which, keys=keys, names=names, floored="floors" in values, **how)


ANY_TIME = {"since": None, "until": None}
HOT = ANY_TIME | {"vhost": "/", "key_id_0": 1, "value_0": "hot", "limit": 11, "name_0": "s1"}
ORDERS = ANY_TIME | {"vhost": "/", "key_id_0": 2, "value_0": "o500", "limit": 11, "name_0": "s1"}
TWO = ORDERS | {"key_id_1": 1, "value_1": "hot", "name_1": "s2"}
SINCE = HOT | {"since": AT // 2, "until": 2**62}
FLOORED = HOT | {"floor_names": ["s1"], "floors": [10]}
ALL_STREAMS = "one key, all streams"

PROBES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one key, one stream": (probe("oldest", ORDERS), ORDERS),
    ALL_STREAMS: (probe("oldest", ORDERS, names=None, many=True), ORDERS),
    "two keys, two streams": (probe("newest", TWO, keys=2, names=2), TWO),
    "a hot value, the oldest": (probe("oldest", HOT), HOT),
    "a hot value, the newest": (probe("newest", HOT), HOT),
    "a hot value, in a span of time": (probe("oldest", SINCE), SINCE),
    "a hot value, what is retained": (probe("newest", FLOORED), FLOORED),
}
ANY_STREAM = ("relationships_lookup", ["key_id", "value"])
COSTS: dict[str, Any] = {ALL_STREAMS: {"pages": 5 * STREAMS, "scans": ("streams",), "indexes": (ANY_STREAM,)}}
# Ten of half a million messages that share a value are as cheap as ten of ten: a few pages of each part.
COSTS["a hot value, the newest"] = {"pages": 20 + 4 * PARTS}

VALUE = {"key_id": 1, "value": "hot", "stream_id": 1, "floor": 0}
BLOCKS = {"stream_id": 1, "floor": 0, "classes": list(WIDTH_CLASSES), "widths": list(WIDTHS_US)}
AROUND = {"low": AT - 5_000, "high": AT + 5_000}
BATCH: dict[str, Any] = {
    "numbers": [0, 1, 2],
    "values": ["o500", "o9000", "nobody"],
    "time_uss": [0, AT, 0],
    "due_uss": [AT, AT, AT],
    "own_streams": [1, 1, 1],
    "own_offsets": [7, 8, 9],
    "stream_ids": [2],
    "key_id": 2,
    "grace_us": 1_000_000,
}
OFFSETS = {"numbers": [0, 1], "stream_ids": [1, 2], "offsets": [ROWS // 2, ROWS // 3]}
THREE = {"stream_ids": [1, 2, 3]}
WAITS = [Watch((f"s{n}",), ((2, f"none-{n}"),), None, 0.0) for n in range(1, 500)]
WAITS.append(Watch(("s1",), ((1, "hot"),), None, 0.0))
"""500 waits, each for a value and a stream of its own; for some there is a hot one."""
VALUES = [*[(2, f"o{n * 70}") for n in range(299)], (1, "hot")]
"""A step of a trace by 300 values, some that nobody has, and one that half a million messages share."""
STEP = traces.parameters_of("/", None, VALUES, 201)
SPAN = {"since": AT, "until": AT + 1_000_000}


def step(statement: Any, pages_a_value: int, span: dict[str, Any] = ANY_TIME) -> Plan:
    """A step of a trace: ten streams have a value, and half of the parts might."""
    return Plan(statement, STEP | span, 300 * pages_a_value, ("streams",), (ANY_STREAM,))


PLANS = {
    **{name: Plan(sql, values, **COSTS.get(name, {})) for name, (sql, values) in PROBES.items()},
    "a hot value, after a moment": Plan(by_time.KEYED_NEIGHBOUR["after"], VALUE | {"t": AT, "o": 1}),
    "a hot value, before a moment": Plan(by_time.KEYED_NEIGHBOUR["before"], VALUE | {"t": AT, "o": 1}),
    "blocks at and after": Plan(time_index.BLOCKS_NEIGHBOUR["after"], BLOCKS | {"t": AT}),
    "blocks at and before": Plan(time_index.BLOCKS_NEIGHBOUR["before"], BLOCKS | {"t": AT}),
    "blocks around a moment": Plan(time_index.BLOCKS_BETWEEN, BLOCKS | AROUND | {"stream_ids": [1, 2]}),
    "offsets around a moment": Plan(time_index.OFFSETS_BETWEEN, BLOCKS | AROUND),
    "what followed a batch": Plan(UNFOLLOWED, BATCH),
    "what followed in many streams": Plan(UNFOLLOWED, BATCH | {"stream_ids": [*range(1, 9)]}),
    "the times at offsets": Plan(TIMES_AT, OFFSETS),
    "coverage": Plan(COVERAGE_OF, THREE),
    "who is recorded now": Plan(proof.RECORDED_NOW, {"vhost": "/", "streams": ["s1", "s2"]}),
    "streams by name": Plan(present_streams(1), {"vhost": "/", "name_0": "s1"}),
    "many waits": Plan(WATCHED, parameters_of("/", WAITS), 500 * 12, ("streams",), rows=1),
    "a step of a trace": step(traces.rows_of_values(None), 50),
    "a step by stream": step(traces.rows_by_stream(None), 1_000),
    "a step in a span of time": step(traces.rows_by_stream(None), 1_000, SPAN),
}

FILL = f"""
{MAKE_PARTS}
INSERT INTO relatum.streams (name, lease_holder) SELECT 's' || n, 'm' || n FROM generate_series(1, {STREAMS}) AS n;
INSERT INTO relatum.recorder_members (holder, name, lease_expires_at)
  SELECT 'm' || n, 'one', now() + interval '1 hour' FROM generate_series(1, 1000) AS n;
INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, is_tail)
  SELECT n, 0, {ROWS}, '{{1,2}}', true, true FROM generate_series(1, {STREAMS}) AS n;
INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value, part)
  SELECT n, n * 1000::bigint, 1, 1, 'hot', n * {PARTS} / {ROWS // 2} FROM generate_series(0, {ROWS // 2} - 1) AS n;
INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value, part)
  SELECT n / 10, n * 1000::bigint, 1 + n % 10, 2, 'o' || n / 20, n * {PARTS} / {ROWS // 2}
  FROM generate_series(0, {ROWS // 2} - 1) AS n;
{CLOSE_PARTS}
INSERT INTO relatum.time_blocks (min_us, max_us, first_offset, last_offset, stream_id, width_class)
  SELECT n * 1000::bigint, (n + 127) * 1000::bigint, n, n + 127, 1 + n / 128 % 2, 9
  FROM generate_series(0, {ROWS * 10}, 128) AS n;
"""
"""1,000,000 rows: no block is wider than 4**9 microseconds; half a million rows share one value in one stream."""


@pytest.fixture(scope="module")
def filled(filled: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """The same, once the functions that probes name have their plans: to make these reads much of the catalog."""
    for statement, parameters in PROBES.values():
        filled.execute(text_of(statement), parameters)
    return filled


@EACH_MODE
@pytest.mark.parametrize("name", PLANS)
def test_each_statement_uses_its_index(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """No table is scanned, nothing big is sorted, and few pages are read, whether values are known or not."""
    asked = PLANS[name]
    asked.check(plan_of(filled, mode, asked.sql, asked.values))


@EACH_MODE
@pytest.mark.parametrize("name", PROBES)
def test_a_probe_plans_no_part(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """It names functions, which keep the plans of 30 parts, also where a statement is planned each time."""
    statement, parameters = PROBES[name]
    assert filled.execute(text_of(statement), parameters).fetchall()
    plan = plan_of(filled, mode, text_of(statement), parameters)
    assert "relationships" not in {node.get("Relation Name") for node in nodes_of(plan)}, plan


@EACH_MODE
@pytest.mark.parametrize(
    ("key_id", "prefix", "vhost", "values"),
    [
        (1, "", "/", ["hot"]),
        (1, "hoti", "/", []),
        (2, "o10", "/", ["o10", "o100", "o1000", *(f"o1000{n}" for n in range(7))]),
        (2, "", "other", []),
    ],
)
def test_values_are_found_by_a_few_probes_of_each_part(
    filled: psycopg.Connection[Any], key_id: int, prefix: str, vhost: str, values: list[str], mode: str
) -> None:
    """Ten of 25,000, one that half a million rows share, none, and those of a virtual host that has none."""
    parameters = values_parameters(vhost, key_id, prefix, 10)
    assert [value for (value,) in filled.execute(text_of(VALUES_OF_KEY), parameters)] == values
    plan = plan_of(filled, mode, text_of(VALUES_OF_KEY), parameters)
    nodes = list(nodes_of(plan))
    steps = next(node["Actual Rows"] for node in nodes if node["Node Type"] == "Recursive Union")
    assert steps <= parameters["steps"] + 1
    Plan(VALUES_OF_KEY, parameters, (steps + 1) * 4 * PARTS, ("streams",)).check(plan)
    assert scanned_in(plan) - CATALOG == set(), plan
    asked = [node["Actual Rows"] for node in nodes if node.get("Relation Name") == "relationships"]
    assert max(asked, default=0) <= 1, plan


FEWER = 300_000
"""Rows where statistics are missing or were true once."""

MOST_MS = 3_000
"""What a batch of 1,000 may take: many times what it takes, and a thousandth of what a scan for each would."""


def rows(first: int, last: int) -> str:
    """Rows of the numbers: every third value is in stream 2, a minute behind; all of them are somewhere."""
    return f"""
INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value, part)
  SELECT n, n * 1000::bigint + 60000000, CASE WHEN n % 3 = 0 THEN 2 ELSE 3 + n % 8 END, 1, 'o' || n / 2,
    n * {PARTS}::bigint / {FEWER}
  FROM generate_series({first}, {last - 1}) AS n;
"""


EMPTY = f"""
{MAKE_PARTS}
DO $$ DECLARE each regclass; BEGIN
  FOR each IN SELECT relid FROM pg_partition_tree('relatum.relationships') WHERE isleaf LOOP
    EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', each);
  END LOOP;
END $$;
INSERT INTO relatum.streams (name) SELECT 's' || n FROM generate_series(1, 10) AS n;
"""
"""No autovacuum, so that it is as just filled for as long as tests take. Stream 1 is followed by stream 2; the others
are partitions of which some have rows, too."""

ALL = f"{EMPTY}{rows(0, FEWER)}{CLOSE_PARTS}"
STATES = {
    "just filled": (ALL, "SELECT 1"),
    "restored": (ALL, "REINDEX SCHEMA relatum"),
    "analysed at a thousandth": (f"{EMPTY}{rows(0, 1_000)}ANALYZE;{rows(1_000, FEWER)}{CLOSE_PARTS}", "SELECT 1"),
}
"""What is done until the statement is asked: a restore makes the indexes behind the rows, and analyses nothing."""


@pytest.fixture(scope="module", params=STATES)
def little_known(
    request: pytest.FixtureRequest, database_server_url: str, _migrated_template: str
) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a database of which PostgreSQL knows little, or what was true once."""
    fill, then = STATES[request.param]
    with filled_database(database_server_url, _migrated_template, fill, then=then) as connection:
        yield connection


def followed(streams: list[int], messages: int = missing_steps.BATCH) -> Plan:
    """What followed a batch of as many values, a fifth of which nobody has.

    A part is a tree of two or three levels; one of thirty may hold a value, as its first and last values say.
    """
    steps = [FEWER // messages * n for n in range(messages)]
    batch = {
        "numbers": list(range(messages)),
        "values": [f"o{step // 2}" if n % 5 else f"nobody-{n}" for n, step in enumerate(steps)],
        "time_uss": [step * 1_000 for step in steps],
        "due_uss": [step * 1_000 + 3_600_000_000 for step in steps],
        "own_streams": [1] * messages,
        "own_offsets": steps,
        "stream_ids": streams,
        "key_id": 1,
        "grace_us": 1_000_000,
    }
    columns = ("relationships_lookup", ["key_id", "value", "stream_id", "time_us"])
    return Plan(UNFOLLOWED, batch, messages * len(streams) * 4 * PARTS, indexes=(columns,))


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
@pytest.mark.parametrize("streams", [[2], list(range(2, 11))], ids=["one stream", "nine partitions"])
def test_a_batch_costs_an_index_probe_for_each_message(
    little_known: psycopg.Connection[Any], streams: list[int], mode: str
) -> None:
    """No table is scanned, and a batch is answered in a bounded time, whatever statistics there are."""
    asked = followed(streams)
    plan = plan_of(little_known, mode, asked.sql, asked.values)
    asked.check(plan)
    types = {node["Node Type"] for node in nodes_of(plan)}
    assert not types & {"Hash Join", "Merge Join"}, plan
    assert types & {"Index Only Scan", "Index Scan"}, plan

    def is_quick() -> bool:
        explain = f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {asked.sql}"
        ((told,),) = little_known.execute(explain.encode(), asked.values).fetchall()
        return bool(told[0]["Planning Time"] + told[0]["Execution Time"] < MOST_MS)

    in_a_try(is_quick, what="a batch of 1,000 messages")


STATEMENT = re.compile(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE|LOCK)\b")
"""How one begins; what begins otherwise is a part of others."""


def product_modules() -> Iterator[ModuleType]:
    """All modules of the product, but those of extras that are not installed."""
    for package in (relatum, relatum_consumer):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                yield import_module(found.name)
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("relatum"):
                    raise


def statements_of(module: ModuleType) -> Iterator[tuple[str, sa.TextClause]]:
    """The texts among a module's constants, by name; those in its mappings, tuples and own objects, too."""
    for name, value in vars(module).items():
        is_own = type(value).__module__.startswith("relatum") and hasattr(value, "__dict__")
        inside: Any = vars(value) if is_own else value
        if isinstance(inside, sa.TextClause):
            yield f"{module.__name__}.{name}", inside
        elif isinstance(inside, dict | tuple):
            items = inside.items() if isinstance(inside, dict) else enumerate(inside)
            texts = ((key, each) for key, each in items if isinstance(each, sa.TextClause))
            yield from ((f"{module.__name__}.{name}[{key!r}]", each) for key, each in texts)


def test_every_statement_that_is_a_text_can_be_prepared(database_url: str) -> None:
    """Every statement that is a text parses and names columns that exist; one that does not is named."""
    statements: dict[int, tuple[str, sa.TextClause]] = {}
    for module in product_modules():
        for name, statement in statements_of(module):
            if STATEMENT.match(statement.text):
                statements.setdefault(id(statement), (name, statement))
    refused = {}
    with psycopg.connect(database_url, autocommit=True) as connection:
        for name, statement in statements.values():
            text = text_of(statement)
            try:
                if text.lstrip().startswith("LOCK"):  # which cannot be prepared
                    with connection.transaction(force_rollback=True):
                        connection.execute(text.encode())
                else:
                    plan_of(connection, "force_generic_plan", text)
            except psycopg.Error as error:
                refused[name] = str(error)
                connection.execute("DEALLOCATE ALL")
    assert refused == {}
    assert len(statements) > 40
