"""Wrong arguments of a collector that runs: one clear error that names the argument, and the collector goes on."""

import pytest

from relatum.collecting import AsyncMessageCollector, MessageCollector
from relatum.errors import InvalidInput
from relatum.reading import Message, Properties


def read(offset: int) -> Message:
    """A message of a stream."""
    return Message("orders", offset, None, None, lambda: ({}, Properties(message_id=f"m{offset}"), b"body", True))


def test_only_messages_of_streams_are_collected(database_url: str) -> None:
    """One that is none is refused together with all that were given with it: nothing is taken."""
    collector = MessageCollector("billing", database=database_url)
    collector.register_executor("order", lambda bulk: None)
    with collector:
        for wrong in (None, b"body", (read(1),)):
            with pytest.raises(InvalidInput, match=type(wrong).__name__):
                collector.collect(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="bytes"):
            collector.collect_many([read(1), b"body"])  # type: ignore[list-item]
        with pytest.raises(InvalidInput, match="NoneType"):
            collector.collect_many(None)  # type: ignore[arg-type]
        for timeout_s in (-1, "3", float("inf"), 10**12):
            with pytest.raises(InvalidInput, match="timeout_s"):
                collector.collect(read(1), timeout_s=timeout_s)  # type: ignore[arg-type]
        assert collector.held_messages == 0


def test_a_type_nobody_consumes_is_not_flushed(database_url: str) -> None:
    """A misspelt one would leave the bulk that is meant open."""
    collector = MessageCollector("billing", database=database_url)
    collector.register_executor("order", lambda bulk: None)
    with collector:
        collector.flush("order")
        collector.flush()
        with pytest.raises(InvalidInput, match="'oder'"):
            collector.flush("oder")


def test_a_time_out_to_close_in_is_checked_first(database_url: str) -> None:
    """The collector goes on: it can be closed afterwards."""
    collector = MessageCollector("billing", database=database_url)
    collector.register_executor("order", lambda bulk: None)
    with collector:
        for timeout_s in (-1, "3"):
            with pytest.raises(InvalidInput, match="timeout_s"):
                collector.close(timeout_s)  # type: ignore[arg-type]
        assert collector.collect(read(1)) is False
        assert collector.passed_over == 1
        with pytest.raises(InvalidInput, match="message_id"):
            collector.outcome("")


async def test_asyncio_refuses_the_same(database_url: str) -> None:
    """Its own calls check their arguments as the blocking ones do."""
    collector = AsyncMessageCollector("billing", database=database_url)
    collector.register_executor("order", lambda bulk: None)
    async with collector:
        for call in (
            lambda: collector.collect(b"body"),  # type: ignore[arg-type]
            lambda: collector.collect(read(1), timeout_s=-1),
            lambda: collector.flush("oder"),
            lambda: collector.close(-1),
            lambda: collector.outcome(""),
        ):
            with pytest.raises(InvalidInput):
                await call()
