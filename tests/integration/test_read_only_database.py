"""Databases that take no writes: what is said of them, how work continues, and that nothing a standby says counts."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import psycopg.conninfo
import psycopg.sql
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from typer.testing import CliRunner

import relatum
from relatum.contexts import ContextOptions, SerializationContexts
from relatum.errors import DatabaseUnavailable
from relatum.keys import KeyDefinition
from relatum.local import LocalPostgreSQL
from relatum.recording import verify
from relatum.store.catalog import add_keys
from relatum.store.database import as_engine
from relatum.superstreams import Layout
from relatum_cli.app import app
from relatum_cli.exits import ExitCode
from relatum_consumer import Relations
from relatum_migrations import upgrade
from tests.support import START_S, publish_plain, record, recorded_to, recording, wait_recorded, wait_until
from tests.support.place import Place
from tests.support.raising import raising
from tests.support.routing import consumed, of_context, other_than
from tests.support.standby import Standby

READ_ONLY = "?options=-cdefault_transaction_read_only%3Don"


@pytest.mark.differs
def test_commands_that_write_say_that_the_database_is_read_only(place: Place, empty_database_url: str) -> None:
    """A command that writes to a read-only database says so and exits as for a database that is away."""
    place.put_recorded((b"", {"host": "h"}), keys=["host"])
    add_keys(place.engine, [KeyDefinition("later")])
    place.sql("DELETE FROM relatum.relationships")
    for arguments in (
        ["migrate"],
        ["keys", "add", "order_id"],
        ["keys", "remove", "host"],
        ["prune", place.stream],
        ["backfill", place.stream, "--keys", "later"],
        ["verify", place.stream, "--repair", "--no-dry-run"],
    ):
        url = empty_database_url if arguments == ["migrate"] else place.database
        variables = {"RELATUM_DATABASE_URL": url + READ_ONLY, "RELATUM_BROKER_URL": place.amqp}
        ended = CliRunner().invoke(app, arguments, env=variables)
        assert ended.exit_code == ExitCode.DATABASE, (arguments, ended.output, ended.exception)
        assert "read-only" in ended.output
        assert "Traceback" not in ended.output


def test_work_goes_on_at_a_standby(amqp_url: str, stream_name: str, other_stream: str, tmp_path: Path) -> None:
    """A standby answers lookups, and recorders that reach it continue once it is promoted."""
    with LocalPostgreSQL(tmp_path / "primary", durable=False, start_timeout_s=START_S) as primary:
        upgrade(primary.database_url)
        with (
            Standby(tmp_path / "standby", primary) as standby,
            as_engine(standby.both) as of_both,
            as_engine(standby.database_url) as of_standby,
        ):
            publish_plain(amqp_url, other_stream, [(b"one", {"host": "h"})])
            record(amqp_url, of_both, other_stream, keys=["host"])
            with recording(amqp_url, of_both, stream_name):
                publish_plain(amqp_url, stream_name, [(b"%d" % number, {"host": "h"}) for number in range(100)])
                end = wait_recorded(amqp_url, of_both, stream_name)
                wait_until(lambda: recorded_to(of_standby, stream_name) == end, what="the standby has it, too")
                with Relations(amqp_url, standby.database_url) as relations:
                    assert len(relations.find("host", "h", streams=[other_stream]).ids) == 1
                with raising(DatabaseUnavailable, reason="read_only"):
                    add_keys(of_standby, [KeyDefinition("other")])
                primary.kill()
                publish_plain(amqp_url, other_stream, [(b"two", {"host": "h"})])
                publish_plain(amqp_url, stream_name, [(b"%d" % number, {"host": "h"}) for number in range(100, 200)])
                with recording(amqp_url, of_standby, other_stream):
                    standby.promote()
                    of_both.dispose()  # the test's own connections are to the primary
                    assert wait_recorded(amqp_url, of_standby, other_stream) == 2
                assert wait_recorded(amqp_url, of_both, stream_name) > end
                with Relations(amqp_url, standby.both) as relations:
                    assert len(relations.find("host", "h", streams=[stream_name]).ids) == 200
            assert verify(amqp_url, of_both.url, [stream_name, other_stream]).ok


def test_connections_to_a_server_that_takes_no_writes_are_given_up(database_url: str) -> None:
    """A connection to a server that takes no writes is given up, so the next call connects again."""
    name = psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]
    setting = psycopg.sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}")
    with as_engine(database_url) as engine, psycopg.connect(database_url, autocommit=True) as owner:
        owner.execute(setting.format(psycopg.sql.Identifier(str(name)), "on"))
        with pytest.raises(DatabaseUnavailable, match="read-only"):
            add_keys(engine, [KeyDefinition("first")])
        owner.execute(setting.format(psycopg.sql.Identifier(str(name)), "off"))
        add_keys(engine, [KeyDefinition("first")])


@pytest.fixture(scope="module")
def primary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPostgreSQL]:
    with LocalPostgreSQL(tmp_path_factory.mktemp("primary"), durable=False, start_timeout_s=START_S) as server:
        upgrade(server.database_url)
        yield server


@pytest.fixture(scope="module")
def standby(tmp_path_factory: pytest.TempPathFactory, primary: LocalPostgreSQL) -> Iterator[Standby]:
    with Standby(tmp_path_factory.mktemp("standby"), primary) as server:
        yield server


def behind(standby: Standby, *, paused: bool) -> None:
    with psycopg.connect(standby.database_url, autocommit=True) as connection:
        connection.execute("SELECT pg_wal_replay_pause()" if paused else "SELECT pg_wal_replay_resume()")


def placed(standby: Standby, super_stream: str) -> bool:
    """Whether the standby knows of a placement in a super stream."""
    query = "SELECT FROM relatum.placements JOIN relatum.super_streams s USING (super_stream_id) WHERE s.name = %s"
    with psycopg.connect(standby.database_url) as connection:
        return connection.execute(query, [super_stream]).fetchone() is not None


def test_lookups_at_several_hosts_do_not_mix_a_primary_and_its_standby(
    primary: LocalPostgreSQL, standby: Standby, stream_name: str, amqp_url: str
) -> None:
    """Of several hosts, lookups use the primary: the coverage of one and the rows of another would prove nothing."""
    at = f"127.0.0.1:{primary.port}/"
    hosts = primary.database_url.replace(at, f"127.0.0.1:{standby.port},{at}")
    with as_engine(primary.database_url) as of_primary:
        behind(standby, paused=True)
        try:
            publish_plain(amqp_url, stream_name, [(b"one", {"host": "h"})])
            record(amqp_url, of_primary, stream_name, keys=["host"])
            with Relations(amqp_url, hosts) as relations:
                assert relations.find("host", "h", streams=stream_name).ids == ((stream_name, 0),)
        finally:
            behind(standby, paused=False)


def test_a_standby_tells_no_message_as_published(
    primary: LocalPostgreSQL, standby: Standby, channel: BlockingChannel, layout: Layout, amqp_url: str
) -> None:
    """A router that reaches a standby, which may show an old placement, sends nothing."""
    name, home = layout.super_stream, layout.route("x").stream
    with SerializationContexts(name, primary.database_url, broker=amqp_url) as contexts:
        contexts.assign(["x"], home)
        wait_until(lambda: placed(standby, name), what="the standby has it")
        behind(standby, paused=True)
        try:
            contexts.move(["x"], other_than(layout, home))
            with (
                relatum.ContextRouter(name, standby.database_url, ContextOptions(timeout_s=0.5)) as router,
                raising(DatabaseUnavailable, reason="read_only"),
            ):
                router.publish(channel, b"x", of_context("x"))
            with SerializationContexts(name, standby.database_url) as shown:
                assert shown.assignment_of("x").partition == home  # values that are only shown may be a moment old
                assert shown.status().moves == ()
        finally:
            behind(standby, paused=False)
    assert consumed(name, primary.database_url, amqp_url, 0) == {}


def test_of_several_hosts_the_one_that_takes_writes_is_asked(
    primary: LocalPostgreSQL, standby: Standby, channel: BlockingChannel, layout: Layout, amqp_url: str
) -> None:
    """Of several hosts the primary is used, also if the standby comes first and the URL asks for no kind of server."""
    at = f"127.0.0.1:{primary.port}/"
    hosts = primary.database_url.replace(at, f"127.0.0.1:{standby.port},{at}")
    with relatum.ContextRouter(layout.super_stream, hosts) as router:
        for number in range(3):
            router.publish(channel, b"%d" % number, of_context("x"))
    with SerializationContexts(layout.super_stream, hosts, broker=amqp_url) as contexts:
        contexts.move(["x"], other_than(layout, layout.route("x").stream))
    assert consumed(layout.super_stream, primary.database_url, amqp_url, 3) == {"x": [b"0", b"1", b"2"]}
