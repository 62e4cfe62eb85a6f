"""A thread of a recorder."""

import threading
from abc import ABC, abstractmethod


class Worker(ABC):
    """Does its part of recording in a thread of its own, from `start` until what it was made with says that it ends."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end, so many seconds at most; None: for as long as it takes."""
        self._thread.join(timeout_s)

    @abstractmethod
    def _run(self) -> None:
        """Work."""
