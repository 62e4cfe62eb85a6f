"""Messages out of any bytes: decoded, or a body and nothing else; and whether a stream is the one that was read."""

import struct
import time
import tracemalloc
from copy import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.common.ids import fingerprint
from relatum.errors import OffsetExpired, OffsetNotFound, StreamUnavailable
from relatum.reading import Agreement, Message, Position, TimeSource, agreement_of, position_of, type_and_id_of
from relatum.wire import amqp10
from relatum.wire.amqp10 import Opaque

SAMPLE = (
    b"\x00\x53\x70\xc0\x07\x05\x41\x50\x03\x40\x41\x43"
    b"\x00\x53\x72\xc1\x11\x02\xa3\x0bx-exchange!\xa1\x01e"
    b"\x00\x53\x73\xc0\x16\x0a\xa1\x02id\x40\x40\x40\x40\x40\x40\x40\x40\x83\0\0\0\0\0\0\0\x01"
    b"\x00\x53\x74\xc1\x0c\x04\xa1\x01a\xa1\x01b\xa1\x01n\x54\x07"
    b"\x00\x53\x75\xa0\x05hello"
)


def touch(message: Message) -> None:
    """Decode every part; what can be had without decoding the rest is the same."""
    position = position_of(message)
    assert (message.time_us, message.time_source) == _time_of_decoded(copy(message))
    body, kind_and_id = message.body, type_and_id_of(message)
    assert isinstance(body, bytes)
    assert isinstance(dict(message.headers), dict)
    assert (message.properties.type, message.properties.message_id) == kind_and_id
    assert message.body == body
    assert position == Position(message.offset, fingerprint(message.properties.message_id, body), message.chunk_ms)
    assert (message.time is None) == (message.time_us is None)


def _time_of_decoded(message: Message) -> tuple[int | None, TimeSource]:
    assert message.headers is not None
    return message.time_us, message.time_source


@given(st.binary(max_size=200))
def test_random_bytes(raw: bytes) -> None:
    """Any bytes are a message; what is not AMQP 1.0 is all body."""
    for start in (b"", b"\x00\x53\x74\xc1", b"\x00\x53\x73\xc0", b"\x00\x53\x72\xd1", b"\x00\x53\x77"):
        message = Message.from_record("s", 0, start + raw, 5)
        touch(message)
        if not message.is_amqp:
            assert message.body == start + raw


STAMPED = SAMPLE.replace(
    b"\xc1\x0c\x04\xa1\x01a\xa1\x01b\xa1\x01n", b"\xc1\x17\x04\xa1\x01a\xa1\x01b\xa1\x0crelatum_time"
)
TYPED = SAMPLE.replace(b"\xc1\x11\x02\xa3\x0bx-exchange!\xa1\x01e", b"\xc1\x16\x02\xa3\x0cx-basic-type\xa1\x05order")


def test_the_type_and_the_id_without_the_rest() -> None:
    """They are where the broker puts them, and the annotation goes first."""
    assert type_and_id_of(Message.from_record("s", 0, SAMPLE)) == (None, "id")
    assert type_and_id_of(Message.from_record("s", 0, TYPED)) == ("order", "id")


@given(st.data(), st.sampled_from([SAMPLE, STAMPED, TYPED]))
def test_mutated_messages(data: st.DataObject, sample: bytes) -> None:
    """A message with changed, missing or added bytes is a message too."""
    raw = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(raw) - 1))
        change = data.draw(st.sampled_from(["set", "cut", "add"]))
        if change == "set":
            raw[place] = data.draw(st.integers(0, 255))
        elif change == "cut" and place:
            del raw[place:]
        else:
            raw[place:place] = data.draw(st.binary(min_size=1, max_size=4))
    touch(Message.from_record("s", 0, bytes(raw), 5))


def test_nesting_is_bounded() -> None:
    """A header 20,000 levels deep neither crashes nor hides the others."""
    nested = b"\x40"
    for _ in range(20_000):
        nested = b"\xd0" + (4 + len(nested)).to_bytes(4, "big") + b"\0\0\0\x01" + nested
    entries = b"\xa1\x04deep" + nested + b"\xa1\x01a\xa1\x01b"
    raw = b"\x00\x53\x74\xd1" + (4 + len(entries)).to_bytes(4, "big") + b"\0\0\0\x04" + entries
    message = Message.from_record("s", 0, raw)
    assert (message.is_amqp, message.headers["a"]) == (True, "b")


def test_nested_lists_are_decoded_once() -> None:
    """60 nested lists around 8 MB are decoded at once: no level looks at the content again."""
    nested = b"\xb0" + (8_000_000).to_bytes(4, "big") + bytes(8_000_000)
    for _ in range(60):
        nested = compound(0xD0, nested + b"\x40", 2)
    began = time.process_time()
    assert isinstance(amqp10.decode_value(nested, 0)[0], list)
    assert time.process_time() - began < 1.0


def compound(kind: int, content: bytes, items: int) -> bytes:
    return bytes([kind]) + struct.pack(">II", len(content) + 4, items) + content


LISTS = compound(0xD0, b"\x45" * 1_000_000, 1_000_000)
"""A list of a million empty lists: a byte each, and an object of 64 once it is decoded."""

NESTED_LISTS = compound(0xD0, compound(0xD0, b"\x45" * 60_000, 60_000) * 16, 16)

NAMES = b"".join(b"\xa1\x04" + struct.pack(">I", 0x30303030 + number) + b"\x40" for number in range(250_000))

BOMBS = {
    "a header that is a list": b"\x00\x53\x74" + compound(0xD1, b"\xa1\x01n" + LISTS, 2) + b"\x00\x53\x75\xa0\x01b",
    "a header of lists of lists": b"\x00\x53\x74" + compound(0xD1, b"\xa1\x01n" + NESTED_LISTS, 2),
    "annotations": b"\x00\x53\x72" + compound(0xD1, b"\xa3\x03x-n" + LISTS, 2) + b"\x00\x53\x75\xa0\x01b",
    "headers without number": b"\x00\x53\x74" + compound(0xD1, NAMES, 500_000) + b"\x00\x53\x75\xa0\x01b",
    "properties without number": b"\x00\x53\x73" + LISTS + b"\x00\x53\x75\xa0\x01b",
    "a body that is a list": b"\x00\x53\x77" + LISTS,
    "sections without number": b"\x00\x53\x75\xa0\x00" * 200_000,
}


@pytest.mark.parametrize("raw", BOMBS.values(), ids=BOMBS)
def test_a_message_of_many_small_values_takes_little_more_than_its_bytes(raw: bytes) -> None:
    """What a stranger's message decodes to is bounded, whatever it nests; one of a million values takes no 64 MB."""
    message = Message.from_record("s", 0, raw)
    tracemalloc.start()
    try:
        touch(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(raw) + (16 << 20), f"{peak:,} bytes of {len(raw):,}"


def test_beside_values_without_number_the_others_still_serve() -> None:
    """One header with too many values in it hides neither the others nor the body."""
    headers = compound(0xD1, b"\xa1\x01a\xa1\x01b" + b"\xa1\x01n" + LISTS + b"\xa1\x01c\x54\x07", 6)
    message = Message.from_record("s", 0, b"\x00\x53\x74" + headers + b"\x00\x53\x75\xa0\x04body")
    assert (message.headers["a"], message.headers["c"], message.body) == ("b", 7, b"body")
    assert isinstance(message.headers["n"], Opaque)


BODY = b"\x00\x53\x75\xa0\x05hello"
POSITION = Position(7, fingerprint(None, b"hello"), 1_000)


def at_7(body: bytes = BODY, chunk_ms: int | None = 1_000) -> Message:
    return Message.from_record("s", 7, body, chunk_ms)


def ends(last: int | None, *, is_proven: bool) -> OffsetNotFound:
    return OffsetNotFound("", stream="s", offset=7, last=last, is_proven=is_proven)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        # The message itself, by its content and, if both are known, by its chunk's time.
        (at_7(), Agreement.SAME),
        (at_7(chunk_ms=None), Agreement.SAME),
        (at_7(chunk_ms=2_000), Agreement.OTHER),
        (at_7(BODY + b"x"), Agreement.OTHER),
        # Only the leader's answer makes a stream that ends before the offset one that lost it.
        *((ends(last, is_proven=True), Agreement.OTHER) for last in (None, 6, 9)),
        *((ends(last, is_proven=False), Agreement.UNKNOWN) for last in (None, 6, 9)),
        (StreamUnavailable("", stream="s"), Agreement.UNKNOWN),
        # Dropped messages prove nothing for or against the stream.
        (OffsetExpired("", stream="s", offset=7, first=8, last=9, is_proven=True), Agreement.EXPIRED),
    ],
)
def test_what_an_answer_amounts_to(read: Message | OffsetNotFound, expected: Agreement) -> None:
    """A node that lags, or that cannot be asked, is not a reason to conclude anything."""
    assert agreement_of(POSITION, read) is expected
