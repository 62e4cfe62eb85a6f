"""Handles failures: which failures may be retried and when, and what is logged about them.

Work that runs forever calls `may_repeat` to learn whether time alone may cure a failure and, if it can wait for an
operator, `may_be_mended`. All other errors are final for their message: it is named, counted and passed on.
docs/retries.md lists every loop that retries.

A loop that retries reports failures and successes to its component's `Outages`. An unavailable server is then one
warning, however many loops wait for it and however often they retry, and one line of level INFO when the last of them
continues. The same applies to other causes of waiting: a missing stream, a permission.
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
"""Least and most seconds before an unavailable server is retried: doubled each time, half of it at random."""

QUESTION_S: Final = 60.0
"""Most seconds before a refused request is retried: half of it at random, so at least 30 in the end.

It is also the longest pause of retries that wait for an operator's fix.
"""

ANSWER_S: Final = 10.0
"""Seconds without an answer after which a server counts as unavailable."""

STARTING_S: Final = 30.0
"""Seconds after a broker's return for which a stream that is not there yet is not logged."""


_OF_STREAM: Final = (StreamUnavailable, StreamNotFound)
"""Errors of streams and super streams that a starting broker has not found yet."""


def may_repeat(error: BaseException) -> bool:
    """Whether the failed work may be retried unchanged, because time alone may cure it.

    False for unexpected errors (not Relatum's), bad input, data that cannot be read or written, conflicts, and errors
    that need a person (`may_be_mended`).
    """
    return isinstance(error, Transient)


def may_be_mended(error: BaseException) -> bool:
    """Whether an error concerns the setup of servers, not a message, so that a person has to fix it.

    Examples: a missing permission, schema or stream, or a full queue. Every next message would fail likewise. Work that
    runs forever may wait for the fix, with pauses up to `QUESTION_S` and a log line; a call raises the error.
    """
    # A broker's nack says nothing about the message: a queue is full, or a stream has no leader.
    mended = (AccessRefused, ConfigurationError, NotAStream, PublishNacked, PublishUnroutable, StreamNotFound)
    return isinstance(error, mended)


def backoff(longest_s: float = BACKOFF_S[1]) -> Iterator[float]:
    """Yield the pauses between retries, in seconds; `longest_s` is `QUESTION_S` for refused requests."""
    pause = BACKOFF_S[0]
    while True:
        yield pause * (0.5 + random.random() / 2)  # noqa: S311 - spreads tries, nothing secret
        pause = min(pause * 2, longest_s)


class Pauses:
    """The pauses of one loop of retries: short after transient errors, longer and longer after all others."""

    def __init__(self) -> None:
        self._passing = backoff()
        self._mended = backoff(QUESTION_S)

    def after(self, error: BaseException) -> float:
        """Return the seconds to wait after an error."""
        return next(self._passing if may_repeat(error) else self._mended)


def ended(error: BaseException) -> str:
    """Describe an error for the log by its class and message, without a traceback."""
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

    Work that is retried reports to `Outages` instead, which logs an outage once.

    - `what`: The work and its subject.
    - `level`: The level for Relatum's errors; INFO if no action is needed.
    - `extra`: Fields for logs that have some.
    """
    if isinstance(error, RelatumError):
        logger.log(level, "%s: %s", what, ended(error), extra=extra)
    else:
        logger.error("%s", what, exc_info=error, extra=extra)


class Server(StrEnum):
    """A server that may be unavailable as a whole."""

    BROKER = "RabbitMQ"
    DATABASE = "PostgreSQL"


class Outages:
    """What the parts of a component wait for, logged once for all of them. Thread-safe; never blocks.

    `broker` and `database` are names for the log, without passwords. After `stop`, the broker's failures say nothing.
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
        """What each part waits for: a server, or the class of its error if it concerns that part alone."""
        self._since: dict[Server | str, float] = {}
        """Since when each server is unavailable, and since when each part waits that waits for no server."""
        self._seen_back: set[Server] = set()
        """Servers with which a part has continued while others still wait for them."""
        self._broker_back_at = -STARTING_S
        self._answered: set[Server] = set()
        self._asked: dict[object, tuple[Server, float]] = {}

    def name(self, server: Server, name: str) -> None:
        """Set a server's name that was unknown at the start."""
        self._names[server] = f"{server.value} {name}".strip()

    # --- reports ----------------------------------------------------------------------------------------------------

    def failed(self, who: str, error: BaseException) -> None:
        """Note that a part cannot continue; log it if that is new, an unexpected error with its traceback.

        `who`: The part, as named in the log: "recording of stream 'orders'".
        """
        with self._lock:
            before = self._waiting.get(who)
            what = _cause(error, before)
            if what is Server.BROKER and self._stop.is_set():
                return  # a request was ended by the stop, which says nothing about the broker
            if what == before or (isinstance(error, _OF_STREAM) and before is None and self._is_starting()):
                return
            self._waiting[who] = what
            # The server it waited for before may be back: the other parts decide.
            back = self._back(before)
            is_new = what not in self._since
            if isinstance(what, Server):
                self._since.pop(who, None)
            self._since.setdefault(what if isinstance(what, Server) else who, time.monotonic())
        self._log_recovery(back)
        if not is_new:
            return
        if isinstance(what, Server):
            self._logger.warning("%s is unavailable; retrying: %s", self._names[what], ended(error))
        elif isinstance(error, RelatumError):
            self._logger.warning("%s is waiting and will retry: %s", who, ended(error))
        else:
            self._logger.error("%s hit an unexpected error and will retry", who, exc_info=error)

    def over(self, who: str) -> None:
        """Note that a part continues, or waits no more; log it if no part waits any more."""
        self._waits_no_more(who, goes_on=True)

    def forget(self, who: str) -> None:
        """Note that a part has ended, or waits for something else, without knowing whether a server is back.

        If it was the last part, the return is logged only if a part that waited for the same server has continued.
        """
        self._waits_no_more(who, goes_on=False)

    def _waits_no_more(self, who: str, *, goes_on: bool) -> None:
        if who not in self._waiting:
            return
        with self._lock:
            what, since = self._waiting.pop(who, None), self._since.pop(who, None)
            if isinstance(what, Server):
                if goes_on:
                    self._seen_back.add(what)
                elif what not in self._waiting.values() and what not in self._seen_back:
                    del self._since[what]
            back = self._back(what)
        if goes_on and since is not None:
            self._logger.info("%s is no longer waiting, after %.0f s", who, time.monotonic() - since)
        self._log_recovery(back)

    def _is_starting(self) -> bool:
        """Whether the broker has just returned, or not for all parts yet: its streams start after it."""
        return Server.BROKER in self._since or time.monotonic() < self._broker_back_at + STARTING_S

    def _back(self, what: "Server | str | None") -> tuple[Server, float] | None:
        """Return the server, and since when it was away, if no part waits for it any more. Call with the lock held."""
        if not isinstance(what, Server) or what in self._waiting.values() or what not in self._since:
            return None
        if what is Server.BROKER:
            self._broker_back_at = time.monotonic()
        self._answered.add(what)
        self._seen_back.discard(what)
        return what, self._since.pop(what)

    def _log_recovery(self, back: tuple[Server, float] | None) -> None:
        if back is not None:
            self._logger.info("%s is back, after %.0f s", self._names[back[0]], time.monotonic() - back[1])

    # --- health -----------------------------------------------------------------------------------------------------

    def answered(self, *servers: Server) -> None:
        """Note that servers have answered."""
        self._answered.update(servers)

    @contextmanager
    def asking(self, server: Server) -> Iterator[None]:
        """Note a request to a server while the block runs: a server that is silent for long counts as unavailable."""
        key = object()
        self._asked[key] = server, time.monotonic()
        try:
            yield
        finally:
            del self._asked[key]
        self._answered.add(server)

    def is_up(self, server: Server) -> bool | None:
        """Whether a server has answered its last request; None before the first one is over."""
        with self._lock:
            waits = server in self._waiting.values()
        silent_since = time.monotonic() - ANSWER_S
        is_silent = any(asked == server and at < silent_since for asked, at in list(self._asked.values()))
        if waits or is_silent:
            return False
        return True if server in self._answered else None


def _cause(error: BaseException, before: "Server | str | None") -> "Server | str":
    """Return what a part waits for now, given what it waited for before."""
    if isinstance(error, DatabaseUnavailable) and (error.reason != "pool" or before is Server.DATABASE):
        # An exhausted pool says nothing about the server.
        return Server.DATABASE
    if isinstance(error, StreamUnavailable):
        # A starting broker answers before its streams do.
        return Server.BROKER if before is Server.BROKER else type(error).__name__
    if isinstance(error, BrokerUnavailable | ReadTimeout):
        return Server.BROKER
    return type(error).__name__
