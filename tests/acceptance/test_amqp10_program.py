"""An AMQP 1.0 publisher on RabbitMQ 4, with one line more or one command more: related, trace and missing."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.acceptance._amqp10_shop import ORDERS, UNPAID
from tests.acceptance._command import LIMIT_S, Relatum
from tests.conftest import Broker
from tests.support import broker_connection, unique_name, wait_until

KEYS = [
    ("order_id",),
    ("id", "--source", "property:message_id"),
    ("cause", "--source", "property:correlation_id", "--names", "id"),
    ("customer", "--source", "body:$.order.customer"),
]


@pytest.fixture
def relatum(newer_broker: Broker, database_url: str) -> Relatum:
    """The command on a RabbitMQ 4."""
    return Relatum(newer_broker.amqp_url, newer_broker.stream_url, database_url)


@pytest.fixture
def exchanges(relatum: Relatum) -> Iterator[tuple[str, str]]:
    """Two exchanges that are there already, of the shop's own kind."""
    names = unique_name("orders"), unique_name("payments")
    with broker_connection(relatum.broker_url) as connection:
        channel = connection.channel()
        for name in names:
            channel.exchange_declare(name, "topic", durable=True)
        yield names
        for name in names:
            channel.exchange_delete(name)
            channel.queue_delete(name)
            channel.queue_delete(f"tap.{name}")


def shop(relatum: Relatum, module: str, exchanges: tuple[str, str]) -> None:
    """Run the program to its end."""
    ended = subprocess.run(
        [sys.executable, "-m", f"tests.acceptance.{module}", relatum.broker_url, *exchanges],
        env={**os.environ, "SHOP_DATABASE": relatum.database_url},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("way", ["line", "command"])
def test_what_belongs_to_an_order(relatum: Relatum, exchanges: tuple[str, str], tmp_path: Path, way: str) -> None:
    """The same answers, whether the program has one line more, or its exchanges are tapped and nothing is changed."""
    orders, payments = (f"tap.{name}" for name in exchanges)
    with ExitStack() as stack:
        for name in exchanges:
            relatum.ok("tap", name)
        if way == "command":
            for key in KEYS:
                relatum.ok("keys", "add", *key)
            recorder = relatum.start("record", orders, payments, stderr=tmp_path / "record.log")
            stack.callback(recorder.communicate, timeout=LIMIT_S)
            stack.callback(recorder.kill)
        shop(relatum, "_amqp10_shop" if way == "command" else "_amqp10_shop_line", exchanges)
        for stream in (orders, payments):
            relatum.await_recorded(stream)
    with broker_connection(relatum.broker_url) as connection:
        counts = [connection.channel().queue_declare(name, passive=True).method.message_count for name in exchanges]
    assert counts == [ORDERS, ORDERS - 1]
    (paid,) = relatum.json("find", "cause", "order-3")["messages"]
    related = relatum.json("related", paid["stream"], str(paid["offset"]), "--by", "order_id")["messages"]
    assert [(each["stream"], each["headers"]["order_id"]) for each in related] == [(orders, "o3")]
    assert len(relatum.json("find", "customer", "c1")["messages"]) == 3
    trace = relatum.json("trace", "id", "order-3", "--by", "id", "--by", "cause")
    assert trace["status"] == "found"
    streams = [each["stream"] for each in trace["messages"]]
    assert sorted(streams) == sorted([orders, payments])
    caused = [(each["cause"], each["effect"]) for each in trace["edges"] if each["cause"] is not None]
    assert [(cause["stream"], effect["stream"]) for cause, effect in caused] == [(orders, payments)]
    relatum.ok("expect", "add", "paid", "--of", orders, "--by", "order_id", "--follows", payments, "--within", "1s")

    def missing() -> list[str] | None:
        (report,) = relatum.json("missing", "paid")
        return None if report["not_known_count"] else [each["value"] for each in report["missing"]]

    assert wait_until(missing, LIMIT_S, what="all to be due") == [UNPAID]
