"""Close at the end of a `with` block, or when the owner is garbage-collected; repeat a call in a thread."""

import threading
import weakref
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Self, TypeVar

_Owner = TypeVar("_Owner")


def close_when_dropped(owner: object, close: Callable[[], None]) -> None:
    """Call `close` once the owner is garbage-collected, at the latest when the process ends.

    `close` runs in its own thread: the collector may run in any thread, even one that holds a lock `close` needs.

    Args:
        owner: The object, held weakly.
        close: A function that does not refer to the owner and handles its own errors.
    """
    weakref.finalize(owner, _close_in_thread, close)


def close_within(close: Callable[[], None], timeout_s: float, *, name: str) -> None:
    """Call `close` in its own thread, and wait at most `timeout_s` seconds: a frozen server does not answer.

    If no thread can be started, as at the end of the interpreter with Python 3.12, `close` is not called.
    """
    closing = threading.Thread(target=close, name=name, daemon=True)
    with suppress(RuntimeError):
        closing.start()
        closing.join(timeout_s)


def _close_in_thread(close: Callable[[], None]) -> None:
    if threading.main_thread().is_alive():
        # Not a `Thread`: its start takes locks and waits.
        start_new_thread(close, ())
    else:
        # At the end of the interpreter, this thread is idle, and another one would not finish.
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


class Keeper:
    """A daemon thread that calls a function with an object every `every_s` seconds.

    It ends with `end`, or when the object is garbage-collected. A forked child does not have the thread.

    Args:
        owner: The object, held weakly.
        call: A function of the object's class that raises nothing.
    """

    def __init__(self, owner: _Owner, call: Callable[[_Owner], None], *, every_s: float, name: str) -> None:
        self._ended = threading.Event()
        arguments = (weakref.ref(owner), call, every_s, self._ended)
        self._thread = threading.Thread(target=_repeat, args=arguments, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread. Waits for a running call, unless that call ends the thread."""
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _repeat(
    owner: "weakref.ref[_Owner]", call: Callable[[_Owner], None], every_s: float, ended: threading.Event
) -> None:
    while not ended.wait(every_s):
        held = owner()
        if held is None:
            return
        call(held)
        del held
