"""What an answer holds while it is read is bounded, whatever comes."""

from collections.abc import Iterable

import pytest

from relatum.errors import InvalidInput
from relatum.reading import Message
from relatum_consumer.lookups import answering
from relatum_consumer.lookups.answering import Gathered


def message(offset: int, size: int = 10, stream: str = "s") -> Message:
    return Message.from_record(stream, offset, b"\x00" * size)


def first_three(messages: Iterable[Message]) -> list[Message]:
    """The first three by offset."""
    return sorted(messages, key=lambda each: each.offset)[:3]


def test_with_a_limit_the_first_ones_are_kept_and_no_more() -> None:
    """Of a hundred thousand that are meant, in whatever order they come, those asked for are there; few are held."""
    gathered = Gathered(lambda each: each.offset % 2 == 0, "", first=first_three, limit=3)
    most = 0
    for number in range(100_000):
        gathered.consider(message(number * 7919 % 100_003))
        if number % 1000 == 0:
            most = max(most, len(gathered.messages))
    assert [each.offset for each in first_three(gathered.messages)] == [0, 2, 4]
    assert most < 100


def test_too_many_bytes_are_refused_while_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, large messages end the look-up before they fill the memory; small ones count their objects."""
    monkeypatch.setattr(answering, "ANSWER_BYTES_MAX", 10_000)
    for size, most in ((5_000, 2), (0, 20)):
        gathered = Gathered(lambda each: True, "ask for less")
        for number in range(most - 1):
            gathered.consider(message(number, size))
        with pytest.raises(InvalidInput, match="ask for less"):
            gathered.consider(message(most, size))


def test_the_same_message_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is read again takes no more room."""
    monkeypatch.setattr(answering, "ANSWER_MESSAGES_MAX", 2)
    gathered = Gathered(lambda each: True, "")
    for each in (message(1), message(2), message(1)):
        gathered.consider(each)
    assert len(gathered.messages) == 2
