"""Every kind of damage to every table that is derived from streams is found, named and mended."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

from relatum.common.headers import RECEIPT_HEADER, TIME_HEADER
from relatum.membership import GROUP_KEY
from relatum.reading import StreamReader
from relatum.recording import Difference, VerifyReport, repair, verify
from relatum.recording.verifying import WindowMessages, read_window
from relatum.store.catalog import add_keys
from relatum.store.coverage import Range
from relatum.store.database import Database
from tests.support import wait_recorded, wait_until
from tests.support._raw_publisher import RawPublisher, uncompressed
from tests.support.place import Place

MESSAGES = 150
GROUP_ID = "0123456789abcdef" * 3
BEGAN_US = 1_700_000_000_000_000

OF_GROUPS = ("group_consumers", "group_scans", "group_states")
TABLES = ("streams", "relationships", "time_blocks", "coverage", "checkpoints", "receipts", *OF_GROUPS)

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
class World(Place):
    """A recorded stream, and what its tables hold while they are sound."""

    kept: Database = field(kw_only=True)

    def save(self) -> None:
        self.sql("CREATE SCHEMA sound")
        for table in TABLES:
            self.sql(f"CREATE TABLE sound.{table} AS SELECT * FROM relatum.{table}")

    def restore(self) -> None:
        with self.engine.begin() as connection:
            connection.execute(sa.text(f"TRUNCATE {', '.join(f'relatum.{table}' for table in TABLES)} CASCADE"))
            for table in TABLES:
                back = f"INSERT INTO relatum.{table} OVERRIDING SYSTEM VALUE SELECT * FROM sound.{table}"
                connection.execute(sa.text(back))

    def verify(self, **options: Any) -> VerifyReport:
        return verify(self.amqp, self.kept, [self.stream], **options)

    def repair(self, report: VerifyReport) -> list[str]:
        return repair(report, self.kept, dry_run=False)

    def differences(self) -> list[Difference]:
        return [each for stream in self.verify().streams for each in stream.differences]

    def tables(self) -> dict[str, Any]:
        """What lookups, receipts and groups depend on: rows, coverage by key, holes, and the tail's end."""
        covered: Counter[tuple[int, int]] = Counter()
        ranges = self.sql("SELECT from_offset, to_offset, key_ids, with_time, kind FROM relatum.coverage")
        for start, end, key_ids, with_time, kind in ranges:
            held = [*key_ids, *([0] if with_time else [])] if kind == "recorded" else [-1]
            covered.update((offset, key_id) for key_id in held for offset in range(start, end))
        rows = self.sql("SELECT stream_offset, time_us, stream_id, key_id, value FROM relatum.relationships")
        return {
            "rows": Counter(map(tuple, rows)),
            "covered": covered,
            "tail": self.sql("SELECT to_offset FROM relatum.coverage WHERE is_tail"),
            "receipts": sorted(self.sql("SELECT message_id, stream_offset FROM relatum.receipts")),
            "groups": self.sql("SELECT group_id, first_offset, state FROM relatum.group_states"),
            "streams": self.sql("SELECT name, state, generation, replaced_at FROM relatum.streams"),
        }


SCANNED = """
INSERT INTO relatum.group_consumers (name, ordering) OVERRIDING USER VALUE VALUES ('billing', 'logical');
INSERT INTO relatum.group_scans (consumer_id, stream_id, from_offset, to_offset)
  SELECT consumer_id, stream_id, 0, 75 FROM relatum.group_consumers, relatum.streams;
INSERT INTO relatum.group_states (consumer_id, stream_id, rank, first_offset, state, group_id)
  SELECT consumer_id, stream_id, 5, 5, 'open', 'GROUP' FROM relatum.group_consumers, relatum.streams;
"""


@pytest.fixture
def world(place: Place) -> Iterator[World]:
    """A stream recorded in two sessions with different keys, back-filled in between, and scanned by a consumer."""
    place.put(*map(message, range(MESSAGES // 2)))
    add_keys(place.engine, [GROUP_KEY])
    place.record(keys=["order_id"])
    place.put_recorded(*map(message, range(MESSAGES // 2, MESSAGES)), keys=["host"])
    place.backfill()
    for each in SCANNED.strip().split(";\n"):
        place.sql(each.rstrip(";").replace("GROUP", GROUP_ID))
    kept = Database(place.database)
    yield World(**vars(place), kept=kept)
    kept.close()


class Damage(NamedTuple):
    """Damage to one row that chance chooses among those of a condition, and the kinds of difference it is."""

    name: str
    change: str
    """What is set in the row: `{n}` is a number from 1 to 50. Or DELETE, or columns of the row that is inserted."""
    kinds: str
    where: str = "true"


DELETE = "DELETE"
INSERT = "INSERT "
HOST = "(SELECT key_id FROM relatum.keys WHERE name = 'host')"
BLOCK = "min_us, max_us, first_offset, last_offset, stream_id, width_class"

DAMAGE = {
    "relationships": [
        Damage("deleted", DELETE, "missing"),
        Damage("doubled", f"{INSERT}stream_offset, time_us, stream_id, key_id, value, part", "duplicate"),
        Damage("value", "value = 'x' || value", "missing unsound"),
        Damage("time", "time_us = time_us + {n}", "missing unsound"),
        Damage("time lost", "time_us = NULL", "missing unsound"),
        Damage("moved", "stream_offset = (stream_offset + {n}) % 150", "missing unsound"),
        Damage("moved behind the end", "stream_offset = 150 + {n}", "missing unsound"),
        Damage("another's key", f"key_id = {HOST}", "missing unsound", f"key_id <> {HOST}"),
        Damage("no key", "key_id = 90 + {n}", "missing unsound"),
        Damage("beside it", f"{INSERT}stream_offset, time_us, stream_id, 99 AS key_id, value", "unsound"),
    ],
    "time_blocks": [
        Damage("deleted", DELETE, "time_missing"),
        Damage("doubled", f"{INSERT}{BLOCK}", "duplicate"),
        Damage("least time raised", "min_us = min_us + 1", "time_missing time_wrong", "min_us < max_us"),
        Damage("least time lowered", "min_us = min_us - {n}", "time_wrong"),
        Damage("greatest time lowered", "max_us = max_us - 1", "time_missing time_wrong", "min_us < max_us"),
        Damage("greatest time raised", "max_us = max_us + {n}", "time_wrong"),
        Damage("first offset", "first_offset = first_offset - {n}", "time_wrong"),
        Damage("before the stream", "first_offset = -{n}", "time_wrong", "first_offset < 20"),
        Damage("last offset", "last_offset = last_offset + {n}", "time_wrong"),
        Damage("width", "width_class = width_class + 1", "time_wrong"),
    ],
    "coverage": [
        Damage("deleted", DELETE, "uncovered"),
        Damage("tail deleted", DELETE, "uncovered coverage", "is_tail"),
        Damage("marked as hole", "kind = 'hole'", "coverage uncovered"),
        Damage("without time", "with_time = false", "uncovered", "with_time"),
        Damage("past the end", "to_offset = to_offset + {n}", "coverage", "is_tail"),
        Damage("ends early", "to_offset = to_offset - {n}", "uncovered", "to_offset - from_offset > 50"),
        Damage("begins late", "from_offset = from_offset + {n}", "uncovered", "to_offset - from_offset > 50"),
        Damage("without a key", "key_ids = key_ids[2:]", "uncovered", "key_ids <> '{}'"),
        Damage("no tail", "is_tail = false", "coverage", "is_tail"),
    ],
}


def hurt(world: World, table: str, damage: Damage, chance: random.Random) -> None:
    rows = world.sql(f"SELECT ctid::text FROM relatum.{table} WHERE {damage.where} ORDER BY ctid")
    row, change = f"ctid = '{chance.choice(rows)[0]}'", damage.change.format(n=chance.randint(1, 50))
    if damage.change == DELETE:
        statement = f"DELETE FROM relatum.{table}"
    elif damage.change.startswith(INSERT):
        values = change.removeprefix(INSERT)
        columns = values.replace("99 AS ", "")
        statement = f"INSERT INTO relatum.{table} ({columns}) SELECT {values} FROM relatum.{table}"
    else:
        statement = f"UPDATE relatum.{table} SET {change}"
    assert world.sql(f"WITH done AS ({statement} WHERE {row} RETURNING 1) SELECT * FROM done"), "it was done"


CONSEQUENCES = {"coverage", "duplicate"}
"""What may be wrong besides: a range that is damaged may be the tail, end before what it remembers, or overlap another;
a block with other offsets may hold what another one does."""


def test_every_kind_of_damage_is_found_named_and_mended(world: World, is_long: bool) -> None:
    """Damage to a random row is found and named, and a repair restores what was there, receipts included."""
    sound = world.tables()
    assert world.differences() == []
    world.save()
    kinds_of = [(table, damage) for table, damages in DAMAGE.items() for damage in damages]
    for seed, (table, damage) in itertools.product(range(ROUNDS_LONG if is_long else 1), kinds_of):
        what = (seed, table, damage)
        hurt(world, table, damage, random.Random(f"{seed} {table} {damage.name}"))
        report = world.verify()
        kinds = set(damage.kinds.split())
        found = {difference.kind for stream in report.streams for difference in stream.differences}
        assert found & (kinds | CONSEQUENCES) == found, (what, report.streams)
        assert found >= kinds or found == {"duplicate"}, (what, report.streams)
        done = world.repair(report)
        assert done, what
        mended = world.tables()
        for part, before in sound.items():
            assert mended[part] == before, (what, part, done[:5])
        left = world.differences()
        assert not left, (what, left[:5], done[:5])
        # The repaired coverage is the same in other ranges: apply the next damage to the original ranges.
        world.restore()
    assert world.differences() == []


def test_a_stream_without_the_message_recorded_last_is_another_one(world: World) -> None:
    """A stream without its last recorded message is only reported as replaced, and the next recorder mends it."""
    sound = world.tables()["rows"]
    world.sql("UPDATE relatum.coverage SET last_fingerprint = last_fingerprint # 1 WHERE is_tail")
    (found,) = world.differences()
    assert found.kind == "replaced"
    (done,) = world.repair(world.verify())
    assert "relatum record" in done
    assert world.differences() == [found]
    with world.recording():
        wait_until(lambda: not world.differences(), what="the stream to be recorded again")
    assert world.tables()["rows"] == sound


@pytest.mark.differs
def test_two_repairs_from_reports_of_one_moment_double_nothing(world: World) -> None:
    """Repairs from reports of one moment mend what is different once, as a dry run says, and double nothing."""
    sound = world.tables()
    world.sql("DELETE FROM relatum.relationships WHERE stream_offset % 3 = 0")
    world.sql("DELETE FROM relatum.time_blocks WHERE first_offset > 75")
    reports = [world.verify() for _ in range(4)]
    planned = repair(reports[0], world.engine.url)
    assert not world.verify().ok, "a dry run changes nothing"
    with ThreadPoolExecutor(len(reports)) as pool:
        done = list(pool.map(world.repair, reports))
    assert all(each == planned for each in done)
    assert world.tables() == sound
    assert world.differences() == []


@pytest.mark.differs
def test_a_repair_from_an_old_report_doubles_nothing(world: World) -> None:
    """A repair from an old report, beside a recorder, changes nothing that is not different any more."""
    world.sql("DELETE FROM relatum.relationships WHERE stream_offset < 100")
    old = world.verify()
    world.repair(old)
    world.put(*map(message, range(MESSAGES, MESSAGES + 50)))
    with world.recording():
        world.repair(old)
        world.wait_recorded()
    assert world.differences() == []


def publish_hosts(place: Place, *counts: int) -> None:
    coded = [b"\0\x53\x74\xc1\x0c\x02\xa1\x04host\xa1\x03%03d\0\x53\x75\xa0\0" % (n % 100) for n in range(max(counts))]
    with RawPublisher(place.stream_url, place.stream) as publisher:
        for count in counts:
            publisher.publish(uncompressed(coded[:count]))


def test_what_retention_takes_meanwhile_is_no_difference(fleeting: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of messages that retention drops during the comparison are not differences, listed or only counted."""
    count = 1_100
    publish_hosts(fleeting, count)
    fleeting.record(keys=["host"])
    fleeting.sql("DELETE FROM relatum.relationships")
    assert [found.difference_count for found in fleeting.verify().streams] == [count], "no row is there"

    def is_dropped(reader: StreamReader) -> bool:
        fleeting.put(*[b"x" * 10_000] * 20)
        return (reader.bounds(fleeting.stream).first or 0) >= count

    def read_and_drop(reader: StreamReader, stream: str, window: Range) -> WindowMessages:
        read = read_window(reader, stream, window)
        wait_until(lambda: is_dropped(reader), what="retention has dropped all that is different")
        return read

    monkeypatch.setattr("relatum.recording.verifying.read_window", read_and_drop)
    assert fleeting.verify().ok, "nothing that is different is in the stream any more"


@pytest.mark.differs
def test_a_repair_mends_more_than_it_lists(world: World) -> None:
    """A repair mends also those differences that are only counted, and keeps no range that a scan has read."""
    sound = world.tables()
    ranges = "SELECT coverage_id FROM relatum.coverage"
    before = set(world.sql(ranges))
    world.sql(
        "INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value) "
        "SELECT stream_offset, time_us, stream_id, key_id, value || n "
        "FROM relatum.relationships, generate_series(1, 5) AS n"
    )
    report = world.verify()
    (found,) = report.streams
    assert (len(found.differences), found.difference_count) == (1000, 5 * sound["rows"].total())
    done = world.repair(report)
    assert len(done) == 1001
    assert f"{found.difference_count - 1000:,} more" in done[-1]
    assert world.tables() == sound
    assert not before & set(world.sql(ranges))


def test_a_recorder_beside_it_is_no_difference(world: World) -> None:
    """`verify` finds no difference while a recorder records the stream."""
    with world.recording(), ThreadPoolExecutor(1) as pool:
        published = pool.submit(world.put, *map(message, range(1000, 2000)))
        rounds = 0
        while not published.done() or not rounds:
            assert world.differences() == []
            rounds += 1
        published.result()
        world.wait_recorded()


def test_verify_beside_a_back_fill_finds_no_difference(place: Place) -> None:
    """`verify` compares rows and coverage as of one moment, so that a back-fill beside it is not a difference."""
    publish_hosts(place, *[1000] * 21)
    place.record(keys=[])
    add_keys(place.engine, ["host"])
    report = place.verify(progress=lambda _: place.backfill() and None)
    assert report.ok, report.streams[0].differences[:3]


def test_a_sample_compares_something_and_says_what(world: World) -> None:
    """The smallest sample compares a window of each stream, and its seed chooses the same window again."""
    report = world.verify(sample=0.001)
    (found,) = report.streams
    assert (found.windows, found.windows_total, found.messages) == (1, 1, MESSAGES)
    assert not report.exact
    assert report.seed is not None
    assert world.verify(sample=0.001, seed=report.seed) == report


@pytest.mark.differs
def test_rows_of_a_key_that_is_gone_are_deleted(world: World) -> None:
    """A repair deletes the rows of a key whose definition was deleted."""
    world.sql("DELETE FROM relatum.keys WHERE name = 'host'")
    report = world.verify()
    assert {difference.kind for difference in report.streams[0].differences} == {"unsound"}
    world.repair(report)
    assert world.differences() == []
    assert len(world.sql("SELECT DISTINCT key_id FROM relatum.relationships")) == 2


def test_a_million_sound_rows_give_no_false_alarm(place: Place, is_long: bool) -> None:
    """A sound stream of many windows has no differences."""
    chunks = 1000 if is_long else 21
    publish_hosts(place, *[1000] * chunks)
    with place.recording(keys=["host"]):
        wait_recorded(place.amqp, place.engine, place.stream, limit_s=300)
    (found,) = place.verify().streams
    assert (found.differences, found.rows) == ([], chunks * 1000)
