"""The follower: streams are read on the loop of its owner, to whom all that comes of them is given."""

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
from relatum.reading import Agreement, Broker, BrokerAddress, Position, SocketConnection, StreamReader, agreement
from relatum.waiting import ComponentLoop, Outages, Server, Threads, in_thread

logger = logging.getLogger("relatum.follower")

_NOBODY: Final = logging.Logger("relatum.follower.nobody")
_NOBODY.disabled = True

HELPERS_MAX: Final = 3
"""Questions that are asked at once: one that waits for a node that is frozen stops no other."""

_Answer = TypeVar("_Answer")


@reported("follower")
@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerStatistics:
    """How a follower stands, and what it has given."""

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
    """Whether the broker lets nobody in by this login, whatever stream it is about: waiting alone does not cure it."""
    return isinstance(error, AccessRefused | ConfigurationError) and getattr(error, "stream", None) is None


class StreamFollower:
    """Follows streams for ever, each from a position on, on the loop of its owner; of one process.

    Whatever goes wrong is tried again, and told as an event and to `outages`: no method raises it. All is for the
    loop's thread but `reader`, `is_let_in` and `statistics`. To be closed before the loop is stopped.

    Args:
        loop: The loop.
        broker: The broker.
        on_event: Called with each event, in the loop: each stream's in order, streams in turn. What it raises is
            logged, and that event is given again: records are read anew.
        gather_s: Seconds for which reading waits for more where little chunks come of many streams, up to 1; they are
            handed on together then, at a fraction of the cost. 0: nothing waits.
        bytes_max: Bytes of what was read that are held until the owner is done with them, of all streams together;
            past that, nothing is read. What chunks unpack to comes to it: 8 MiB of a stream, about.
        window_bytes: Bytes of one stream that are under way and held, about, and one chunk at least.
        connections_max: Connections that streams are followed over: each takes 256. Questions have their own.
        timeout_s: Seconds for connecting, and for the answer to a question.
        heartbeat_s: Seconds of heartbeat asked for: a connection that is silent for 1.5 times that is given up.
        outages: Where to tell what waits; None: nowhere, since the owner tells what the events say.
        name: What following as a whole is called there.
        who: What following a stream is called there, by its name.
    """

    def __init__(
        self,
        loop: ComponentLoop,
        broker: BrokerAddress | str,
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
        # The owner's questions, to PostgreSQL, do not queue behind these, and opening a connection not behind those
        # about streams.
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
        """Whether the broker takes the login of what follows, as far as it has said."""
        of_one_process(self, "a follower")
        metrics.report(self)

    # --- what is followed ---------------------------------------------------------------------------------------------

    def follow(self, stream: str, next_offset: int, *, known: Position | None = None) -> int:
        """Follow a stream from an offset on; one that is followed begins anew. It waits for nothing.

        Args:
            stream: The stream's name; it need not be there yet.
            next_offset: The first offset that is wanted.
            known: A message that was read of it, by which the stream is known again; None takes it as it is.

        Returns:
            The following's number, which all its events have.

        Raises:
            InvalidInput: an argument cannot be.
            UsedAfterClose: it was closed.
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
        """Follow a stream no more: nothing of it is given from now on. It waits for nothing."""
        followed = self._current.pop(stream, None)
        if followed is None:
            return
        followed.end()
        self._outages.forget(self._who(stream))
        if not self._current:
            # Nothing is waited for any more, and nobody would notice that it is back.
            self._outages.forget(self._name)

    def done(self, *events: Event) -> None:
        """Hold records no more, and let their streams have more. In any order; idempotent."""
        self.delivery.done(events)

    # --- asked --------------------------------------------------------------------------------------------------------

    def reader(self) -> StreamReader:
        """The reader by which questions are asked: of this follower, which closes it. It waits: not in the loop.

        Raises:
            BrokerUnavailable, AccessRefused, ConfigurationError: none can be opened now.
            UsedAfterClose: it was closed.
        """
        # One opens for all who ask; closing waits for nobody.
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
        """Whether any stream is read now, and is the one that is known."""
        return any(each.is_attached and each.is_read for each in list(self._current.values()))

    def statistics(self) -> FollowerStatistics:
        """How it stands."""
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
        """Ask the stream's leader how it stands to what is known, and where it begins.

        `is_end` says that its begin need not be asked for where it agrees. Where nobody can say now, it raises
        `StreamUnavailable`.
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
        """Why a node does not know a stream: there is none, or a queue of that name. None where it was declared now."""
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

    async def _link(self, node: Broker | None) -> SocketConnection:
        return await in_thread(self._threads, self._open_link, node, returned=SocketConnection.close)

    def _open_link(self, node: Broker | None) -> SocketConnection:
        """A connection to a node, logged in; None for the node that is connected first."""
        return self.reader().link(node)

    # --- what its parts tell ------------------------------------------------------------------------------------------

    def on_attached(self, followed: Followed) -> None:
        """A stream is read, and is the one that is known."""
        self._outages.over(self._who(followed.stream))

    def on_failed(self, followed: Followed, error: Exception) -> None:
        """A stream cannot be read now."""
        if not isinstance(error, RelatumError):
            logger.error("following of stream %r has a defect, and goes on", followed.stream, exc_info=error)
        self._outages.failed(self._who(followed.stream), error)
        self.delivery.put(followed, Failed(followed.stream, followed.number, error))

    def _away(self, error: Exception) -> None:
        """No stream can be read: the broker is away, or lets nobody in."""
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
        """End all: connections at once, then the reader's, in a thread. Idempotent."""
        if self._is_closed:
            return
        self.end()
        try:
            await in_thread(self._threads, self.close_reader)
        finally:
            self._threads.shutdown()

    def close_reader(self) -> None:
        """Close the reader, which `close` does, too. It waits: not in the loop."""
        if self._reader is not None:
            self._reader.close()

    def end(self) -> None:
        """Follow nothing more, and close all connections but the reader's."""
        self._is_closed = True
        for stream in list(self._current):
            self.leave(stream)
        self.connections.close()
        metrics.retire(self)
