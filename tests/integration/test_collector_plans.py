"""The plans of a collector's statements at 100,000 messages: each finds its rows by an index, whatever is known."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from relatum.collecting import _collector_members as member_statements
from relatum.collecting import _collector_status as status_statements
from relatum.outcomes import OUTCOMES
from tests.support.collectors import statements
from tests.support.plans import EACH_MODE, changed_in_place, nodes_of, plan_of_statement

ROWS = 100_000
WAITING = 20_000
DEAD_MEMBER, LIVE_MEMBER = 7, 8
OFFSETS = list(range(ROWS - 500, ROWS))
PLACES = {"in_collector": 1, "of_stream": "orders", "offsets": OFFSETS}
TAKEN = {"in_collector": 1, "of_types": ["order"], "most": 500, "by": LIVE_MEMBER, "token": -1}
RESULTS = {"states": ["succeeded"] * 500, "reasons": [None] * 500, "retries_s": [None] * 500}

NOW = datetime.now(UTC)
LISTED = {"in_collector": 1, "states": ["failed", "dead"], "limit": 101, "at": NOW, "at_source": 0, "at_offset": 0}

STATEMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "outcomes": (
        OUTCOMES,
        {"ids": [f"id-{n}" for n in range(0, ROWS, ROWS // 100)], "in_collector": None, "of_collector": None},
    ),
    "forward": (statements.FORWARD, {**PLACES, "of_member": LIVE_MEMBER, "of_bulk": 1}),
    "succeed": (statements.SUCCEED, {**PLACES, "of_member": LIVE_MEMBER, "of_bulk": 1}),
    "finish": (statements.FINISH, {**PLACES, **RESULTS, "of_member": LIVE_MEMBER, "of_bulk": 1}),
    "unfinished": (statements.UNFINISHED, {**PLACES, "of_member": LIVE_MEMBER}),
    "take over": (statements.TAKE_OVER, {**TAKEN, "lapsed": [DEAD_MEMBER]}),
    "take over of nobody": (statements.TAKE_OVER, {**TAKEN, "lapsed": []}),
    "taken over": (statements.TAKEN_OVER, {"of_member": DEAD_MEMBER, "token": -1}),
    "last collected": (
        member_statements.LAST_COLLECTED,
        {"in_collector": 1, "of_stream": "orders", "until": ROWS // 2},
    ),
    "move lost": (member_statements.MOVE_LOST, {"of_source": 1, "to": ROWS - 500, "to_source": 2}),
    "remove members": (member_statements.REMOVE_MEMBERS, {"lapsed": [DEAD_MEMBER]}),
    "listed finished": (status_statements.FINISHED_BEFORE, LISTED | {"states": ["succeeded"]}),
    "listed unsuccessful": (status_statements.UNSUCCESSFUL_BEFORE, LISTED),
    "listed waiting": (status_statements.UNFINISHED_AFTER, {**LISTED, "states": ["collected", "forwarded"]}),
    "forget": (statements.FORGET, {"in_collector": 1, "most": 500}),
}

INDEXES = {f"collected_messages_{name}" for name in ("place", "id", "unfinished", "finished", "unsuccessful")}

FILL = f"""
INSERT INTO relatum.collectors (name, keep_s) VALUES ('billing', 3600);
INSERT INTO relatum.collector_sources (collector_id, stream) VALUES (1, 'orders'), (1, 'invoices');
INSERT INTO relatum.collector_members (collector_id, holder, types, lease_s, lease_expires_at)
  SELECT 1, 'host', '{{order}}', 15, now() FROM generate_series(1, 20);
INSERT INTO relatum.collected_messages
    (source_id, stream_offset, message_id, type, size, member_id, bulk_id, attempts, state, finished_at)
  SELECT 1, n, 'id-' || n, 'order', 1000, CASE WHEN n < {ROWS} - 250 THEN {DEAD_MEMBER} ELSE {LIVE_MEMBER} END, 1, 1,
    CASE WHEN n < {ROWS} - 500 THEN 'succeeded' ELSE 'forwarded' END,
    CASE WHEN n < {ROWS} - 500 THEN now() - make_interval(secs => {ROWS} - n) END
  FROM generate_series(0, {ROWS} - 1) AS n;
"""


def messages_in(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes of a plan that read the table of messages; there is one at least."""
    found = [node for node in nodes_of(plan) if node.get("Relation Name") == "collected_messages"]
    assert found, plan
    return found


@EACH_MODE
@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_finds_its_messages_by_an_index(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """A statement never scans the table of messages, and reads few rows that it does not want."""
    plan = plan_of_statement(filled, mode, *STATEMENTS[name])
    of_messages = messages_in(plan)
    assert not [node for node in of_messages if node["Node Type"] == "Seq Scan"], plan
    used = {node["Index Name"] for node in nodes_of(plan) if node.get("Index Name", "").startswith("collected_")}
    assert used <= INDEXES, plan
    read = max(node["Actual Rows"] * node["Actual Loops"] for node in of_messages)
    assert read <= 2_000, plan


@contextmanager
def other_messages(filled: psycopg.Connection[Any], columns: str, select: str) -> Iterator[None]:
    """The table of messages has others, of which PostgreSQL knows nothing yet."""
    with filled.transaction(force_rollback=True):
        for statement in (
            "CREATE TABLE relatum.others (LIKE relatum.collected_messages INCLUDING ALL)",
            f"INSERT INTO relatum.others (source_id, stream_offset, message_id, type, size, {columns}) {select}",
            "ALTER TABLE relatum.collected_messages RENAME TO full_table",
            "ALTER TABLE relatum.others RENAME TO collected_messages",
        ):
            filled.execute(statement.encode())
        yield


FAILURES = f"""
SELECT 1, n, 'id-' || n, 'order', 1, CASE WHEN n % 1000 = 0 THEN 'dead' ELSE 'succeeded' END,
  now() - make_interval(secs => n), CASE WHEN n % 1000 = 0 THEN 'why' END FROM generate_series(1, {ROWS}) AS n
"""
BACKLOG = f"SELECT 1, n, 'waiting-' || n, 'order', 1, {LIVE_MEMBER} FROM generate_series(0, {WAITING} - 1) AS n"
BULK = {**PLACES, "offsets": list(range(500)), "of_member": LIVE_MEMBER, "of_bulk": 1}


@EACH_MODE
@pytest.mark.parametrize(
    ("others", "asked", "most"),
    [
        (("state, finished_at, reason", FAILURES), STATEMENTS["listed unsuccessful"], 2_000),
        (("member_id", BACKLOG), (statements.FORWARD, BULK), WAITING),
    ],
    ids=["failures", "a bulk"],
)
def test_rows_are_found_before_the_table_was_analysed(
    filled: psycopg.Connection[Any], mode: str, others: tuple[str, str], asked: tuple[Any, dict[str, Any]], most: int
) -> None:
    """Rare failures, or a bulk in a backlog, are found with few rows read or compared, also without statistics."""
    with other_messages(filled, *others):
        plan = plan_of_statement(filled, mode, *asked)
    seen = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter")
    compared = max(sum(node.get(key, 0) for key in seen) * node["Actual Loops"] for node in nodes_of(plan))
    assert compared <= most, plan
    assert sum(node["Actual Rows"] for node in messages_in(plan)), plan


def test_nothing_moves_in_an_index_when_messages_are_forwarded(filled: psycopg.Connection[Any]) -> None:
    """Forwarding messages changes no indexed column, so that PostgreSQL updates rows within their page."""
    with filled.transaction(force_rollback=True):
        filled.execute(
            "INSERT INTO relatum.collected_messages (source_id, stream_offset, message_id, type, size, member_id) "
            "SELECT 2, n, 'new-' || n, 'order', 1, 8 FROM generate_series(0, 9) AS n"
        )
        parameters = {**PLACES, "of_stream": "invoices", "offsets": list(range(10)), "of_member": 8, "of_bulk": 2}
        given = {**statements.FORWARD.compile().params, **parameters}
        assert changed_in_place(filled, "collected_messages", statements.FORWARD, given) == 10
