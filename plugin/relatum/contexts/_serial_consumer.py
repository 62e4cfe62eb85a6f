"""The serial consumer for threads, and what it does as the one for tasks does."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Final, Self

from relatum import metrics
from relatum.checks import checked_callable, checked_name, checked_seconds, shown
from relatum.closing import Closing
from relatum.contexts._context_options import SerialOptions, SerialStatistics
from relatum.contexts._serial_batch import BatchBase, SerialBatch, consuming
from relatum.contexts._serial_member import Member
from relatum.contexts._serial_status import SerialStatus, read_status
from relatum.contexts._serial_store import ConsumerStore
from relatum.errors import ConfigurationError, DatabaseUnavailable, InvalidInput, PartitionLost, UsedAfterClose
from relatum.processes import of_one_process
from relatum.reading import Broker, BrokerAddress, Message, StreamReader
from relatum.store.database import AnyDatabase
from relatum.waiting import AfterStop, backoff, log_failure, within

logger = logging.getLogger("relatum.serial")

CLOSE_S: Final = 10.0
"""Seconds `close` waits for threads by default."""

LOOK_S: Final = 0.25
"""How often `run` looks whether it should stop while there is nothing to do."""


class ConsumerBase:
    """What serial consumers for threads and for tasks do alike."""

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
        self._store = ConsumerStore(super_stream, name, database, vhost=self._address.vhost, lease_s=options.lease_s)
        self._member = Member(super_stream, self._store, self._address, options=options)
        self._batches = self._member.batches
        self._is_started = self._is_closed = False
        of_one_process(self, "a serial consumer")
        metrics.report(self._batches, super_stream=super_stream, consumer=name)

    def _check_startable(self) -> None:
        if self._is_started or self._is_closed:
            raise ConfigurationError("a consumer is started once")

    def _until(self, timeout_s: float | None) -> float | None:
        """When a wait for a batch ends; None for never."""
        self._check_running()
        return None if timeout_s is None else time.monotonic() + checked_seconds("timeout_s", timeout_s)

    def _check_running(self) -> None:
        if not self._is_started:
            raise ConfigurationError("the consumer does not run: start it")

    def _is_ending(self, stop: threading.Event | asyncio.Event | None) -> bool:
        return self._batches.stopping.is_set() or (stop is not None and stop.is_set())

    def _try_acknowledge(self, batch: BatchBase, stop: threading.Event | asyncio.Event | None) -> bool:
        """Acknowledge; False where PostgreSQL does not answer. A batch that is another member's now is that one's."""
        outages, who = self._member.outages, _acknowledging(batch)
        try:
            with within(None if stop is None else AfterStop(stop)):
                batch._acknowledge()
        except PartitionLost as error:
            outages.forget(who)
            log_failure(logger, error, "batch not acknowledged", level=logging.INFO)
        except DatabaseUnavailable as error:
            outages.failed(who, error)
            return False
        else:
            outages.over(who)
        return True

    def _leave(self, batch: BatchBase) -> None:
        """Acknowledge no more of a batch: it is delivered again later."""
        self._member.outages.forget(_acknowledging(batch))
        batch.give_back()

    def _check_open(self) -> None:
        self._check_running()
        if self._is_closed:
            raise UsedAfterClose("the consumer was closed: make another one")

    def _status(self) -> SerialStatus:
        with StreamReader.open(self._address) as reader:
            return read_status(self._store.database, self._store.consumer_id, reader)

    def statistics(self) -> SerialStatistics:
        """What this member has counted, and what it has. It asks nobody."""
        return self._batches.statistics()

    @property
    def partitions(self) -> tuple[str, ...]:
        """The streams this member reads now."""
        return tuple(sorted(following.stream for following in self._batches.followings))


class SerialConsumer(ConsumerBase, Closing):
    """Consumes a super stream so that the messages of each serialization context come in the order of publishing.

    All consumers of one name, in any number of processes, share the partitions: one member reads a partition at a
    time. Positions are stored in PostgreSQL. Contexts may move to other partitions at any time: what a context has in
    its new partition is held back until all it had in the old one is consumed. Contexts that do not move never wait.

    A context manager: entering starts it, leaving closes it. Threads may share it; batches of different partitions
    can be consumed side by side.

    Args:
        super_stream: The super stream's name.
        name: The consumer's name. Each name consumes every message.
        options: How it reads.
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`, which stays the caller's.

    Raises:
        InvalidInput: A name cannot be one.
        ConfigurationError: A URL cannot be read.
    """

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Join the members of this name and begin to read.

        Raises:
            SuperStreamNotFound: There is no such super stream.
            SuperStreamConflict: Its contexts are named by another header.
            DatabaseUnavailable: PostgreSQL does not answer.
            SchemaMissing: Run `relatum migrate`.
            BrokerUnavailable: The broker does not answer, and is to be asked where to begin.
            ConfigurationError: It was started before.
        """
        self._check_startable()
        self._member.start()
        self._is_started = True

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop reading and let other members have the partitions at once. A second call does nothing.

        What was handed out and not acknowledged is delivered again, to the partition's next member.

        Args:
            timeout_s: Seconds to wait for the threads.

        Returns:
            False where some had not ended by then.
        """
        checked_seconds("timeout_s", timeout_s)
        if self._is_closed:
            return True
        self._is_closed = True
        return self._member.close(timeout_s)

    def next_batch(self, timeout_s: float | None = None) -> SerialBatch | None:
        """The next batch of any partition; None where none came in time, or the consumer was closed.

        Args:
            timeout_s: Seconds to wait; None for as long as it takes, 0 for not at all.

        Raises:
            TlsRefused, AccessRefused, ConfigurationError: The broker does not let this consumer in; it goes on trying,
                so asking again gives messages once that is put right.
        """
        until, batches = self._until(timeout_s), self._batches
        while not batches.stopping.is_set():
            left_s = None if until is None else max(0.0, until - time.monotonic())
            waiting = batches.wait(at_once=left_s == 0)
            try:
                with suppress(CancelledError, TimeoutError):
                    waiting.exception(left_s or None)
            except BaseException:
                batches.give_up(waiting)
                raise
            taken = batches.taken(waiting)
            if taken is not None:
                return SerialBatch(batches, *taken)
            if left_s == 0:
                return None
        return None

    def batches(self, timeout_s: float | None = None) -> Iterator[SerialBatch]:
        """Batches as they come, each to be acknowledged.

        A partition whose batch is not acknowledged hands out no further one; the others do.

        Args:
            timeout_s: Ends when no batch came for so many seconds; None goes on until the consumer is closed.
        """
        while (batch := self.next_batch(timeout_s)) is not None:
            yield batch

    def messages(self, timeout_s: float | None = None) -> Iterator[Message]:
        """Messages one by one. A batch is acknowledged when the message behind its last one is asked for.

        So a message is delivered again where this process dies before it asks for the next ones. While PostgreSQL is
        away, it waits.

        Args:
            timeout_s: Ends when no batch came for so many seconds; None goes on until the consumer is closed.

        Raises:
            TlsRefused, AccessRefused, ConfigurationError: As `next_batch`.
        """
        for batch in self.batches(timeout_s):
            try:
                yield from batch.messages
            except GeneratorExit:
                # The iteration was left in the middle: the whole batch is delivered again.
                batch.give_back()
                raise
            self._acknowledge(batch)

    def __iter__(self) -> Iterator[Message]:
        return self.messages()

    def run(self, handler: Callable[[SerialBatch], object], stop: threading.Event | None = None) -> None:
        """Hand batches to a function, one after the other, and acknowledge each that it has not acknowledged.

        Args:
            handler: Is called with each batch; it may use `batch.transaction()`. Where it raises, the batch is given
                back and the error is raised here.
            stop: Ends it, after the batch under way. Where PostgreSQL does not answer then, that one is delivered
                again later. None runs until the consumer is closed.
        """
        checked_callable("handler", handler)
        while not self._is_ending(stop):
            batch = self.next_batch(LOOK_S)
            if batch is None:
                continue
            try:
                with consuming(self.super_stream, self.name, batch):
                    handler(batch)
            except PartitionLost as error:
                # Its messages are another member's; this one goes on with what it has.
                log_failure(logger, error, "batch not consumed here", level=logging.INFO)
                continue
            except BaseException:
                batch.give_back()
                raise
            if not batch.is_acknowledged:
                self._acknowledge(batch, stop)

    def _acknowledge(self, batch: SerialBatch, stop: threading.Event | None = None) -> None:
        """Acknowledge, waiting for PostgreSQL."""
        pauses, stopping = backoff(), self._batches.stopping
        while not stopping.is_set() and not self._try_acknowledge(batch, stop):
            until = time.monotonic() + next(pauses)
            while (left_s := until - time.monotonic()) > 0 and not stopping.is_set():
                if self._is_ending(stop):
                    return self._leave(batch)
                stopping.wait(min(left_s, LOOK_S))

    def status(self) -> SerialStatus:
        """How far the consumer is in each partition, whichever member has it, and what it holds back.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer.
            BrokerUnavailable: The broker does not answer.
        """
        self._check_open()
        return self._status()


def _acknowledging(batch: BatchBase) -> str:
    return f"acknowledging a batch of {batch.partition!r}"
