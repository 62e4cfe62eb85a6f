"""What publishes in a thread while a test does something else."""

import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self

import pika


class Load(ABC):
    """Publishes in a thread until its block is left; what it publishes, its `_run` says, which looks at `_stop`."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self.published = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Publish no more."""
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive()

    @abstractmethod
    def _run(self) -> None: ...


class StubbornLoad(Load):
    """Publishes whatever happens to the broker: it connects again. What it publishes, its `_publish` says."""

    def __init__(self, broker_url: str) -> None:
        self._url = broker_url
        super().__init__()

    def _run(self) -> None:
        while not self._stop.is_set():
            with suppress(pika.exceptions.AMQPError, OSError):
                connection = pika.BlockingConnection(pika.URLParameters(self._url))
                self._publish(connection)
                connection.close()
            self._stop.wait(0.1)

    @abstractmethod
    def _publish(self, connection: pika.BlockingConnection) -> None: ...
