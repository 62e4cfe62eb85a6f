"""Batches of a serial consumer: messages of one partition that are acknowledged together."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from relatum import otel
from relatum.contexts._batch_queue import Batches
from relatum.contexts._partition_following import Following, Step
from relatum.contexts._serial_store import lost
from relatum.errors import InvalidInput
from relatum.otel import Description, Part
from relatum.reading import Message
from relatum.waiting import Threads, in_thread

if TYPE_CHECKING:
    import sqlalchemy as sa


class BatchBase:
    """Messages of one partition, in the order to consume them. Iterable.

    A partition delivers one batch at a time: acknowledge the batch to get the next one, or give it back to get it
    again.

    Attributes:
        partition: The stream the messages were consumed from. An adopted message is stored in another stream, which
            `message.stream` names.
        messages: The messages, at least one.
        is_acknowledged: Whether the position after these messages is stored.
    """

    def __init__(self, batches: Batches, following: Following, step: Step) -> None:
        self.partition = following.stream
        self.messages: tuple[Message, ...] = tuple(step.messages)
        self.is_acknowledged = False
        self._batches = batches
        self._following = following
        self._step = step
        self._is_given_back = False

    def context_of(self, message: Message) -> str | None:
        """Return a message's serialization context, or None."""
        context = message.headers.get(self._batches.header or "")
        return context if isinstance(context, str) else None

    def give_back(self) -> None:
        """Return the batch: its messages are delivered again, as the partition's next batch."""
        self._is_given_back = True
        self._batches.give_back(self._following, self._step)

    def _check(self) -> None:
        if self.is_acknowledged:
            raise InvalidInput(f"this batch of {self.partition!r} is acknowledged already")
        if self._is_given_back:
            raise lost(self.partition, self._batches.store.name)
        self._batches.check(self._following, self._step)

    def _acknowledge(self) -> None:
        self._check()
        self._batches.commit(self._following, self._step)
        self.is_acknowledged = True

    @contextmanager
    def _transaction(self) -> "Iterator[sa.Connection]":
        self._check()
        with self._batches.transaction(self._following, self._step) as connection:
            yield connection
        self.is_acknowledged = True

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __repr__(self) -> str:
        first, last = self.messages[0].offset, self.messages[-1].offset
        return f"<{type(self).__name__} {self.partition} {first}..{last}, {len(self)} messages>"


class SerialBatch(BatchBase):
    __doc__ = BatchBase.__doc__

    def acknowledge(self) -> None:
        """Store that these messages are consumed.

        Raises:
            PartitionLost: Another member took the partition over, and receives these messages.
            DatabaseUnavailable: PostgreSQL does not answer; call `acknowledge` again, or the messages may be delivered
                again.
            InvalidInput: The batch is acknowledged already.
        """
        self._acknowledge()

    def transaction(self) -> "AbstractContextManager[sa.Connection]":
        """Open a transaction that acknowledges the batch when it commits: each message is consumed exactly once.

        The rows you write through the connection and the position are committed together. If the block raises, all of
        it is rolled back, and the batch remains to be acknowledged or given back.

        Raises:
            PartitionLost: Another member took the partition over; nothing was written.
            DatabaseUnavailable: PostgreSQL does not answer; nothing was written. If the commit got no answer for ten
                seconds, the outcome is unknown: the partition is then opened again at its stored position.
            ConfigurationError: The block ended the transaction itself.
            InvalidInput: The batch is acknowledged already.
        """
        return self._transaction()


class AsyncSerialBatch(BatchBase):
    __doc__ = BatchBase.__doc__

    def __init__(self, batches: Batches, following: Following, step: Step, threads: Threads) -> None:
        super().__init__(batches, following, step)
        self._threads = threads

    async def acknowledge(self) -> None:
        """Store that these messages are consumed; see `SerialBatch.acknowledge`."""
        self._check()
        await asyncio.shield(in_thread(self._threads, self._acknowledge))

    @asynccontextmanager
    async def transaction(self) -> "AsyncIterator[sa.Connection]":
        """Open a transaction that acknowledges the batch when it commits; see `SerialBatch.transaction`.

        The connection is blocking: use it in a thread, `await asyncio.to_thread(connection.execute, statement)`.
        """
        # In its own thread, a transaction never queues behind calls that wait for PostgreSQL.
        joined, threads = self._transaction(), Threads(1, f"relatum-transaction-{self.partition}")
        cancelled = asyncio.CancelledError, asyncio.CancelledError(), None
        try:
            connection = await in_thread(threads, joined.__enter__, returned=lambda _: joined.__exit__(*cancelled))
            try:
                yield connection
            except BaseException as error:
                ended = type(error), error, error.__traceback__
                if not await asyncio.shield(in_thread(threads, joined.__exit__, *ended)):
                    raise
            else:
                await asyncio.shield(in_thread(threads, joined.__exit__, None, None, None))
        finally:
            threads.shutdown()


def consuming(super_stream: str, consumer: str, batch: BatchBase) -> AbstractContextManager[Any]:
    """Return a span around the processing of a batch, if tracing is on."""

    def describe() -> Description:
        attributes: dict[str, str | int] = {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": super_stream,
            "messaging.destination.partition.id": batch.partition,
            "messaging.consumer.group.name": consumer,
            "messaging.batch.message_count": len(batch.messages),
        }
        return Description(f"process {super_stream}", attributes, "consumer", otel.links_of(batch.messages))

    return otel.span(Part.SERIAL, describe)
