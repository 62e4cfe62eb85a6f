"""The serial consumer, with threads."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self

from relatum.checks import checked_callable
from relatum.contexts.serial.consuming._serial_base import ConsumerBase
from relatum.contexts.serial.consuming._serial_batch import SerialBatch
from relatum.contexts.serial.consuming._serial_options import check_seconds
from relatum.contexts.serial.consuming._serial_state import log_defect
from relatum.contexts.serial.consuming._serial_status import SerialStatus
from relatum.errors import DatabaseUnavailable, PartitionLost
from relatum.reading import Message
from relatum.waiting import backoff

CLOSE_S: Final = 10.0
"""Seconds `close` waits for threads by default."""

LOOK_S: Final = 0.25
"""How often `run` looks whether it should stop while there is nothing to do."""


class SerialConsumer(ConsumerBase[SerialBatch]):
    """Consumes a super stream so that the messages of each serialization context come in the order of publishing.

    All consumers of one name, in any number of processes, share the partitions: one member reads a partition at a time.
    Positions are stored in PostgreSQL. Contexts may move to other partitions meanwhile: what a context has in its new
    partition is held back until all it had in the old one is consumed. Contexts that do not move never wait.

    A context manager: entering starts it, leaving closes it. Threads may share it; batches of different partitions can
    be consumed side by side.

    Args:
        super_stream: The super stream's name.
        name: The consumer's name. Each name consumes every message.
        database: PostgreSQL's URL, or an engine, which stays the caller's.
        broker: The broker's URL or address.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        ssl_context: The TLS context for the broker; None: what its URL says, or the system's authorities.
        auth_mechanism: "PLAIN" logs in with user and password, "EXTERNAL" with the client certificate; None: what the
            broker's URL says, or PLAIN.
        start: Where a name begins that is new: "first", "next" (with what is published from now on) or a datetime.
        header: The header that names contexts; None takes the one stored, and "serialization_context" where nobody has
            opened the super stream yet.
        batch_messages: Messages of a batch, at most.
        batch_bytes: Their bytes, about; one larger message still is a batch.
        batch_s: Seconds a batch that is not full waits for more; 0 for not at all.
        held_messages_max: Messages held back in a partition; then it is read no further until some are delivered.
        held_bytes_max: Their bytes.
        lease_s: Seconds after which others take over from a member that died; at least 1.
        on_gained: Called with a partition's name when this member begins with it, from a thread of the consumer.
        on_lost: Called when this member has it no more.

    Raises:
        InvalidInput: An option cannot be one.
        ConfigurationError: A URL cannot be read.
    """

    # --- its life -------------------------------------------------------------------------------------------------

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

        What was handed out and not acknowledged is delivered again, to whoever has the partition next.

        Args:
            timeout_s: Seconds to wait for the threads.

        Returns:
            False where some had not ended by then.
        """
        check_seconds("timeout_s", timeout_s)
        if self._is_closed:
            return True
        self._is_closed = True
        return self._member.close(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- messages -------------------------------------------------------------------------------------------------

    def next_batch(self, timeout_s: float | None = None) -> SerialBatch | None:
        """The next batch of any partition; None where none came in time, or the consumer was closed.

        Args:
            timeout_s: Seconds to wait; None for as long as it takes, 0 for not at all.

        Raises:
            TlsRefused, AccessRefused, ConfigurationError: The broker does not let this consumer in; it goes on trying,
                so asking again gives messages once that is put right.
        """
        self._check_running()
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        shared = self._member.shared
        with shared.changed:
            while not shared.stopping.is_set():
                now = time.monotonic()
                taken = shared.take(now)
                if isinstance(taken, tuple):
                    return SerialBatch(self._member, *taken)
                if until is not None and now >= until:
                    return None
                waits = [at - now for at in (taken, until) if at is not None]
                shared.changed.wait(min(waits) if waits else None)
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
            stop: Ends it, after the batch under way; None runs until the consumer is closed.
        """
        checked_callable("handler", handler)
        while not (self._member.shared.stopping.is_set() or (stop is not None and stop.is_set())):
            batch = self.next_batch(LOOK_S)
            if batch is None:
                continue
            try:
                handler(batch)
            except PartitionLost as error:
                # Its messages are another member's; this one goes on with what it has.
                log_defect(error, "batch not consumed here", level=logging.INFO)
                continue
            except BaseException:
                batch.give_back()
                raise
            if not batch.is_acknowledged:
                self._acknowledge(batch)

    def _acknowledge(self, batch: SerialBatch) -> None:
        """Acknowledge, waiting for PostgreSQL; a batch that is another member's now is that one's."""
        pauses, outages = backoff(), self._member.shared.outages
        who = f"acknowledging a batch of {batch.partition!r}"
        while not self._member.shared.stopping.is_set():
            try:
                batch.acknowledge()
            except PartitionLost as error:
                outages.forget(who)
                return log_defect(error, "batch not acknowledged", level=logging.INFO)
            except DatabaseUnavailable as error:
                outages.failed(who, error)
            else:
                return outages.over(who)
            self._member.shared.stopping.wait(next(pauses))

    def status(self) -> SerialStatus:
        """How far the consumer is in each partition, whoever has it, and what it holds back.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer.
            BrokerUnavailable: The broker does not answer.
        """
        return self._status()
