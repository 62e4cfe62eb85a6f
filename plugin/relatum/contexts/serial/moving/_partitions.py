"""The partitions of a super stream, in the database and at the broker: added, found, and taken out of use."""

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from relatum.contexts.placement._model import PartitionRow, PartitionState
from relatum.contexts.placement._placement_store import PlacementStore
from relatum.contexts.serial.moving._controls import ControlStreams
from relatum.contexts.serial.moving._move_store import MoveStore
from relatum.errors import ConfigurationError, PartitionInUse, StreamNotFound, SuperStreamConflict, SuperStreamNotFound
from relatum.headers import CONTEXT_HEADER
from relatum.reading import BrokerAddress
from relatum.superstreams import Layout, add_partition, blocking_connection, describe_super_stream, unbind_partition

LOOK_S: Final = 0.1
"""Seconds between two looks at how far consumers are."""


class Partitions:
    """The partitions of a super stream. Threads may share it."""

    def __init__(self, store: PlacementStore, super_stream: str, address: BrokerAddress | None) -> None:
        self._store = store
        self._super_stream = super_stream
        self._address = address

    def open(self, header: str | None) -> None:
        """Open the super stream's rows; those of one that is not known yet are made by what the broker says.

        Raises:
            SuperStreamNotFound: neither the database nor the broker knows it.
            SuperStreamConflict: it is used with another header.
        """
        try:
            self._store.open(header)
        except SuperStreamNotFound:
            if self._address is None:
                raise
            self._store.open(header or CONTEXT_HEADER, self._described())

    def named(self, stream: str) -> PartitionRow:
        """The partition that is the stream of that name; the broker is asked for one that is new.

        Raises:
            StreamNotFound: the super stream has no such partition.
        """
        found = _named(self._store.partitions(), stream)
        if found is None and self._address is not None:
            found = _named(self._store.open(None, self._described()), stream)
        if found is None:
            raise StreamNotFound(f"{stream!r} is no partition of {self._super_stream!r}", stream=stream)
        return found

    def add(self, binding_keys: Iterable[str | None]) -> list[str]:
        """Add partitions at the broker, then in the database; gives their streams.

        Raises:
            SuperStreamConflict: one of that binding key is there, or was retired; those before it were added.
        """
        address, added = self.check_broker(), []
        for key in binding_keys:
            wanted = self._next_key() if key is None else self._checked(key)
            added.append(add_partition(address, self._super_stream, binding_key=wanted).stream)
            self._store.open(None, self._described())
        return added

    def _next_key(self) -> str | None:
        """The next number; None to have the broker tell it, which does not know of partitions that were deleted."""
        rows = self._store.partitions()
        if all(row.state is PartitionState.ACTIVE for row in rows):
            return None
        numbers = [row.stream.removeprefix(f"{self._super_stream}-") for row in rows]
        return str(1 + max((int(number) for number in numbers if number.isascii() and number.isdecimal()), default=-1))

    def _checked(self, key: str) -> str:
        stream = f"{self._super_stream}-{key}"
        found = _named(self._store.partitions(), stream)
        if found is not None and found.state is PartitionState.RETIRED:
            raise SuperStreamConflict(
                f"partition {stream!r} was retired, and its name is not used again: take another binding key",
                super_stream=self._super_stream,
                reason="the partition was retired",
            )
        return key

    def unbind(self, stream: str) -> None:
        """Have the broker route nothing to a partition; one that is not bound stays so."""
        if any(partition.stream == stream for partition in self._described()):
            unbind_partition(self.check_broker(), self._super_stream, stream)

    def delete(self, stream: str, moves: MoveStore, streams: ControlStreams, timeout_s: float) -> None:
        """Delete the stream of a retired partition, once every consumer has read what the super stream has now.

        Of the other partitions, too: an adoption there may stand for a message that lies here.

        Raises:
            PartitionInUse: a consumer has not, in time.
        """
        rows = self._store.partitions()
        partition_id = next(row.partition_id for row in rows if row.stream == stream)
        ends: dict[int, int] = {}
        for row in rows:
            with suppress(StreamNotFound):  # one that was retired and deleted before
                ends[row.partition_id] = streams.end_of(row.stream)
        give_up_at = time.monotonic() + timeout_s
        while (reason := moves.unread(partition_id, ends)) is not None:
            if time.monotonic() >= give_up_at:
                raise PartitionInUse(
                    f"{stream!r} is retired, but was not deleted: {reason}", stream=stream, reason=reason
                )
            time.sleep(LOOK_S)
        address = self.check_broker()
        with blocking_connection(address, address) as connection, connection.channel() as channel:
            channel.queue_delete(stream)

    def check_broker(self) -> BrokerAddress:
        """The broker's address.

        Raises:
            ConfigurationError: none was given, or one without an AMQP port.
        """
        if self._address is None or self._address.amqp_port is None:
            raise ConfigurationError("moving contexts and changing partitions needs the broker: give its amqp:// URL")
        return self._address

    def _described(self) -> Layout:
        return describe_super_stream(self.check_broker(), self._super_stream)


def _named(rows: Iterable[PartitionRow], stream: str) -> PartitionRow | None:
    return next((row for row in rows if row.stream == stream), None)
