"""What publishes in a thread while a test does something else, and connections that end before a confirm."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import pika

from tests.support._recording import reader_of
from tests.support._waiting import until_answered, wait_until
from tests.support.proxy import Proxy


class Load:
    """Publishes in a thread until its block is left; what it publishes, its `_run` says, which looks at `_stop`."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")  # type: ignore[attr-defined]
        self.published = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive()


class StubbornLoad(Load):
    """Publishes `each_s` messages a second whatever happens to the broker; connects again, and repeats no number."""

    def __init__(self, broker_url: str, message_of: Callable[[int], Any], *, each_s: int) -> None:
        self._url, self._message_of, self._each_s = broker_url, message_of, each_s
        super().__init__()

    def _run(self) -> None:
        while not self._stop.is_set():
            with suppress(pika.exceptions.AMQPError, OSError):
                connection = pika.BlockingConnection(pika.URLParameters(self._url))
                channel = connection.channel()
                while not self._stop.wait(1 / 20):
                    for _ in range(self._each_s // 20):
                        self.published += 1
                        stream, properties = self._message_of(self.published)
                        channel.basic_publish("", stream, b"x" * 100, properties)
                    connection.process_data_events(0)
                connection.close()
            self._stop.wait(0.1)


def lose_confirm(
    proxy: Proxy, amqp_url: str, stream: str, *, arrives: bool = True, at_end: Callable[[], object] = lambda: None
) -> None:
    """End a line's connections before the next message's confirm: once it is in the stream, or was dropped.

    `at_end` is called just before they end.
    """

    def last() -> int | None:
        with reader_of(amqp_url) as reader:
            return until_answered(lambda: reader.bounds(stream).last)

    def end() -> None:
        wait_until(lambda: last() != before if arrives else proxy.dropped > dropped, what="the message")
        at_end()
        proxy.reset()
        proxy.mode = "pass"

    before, dropped = last(), proxy.dropped
    proxy.mode = "blackhole_replies" if arrives else "blackhole"
    threading.Thread(target=end, name="loses a confirm", daemon=True).start()
