"""What a repair leaves alone, by what a stream is known again, and that a gap is always somebody's work."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import cramjam
import psycopg
import pytest
import sqlalchemy as sa

from relatum.errors import StreamReplaced
from relatum.reading import StreamReader, position_of
from relatum.recording import repair
from relatum.recording.backfilling import plan_backfill
from relatum.wire.chunk import _CODEC_NAMES
from relatum_consumer import Relations, Status
from tests.integration.test_foreign import headed, in_batch, text
from tests.support import wait_recorded, wait_until
from tests.support._raw_publisher import RawPublisher, uncompressed
from tests.support.place import Place

WINDOW = 20_000
"""Offsets that a repair records again at a time."""

BLOCK = 128
"""Messages of a block of the time index at the most: those at a window's edges go as a whole."""


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    return [(b"%d" % n, {"order_id": f"o{n}"}) for n in range(start, start + count)]


@contextmanager
def refused(place: Place, condition: str = "true") -> Iterator[None]:
    """PostgreSQL refuses new rows of some offsets, as if their writer was killed there."""
    place.sql(
        "CREATE FUNCTION relatum.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'refused by the test'; END $$"
    )
    place.sql(
        f"CREATE TRIGGER refused BEFORE INSERT ON relatum.relationships FOR EACH ROW WHEN ({condition}) "
        "EXECUTE FUNCTION relatum.refuse()"
    )
    try:
        yield
    finally:
        place.sql("DROP FUNCTION relatum.refuse CASCADE")


def mend(place: Place) -> list[str]:
    return repair(place.verify(), place.database, dry_run=False)


@pytest.mark.parametrize("lost", ["stream_offset BETWEEN 40 AND 60", "stream_offset >= 90", "true"])
def test_a_stream_declared_again_while_a_repair_is_half_done_is_noticed(place: Place, lost: str) -> None:
    """A stream declared again is noticed although a repair of any part of the old one was cut short."""
    place.put_recorded(*orders(35), keys=["order_id"])
    for start in (35, 65):
        place.put_recorded(*orders(30 if start == 35 else 35, start))
    place.sql(f"DELETE FROM relatum.relationships WHERE {lost}")
    with refused(place), pytest.raises(psycopg.errors.RaiseException):
        mend(place)
    place.declare_again()
    place.put(*orders(150, start=1000))
    with Relations(place.amqp, place.database) as relations:
        for value in ("o1010", "o1050", "o1095"):
            with pytest.raises(StreamReplaced):
                relations.find("order_id", value, streams=place.stream)
    place.record()
    wait_until(lambda: not place.status().gaps, what="no gap")
    assert place.values() == [f"o{n}" for n in range(1000, 1150)]
    assert place.status().generation == 2


def test_a_repair_leaves_what_has_expired(fleeting: Place, relations: Relations) -> None:
    """A repair leaves the rows of messages that retention took, which are `expired` and not `absent`."""
    fleeting.put_recorded(*orders(10), keys=["order_id"])
    with fleeting.recording():
        fleeting.put(*[(b"x" * 10_000, {"order_id": f"big{n}"}) for n in range(100)])
        fleeting.wait_recorded()
    wait_until(lambda: (fleeting.status().first or 0) > 10, what="retention to take the first messages")
    first = fleeting.status().first or 0
    before = [row for row in fleeting.rows() if row[2] < first]
    fleeting.sql(f"DELETE FROM relatum.relationships WHERE stream_offset >= {first}")
    assert mend(fleeting)
    assert [row for row in fleeting.rows() if row[2] < first] == before
    assert relations.find("order_id", "o3").status is Status.EXPIRED


def test_a_repair_that_is_killed_leaves_one_window_open(place: Place) -> None:
    """A repair that is killed leaves at most one window open, which a back-fill closes."""
    host = b"\0\x53\x74\xc1\x0b\x02\xa1\x04host\xa1\x02h1" + b"\0\x53\x75\xa0\x00"
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish(*[uncompressed([host] * 1000)] * 45)
    with place.recording(keys=["host"]):
        wait_recorded(place.amqp, place.engine, place.stream)
    place.sql("DELETE FROM relatum.relationships WHERE stream_offset % 100 = 0")
    condition = f"NEW.stream_offset BETWEEN {WINDOW + BLOCK} AND {2 * WINDOW - 1}"
    with refused(place, condition), pytest.raises(psycopg.errors.RaiseException):
        mend(place)
    assert sum(end - start for start, end in place.status().gaps) <= WINDOW + 2 * BLOCK
    offsets = [offset for _, _, offset in place.rows()]
    assert offsets[: WINDOW - BLOCK] == list(range(WINDOW - BLOCK)), "the first one was mended"
    assert offsets[-1] == 44_999, "the last one was not begun"
    place.backfill()
    mend(place)
    assert [offset for _, _, offset in place.rows()] == list(range(45_000))


def test_lookups_see_nothing_of_a_repair(place: Place) -> None:
    """Lookups find what is right while a repair records its offsets again."""
    place.put_recorded(*[(b"", {"order_id": f"o{n}", "host": f"h{n}"}) for n in range(50)], keys=["order_id", "host"])
    stop, rounds, found = threading.Event(), list[object](), list[Status]()

    def mend_again() -> None:
        while not stop.is_set():
            place.sql("DELETE FROM relatum.relationships WHERE value LIKE 'h%'")
            rounds.append(mend(place))

    with ThreadPoolExecutor(1) as pool, Relations(place.amqp, place.database) as relations:
        mended = pool.submit(mend_again)
        try:
            while (len(found) < 500 or len(rounds) < 2) and not mended.done():
                found.append(relations.find("order_id", f"o{len(found) % 50}").status)
        finally:
            stop.set()
        mended.result()
    assert all(rounds)
    assert set(found) == {Status.FOUND}


@pytest.mark.differs
def test_a_stream_that_lost_its_tail_is_known_by_what_is_left(place: Place) -> None:
    """A stream that lost its tail is known by its checkpoints, and every recorded range gets a position."""
    place.put_recorded(*orders(20), keys=["order_id"])
    place.put_recorded(*orders(20, start=20))
    old = place.messages()
    place.declare_again()
    # A checkpoint without a chunk's time agrees with the same message in another chunk, as after a power loss.
    place.put(*orders(30))
    for message in (old[9], old[29]):
        position = position_of(message)
        place.sql(
            "INSERT INTO relatum.checkpoints (stream_id, last_offset, fingerprint) "
            f"SELECT stream_id, {position.offset}, {position.fingerprint} FROM relatum.streams"
        )
    place.put(*orders(20, start=100))
    with place.recording():
        wait_until(lambda: place.values()[30:] == [f"o{n}" for n in range(100, 120)], what="the stream as it is")
    assert ([event.kind for event in place.status().events], place.status().generation) == (["tail_lost"], 1)
    unknown = "SELECT FROM relatum.coverage WHERE from_offset < to_offset AND last_offset IS NULL"
    assert not place.sql(unknown)


def test_a_repair_writes_nothing_that_the_stream_has_lost(place: Place) -> None:
    """A repair that was suspended after it read a window reads it again if the stream has lost its tail since."""
    place.put_recorded(*orders(40), keys=["order_id"])
    position = position_of(place.messages()[9])
    place.sql("DELETE FROM relatum.relationships WHERE stream_offset = 5")
    report, locks = place.verify(), list[str]()

    def grow(start: int) -> None:
        place.put(*orders(30, start))
        with place.recording():
            wait_until(lambda: place.values()[-1:] == [f"o{start + 29}"], what="the stream as it is")

    def lose_tail(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FOR NO KEY UPDATE" not in statement or len(locks) == 3:
            return
        locks.append(statement)
        if len(locks) == 3:  # The first two are those of the repair of the coverage.
            place.declare_again()
            place.put(*orders(10))
            place.sql(
                "INSERT INTO relatum.checkpoints (stream_id, last_offset, fingerprint) "
                f"SELECT stream_id, {position.offset}, {position.fingerprint} FROM relatum.streams"
            )
            grow(100)
            grow(130)

    sa.event.listen(sa.Engine, "before_cursor_execute", lose_tail)
    try:
        repair(report, place.database, dry_run=False)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", lose_tail)
    assert len(locks) == 3
    assert place.status().generation == 1
    assert place.values() == [f"o{n}" for n in (*range(10), *range(100, 160))]


def test_a_gap_that_an_interrupted_back_fill_left_is_shown_and_closed(place: Place) -> None:
    """A gap that a killed back-fill left shows up as lag, and the next recorder closes it."""
    place.put_recorded(*orders(60), keys=["order_id"])
    place.put(*orders(100, start=60))
    with StreamReader.open(place.amqp) as reader:
        plan_backfill(place.engine, reader, "/", place.stream, None)
    assert (place.status().gaps, place.status().lag_offsets) == ([(60, 160)], 100)
    assert (place.status().lag_s or 0) > 0
    with place.recording():
        place.put(*orders(5, start=160))
        wait_until(lambda: not place.status().lag_offsets, what="no gap")
    assert place.values() == [f"o{n}" for n in range(165)]


def test_a_batch_that_cannot_be_unpacked_is_not_covered_until_it_can(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose codec is not known is a gap that stops no recorder, which closes it once it is."""
    _, count, size, content = in_batch(["b", "c"])
    batch = (4, count, size, bytes(cramjam.zstd.compress(content)))
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish(headed(text("a")), batch, headed(text("d")))
    monkeypatch.delitem(_CODEC_NAMES, 4)
    with place.recording(keys=["order_id"]):
        place.wait_recorded()
        assert place.values() == ["a", "d"]
        found = place.status()
        assert (found.gaps, found.covered["order_id"], found.lag_offsets) == ([(1, 3)], [(0, 1), (3, 4)], 2)
        (event,) = found.events
        assert (event.kind, event.from_offset, event.to_offset) == ("unreadable", 1, 3)
        assert "compression 4" in event.detail
        place.backfill()
        assert place.status().gaps == [(1, 3)]
        monkeypatch.undo()
        wait_until(lambda: not place.status().gaps, what="the gap closed")
    assert place.values() == ["a", "b", "c", "d"]


def test_a_gap_that_cannot_be_closed_keeps_nobody_from_another_streams(place: Place, other_stream: str) -> None:
    """A stream's gap is closed though PostgreSQL refuses another stream's gap again and again."""
    names = [place.stream, other_stream]
    for name in names:
        place.put(*orders(5), to=name)
    place.record(*names, keys=["order_id"])
    for name in names:
        place.put(*orders(5, start=5), to=name)
    with StreamReader.open(place.amqp) as reader:
        for name in names:
            plan_backfill(place.engine, reader, "/", name, None)
    ((stream_id,),) = place.sql("SELECT stream_id FROM relatum.streams WHERE name = :name", name=place.stream)
    place.sql(f"ALTER TABLE relatum.coverage ADD CHECK (stream_id <> {stream_id} OR is_tail) NOT VALID")
    with place.recording(*names):
        wait_until(lambda: not place.status(other_stream).lag_offsets, what="no gap")
    assert place.status().gaps == [(5, 10)]
