"""Whether a stream is the one that was read: what each answer to reading an offset amounts to."""

import pytest

from relatum.errors import OffsetExpired, OffsetNotFound, StreamUnavailable
from relatum.ids import fingerprint
from relatum.reading import Agreement, Message, Position, agreement_of

BODY = b"\x00\x53\x75\xa0\x05hello"
POSITION = Position(7, fingerprint(None, b"hello"), 1_000)


def at_7(body: bytes = BODY, chunk_ms: int | None = 1_000) -> Message:
    return Message.from_record("s", 7, body, chunk_ms)


def ends(last: int | None, *, is_proven: bool) -> OffsetNotFound:
    return OffsetNotFound("", stream="s", offset=7, last=last, is_proven=is_proven)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        # The message itself, by its content and, where both are known, by its chunk's time.
        (at_7(), Agreement.SAME),
        (at_7(chunk_ms=None), Agreement.SAME),
        (at_7(chunk_ms=2_000), Agreement.OTHER),
        (at_7(BODY + b"x"), Agreement.OTHER),
        # Only the leader's word makes a stream that ends before the offset one that lost it.
        (ends(6, is_proven=True), Agreement.ENDS_BEFORE),
        (ends(None, is_proven=True), Agreement.ENDS_BEFORE),
        (ends(9, is_proven=True), Agreement.OTHER),
        *((ends(last, is_proven=False), Agreement.UNKNOWN) for last in (None, 6, 9)),
        (StreamUnavailable("", stream="s"), Agreement.UNKNOWN),
        # What retention took speaks neither for nor against the stream.
        (OffsetExpired("", stream="s", offset=7, first=8, last=9, is_proven=True), Agreement.EXPIRED),
    ],
)
def test_what_an_answer_amounts_to(read: Message | OffsetNotFound, expected: Agreement) -> None:
    """A node that lags, or that cannot be asked, is no reason to conclude anything."""
    assert agreement_of(POSITION, read) is expected
