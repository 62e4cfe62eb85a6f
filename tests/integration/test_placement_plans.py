"""The plans of placements, moves and consumers at 300,000 rows: an index for each, whatever is known of values."""

from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import registry

from relatum.contexts.placement import _placement_prune_statements as prune
from relatum.contexts.placement import _placement_statements as statements
from relatum.contexts.serial.consuming import _serial_statements as consuming
from relatum.contexts.serial.moving import _move_statements as moving
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
INSERT INTO relatum.serial_consumers (super_stream_id, name) SELECT 1 + n % 2, 'c' || n FROM generate_series(0, 9) AS n;
INSERT INTO relatum.serial_positions (consumer_id, partition_id, position)
  SELECT c, p, {MOVES} FROM generate_series(1, 10) AS c, generate_series(1, 200) AS p;
INSERT INTO relatum.serial_holds (consumer_id, partition_id, source_id, move_id, epoch, marker_offset, cursor,
    fence_offset)
  SELECT 1 + n % 10, 1 + (n + 2) % 200, 1 + n % 200, n, n, n, n, n FROM generate_series(1, {MOVES}, 7) AS n;
UPDATE relatum.context_moves SET state = 'fencing', ended_at = NULL, fence_offset = NULL, marker_offset = NULL
  WHERE move_id BETWEEN {MOVES} - 19 AND {MOVES};
INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, contexts, fence_epoch, epoch, scan_from,
    target_scan_from, generation)
  SELECT 1, 2, 4, 500, {MOVES} + n, {MOVES} + n, 0, 0, 0 FROM generate_series(1, 3) AS n;
INSERT INTO relatum.moved_contexts (move_id, name, from_epoch)
  SELECT {MOVES} + m, 'n' || (1000 * m + 2 * n), 0 FROM generate_series(1, 3) AS m, generate_series(1, 500) AS n;
UPDATE relatum.placements SET state = 'moving', move_id = {MOVES} + 1
  WHERE super_stream_id = 1 AND name = ANY (SELECT name FROM relatum.moved_contexts WHERE move_id = {MOVES} + 1);
"""
"""300,000 placements in two super streams of a hundred partitions; each name moved once or twice, half are over.

Ten consumers wait for every seventh move; three moves of 500 contexts are under way.
"""

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
    "forget released": (prune.forget_released, OURS | {"older_s": 100.0, "most": 100}),
}

MOVED = [f"n{2 * number}" for number in range(500)]
MOVE = {"of_move": MOVES + 1}
OF_PARTITION, OF_CONSUMER = {"of_partition": 3}, {"of_consumer": 1}
AT_END = {"from_offset": MOVES - 2_000, "to_offset": MOVES}

OF_MOVES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one": (moving.one, OURS | MOVE),
    "under way": (moving.under_way, OURS),
    "latest": (moving.latest, OURS | {"at_most": 20}),
    "lock named": (moving.lock_named, OURS | {"named": MOVED}),
    "add contexts": (moving.add_contexts, OURS | {"of_move": 1, "named": ["n100000", "n100002"]}),
    "stop": (moving.stop, OURS | MOVE | {"named": MOVED, "at_generation": 5}),
    "set fenced": (moving.set_fenced, MOVE | {"of_attempt": 1, "at_offset": 5}),
    "set aborting": (moving.set_aborting, OURS | MOVE | {"because": None}),
    "lock moving": (moving.lock_moving, OURS | MOVE),
    "go on": (
        moving.go_on,
        OURS | MOVE | {"named": MOVED, "to_partition": 4, "to_epoch": 5, "at_generation": 5},
    ),
    "attend": (moving.attend, MOVE | {"held_by": "me", "holds_s": 5.0}),
    "keep attending": (moving.keep_attending, MOVE | {"held_by": "me", "holds_s": 5.0}),
    "take abandoned": (moving.take_abandoned, OURS | {"held_by": "me", "holds_s": 5.0}),
    "placed in": (moving.placed_in, {"of_partition": 2}),
    "moves of": (moving.moves_of, OURS | {"of_partition": 2}),
}

OF_CONSUMERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "where to read on": (consuming.scans_of, OF_PARTITION),
    "lost fences": (consuming.lost_fences, OF_PARTITION | AT_END),
    "lost markers": (consuming.lost_markers, OF_PARTITION | AT_END),
    "holds of a partition": (consuming.holds_of, OF_CONSUMER | OF_PARTITION),
    "complete holds": (consuming.complete_holds, OF_CONSUMER | {"of_partitions": [3]}),
    "the shares": (consuming.PARTITIONS.look, {"of_within": 1, "by": "m1", "keys": list(range(1, 201))}),
    "ended moves": (prune.ended_moves, OURS | {"after": 7_000, "most": 50}),
    "forget contexts": (
        prune.forget_contexts,
        {"moves": list(range(7_000, 7_050)), "partition_ids": list(range(1, 201)), "firsts": [MOVES] * 200},
    ),
    "forget moves": (prune.forget_moves, {"moves": list(range(7_000, 7_050))}),
}

SMALL = {"super_streams", "super_stream_partitions", "publisher_sessions"}
"""Tables that may be scanned: one row a super stream, one a partition, and one a router that publishes."""


def sql_of(statement: Any) -> tuple[str, dict[str, Any]]:
    """A statement as psycopg gets it, with the parameters it brings itself."""
    compiled = statement.compile(dialect=registry.load("postgresql.psycopg")())
    return str(compiled), {name: value for name, value in compiled.params.items() if value is not None}


OF_EACH_PARTITION = {"serial_consumers", "serial_positions", "serial_members"}
"""Tables that consumers may scan: they have a row for each partition, at most."""

CASES = [
    *((f"placements: {name}", *each, SMALL, 1_000, 1_000) for name, each in STATEMENTS.items()),
    *((f"moves: {name}", *each, SMALL, 2_000, None) for name, each in OF_MOVES.items()),
    *((f"consumers: {name}", *each, SMALL | OF_EACH_PARTITION, None, 3_000) for name, each in OF_CONSUMERS.items()),
]


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_each_statement_uses_its_index(filled: psycopg.Connection[Any], case: tuple[Any, ...], mode: str) -> None:
    """No big table is scanned, and few rows and pages are read, whether values are known or not."""
    name, statement, wanted, may_be_scanned, most_rows, most_pages = case
    sql, own = sql_of(statement)
    plan = plan_of(filled, mode, sql, own | wanted)
    scanned = {node["Relation Name"] for node in nodes_of(plan) if node["Node Type"] == "Seq Scan"}
    assert scanned <= may_be_scanned, plan
    rows = max(node["Actual Rows"] * node["Actual Loops"] for node in nodes_of(plan))
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    factor = 5 if "too many" in name else 1
    assert most_rows is None or rows < most_rows * factor, plan
    assert most_pages is None or pages < most_pages * factor, plan
