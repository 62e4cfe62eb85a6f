"""What followed a batch of messages costs an index probe each at 1,000,000 rows, whatever PostgreSQL knows of them."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from relatum_consumer.expectations import _expectation_limits as limits
from relatum_consumer.expectations import _expectation_statements as statements
from tests.support import in_a_try
from tests.support.plans import CATALOG, CLOSE_PARTS, MAKE_PARTS, PARTS, filled_database, nodes_of, plan_of, scanned_in

ROWS = 1_000_000
HOUR_US = 3_600_000_000
MOST_MS = 3_000
"""What a batch of 1,000 may take: many times what it takes, and a thousandth of what a scan for each would."""

STREAMS = """
INSERT INTO relatum.streams (name) SELECT 's' || n FROM generate_series(1, 10) AS n;
"""
"""Stream 1 is followed by stream 2; the others are partitions of which some have rows, too."""


def rows(first: int, last: int) -> str:
    """Rows of the numbers: every third value is in stream 2, a minute behind; all of them are somewhere."""
    return f"""
INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value, part)
  SELECT n, n * 1000::bigint + 60000000, CASE WHEN n % 3 = 0 THEN 2 ELSE 3 + n % 8 END, 1, 'o' || n / 2,
    n * {PARTS}::bigint / {ROWS}
  FROM generate_series({first}, {last - 1}) AS n;
"""


NO_AUTOVACUUM = """
DO $$ DECLARE each regclass; BEGIN
  FOR each IN SELECT relid FROM pg_partition_tree('relatum.relationships') WHERE isleaf LOOP
    EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', each);
  END LOOP;
END $$;
"""
"""So that it is as just filled for as long as the tests take."""

FEW = ROWS // 1_000
EMPTY = f"{MAKE_PARTS}{NO_AUTOVACUUM}{STREAMS}"
ALL = f"{EMPTY}{rows(0, ROWS)}{CLOSE_PARTS}"
STATES = {
    "just filled": (ALL, "SELECT 1"),
    "restored": (ALL, "REINDEX SCHEMA relatum"),
    "analysed at a thousandth": (
        f"{EMPTY}{rows(0, FEW)}ANALYZE;{rows(FEW, ROWS)}{CLOSE_PARTS}",
        "SELECT 1",
    ),
}
"""What is done until the statement is asked: a restore makes the indexes behind the rows, and analyses nothing."""


@pytest.fixture(scope="module", params=STATES)
def filled(
    request: pytest.FixtureRequest, database_server_url: str, _migrated_template: str
) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a database with 1,000,000 rows, of which PostgreSQL knows little, or what was true once."""
    fill, then = STATES[request.param]
    with filled_database(database_server_url, _migrated_template, fill, then=then) as connection:
        yield connection


def batch(streams: list[int], messages: int = limits.BATCH) -> dict[str, Any]:
    """A batch as it is asked for: of as many values, a fifth of which nobody has."""
    numbers = range(messages)
    steps = [ROWS // messages * n for n in numbers]
    return {
        "numbers": list(numbers),
        "values": [f"o{step // 2}" if n % 5 else f"nobody-{n}" for n, step in zip(numbers, steps, strict=True)],
        "time_uss": [step * 1_000 for step in steps],
        "due_uss": [step * 1_000 + HOUR_US for step in steps],
        "own_streams": [1] * messages,
        "own_offsets": steps,
        "stream_ids": streams,
        "key_id": 1,
        "grace_us": 1_000_000,
    }


def look_at(plan: dict[str, Any], given: dict[str, Any]) -> None:
    """Nothing but probes of the index by all that is known, few pages, and nothing big sorted or joined otherwise."""
    nodes = list(nodes_of(plan))
    assert scanned_in(plan) - CATALOG == set(), plan
    probes = [node for node in nodes if node.get("Relation Name") == "relationships"]
    assert {node["Node Type"] for node in probes} <= {"Index Only Scan", "Index Scan"}, plan
    assert probes, plan
    for node in probes:
        assert all(column in node["Index Cond"] for column in ("key_id", "value", "stream_id", "time_us")), plan
    assert not {node["Node Type"] for node in nodes} & {"Hash Join", "Merge Join"}, plan
    # A part is a tree of two or three levels; one of thirty may hold a value, as its first and last values say.
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    assert pages < len(given["numbers"]) * len(given["stream_ids"]) * 4 * PARTS, plan


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan"])
@pytest.mark.parametrize("streams", [[2], list(range(2, 11))], ids=["one stream", "nine partitions"])
def test_a_batch_costs_an_index_probe_for_each_message(
    filled: psycopg.Connection[Any], streams: list[int], mode: str
) -> None:
    """No table is scanned, and a batch is answered in a bounded time, whatever statistics there are."""
    given = batch(streams)
    look_at(plan_of(filled, mode, statements.unfollowed(), given), given)

    def is_quick() -> bool:
        return bool(timed(filled, given) < MOST_MS)

    in_a_try(is_quick, what="a batch of 1,000 messages")


def test_a_plan_that_reads_a_table_is_told(filled: psycopg.Connection[Any]) -> None:
    """What looks at a plan fails where PostgreSQL takes another one: tried by forbidding it the index."""
    given = batch([2], messages=3)
    with filled.transaction(force_rollback=True):
        filled.execute("SET LOCAL enable_indexscan = off; SET LOCAL enable_indexonlyscan = off")
        filled.execute("SET LOCAL enable_bitmapscan = off")
        plan = plan_of(filled, "auto", statements.unfollowed(), given)
    with pytest.raises(AssertionError):
        look_at(plan, given)


def timed(connection: psycopg.Connection[Any], given: dict[str, Any]) -> float:
    """Milliseconds that PostgreSQL takes to plan and to carry it out."""
    sql = statements.unfollowed()
    (plan,) = connection.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {sql}".encode(), given).fetchone() or ()
    took: float = plan[0]["Planning Time"] + plan[0]["Execution Time"]
    return took
