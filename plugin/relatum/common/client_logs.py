"""Keeps pika's and aiormq's records about Relatum's own connections out of the application's log.

The clients log each failed attempt to connect as an error of a dozen lines, and each channel that the broker closes as
a warning, so a component that retries would fill the log. Relatum raises its own errors and logs an outage once.
Records about the application's connections are not filtered.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

CLIENTS: Final = ("pika", "aiormq", "aio_pika")
"""The filtered loggers; their children are filtered, too."""

_is_own: Final[ContextVar[bool]] = ContextVar("relatum_own_connection", default=False)
"""Whether this thread or task uses one of Relatum's own connections. Tasks that a client starts inherit the value."""


@contextmanager
def own_connection() -> Iterator[None]:
    """Suppress the clients' log records in a block or a decorated function, and in tasks started there.

    If a client's logger is enabled for DEBUG, it logs these records at level DEBUG instead.
    """
    # On each existing logger, because a logger's filter does not see records of its children.
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] in CLIENTS and isinstance(logger, logging.Logger):
            logger.addFilter(_is_logged)
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)


def _is_logged(record: logging.LogRecord) -> bool:
    """Return whether to log a record. Records about Relatum's own connections get level DEBUG."""
    if not _is_own.get():
        return True
    if not logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        return False
    record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
    return True
