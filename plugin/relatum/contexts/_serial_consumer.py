"""The blocking serial consumer, its batches, and the base that it shares with the asyncio one."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, Self

import sqlalchemy as sa

from relatum import otel
from relatum.common.checks import checked_callable, checked_name, checked_seconds, shown
from relatum.common.closing import Closing
from relatum.common.processes import refuse_in_child
from relatum.common.waiting import AfterStop, backoff, log_failure, within
from relatum.contexts._context_options import SerialOptions, SerialStatistics
from relatum.contexts._partition_following import Step
from relatum.contexts._serial_member import Member, Taken
from relatum.contexts._serial_partition import Partition, logger
from relatum.contexts._serial_status import SerialStatus, read_status
from relatum.contexts._serial_store import ConsumerStore, lost
from relatum.errors import ConfigurationError, DatabaseUnavailable, InvalidInput, PartitionLost, UsedAfterClose
from relatum.otel import Description, Part
from relatum.reading import Broker, BrokerAddress, Message, StreamReader
from relatum.store.database import AnyDatabase

CLOSE_S: Final = 10.0
"""Seconds that `close` waits for the threads by default."""

POLL_S: Final = 0.25
"""Seconds between two checks of an idle `run` whether to stop."""


class BatchBase:
    """Messages of one partition, in the order to consume them. Iterable.

    A partition delivers one batch at a time: acknowledge the batch to get the next one, or give the batch back to get
    it again.

    Attributes:
        partition: The partition's stream. An adopted message is stored in another stream, which `message.stream` names.
        messages: The messages, at least one.
        is_acknowledged: Whether the position after these messages is stored.
    """

    def __init__(self, source: Partition, step: Step) -> None:
        self.partition = source.stream
        self.messages: tuple[Message, ...] = tuple(step.messages)
        self.is_acknowledged = False
        self._source = source
        self._step = step
        self._is_given_back = False

    def context_of(self, message: Message) -> str | None:
        """Return a message's serialization context, or None."""
        context = message.headers.get(self._source.member.header)
        return context if isinstance(context, str) else None

    def give_back(self) -> None:
        """Give the batch back: the partition delivers its messages again, as the next batch."""
        self._is_given_back = True
        self._source.give_back(self._step)

    def _check(self) -> None:
        if self.is_acknowledged:
            raise InvalidInput(f"this batch of {self.partition!r} was acknowledged already: take the next one")
        if self._is_given_back:
            raise lost(self.partition, self._source.member.store.name)
        self._source.check(self._step)

    def _acknowledge(self) -> None:
        self._check()
        self._source.commit(self._step)
        self.is_acknowledged = True

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        self._check()
        with self._source.transaction(self._step) as connection:
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
            PartitionLost: Another member took over the partition, this member reopened it, or the batch was given back.
                Nothing was written; the messages are delivered again.
            DatabaseUnavailable: PostgreSQL does not answer. Call `acknowledge` again; otherwise the messages may be
                delivered again.
            InvalidInput: The batch was acknowledged already.
        """
        self._acknowledge()

    def transaction(self) -> AbstractContextManager[sa.Connection]:
        """Open a transaction that acknowledges the batch when it commits: each message is consumed exactly once.

        The rows you write through the connection and the position are committed together. If the block raises, both
        are rolled back: consume the batch again, or give it back.

        Raises:
            PartitionLost: See `acknowledge`; nothing was written.
            DatabaseUnavailable: PostgreSQL does not answer; nothing was written, unless the commit got no answer for
                ten seconds: its outcome is then unknown, and the member reopens the partition at the stored position.
            ConfigurationError: The block ended the transaction itself.
            InvalidInput: The batch was acknowledged already.
        """
        return self._transaction()


def processing_span(super_stream: str, consumer: str, batch: BatchBase) -> AbstractContextManager[Any]:
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


class ConsumerBase:
    def __init__(
        self,
        super_stream: str,
        name: str,
        options: SerialOptions = SerialOptions(),
        *,
        broker: str | Broker,
        database: AnyDatabase,
    ) -> None:
        self.super_stream = checked_name("super_stream", super_stream)
        self.name = checked_name("name", name)
        if not isinstance(options, SerialOptions):
            raise InvalidInput(f"options= takes SerialOptions, not {shown(options)}")
        self._options = options
        self._address = BrokerAddress.of(broker)
        self._store = ConsumerStore(name, database, lease_s=options.lease_s)
        self._member = Member(super_stream, self._store, self._address, options=options)
        self._is_started = self._is_closed = False
        refuse_in_child(self, "a serial consumer")

    def _check_startable(self) -> None:
        if self._is_started or self._is_closed:
            raise ConfigurationError("a consumer can be started only once: create another one")

    def _waits(self, timeout_s: float | None) -> Iterator[tuple["Future[Taken]", float | None]]:
        """Yield waits for a batch, each with its time limit, until the time is over or the consumer is closed."""
        self._check_running()
        until = None if timeout_s is None else time.monotonic() + checked_seconds("timeout_s", timeout_s)
        left_s = None
        while left_s != 0 and not self._member.stopping.is_set():
            left_s = None if until is None else max(0.0, until - time.monotonic())
            yield self._member.wait(at_once=left_s == 0), left_s or None

    def _check_running(self) -> None:
        if not self._is_started:
            raise ConfigurationError("the consumer is not running: call start(), or use it as a context manager")

    def _is_ending(self, stop: threading.Event | asyncio.Event | None) -> bool:
        return self._member.stopping.is_set() or (stop is not None and stop.is_set())

    def _acknowledge(self, batch: BatchBase, stop: threading.Event | asyncio.Event | None = None) -> None:
        """Acknowledge a batch, and retry while PostgreSQL is unavailable. After `stop`, give the batch back instead."""
        outages, task = self._member.outages, f"acknowledging a batch of {batch.partition!r}"
        pauses, stopping = backoff(), self._member.stopping
        while not stopping.is_set():
            try:
                with within(None if stop is None else AfterStop(stop)):
                    batch._acknowledge()
            except PartitionLost as error:
                outages.forget(task)
                return log_failure(logger, error, "batch not acknowledged", level=logging.INFO)
            except DatabaseUnavailable as error:
                outages.failed(task, error)
            else:
                return outages.over(task)
            until = time.monotonic() + next(pauses)
            while (left_s := until - time.monotonic()) > 0 and not stopping.is_set():
                if self._is_ending(stop):
                    outages.forget(task)
                    return batch.give_back()
                stopping.wait(min(left_s, POLL_S))

    @contextmanager
    def _give_back_on_error(self, batch: BatchBase) -> Iterator[None]:
        """Give a batch back if the block raises. Suppress `PartitionLost`: another member gets the messages."""
        try:
            yield
        except PartitionLost as error:
            log_failure(logger, error, "batch not consumed here", level=logging.INFO)
            # The handler may have lost a batch of another consumer. If this batch is lost, this has no effect.
            batch.give_back()
        except BaseException:
            batch.give_back()
            raise

    def _status(self) -> SerialStatus:
        self._check_running()
        if self._is_closed:
            raise UsedAfterClose("the consumer was closed: create another one")
        with StreamReader.open(self._address) as reader:
            return read_status(self._store.database, self._store.consumer_id, reader)

    def statistics(self) -> SerialStatistics:
        """Return this member's counts. No I/O."""
        return self._member.statistics()

    @property
    def partitions(self) -> tuple[str, ...]:
        """The streams that this member reads now."""
        return tuple(sorted(following.stream for following in self._member.followings))


class SerialConsumer(ConsumerBase, Closing):
    """Consumes a super stream; delivers the messages of each serialization context in the order of publishing.

    Consumers with the same name, in any number of processes, are members that share the partitions; one member at a
    time reads a partition. PostgreSQL stores the positions. Contexts may move between partitions at any time: the
    consumer holds back a moved context's messages in the new partition until those in the old one are consumed.
    Contexts that do not move never wait.

    A context manager: entering starts the consumer, leaving closes it. Thread-safe; threads can process batches of
    different partitions at the same time.

    Args:
        super_stream: The super stream's name.
        name: The consumer's name. Consumers with different names each get every message.
        options: The `SerialOptions`. Default: their defaults.
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`, which the caller closes.

    Raises:
        InvalidInput: A name is invalid.
        ConfigurationError: A URL is invalid.
    """

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Join as a member of the consumer with this name, and start to read.

        Raises:
            SuperStreamNotFound: The super stream does not exist.
            SuperStreamConflict: Another header names the super stream's contexts.
            DatabaseUnavailable: PostgreSQL does not answer.
            SchemaMissing: The database has no schema; run `relatum migrate`.
            BrokerUnavailable: The broker does not answer. It is needed if the super stream is new to the database, or
                the name is new and starts at "next".
            ConfigurationError: The consumer was started or closed before.
        """
        self._check_startable()
        self._member.start()
        self._is_started = True

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop reading and immediately release the partitions to other members. Idempotent.

        The next member that reads a partition gets its unacknowledged messages again.

        Args:
            timeout_s: Seconds to wait for the threads. Default: 10.

        Returns:
            False if a thread is still running.
        """
        checked_seconds("timeout_s", timeout_s)
        if self._is_closed:
            return True
        self._is_closed = True
        return self._member.close(timeout_s)

    def next_batch(self, timeout_s: float | None = None) -> SerialBatch | None:
        """Return the next batch of any partition; None after `timeout_s`, or if the consumer is closed.

        Args:
            timeout_s: Seconds to wait. None (default) waits forever, 0 does not wait.

        Raises:
            TlsRefused, AccessRefused, ConfigurationError: The broker refuses this consumer, which keeps retrying. Fix
                the cause, then call again.
        """
        for waiting, left_s in self._waits(timeout_s):
            try:
                with suppress(CancelledError, TimeoutError):
                    waiting.exception(left_s)
            except BaseException:
                self._member.give_up(waiting)
                raise
            taken = self._member.taken(waiting)
            if taken is not None:
                return SerialBatch(*taken)
        return None

    def batches(self, timeout_s: float | None = None) -> Iterator[SerialBatch]:
        """Iterate over batches; acknowledge each of them.

        A partition delivers its next batch after the previous one is acknowledged. Other partitions do not wait.

        Args:
            timeout_s: Stop after this many seconds without a batch. None (default): stop when the consumer is closed.
        """
        while (batch := self.next_batch(timeout_s)) is not None:
            yield batch

    def messages(self, timeout_s: float | None = None) -> Iterator[Message]:
        """Iterate over messages. Requesting the message after a batch's last one acknowledges the batch.

        If this process dies before that, the messages of the batch are delivered again. While PostgreSQL is
        unavailable, the iterator waits.

        Args:
            timeout_s: Stop after this many seconds without a batch. None (default): stop when the consumer is closed.

        Raises:
            TlsRefused, AccessRefused, ConfigurationError: See `next_batch`.
        """
        for batch in self.batches(timeout_s):
            # If the loop ends inside a batch, the whole batch is delivered again.
            with self._give_back_on_error(batch):
                yield from batch.messages
                self._acknowledge(batch)

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    def run(self, handler: Callable[[SerialBatch], object], stop: threading.Event | None = None) -> None:
        """Call a function with each batch in turn, and acknowledge each batch after the call.

        Args:
            handler: Called with each batch; it may use `batch.transaction()`. If it raises, the batch is given back
                and `run` raises the error.
            stop: When this event is set, `run` returns after the current batch; if PostgreSQL is unavailable then, that
                batch is delivered again later. None (default): run until the consumer is closed.
        """
        checked_callable("handler", handler)
        while not self._is_ending(stop):
            batch = self.next_batch(POLL_S)
            if batch is None:
                continue
            with self._give_back_on_error(batch):
                with processing_span(self.super_stream, self.name, batch):
                    handler(batch)
                if not batch.is_acknowledged:
                    self._acknowledge(batch, stop)

    def status(self) -> SerialStatus:
        """Return the position, the lag and the held messages of each partition, for all members.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer.
            BrokerUnavailable: The broker does not answer.
        """
        return self._status()
