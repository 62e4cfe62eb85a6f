"""Closes objects at the end of a `with` block or when they are garbage-collected, and repeats calls in a thread."""

import threading
import weakref
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Self, TypeVar

_Owner = TypeVar("_Owner")


def close_when_dropped(owner: object, close: Callable[[], None]) -> None:
    """Call `close` when the owner is garbage-collected, at the latest when the process ends.

    `close` handles its own errors, and must not refer to the owner, which is held weakly.
    """
    weakref.finalize(owner, _close_in_thread, close)


def close_within(close: Callable[[], None], timeout_s: float, *, name: str) -> None:
    """Call `close` in a new thread, and wait at most `timeout_s` seconds: a frozen server does not answer.

    If no thread can start, as at interpreter shutdown from Python 3.12 on, `close` is not called.
    """
    closing = threading.Thread(target=close, name=name, daemon=True)
    with suppress(RuntimeError):
        closing.start()
        closing.join(timeout_s)


def _close_in_thread(close: Callable[[], None]) -> None:
    if threading.main_thread().is_alive():
        # In a new thread, because garbage collection may run in a thread that holds a lock which `close` needs.
        # `Thread.start` would take locks and wait.
        start_new_thread(close, ())
    else:
        # At interpreter shutdown, a new thread would not finish, and this one has nothing else to do.
        close()


class Closing(ABC):
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> object:
        """Close the object."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class AsyncClosing(ABC):
    """An asynchronous context manager that closes itself."""

    @abstractmethod
    async def close(self) -> object:
        """Close the object."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


class PeriodicThread:
    """A daemon thread that calls `call(owner)` every `every_s` seconds until `end`, or while the owner is referenced.

    `call` is a function of the owner's class that raises nothing. A forked child does not have the thread.
    """

    def __init__(self, owner: _Owner, call: Callable[[_Owner], None], *, every_s: float, name: str) -> None:
        self._stop = threading.Event()
        arguments = (weakref.ref(owner), call, every_s, self._stop)
        self._thread = threading.Thread(target=_repeat, args=arguments, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread. Waits for a running call, unless that call calls this method."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _repeat(
    owner: "weakref.ref[_Owner]", call: Callable[[_Owner], None], every_s: float, stop: threading.Event
) -> None:
    while not stop.wait(every_s):
        referent = owner()
        if referent is None:
            return
        call(referent)
        del referent
