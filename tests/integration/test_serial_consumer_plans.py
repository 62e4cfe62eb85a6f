"""The plans of serial consumers' statements at many moves, consumers and partitions: rows are found by an index."""

from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import psycopg as dialect

from relatum.contexts.serial.consuming import _serial_statements as statements
from tests.support.plans import nodes_of, plan_of

MOVES = 20_000
CONTEXTS = 5
CONSUMERS = 200
PARTITIONS = 100

FILL = f"""
INSERT INTO relatum.super_streams (name, header) VALUES ('orders', 'serialization_context'), ('others', 'x');
INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place)
  SELECT 1, 'orders-' || n, n::text, n FROM generate_series(0, {PARTITIONS} - 1) AS n;
INSERT INTO relatum.serial_consumers (super_stream_id, name) SELECT 1, 'c' || n FROM generate_series(1, {CONSUMERS}) n;
INSERT INTO relatum.serial_members (consumer_id, holder, lease_expires_at)
  SELECT c, 'm' || m, now() + interval '1 hour' FROM generate_series(1, {CONSUMERS}) c, generate_series(1, 20) m;
INSERT INTO relatum.serial_positions (consumer_id, partition_id, position, holder)
  SELECT c, p, 1000, 'm' || p % 20 + 1
  FROM generate_series(1, {CONSUMERS}) c, generate_series(1, {PARTITIONS}) p;
INSERT INTO relatum.context_moves
    (super_stream_id, source_id, target_id, state, contexts, fence_epoch, epoch, scan_from, target_scan_from,
     fence_offset, marker_offset, ended_at, generation)
  SELECT 1, n % {PARTITIONS} + 1, (n + 1) % {PARTITIONS} + 1, 'switched', {CONTEXTS}, n, n, n, n, n, n, now(), 0
  FROM generate_series(1, {MOVES}) n;
INSERT INTO relatum.moved_contexts (move_id, name, from_epoch)
  SELECT m, 'context-' || (m * {CONTEXTS} + n) % 10000, 0
  FROM generate_series(1, {MOVES}) m, generate_series(1, {CONTEXTS}) n;
INSERT INTO relatum.serial_holds
    (consumer_id, partition_id, move_id, source_id, epoch, marker_offset, cursor, fence_offset)
  SELECT c, (m + 1) % {PARTITIONS} + 1, m, m % {PARTITIONS} + 1, m, m, m, m
  FROM generate_series(1, {CONSUMERS}) c, generate_series(1, 40) m;
"""
"""Many moves, consumers and partitions."""

ME = {"of_consumer": 7, "of_partition": 8, "by": "m9"}
MEMBER, KEYS = {"of_within": 7, "by": "m9"}, list(range(1, PARTITIONS + 1))
TOKEN = {"token": UUID(int=7), "tokens_before": [UUID(int=6)]}
RANGE = {**ME, "from_offset": 100, "to_offset": 1000}

STATEMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "advance": (
        statements.advance,
        {**ME, "expected": 0, "at": 5, "known_offset": 4, "known_fingerprint": 1, "known_chunk_ms": 2, **TOKEN},
    ),
    "advance unread": (statements.advance_unread, {**ME, "expected": 0, "at": 5, **TOKEN}),
    "begin": (statements.begin, ME),
    "renew": (statements.PARTITIONS.renew, {**MEMBER, "lease_s": 4.0}),
    "alive": (statements.PARTITIONS.alive, MEMBER),
    "bury": (statements.PARTITIONS.bury, MEMBER),
    "shared": (statements.shared, ME),
    "look": (statements.PARTITIONS.look, {**MEMBER, "keys": KEYS}),
    "take": (statements.PARTITIONS.take, {**MEMBER, "keys": KEYS, "holders": ["m9"] * len(KEYS), "at_most": 3}),
    "release": (statements.PARTITIONS.release, {**MEMBER, "keys": KEYS}),
    "leave": (statements.PARTITIONS.leave, MEMBER),
    "members up": (statements.living, ME),
    "holds": (statements.holds_of, ME),
    "scans": (statements.scans_of, ME),
    "lost fences": (statements.lost_fences, RANGE),
    "lost markers": (statements.lost_markers, RANGE),
    "begin a hold": (
        statements.begin_hold,
        {**ME, "of_move": 77, "of_source": "orders-3", "of_epoch": 9, "marked_at": 1, "next_held": 2, "fenced_at": 3},
    ),
    "move a hold": (statements.move_hold, {**ME, "of_move": 6, "next_held": 9, "waiting": 4}),
    "end a hold": (statements.end_hold, {**ME, "of_move": 6}),
    "complete holds": (statements.complete_holds, {**ME, "of_partitions": [3, 4, 5, 6, 7]}),
    "status": (statements.status, ME),
    "holds shown": (statements.status_holds, ME),
}

LARGE = {"serial_positions", "serial_members", "serial_holds", "context_moves", "moved_contexts"}
"""The tables that are never read as a whole."""


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_finds_its_rows_by_an_index(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """No large table is scanned, and not many more rows are read than are meant."""
    statement, parameters = STATEMENTS[name]
    compiled = statement.compile(dialect=dialect.dialect())
    plan = plan_of(filled, mode, str(compiled), {**compiled.params, **parameters})
    of_tables = [node for node in nodes_of(plan) if node.get("Relation Name") in LARGE]
    assert of_tables, plan
    assert not [node for node in of_tables if node["Node Type"] == "Seq Scan"], plan
    assert max(node["Actual Rows"] * node["Actual Loops"] for node in of_tables) <= 1_000, plan


def test_moving_a_position_moves_nothing_in_an_index(filled: psycopg.Connection[Any]) -> None:
    """Each batch writes one row, which stays on its page where there is room."""
    query = b"SELECT pg_stat_get_xact_tuples_hot_updated('relatum.serial_positions'::regclass)"
    with filled.transaction(force_rollback=True):
        before = filled.execute(query).fetchone()
        statement, parameters = STATEMENTS["advance"]
        compiled = statement.compile(dialect=dialect.dialect())
        filled.execute(str(compiled).encode(), {**compiled.params, **parameters})
        after = filled.execute(query).fetchone()
    assert before is not None
    assert after is not None
    assert after[0] - before[0] == 1


def test_the_statements_are_all_here() -> None:
    """A statement on the large tables that is added gets its plan tested."""
    tested = {id(statement) for statement, _ in STATEMENTS.values()}
    rare = {
        # Once for each name that is new, or for each stream that is gone.
        "has_positions",
        "moves_of",
        "drain",
        "go_on_from",
        "drop_holds_behind",
        "move_holds_back",
        "free_holds_behind",
        "drop_holds",
        "free_holds",
    }
    left_out = {
        name
        for name, value in vars(statements).items()
        if isinstance(value, sa.Select | sa.Update | sa.Delete | sa.CompoundSelect)
        and not name.startswith("_")
        and id(value) not in tested
        and any(table in str(value) for table in LARGE)
    }
    assert left_out == rare
