"""The plans of the statements of groups at 300,000 rows and 100,000 done groups, whatever the planner knows."""

from typing import Any

import psycopg
import pytest

from relatum_consumer.groups import _consumer as claims
from relatum_consumer.groups._assembly import MEMBERS, ROWS_BETWEEN
from relatum_consumer.groups._finding import STORE_WINDOW
from relatum_consumer.groups._groups import HOLDERS
from relatum_consumer.groups._one_group import NEWEST, UNFINISHED
from tests.support.groups import group_id, ids
from tests.support.plans import (
    CATALOG,
    CLOSE_PARTS,
    EACH_MODE,
    MAKE_PARTS,
    PARTS,
    nodes_of,
    pages_in,
    plan_of_statement,
    scanned_in,
    text_of,
)

ROWS = 300_000
SIZE = 10
NEAR = 10_000
DONE = 100_000
READY = 50
SMALL = CATALOG | {"group_consumers", "keys", "streams"}
"""Tables that a plan may read as a whole."""


WINDOW = {"key_id": 1, "stream_id": 1, "low": 100_000, "high": 102_000, "firsts_only": False}
MINE = {"consumer_id": 1, "holder": "me"}
LEASE = MINE | {"lease_s": 15.0}
ONE = MINE | {"group_id": ids(7)[0], "number": 1}
WRITTEN = {
    "consumer_id": 1,
    "key_id": 1,
    "from_offset": 0,
    "expected": 100,
    "to_offset": 200,
    "stream_id": 1,
    "coverage_id": 1,
    "ranks": list(range(100)),
    "first_offsets": list(range(100)),
    "stream_ids": [1] * 100,
    "states": ["ready"] * 100,
    "group_ids": ids(*range(100)),
    "outside": ids(*range(100, 110)),
}

# A block range of the index of offsets is 32 pages; a probe of the index of values is 3 to 5, in the one part that has
# the group, and in the open one; and each row of a group is on a page of its own. Storing touches each
# group's page and its indexes' pages; the other statements touch ten groups at most.
STATEMENTS: dict[str, tuple[Any, dict[str, Any], str, int]] = {
    "a window's rows": (ROWS_BETWEEN, WINDOW, "relationships_offsets", 2_000),
    "a window's first numbers": (ROWS_BETWEEN, WINDOW | {"firsts_only": True}, "relationships_offsets", 2_000),
    "the members of one group": (
        MEMBERS,
        {"key_id": 1, "group_ids": ids(7), "stream_ids": [1, 2]},
        "relationships_lookup",
        100,
    ),
    "the members of many groups": (
        MEMBERS,
        {"key_id": 1, "group_ids": ids(*range(0, 18_000, 20)), "stream_ids": [1, 2]},
        "relationships_lookup",
        20_000,
    ),
    "claiming": (claims.CLAIM, LEASE | {"limit": 10, "held": []}, "group_states_next", 400),
    "renewing": (claims.RENEW, LEASE | {"group_ids": ids(*range(10))}, "", 400),
    "acknowledging": (claims.END, ONE | {"state": "done"}, "", 400),
    "counting": (claims.COUNT_GIVEN, ONE | {"given": 1}, "", 400),
    "giving back": (claims.END, ONE | {"state": "ready"}, "", 400),
    "who has some": (HOLDERS, {"consumer_id": 1}, "", 400),
    "what is scanned": (claims.SCANS, {"consumer_id": 1, "stream_ids": [1, 2]}, "", 400),
    "writing down": (STORE_WINDOW, WRITTEN, "", 3_000),
}
"""Each with its parameters, the index that must find its rows, and the pages that it may read."""

FILL = f"""
{MAKE_PARTS}
INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value, part)
  SELECT n / 2, n * 1000::bigint, 1 + n % 2, 1,
    lpad(to_hex((n / {NEAR} * {NEAR} + n * 7919::bigint % {NEAR}) / {SIZE}), 48, '0') || '|'
      || 1 + (n * 7919::bigint) % {SIZE} || '|false',
    1 + n * ({PARTS}::bigint - 1) / {ROWS}
  FROM generate_series(0, {ROWS} - 1) AS n;
INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value, part)
  SELECT n, n * 1000::bigint, 3, 2, 'o' || n, 1 + n * ({PARTS}::bigint - 1) / {ROWS}
  FROM generate_series(0, {ROWS} / 2) AS n;
{CLOSE_PARTS}
INSERT INTO relatum.streams (name) VALUES ('s1');
INSERT INTO relatum.keys (name, sources, type) VALUES ('message_group', '{{group_id}}', 'text');
INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, is_tail)
  SELECT 1, n * 10, n * 10 + 1000, '{{1}}', true, false FROM generate_series(0, 2000) AS n;
INSERT INTO relatum.group_consumers (name, ordering) SELECT 'c' || n, 'logical' FROM generate_series(1, 3) AS n;
INSERT INTO relatum.group_scans (consumer_id, stream_id, from_offset, to_offset)
  SELECT 1, n, 0, 100 FROM generate_series(1, 2000) AS n;
INSERT INTO relatum.group_states (rank, first_offset, consumer_id, stream_id, state, group_id, deliveries, holder)
  SELECT n, n, 1, 1, 'done', lpad(to_hex(n), 48, '0'), 1, 'me' FROM generate_series(0, {DONE} - 1) AS n;
INSERT INTO relatum.group_states (rank, first_offset, consumer_id, stream_id, state, group_id)
  SELECT n, n, 1, 1, 'ready', lpad(to_hex(n), 48, '0') FROM generate_series({DONE}, {DONE + READY} - 1) AS n;
INSERT INTO relatum.group_states (rank, first_offset, consumer_id, stream_id, state, group_id, touched_at)
  SELECT n, n, 1, 1, 'open', lpad(to_hex(n), 48, '0'), now() - interval '1 hour'
  FROM generate_series({DONE + READY}, {DONE + 2 * READY} - 1) AS n;
"""
"""30,000 groups of ten, whose messages are among 10,000 of two streams, ids in the order of time; and another key.

And of a consumer 100,000 groups that are done, fifty to be given and fifty incomplete.
"""


@EACH_MODE
@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_of_groups_uses_its_index(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """No table is scanned, and as many pages are read as the rows take, however many groups are done."""
    statement, parameters, index, pages = STATEMENTS[name]
    plan = plan_of_statement(filled, mode, statement, parameters)
    assert scanned_in(plan) <= SMALL, plan
    assert pages_in(plan) < pages, plan
    used = {node["Index Name"] for node in nodes_of(plan) if "Index Name" in node}
    if index.startswith("relationships"):
        assert {each for each in used if "relationships" in each} == {index}, plan
    elif index:
        # The first ten in order, from the partial index, without sorting.
        assert index in used, plan
        assert not [node for node in nodes_of(plan) if node["Node Type"] in ("Sort", "Incremental Sort")], plan
        assert plan["Actual Rows"] == 10


@EACH_MODE
@pytest.mark.parametrize("before", ["g", group_id(ROWS // SIZE // 2)])
def test_the_newest_groups_are_a_probe_of_each_part_each(
    filled: psycopg.Connection[Any], before: str, mode: str
) -> None:
    """A hundred of thirty thousand, from the end and from the middle: no row is read but theirs."""
    parameters = {"key_id": 1, "before": before, "most": 100}
    last = ROWS // SIZE if before == "g" else ROWS // SIZE // 2
    found = [group_id for (group_id,) in filled.execute(text_of(NEWEST), parameters)]
    assert found == ids(*range(last - 1, last - 101, -1))
    plan = plan_of_statement(filled, mode, NEWEST, parameters)
    assert scanned_in(plan) <= CATALOG, plan
    reads = [node for node in nodes_of(plan) if node.get("Relation Name") == "relationships"]
    assert {node["Node Type"] for node in reads} <= {"Index Only Scan", "Index Scan"}, plan
    assert max(node["Actual Rows"] for node in reads) <= 1, plan
    assert pages_in(plan) < 101 * 5 * PARTS, plan


def test_groups_that_are_not_whole_are_found_in_one_pass(filled: psycopg.Connection[Any]) -> None:
    """The rows of the key are read once, however many groups they are of."""
    parameters = {"key_id": 1, "stream_ids": [1, 2], "floors": [0, 0], "before": 2**62, "limit": 100}
    filled.execute("SET max_parallel_workers_per_gather = 0")
    plan = plan_of_statement(filled, "auto", UNFINISHED, parameters)
    reads = [node for node in nodes_of(plan) if node.get("Relation Name") == "relationships"]
    assert {node["Actual Loops"] for node in reads} == {1}, plan
    assert plan["Actual Rows"] == 100


@EACH_MODE
def test_groups_of_a_stream_that_was_never_analyzed_are_looked_up_one_by_one(
    filled: psycopg.Connection[Any], mode: str
) -> None:
    """What the planner does not know of yet is not searched through for each group."""
    with filled.transaction(force_rollback=True):
        filled.execute(
            "INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value) "
            "SELECT n, n, 4, 1, lpad(to_hex(200000 + n / 2), 48, '0') || '|' || 1 + n % 2 || '|false' "
            "FROM generate_series(0, 99999) AS n"
        )
        plan = plan_of_statement(
            filled, mode, MEMBERS, {"key_id": 1, "group_ids": ids(*range(200_000, 200_200)), "stream_ids": [4]}
        )
    used = {node["Index Name"] for node in nodes_of(plan) if "relationships" in node.get("Index Name", "")}
    assert used == {"relationships_lookup"}, plan
    assert plan["Actual Rows"] == 200
    assert pages_in(plan) < 4_000, plan
