"""The plans of shared groups at 100,000 done ones: what is still to do is found by an index of its own."""

from typing import Any

import psycopg
import pytest

from relatum_consumer.groups import _claims as claims
from relatum_consumer.groups._consumer import HOLDERS, SCANS
from relatum_consumer.groups._scanning import WRITE_DOWN
from tests.support.plans import nodes_of, plan_of_statement

DONE = 100_000
READY = 50

MINE = {"consumer_id": 1, "holder": "me"}
LEASE = {"lease_s": 15.0}
ONE = MINE | {"group_id": f"{7:048x}", "number": 1}

STATEMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "claiming": (claims.CLAIM, MINE | LEASE | {"limit": 10, "held": []}),
    "renewing": (claims.RENEW, MINE | LEASE | {"group_ids": [f"{n:048x}" for n in range(10)]}),
    "acknowledging": (claims.DONE, ONE),
    "counting": (claims.COUNT_GIVEN, ONE | {"given": 1}),
    "giving back": (claims.READY, ONE),
    "asking for one": (claims.STATE_OF, ONE),
    "who has some": (HOLDERS, {"consumer_id": 1}),
    "what is scanned": (SCANS, {"consumer_id": 1, "stream_ids": [1, 2]}),
    "writing down": (
        WRITE_DOWN,
        {
            "consumer_id": 1,
            "present": [1],
            "from_offset": 0,
            "expected": 100,
            "to_offset": 200,
            "stream_id": 1,
            "coverage_id": 1,
            "ranks": list(range(100)),
            "first_offsets": list(range(100)),
            "stream_ids": [1] * 100,
            "states": ["ready"] * 100,
            "group_ids": [f"{n:048x}" for n in range(100)],
            "outside": [f"{n:048x}" for n in range(100, 110)],
        },
    ),
}

FILL = f"""
INSERT INTO relatum.streams (name) VALUES ('s1');
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
"""100,000 groups that are done, fifty to be given and fifty incomplete."""


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", STATEMENTS)
def test_what_is_done_costs_nothing(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """No table of groups is scanned, and few pages are read, whether values are known or not."""
    plan = plan_of_statement(filled, mode, *STATEMENTS[name])
    scanned = {node["Relation Name"] for node in nodes_of(plan) if node["Node Type"] == "Seq Scan"}
    assert scanned <= {"group_consumers", "streams"}, plan
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    # Writing down touches each group's page and its indexes' pages; the others touch ten groups at most.
    assert pages < (3_000 if name == "writing down" else 400), (pages, plan)
    if name == "claiming":
        # The first ten in order, out of the partial index, without sorting.
        assert "group_states_next" in {node.get("Index Name") for node in nodes_of(plan)}, plan
        assert not [node for node in nodes_of(plan) if node["Node Type"] in ("Sort", "Incremental Sort")], plan
        assert plan["Actual Rows"] == 10
