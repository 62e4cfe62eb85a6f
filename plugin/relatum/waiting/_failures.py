"""What is done about failures: which may be repeated and when, and what is logged of them.

Work that goes on for ever asks `may_repeat` whether time alone may cure a failure and, where it can wait for an
operator, `may_be_mended`. All other errors are final for the message they are about: it is named, counted and passed
on. docs/retries.md lists every loop that repeats something.

Whatever repeats something that failed reports it to its component's `Outages`, and its success as well. A server that
is away is one warning then, however many wait for it and however often they try, and one line of level INFO when the
last of them goes on. The same holds for all else that somebody waits for: a stream that is not there, a permission.
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
"""Least and most seconds before a server that is away is tried again: doubled each time, half of it by chance."""

QUESTION_S: Final = 60.0
"""Most seconds before a question is asked again that was refused: half of it by chance, so 30 at least in the end.

It also is the longest pause before something is tried again that waits for an operator's mend.
"""

ANSWER_S: Final = 10.0
"""Seconds after which a server that was asked and says nothing counts as away."""

STARTING_S: Final = 30.0
"""Seconds after a broker is back within which a stream that is not there yet is no news."""


_OF_STREAM: Final = (StreamUnavailable, StreamNotFound)
"""What is said of streams, and of super streams, that a broker which starts has not found yet."""


def may_repeat(error: BaseException) -> bool:
    """Whether what raised an error may be done again as it is: time alone may cure it.

    Not so: defects (what is no error of Relatum's), bad input, data that cannot be read or written, conflicts, and
    what only a person mends (`may_be_mended`).
    """
    return isinstance(error, Transient)


def may_be_mended(error: BaseException) -> bool:
    """Whether an error is about no message, but about how servers are set up: a person mends it, or nobody does.

    A user without a permission, a schema or a stream that is not there, a queue that takes nothing more: each next
    message would fail of the same. What runs for ever may wait for it, with pauses up to `QUESTION_S` and a line in the
    log; what somebody waits for raises it.
    """
    # A broker's nack says nothing about the message: a queue is full, or a stream has no leader.
    mended = (AccessRefused, ConfigurationError, NotAStream, PublishNacked, PublishUnroutable, StreamNotFound)
    return isinstance(error, mended)


def backoff(longest_s: float = BACKOFF_S[1]) -> Iterator[float]:
    """The pauses between tries, in seconds.

    Args:
        longest_s: The longest pause; `QUESTION_S` for questions that were refused, by default that for servers away.
    """
    pause = BACKOFF_S[0]
    while True:
        yield pause * (0.5 + random.random() / 2)  # noqa: S311 - spreads tries, nothing secret
        pause = min(pause * 2, longest_s)


class Pauses:
    """The pauses of one loop that repeats: short after what passes by itself, longer and longer after all else."""

    def __init__(self) -> None:
        self._passing = backoff()
        self._mended = backoff(QUESTION_S)

    def after(self, error: BaseException) -> float:
        """Seconds to wait after an error."""
        return next(self._passing if may_repeat(error) else self._mended)


def ended(error: BaseException) -> str:
    """What to log of an error that ends some work: its class and message, without a traceback."""
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
    """Log what ended some work: what Relatum raises in a line, a defect with its traceback.

    What is repeated is told to `Outages` instead, which says it once.

    - `what`: What that was, with the name of what it was about.
    - `level`: Of what Relatum raises; INFO where nobody need do anything.
    - `extra`: Fields for logs that have some.
    """
    if isinstance(error, RelatumError):
        logger.log(level, "%s: %s", what, ended(error), extra=extra)
    else:
        logger.error("%s", what, exc_info=error, extra=extra)


class Server(StrEnum):
    """A server that may be away as a whole."""

    BROKER = "RabbitMQ"
    DATABASE = "PostgreSQL"


class Outages:
    """What the parts of a component wait for, logged once for all of them; the first that goes on wakes the others.

    No method but `wait` blocks: tasks may use it as well as threads.

    Args:
        broker: The broker's name in the log, without a password.
        database: The database's name in the log, without a password.
        stop: Ends all waits; whoever sets it calls `wake` too.
    """

    def __init__(
        self, logger: logging.Logger, *, broker: str = "", database: str = "", stop: threading.Event | None = None
    ) -> None:
        self._logger = logger
        self._names: dict[Server, str] = {}
        self.name(Server.BROKER, broker)
        self.name(Server.DATABASE, database)
        self._stop = stop or threading.Event()
        self._changed = threading.Condition()
        self._waiting: dict[str, Server | str] = {}
        """What each who cannot go on waits for: a server, or the class of its error where that is its own affair."""
        self._since: dict[Server, float] = {}
        self._since_own: dict[str, float] = {}
        self._seen_back: set[Server] = set()
        """Servers that somebody has gone on with while others still wait for them."""
        self._broker_back_at = -STARTING_S
        self._answered: set[Server] = set()
        self._asked: dict[object, tuple[Server, float]] = {}
        self._recoveries = 0

    def name(self, server: Server, name: str) -> None:
        """Name a server that was not known at the start."""
        self._names[server] = f"{server.value} {name}".strip()

    # --- told -------------------------------------------------------------------------------------------------------

    def failed(self, who: str, error: BaseException) -> bool:
        """Note that somebody cannot go on; a line in the log where that is news.

        Args:
            who: What does not go on, as it is to be named in the log: "recording of stream 'orders'".
            error: Why. What is no error of Relatum's is a defect, and logged with its traceback, once.

        Returns:
            Whether it did not wait before.
        """
        with self._changed:
            before = self._waiting.get(who)
            what = _cause(error, before)
            if what is Server.BROKER and self._stop.is_set():
                return False  # what was under way was ended, which says nothing of the broker
            if what == before or (isinstance(error, _OF_STREAM) and before is None and self._is_starting()):
                return False
            self._waiting[who] = what
            # What it waited for before may be there: the others say so.
            back = self._back(before)
            if isinstance(what, Server):
                self._since_own.pop(who, None)
                is_new = what not in self._since
                self._since.setdefault(what, time.monotonic())
            else:
                is_new = True
                self._since_own.setdefault(who, time.monotonic())
        self._say_back(back)
        if not is_new:
            return before is None
        if isinstance(what, Server):
            self._logger.warning("%s is away, and is waited for: %s", self._names[what], ended(error))
        elif isinstance(error, RelatumError):
            self._logger.warning("%s waits, and is tried again: %s", who, ended(error))
        else:
            self._logger.error("%s waits, by a defect, and is tried again", who, exc_info=error)
        return before is None

    def over(self, who: str) -> None:
        """Note that somebody goes on, or waits no more; a line in the log where nobody waits any more."""
        if who not in self._waiting:
            return
        with self._changed:
            what = self._waiting.get(who)
            if what is None:
                return
            del self._waiting[who]
            since = self._since_own.pop(who, None)
            if isinstance(what, Server):
                self._seen_back.add(what)
            back = self._back(what)
            self._recoveries += 1
            self._changed.notify_all()
        if since is not None:
            self._logger.info("%s waits no more, after %.0f s", who, time.monotonic() - since)
        self._say_back(back)

    def forget(self, who: str) -> None:
        """Note that somebody has ended, or waits for something else: it does not know whether anything is back.

        Where it was the last, that is said only if somebody who waited for the same has gone on.
        """
        if who not in self._waiting:
            return
        with self._changed:
            what = self._waiting.pop(who, None)
            self._since_own.pop(who, None)
            if isinstance(what, Server) and what not in self._waiting.values() and what not in self._seen_back:
                self._since.pop(what, None)
            back = self._back(what)
        self._say_back(back)

    def _is_starting(self) -> bool:
        """Whether the broker is back only just, or not yet for all who wait: its streams start behind it."""
        return Server.BROKER in self._since or time.monotonic() < self._broker_back_at + STARTING_S

    def _back(self, what: "Server | str | None") -> tuple[Server, float] | None:
        """The server, and since when it was away, if nobody waits for it any more; the lock is held."""
        if not isinstance(what, Server) or what in self._waiting.values() or what not in self._since:
            return None
        if what is Server.BROKER:
            self._broker_back_at = time.monotonic()
        self._answered.add(what)
        self._seen_back.discard(what)
        return what, self._since.pop(what)

    def _say_back(self, back: tuple[Server, float] | None) -> None:
        if back is not None:
            self._logger.info("%s is back, after %.0f s", self._names[back[0]], time.monotonic() - back[1])

    # --- asked ------------------------------------------------------------------------------------------------------

    def answered(self, *servers: Server) -> None:
        """Note that servers have answered somebody."""
        self._answered.update(servers)

    @contextmanager
    def asking(self, server: Server) -> Iterator[None]:
        """Note, while the block runs, that a server is asked: one that says nothing is away, too, after a while."""
        key = object()
        self._asked[key] = server, time.monotonic()
        try:
            yield
        finally:
            del self._asked[key]
        self._answered.add(server)

    def is_up(self, server: Server) -> bool:
        """Whether a server has answered whoever asked it last; False before anybody has asked it."""
        with self._changed:
            waits = server in self._waiting.values()
        silent_since = time.monotonic() - ANSWER_S
        is_silent = any(asked == server and at < silent_since for asked, at in list(self._asked.values()))
        return server in self._answered and not waits and not is_silent

    # --- waiting ----------------------------------------------------------------------------------------------------

    def wait(self, pause_s: float) -> None:
        """Wait before the next try: so long, or until somebody else finds that something is back, or the stop."""
        until = time.monotonic() + pause_s
        with self._changed:
            seen = self._recoveries
            while not self._stop.is_set() and self._recoveries == seen:
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def wake(self) -> None:
        """Let all look whether they should stop."""
        with self._changed:
            self._changed.notify_all()


def _cause(error: BaseException, before: "Server | str | None") -> "Server | str":
    """What somebody waits for now, who waited for something before."""
    if isinstance(error, DatabaseUnavailable) and (error.reason != "pool" or before is Server.DATABASE):
        # A pool that others use up says nothing of the server.
        return Server.DATABASE
    if isinstance(error, StreamUnavailable):
        # A broker that starts answers before its streams do.
        return Server.BROKER if before is Server.BROKER else type(error).__name__
    if isinstance(error, BrokerUnavailable | ReadTimeout):
        return Server.BROKER
    return type(error).__name__
