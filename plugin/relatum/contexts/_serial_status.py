"""The status of serial consumers (positions, lag, held messages), and the deletion of a consumer's positions."""

from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

from relatum.common.checks import checked_name
from relatum.contexts._serial_store import DRAINED, HOLDS_SHOWN, LOCK_CONSUMER, PARTITIONS
from relatum.errors import Conflict, NotFound, StreamNotFound
from relatum.reading import Broker, BrokerAddress, StreamReader
from relatum.store.database import AnyDatabase, Database, sql

_CONSUMERS: Final = sql("""
    SELECT t.vhost, c.name, c.consumer_id
    FROM relatum.serial_consumers c JOIN relatum.super_streams t ON t.super_stream_id = c.super_stream_id
    WHERE t.name = :super_stream::text
    ORDER BY t.vhost, c.name""")

MEMBERS_UP: Final = sql("""
    SELECT holder FROM relatum.serial_members
    WHERE consumer_id = :consumer_id::integer AND lease_expires_at >= clock_timestamp()
    LIMIT 1""")

_FORGET_CONSUMER: Final = sql("DELETE FROM relatum.serial_consumers WHERE consumer_id = :consumer_id::integer")

# A partition that was added while no member ran has no position yet: it is read from its start.
POSITIONS_SHOWN: Final = sql(f"""
    SELECT s.partition_id, s.stream, s.state, coalesce(serial_positions.position, 0) AS position,
        CASE WHEN {PARTITIONS.is_held} THEN serial_positions.holder END AS holder
    FROM relatum.serial_consumers c
    JOIN relatum.super_stream_partitions s ON s.super_stream_id = c.super_stream_id
    LEFT JOIN relatum.serial_positions
        ON serial_positions.consumer_id = c.consumer_id AND serial_positions.partition_id = s.partition_id
    WHERE c.consumer_id = :consumer_id::integer
    ORDER BY s.place, s.partition_id""")


@dataclass(frozen=True, slots=True)
class HoldStatus:
    """A hold: moved contexts whose messages wait until their earlier messages in another partition are consumed.

    Attributes:
        move_id: The move of the contexts.
        source: The partition that the contexts left.
        fence_offset: The offset in `source` that must be consumed first.
        held: The number of held messages, as last stored.
        seconds: The age of the hold, in seconds.
        is_over: Whether `source` is consumed that far: delivery resumes when a member reads this partition.
    """

    move_id: int
    source: str
    fence_offset: int
    held: int
    seconds: float
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """The status of a consumer in one partition.

    Attributes:
        stream: The partition's stream.
        is_retired: Whether the partition is retired.
        position: The next offset to consume; None if all messages were consumed and the stream was then deleted.
        lag: The number of offsets from `position` to the end; not every offset is a message.
        holder: The member that reads the partition (host, process id and a random part), or None.
        holds: The open holds.
    """

    stream: str
    is_retired: bool
    position: int | None
    lag: int
    holder: str | None
    holds: tuple[HoldStatus, ...]


@dataclass(frozen=True, slots=True)
class SerialStatus:
    """The status of a serial consumer, for all its members.

    Attributes:
        partitions: The partitions of the super stream, in order.
    """

    partitions: tuple[PartitionStatus, ...]

    @property
    def lag(self) -> int:
        """The sum of the partitions' lags."""
        return sum(partition.lag for partition in self.partitions)


def read_status(database: Database, consumer_id: int, reader: StreamReader) -> SerialStatus:
    of_consumer = {"consumer_id": consumer_id}
    positions = database.rows(POSITIONS_SHOWN, of_consumer)
    holds = database.rows(HOLDS_SHOWN, of_consumer)
    partitions = tuple(
        PartitionStatus(
            stream=row.stream,
            is_retired=row.state == "retired",
            position=None if row.position == DRAINED else row.position,
            lag=_lag(reader, row.stream, row.position),
            holder=row.holder,
            holds=tuple(
                HoldStatus(hold.move_id, hold.source, hold.fence_offset, hold.held, hold.since_s, hold.is_complete)
                for hold in holds
                if hold.partition_id == row.partition_id
            ),
        )
        for row in positions
    )
    return SerialStatus(partitions)


def consumers(super_stream: str, *, broker: str | Broker, database: AnyDatabase) -> dict[str, SerialStatus]:
    """Return the status of all serial consumers of a super stream, by the consumer's name.

    Args:
        super_stream: The super stream's name.
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.

    Raises:
        DatabaseUnavailable, BrokerUnavailable: a server does not answer.
    """
    checked_name("super_stream", super_stream)
    address = BrokerAddress.of(broker)
    with closing(Database(database, refusing=None)) as shared:
        rows = shared.rows(_CONSUMERS, {"super_stream": super_stream})
        ids = {row.name: row.consumer_id for row in rows if row.vhost == address.vhost}
        if not ids:
            return {}
        with StreamReader.open(address) as reader:
            return {name: read_status(shared, consumer_id, reader) for name, consumer_id in ids.items()}


def forget_consumer(super_stream: str, name: str, *, database: AnyDatabase, vhost: str = "/") -> bool:
    """Delete the stored positions of a serial consumer, so that retired partitions can be deleted without it.

    A consumer that later starts with this name is new.

    Args:
        super_stream: The super stream's name.
        name: The consumer's name.
        database: PostgreSQL's URL, or a `Database`.
        vhost: The super stream's virtual host. Default: "/".

    Returns:
        False if there is no consumer of this name.

    Raises:
        NotFound: the consumer belongs to another virtual host, which the error names.
        Conflict: the consumer has live members; close them first, or wait until their leases have expired.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    checked_name("super_stream", super_stream)
    checked_name("name", name)
    checked_name("vhost", vhost)
    with closing(Database(database, refusing=None)) as shared, shared.transaction() as connection:
        rows = connection.execute(_CONSUMERS, {"super_stream": super_stream}).all()
        ids = {row.vhost: row.consumer_id for row in rows if row.name == name}
        if vhost in ids:
            of_consumer = {"consumer_id": ids[vhost]}
            connection.execute(LOCK_CONSUMER, of_consumer)
            holder = connection.scalar(MEMBERS_UP, of_consumer)
            if holder is not None:
                raise Conflict(
                    f"consumer {name!r} cannot be forgotten while its member {holder} runs: close the member first"
                )
            return bool(connection.execute(_FORGET_CONSUMER, of_consumer).rowcount)
    if ids:
        others = ", ".join(map(repr, ids))
        raise NotFound(
            f"virtual host {vhost!r} has no consumer {name!r} of {super_stream!r}: pass vhost=; it is in {others}"
        )
    return False


def _lag(reader: StreamReader, stream: str, position: int) -> int:
    with suppress(StreamNotFound):
        return reader.bounds(stream).lag(position)
    return 0
