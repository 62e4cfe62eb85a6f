"""The SQL that docs/sql.md and docs/operations.md show of placements is run, as it stands there."""

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

DOCS = Path(__file__).parents[2] / "docs"

MOVED = """
INSERT INTO relatum.super_streams (name, header) VALUES ('orders', 'serialization_context');
INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place, open_sets)
  SELECT super_stream_id, 'orders-' || n, n::text, n, 3 - 3 * n FROM relatum.super_streams, generate_series(0, 1) AS n;
INSERT INTO relatum.placements (super_stream_id, name, partition_id, epoch, first_epoch)
  SELECT super_stream_id, 'customer ' || n, partition_id, n, n
  FROM relatum.super_stream_partitions, unnest(ARRAY[4711, 4712, 5]) AS n WHERE place = 0;
INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, state, contexts, fence_epoch, epoch,
  scan_from, target_scan_from, fence_offset, marker_offset, started_at, ended_at,
  generation)
  SELECT super_stream_id, min(partition_id), max(partition_id), 'switched', 1, 9, 9, 0, 0, 5, 7,
    now() - interval '1 second', now() - interval '600 milliseconds', 0
  FROM relatum.super_stream_partitions GROUP BY super_stream_id;
INSERT INTO relatum.moved_contexts (move_id, name, from_epoch) VALUES (1, 'customer 4711', 1);
INSERT INTO relatum.serial_consumers (super_stream_id, name)
  SELECT super_stream_id, 'billing' FROM relatum.super_streams;
INSERT INTO relatum.serial_positions (consumer_id, partition_id, position, holder)
  SELECT 1, partition_id, 8 + place, 'host:1:a' FROM relatum.super_stream_partitions;
INSERT INTO relatum.serial_holds (consumer_id, partition_id, source_id, move_id, epoch, marker_offset, cursor,
  fence_offset, held)
  SELECT 1, max(partition_id), min(partition_id), 1, 9, 7, 8, 5, 3 FROM relatum.super_stream_partitions;
"""


def section(page: str, heading: str) -> list[str]:
    """The statements of SQL below a heading, in their order."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    return [statement for block in blocks for statement in block.strip().split(";") if statement]


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A connection to a database in which a context was moved, and is held back."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(MOVED.encode())
        yield connection


def test_the_queries_give_what_they_say(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """Counts, names, pauses, positions and holds."""
    rows = [
        connection.execute(statement.encode()).fetchall() for statement in section("sql.md", "Placements and moves")
    ]
    partitions, names, moves, consumers = rows
    assert partitions == [("orders", "orders-0", "active", 3), ("orders", "orders-1", "active", 0)]
    assert [row[:3] for row in names] == [("customer 4712", "orders-0", "open"), ("customer 5", "orders-0", "open")]
    ((*facts, pause),) = moves
    assert facts == [1, "orders-0", "orders-1", "switched", 1]
    assert str(pause) == "0:00:00.400000"
    assert [row[:-1] for row in consumers] == [
        ("billing", "orders-0", 8, "host:1:a", None, None),
        ("billing", "orders-1", 9, "host:1:a", 1, 3),
    ]


def test_a_super_stream_is_removed_as_the_page_says(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """Nothing is left of it; what is left of others is not touched."""
    *of_super_stream, of_consumer = section("operations.md", "Placements")
    _, _, text = (DOCS / "operations.md").read_text().partition("## Placements\n")
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    tables = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(tables) == 10
    connection.execute(of_consumer.encode())
    assert connection.execute("SELECT count(*) FROM relatum.serial_holds").fetchone() == (0,)
    for statement in of_super_stream:
        connection.execute(statement.encode())
    for table in tables:
        assert connection.execute(f"SELECT count(*) FROM relatum.{table}".encode()).fetchone() == (0,), table
