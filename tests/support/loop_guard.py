"""Refuses what may block in the thread of a component's loop, in all tests: there it would stop everything at once."""

import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from relatum.common.waiting import LoopThread
from relatum.store import connection as database_connection


class BlockedLoop(AssertionError):
    """Something that may block was called in a component's loop."""


TURN_MAX_S = 0.05
"""Seconds of a processor that one callback in a component's loop may take: a lease, and other streams, wait for it."""

blocked: list[BlockedLoop] = []
"""What was refused since the test began: the component itself may have caught the error."""

_starting = threading.local()
"""Set while a thread starts another one, which is a wait of microseconds."""


def _refuse(what: str) -> None:
    if isinstance(threading.current_thread(), LoopThread) and not hasattr(_starting, "thread"):
        blocked.append(BlockedLoop(f"{what} in the thread of a component's loop"))
        raise blocked[-1]


def _guard(owner: Any, name: str, *, may_block: Callable[..., bool] = lambda *_args, **_options: True) -> None:
    original = getattr(owner, name)

    def guarded(*args: Any, **options: Any) -> Any:
        if may_block(*args, **options):
            _refuse(f"{getattr(owner, '__name__', owner)}.{name}")
        return original(*args, **options)

    setattr(owner, name, guarded)


def _waits(_self: object, timeout: float | None = None) -> bool:
    return timeout is None or timeout > 0


def install() -> None:
    start = threading.Thread.start

    def starting(self: threading.Thread) -> None:
        _starting.thread = self
        try:
            start(self)
        finally:
            del _starting.thread

    threading.Thread.start = starting  # type: ignore[method-assign]
    _guard(time, "sleep")
    _guard(socket, "getaddrinfo")
    _guard(socket, "create_connection")
    for kind in (socket.socket, ssl.SSLSocket):
        for name in ("connect", "recv", "recv_into", "send", "sendall"):
            _guard(kind, name, may_block=lambda self, *_args, **_options: self.gettimeout() != 0)
    _guard(threading.Condition, "wait", may_block=_waits)
    _guard(threading.Thread, "join", may_block=_waits)
    _guard(queue.Queue, "get", may_block=lambda _self, block=True, timeout=None: block)
    _guard(database_connection.TimedConnection, "wait")
