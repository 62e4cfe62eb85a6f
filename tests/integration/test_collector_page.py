"""What docs/collector.md shows is run, as it stands there."""

import re
from pathlib import Path
from typing import Any

import pika
import psycopg
import pytest

import relatum
from relatum.collecting import OutcomeStatus
from tests.support import broker_connection, declare_stream, delete_stream

PAGE = (Path(__file__).parents[2] / "docs" / "collector.md").read_text()


@pytest.fixture
def names(amqp_url: str, database_url: str, stream_name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the page names, and what stands for it here."""
    monkeypatch.setenv("RELATUM_DATABASE_URL", database_url)
    monkeypatch.setenv("RELATUM_BROKER_URL", amqp_url)
    return {
        "orders": stream_name,
        "orders-dead": f"{stream_name}-dead",
        "postgresql://user@host/name": database_url,
        "0193…": "first",
        "0194…": "second",
    }


def test_what_the_page_shows_works(
    amqp_url: str, database_url: str, stream_name: str, names: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages are published, written by the executor once each, and their outcomes found in each way shown."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    collects, made, _, asks, publishes = (
        re.sub(r'"([^"]*)"', lambda hit: repr(names.get(hit[1], hit[1])), each) for each in blocks
    )
    here: dict[str, Any] = {"relatum": relatum, "pika": pika}

    def work() -> None:
        for message_id in ("first", "second"):
            properties = pika.BasicProperties(type="order", message_id=message_id)
            relatum.publish(here["channel"], "", stream_name, b"a parcel", properties)
        # Over the connection that is there: it is the test's to close.
        exec(compile(publishes[publishes.index("receipt = ") :], "docs/collector.md", "exec"), here)
        exec(compile(asks, "docs/collector.md", "exec"), here)

    with psycopg.connect(database_url, autocommit=True) as database:
        database.execute("CREATE TABLE booked (id text PRIMARY KEY, body bytea NOT NULL)")
        declare_stream(amqp_url, names["orders-dead"])
        try:
            with broker_connection(amqp_url) as connection:
                relatum.intercept(connection, keys=["order_id"], database=database_url)
                here |= {"channel": connection.channel(), "work": work}
                exec(compile(collects.replace("    ...", "    work()"), "docs/collector.md", "exec"), here)
                relatum.release(connection)
        finally:
            delete_stream(amqp_url, names["orders-dead"])
        booked = database.execute("SELECT id FROM booked ORDER BY id").fetchall()
    exec(compile(made, "docs/collector.md", "exec"), here)
    receipt, found = here["receipt"], here["found"]
    assert sorted(message_id for (message_id,) in booked) == sorted(["first", "second", receipt.message_id])
    assert here["outcome"].status is OutcomeStatus.SUCCEEDED
    assert [found[message_id].status for message_id in ("first", "second")] == [OutcomeStatus.SUCCEEDED] * 2
    assert f"{receipt.message_id} succeeded" in capsys.readouterr().out
