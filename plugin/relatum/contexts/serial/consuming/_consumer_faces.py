"""What a serial consumer does differently with threads and with asyncio: how it begins, waits and ends."""

import asyncio
import ssl
import time
from contextlib import suppress
from functools import partial
from typing import Final

from relatum import metrics
from relatum.checks import checked_name, checked_seconds, shown
from relatum.contexts._options import SerialOptions
from relatum.contexts._statistics import SerialStatistics
from relatum.contexts.serial.consuming._serial_batch import AsyncSerialBatch, SerialBatch, in_thread
from relatum.contexts.serial.consuming._serial_member import Member
from relatum.contexts.serial.consuming._serial_status import SerialStatus, read_status
from relatum.contexts.serial.consuming._serial_store import ConsumerStore
from relatum.errors import ConfigurationError, InvalidInput, UsedAfterClose
from relatum.processes import of_one_process
from relatum.reading import AuthMechanism, BrokerAddress, StreamReader
from relatum.store.database import AnyDatabase

CLOSE_S: Final = 10.0
"""Seconds `close` waits for threads by default."""


class _Face:
    """What both are."""

    def __init__(
        self,
        super_stream: str,
        name: str,
        options: SerialOptions = SerialOptions(),
        *,
        database: AnyDatabase,
        broker: str | BrokerAddress,
        stream_url: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        auth_mechanism: AuthMechanism | None = None,
    ) -> None:
        self.super_stream = checked_name("super_stream", super_stream)
        self.name = checked_name("name", name)
        if not isinstance(options, SerialOptions):
            raise InvalidInput(f"options= takes SerialOptions, not {shown(options)}")
        self._options = options
        self._address = BrokerAddress.of(broker, stream_url, ssl_context=ssl_context, auth_mechanism=auth_mechanism)
        self._store = ConsumerStore(super_stream, name, database, vhost=self._address.vhost, lease_s=options.lease_s)
        self._member = Member(super_stream, self._store, self._address, options=options)
        self._is_started = self._is_closed = False
        of_one_process(self, "a serial consumer")
        metrics.report(self._member.shared, super_stream=super_stream, consumer=name)

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

    def _status(self) -> SerialStatus:
        self._check_running()
        if self._is_closed:
            raise UsedAfterClose("the consumer was closed: make another one")
        with StreamReader.open(self._address) as reader:
            return read_status(self._store, reader)

    def statistics(self) -> SerialStatistics:
        """What this member has counted, and what it has. It asks nobody."""
        return self._member.shared.statistics()

    @property
    def partitions(self) -> tuple[str, ...]:
        """The streams this member reads now."""
        return tuple(sorted(following.stream for following in self._member.shared.followings))


class ConsumerFace(_Face):
    """A serial consumer that is used by threads."""

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
        until, shared = self._until(timeout_s), self._member.shared
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

    def _pause(self, seconds: float) -> None:
        self._member.shared.stopping.wait(seconds)


class AsyncConsumerFace(_Face):
    """A serial consumer that is used in an event loop. Partitions are read, and PostgreSQL is asked, in threads."""

    async def start(self) -> None:
        """Join the members of this name and begin to read; see `SerialConsumer.start`.

        Cancelled, it waits until what it began is ended, and was not started.
        """
        self._check_startable()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._member.shared.listeners.append(self._notify)
        await in_thread(self._member.start, undo=partial(self._member.close, CLOSE_S))
        self._is_started = True

    def _notify(self) -> None:
        # Of a loop that was closed first, nobody waits any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    async def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Stop reading and let other members have the partitions at once; see `SerialConsumer.close`."""
        checked_seconds("timeout_s", timeout_s)
        if self._is_closed:
            return True
        self._is_closed = True
        return await asyncio.shield(asyncio.to_thread(self._member.close, timeout_s))

    async def next_batch(self, timeout_s: float | None = None) -> AsyncSerialBatch | None:
        """The next batch of any partition; see `SerialConsumer.next_batch`."""
        until, shared = self._until(timeout_s), self._member.shared
        while not shared.stopping.is_set():
            self._changed.clear()
            now = time.monotonic()
            taken = shared.take(now)
            if isinstance(taken, tuple):
                # Another task may wait for what else there is.
                self._changed.set()
                return AsyncSerialBatch(self._member, *taken)
            if until is not None and now >= until:
                return None
            waits = [at - now for at in (taken, until) if at is not None]
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(waits) if waits else None)
        return None

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
