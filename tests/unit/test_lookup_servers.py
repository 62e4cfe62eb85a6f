"""What lookups ask by: the reader is opened once, is not asked without time, and is refused once closed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relatum.errors import ReadTimeout, UsedAfterClose
from relatum.reading import StreamBounds
from relatum.waiting import within
from relatum_consumer.lookups.servers import Servers

ASKING = 5


class Broker:
    """A reader, and how often it was opened, asked and closed."""

    def __init__(self) -> None:
        self.opened = self.asked = self.closed = 0
        self.go_on = threading.Event()

    def open(self) -> Any:
        self.opened += 1
        assert self.go_on.wait(80)
        return self

    def bounds(self, _: str) -> StreamBounds:
        self.asked += 1
        return StreamBounds(0, 8)

    def close(self) -> None:
        self.closed += 1


def no_rows(*_: Any) -> list[Any]:
    return []


def test_threads_share_the_reader_that_the_first_opens() -> None:
    """The others wait for it."""
    broker = Broker()
    servers = Servers(no_rows, broker.open)
    with ThreadPoolExecutor(ASKING) as threads:
        asking = [threads.submit(servers.bounds, "orders") for _ in range(ASKING)]
        broker.go_on.set()
        assert [each.result(80) for each in asking] == [StreamBounds(0, 8)] * ASKING
    assert (broker.opened, broker.asked) == (1, ASKING)


def test_the_broker_is_not_asked_without_time() -> None:
    """A question that nobody waits for would cost its connection."""
    broker = Broker()
    broker.go_on.set()
    servers = Servers(no_rows, broker.open)
    servers.bounds("orders")
    with within(0.0), pytest.raises(ReadTimeout, match="no time left"):
        servers.bounds("orders")
    assert broker.asked == 1


def test_a_reader_is_closed_once_and_opened_no_more() -> None:
    """Also where it never was opened."""
    broker = Broker()
    broker.go_on.set()
    servers = Servers(no_rows, broker.open)
    servers.reach()
    for _ in range(2):
        servers.close()
        with pytest.raises(UsedAfterClose):
            servers.bounds("orders")
    assert (broker.opened, broker.closed) == (1, 1)
