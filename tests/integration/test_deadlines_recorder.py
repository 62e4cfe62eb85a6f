"""Recorders and a PostgreSQL that stands still: they stop in time, and go on when it does, exactly once."""

import threading

import psycopg
import pytest
import sqlalchemy as sa

from relatum.reading import BrokerAddress
from relatum.recording import EmbeddedRecorder, Recorder
from relatum.recording._group import RecorderGroup
from relatum.store import Database, add_keys, make_engine
from tests.support import publish_plain, rows_of, unique_name, wait_recorded, wait_until
from tests.support.leases import LEASE_S
from tests.support.ports import free_port
from tests.support.proxy import Proxy
from tests.support.standstill import in_time, locked

STOP_S = 4.0
"""Seconds a stop has: three for the database, and one for the rest."""


def _running(recorder: Recorder) -> tuple[threading.Thread, threading.Event]:
    stop = threading.Event()
    thread = threading.Thread(target=recorder.run, args=[stop], name="a recorder's", daemon=True)
    thread.start()
    return thread, stop


def test_a_database_that_stands_still_does_not_hold_the_stop(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """With its connections frozen in the middle of the work, `run` ends within seconds of its stop."""
    with Proxy.to(database_url) as proxy:
        recorder = Recorder(amqp_url, proxy.url(database_url), [stream_name], keys=["order_id"])
        thread, stop = _running(recorder)
        publish_plain(amqp_url, stream_name, [(b"a", {"order_id": 1})])
        wait_recorded(amqp_url, engine, stream_name)
        proxy.mode = "frozen"
        publish_plain(amqp_url, stream_name, [(b"b", {"order_id": 2})])
        with in_time(STOP_S):
            stop.set()
            thread.join(90)
        assert not thread.is_alive()


def test_a_stop_ends_in_its_own_time(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL stands still, and whoever stops gives it less time than a recorder would by itself."""
    monkeypatch.setattr("relatum.recording._group.DATABASE_S", 60.0)
    add_keys(engine, ["order_id"])
    with Proxy.to(database_url) as proxy:
        database = make_engine(proxy.url(database_url))
        group = RecorderGroup(BrokerAddress.of(amqp_url), database, lease_s=LEASE_S)
        group.add(stream_name)
        publish_plain(amqp_url, stream_name, [(b"a", {"order_id": 1})])
        wait_recorded(amqp_url, engine, stream_name)
        proxy.mode = "frozen"
        with in_time(1.0):
            group.stop(1.0)
        database.dispose()


def test_the_recorder_beside_a_publisher_closes_in_its_time(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """PostgreSQL stands still: what is left is recorded by the next one."""
    with Proxy.to(database_url) as proxy:
        recorder = EmbeddedRecorder(BrokerAddress.of(amqp_url), proxy.url(database_url))
        recorder.record(stream_name)
        publish_plain(amqp_url, stream_name, [(b"a", {})])
        wait_recorded(amqp_url, engine, stream_name)
        proxy.mode = "frozen"
        publish_plain(amqp_url, stream_name, [(b"b", {})])
        with in_time(2.0):
            recorder.close()


@pytest.mark.parametrize(("is_away", "told"), [(True, "is away"), (False, "waits, and is tried again")])
def test_what_is_asked_for_rarely_does_not_hold_the_stop(
    is_away: bool,
    told: str,
    amqp_url: str,
    database_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a broker that is away, or a name that is no stream, `run` ends at its stop, however long the pauses are."""
    monkeypatch.setattr("relatum.waiting._repeating.BACKOFF_S", (90.0, 90.0))
    broker = f"amqp://guest:guest@127.0.0.1:{free_port((0, -120))}" if is_away else amqp_url
    thread, stop = _running(Recorder(broker, database_url, [unique_name()]))
    wait_until(lambda: told in caplog.text, what="what it waits for is told")
    with in_time(STOP_S):
        stop.set()
        thread.join(90)
    assert not thread.is_alive()


@pytest.mark.parametrize("has_own_engine", [True, False])
def test_a_locked_table_is_let_go_and_recorded_later(
    has_own_engine: bool, amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """A recorder that waits for a lock stops in time, through a shared database, too; the next one records it once."""
    theirs = Database(database_url, refusing=None)
    given = database_url if has_own_engine else theirs
    thread, stop = _running(Recorder(amqp_url, given, [stream_name], keys=["order_id"]))
    publish_plain(amqp_url, stream_name, [(b"a", {"order_id": 1})])
    wait_recorded(amqp_url, engine, stream_name)
    with locked(database_url, "relationships") as session:
        publish_plain(amqp_url, stream_name, [(b"b", {"order_id": 2})])
        wait_until(lambda: _is_waited_for(session), what="the recorder waits for the lock")
        with in_time(STOP_S):
            stop.set()
            thread.join(90)
        assert not thread.is_alive()
    thread, stop = _running(Recorder(amqp_url, given, [stream_name], keys=["order_id"]))
    wait_recorded(amqp_url, engine, stream_name)
    stop.set()
    thread.join(90)
    assert [row[1] for row in rows_of(engine, stream_name)] == ["1", "2"]
    theirs.close()


def _is_waited_for(session: psycopg.Connection) -> bool:
    row = session.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
    return row is not None and bool(row[0])


def test_a_recorder_goes_on_when_the_database_does(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It gives up a statement that is not answered, says so, and records each message once when PostgreSQL goes on."""
    with Proxy.to(database_url) as proxy:
        short = Database(proxy.url(database_url), refusing=None, statement_s=0.5)
        thread, stop = _running(Recorder(amqp_url, short, [stream_name], keys=["order_id"]))
        publish_plain(amqp_url, stream_name, [(b"a", {"order_id": 1})])
        wait_recorded(amqp_url, engine, stream_name)
        proxy.mode = "frozen"
        publish_plain(amqp_url, stream_name, [(b"b", {"order_id": number}) for number in range(2, 50)])
        wait_until(lambda: "no answer in time" in caplog.text, what="the recorder says that PostgreSQL is silent")
        proxy.mode = "pass"
        wait_recorded(amqp_url, engine, stream_name)
        stop.set()
        thread.join(90)
        short.close()
    assert [row[1] for row in rows_of(engine, stream_name)] == [str(number) for number in range(1, 50)]
