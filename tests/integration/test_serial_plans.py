"""The plans of serial consumers, and of pruning, among 30,000 moves: an index for each, whatever is known of values."""

from typing import Any

import psycopg
import pytest

from relatum.contexts.placement import _placement_prune_statements as prune
from relatum.contexts.serial.consuming import _serial_statements as consuming
from tests.integration.test_placement_plans import FILL as PLACEMENTS
from tests.integration.test_placement_plans import MOVES, OURS, SMALL, sql_of
from tests.support.plans import nodes_of, plan_of

FILL = f"""
{PLACEMENTS}
INSERT INTO relatum.serial_consumers (super_stream_id, name) SELECT 1 + n % 2, 'c' || n FROM generate_series(0, 9) AS n;
INSERT INTO relatum.serial_positions (consumer_id, partition_id, position)
  SELECT c, p, {MOVES} FROM generate_series(1, 10) AS c, generate_series(1, 200) AS p;
INSERT INTO relatum.serial_holds (consumer_id, partition_id, source_id, move_id, epoch, marker_offset, cursor,
    fence_offset)
  SELECT 1 + n % 10, 1 + (n + 2) % 200, 1 + n % 200, n, n, n, n, n FROM generate_series(1, {MOVES}, 7) AS n;
UPDATE relatum.context_moves SET state = 'fencing', ended_at = NULL, fence_offset = NULL, marker_offset = NULL
  WHERE move_id > {MOVES - 20};
"""
"""30,000 moves, and consumers that wait for every seventh."""

OF_PARTITION = {"of_partition": 3}
OF_CONSUMER = {"of_consumer": 1}
AT_END = {"from_offset": MOVES - 2_000, "to_offset": MOVES}

STATEMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
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

ALL_OF_A_CONSUMER = SMALL | {"serial_consumers", "serial_positions", "serial_members"}
"""Tables that may be scanned: they have a row for each partition, at most."""


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_uses_its_index(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """Neither moves nor their contexts nor placements are scanned, and few pages are read."""
    statement, wanted = STATEMENTS[name]
    sql, own = sql_of(statement)
    plan = plan_of(filled, mode, sql, own | wanted)
    scanned = {node["Relation Name"] for node in nodes_of(plan) if node["Node Type"] == "Seq Scan"}
    assert scanned <= ALL_OF_A_CONSUMER, plan
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    assert pages < 3_000, plan
