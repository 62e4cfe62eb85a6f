"""Wrong arguments of a collector, its bulks and its outcomes: one clear error that names the argument, and no more."""

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
from relatum.errors import InvalidInput
from relatum.reading import Message, Properties

BROKER = "amqp://guest@127.0.0.1:1/"
DATABASE = "postgresql://nobody@127.0.0.1:1/nothing"


def read(offset: int) -> Message:
    """A message of a stream."""
    return Message("orders", offset, None, None, lambda: ({}, Properties(message_id=f"m{offset}"), b"body", True))


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


def bulk_of(*offsets: int) -> Bulk:
    """A bulk."""
    messages = (Collected(MessageId("orders", n), f"m{n}", "order", 10, read(n)) for n in offsets)
    return Bulk(7, "order", tuple(messages), FlushReason.AGE)


def test_results_are_noted_of_this_bulk_s_messages_alone() -> None:
    """An id or None would be noted of nothing; another bulk's message is refused, and this bulk's results stay.

    So is what is no reason, no exception and no Failure.
    """
    bulk, other = bulk_of(1, 2), bulk_of(3)
    bulk.failed(bulk.messages[0], Failure("no such order"))
    place = MessageId("orders", 1)
    for wrong in (None, "m1", place, SimpleNamespace(place=place), other.messages[0]):
        for note in (bulk.succeeded, lambda message: bulk.failed(message, "x")):
            with pytest.raises(InvalidInput, match="m3" if wrong is other.messages[0] else r"bulk\.messages"):
                note(wrong)
    for error in (None, 5, ValueError):
        with pytest.raises(InvalidInput, match="error is"):
            bulk.failed(bulk.messages[1], error)  # type: ignore[arg-type]
    assert list(bulk.results.values()) == [Failure("no such order")]


class Coroutine:
    """An object whose call gives a coroutine."""

    async def __call__(self, argument: object) -> None:
        """Nobody awaits this."""


def test_coroutine_functions_are_for_asyncio() -> None:
    """With threads nobody would await what they give, and each message would fail, or nobody be told."""
    collector: Any = MessageCollector("billing", database=DATABASE)
    for function in (Coroutine(), Coroutine().__call__):
        with pytest.raises(InvalidInput, match="AsyncMessageCollector"):
            collector.register_executor("order", function)
        with pytest.raises(InvalidInput, match="AsyncMessageCollector"):
            collector.register_result_handler(function)
    AsyncMessageCollector("billing", database=DATABASE).register_executor("order", Coroutine())


def test_an_executor_is_tested_without_a_server() -> None:
    """A bulk of messages that were made, and of them alone, is what an executor is handed, and tells what it noted."""
    made = [
        Message.from_amqp("orders", n, BasicProperties(type="order", message_id=f"m{n}"), b"%d" % n) for n in (1, 2)
    ]

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
