"""Every kind of damage to every table that is derived from streams is found, named and mended."""

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum.headers import RECEIPT_HEADER, TIME_HEADER
from relatum.membership import GROUP_KEY
from relatum.reading import StreamReader
from relatum.recording import StreamVerified, repair, verify
from relatum.store import add_keys
from tests.support import (
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    recording,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support._raw_publisher import RawPublisher, uncompressed
from tests.support.place import Place

MESSAGES = 300
GROUP_ID = "0123456789abcdef" * 3
BEGAN_US = 1_700_000_000_000_000

TABLES = (
    "streams",
    "relationships",
    "time_blocks",
    "coverage",
    "checkpoints",
    "receipts",
    "group_consumers",
    "group_scans",
    "group_states",
)

ROUNDS = 1
ROUNDS_LONG = 100


def message(number: int) -> tuple[bytes, dict[str, Any]]:
    """Orders on hosts, with jumbled times; some wait for a receipt, some belong to a group."""
    headers: dict[str, Any] = {"order_id": f"o{number}", "host": f"h{number % 7}"}
    if number % 3:
        headers[TIME_HEADER] = BEGAN_US + (number * 7_919 % 1_000) * 10_000
    if number % 10 == 0:
        headers[RECEIPT_HEADER] = f"receipt-{number}"
    if number % 100 == 5:
        headers |= {"group_id": GROUP_ID, "group_sequence": number // 100 + 1, "group_last": False}
    return b"%d" % number, headers


@dataclass(frozen=True)
class World:
    """A recorded stream, and what its tables hold while they are sound."""

    amqp_url: str
    database_url: str
    engine: sa.Engine
    stream: str

    def save(self) -> None:
        """Keep a copy of what is sound."""
        with psycopg.connect(self.database_url) as connection:
            connection.execute("CREATE SCHEMA sound")
            for table in TABLES:
                connection.execute(f"CREATE TABLE sound.{table} AS SELECT * FROM relatum.{table}")

    def restore(self) -> None:
        """Begin with what is sound again."""
        with psycopg.connect(self.database_url) as connection:
            connection.execute(f"TRUNCATE {', '.join(f'relatum.{table}' for table in TABLES)} CASCADE")
            for table in TABLES:
                connection.execute(f"INSERT INTO relatum.{table} OVERRIDING SYSTEM VALUE SELECT * FROM sound.{table}")

    def verified(self) -> list[StreamVerified]:
        """What is found now."""
        return verify(self.amqp_url, self.engine.url, [self.stream]).streams

    def tables(self) -> dict[str, Any]:
        """What look-ups depend on: rows, what is covered for which key, holes, the tail's end, and groups."""
        with psycopg.connect(self.database_url) as connection:
            rows = connection.execute(
                "SELECT stream_offset, time_us, stream_id, key_id, value FROM relatum.relationships"
            ).fetchall()
            covered: Counter[tuple[int, int]] = Counter()
            for start, end, key_ids, with_time, kind in connection.execute(
                "SELECT from_offset, to_offset, key_ids, with_time, kind FROM relatum.coverage"
            ):
                held = [*key_ids, *([0] if with_time else [])] if kind == "recorded" else [-1]
                covered.update((offset, key_id) for key_id in held for offset in range(start, end))
            tail = connection.execute("SELECT to_offset FROM relatum.coverage WHERE is_tail").fetchall()
            group = connection.execute("SELECT group_id, first_offset, state FROM relatum.group_states").fetchall()
            stream = connection.execute("SELECT name, state, generation, replaced_at FROM relatum.streams").fetchall()
        return {"rows": Counter(rows), "covered": covered, "tail": tail, "groups": group, "streams": stream}


@pytest.fixture
def world(place: Place) -> World:
    """A stream recorded in two sessions with different keys, back-filled in between, and scanned by a consumer."""
    place.put(*map(message, range(MESSAGES // 2)))
    add_keys(place.engine, [GROUP_KEY])
    place.record(keys=["order_id"])
    place.put(*map(message, range(MESSAGES // 2, MESSAGES)))
    place.record(keys=["host"])
    place.backfill()
    with psycopg.connect(place.database) as connection:
        connection.execute(
            "INSERT INTO relatum.group_consumers (name, ordering) OVERRIDING USER VALUE VALUES ('billing', 'logical')"
        )
        connection.execute(
            "INSERT INTO relatum.group_scans (consumer_id, stream_id, from_offset, to_offset) "
            "SELECT consumer_id, stream_id, 0, %s FROM relatum.group_consumers, relatum.streams",
            [MESSAGES // 2],
        )
        connection.execute(
            "INSERT INTO relatum.group_states (consumer_id, stream_id, rank, first_offset, state, group_id) "
            "SELECT consumer_id, stream_id, 5, 5, 'open', %s FROM relatum.group_consumers, relatum.streams",
            [GROUP_ID],
        )
    return World(place.amqp, place.database, place.engine, place.stream)


Hurt = Callable[[psycopg.Connection[Any], random.Random], None]


def statement(text: str, table: str = "", where: str = "true") -> Hurt:
    """Damage one row that chance chooses of a table: `{row}` stands for its place, `{n}` for a number from 1 to 50."""

    def hurt(connection: psycopg.Connection[Any], chance: random.Random) -> None:
        rows = connection.execute(f"SELECT ctid::text FROM relatum.{table} WHERE {where} ORDER BY ctid").fetchall()
        row = f"ctid = '{chance.choice(rows)[0]}'"
        changed = connection.execute(text.format(row=row, n=chance.randint(1, 50)))
        assert changed.rowcount > 0, "the damage was done"

    return hurt


def of_rows(text: str, where: str = "true") -> Hurt:
    """Damage a row of the relationship table."""
    return statement(text, "relationships", where)


def of_blocks(text: str, where: str = "true") -> Hurt:
    """Damage a row of the time index."""
    return statement(text, "time_blocks", where)


def of_coverage(text: str, where: str = "true") -> Hurt:
    """Damage a range of the coverage."""
    return statement(text, "coverage", where)


_RANGE = "stream_id, from_offset, to_offset, key_ids, with_time, kind, last_offset, last_fingerprint, last_chunk_ms"
_BLOCK = "UPDATE relatum.time_blocks SET "
_ROW = "UPDATE relatum.relationships SET "
_COVER = "UPDATE relatum.coverage SET "

DAMAGE: dict[str, tuple[Hurt, set[str]]] = {
    "row deleted": (of_rows("DELETE FROM relatum.relationships WHERE {row}"), {"missing"}),
    "row doubled": (
        of_rows("INSERT INTO relatum.relationships SELECT * FROM relatum.relationships WHERE {row}"),
        {"duplicate"},
    ),
    "row's value": (of_rows(_ROW + "value = 'x' || value WHERE {row}"), {"missing", "unsound"}),
    "row's time": (of_rows(_ROW + "time_us = time_us + {n} WHERE {row}"), {"missing", "unsound"}),
    "row's time lost": (of_rows(_ROW + "time_us = NULL WHERE {row}"), {"missing", "unsound"}),
    "row moved": (of_rows(_ROW + "stream_offset = (stream_offset + {n}) % 300 WHERE {row}"), {"missing", "unsound"}),
    "row moved behind the end": (of_rows(_ROW + "stream_offset = 300 + {n} WHERE {row}"), {"missing", "unsound"}),
    "row moved before the start": (of_rows(_ROW + "stream_offset = -{n} WHERE {row}"), {"missing", "unsound"}),
    "row's key": (
        of_rows(
            _ROW + "key_id = (SELECT key_id FROM relatum.keys WHERE name = 'host') WHERE {row}",
            "key_id <> (SELECT key_id FROM relatum.keys WHERE name = 'host')",
        ),
        {"missing", "unsound"},
    ),
    "row of no key": (of_rows(_ROW + "key_id = 90 + {n} WHERE {row}"), {"missing", "unknown_key"}),
    "row of no stream": (of_rows(_ROW + "stream_id = 90 + {n} WHERE {row}"), {"missing", "unknown_stream"}),
    "row beside the right one": (
        of_rows(
            "INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value) "
            "SELECT stream_offset, time_us, stream_id, 99, value FROM relatum.relationships WHERE {row}"
        ),
        {"unknown_key"},
    ),
    "block deleted": (of_blocks("DELETE FROM relatum.time_blocks WHERE {row}"), {"time_missing"}),
    "block doubled": (
        of_blocks("INSERT INTO relatum.time_blocks SELECT * FROM relatum.time_blocks WHERE {row}"),
        {"time_duplicate"},
    ),
    "block's least time raised": (
        of_blocks(_BLOCK + "min_us = min_us + 1 WHERE {row}", "min_us < max_us"),
        {"time_missing", "time_wrong"},
    ),
    "block's least time lowered": (of_blocks(_BLOCK + "min_us = min_us - {n} WHERE {row}"), {"time_wrong"}),
    "block's greatest time lowered": (
        of_blocks(_BLOCK + "max_us = max_us - 1 WHERE {row}", "min_us < max_us"),
        {"time_missing", "time_wrong"},
    ),
    "block's greatest time raised": (of_blocks(_BLOCK + "max_us = max_us + {n} WHERE {row}"), {"time_wrong"}),
    "block's first offset": (of_blocks(_BLOCK + "first_offset = first_offset - {n} WHERE {row}"), {"time_wrong"}),
    "block's last offset": (of_blocks(_BLOCK + "last_offset = last_offset + {n} WHERE {row}"), {"time_wrong"}),
    "block's width": (of_blocks(_BLOCK + "width_class = width_class + 1 WHERE {row}"), {"time_wrong"}),
    "block of no stream": (
        of_blocks(_BLOCK + "stream_id = 90 + {n} WHERE {row}"),
        {"time_missing", "unknown_stream"},
    ),
    "range deleted": (of_coverage("DELETE FROM relatum.coverage WHERE {row}"), {"uncovered"}),
    "range doubled": (
        of_coverage(f"INSERT INTO relatum.coverage ({_RANGE}) SELECT {_RANGE} FROM relatum.coverage WHERE {{row}}"),
        {"coverage_overlap"},
    ),
    "range marked as hole": (of_coverage(_COVER + "kind = 'hole' WHERE {row}"), {"coverage_hole", "uncovered"}),
    "range without time": (of_coverage(_COVER + "with_time = false WHERE {row}", "with_time"), {"uncovered"}),
    "range past the end": (
        of_coverage(_COVER + "to_offset = to_offset + {n} WHERE {row}", "is_tail"),
        {"coverage_past_end"},
    ),
    "range ends early": (
        of_coverage(_COVER + "to_offset = to_offset - {n} WHERE {row}", "to_offset - from_offset > 50"),
        {"uncovered"},
    ),
    "range begins late": (
        of_coverage(_COVER + "from_offset = from_offset + {n} WHERE {row}", "to_offset - from_offset > 50"),
        {"uncovered"},
    ),
    "range begins early": (
        of_coverage(_COVER + "from_offset = from_offset - {n} WHERE {row}", "from_offset > 50"),
        {"coverage_overlap"},
    ),
    "range without a key": (
        of_coverage(_COVER + "key_ids = key_ids[2:] WHERE {row}", "key_ids <> '{}'"),
        {"uncovered"},
    ),
    "range of no key": (of_coverage(_COVER + "key_ids = key_ids || 99::smallint WHERE {row}"), {"unknown_key"}),
    "no tail": (of_coverage(_COVER + "is_tail = false WHERE {row}", "is_tail"), {"coverage_tail"}),
    "range's last offset": (
        of_coverage(_COVER + "last_offset = last_offset - {n} WHERE {row}", "last_offset IS NOT NULL"),
        {"coverage_position"},
    ),
    "range's last offset past the end": (
        of_coverage(_COVER + "last_offset = last_offset + 1000 WHERE {row}", "last_offset IS NOT NULL"),
        {"coverage_position"},
    ),
    "range's fingerprint": (
        of_coverage(_COVER + "last_fingerprint = last_fingerprint # {n} WHERE {row}", "last_fingerprint IS NOT NULL"),
        {"coverage_position"},
    ),
    "range's chunk": (
        of_coverage(_COVER + "last_chunk_ms = last_chunk_ms + {n} WHERE {row}", "last_chunk_ms IS NOT NULL"),
        {"coverage_position"},
    ),
    "tail's position lost": (
        of_coverage(_COVER + "last_offset = NULL, last_fingerprint = NULL WHERE {row}", "is_tail"),
        {"coverage_position"},
    ),
    "checkpoint of no stream": (
        statement("UPDATE relatum.checkpoints SET stream_id = 90 + {n} WHERE {row}", "checkpoints"),
        {"unknown_stream"},
    ),
    "receipt of no stream": (
        statement("UPDATE relatum.receipts SET stream_id = 90 + {n} WHERE {row}", "receipts"),
        {"unknown_stream"},
    ),
    "scan of no stream": (
        statement("UPDATE relatum.group_scans SET stream_id = 90 + {n} WHERE {row}", "group_scans"),
        {"unknown_stream"},
    ),
}


CONSEQUENCES = {"coverage_tail", "coverage_position", "coverage_overlap", "time_duplicate"}
"""What may be wrong besides: a range that is damaged may be the tail, end before what it remembers, or lie on another;
a block with other offsets may hold what another one does."""


def test_every_kind_of_damage_is_found_named_and_mended(world: World, is_long: bool) -> None:
    """Chance damages one row at a time; what is mended is what was there, and nothing is found in it any more."""
    rounds = ROUNDS_LONG if is_long else ROUNDS
    sound = world.tables()
    assert not any(stream.differences for stream in world.verified()), world.verified()
    world.save()
    for seed in range(rounds):
        for name, (hurt, kinds) in DAMAGE.items():
            with psycopg.connect(world.database_url) as connection:
                hurt(connection, random.Random(f"{seed} {name}"))
            report = verify(world.amqp_url, world.engine.url, [world.stream])
            found = {difference.kind for stream in report.streams for difference in stream.differences}
            assert found & (kinds | CONSEQUENCES) == found, (seed, name, report.streams)
            assert found >= kinds or found == {"time_duplicate"}, (seed, name, report.streams)
            done = repair(report, world.engine.url, dry_run=False)
            assert done, (seed, name)
            left = [difference for stream in world.verified() for difference in stream.differences]
            assert not left, (seed, name, left[:5], done[:5])
            mended = world.tables()
            for part, before in sound.items():
                assert mended[part] == before, (seed, name, part, done[:5])
            world.restore()


@pytest.mark.differs
def test_two_repairs_from_reports_of_one_moment_double_nothing(world: World) -> None:
    """Each compares again under the stream's locks: whoever comes second finds nothing to do."""
    sound = world.tables()
    with psycopg.connect(world.database_url) as connection:
        connection.execute("DELETE FROM relatum.relationships WHERE stream_offset % 3 = 0")
        connection.execute("DELETE FROM relatum.time_blocks WHERE first_offset > 150")
    reports = [verify(world.amqp_url, world.engine.url, [world.stream]) for _ in range(4)]
    with ThreadPoolExecutor(len(reports)) as pool:
        done = list(pool.map(lambda report: repair(report, world.engine.url, dry_run=False), reports))
    assert sum(map(bool, done)) == 1, "one of them mended it all"
    assert world.tables() == sound
    assert not any(stream.differences for stream in world.verified())


@pytest.mark.differs
def test_a_repair_from_an_old_report_writes_only_what_differs_now(world: World) -> None:
    """A report from before other repairs, back-fills and recorders is a hint where to look, no more."""
    with psycopg.connect(world.database_url) as connection:
        connection.execute("DELETE FROM relatum.relationships WHERE stream_offset < 100")
    old = verify(world.amqp_url, world.engine.url, [world.stream])
    repair(old, world.engine.url, dry_run=False)
    publish_plain(world.amqp_url, world.stream, map(message, range(MESSAGES, MESSAGES + 50)))
    with recording(world.amqp_url, world.engine, world.stream):
        assert repair(old, world.engine.url, dry_run=False) == []
        wait_recorded(world.amqp_url, world.engine, world.stream)
    assert not any(stream.differences for stream in world.verified())


def test_what_retention_takes_meanwhile_is_no_difference(amqp_url: str, database_url: str, engine: sa.Engine) -> None:
    """Also what was counted only, as more was found than is listed."""
    name, count = unique_name(), 1_100
    declare_stream(amqp_url, name, x_max_length_bytes=1_000_000, x_stream_max_segment_size_bytes=500_000)
    try:
        publish_plain(amqp_url, name, [(b"", {"order_id": f"o{number}"}) for number in range(count)])
        record(amqp_url, engine, name, keys=["order_id"])
        with psycopg.connect(database_url) as connection:
            connection.execute("DELETE FROM relatum.relationships")

        def drop(found: StreamVerified) -> None:
            counted.append(found.difference_count)
            with StreamReader.open(amqp_url) as reader:
                wait_until(lambda: is_dropped(reader), what="retention has dropped all that is different")

        def is_dropped(reader: StreamReader) -> bool:
            publish_plain(amqp_url, name, [(b"x" * 10_000, {})] * 100)
            return (reader.bounds(name).first or 0) >= count

        counted: list[int] = []
        report = verify(amqp_url, engine.url, [name], progress=drop)
        assert counted == [count], "no row is there"
        assert report.ok, "nothing that is different is in the stream any more"
    finally:
        delete_stream(amqp_url, name)


@pytest.mark.differs
def test_a_repair_mends_more_than_it_lists(world: World) -> None:
    """A thousand differences are listed and the others counted; all are mended, and the last line says how many."""
    sound = world.tables()
    with psycopg.connect(world.database_url) as connection:
        connection.execute(
            "INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value) "
            "SELECT stream_offset, time_us, stream_id, key_id, value || n "
            "FROM relatum.relationships, generate_series(1, 3) AS n"
        )
    report = verify(world.amqp_url, world.engine.url, [world.stream])
    (found,) = report.streams
    assert (len(found.differences), found.difference_count) == (1000, 3 * sound["rows"].total())
    done = repair(report, world.engine.url, dry_run=False)
    assert len(done) == 1001
    assert f"{found.difference_count - 1000:,} more" in done[-1]
    assert world.tables() == sound


def test_a_recorder_beside_it_is_no_difference(world: World) -> None:
    """What is recorded while it is compared is not judged, and what is judged is of one moment."""
    with recording(world.amqp_url, world.engine, world.stream), ThreadPoolExecutor(1) as pool:
        published = pool.submit(publish_plain, world.amqp_url, world.stream, map(message, range(1000, 2000)))
        rounds = 0
        while not published.done() or not rounds:
            assert not any(stream.differences for stream in world.verified())
            rounds += 1
        published.result()
        wait_recorded(world.amqp_url, world.engine, world.stream)


def test_a_sample_compares_something_and_says_what(world: World) -> None:
    """However small the share: a window of each stream, chosen by a seed that chooses it again."""
    report = verify(world.amqp_url, world.engine.url, [world.stream], sample=0.001)
    (found,) = report.streams
    assert (found.windows, found.windows_total, found.messages) == (1, 1, MESSAGES)
    assert not report.exact
    assert report.seed is not None
    assert verify(world.amqp_url, world.engine.url, [world.stream], sample=0.001, seed=report.seed) == report


@pytest.mark.differs
def test_rows_of_a_key_that_is_gone_are_deleted(world: World) -> None:
    """A definition that was deleted, not removed, leaves rows that nobody could ever look up or prune."""
    with psycopg.connect(world.database_url) as connection:
        connection.execute("DELETE FROM relatum.keys WHERE name = 'host'")
    report = verify(world.amqp_url, world.engine.url, [world.stream])
    assert {difference.kind for difference in report.streams[0].differences} == {"unknown_key"}
    repair(report, world.engine.url, dry_run=False)
    assert not any(stream.differences for stream in world.verified())
    with psycopg.connect(world.database_url) as connection:
        rows = connection.execute("SELECT DISTINCT key_id FROM relatum.relationships").fetchall()
        assert len(rows) == 2


def test_a_million_sound_rows_give_no_false_alarm(place: Place, is_long: bool) -> None:
    """Whatever the number of windows; fewer rows unless `--long`."""
    chunks = 1000 if is_long else 50
    coded = [b"\0\x53\x74\xc1\x0c\x02\xa1\x04host\xa1\x03" + b"%03d" % (n % 100) for n in range(1000)]
    with RawPublisher(place.stream_url, place.stream) as publisher:
        for _ in range(chunks):
            publisher.publish(uncompressed([part + b"\0\x53\x75\xa0\x00" for part in coded]))
    with place.recording(keys=["host"]):
        wait_recorded(place.amqp, place.engine, place.stream, limit_s=300)
    started = time.monotonic()
    (found,) = place.verify().streams
    print(f"{found.rows:,} rows compared in {time.monotonic() - started:.1f} s")
    assert (found.differences, found.rows) == ([], chunks * 1000)
