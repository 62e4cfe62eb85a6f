"""A database that takes no writes: what is said of it, and how work goes on where one does."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import psycopg.conninfo
import psycopg.sql
import pytest
from typer.testing import CliRunner

from relatum.command import complete_app
from relatum.errors import DatabaseUnavailable
from relatum.keys import KeyDefinition
from relatum.local import LocalPostgreSQL
from relatum.recording import verify
from relatum.store import add_keys, as_engine
from relatum.terminal import ExitCode
from relatum_consumer import Relations
from relatum_migrations import upgrade
from tests.support import START_S, publish_plain, recorded_to, recording, wait_recorded, wait_until
from tests.support.standby import Standby

READ_ONLY = "?options=-cdefault_transaction_read_only%3Don"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[LocalPostgreSQL, Standby]]:
    """A PostgreSQL with the schema, and a standby of it."""
    with LocalPostgreSQL(tmp_path / "primary", durable=False, start_timeout_s=START_S) as primary:
        upgrade(primary.database_url)
        with Standby(tmp_path / "standby", primary) as standby:
            yield primary, standby


@pytest.mark.parametrize(
    "arguments",
    [
        ["migrate"],
        ["keys", "add", "order_id"],
        ["keys", "remove", "host"],
        ["prune", "STREAM"],
        ["backfill", "STREAM", "--keys", "later"],
        ["verify", "STREAM", "--repair", "--no-dry-run"],
    ],
    ids=" ".join,
)
@pytest.mark.differs
def test_commands_that_write_say_that_the_database_is_read_only(
    amqp_url: str, stream_name: str, database_url: str, empty_database_url: str, arguments: list[str]
) -> None:
    """One line that names the cause, and the exit code of a database that is away, since it may pass."""
    with as_engine(database_url) as engine, recording(amqp_url, engine, stream_name, keys=["host"]):
        publish_plain(amqp_url, stream_name, [(b"", {"host": "h"})])
        wait_recorded(amqp_url, engine, stream_name)
        add_keys(engine, [KeyDefinition("later")])
    with psycopg.connect(database_url) as connection:
        connection.execute("DELETE FROM relatum.relationships")
    url = empty_database_url if arguments == ["migrate"] else database_url
    given = [stream_name if each == "STREAM" else each for each in arguments]
    variables = {"RELATUM_DATABASE_URL": url + READ_ONLY, "RELATUM_BROKER_URL": amqp_url}
    ended = CliRunner().invoke(complete_app(), given, env=variables)
    assert ended.exit_code == ExitCode.DATABASE, (ended.output, ended.exception)
    assert "read-only" in ended.output
    assert "Traceback" not in ended.output


def test_look_ups_go_on_where_nothing_can_be_written(
    amqp_url: str, stream_name: str, pair: tuple[LocalPostgreSQL, Standby]
) -> None:
    """A standby answers what was recorded; a recorder waits there, says so, and records once it is promoted."""
    primary, standby = pair
    with as_engine(primary.database_url) as engine, recording(amqp_url, engine, stream_name, keys=["host"]):
        publish_plain(amqp_url, stream_name, [(b"one", {"host": "h"})])
        end = wait_recorded(amqp_url, engine, stream_name)
    with as_engine(standby.database_url) as engine:
        wait_until(lambda: recorded_to(engine, stream_name) == end, what="the standby has it, too")
        with Relations(amqp_url, standby.database_url) as relations:
            assert len(relations.find("host", "h", streams=[stream_name]).ids) == 1
        with pytest.raises(DatabaseUnavailable) as refused:
            add_keys(engine, [KeyDefinition("other")])
        assert refused.value.reason == "read_only"
        primary.stop()
        publish_plain(amqp_url, stream_name, [(b"two", {"host": "h"})])
        with recording(amqp_url, engine, stream_name):
            standby.promote()
            assert wait_recorded(amqp_url, engine, stream_name) > end
        assert verify(amqp_url, engine.url, [stream_name]).ok


def test_a_recorder_goes_on_at_the_host_that_takes_writes(
    amqp_url: str, stream_name: str, pair: tuple[LocalPostgreSQL, Standby]
) -> None:
    """With both in its URL it changes over when the standby is promoted; table and stream are the same afterwards."""
    primary, standby = pair
    upgrade(standby.both)
    with as_engine(standby.both) as engine:
        with recording(amqp_url, engine, stream_name, keys=["host"]):
            publish_plain(amqp_url, stream_name, [(b"%d" % number, {"host": "h"}) for number in range(100)])
            end = wait_recorded(amqp_url, engine, stream_name)
            primary.kill()
            publish_plain(amqp_url, stream_name, [(b"%d" % number, {"host": "h"}) for number in range(100, 200)])
            standby.promote()
            engine.dispose()  # the test's own connections are to the primary
            assert wait_recorded(amqp_url, engine, stream_name) > end
            with Relations(amqp_url, standby.both) as relations:
                assert len(relations.find("host", "h", streams=[stream_name]).ids) == 200
        assert verify(amqp_url, engine.url, [stream_name]).ok


def test_connections_to_a_server_that_takes_no_writes_are_given_up(database_url: str) -> None:
    """Whoever was connected when writes were shut off reaches, the next time, what the URL names then."""
    name = psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]
    setting = psycopg.sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}")
    with as_engine(database_url) as engine, psycopg.connect(database_url, autocommit=True) as owner:
        owner.execute(setting.format(psycopg.sql.Identifier(str(name)), "on"))
        with pytest.raises(DatabaseUnavailable, match="read-only"):
            add_keys(engine, [KeyDefinition("first")])
        owner.execute(setting.format(psycopg.sql.Identifier(str(name)), "off"))
        add_keys(engine, [KeyDefinition("first")])
