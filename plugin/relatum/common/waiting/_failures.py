"""Handles failures: which failures may be retried and when, and what is logged about them.

Work that runs forever retries failures that time alone may end (`may_repeat`) and, if it can wait for an operator,
those that need one (`needs_operator`). After other errors, it logs and counts the message, and continues without it.
docs/retries.md lists every loop that retries.

A loop that retries reports failures and successes to its component's `Outages`. It logs one warning for an unavailable
server, for any number of waiting loops and retries, and one line of level INFO when the last loop continues. The same
applies to other causes of waiting, such as a missing stream or permission.
"""

import logging
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Final

from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    DatabaseUnavailable,
    NotAStream,
    PublishNacked,
    PublishUnroutable,
    ReadTimeout,
    RelatumError,
    StreamNotFound,
    StreamUnavailable,
    Transient,
)

BACKOFF_S: Final = (0.05, 5.0)
"""First and longest pause, in seconds, before an unavailable server is retried. The pause doubles; half is random."""

QUESTION_S: Final = 60.0
"""Longest pause, in seconds, before a refused request is retried or an operator's fix is checked. Half is random."""

ANSWER_S: Final = 10.0
"""Seconds without an answer after which a server counts as unavailable."""

STARTING_S: Final = 30.0
"""Seconds after a broker is back in which a missing stream is not logged: streams start after the broker."""

_OF_STREAM: Final = (StreamUnavailable, StreamNotFound)
"""Errors for streams and super streams that a starting broker does not have yet."""


def may_repeat(error: BaseException) -> bool:
    """Whether the failed work may be retried unchanged, because time alone may end the failure."""
    return isinstance(error, Transient)


def needs_operator(error: BaseException) -> bool:
    """Whether an error is caused by the setup of servers, not by a message, so that an operator has to fix it.

    Examples: a missing permission, schema or stream, or a full queue. All following messages would also fail. Work that
    runs forever may wait for the fix, with pauses up to `QUESTION_S` and a log line; a call raises the error.
    """
    # The message is not the cause of a broker's nack: a queue is full, or a stream has no leader.
    mended = (AccessRefused, ConfigurationError, NotAStream, PublishNacked, PublishUnroutable, StreamNotFound)
    return isinstance(error, mended)


def backoff(longest_s: float = BACKOFF_S[1], first_s: float = BACKOFF_S[0]) -> Iterator[float]:
    """Yield the pauses between retries, in seconds. Use `QUESTION_S` as `longest_s` for refused requests."""
    pause = first_s
    while True:
        yield pause * (0.5 + random.random() / 2)  # noqa: S311 - spreads retries; not a secret
        pause = min(pause * 2, longest_s)


class Pauses:
    """The pauses of a loop that retries: up to 5 s after transient errors, up to `QUESTION_S` after all others."""

    def __init__(self) -> None:
        self._transient_pauses = backoff()
        self._other_pauses = backoff(QUESTION_S)

    def after(self, error: BaseException) -> float:
        """Return the seconds to wait after an error."""
        return next(self._transient_pauses if may_repeat(error) else self._other_pauses)


def ended(error: BaseException) -> str:
    """Return an error's class and message for the log, without a traceback."""
    kind = "" if isinstance(error, RelatumError) else " (unexpected)"
    return f"{type(error).__name__}{kind}: {error}"


def log_failure(
    logger: logging.Logger,
    error: BaseException,
    what: str,
    *,
    level: int = logging.WARNING,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Log an error that ended some work: a Relatum error in one line, an unexpected error with its traceback.

    Work that is retried reports errors to `Outages` instead, which logs an outage once. `what`: The work and its
    subject. `level`: The level for Relatum's errors; INFO if no action is needed.
    """
    if isinstance(error, RelatumError):
        logger.log(level, "%s: %s", what, ended(error), extra=extra)
    else:
        logger.error("%s", what, exc_info=error, extra=extra)


class Server(StrEnum):
    """A server whose unavailability is logged once for all parts of a component."""

    BROKER = "RabbitMQ"
    DATABASE = "PostgreSQL"


class Outages:
    """Logs the outages that a component's parts wait for, each outage once. Thread-safe; never blocks.

    `broker` and `database` are names for the log, without passwords. After `stop`, failures of the broker are ignored.
    """

    def __init__(
        self, logger: logging.Logger, *, broker: str = "", database: str = "", stop: threading.Event | None = None
    ) -> None:
        self._logger = logger
        self._names: dict[Server, str] = {}
        self.name(Server.BROKER, broker)
        self.name(Server.DATABASE, database)
        self._stop = stop or threading.Event()
        self._lock = threading.Lock()
        self._waiting: dict[str, Server | str] = {}
        """The cause of each part's wait: a server, or the error's class if the error concerns that part alone."""
        self._since: dict[Server | str, float] = {}
        """The start of each server's outage, and of the wait of each part that waits for another cause."""
        self._recovering: set[Server] = set()
        """Servers that are available for one part while other parts still wait for them."""
        self._broker_recovered_at = -STARTING_S
        self._answered: set[Server] = set()
        self._requests: dict[object, tuple[Server, float]] = {}

    def name(self, server: Server, name: str) -> None:
        """Set a server's name for the log, if it was unknown at the start."""
        self._names[server] = f"{server.value} {name}".strip()

    # --- reports ----------------------------------------------------------------------------------------------------

    def failed(self, part: str, error: BaseException) -> None:
        """Note that a part ("recording of stream 'orders'") cannot continue, and log the cause if it is new."""
        with self._lock:
            previous = self._waiting.get(part)
            cause = _cause(error, previous)
            if cause is Server.BROKER and self._stop.is_set():
                return  # The stop ended the request, so the broker may be available.
            if cause == previous or (isinstance(error, _OF_STREAM) and previous is None and self._is_starting()):
                return
            self._waiting[part] = cause
            # The server that this part waited for is back if no other part waits for it.
            recovered = self._recovered(previous)
            is_new = cause not in self._since
            if isinstance(cause, Server):
                self._since.pop(part, None)
            self._since.setdefault(cause if isinstance(cause, Server) else part, time.monotonic())
        self._log_recovery(recovered)
        if not is_new:
            return
        if isinstance(cause, Server):
            self._logger.warning("%s is unavailable; retrying: %s", self._names[cause], ended(error))
        elif isinstance(error, RelatumError):
            self._logger.warning("%s is waiting and will retry: %s", part, ended(error))
        else:
            self._logger.error("%s hit an unexpected error and will retry", part, exc_info=error)

    def over(self, part: str) -> None:
        """Note that a part continues. If it was the last part that waited for the cause, log the recovery."""
        self._stop_waiting(part, continues=True)

    def forget(self, part: str) -> None:
        """Note that a part has ended or waits for another cause. Neither shows that the server is back.

        If it was the last part that waited, the recovery is logged only if another part has continued with the server.
        """
        self._stop_waiting(part, continues=False)

    def _stop_waiting(self, part: str, *, continues: bool) -> None:
        if part not in self._waiting:
            return
        with self._lock:
            cause, since = self._waiting.pop(part, None), self._since.pop(part, None)
            if isinstance(cause, Server):
                if continues:
                    self._recovering.add(cause)
                elif cause not in self._waiting.values() and cause not in self._recovering:
                    del self._since[cause]
            recovered = self._recovered(cause)
        if continues and since is not None:
            self._logger.info("%s is no longer waiting, after %.0f s", part, time.monotonic() - since)
        self._log_recovery(recovered)

    def _is_starting(self) -> bool:
        """Whether the broker is not back for all parts, or has just come back: its streams start after it."""
        return Server.BROKER in self._since or time.monotonic() < self._broker_recovered_at + STARTING_S

    def _recovered(self, cause: "Server | str | None") -> tuple[Server, float] | None:
        """Return a server with the start of its outage if no part waits for it any longer. Call with the lock held."""
        if not isinstance(cause, Server) or cause in self._waiting.values() or cause not in self._since:
            return None
        if cause is Server.BROKER:
            self._broker_recovered_at = time.monotonic()
        self._answered.add(cause)
        self._recovering.discard(cause)
        return cause, self._since.pop(cause)

    def _log_recovery(self, recovered: tuple[Server, float] | None) -> None:
        if recovered is not None:
            self._logger.info("%s is back, after %.0f s", self._names[recovered[0]], time.monotonic() - recovered[1])

    # --- health -----------------------------------------------------------------------------------------------------

    def answered(self, *servers: Server) -> None:
        """Note that servers have answered."""
        self._answered.update(servers)

    @contextmanager
    def asking(self, server: Server) -> Iterator[None]:
        """Note a request to a server during the block: after `ANSWER_S` without an answer, `is_up` is False."""
        key = object()
        self._requests[key] = server, time.monotonic()
        try:
            yield
        finally:
            del self._requests[key]
        self._answered.add(server)

    def is_up(self, server: Server) -> bool | None:
        """Whether a server is available: no part waits for it, and it answers; None before its first answer."""
        with self._lock:
            is_awaited = server in self._waiting.values()
        silent_since = time.monotonic() - ANSWER_S
        is_silent = any(requested == server and at < silent_since for requested, at in list(self._requests.values()))
        if is_awaited or is_silent:
            return False
        return True if server in self._answered else None


def _cause(error: BaseException, previous: "Server | str | None") -> "Server | str":
    """Return the cause of a part's wait after an error; `previous` is the cause before the error."""
    if isinstance(error, DatabaseUnavailable) and (error.reason != "pool" or previous is Server.DATABASE):
        # An exhausted pool says nothing about the server.
        return Server.DATABASE
    if isinstance(error, StreamUnavailable):
        # A starting broker is available before its streams.
        return Server.BROKER if previous is Server.BROKER else type(error).__name__
    if isinstance(error, BrokerUnavailable | ReadTimeout):
        return Server.BROKER
    return type(error).__name__
