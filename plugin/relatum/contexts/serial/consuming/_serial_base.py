"""What both faces of a serial consumer have in common: how it is told what to do, and what it says of itself."""

import ssl
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from relatum import metrics
from relatum.checks import checked_callable
from relatum.contexts.serial.consuming._partition_following import Pause
from relatum.contexts.serial.consuming._serial_batch import BatchBase
from relatum.contexts.serial.consuming._serial_member import Member
from relatum.contexts.serial.consuming._serial_options import (
    BATCH_BYTES,
    BATCH_MESSAGES,
    BATCH_S,
    HELD_BYTES_MAX,
    HELD_MESSAGES_MAX,
    LEASE_S,
    ConsumerOptions,
    Start,
    check_name,
)
from relatum.contexts.serial.consuming._serial_statistics import SerialStatistics
from relatum.contexts.serial.consuming._serial_status import SerialStatus, read_status
from relatum.contexts.serial.consuming._serial_store import ConsumerStore
from relatum.errors import ConfigurationError, UsedAfterClose
from relatum.processes import of_one_process
from relatum.reading import AuthMechanism, BrokerAddress, StreamReader

BatchT = TypeVar("BatchT", bound=BatchBase)
Told = Callable[[str], Any]


class ConsumerBase(Generic[BatchT]):
    """The options of a serial consumer, and what needs no waiting."""

    def __init__(
        self,
        super_stream: str,
        name: str,
        *,
        database: str | sa.URL | sa.Engine,
        broker: str | BrokerAddress,
        stream_url: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        auth_mechanism: AuthMechanism | None = None,
        start: Start = "first",
        header: str | None = None,
        batch_messages: int = BATCH_MESSAGES,
        batch_bytes: int = BATCH_BYTES,
        batch_s: float = BATCH_S,
        held_messages_max: int = HELD_MESSAGES_MAX,
        held_bytes_max: int = HELD_BYTES_MAX,
        lease_s: float = LEASE_S,
        on_gained: Told | None = None,
        on_lost: Told | None = None,
    ) -> None:
        self.super_stream = check_name("super_stream", super_stream)
        self.name = check_name("name", name)
        if header is not None:
            check_name("header", header)
        for told, function in (("on_gained", on_gained), ("on_lost", on_lost)):
            if function is not None:
                checked_callable(told, function)
        options = ConsumerOptions(
            start=start,
            batch_messages=batch_messages,
            batch_bytes=batch_bytes,
            batch_s=batch_s,
            held_messages_max=held_messages_max,
            held_bytes_max=held_bytes_max,
            lease_s=lease_s,
        )
        self._on_gained, self._on_lost = on_gained, on_lost
        self._address = BrokerAddress.of(broker, stream_url, ssl_context=ssl_context, auth_mechanism=auth_mechanism)
        self._store = ConsumerStore(super_stream, name, database, vhost=self._address.vhost, lease_s=lease_s)
        self._member = Member(
            super_stream,
            self._store,
            self._address,
            options=options,
            header=header,
            gained=self._tell_gained,
            lost=self._tell_lost,
        )
        self._is_started = self._is_closed = False
        of_one_process(self, "a serial consumer")
        metrics.report(self._member.shared, super_stream=super_stream, consumer=name)

    def _tell_gained(self, stream: str) -> None:
        if self._on_gained is not None:
            self._on_gained(stream)

    def _tell_lost(self, stream: str) -> None:
        if self._on_lost is not None:
            self._on_lost(stream)

    def _check_startable(self) -> None:
        if self._is_started or self._is_closed:
            raise ConfigurationError("a consumer is started once")

    def _check_running(self) -> None:
        if not self._is_started:
            raise ConfigurationError("the consumer does not run: start it")

    def _status(self) -> SerialStatus:
        self._check_running()
        if self._is_closed:
            raise UsedAfterClose("the consumer was closed: make another one")
        with StreamReader.open(self._address) as reader:
            return read_status(self._store, reader, self.pauses)

    def statistics(self) -> SerialStatistics:
        """What this member has counted, and what it has. It asks nobody."""
        return self._member.shared.statistics()

    @property
    def partitions(self) -> tuple[str, ...]:
        """The streams this member reads now."""
        return tuple(sorted(following.stream for following in self._member.shared.followings))

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """The pauses of moved contexts this member has measured, oldest first; the last 10,000."""
        with self._member.shared.changed:
            return tuple(self._member.shared.pauses)
