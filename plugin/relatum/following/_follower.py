"""The follower: reads streams on its owner's event loop, and calls the owner with events."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Final, TypeGuard, TypeVar

from relatum import metrics
from relatum.checks import checked_count, checked_name
from relatum.errors import AccessRefused, ConfigurationError, RelatumError, StreamUnavailable, UsedAfterClose
from relatum.following._connections import Connections
from relatum.following._delivery import Delivery, Gathering
from relatum.following._events import Event, Failed, Hole, Replaced
from relatum.following._followed import Finding, Followed
from relatum.limits import INTEGER_MAX
from relatum.metrics import Counter, Gauge, reported
from relatum.processes import of_one_process
from relatum.reading import (
    Agreement,
    AnyBroker,
    BrokerAddress,
    NodeAddress,
    Position,
    SocketConnection,
    StreamReader,
    agreement,
)
from relatum.waiting import ComponentLoop, Outages, Server, Threads, in_thread

logger = logging.getLogger("relatum.follower")

_NOBODY: Final = logging.Logger("relatum.follower.nobody")
_NOBODY.disabled = True

HELPERS_MAX: Final = 3
"""Questions asked at the same time, so that one that waits for a frozen node delays no other."""

_Answer = TypeVar("_Answer")


@reported()
@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerStatistics:
    """The state of a follower, and what it has delivered."""

    followed: Annotated[int, Gauge("relatum_follower_streams", "Streams that are followed")]
    attached: Annotated[int, Gauge("relatum_follower_attached_streams", "Streams that are read now")]
    connections: Annotated[int, Gauge("relatum_follower_connections", "Connections that streams are read over")]
    held: Annotated[int, Gauge("relatum_follower_held_chunks", "Chunks read and not done with")]
    held_bytes: Annotated[int, Gauge("relatum_follower_held_bytes", "Bytes read and not done with")]
    records: Annotated[int, Counter("relatum_follower_records_total", "Records read and given")]
    holes: Annotated[int, Counter("relatum_follower_holes_total", "Times that retention was faster")]
    replaced: Annotated[int, Counter("relatum_follower_replaced_total", "Streams found deleted or cut off")]
    failures: Annotated[int, Counter("relatum_follower_failures_total", "Failed tries to follow a stream")]


def refuses_login(error: object) -> TypeGuard[RelatumError]:
    """Whether the broker refuses this login altogether, which waiting does not cure."""
    return isinstance(error, AccessRefused | ConfigurationError) and getattr(error, "stream", None) is None


class StreamFollower:
    """Follows streams for ever, each from a position on, on its owner's event loop. Not fork-safe.

    Errors are retried, and reported as events and to `outages`; methods do not raise them. All methods but `reader`,
    `is_let_in` and `statistics` are for the loop's thread. Close it before the loop is stopped.

    Args:
        loop: The loop.
        broker: The broker.
        on_event: Called with each event in the loop, in order for each stream, streams in turn. If it raises, the error
            is logged and the event delivered again; records are read again for that.
        gather_s: Seconds, up to 1, that reading pauses while many streams bring small chunks: delivered together, they
            cost a fraction. 0: no pauses.
        bytes_max: Bytes of all streams that are held until the owner is done with them; beyond, nothing is read.
            Unpacked records come on top: 8 MiB of a stream, about.
        window_bytes: Bytes of one stream that are in flight and held, about; one chunk at least.
        connections_max: Connections for following, of 256 streams each. Questions have their own.
        timeout_s: Seconds for connecting, and for an answer.
        heartbeat_s: Seconds of the heartbeat to agree on; a connection that is silent for 1.5 times that is dropped.
        outages: Logs what is waited for; None: the owner does that by the events.
        name: What following is called there.
        who: What following a stream is called there, by its name.
    """

    def __init__(
        self,
        loop: ComponentLoop,
        broker: AnyBroker,
        on_event: Callable[[Event], object],
        *,
        gather_s: float = 0.0,
        bytes_max: int = 64 << 20,
        window_bytes: int = 1 << 20,
        connections_max: int = 32,
        timeout_s: float = 10.0,
        heartbeat_s: int = 10,
        outages: Outages | None = None,
        name: str = "following of streams",
        who: Callable[[str], str] = "following of stream {!r}".format,
    ) -> None:
        self._loop = loop
        self._outages = outages or Outages(_NOBODY)
        self._name = name
        self._who = who
        self._address = BrokerAddress.of(broker)
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._opening = threading.Lock()
        self._reader: StreamReader | None = None
        # Apart from the owner's threads, whose questions to PostgreSQL must not queue behind these. One thread is left
        # for connecting, which must not queue behind questions about streams.
        self._threads = Threads(HELPERS_MAX, "relatum-follower-asks")
        self._asking = asyncio.Semaphore(HELPERS_MAX - 1)
        self.connections = Connections(
            loop,
            self._link,
            connections_max=connections_max,
            window_bytes=window_bytes,
            away=self._away,
            back=self._back,
        )
        self.delivery = Delivery(on_event, bytes_max, Gathering(gather_s), self.connections.pause)
        self._current: dict[str, Followed] = {}
        self._numbers = count(1)
        self._is_closed = False
        self.is_let_in = True
        """Whether the broker accepts the login, as far as is known."""
        of_one_process(self, "a follower")
        metrics.report(self)

    # --- streams ------------------------------------------------------------------------------------------------------

    def follow(self, stream: str, next_offset: int, *, known: Position | None = None) -> int:
        """Follow a stream from an offset on, again if it is followed already. Does not block.

        Args:
            stream: The stream's name; it need not exist yet.
            next_offset: The first offset to deliver.
            known: A message read of it before, by which the stream is recognised; None accepts any.

        Returns:
            A number, which all events of this following have.

        Raises:
            InvalidInput: An argument is of a wrong kind.
            UsedAfterClose: It was closed.
        """
        checked_name("stream", stream)
        checked_count("next_offset", next_offset, least=0, most=INTEGER_MAX)
        if self._is_closed:
            raise UsedAfterClose("the follower was closed: open another one")
        self.leave(stream)
        followed = self._current[stream] = Followed(self, stream, next(self._numbers), next_offset, known)
        followed.task = self._loop.spawn(followed.run())
        return followed.number

    def leave(self, stream: str) -> None:
        """Stop following a stream: no events of it are delivered from now on. Does not block."""
        followed = self._current.pop(stream, None)
        if followed is None:
            return
        followed.end()
        self._outages.forget(self._who(stream))
        if not self._current:
            # Nothing is left that would notice when the broker is back.
            self._outages.forget(self._name)

    def done(self, *events: Event) -> None:
        """Release records, and grant their streams credit. In any order; idempotent."""
        self.delivery.done(events)

    # --- state and questions ------------------------------------------------------------------------------------------

    def reader(self) -> StreamReader:
        """The follower's reader, for questions; the follower closes it. Blocks while it is opened: not for the loop.

        Raises:
            BrokerUnavailable, AccessRefused, ConfigurationError: It cannot be opened now.
            UsedAfterClose: The follower was closed.
        """
        # Opened once for all callers. Closing does not wait for that.
        with self._opening:
            if self._reader is None and not self._is_closed:
                self._reader = StreamReader.open(
                    self._address, timeout_s=self._timeout_s, heartbeat_s=self._heartbeat_s
                )
            if self._reader is None or self._is_closed:
                self.close_reader()
                raise UsedAfterClose("the follower was closed: open another one")
            return self._reader

    @property
    def is_attached(self) -> bool:
        """Whether any stream is read now, and was recognised."""
        return any(each.is_attached and each.is_read for each in list(self._current.values()))

    def statistics(self) -> FollowerStatistics:
        """Its state, and what it has delivered. For any thread."""
        delivery = self.delivery
        return FollowerStatistics(
            followed=len(self._current),
            attached=sum(each.is_attached and each.is_read for each in list(self._current.values())),
            connections=len(self.connections),
            held=delivery.count,
            held_bytes=delivery.bytes,
            records=delivery.records,
            holes=delivery.told[Hole],
            replaced=delivery.told[Replaced],
            failures=delivery.told[Failed],
        )

    async def look(self, stream: str, known: Position | None, is_end: bool) -> Finding:
        """Ask the stream's leader whether a known message is unchanged, and where the stream begins.

        `is_end`: The beginning does not matter if the message is unchanged or expired. Raises `StreamUnavailable` if
        there is no answer now.
        """
        return await self._ask(self._look, stream, known, is_end)

    def _look(self, stream: str, known: Position | None, is_end: bool) -> Finding:
        reader = self.reader()
        found = None if known is None else agreement(reader, stream, known)
        if found is Agreement.UNKNOWN:
            raise StreamUnavailable(
                f"{stream!r} does not show offset {known and known.offset}, which was read: a node is "
                "behind, or starts, or the leader cannot be asked; nothing is concluded",
                stream=stream,
            )
        is_enough = is_end and found in (Agreement.SAME, Agreement.EXPIRED)
        return Finding(found, None if is_enough else reader.bounds(stream))

    async def why_missing(self, stream: str) -> RelatumError | None:
        """Why a node does not know a stream: it does not exist, or is a queue. None if it was declared just now."""
        return await self._ask(self._why_missing, stream)

    def _why_missing(self, stream: str) -> RelatumError | None:
        try:
            self.reader().bounds(stream)
        except StreamUnavailable:
            return None
        except RelatumError as error:
            return error
        return None

    async def _ask(self, function: Callable[..., _Answer], *args: object) -> _Answer:
        async with self._asking:
            return await self._loop.ask(function, *args, threads=self._threads)

    async def _link(self, node: NodeAddress | None) -> SocketConnection:
        return await in_thread(self._threads, self._open_link, node, returned=SocketConnection.close)

    def _open_link(self, node: NodeAddress | None) -> SocketConnection:
        """Open a connection to a node; None: the node that is connected first."""
        return self.reader().link(node)

    # --- from streams and connections ---------------------------------------------------------------------------------

    def on_attached(self, followed: Followed) -> None:
        """A stream is read, and was recognised."""
        self._outages.over(self._who(followed.stream))

    def on_failed(self, followed: Followed, error: Exception) -> None:
        """A stream cannot be read now."""
        if not isinstance(error, RelatumError):
            logger.error("following of stream %r has a defect, and goes on", followed.stream, exc_info=error)
        self._outages.failed(self._who(followed.stream), error)
        self.delivery.put(followed, Failed(followed.stream, followed.number, error))

    def _away(self, error: Exception) -> None:
        """No stream can be read: the broker is away, or refuses the login."""
        self.is_let_in = not refuses_login(error)
        if self._current:
            self._outages.failed(self._name, error)
        self.delivery.put_for_all(Failed(None, 0, error))

    def _back(self) -> None:
        self.is_let_in = True
        self._outages.answered(Server.BROKER)
        self._outages.over(self._name)

    # --- end ----------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop following: close connections at once, then the reader in a thread. Idempotent."""
        if self._is_closed:
            return
        self.end()
        try:
            await in_thread(self._threads, self.close_reader)
        finally:
            self._threads.shutdown()

    def close_reader(self) -> None:
        """Close the reader, as `close` does. Blocks: not for the loop."""
        if self._reader is not None:
            self._reader.close()

    def end(self) -> None:
        """Stop following, and close all connections but the reader's."""
        self._is_closed = True
        for stream in list(self._current):
            self.leave(stream)
        self.connections.close()
        metrics.retire(self)
