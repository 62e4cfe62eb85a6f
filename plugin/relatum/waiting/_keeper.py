"""Something done again and again beside an object, in a thread, for as long as the object is there."""

import threading
import weakref
from collections.abc import Callable
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


def _repeat(
    owner: "weakref.ref[_Owner]", call: Callable[[_Owner], None], every_s: float, ended: threading.Event
) -> None:
    while not ended.wait(every_s):
        held = owner()
        if held is None:
            return
        call(held)
        del held
