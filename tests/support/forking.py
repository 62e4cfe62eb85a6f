"""Running things in child processes, however those are started; also what a child of any kind imports."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe, get_context
from typing import Any, TypeVar

import pika
from pika import BlockingConnection

import relatum
from relatum import Broker

T = TypeVar("T")


def in_child(function: Callable[[], T], limit_s: float = 60.0) -> T:
    """What a function gives in a forked child. It fails with what the child raised, or where it hangs."""
    receiver, sender = Pipe(duplex=False)

    def answer() -> None:
        warnings.simplefilter("error", DeprecationWarning)
        try:
            sender.send((True, function()))
        except BaseException as error:
            sender.send((False, f"{type(error).__name__}: {error}"))
        os._exit(0)

    child = get_context("fork").Process(target=answer)
    with warnings.catch_warnings():
        # Python 3.12 and later warn of forks beside threads, which is what these tests are about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        assert receiver.poll(limit_s), f"the child did not end within {limit_s:g} s: it waits for what is the parent's"
        works, result = receiver.recv()
    finally:
        child.kill()
        child.join()
    assert works, f"in the child: {result}"
    return result  # type: ignore[no-any-return]


def opened(broker: Broker, database_url: str) -> Any:
    """A channel whose messages are recorded by the embedded recorder, by the header `order_id`."""
    connection = BlockingConnection(pika.URLParameters(broker.url))
    relatum.intercept(connection, database=database_url, keys=["order_id"], broker=broker)
    channel = connection.channel()
    channel.confirm_delivery()
    return channel


@contextmanager
def publishing(broker: Broker, database_url: str) -> Iterator[Any]:
    """The same, for as long as the block."""
    channel = opened(broker, database_url)
    try:
        yield channel
    finally:
        relatum.release(channel.connection)
        channel.connection.close()


def put(channel: Any, stream: str, values: list[str]) -> None:
    for value in values:
        channel.basic_publish("", stream, b"", pika.BasicProperties(headers={"order_id": value}))


def publish_in_child(broker: Broker, database_url: str, stream: str, values: list[str]) -> None:
    """The whole life of a publisher; a child process calls this."""
    with publishing(broker, database_url) as channel:
        put(channel, stream, values)
