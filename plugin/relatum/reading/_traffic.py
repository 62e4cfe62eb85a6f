"""What came over the stream protocol for who asks here: attaches, and the chunks they brought."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from relatum.wire import Traffic

_CURRENT: ContextVar[Traffic | None] = ContextVar("relatum_traffic", default=None)


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count what readers have for what is asked in the block, in this thread or task. Over AMQP 0.9.1 it stays 0."""
    traffic = Traffic()
    before = _CURRENT.set(traffic)
    try:
        yield traffic
    finally:
        _CURRENT.reset(before)


def note(traffic: Traffic) -> None:
    """Tell who counts here what came over a connection."""
    current = _CURRENT.get()
    if current is not None:
        current.add(traffic)
