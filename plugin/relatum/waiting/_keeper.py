"""Something done again and again beside an object, for as long as the object is there: in a thread, or in a task."""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TypeVar

_Owner = TypeVar("_Owner")


class Keeper:
    """Calls a function with an object every so many seconds, in a thread, until it is ended or the object is forgotten.

    The thread does not keep the process from ending. In a child of the process there is none: who forks makes another.

    Args:
        owner: The object; held weakly.
        call: What to call with it: a function of its class. It sees to its own errors.
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


class AsyncKeeper:
    """As `Keeper`, in a task of the event loop that runs; a call under way is cancelled when it is ended."""

    def __init__(self, owner: _Owner, call: Callable[[_Owner], Awaitable[None]], *, every_s: float, name: str) -> None:
        repeated = _repeat_in_task(weakref.ref(owner), call, every_s)
        # In a context of its own, as a thread has one: the deadline of the call under way is not for what comes later.
        self._task = asyncio.create_task(repeated, name=name, context=Context())

    async def end(self) -> None:
        """Call it no more."""
        if self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.wait([self._task])


def _repeat(
    owner: "weakref.ref[_Owner]", call: Callable[[_Owner], None], every_s: float, ended: threading.Event
) -> None:
    while not ended.wait(every_s):
        held = owner()
        if held is None:
            return
        call(held)
        del held


async def _repeat_in_task(
    owner: "weakref.ref[_Owner]", call: Callable[[_Owner], Awaitable[None]], every_s: float
) -> None:
    while True:
        await asyncio.sleep(every_s)
        held = owner()
        if held is None:
            return
        await call(held)
        del held
