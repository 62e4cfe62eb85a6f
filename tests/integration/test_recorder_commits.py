"""One transaction for many streams: a stream that loses a race, or is refused, costs the others nothing."""

import operator
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import psycopg
import pytest
import sqlalchemy as sa

from relatum.errors import DatabaseUnavailable
from relatum.keys import KeyDefinition
from relatum.reading import RecordBatch
from relatum.reading.extractor import Extractor
from relatum.store.catalog import add_keys, ensure_stream
from relatum.store.coverage import ADVANCE_ALL, CoverageRow, add_ranges, close_tails, coverage_of, new_tail
from relatum.store.database import make_engine
from tests.support import new_streams, recorded_to, rows_of, wait_until
from tests.support._recording import Batch, Share, commit_shares
from tests.support.place import Place

COUNT = 5
RECORD = b"\0\x53\x74\xc1\x0c\x02\xa1\x05order\xa1\x02o1\0\x53\x75\xa0\0"
"""A message as it is in a stream: the header order=o1, an empty body."""


Tails: TypeAlias = dict[str, CoverageRow]
SharesOf: TypeAlias = Callable[..., list[Share]]


@pytest.fixture
def definitions(engine: sa.Engine) -> list[KeyDefinition]:
    return add_keys(engine, ["order"])


@pytest.fixture
def tails(engine: sa.Engine, definitions: list[KeyDefinition]) -> Tails:
    key_ids = [each.key_id for each in definitions]
    with engine.begin() as connection:
        rows = [ensure_stream(connection, "/", f"s{n}") for n in range(COUNT)]
        new = [new_tail(row.stream_id, 0, key_ids, with_time=True) for row in rows]
        return {row.name: tail for row, tail in zip(rows, add_ranges(connection, new), strict=True)}


@pytest.fixture
def shares_of(tails: Tails, definitions: list[KeyDefinition]) -> SharesOf:
    """Makes shares of some messages for each of some tails, or of all."""

    def share(tail: CoverageRow, messages: int) -> Share:
        batch, start = Batch(tail.stream_id, Extractor(definitions), with_time=True), tail.to_offset
        batch.add(RecordBatch("s", start, range(start, start + messages), [RECORD] * messages, 1_700_000_000_000, 1))
        return Share(tail, batch, None)

    return lambda *chosen, messages=3: [share(tail, messages) for tail in chosen or tails.values()]


def test_a_lost_race_or_a_lock_concerns_its_own_stream_alone(place: Place, tails: Tails, shares_of: SharesOf) -> None:
    """A commit leaves out a stream that another recorder was faster with, and one that is locked for now."""
    commit_shares(place.engine, shares_of(tails["s2"], messages=2))
    shares = shares_of()
    with psycopg.connect(place.database) as other:
        locked = shares[1].row.coverage_id
        other.execute("SELECT FROM relatum.coverage WHERE coverage_id = %s FOR UPDATE", [locked])
        commit_shares(place.engine, shares)
    assert [share.is_committed for share in shares] == [True, False, False, True, True]
    assert [share.is_blocked for share in shares] == [False, True, False, False, False]
    commit_shares(place.engine, [shares[1]])
    assert shares[1].is_committed
    assert [len(rows_of(place.engine, name)) for name in tails] == [3, 3, 2, 3, 3]
    assert [recorded_to(place.engine, name) for name in tails] == [3, 3, 2, 3, 3]
    with place.engine.connect() as connection:
        now = {row.stream_id: row for row in coverage_of(connection, [tail.stream_id for tail in tails.values()])}
        assert connection.execute(sa.text("SELECT count(*) FROM relatum.time_blocks")).scalar_one() == COUNT
    for share in (share for share in shares if share.is_committed):
        found = now[share.row.stream_id]
        assert (found.to_offset, found.position) == (share.row.to_offset, share.row.position), "as they are left"


def test_two_that_commit_the_same_streams_at_once_write_each_row_once(
    engine: sa.Engine, tails: Tails, shares_of: SharesOf
) -> None:
    """Two commits of the same streams in opposite orders both end, and write each row once."""
    both = [shares_of(), shares_of(*reversed(tails.values()))]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(partial(commit_shares, engine), both))
    won = [share.row.stream_id for shares in both for share in shares if share.is_committed]
    assert len(won) == len(set(won))
    assert sum(len(rows_of(engine, name)) for name in tails) == 3 * len(won)


@pytest.mark.parametrize("amid", ["psycopg.Copy.write", "relatum.recording.commit.add_checkpoints"])
def test_one_that_stands_still_amid_a_commit_holds_up_nobody(
    engine: sa.Engine, tails: Tails, shares_of: SharesOf, amid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another recorder records the streams of one that is suspended, whether it has sent its rows or not."""
    stands_still, goes_on = threading.Event(), threading.Event()
    original = operator.attrgetter(amid.partition(".")[2])(sys.modules[amid.partition(".")[0]])

    def stand_still(*args: Any) -> Any:
        if threading.current_thread().name.startswith("frozen"):
            stands_still.set()
            goes_on.wait(90)
        return original(*args)

    monkeypatch.setattr(amid, stand_still)
    frozen_shares, shares = shares_of(), shares_of()
    frozen_engine = make_engine(engine.url, idle_s=1.0)
    with ThreadPoolExecutor(1, "frozen") as pool:
        frozen = pool.submit(commit_shares, frozen_engine, frozen_shares)
        try:
            assert stands_still.wait(90)
            if amid == "psycopg.Copy.write":
                commit_shares(engine, shares)

            def committed() -> bool:
                commit_shares(engine, [share for share in shares if not share.is_committed])
                return all(share.is_committed for share in shares)

            wait_until(committed, what="PostgreSQL ends the transaction that stands still")
        finally:
            goes_on.set()
        with suppress(DatabaseUnavailable):
            frozen.result(90)
    frozen_engine.dispose()
    assert not any(share.is_committed for share in frozen_shares)
    assert [len(rows_of(engine, name)) for name in tails] == [3] * COUNT


def test_a_row_that_postgresql_refuses_holds_up_its_own_stream_alone(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream whose row PostgreSQL refuses is named once and waits, while the others are recorded."""

    def told(name: str) -> list[str]:
        return [line for each in caplog.records if name in (line := each.getMessage()) and each.levelname == "WARNING"]

    def publish(value: str, *names: str) -> None:
        for name in names:
            place.put((b"", {"order": value}), to=name)

    with new_streams(place.amqp, 3) as streams:
        refused, *others = streams
        publish("good", *streams)
        with place.recording(*streams, keys=["order"]):
            for name in streams:
                place.wait_recorded(name)
            place.sql("ALTER TABLE relatum.relationships ADD CONSTRAINT refusal CHECK (value <> 'refused')")
            publish("refused", refused)
            for _ in range(3):
                publish("good", *others)
                for name in others:
                    place.wait_recorded(name)
            assert place.recorded_to(refused) == 1
            wait_until(lambda: told(refused), what="the refusal is told")
            place.sql("ALTER TABLE relatum.relationships DROP CONSTRAINT refusal")
            place.wait_recorded(refused)
        assert [len(place.rows(name)) for name in streams] == [2, 4, 4]
        assert len(told(refused)) == 1, caplog.text
        assert not [name for name in others if told(name)], caplog.text


def test_what_moves_is_read_once_and_not_for_each_row(engine: sa.Engine) -> None:
    """Where nothing is prepared, as behind PgBouncer, a text that is cast would be cast again for each row."""
    statement = "EXPLAIN (VERBOSE) " + str(ADVANCE_ALL.compile(dialect=engine.dialect))
    given = dict.fromkeys(("ids", "expected", "marks", "ends", "offsets", "fingerprints", "chunks_ms"), "{1,2,NULL}")
    with engine.begin() as connection:
        plan = "\n".join(connection.exec_driver_sql(statement, given).scalars())
    assert "coverage_id = ANY" in plan
    assert "cstring" not in plan


@pytest.mark.parametrize("has_moved", [False, True])
@pytest.mark.parametrize("how", ["another's id", "closed"])
def test_a_tail_that_is_another_one_by_now_is_not_moved(
    engine: sa.Engine, tails: Tails, shares_of: SharesOf, has_moved: bool, how: str
) -> None:
    """A commit does not move a tail that was closed, or whose id a standby gave to another one."""
    shares = shares_of(tails["s2"])
    if has_moved:
        commit_shares(engine, shares)
        shares = shares_of(shares[0].row)
    again = (
        "UPDATE relatum.coverage SET recorded_at = clock_timestamp(), last_fingerprint = last_fingerprint + 1 "
        "WHERE coverage_id = :id"
    )
    with engine.begin() as connection:
        if how == "closed":
            assert close_tails(connection, [shares[0].row])
        else:
            connection.execute(sa.text(again), {"id": tails["s2"].coverage_id})
    with engine.connect() as connection:
        assert not close_tails(connection, [shares[0].row])
    commit_shares(engine, shares)
    assert [(share.is_committed, share.is_blocked) for share in shares] == [(False, False)]
    assert len(rows_of(engine, "s2")) == (3 if has_moved else 0)
