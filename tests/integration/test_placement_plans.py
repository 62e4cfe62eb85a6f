"""The plans of placements and moves at 300,000 rows: an index for each, whatever is known of the parameters."""

from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import registry

from relatum.contexts.placement import _placement_prune_statements as prune_statements
from relatum.contexts.placement import _placement_statements as statements
from tests.support.plans import nodes_of, plan_of

NAMES = 150_000
MOVES = 30_000
OURS = {"of_super_stream": 1}
NOW = NAMES + 1_000_000

FILL = f"""
INSERT INTO relatum.super_streams (name, header, generation) VALUES ('orders', 'h', {NOW}), ('other', 'h', {NOW});
INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place, open_sets)
  SELECT 1 + n % 2, 's' || n, n::text, n / 2, 0 FROM generate_series(0, 199) AS n;
INSERT INTO relatum.placements (super_stream_id, name, partition_id, epoch, first_epoch, generation, used_at)
  SELECT 1 + n % 2, 'n' || n, 1 + n % 200, n, n, n, now() - make_interval(secs => n)
  FROM generate_series(1, {NAMES}) AS n;
INSERT INTO relatum.placements
    (super_stream_id, name, partition_id, epoch, first_epoch, generation, state, released_at)
  SELECT 1 + n % 2, 'r' || n, 1 + n % 200, n, n, n, 'released', now() - make_interval(secs => n / 10.0)
  FROM generate_series(1, {NAMES}) AS n;
INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, state, contexts, fence_epoch, epoch,
    scan_from, target_scan_from, fence_offset, marker_offset, ended_at, generation)
  SELECT 1 + n % 2, 1 + n % 200, 1 + (n + 2) % 200, 'switched', 5, n, n, n, n, n, n, now(), 0
  FROM generate_series(1, {MOVES}) AS n;
INSERT INTO relatum.moved_contexts (move_id, name, from_epoch)
  SELECT m, 'n' || (m * 7 + n * 30000) % {NAMES}, 0 FROM generate_series(1, {MOVES}) AS m, generate_series(0, 4) AS n;
SELECT setval('relatum.placement_epochs', {NOW});
"""
"""300,000 placements in two super streams of a hundred partitions; each name moved once or twice, half are over."""

STATEMENTS: dict[str, tuple[sa.Executable, dict[str, Any]]] = {
    "super stream": (statements.find_super_stream, {"of_vhost": "/", "of_name": "orders"}),
    "generation": (statements.generation, OURS),
    "partitions": (statements.partitions, OURS),
    "find": (statements.find, OURS | {"names": [f"n{2 * n}" for n in range(50)]}),
    "changes, none": (statements.changes, OURS | {"since": NAMES, "most": 10_001}),
    "changes, a few": (statements.changes, OURS | {"since": NAMES - 20, "most": 10_001}),
    "changes, too many": (statements.changes, OURS | {"since": 0, "most": 501}),
    "idle": (statements.idle, OURS | {"idle_s": 1000.0, "most": 100}),
    "list": (statements.listed(in_partition=False, after=False), OURS | {"states": ["open"], "most": 50}),
    "list on": (
        statements.listed(in_partition=False, after=True),
        OURS | {"states": ["open"], "most": 50, "after": "n5"},
    ),
    "place": (statements.place(bounded=False), OURS | {"names": ["n2", "r4", "x"], "partition_ids": [1, 3, 5]}),
    "place, bounded": (statements.place(bounded=True), OURS | {"names": ["n2", "r4", "x"], "partition_ids": [1, 3, 5]}),
    "release": (statements.release, OURS | {"names": ["n2", "n4", "r6"], "epochs": [2, 4, 6]}),
    "touch": (statements.touch, OURS | {"names": ["n2", "n4", "r6"]}),
    "move": (statements.move, {"of_move": 77}),
    "fence after": (statements.fence_after, OURS | {"of_name": "n14", "of_stream": "s2", "above": 0}),
    "forget released": (prune_statements.forget_released, OURS | {"older_s": 100.0, "most": 100}),
}

SMALL = {"super_streams", "super_stream_partitions", "publisher_sessions"}
"""Tables that may be scanned: one row a super stream, one a partition, and one a router that publishes."""


def sql_of(statement: Any) -> tuple[str, dict[str, Any]]:
    """A statement as psycopg gets it, with the parameters it brings itself."""
    compiled = statement.compile(dialect=registry.load("postgresql.psycopg")())
    return str(compiled), {name: value for name, value in compiled.params.items() if value is not None}


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_uses_its_index(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """No big table is scanned, and few pages are read, whether values are known or not."""
    statement, wanted = STATEMENTS[name]
    sql, own = sql_of(statement)
    plan = plan_of(filled, mode, sql, own | wanted)
    scanned = {node["Relation Name"] for node in nodes_of(plan) if node["Node Type"] == "Seq Scan"}
    assert scanned <= SMALL, plan
    rows = max(node["Actual Rows"] * node["Actual Loops"] for node in nodes_of(plan))
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    most = 5_000 if name == "changes, too many" else 1_000
    assert rows < most, plan
    assert pages < most, plan
