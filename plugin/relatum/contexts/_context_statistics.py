"""What routers and serial consumers count."""

from dataclasses import dataclass
from typing import Annotated

from relatum.metrics import Counter, Distribution, Gauge, Observed, reported


@reported("super_stream", "kind")
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatistics:
    """What a router has counted, and what it remembers.

    Attributes:
        published: Messages of a context, or an affinity set, that were published.
        unnamed: Messages of none, which went by the rule.
        asked: Messages of which the database was asked before they were told of, since no look was young enough.
        adopted: Messages that a move had overtaken, and that were taken in again where their context is now.
        move_wait_s: Seconds that messages waited for a move to end.
        known_names: Contexts, or sets, whose partition is remembered.
        unchecked: Messages that are published and not known to count yet.
    """

    published: Annotated[int, Counter("relatum_router_published_total", "Messages of a context or set published")]
    unnamed: Annotated[int, Counter("relatum_router_unnamed_total", "Messages of no context or set published")]
    asked: Annotated[int, Counter("relatum_router_asked_total", "Messages of which the database had to be asked")]
    adopted: Annotated[int, Counter("relatum_router_adopted_total", "Messages taken in again behind a move")]
    move_wait_s: Annotated[
        Observed, Distribution("relatum_router_move_wait_seconds", "Time that messages waited for a move to end")
    ]
    known_names: Annotated[
        int, Gauge("relatum_router_known_names", "Contexts or sets whose partition is remembered now")
    ]
    unchecked: Annotated[
        int, Gauge("relatum_router_unchecked_messages", "Messages published and not known to count yet")
    ]


@reported("super_stream", "consumer")
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
