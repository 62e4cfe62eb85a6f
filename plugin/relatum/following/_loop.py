"""The loop of the one thread that reads: sockets, timers, and calls from other threads."""

import contextlib
import heapq
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Final

Handler = Callable[[int, int], None]
"""Called with a descriptor and the events it is ready for."""

CALLS_AT_ONCE: Final = 1_000
"""Calls of other threads that are made before sockets are looked at again."""


class Timer:
    """A call that is due some time, unless it is cancelled."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Do not call."""
        self.callback = None


class Loop:
    """Runs handlers, step by step. `add_callback` is for any thread, all else for the one that runs it."""

    READ: Final = 1
    WRITE: Final = 4

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._calls: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = count()
        self._is_awake = True
        self._is_open = False

    def open(self) -> None:
        """Take what it needs of the system; to be closed."""
        self._selector = selectors.DefaultSelector()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._selector.register(self._reader, selectors.EVENT_READ)
        self._is_open = True

    def add_handler(self, fd: int, handler: Handler, events: int) -> None:
        """Call a handler whenever a descriptor is ready for some of the events."""
        self._handlers[fd] = handler
        self._selector.register(fd, self._mask(events))

    def update_handler(self, fd: int, events: int) -> None:
        """Wait for other events of a descriptor; 0 for none at present."""
        mask = self._mask(events)
        is_watched = fd in self._selector.get_map()
        if not mask:
            if is_watched:
                self._selector.unregister(fd)
        elif is_watched:
            self._selector.modify(fd, mask)
        else:
            self._selector.register(fd, mask)

    def remove_handler(self, fd: int) -> None:
        """Wait for a descriptor no more."""
        self._handlers.pop(fd, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        """Call after so many seconds."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._numbers), timer))
        return timer

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call soon, in the loop's thread."""
        self._calls.append(callback)
        if not self._is_awake:
            self._is_awake = True
            # Full: it is awake by then.
            with contextlib.suppress(OSError):
                self._writer.send(b"\0")

    # --- its owner ----------------------------------------------------------------------------------------------------

    @staticmethod
    def _mask(events: int) -> int:
        reads = selectors.EVENT_READ if events & Loop.READ else 0
        return reads | (selectors.EVENT_WRITE if events & Loop.WRITE else 0)

    def run_once(self) -> None:
        """Wait for something to do, and do it."""
        for key, mask in self._selector.select(self._wait_s()):
            self._is_awake = True
            if key.fd == self._reader.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._reader.recv(4096)
                continue
            handler = self._handlers.get(key.fd)
            if handler is not None:
                reads = self.READ if mask & selectors.EVENT_READ else 0
                handler(key.fd, reads | (self.WRITE if mask & selectors.EVENT_WRITE else 0))
        self._is_awake = True
        self._run_timers()
        for _ in range(CALLS_AT_ONCE):
            if not self._calls:
                break
            self._calls.popleft()()

    def _wait_s(self) -> float | None:
        # Said before it looks: who adds a call after that sends a byte.
        self._is_awake = False
        if self._calls:
            return 0.0
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            callback = heapq.heappop(self._timers)[2].callback
            if callback is not None:
                callback()

    def close(self) -> None:
        """Release its own sockets, if it was opened; handlers' are their owners'."""
        if not self._is_open:
            return
        self._selector.close()
        self._reader.close()
        self._writer.close()
