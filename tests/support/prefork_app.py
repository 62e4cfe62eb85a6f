"""A WSGI application for pre-fork servers: the master that preloads it publishes, too, each over its own channel."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import relatum
from relatum.reading import StreamReader
from tests.support.forking import opened, put

BROKER = relatum.Broker(os.environ["APP_AMQP"], stream_url=os.environ["APP_STREAM"])
DATABASE = os.environ["APP_DATABASE"]
STREAM = os.environ["APP_NAME"]
ORDERS = relatum.SuperStream("orders", partitions=3)
READER = StreamReader.open(BROKER)

masters = opened(BROKER, DATABASE)
put(masters, STREAM, ["master"])
READER.bounds(STREAM)

channels: dict[int, Any] = {}


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    worker = os.getpid()
    if worker not in channels:
        channels[worker] = opened(BROKER, DATABASE)
    put(channels[worker], STREAM, [environ["QUERY_STRING"]])
    assert READER.bounds(STREAM).last is not None
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(worker).encode()]
