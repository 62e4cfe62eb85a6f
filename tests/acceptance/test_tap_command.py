"""`relatum tap` and `relatum untap`: two commands, and the messages of an exchange are found."""

import json

import pytest
from pika import BasicProperties

from relatum.local import LocalRabbitMQ
from relatum.terminal import ExitCode
from tests.acceptance._command import LIMIT_S, Relatum
from tests.support import broker_connection, unique_name, wait_until


@pytest.fixture
def server(own_broker: LocalRabbitMQ) -> LocalRabbitMQ:
    """A broker of this module."""
    return own_broker


@pytest.fixture
def relatum(server: LocalRabbitMQ, database_url: str) -> Relatum:
    """The command on that broker."""
    return Relatum(server.broker_url, server.stream_url, database_url)


def test_two_commands_and_an_exchange_is_looked_up(relatum: Relatum, server: LocalRabbitMQ) -> None:
    """Tap and record, then find; listed, taken away, and deleted only where somebody says so."""
    exchange = unique_name("orders")
    assert relatum.run("tap", exchange).returncode == ExitCode.NOT_THERE
    assert relatum.run("tap").returncode == relatum.run("untap").returncode == ExitCode.USAGE
    with broker_connection(server.broker_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(exchange, "topic", durable=True)
        said = relatum.ok("tap", exchange, "--max-length-bytes", "20000000")
        assert f"relatum record tap.{exchange}" in said
        assert "20.0 MB and 7d at most" in said
        recorder = relatum.start("record", f"tap.{exchange}", "--keys", "order_id")
        try:
            channel.basic_publish(exchange, "new", b"4 chairs", BasicProperties(headers={"order_id": 7}))
            wait_until(lambda: relatum.run("find", "order_id", "7").returncode == 0, LIMIT_S, what="the order")
        finally:
            recorder.kill()
            recorder.communicate(timeout=LIMIT_S)
    (found,) = relatum.json("find", "order_id", "7")["messages"]
    assert (found["stream"], found["body"]) == (f"tap.{exchange}", "4 chairs")
    (listed,) = relatum.json("tap", "--list")
    assert {
        name: listed[name] for name in ("exchange", "type", "stream", "binding_key", "arguments", "made_stream")
    } == {
        "exchange": exchange,
        "type": "topic",
        "stream": f"tap.{exchange}",
        "binding_key": "#",
        "arguments": {},
        "made_stream": True,
    }
    assert relatum.run("untap", exchange, "--delete", "--json").returncode == ExitCode.USAGE
    assert relatum.run("untap", exchange, "--delete").returncode == ExitCode.DECLINED
    assert f"what was copied stays in tap.{exchange}" in relatum.ok("untap", exchange)
    assert relatum.json("tap", "--list") == []
    assert relatum.run("untap", exchange).returncode == ExitCode.NOT_THERE
    arguments = json.dumps({"x-match": "any", "format": "pdf"})
    (made,) = relatum.json("tap", "amq.headers", "--stream", f"{exchange}.pdf", "--arguments", arguments)
    assert made["arguments"] == {"x-match": "any", "format": "pdf"}
    assert "is deleted" in relatum.ok("untap", "amq.headers", "--delete", "--yes")
