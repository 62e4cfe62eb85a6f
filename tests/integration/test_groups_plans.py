"""The plans of the statements of groups at 300,000 rows, whatever the planner knows of the parameters."""

from typing import Any

import psycopg
import pytest

from relatum_consumer.groups._finding import FIRSTS_BETWEEN, ROWS_BETWEEN
from relatum_consumer.groups._one_group import NEWEST, UNFINISHED
from relatum_consumer.groups._view import MEMBERS
from tests.support.plans import (
    CATALOG,
    CLOSE_PARTS,
    MAKE_PARTS,
    PARTS,
    nodes_of,
    plan_of_statement,
    scanned_in,
    text_of,
)

ROWS = 300_000
SIZE = 10
NEAR = 10_000

WINDOW = {"key_id": 1, "stream_id": 1, "low": 100_000, "high": 102_000}
STATEMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a window's rows": (ROWS_BETWEEN, WINDOW),
    "a window's first numbers": (FIRSTS_BETWEEN, WINDOW),
    "the members of one group": (MEMBERS, {"key_id": 1, "group_ids": [f"{7:048x}"], "stream_ids": [1, 2]}),
    "the members of many groups": (
        MEMBERS,
        {"key_id": 1, "group_ids": [f"{number:048x}" for number in range(0, 18_000, 20)], "stream_ids": [1, 2]},
    ),
}

PAGES = {
    "a window's rows": 2_000,
    "a window's first numbers": 2_000,
    "the members of one group": 100,
    "the members of many groups": 20_000,
}
"""Pages each may read. A block range of the index of offsets is 32 pages; a probe of the index of values is 3 to 5, in
the one part that has the group, and in the one that is not closed; and each row of a group is on a page of its own."""

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
"""
"""30,000 groups of ten, whose messages lie among 10,000 of two streams, ids in the order of time; and another key."""


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_of_groups_uses_its_index(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """No table is scanned, and as many pages are read as the rows take."""
    plan = plan_of_statement(filled, mode, *STATEMENTS[name])
    assert scanned_in(plan) <= CATALOG, plan
    used = {node["Index Name"] for node in nodes_of(plan) if "relationships" in node.get("Index Name", "")}
    assert used == {"relationships_offsets" if "window" in name else "relationships_lookup"}, plan
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < PAGES[name], plan


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("before", ["g", f"{ROWS // SIZE // 2:048x}"])
def test_the_newest_groups_are_a_probe_of_each_part_each(
    filled: psycopg.Connection[Any], before: str, mode: str
) -> None:
    """A hundred of thirty thousand, from the end and from the middle: no row is read but theirs."""
    parameters = {"key_id": 1, "before": before, "most": 100}
    last = ROWS // SIZE if before == "g" else ROWS // SIZE // 2
    found = [group_id for (group_id,) in filled.execute(text_of(NEWEST), parameters)]
    assert found == [f"{last - 1 - n:048x}" for n in range(100)]
    plan = plan_of_statement(filled, mode, NEWEST, parameters)
    assert scanned_in(plan) <= CATALOG, plan
    reads = [node for node in nodes_of(plan) if node.get("Relation Name") == "relationships"]
    assert {node["Node Type"] for node in reads} <= {"Index Only Scan", "Index Scan"}, plan
    assert max(node["Actual Rows"] for node in reads) <= 1, plan
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 101 * 5 * PARTS, plan


def test_groups_that_are_not_whole_are_found_in_one_pass(filled: psycopg.Connection[Any]) -> None:
    """The rows of the key are read once, however many groups they are of."""
    parameters = {"key_id": 1, "stream_ids": [1, 2], "floors": [0, 0], "before": 2**62, "limit": 100}
    filled.execute("SET max_parallel_workers_per_gather = 0")
    plan = plan_of_statement(filled, "auto", UNFINISHED, parameters)
    reads = [node for node in nodes_of(plan) if node.get("Relation Name") == "relationships"]
    assert {node["Actual Loops"] for node in reads} == {1}, plan
    assert plan["Actual Rows"] == 100


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_groups_of_a_stream_that_was_never_analyzed_are_looked_up_one_by_one(
    filled: psycopg.Connection[Any], mode: str
) -> None:
    """What the planner does not know of yet is not searched through for each group."""
    ids = [f"{number:048x}" for number in range(200_000, 200_200)]
    with filled.transaction(force_rollback=True):
        filled.execute(
            "INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value) "
            "SELECT n, n, 4, 1, lpad(to_hex(200000 + n / 2), 48, '0') || '|' || 1 + n % 2 || '|false' "
            "FROM generate_series(0, 99999) AS n"
        )
        plan = plan_of_statement(filled, mode, MEMBERS, {"key_id": 1, "group_ids": ids, "stream_ids": [4]})
    used = {node["Index Name"] for node in nodes_of(plan) if "relationships" in node.get("Index Name", "")}
    assert used == {"relationships_lookup"}, plan
    assert plan["Actual Rows"] == 400
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 4_000, plan
