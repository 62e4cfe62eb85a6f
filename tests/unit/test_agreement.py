"""Whether a stream is the one that was read: what each answer to reading an offset amounts to."""

from relatum.errors import OffsetExpired, OffsetNotFound, StreamUnavailable
from relatum.reading import Agreement, Message, Position, agreement_of
from relatum.wire._identity import fingerprint

BODY = b"\x00\x53\x75\xa0\x05hello"
POSITION = Position(7, fingerprint(None, b"hello"), 1_000)


def at(offset: int, body: bytes = BODY, chunk_ms: int | None = 1_000) -> Message:
    """A message as it lies in a stream."""
    return Message.from_record("s", offset, body, chunk_ms)


def not_found(last: int | None, *, is_proven: bool) -> OffsetNotFound:
    """The error of a reader for an offset without a message."""
    return OffsetNotFound("", stream="s", offset=7, last=last, is_proven=is_proven)


def test_the_message_itself() -> None:
    """What lies there is compared by its content and, where both are known, by its chunk's time."""
    assert agreement_of(POSITION, at(7)) is Agreement.SAME
    assert agreement_of(POSITION, at(7, chunk_ms=None)) is Agreement.SAME
    assert agreement_of(POSITION, at(7, chunk_ms=2_000)) is Agreement.OTHER
    assert agreement_of(POSITION, at(7, BODY + b"x")) is Agreement.OTHER


def test_an_end_that_is_proven() -> None:
    """Only the leader's word makes a stream that ends before the offset one that lost it."""
    assert agreement_of(POSITION, not_found(6, is_proven=True)) is Agreement.ENDS_BEFORE
    assert agreement_of(POSITION, not_found(None, is_proven=True)) is Agreement.ENDS_BEFORE
    assert agreement_of(POSITION, not_found(9, is_proven=True)) is Agreement.OTHER


def test_what_proves_nothing() -> None:
    """A node that lags, or that cannot be asked, is no reason to conclude anything."""
    for last in (None, 6, 9):
        assert agreement_of(POSITION, not_found(last, is_proven=False)) is Agreement.UNKNOWN
    assert agreement_of(POSITION, StreamUnavailable("", stream="s")) is Agreement.UNKNOWN


def test_what_retention_took() -> None:
    """An offset that expired speaks neither for nor against the stream."""
    expired = OffsetExpired("", stream="s", offset=7, first=8, last=9, is_proven=True)
    assert agreement_of(POSITION, expired) is Agreement.EXPIRED
