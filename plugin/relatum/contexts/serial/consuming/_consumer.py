# Generated from _async_consumer.py by tools/make-twins: edit that, then "make twins".
"""The serial consumer: what its faces do alike."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Self

from relatum.checks import checked_callable
from relatum.closing import Closing
from relatum.contexts.serial.consuming._consumer_faces import ConsumerFace
from relatum.contexts.serial.consuming._serial_batch import SerialBatch, consuming
from relatum.contexts.serial.consuming._serial_state import log_defect
from relatum.contexts.serial.consuming._serial_status import SerialStatus
from relatum.errors import DatabaseUnavailable, PartitionLost
from relatum.reading import Message
from relatum.waiting import AfterStop, backoff, within

LOOK_S: Final = 0.25
"""How often `run` looks whether it should stop while there is nothing to do."""


class SerialConsumer(ConsumerFace, Closing):
    """Consumes a super stream so that the messages of each serialization context come in the order of publishing.

    All consumers of one name, in any number of processes, share the partitions: one member reads a partition at a
    time. Positions are stored in PostgreSQL. Contexts may move to other partitions meanwhile: what a context has in
    its new partition is held back until all it had in the old one is consumed. Contexts that do not move never wait.

    A context manager: entering starts it, leaving closes it. Threads may share it; batches of different partitions
    can be consumed side by side.

    Args:
        super_stream: The super stream's name.
        name: The consumer's name. Each name consumes every message.
        options: How it reads.
        database: PostgreSQL's URL, or a `Database`, which stays the caller's.
        broker: The broker's URL or address.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        ssl_context: The TLS context for the broker; None: what its URL says, or the system's authorities.
        auth_mechanism: "PLAIN" logs in with user and password, "EXTERNAL" with the client certificate; None: what the
            broker's URL says, or PLAIN.

    Raises:
        InvalidInput: A name cannot be one.
        ConfigurationError: A URL cannot be read.
    """

    def __enter__(self) -> Self:
        self.start()
        return self

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
                # Whoever left off in the middle is handed all of it again.
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
        while not (self._member.shared.stopping.is_set() or (stop is not None and stop.is_set())):
            batch = self.next_batch(LOOK_S)
            if batch is None:
                continue
            try:
                with consuming(self.super_stream, self.name, batch):
                    handler(batch)
            except PartitionLost as error:
                # Its messages are another member's; this one goes on with what it has.
                log_defect(error, "batch not consumed here", level=logging.INFO)
                continue
            except BaseException:
                batch.give_back()
                raise
            if not batch.is_acknowledged:
                self._acknowledge(batch, stop)

    def _acknowledge(self, batch: SerialBatch, stop: threading.Event | None = None) -> None:
        """Acknowledge, waiting for PostgreSQL; a batch that is another member's now is that one's."""
        pauses, outages = backoff(), self._member.shared.outages
        who = f"acknowledging a batch of {batch.partition!r}"
        deadline = None if stop is None else AfterStop(stop)
        while not self._member.shared.stopping.is_set():
            try:
                with within(deadline):
                    batch.acknowledge()
            except PartitionLost as error:
                outages.forget(who)
                return log_defect(error, "batch not acknowledged", level=logging.INFO)
            except DatabaseUnavailable as error:
                outages.failed(who, error)
            else:
                return outages.over(who)
            until = time.monotonic() + next(pauses)
            while (left_s := until - time.monotonic()) > 0 and not self._member.shared.stopping.is_set():
                if stop is not None and stop.is_set():
                    outages.forget(who)
                    return batch.give_back()
                self._pause(min(left_s, LOOK_S))

    def status(self) -> SerialStatus:
        """How far the consumer is in each partition, whoever has it, and what it holds back.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer.
            BrokerUnavailable: The broker does not answer.
        """
        return self._status()
