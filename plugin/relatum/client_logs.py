"""Keeps what clients log of connections that are Relatum's own out of an application's log.

pika and aiormq log each attempt to connect that fails as an error, in a dozen lines, and each channel that a broker
closes as a warning. Whoever tries again for ever would fill the log with them. What it comes to is raised by Relatum as
an error of its own, and said once by whoever waits. Of an application's own connections nothing is left out.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

CLIENTS: Final = ("pika", "aiormq", "aio_pika")
"""The loggers that are looked through, with all below them."""

_is_own: Final[ContextVar[bool]] = ContextVar("relatum_own_connection", default=False)
"""Whether what runs is about a connection of Relatum's own. Tasks that a client starts there inherit it."""

_looked_at = 0
"""How many loggers there were when the filter was put on the last time."""


@contextmanager
def own_connection() -> Iterator[None]:
    """Leave out what clients log while the block runs, here and in tasks that are started here; also a decorator.

    Who listens to a client at level DEBUG is shown it, at that level.
    """
    _put_filter()
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)


def _put_filter() -> None:
    """Put the filter on each logger there is: one on a logger does not see what those below it log."""
    global _looked_at
    loggers = logging.root.manager.loggerDict
    if len(loggers) == _looked_at:
        return
    _looked_at = len(loggers)
    for name, logger in list(loggers.items()):
        if name.partition(".")[0] in CLIENTS and isinstance(logger, logging.Logger):
            logger.addFilter(_show)


def _show(record: logging.LogRecord) -> bool:
    """Whether a record is to be seen; as one of level DEBUG where it is of a connection of Relatum's own."""
    if not _is_own.get():
        return True
    if not logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        return False
    record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return True
