"""What docs/contexts.md shows is run, unchanged, and the SQL of placements in two other pages."""

import re
from collections.abc import Iterator
from dataclasses import fields

import psycopg
import pytest
import sqlalchemy as sa

from relatum import errors
from relatum.contexts import ContextOptions, SerialOptions
from relatum.superstreams import Layout
from tests.support.pages import blocks_of, names_there, run, text_of
from tests.support.place import Place
from tests.support.routing import consumed
from tests.support.serial_consuming import serial_bed

PUBLISHING, CONSUMING = text_of("contexts.md", "Publishing\n"), text_of("contexts.md", "Consuming\n")


def test_what_the_page_shows_of_publishing_works(layout: Layout, amqp_url: str, database_url: str) -> None:
    """A consumer gets what the blocks publish, in order."""
    with names_there(amqp_url, database_url) as names:
        for block in blocks_of("contexts.md", "Publishing\n", {"accounts": layout.super_stream}):
            run("contexts.md", block, names)
    found = consumed(layout.super_stream, database_url, amqp_url, 5)
    assert found == {"account 17": [b"opened", b"credited", b"debited", b"closed", b"archived"]}


def test_the_page_names_options_and_defaults() -> None:
    """Each option of the tables is one of the routers' or consumers', with its default, and none is left out."""
    rows = re.findall(r"^\| `(\w+)` \| `?\"?([\w,. ]+?)\"?`? \|", PUBLISHING, re.MULTILINE)
    told = {name: value for name, value in rows if name.islower() or "_" in name}
    wanted = {each.name: each.default for each in fields(ContextOptions)}
    assert set(told) == set(wanted)
    for name, default in wanted.items():
        assert told[name].replace(",", "") == (f"{default:g}" if isinstance(default, float) else str(default))
    table = dict(re.findall(r"^\| (`.*?`) \| (.*?) \|", CONSUMING, re.MULTILINE))
    named = {name for names in table for name in re.findall(r"`(\w+)`", names) if not hasattr(errors, name)}
    defaults = {each.name: each for each in fields(SerialOptions)}
    assert named == set(defaults)
    assert table["`batch_s`"] == str(defaults["batch_s"].default)
    assert table["`lease_s`"] == f"{defaults['lease_s'].default:g}"
    assert table["`batch_messages`, `batch_bytes`"] == "1,000, 4 MiB"
    assert (defaults["batch_messages"].default, defaults["batch_bytes"].default) == (1_000, 4 << 20)


def test_what_the_page_shows_of_consuming_works(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way to consume of docs/contexts.md gets all messages in order, and the status shows its position."""
    sent: list[bytes] = []
    place.sql("CREATE TABLE booked (id bigint GENERATED ALWAYS AS IDENTITY, account text, body bytea)")
    with serial_bed(place.amqp, place.engine) as bed:
        bed.publish(0, "account 17", "opened")
        bed.move(["account 17"], 0, 1)
        bed.publish(1, "account 17", "closed")
        with names_there(place.amqp, place.database) as names:
            names |= {"sa": sa, "send": lambda messages: sent.extend(message.body for message in messages)}
            for block in blocks_of("contexts.md", "Consuming\n", {"accounts": bed.name}):
                block = block.replace("batches()", "batches(3.0)")
                block = block.replace("print(*[message.body for message in batch.messages])", "send(batch.messages)")
                run("contexts.md", block, names)
        streams = bed.streams
    assert sent == [b"opened", b"closed"]
    booked = place.sql("SELECT account, body FROM booked ORDER BY id")
    assert booked == [("account 17", b"opened"), ("account 17", b"closed")] * 2
    assert f"{streams[1]} 2 0 " in capsys.readouterr().out


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
    blocks = re.findall(r"```sql\n(.*?)```", text_of(page, f"{heading}\n"), re.DOTALL)
    return [statement for block in blocks for statement in block.strip().split(";") if statement]


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A connection to a database in which a context was moved, and is held back."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(MOVED.encode())
        yield connection


def test_the_queries_give_what_they_say(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    """The queries of docs/sql.md give what they say, and docs/troubleshooting.md leaves no row of a super stream."""
    partitions, names, moves, consumers = (
        connection.execute(statement.encode()).fetchall() for statement in section("sql.md", "Placements and moves")
    )
    assert partitions == [("orders", "orders-0", "active", 3), ("orders", "orders-1", "active", 0)]
    assert [row[:3] for row in names] == [("customer 4712", "orders-0", "open"), ("customer 5", "orders-0", "open")]
    ((*facts, pause),) = moves
    assert facts == [1, "orders-0", "orders-1", "switched", 1]
    assert str(pause) == "0:00:00.400000"
    assert [row[:-1] for row in consumers] == [
        ("billing", "orders-0", 8, "host:1:a", None, None),
        ("billing", "orders-1", 9, "host:1:a", 1, 3),
    ]
    *of_super_stream, of_consumer = section("troubleshooting.md", "Placements")
    cells = re.findall(r"^\| (`[^|]*) \|", text_of("troubleshooting.md", "Placements\n"), re.MULTILINE)
    tables = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(tables) == 10
    connection.execute(of_consumer.encode())
    assert connection.execute("SELECT count(*) FROM relatum.serial_holds").fetchone() == (0,)
    for statement in of_super_stream:
        connection.execute(statement.encode())
    for table in tables:
        assert connection.execute(f"SELECT count(*) FROM relatum.{table}".encode()).fetchone() == (0,), table
