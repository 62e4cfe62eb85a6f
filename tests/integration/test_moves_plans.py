"""The plans of moves at 30,000 moves of 150,000 contexts: an index for each, whatever is known of the parameters."""

from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum.contexts.serial.moving import _move_statements as statements
from tests.integration.test_placement_plans import FILL as PLACEMENTS
from tests.integration.test_placement_plans import MOVES, SMALL, sql_of
from tests.support.plans import nodes_of, plan_of

FILL = f"""
{PLACEMENTS}
INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, contexts, fence_epoch, epoch, scan_from,
    target_scan_from, generation)
  SELECT 1, 2, 4, 500, {MOVES} + n, {MOVES} + n, 0, 0, 0 FROM generate_series(1, 3) AS n;
INSERT INTO relatum.moved_contexts (move_id, name, from_epoch)
  SELECT {MOVES} + m, 'n' || (1000 * m + 2 * n), 0 FROM generate_series(1, 3) AS m, generate_series(1, 500) AS n;
UPDATE relatum.placements SET state = 'moving', move_id = {MOVES} + 1
  WHERE super_stream_id = 1 AND name = ANY (SELECT name FROM relatum.moved_contexts WHERE move_id = {MOVES} + 1);
"""
"""Many moves: three moves of 500 contexts that are under way."""

OURS = {"of_super_stream": 1}
NAMES = [f"n{2 * number}" for number in range(500)]
MOVE = {"of_move": MOVES + 1}

STATEMENTS: dict[str, tuple[sa.Executable, dict[str, Any]]] = {
    "one": (statements.one, OURS | MOVE),
    "under way": (statements.under_way, OURS),
    "latest": (statements.latest, OURS | {"at_most": 20}),
    "lock named": (statements.lock_named, OURS | {"named": NAMES}),
    "add contexts": (statements.add_contexts, OURS | {"of_move": 1, "named": ["n100000", "n100002"]}),
    "stop": (statements.stop, OURS | MOVE | {"named": NAMES, "at_generation": 5}),
    "set fenced": (statements.set_fenced, MOVE | {"of_attempt": 1, "at_offset": 5}),
    "set aborting": (statements.set_aborting, OURS | MOVE | {"because": None}),
    "lock moving": (statements.lock_moving, OURS | MOVE),
    "go on": (
        statements.go_on,
        OURS | MOVE | {"named": NAMES, "to_partition": 4, "to_epoch": 5, "at_generation": 5},
    ),
    "attend": (statements.attend, MOVE | {"held_by": "me", "holds_s": 5.0}),
    "keep attending": (statements.keep_attending, MOVE | {"held_by": "me", "holds_s": 5.0}),
    "take abandoned": (statements.take_abandoned, OURS | {"held_by": "me", "holds_s": 5.0}),
    "placed in": (statements.placed_in, {"of_partition": 2}),
    "moves of": (statements.moves_of, OURS | {"of_partition": 2}),
}


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
    assert rows < 2_000, plan
