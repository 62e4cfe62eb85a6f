"""`StreamFollower`: reads streams on its owner's event loop, and passes events to the owner."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any, Final, TypeGuard, TypeVar

from relatum import metrics
from relatum.common.processes import refuse_in_child
from relatum.common.waiting import ComponentLoop, Outages, Server, Threads, in_thread
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    ReadTimeout,
    RelatumError,
    StreamNotHere,
    StreamUnavailable,
    UsedAfterClose,
)
from relatum.metrics import Counter, Gauge, reported
from relatum.reading import (
    Agreement,
    AnyBroker,
    NodeAddress,
    Position,
    SocketConnection,
    StreamBounds,
    StreamPlaces,
    StreamReader,
    agreement,
    bounds_of_known,
)
from relatum.reading.following._connections import Connections
from relatum.reading.following._delivery import Delivery, Event, Failed, Gathering, Hole, Records, Replaced
from relatum.reading.following._followed import Finding, Followed

_DISABLED_LOGGER: Final = logging.Logger("relatum.follower.nobody")
_DISABLED_LOGGER.disabled = True

HELPERS_MAX: Final = 3
"""Maximum concurrent blocking calls, so that a call that waits for a frozen node does not delay the others."""

_Answer = TypeVar("_Answer")


@reported()
@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerStatistics:
    """The state of a follower, and counts of its events."""

    followed: Annotated[int, Gauge("relatum_follower_streams", "Followed streams")]
    attached: Annotated[int, Gauge("relatum_follower_attached_streams", "Streams being read")]
    connections: Annotated[int, Gauge("relatum_follower_connections", "Connections for reading streams")]
    held: Annotated[int, Gauge("relatum_follower_held_chunks", "Chunks read and not released")]
    held_bytes: Annotated[int, Gauge("relatum_follower_held_bytes", "Bytes read and not released")]
    records: Annotated[int, Counter("relatum_follower_records_total", "Records delivered")]
    holes: Annotated[int, Counter("relatum_follower_holes_total", "Times that retention dropped unread records")]
    replaced: Annotated[int, Counter("relatum_follower_replaced_total", "Times a stream was replaced or truncated")]
    failures: Annotated[int, Counter("relatum_follower_failures_total", "Failed attempts to follow a stream")]


def refuses_login(error: object) -> TypeGuard[RelatumError]:
    """Whether the broker refuses the login itself, not one stream. Retries fail until the configuration changes."""
    return isinstance(error, AccessRefused | ConfigurationError) and getattr(error, "stream", None) is None


def is_outage(error: object) -> TypeGuard[RelatumError]:
    """Whether no stream can be read: the broker is unreachable, or refuses the login."""
    return isinstance(error, BrokerUnavailable | ReadTimeout) or refuses_login(error)


def _check_gap(reader: StreamReader, stream: str, gap: tuple[int, int], bounds: StreamBounds) -> None:
    """Raise an error unless the leader has no message in the gap, either: each node applies retention on its own."""
    if not (bounds.is_proven or bounds.holds(gap[0])):
        message = (
            f"It is unknown whether {stream!r} still has messages from offset {gap[0]} on: its leader is unreachable, "
            "and other nodes may have dropped more; the follower will query again."
        )
        raise StreamUnavailable(message, stream=stream)
    if bounds.first is not None and bounds.first < gap[1]:
        # An iteration reads from the leader.
        with closing(reader.iterate(stream, gap[0], stop=gap[1])) as messages:
            if next(messages, None) is not None:
                message = f"The node has dropped messages of {stream!r} from offset {gap[0]} on, its leader has not."
                raise StreamNotHere(message, stream=stream)


class StreamFollower:
    """Follows streams forever, each from a given position, on its owner's event loop. Not fork-safe.

    It retries after errors, and reports them as events and to `outages`; methods do not raise them. Call all methods
    except `statistics` in the loop's thread. Close the follower before you stop the loop. `reader` is for blocking
    queries; the follower closes it.

    `on_event`: Called in the loop with each event, in order per stream, round robin. If it raises, the error is logged
    and the event is delivered again; records are read again for this.
    `gather_s`: Seconds that reading pauses while many streams send small chunks, which cost less together. Default: 0.
    `name`, `who`: How `outages` names the follower as a whole, and the following of one stream.
    `options`: The options of `StreamReader.open`. A connection that is silent for 1.5 times `heartbeat_s` is closed.
    """

    def __init__(
        self,
        loop: ComponentLoop,
        broker: AnyBroker,
        on_event: Callable[[Event], object],
        *,
        gather_s: float = 0.0,
        outages: Outages | None = None,
        name: str = "following of streams",
        who: Callable[[str], str] = "following of stream {!r}".format,
        **options: Any,
    ) -> None:
        self.loop = loop
        self._outages = outages or Outages(_DISABLED_LOGGER)
        self._name = name
        self._who = who
        self.reader = StreamReader(broker, **options)
        # Separate from the owner's threads, so that its calls to PostgreSQL do not queue behind these. Queries leave
        # one thread free, so that connecting does not queue behind them.
        self._threads = Threads(HELPERS_MAX, "relatum-follower-queries")
        self._query_slots = asyncio.Semaphore(HELPERS_MAX - 1)
        self.connections = Connections(self)
        self.delivery = Delivery(on_event, Gathering(gather_s), self.connections.pause)
        self._current: dict[str, Followed] = {}
        self._numbers = count(1)
        self.is_closed = False
        self.may_log_in = True
        """False after the broker has refused the login, until a connection succeeds. Any thread may read it."""
        refuse_in_child(self, "a follower")
        metrics.report(self)

    # --- streams ------------------------------------------------------------------------------------------------------

    def follow(self, stream: str, next_offset: int, *, known: Position | None = None) -> int:
        """Follow a stream from an offset, and return the number that identifies this following in its events.

        The stream need not exist yet. An earlier following of the stream ends.
        `known`: A message that identifies the stream; None accepts any stream.
        """
        if self.is_closed:
            raise UsedAfterClose("the follower was closed: open another one")
        self.leave(stream)
        followed = self._current[stream] = Followed(self, stream, next(self._numbers), next_offset, known)
        followed.task = self.loop.spawn(followed.run())
        return followed.number

    def leave(self, stream: str) -> None:
        """Stop following a stream. No more of its events are delivered. Idempotent; does not block."""
        followed = self._current.pop(stream, None)
        if followed is None:
            return
        followed.end()
        self._outages.forget(self._who(stream))
        if not self._current:
            # Without streams, nothing would report the end of the outage.
            self._outages.forget(self._name)

    def done(self, *events: Event) -> None:
        """Release records, in any order, so that the broker may send more of their streams. Idempotent."""
        self.delivery.done(events)

    # --- state and queries --------------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether any stream is being read and is the known one."""
        return any(each.is_attached and each.is_read for each in list(self._current.values()))

    def statistics(self) -> FollowerStatistics:
        """Return the follower's state and counts. Thread-safe."""
        delivery = self.delivery
        return FollowerStatistics(
            followed=len(self._current),
            attached=sum(each.is_attached and each.is_read for each in list(self._current.values())),
            connections=len(self.connections),
            held=delivery.count,
            held_bytes=delivery.bytes,
            records=delivery.counts[Records],
            holes=delivery.counts[Hole],
            replaced=delivery.counts[Replaced],
            failures=delivery.counts[Failed],
        )

    async def look(self, stream: str, known: Position | None, gap: tuple[int, int] | None) -> Finding:
        """Query the stream's leader: whether a known message is unchanged, and the stream's bounds.

        `gap`: The offset after the last record, and the first offset of the next chunk. None: there is no gap; the
        bounds are omitted if the message is unchanged or expired.
        Raises `StreamUnavailable` if the leader gives no answer now, `StreamNotHere` if it has messages in the gap.
        """
        return await self._query(self._query_leader, stream, known, gap)

    def _query_leader(self, stream: str, known: Position | None, gap: tuple[int, int] | None) -> Finding:
        found = None if known is None else agreement(self.reader, stream, known)
        if found is Agreement.UNKNOWN:
            raise StreamUnavailable(
                f"stream {stream!r} did not return offset {known and known.offset}, read before: a node lags or is "
                "starting, or the leader is unreachable; the follower will query again",
                stream=stream,
            )
        if gap is None and found in (Agreement.SAME, Agreement.EXPIRED):
            return Finding(found, None)
        bounds = bounds_of_known(self.reader, stream)
        if gap is not None and gap[0] < gap[1]:
            _check_gap(self.reader, stream, gap, bounds)
        return Finding(found, bounds)

    async def missing_error(self, stream: str) -> RelatumError | None:
        """Return the error of a stream that a node does not know: it is missing, or a queue. None if it exists."""
        try:
            await self._query(self.reader.bounds, stream)
        except StreamUnavailable:
            return None
        except RelatumError as error:
            return error
        return None

    async def _query(self, function: Callable[..., _Answer], *args: object) -> _Answer:
        async with self._query_slots:
            return await self.loop.ask(function, *args, threads=self._threads)

    async def nodes_of(self, stream: str) -> StreamPlaces:
        return await self._query(self.reader.places, stream)

    async def connect(self, node: NodeAddress | None) -> SocketConnection:
        return await in_thread(self._threads, self.reader.link, node, returned=SocketConnection.close)

    # --- from streams and connections ---------------------------------------------------------------------------------

    def on_attached(self, followed: Followed) -> None:
        self._outages.over(self._who(followed.stream))

    def on_failed(self, followed: Followed, error: Exception) -> None:
        self._outages.failed(self._who(followed.stream), error)
        self.delivery.put(followed, Failed(followed.stream, followed.number, error))

    def on_outage(self, error: Exception) -> None:
        """Report that no stream can be read: the broker is unreachable, or refuses the login."""
        self.may_log_in = not refuses_login(error)
        if self._current:
            self._outages.failed(self._name, error)
        self.delivery.put_for_all(Failed(None, 0, error))

    def on_recovery(self) -> None:
        self.may_log_in = True
        self._outages.answered(Server.BROKER)
        self._outages.over(self._name)

    # --- end ----------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close all connections. A thread closes the reader, even if this task is cancelled. Idempotent."""
        if not self.is_closed:
            self.end()
            closing = self._threads.submit(self.reader.close)
            self._threads.shutdown()
            await asyncio.shield(asyncio.wrap_future(closing))

    def end(self) -> None:
        """Stop following, and close all connections except the reader's."""
        self.is_closed = True
        for stream in list(self._current):
            self.leave(stream)
        self.connections.close()
        metrics.retire(self)


# --- reaching the broker ----------------------------------------------------------------------------------------------

CUT_OFF_S: Final = 15.0
"""Seconds without the broker after which other members may take a member's streams. A silent connection is detected in
the same time."""

_PROBES: Final = 3
"""Number of queries in `CUT_OFF_S`, if no attached stream shows that the broker is reachable."""

RETURN_S: Final = 5.0
"""Seconds in which all members reconnect after a restart of the broker: a follower's longest pause."""

_OUTAGE: Final = "reaching the broker"


class BrokerReach:
    """Checks, in the loop, whether a member that shares streams reaches the broker; if not, others take its streams.

    A member may reach PostgreSQL but not the broker: the broker's node or the network is down, or a password or
    certificate has expired. Without this check, it would renew its lease, and no member would read its streams.

    While any stream of `follower` is attached, the broker is reachable. During an outage with none attached, this
    queries the stream that `stream` returns. There are no other queries, since a group may have many members.

    `is_cut_off`: Whether the broker has been unreachable for so long that others may take the member's streams.
    `may_take`: Whether the member may take streams. False if it was cut off until recently or may be cut off soon: if
    all members lose the broker, each should return to its own streams.
    """

    def __init__(self, follower: StreamFollower, outages: Outages, stream: Callable[[], str]) -> None:
        self.is_cut_off, self.may_take = False, True
        self._follower = follower
        self._outages = outages
        self._stream = stream
        self._is_probing = False
        self._cut_off_at = -math.inf
        self._reached_at = self._probed_at = self._checked_at = time.monotonic()

    def look(self) -> None:
        """Update the attributes; call this at least every few seconds."""
        now = time.monotonic()
        was_suspended, self._checked_at = now - self._checked_at > CUT_OFF_S / 2, now
        if was_suspended and not self.is_cut_off:
            # The process was suspended, which proves nothing about the broker.
            self._reached_at = max(self._reached_at, now - CUT_OFF_S / _PROBES)
        is_up = self._outages.is_up(Server.BROKER) and self._follower.may_log_in
        is_attached = self._follower.is_attached
        if is_attached:
            # The outage is over, and no query follows that would report this.
            self._outages.over(_OUTAGE)
        if is_attached or (is_up and not self.is_cut_off):
            self._reached_at = now
        elif (
            not self._is_probing
            and not self._follower.is_closed
            and (self.is_cut_off or now - self._probed_at >= CUT_OFF_S / _PROBES)
        ):
            self._is_probing, self._probed_at = True, now
            self._follower.loop.spawn(self._probe(self._stream()))
        silent_s = now - self._reached_at
        self.is_cut_off = silent_s >= CUT_OFF_S
        if self.is_cut_off:
            self._cut_off_at = now
        self.may_take = silent_s < CUT_OFF_S / _PROBES and now - self._cut_off_at >= RETURN_S

    async def _probe(self, stream: str) -> None:
        try:
            error = await self._follower.missing_error(stream)
            if is_outage(error):
                self._outages.failed(_OUTAGE, error)
            else:
                self._reached_at = time.monotonic()
                self._outages.answered(Server.BROKER)
                self._outages.over(_OUTAGE)
        finally:
            self._is_probing = False
