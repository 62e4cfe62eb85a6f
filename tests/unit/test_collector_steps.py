"""What becomes of a bulk, messages on their way into the store, and wrong arguments: no I/O."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pika import BasicProperties

from relatum import MessageId
from relatum.collecting import (
    AsyncMessageCollector,
    Bulk,
    Collected,
    ExecutorOptions,
    Failure,
    FlushReason,
    MessageCollector,
)
from relatum.collecting._bulk import describe, results_of, type_of_property
from relatum.collecting._collector_core import Core, Lot
from relatum.errors import InvalidInput
from relatum.reading import Message, Properties

DATABASE = "postgresql://nobody@127.0.0.1:1/nothing"


def read(offset: int, message_id: str | None = None, type_: str | None = "a") -> Message:
    """A message as AMQP 0.9.1 shows it."""
    properties = Properties(message_id=message_id or f"m{offset}", type=type_)
    return Message("orders", offset, None, None, lambda: ({}, properties, b"body", True))


def bulk_of(*offsets: int) -> Bulk:
    messages = (Collected(MessageId("orders", n), f"m{n}", "a", 10, read(n)) for n in offsets)
    return Bulk(7, "a", tuple(messages), FlushReason.AGE)


class Inscrutable(Exception):
    """An exception whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError


def note_and_raise(bulk: Bulk) -> None:
    bulk.succeeded(bulk.messages[0])
    bulk.failed(bulk.messages[1], OSError("disk"), retry=False)
    raise RuntimeError("stop")


def by(key: Callable[[Collected], Any]) -> Callable[[Bulk], Any]:
    """An executor that names the first and the last of three messages in a mapping."""
    return lambda bulk: {key(bulk.messages[0]): None, key(bulk.messages[2]): KeyError("k")}


LEFT_OUT = "the executor returned no result for this message"


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        (None, [None, None, None]),
        (lambda bulk: bulk.failed(bulk.messages[1], "not this one"), [None, "not this one", None]),
        ([None, ValueError("bad"), Failure("worse", retry=False)], [None, "ValueError: bad", "worse"]),
        (by(lambda message: message), [None, LEFT_OUT, "KeyError: 'k'"]),
        (by(lambda message: message.place), [None, LEFT_OUT, "KeyError: 'k'"]),
        (by(lambda message: message.message_id), [None, LEFT_OUT, "KeyError: 'k'"]),
        (note_and_raise, [None, "OSError: disk", "RuntimeError: stop"]),
        ([None], ["the executor returned 1 results for 3 messages"] * 3),
        (True, ["the executor returned bool"] * 3),
        ("ok", ["the executor returned str"] * 3),
        ([None, True, Inscrutable()], [None, "the executor's result is bool", "Inscrutable"]),
    ],
)
def test_each_message_has_a_result_by_what_the_executor_answers(answer: Any, reasons: list[str | None]) -> None:
    """None is success; what has no result, or one that makes no sense, failed; what was noted before an error stays."""
    bulk, raised = bulk_of(0, 1, 2), None
    if callable(answer):
        try:
            answer = answer(bulk)
        except RuntimeError as error:
            answer, raised = None, error
    found = [each and each.stored_reason for each in results_of(bulk, answer, raised).values()]
    assert [each is None for each in found] == [expected is None for expected in reasons]
    assert all((each or "").startswith(expected or "") for each, expected in zip(found, reasons, strict=True)), found


def test_reasons_are_cut_to_what_can_be_stored() -> None:
    """A reason of any length and with any characters can be stored."""
    failure = Failure("a\0b" + "x" * 2000 + "\ud800")
    assert failure.stored_reason == "ab" + "x" * 998
    assert Failure("\ud800").stored_reason == "?"


def test_a_message_is_described_by_its_id_or_place_and_its_bytes() -> None:
    """A message without an id that can be stored has its place as id; a description keeps the stream's bytes alone."""
    nameless = Message("orders", 4, None, None, lambda: ({}, Properties(), b"", True))
    given = (read(3), nameless, read(5, "a\0b"), read(6, "\udcff"), read(7, "x" * 2000 + "\udcff"))
    asked_by = [describe(each, type_of_property).message_id for each in given]
    assert asked_by == ["m3", "orders:4", "orders:5", "orders:6", "orders:7"]
    record = Message.from_record("orders", 1, b"no AMQP at all")
    described = describe(record, type_of_property)
    assert (described.type, described.bytes, described.message_id) == ("", 14, "orders:1")
    assert described.message is not record
    assert described.message == record


def core_of(**options: Any) -> Core:
    core = Core()
    core.register("a", ExecutorOptions(**options))
    return core


def described(*offsets: int, type_: str = "a") -> list[Collected]:
    return [describe(read(offset, type_=type_), type_of_property) for offset in offsets]


def test_the_position_moves_over_what_is_taken_or_passed_over() -> None:
    """The position moves in one step over taken and skipped messages, whatever gaps the stream has."""
    core, lot = core_of(), Lot()
    assert lot.take(core, [*described(10, 11, 14), *described(15, type_="z")], 10) == 4
    advance = lot.advance
    assert advance is not None
    assert [entry.place.offset for entry in lot.messages] == [10, 11, 14]
    assert (advance.from_offset, advance.to_offset, advance.passed_over) == (10, 16, 1)
    assert advance.known_by is not None
    assert advance.known_by.offset == 15


def test_a_message_that_collect_is_storing_stops_its_stream_until_it_is_stored() -> None:
    """The position does not move over a message before it is stored, since its storing may fail."""
    core, [given], lot = core_of(), described(10), Lot()
    core.admit(given)
    assert lot.take(core, described(10, 11), 10) == 0
    assert lot.advance is None
    core.cancel([given])
    assert lot.take(core, described(10), 10) == 1
    core.add(lot.messages, 0.0)
    assert Lot().take(core, described(10, 11), 10) == 2


def test_a_full_type_stops_its_stream_where_it_is() -> None:
    """The position moves up to the message that has to wait, not over it."""
    core, first = core_of(bulk_messages=1, queue_bulks=1), Lot()
    assert first.take(core, described(10), 10) == 1
    core.add(first.messages, 0.0)
    lot = Lot()
    assert lot.take(core, [*described(11, type_="z"), *described(12, 13)], 11) == 1
    assert lot.advance is not None
    assert (lot.messages, lot.advance.to_offset) == ([], 12)
    assert core.take("a") is not None
    assert Lot().take(core, described(12), 12) == 1


@pytest.mark.parametrize("kind", [MessageCollector, AsyncMessageCollector])
def test_python_s_own_errors_name_what_was_called(kind: Callable[..., Any]) -> None:
    """A misspelt or missing argument is Python's TypeError; what both faces share is nobody's to know."""
    for call in (
        kind,
        lambda: kind("billing", databse="postgresql:///"),
        lambda: kind("billing"),
        lambda: kind("billing", database=DATABASE).register_executor("order"),
        lambda: kind("billing", database=DATABASE).register_executor("order", print, ExecutorOptions(bulk_message=5)),
        lambda: kind("billing", database=DATABASE).register_result_handler(print, typ="order"),
    ):
        with pytest.raises(TypeError, match=r"^(Collector|ExecutorOptions|(Async)?MessageCollector)\.") as caught:
            call()
        assert "Base" not in str(caught.value)


def test_a_collector_can_be_derived_from() -> None:
    """A class of the user's keeps the methods it has of its own."""

    class Mine(MessageCollector):
        def __init__(self) -> None:
            super().__init__("mine", database=DATABASE)

    assert Mine().name == "mine"


def test_results_are_noted_of_this_bulk_s_messages_alone() -> None:
    """Only a message of this bulk, and a reason, exception or Failure, is accepted; a refusal keeps the results."""
    bulk, other = bulk_of(1, 2), bulk_of(3)
    bulk.failed(bulk.messages[0], Failure("no such order"))
    place = MessageId("orders", 1)
    for wrong in (None, "m1", place, SimpleNamespace(place=place), other.messages[0]):
        for note in (bulk.succeeded, lambda message: bulk.failed(message, "x")):
            with pytest.raises(InvalidInput, match="m3" if wrong is other.messages[0] else r"bulk\.messages"):
                note(wrong)
    for error in (None, 5, ValueError):
        with pytest.raises(InvalidInput, match="error= takes"):
            bulk.failed(bulk.messages[1], error)  # type: ignore[arg-type]
    assert list(bulk.results.values()) == [Failure("no such order")]


class _Coroutine:
    async def __call__(self, argument: object) -> None:
        """Nobody awaits this."""


def test_coroutine_functions_are_for_asyncio() -> None:
    """The collector with threads refuses coroutine functions, which it could not await."""
    collector: Any = MessageCollector("billing", database=DATABASE)
    for function in (_Coroutine(), _Coroutine().__call__):
        with pytest.raises(InvalidInput, match="AsyncMessageCollector"):
            collector.register_executor("order", function)
        with pytest.raises(InvalidInput, match="AsyncMessageCollector"):
            collector.register_result_handler(function)
    AsyncMessageCollector("billing", database=DATABASE).register_executor("order", _Coroutine())


def test_an_executor_is_tested_without_a_server() -> None:
    """A bulk of messages that were made, and of them alone, is what an executor gets; it returns the noted results."""
    properties = [BasicProperties(type="order", message_id=f"m{n}") for n in (1, 2)]
    made = [Message.from_amqp("orders", n, each, b"%d" % n) for n, each in enumerate(properties, 1)]

    def executor(bulk: Bulk) -> None:
        assert bulk.connection is None
        for each in bulk.messages:
            assert (each.attempts, each.type, each.message_id) == (1, "order", f"m{each.message.offset}")
            bulk.succeeded(each) if each.message.body == b"1" else bulk.failed(each, "no such order", retry=False)

    bulk = Bulk.of("order", made)
    executor(bulk)
    assert list(bulk.results.values()) == [None, Failure("no such order", retry=False)]
    assert (len(bulk), bulk.type, bulk.bytes) == (2, "order", 2)
    with pytest.raises(InvalidInput, match="bytes"):
        Bulk.of("order", [b"body"])  # type: ignore[list-item]
