"""What readers of both faces take: the limits of it, and its checks."""

from collections.abc import Iterable
from operator import index
from typing import Final

from relatum.checks import checked_count, checked_name, shown
from relatum.errors import InvalidInput, TlsRefused
from relatum.limits import INTEGER_MAX
from relatum.reading._cluster import NamelessCluster
from relatum.reading._scan import Scan
from relatum.reading._start import Start, beginning
from relatum.wire import AnotherProtocol, MechanismNotTaken

CREDIT: Final = 16
"""Chunks sent ahead unless the caller says otherwise: keeps the socket busy. They wait in its buffers, not in ours."""

NOT_BY_STREAMS: Final = (AnotherProtocol, TlsRefused, MechanismNotTaken, NamelessCluster)
"""Errors that are final where the stream port was given, and say of a guessed one that it is another's."""

CREDIT_MAX: Final = 0x7FFF
"""The most chunks the protocol can grant at once."""

IDLE_S: Final = 60.0
"""Seconds after which a reader that waits for ever looks up; nothing depends on it."""


def checked_ids(ids: Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    """Ids that can be gone through; each is looked at in its turn.

    Raises:
        InvalidInput: they cannot.
    """
    given: object = ids
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidInput(f"ids= takes pairs of a stream's name and an offset (MessageId), not {shown(ids)}")
    return ids


def checked_scan(stream: str, start: Start, stop: int | None, *, follow: bool, credit: int = CREDIT) -> Scan:
    """What a scan reads, all of it checked before anything is asked.

    Raises:
        InvalidInput: an argument cannot be.
    """
    checked_name("stream", stream)
    if stop is not None:
        try:
            is_offset = not isinstance(stop, bool) and 0 <= index(stop) <= INTEGER_MAX + 1
        except TypeError:
            is_offset = False
        if not is_offset:
            raise InvalidInput(f"stop= takes an offset, or None, not {shown(stop)}")
    return Scan(beginning(start), stop, follow, checked_count("credit", credit, most=CREDIT_MAX))
