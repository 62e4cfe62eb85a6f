"""Closing: at the end of a `with` block, or when the owner is garbage-collected; and repeating a call in a thread."""

import threading
import weakref
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

_Owner = TypeVar("_Owner")


def close_when_dropped(owner: object, close: Callable[[], None]) -> None:
    """Call `close` once the owner is garbage-collected, at the latest when the process ends.

    It runs in a thread of its own: the collector may run in any thread, also in one that holds a lock `close` needs.

    Args:
        owner: Held weakly.
        close: Must not refer to the owner, and must handle its own errors.
    """
    weakref.finalize(owner, _close_apart, close)


def close_within(close: Callable[[], None], timeout_s: float, *, name: str) -> None:
    """Call `close` in a thread of its own, and wait at most `timeout_s`: a frozen server does not answer a goodbye.

    If no thread can be started, as at the end of the interpreter with Python 3.12, it is not called: the process ends.
    """
    closing = threading.Thread(target=close, name=name, daemon=True)
    with suppress(RuntimeError):
        closing.start()
        closing.join(timeout_s)


def _close_apart(close: Callable[[], None]) -> None:
    if threading.main_thread().is_alive():
        # Not a `Thread`, whose start takes locks and waits.
        start_new_thread(close, ())
    else:
        # The interpreter ends: this thread is idle, and another one would not finish.
        close()


class Closing(ABC):
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> object:
        """Close it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosing(ABC):
    """The asyncio twin of `Closing`."""

    @abstractmethod
    async def close(self) -> object:
        """Close it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Keeper:
    """Calls a function with an object every so many seconds, in a daemon thread, until ended or the object is dropped.

    In a child of the process there is no such thread.

    Args:
        owner: The object; held weakly.
        call: What to call with it: a function of its class, which raises nothing.
    """

    def __init__(self, owner: _Owner, call: Callable[[_Owner], None], *, every_s: float, name: str) -> None:
        self._ended = threading.Event()
        arguments = (weakref.ref(owner), call, every_s, self._ended)
        self._thread = threading.Thread(target=_repeat, args=arguments, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Call it no more. A call under way is waited for, unless it is what ends this."""
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
