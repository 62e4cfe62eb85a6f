"""The plan of the look-up of predecessors at 300,000 rows, whatever the planner knows of the parameters."""

from typing import Any

import psycopg
import pytest
from sqlalchemy.dialects import postgresql

from relatum.contexts.affinity._predecessors import recorded_places
from tests.support.plans import MAKE_PARTS, PARTS, nodes_of, plan_of

FILL = f"""
{MAKE_PARTS}
INSERT INTO relatum.streams (stream_id, name, super_stream) OVERRIDING SYSTEM VALUE
  SELECT n, 'orders-' || n, 'orders' FROM generate_series(1, 50) AS n;
INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value, part)
  SELECT n / 50, n * 1000::bigint, 1 + n % 50, 1 + n % 2, 'm' || n, n * {PARTS} / 300000
  FROM generate_series(0, 299999) AS n;
"""
"""The rows of 300,000 messages: fifty partitions, two keys, an id for each message."""


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_predecessor_is_found_by_the_index(filled: psycopg.Connection[Any], mode: str) -> None:
    """The rows of an id are found by the index of values, few pages read, and no row of another id is looked at."""
    statement = recorded_places(1, "m7774", ["orders-1", "orders-25", "orders-50"], "/")
    compiled = statement.compile(
        dialect=postgresql.dialect(paramstyle="pyformat"), compile_kwargs={"render_postcompile": True}
    )
    plan = plan_of(filled, mode, str(compiled), dict(compiled.params))
    reads = [node for node in nodes_of(plan) if node.get("Relation Name") == "relationships"]
    assert {node["Index Name"] for node in reads} == {"relationships_lookup"}, plan
    assert plan["Actual Rows"] == 1, plan
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 5 * PARTS, plan
