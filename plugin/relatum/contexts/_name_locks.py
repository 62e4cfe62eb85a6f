"""A lock for each name that is in use."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

_Lock = TypeVar("_Lock")


class NameLocks(Generic[_Lock]):
    """Locks of names, made as they are needed. A name's lock is held by `with locks(name) as lock, lock:`.

    Args:
        make: Makes a lock, of threads or of tasks.
    """

    def __init__(self, make: Callable[[], _Lock]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._used: dict[str, tuple[_Lock, int]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[_Lock]:
        """The name's lock; it is forgotten when the last block that uses it ends."""
        with self._lock:
            lock, users = self._used.get(name) or (self._make(), 0)
            self._used[name] = (lock, users + 1)
        try:
            yield lock
        finally:
            with self._lock:
                users = self._used[name][1] - 1
                if users:
                    self._used[name] = (lock, users)
                else:
                    del self._used[name]
