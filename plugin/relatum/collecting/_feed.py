"""One follower for all streams of a collector: what comes of each goes to whoever follows it here."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from relatum.following import Event, Follower
from relatum.reading import BrokerAddress, Position

TAKE_S: Final = 1.0
"""Seconds of one take in a thread; nothing depends on it."""


class Feed:
    """For threads: each stream's events are waited for in a queue of its own.

    Args:
        address: The broker.
        name: The collector's name.
    """

    def __init__(self, address: BrokerAddress, name: str) -> None:
        self.follower = Follower(address).open()
        self._lock = threading.Lock()
        self._queues: dict[str, Any] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"relatum-{name}-feed", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closed:
            self._sort(self.follower.take(TAKE_S))

    def _sort(self, events: list[Event]) -> None:
        for event in events:
            with self._lock:
                if event.stream is None:
                    # It is about all of them.
                    for each in self._queues.values():
                        each.put_nowait(event)
                elif event.stream in self._queues:
                    self._queues[event.stream].put_nowait(event)
                    continue
            self.follower.done(event)

    @contextmanager
    def following(self, stream: str, next_offset: int, known: Position | None) -> Iterator[Any]:
        """Follow a stream in the block; gives the queue of its events, each to be given back by `done`."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        with self._lock:
            self._queues[stream] = events
        try:
            self.follower.follow(stream, next_offset, known=known)
            yield events
        finally:
            self.follower.leave(stream)
            with self._lock:
                self._queues.pop(stream, None)
            with suppress(queue.Empty):
                while True:
                    self.follower.done(events.get_nowait())

    def close(self) -> None:
        """End the follower."""
        self._is_closed = True
        self.follower.close()
        self._thread.join()
