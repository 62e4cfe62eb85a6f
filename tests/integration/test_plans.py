"""The plans of look-ups at 1,000,000 rows in 30 parts: an index each, whatever the planner knows of the parameters."""

from typing import Any

import psycopg
import pytest

from relatum.limits import INTEGER_MAX
from relatum.store import Either
from relatum_consumer.expectations import _expectation_statements as expectations
from relatum_consumer.lookups import Watch
from relatum_consumer.lookups import _lookup_statements as statements
from relatum_consumer.lookups._lookup_statements import WIDTH_CLASSES, WIDTHS_US
from relatum_consumer.lookups._probe_statement import probe_statement
from relatum_consumer.lookups._values import times_of_value, values_of_key, values_parameters
from relatum_consumer.lookups._waiting import parameters_of, watched
from relatum_consumer.traces import _trace_statements as traces
from tests.support.plans import CATALOG, CLOSE_PARTS, MAKE_PARTS, PARTS, nodes_of, plan_of, scanned_in

ROWS = 1_000_000
STREAMS = 2_000
HOT = {"vhost": "/", "key_id_0": 1, "value_0": "hot", "limit": 11}
ORDERS = {"vhost": "/", "key_id_0": 2, "value_0": "o500", "limit": 11}
TWO = ORDERS | {"key_id_1": 1, "value_1": "hot"}
ONE_VALUE = {"key_id": 1, "value": "hot", "stream_id": 1, "floor": 0}
BLOCKS = {"stream_id": 1, "floor": 0, "classes": list(WIDTH_CLASSES), "widths": list(WIDTHS_US)}
AT = ROWS // 2 * 1_000

UNFOLLOWED: dict[str, Any] = {
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

PROBES: dict[str, tuple[Either, dict[str, Any]]] = {
    "one key, one stream": (
        probe_statement("oldest", keys=1, names=1, bounded=False, floored=False),
        ORDERS | {"name_0": "s1"},
    ),
    "one key, all streams": (
        probe_statement("oldest", keys=1, names=None, bounded=False, floored=False, many=True),
        ORDERS,
    ),
    "two keys, two streams": (
        probe_statement("newest", keys=2, names=2, bounded=False, floored=False),
        TWO | {"name_0": "s1", "name_1": "s2"},
    ),
    "a hot value, the oldest": (
        probe_statement("oldest", keys=1, names=1, bounded=False, floored=False),
        HOT | {"name_0": "s1"},
    ),
    "a hot value, the newest": (
        probe_statement("newest", keys=1, names=1, bounded=False, floored=False),
        HOT | {"name_0": "s1"},
    ),
    "a hot value, in a span of time": (
        probe_statement("oldest", keys=1, names=1, bounded=True, floored=False),
        HOT | {"name_0": "s1", "since": AT // 2, "until": None},
    ),
    "a hot value, what is retained": (
        probe_statement("newest", keys=1, names=1, bounded=False, floored=True),
        HOT | {"name_0": "s1", "floor_names": ["s1"], "floors": [10]},
    ),
}

STATEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (sql.prepared, parameters) for name, (sql, parameters) in PROBES.items()},
    "a hot value, after a moment": (
        statements.keyed_beside("after"),
        ONE_VALUE | {"t": AT, "o": 1, "limit": 1},
    ),
    "a hot value, before a moment": (
        statements.keyed_beside("before"),
        ONE_VALUE | {"t": AT, "o": 1, "limit": 1},
    ),
    "a hot value, around a moment": (
        statements.keyed_between(),
        ONE_VALUE | {"low": AT - 5_000, "high": AT + 5_000, "limit": 100_000},
    ),
    "blocks at and after a moment": (
        statements.blocks_beside("after"),
        BLOCKS | {"t": AT, "u": AT, "o": INTEGER_MAX},
    ),
    "blocks at and before a moment": (
        statements.blocks_beside("before"),
        BLOCKS | {"t": AT, "u": AT, "o": -INTEGER_MAX},
    ),
    "more blocks after a moment": (statements.blocks_beyond("after"), BLOCKS | {"t": AT, "u": AT + 500, "o": 7}),
    "more blocks before a moment": (statements.blocks_beyond("before"), BLOCKS | {"t": AT, "u": AT - 500, "o": 7}),
    "blocks around a moment": (
        statements.blocks_between(),
        BLOCKS | {"stream_ids": [1, 2], "low": AT - 5_000, "high": AT + 5_000},
    ),
    "the first blocks in a span of time": (
        statements.blocks_page(),
        BLOCKS | {"low": AT - 5_000, "high": AT + 500_000, "blocks_max": 10},
    ),
    "what followed a batch": (expectations.unfollowed(), UNFOLLOWED),
    "what of it lies in how many streams": (expectations.unfollowed(), UNFOLLOWED | {"stream_ids": [*range(1, 9)]}),
    "the times at offsets": (
        expectations.times_at(),
        {"numbers": [0, 1], "stream_ids": [1, 2], "offsets": [ROWS // 2, ROWS // 3]},
    ),
    "which generations there are": (expectations.lives(), {"stream_ids": [1, 2, 3]}),
    "coverage": (statements.coverage_rows(), {"stream_ids": [1, 2, 3]}),
    "who is recorded now": (statements.attended(), {"vhost": "/", "streams": ["s1", "s2"]}),
    "streams by name": (statements.present_streams(1), {"vhost": "/", "name_0": "s1"}),
}

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


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_uses_its_index(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """No table is scanned, nothing big is sorted, and few pages are read, whether values are known or not."""
    plan = plan_of(filled, mode, *STATEMENTS[name])
    all_streams = name == "one key, all streams"
    assert scanned_in(plan) - CATALOG <= ({"streams"} if all_streams else set()), plan
    probes = {node["Index Name"]: node.get("Index Cond", "") for node in nodes_of(plan) if "Index Name" in node}
    probes = {index: condition for index, condition in probes.items() if index not in OF_PARTS}
    assert set(probes) <= set(INDEXES), plan
    for index, condition in probes.items():
        assert all(column in condition for column in INDEXES[index]), plan
    sorted_rows = [node["Actual Rows"] for node in nodes_of(plan) if node["Node Type"] == "Sort"]
    assert max(sorted_rows, default=0) < 2_500
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    assert pages < (5 * STREAMS if all_streams else 400), plan


@pytest.mark.parametrize("name", PROBES)
def test_what_is_not_prepared_answers_the_same_and_plans_no_part(filled: psycopg.Connection[Any], name: str) -> None:
    """A statement that is planned each time names functions, which keep the plans of 30 parts; they read as little."""
    sql, parameters = PROBES[name]
    expected = filled.execute(sql.prepared, parameters).fetchall()
    assert filled.execute(sql.unprepared, parameters).fetchall() == expected
    assert expected
    plan = plan_of(filled, "force_custom_plan", sql.unprepared, parameters)
    assert "relationships" not in {node.get("Relation Name") for node in nodes_of(plan)}, plan
    most = 5 * STREAMS if name == "one key, all streams" else 400
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < most, plan


def test_the_limit_bounds_what_a_hot_value_costs(filled: psycopg.Connection[Any]) -> None:
    """Ten of half a million messages that share one value are as cheap as ten of ten: a few pages of each part."""
    plan = plan_of(filled, "auto", *STATEMENTS["a hot value, the newest"])
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 20 + 4 * PARTS


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_many_waits_cost_an_index_probe_each(filled: psycopg.Connection[Any], mode: str) -> None:
    """One statement for 500 waits, each for a value and a stream of its own; for some there is a hot one."""
    waits = [Watch((f"s{n}",), ((2, f"none-{n}"),), None, 0.0) for n in range(1, 500)]
    waits.append(Watch(("s1",), ((1, "hot"),), None, 0.0))
    plan = plan_of(filled, mode, watched(), parameters_of("/", waits))
    nodes = [node for node in nodes_of(plan) if node.get("Relation Name") == "relationships"]
    assert {node["Node Type"] for node in nodes} <= {"Index Only Scan", "Index Scan"}, plan
    assert all(column in node["Index Cond"] for node in nodes for column in INDEXES["relationships_lookup"]), plan
    assert plan["Actual Rows"] == 1
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 500 * 12, plan


TRACED = {
    "values": (traces.rows_of_values(None), 50),
    "values by stream": (traces.rows_by_stream(None, bounded=False), 1_000),
    "values in a span of time": (traces.rows_by_stream(None, bounded=True), 1_000),
}
"""Statements of a trace, and how many pages a value may cost: ten streams have it, and half of the parts might."""


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", TRACED)
def test_a_step_of_a_trace_costs_index_probes_for_each_value(
    filled: psycopg.Connection[Any], name: str, mode: str
) -> None:
    """One statement for 300 values, some that nobody has, and one that half a million messages share."""
    sql, pages_a_value = TRACED[name]
    values = {n: (2, f"o{n * 70}") for n in range(299)} | {299: (1, "hot")}
    plan = plan_of(filled, mode, sql, traces.parameters_of("/", None, values, 201, AT, AT + 1_000_000))
    nodes = [node for node in nodes_of(plan) if node.get("Relation Name") == "relationships"]
    assert {node["Node Type"] for node in nodes} <= {"Index Only Scan", "Index Scan"}, plan
    assert all(column in node["Index Cond"] for node in nodes for column in ("key_id", "value")), plan
    assert scanned_in(plan) - CATALOG <= {"streams"}, plan
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 300 * pages_a_value, plan


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize(
    ("key_id", "prefix", "vhost", "values"),
    [
        (1, "", "/", ["hot"]),
        (1, "hoti", "/", []),
        (2, "o10", "/", ["o10", "o100", "o1000", "o10000", "o10001", "o10002", "o10003", "o10004", "o10005", "o10006"]),
        (2, "", "other", []),
    ],
)
def test_values_are_found_by_a_few_probes_of_each_part(
    filled: psycopg.Connection[Any], key_id: int, prefix: str, vhost: str, values: list[str], mode: str
) -> None:
    """Ten of 25,000, one that half a million rows share, none, and those of a virtual host that has none."""
    parameters = values_parameters(vhost, key_id, prefix, 10)
    assert [value for (value,) in filled.execute(values_of_key(), parameters)] == values
    plan = plan_of(filled, mode, values_of_key(), parameters)
    nodes = [node for node in nodes_of(plan) if node.get("Relation Name") == "relationships"]
    assert {node["Node Type"] for node in nodes} <= {"Index Only Scan", "Index Scan"}, plan
    assert all(column in node["Index Cond"] for node in nodes for column in ("key_id", "value", "stream_id")), plan
    assert scanned_in(plan) - CATALOG == set(), plan
    assert max((node["Actual Rows"] for node in nodes), default=0) <= 1, plan
    steps = next(node["Actual Rows"] for node in nodes_of(plan) if node["Node Type"] == "Recursive Union")
    assert steps <= parameters["steps"] + 1
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < (steps + 1) * 4 * PARTS, plan


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("order", ["oldest", "newest"])
@pytest.mark.parametrize(("value", "most"), [("hot", 20_000), ("o500", 20_000)])
def test_counts_by_time_look_at_so_many_rows_and_no_more(
    filled: psycopg.Connection[Any], order: Any, value: str, most: int, mode: str
) -> None:
    """Of half a million rows of one value, and of twenty in ten streams: planned once, and none of the others read."""
    key_id, expected = (1, most) if value == "hot" else (2, 20)
    given = {
        "vhost": "/",
        "key_id": key_id,
        "value": value,
        "since": 0,
        "until": INTEGER_MAX,
        "spans": 60,
        "most": most,
    }
    sql = times_of_value(None, order)
    rows = filled.execute(sql, given).fetchall()
    assert sum(count for *_, count in rows) == expected
    assert {width for width, *_ in rows} == {((expected - 1) * 1_000) // 60 + 1}
    assert all(0 <= number < 60 for _, _, number, _ in rows)
    plan = plan_of(filled, mode, sql, given)
    assert "relationships" not in {node.get("Relation Name") for node in nodes_of(plan)}, plan
    assert scanned_in(plan) - CATALOG <= {"streams"}, plan
    # A hundred rows are beside each other in a page, and each stream is a few probes of each part.
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < expected / 10 + 12 * 10 * PARTS, plan
