"""How far a serial consumer is in each partition, and what it holds back."""

from collections.abc import Sequence
from dataclasses import dataclass

from relatum.errors import StreamNotFound
from relatum.reading import BrokerAddress, StreamReader
from relatum.serial.consuming._following import Pause
from relatum.serial.consuming._statements import DRAINED
from relatum.serial.consuming._store import ConsumerStore


@dataclass(frozen=True, slots=True)
class HoldStatus:
    """Contexts that wait in a partition for what is before them in another.

    Attributes:
        move_id: The move that brought them.
        source: The partition they come from.
        fence_offset: That must be consumed past this offset.
        held: Messages that wait, as far as was stored.
        seconds: For how long.
    """

    move_id: int
    source: str
    fence_offset: int
    held: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PartitionStatus:
    """How far a consumer is in a partition.

    Attributes:
        stream: The partition.
        is_retired: Whether it takes no new contexts.
        position: The next offset to be consumed; None where the stream is gone, and all of it was.
        lag: How many offsets are behind that; not all of them are messages.
        holder: The member that has it: its host, process and a random part; None for none.
        holds: What waits there.
    """

    stream: str
    is_retired: bool
    position: int | None
    lag: int
    holder: str | None
    holds: tuple[HoldStatus, ...]


@dataclass(frozen=True, slots=True)
class SerialStatus:
    """A serial consumer, all its members together.

    Attributes:
        partitions: Each partition of the super stream, in their order.
        pauses: The pauses this member has measured.
    """

    partitions: tuple[PartitionStatus, ...]
    pauses: tuple[Pause, ...]

    @property
    def lag(self) -> int:
        """How many offsets are to be consumed in all partitions together."""
        return sum(partition.lag for partition in self.partitions)


def read_status(store: ConsumerStore, address: BrokerAddress, pauses: Sequence[Pause]) -> SerialStatus:
    """What the database and the broker say of a consumer."""
    positions, holds = store.status()
    with StreamReader.open(address) as reader:
        partitions = tuple(
            PartitionStatus(
                stream=row.stream,
                is_retired=row.state == "retired",
                position=None if row.position == DRAINED else row.position,
                lag=_lag(reader, row.stream, row.position),
                holder=row.holder,
                holds=tuple(
                    HoldStatus(hold.move_id, hold.source, hold.fence_offset, hold.held, hold.since_s)
                    for hold in holds
                    if hold.partition_id == row.partition_id
                ),
            )
            for row in positions
        )
    return SerialStatus(partitions, tuple(pauses))


def _lag(reader: StreamReader, stream: str, position: int) -> int:
    try:
        bounds = reader.bounds(stream)
    except StreamNotFound:
        return 0
    if bounds.first is None or bounds.last is None:
        return 0
    return max(0, bounds.last + 1 - max(position, bounds.first))
