"""The demo of serialization contexts: the installed command on real data."""

import json
from collections.abc import Iterator

import pika
import pytest

from relatum.contexts import FindingKind
from relatum.superstreams import delete_super_stream
from relatum.terminal import ExitCode
from relatum_consumer.demo._contexts import PARTITIONS, SUPER_STREAM
from tests.acceptance._command import Relatum
from tests.support import broker_connection, unique_name

FLIGHTS = 500


@pytest.fixture
def prefix(amqp_url: str, stream_url: str) -> Iterator[str]:
    """What stands before the name of this test's super stream."""
    prefix = unique_name("relatum-demo") + "-"
    yield prefix
    delete_super_stream(amqp_url, prefix + SUPER_STREAM, stream_url=stream_url)


def test_planes_keep_their_order_while_they_move(
    amqp_url: str, stream_url: str, database_url: str, prefix: str
) -> None:
    """Every plane's flights are consumed in order across all moves; a super stream that exists is never touched."""
    relatum = Relatum(amqp_url, stream_url, database_url)
    arguments = ("demo", "--contexts", "--flights", str(FLIGHTS), "--prefix", prefix, "--json")
    ended = relatum.run(*arguments)
    assert ended.returncode == ExitCode.OK, ended.stderr
    result = json.loads(ended.stdout)
    assert result["ok"]
    assert (result["flights"], result["missing"], result["doubled"]) == (FLIGHTS, 0, 0)
    assert result["differences"] == []
    moved = sum(move["contexts"] for move in result["moves"])
    assert moved > result["planes"] / 4
    assert len(result["partitions"]) > PARTITIONS
    again = relatum.run(*arguments)
    assert again.returncode == ExitCode.CONFIGURATION
    assert "--prefix" in again.stderr
    super_stream = prefix + SUPER_STREAM
    checked = relatum.json("contexts", "verify", super_stream)
    assert (checked["ok"], checked["messages"], checked["header"]) == (True, FLIGHTS, "tailnum")
    some = relatum.ok("contexts", "history", super_stream, "N14228", "--json").splitlines()
    places = [json.loads(line) for line in some]
    assert [place["epoch"] for place in places] == sorted(place["epoch"] for place in places)
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        headers = {"tailnum": "N14228", "relatum_placed": f"{1 << 40}-{'0' * 16}-1"}
        for _ in range(2):
            channel.basic_publish("", places[0]["stream"], b"", pika.BasicProperties(headers=headers))
    broken = relatum.run("contexts", "verify", super_stream)
    assert broken.returncode == ExitCode.DIFFERENT
    assert FindingKind.DISORDER in broken.stdout
