"""Commands that set something up: run twice, and killed in between, they leave what one run leaves."""

import psycopg
import pytest

from relatum.superstreams import delete_super_stream
from tests.acceptance._command import LIMIT_S, Relatum
from tests.support import broker_connection, declare_stream, delete_stream, unique_name, wait_until

WAITS = """
SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()
"""


@pytest.mark.parametrize(
    ("arguments", "table", "listed"),
    [
        (("migrate",), "alembic_version", ("migrate", "--current")),
        (("keys", "add", "order_id", "host"), "keys", ("keys", "list")),
        (("keys", "add", "--preset", "celery"), "keys", ("keys", "list")),
        (
            (
                "expect",
                "add",
                "billed",
                "--of",
                "orders",
                "--by",
                "order_id",
                "--follows",
                "invoices",
                "--within",
                "1h",
            ),
            "expectations",
            ("expect", "list"),
        ),
        (("tap", "EXCHANGE", "--stream", "tap.EXCHANGE"), "taps", ("tap", "--list")),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_a_command_that_is_killed_and_run_again_leaves_what_one_run_leaves(
    relatum: Relatum, amqp_url: str, database_url: str, arguments: tuple[str, ...], table: str, listed: tuple[str, ...]
) -> None:
    """Killed while it writes, then run twice: it ends well, says the same, and nothing is there twice."""
    exchange = unique_name("orders")
    command = [each.replace("EXCHANGE", exchange) for each in arguments]
    relatum.ok("keys", "add", "order_id")
    with broker_connection(amqp_url) as connection:
        connection.channel().exchange_declare(exchange, "topic", durable=True)
        try:
            killed_while_it_writes(relatum, database_url, command, table)
            first = relatum.ok(*command)
            found = relatum.ok(*listed)
            assert relatum.ok(*command) == first
            assert relatum.ok(*listed) == found
            assert len(set(found.splitlines())) == len(found.splitlines()) >= 1
        finally:
            connection.channel().exchange_delete(exchange)
            delete_stream(amqp_url, f"tap.{exchange}")


def killed_while_it_writes(relatum: Relatum, database_url: str, command: list[str], table: str) -> None:
    """Kill a command that waits for a table which another has locked."""
    with psycopg.connect(database_url) as held, psycopg.connect(database_url, autocommit=True) as watching:
        held.execute(f"LOCK TABLE relatum.{table} IN ACCESS EXCLUSIVE MODE")
        with relatum.start(*command) as process:
            wait_until(lambda: watching.execute(WAITS).fetchone(), LIMIT_S, what="the command to wait")
            process.kill()
            process.communicate(timeout=LIMIT_S)


def test_a_super_stream_is_declared_again(relatum: Relatum, amqp_url: str) -> None:
    """What a kill left out is added; then all is there, and stays."""
    name = unique_name()
    declare_stream(amqp_url, f"{name}-0")  # the first thing that it does
    try:
        first = relatum.ok("super-stream", "declare", name)
        assert relatum.ok("super-stream", "declare", name) == first
    finally:
        delete_super_stream(amqp_url, name)
