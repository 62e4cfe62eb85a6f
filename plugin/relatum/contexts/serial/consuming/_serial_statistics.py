"""What a serial consumer's member tells of itself."""

from dataclasses import dataclass
from typing import Annotated

from relatum.metrics import Counter, Distribution, Gauge, Observed, reported


@reported("serial consumer", "super_stream", "consumer")
@dataclass(frozen=True, slots=True, kw_only=True)
class SerialStatistics:
    """What one member of a serial consumer has counted, and what it has.

    Attributes:
        partitions: Partitions it reads now.
        delivered: Messages handed to the application; again, where a batch is given back.
        acknowledged: Messages whose position is stored.
        held_messages: Messages that wait for what their context has in another partition.
        held_bytes: Their bytes.
        pause_s: Seconds that moved contexts waited in their new partition.
    """

    partitions: Annotated[int, Gauge("relatum_serial_partitions", "Partitions that this process reads")]
    delivered: Annotated[int, Counter("relatum_serial_delivered_total", "Messages handed to the application")]
    acknowledged: Annotated[int, Counter("relatum_serial_acknowledged_total", "Messages acknowledged")]
    held_messages: Annotated[int, Gauge("relatum_serial_held_messages", "Messages held back behind a move")]
    held_bytes: Annotated[int, Gauge("relatum_serial_held_bytes", "Bytes held back behind a move")]
    pause_s: Annotated[
        Observed, Distribution("relatum_serial_pause_seconds", "Time that a moved context waited in its new partition")
    ]
