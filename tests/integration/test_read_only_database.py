"""A database that takes no writes: what is said of it, and how work goes on where one does."""

from pathlib import Path

import psycopg
import psycopg.conninfo
import psycopg.sql
import pytest
from typer.testing import CliRunner

from relatum.errors import DatabaseUnavailable
from relatum.keys import KeyDefinition
from relatum.local import LocalPostgreSQL
from relatum.recording import verify
from relatum.store.catalog import add_keys
from relatum.store.database import as_engine
from relatum_cli.app import app
from relatum_cli.exits import ExitCode
from relatum_consumer import Relations
from relatum_migrations import upgrade
from tests.support import START_S, publish_plain, record, recorded_to, recording, wait_recorded, wait_until
from tests.support.place import Place
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
    """A standby answers lookups, and recorders that reach it go on once it is promoted."""
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
                with pytest.raises(DatabaseUnavailable) as refused:
                    add_keys(of_standby, [KeyDefinition("other")])
                assert refused.value.reason == "read_only"
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
    """A connection to a server that takes no writes is given up, so the next call connects anew."""
    name = psycopg.conninfo.conninfo_to_dict(database_url)["dbname"]
    setting = psycopg.sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}")
    with as_engine(database_url) as engine, psycopg.connect(database_url, autocommit=True) as owner:
        owner.execute(setting.format(psycopg.sql.Identifier(str(name)), "on"))
        with pytest.raises(DatabaseUnavailable, match="read-only"):
            add_keys(engine, [KeyDefinition("first")])
        owner.execute(setting.format(psycopg.sql.Identifier(str(name)), "off"))
        add_keys(engine, [KeyDefinition("first")])
