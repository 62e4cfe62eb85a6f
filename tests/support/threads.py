"""Threads of a test: what runs beside it, and what tells them from those that earlier ones left in the same process."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def beside(
    run: Callable[..., T], *arguments: Any, stop: Callable[[], object] = lambda: None, name: str = "beside a test"
) -> Iterator[Future[T]]:
    """Run a function in a thread beside the block, at whose end it is stopped and waited for; it must not fail."""
    threads = ThreadPoolExecutor(1, name)
    running = threads.submit(run, *arguments)
    try:
        yield running
    finally:
        stop()
        wait([running], 90)
        threads.shutdown(wait=running.done())
    running.result(0)


class Threads:
    """The threads of now, which are not those that are begun later."""

    def __init__(self) -> None:
        self._earlier = set(threading.enumerate())

    def begun(self) -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each not in self._earlier]

    def told(self, record: logging.LogRecord) -> bool:
        """Whether a line of a log may be a later one's: no earlier component logged it."""
        # Threads of the process are no component's. The number of a thread that has ended may belong to another by now.
        if record.threadName in ("relatum-calls", "relatum-connecting"):
            return True
        return not any(
            each.ident == record.thread and each.is_alive() for each in self._earlier if each.name.startswith("relatum")
        )
