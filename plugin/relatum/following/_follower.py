"""The follower: what its owner calls, from any thread, and the one thread that reads."""

import logging
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Final, Self

from relatum import metrics
from relatum.checks import checked_count, checked_name, checked_seconds
from relatum.client_logs import own_connection
from relatum.closing import Closing
from relatum.errors import UsedAfterClose
from relatum.following._desk import Desk, Names
from relatum.following._events import Event, Failed, Hole, Records, Replaced
from relatum.following._followed import Followed, Gathering
from relatum.following._helpers import Questions
from relatum.following._loop import Loop
from relatum.following._shelf import Shelves
from relatum.limits import INTEGER_MAX
from relatum.metrics import Counter, Gauge, reported
from relatum.processes import of_one_process
from relatum.reading import BrokerAddress, Position, StreamReader
from relatum.waiting import Outages

logger = logging.getLogger("relatum.follower")

_NOBODY: Final = logging.Logger("relatum.follower.nobody")
_NOBODY.disabled = True

BYTES_MIN: Final = 1 << 20
"""The least bound on what is held: one chunk."""

WINDOW_BYTES: Final = 1 << 20
"""Bytes of one stream by default: as much as one large chunk."""

CLOSE_S: Final = 10.0
"""Seconds that closing waits by default."""

AFTER_DEFECT_S: Final = 1.0
"""Seconds between two defects of our own, so that none fills the log or a processor."""


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    """How streams are followed.

    Attributes:
        bytes_max: Bytes of what was read that are held until the taker is done with them, of all streams together;
            past that, nothing is read. From 1 MiB on. What chunks unpack to comes to it, of pieces that were taken.
        window_bytes: Bytes of one stream that are under way and held, about, and one chunk at least. Default 1 MiB:
            enough where the taker is soon done with what it takes.
        connections_max: Connections that streams are followed over: each takes 256. Questions have their own.
        timeout_s: Seconds for connecting, and for the answer to a question.
        heartbeat_s: Seconds of heartbeat asked for: a connection that is silent for 1.5 times that is given up.
        gather_s: Seconds for which reading waits for more where little chunks come of many streams, up to 1; they are
            handed on together then, at a fraction of the cost. 0 (default): nothing waits.
    """

    bytes_max: int = 64 << 20
    window_bytes: int = WINDOW_BYTES
    connections_max: int = 32
    timeout_s: float = 10.0
    heartbeat_s: int = 10
    gather_s: float = 0.0

    def __post_init__(self) -> None:
        checked_count("bytes_max", self.bytes_max, least=BYTES_MIN)
        checked_count("window_bytes", self.window_bytes, least=1)
        checked_count("connections_max", self.connections_max, least=1)
        checked_seconds("timeout_s", self.timeout_s)
        checked_count("heartbeat_s", self.heartbeat_s, least=0)
        checked_seconds("gather_s", self.gather_s, most=1.0)


@reported("follower")
@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerStatistics:
    """How a follower stands, and what it has given.

    Attributes:
        followed: Streams that are followed.
        attached: Those of them that are read now, and are the ones that are known.
        connections: Connections that they are read over.
        held: Chunks that the taker is not done with.
        held_bytes: Their bytes.
        records: Records given.
        holes: Times that retention had taken what was to be read.
        replaced: Streams that were not what had been read of them.
        failures: Tries that have failed, and were repeated.
    """

    followed: Annotated[int, Gauge("relatum_follower_streams", "Streams that are followed")]
    attached: Annotated[int, Gauge("relatum_follower_attached_streams", "Streams that are read now")]
    connections: Annotated[int, Gauge("relatum_follower_connections", "Connections that streams are read over")]
    held: Annotated[int, Gauge("relatum_follower_held_chunks", "Chunks read and not done with")]
    held_bytes: Annotated[int, Gauge("relatum_follower_held_bytes", "Bytes read and not done with")]
    records: Annotated[int, Counter("relatum_follower_records_total", "Records read and given")]
    holes: Annotated[int, Counter("relatum_follower_holes_total", "Times that retention was faster")]
    replaced: Annotated[int, Counter("relatum_follower_replaced_total", "Streams found deleted or cut off")]
    failures: Annotated[int, Counter("relatum_follower_failures_total", "Failed tries to follow a stream")]


class Follower(Closing):
    """Follows streams for ever, each from a position on. A context manager; of one process.

    One thread reads all streams; up to three others, while there is something to ask, open connections and ask those
    who lead streams. Whatever goes wrong is tried again, and told as an event and to `outages`: no method raises it.

    Args:
        broker: The broker.
        options: How.
        outages: Who is told of what waits; None: nobody, since its owner tells what the events say.
        name: What following as a whole is called there.
        who: What following a stream is called there, by its name.
        ready: Called, in the thread that reads, when there is something to take after there was nothing.
    """

    def __init__(
        self,
        broker: BrokerAddress | str,
        *,
        options: FollowerOptions | None = None,
        outages: Outages | None = None,
        name: str = "following of streams",
        who: Callable[[str], str] = "following of stream {!r}".format,
        ready: Callable[[], None] | None = None,
    ) -> None:
        self._options = options or FollowerOptions()
        address = BrokerAddress.of(broker)
        self._loop = Loop()
        self._questions = Questions(address, self._options.timeout_s, self._options.heartbeat_s)
        self._shelves = Shelves(self._options.bytes_max, lambda: self._loop.add_callback(self._desk.collect), ready)
        self._desk = Desk(
            self._loop,
            self._questions,
            self._shelves,
            names=Names(name, who),
            outages=outages or Outages(_NOBODY),
            gathering=Gathering(self._options.gather_s),
            connections_max=self._options.connections_max,
        )
        self._lock = threading.Lock()
        self._current: dict[str, Followed] = {}
        self._numbers = count(1)
        self._is_closing = False
        self._records = 0
        self._told: Counts[type[Event]] = Counts()
        self._thread: threading.Thread | None = None
        of_one_process(self, "a follower")
        metrics.report(self)

    def open(self) -> Self:
        """Begin; it waits for nothing."""
        with self._lock:
            if self._thread is None and not self._is_closing:
                self._loop.open()
                self._thread = threading.Thread(target=self._run, name="relatum-follower", daemon=True)
                self._thread.start()
        return self

    @own_connection()
    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._turn()
            except Exception:
                logger.exception("following of streams has a defect, and goes on")
                threading.Event().wait(AFTER_DEFECT_S)
        self._end()

    def _turn(self) -> None:
        try:
            self._loop.run_once()
        finally:
            self._shelves.announce()
        pause_s = self._desk.gathering.pause_s()
        if pause_s:
            time.sleep(pause_s)

    def _end(self) -> None:
        self._desk.close()
        self._loop.close()

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
        with self._lock:
            if self._is_closing:
                raise UsedAfterClose("the follower was closed: open another one")
            followed = Followed(stream, next(self._numbers), next_offset, known, self._options.window_bytes)
            self._leave(stream)
            self._current[stream] = followed
        self._loop.add_callback(lambda: self._desk.follow(followed))
        return followed.number

    def leave(self, stream: str) -> None:
        """Follow a stream no more: `take` gives nothing of it from now on. It waits for nothing."""
        with self._lock:
            self._leave(stream)

    def _leave(self, stream: str) -> None:
        followed = self._current.pop(stream, None)
        if followed is not None:
            followed.is_over = True
            self._shelves.end(followed.shelf)
            self._loop.add_callback(lambda: self._desk.leave(followed))

    # --- what came ----------------------------------------------------------------------------------------------------

    def take(self, timeout_s: float) -> list[Event]:
        """What came, of many streams: each one's in order, and in turn among them. For one thread at a time.

        Args:
            timeout_s: Seconds to wait for something.

        Returns:
            About 4 MiB of records at most, or one piece; nothing where nothing came in time, or it was closed.
        """
        events = self._shelves.take(timeout_s)
        for event in events:
            if isinstance(event, Records):
                self._records += len(event.batch)
            else:
                self._told[type(event)] += 1
        return events

    def done(self, *events: Event) -> None:
        """Hold records no more, and let their streams have more. From any thread, in any order."""
        self._shelves.done(events)

    # --- asked --------------------------------------------------------------------------------------------------------

    def reader(self) -> StreamReader:
        """The reader by which questions are asked: of this follower, which closes it.

        Raises:
            BrokerUnavailable, AccessRefused, ConfigurationError: none can be opened now.
        """
        return self._questions.reader()

    @property
    def is_let_in(self) -> bool:
        """Whether the broker takes the login of what follows, as far as it has said."""
        return self._desk.is_let_in

    def statistics(self) -> FollowerStatistics:
        """How it stands."""
        followed = list(self._desk.all.values())
        return FollowerStatistics(
            followed=len(self._current),
            attached=sum(each.is_attached and each.seat is not None for each in followed),
            connections=self._desk.links.connections,
            held=self._shelves.count,
            held_bytes=self._shelves.bytes,
            records=self._records,
            holes=self._told[Hole],
            replaced=self._told[Replaced],
            failures=self._told[Failed],
        )

    # --- end ----------------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """End all; who waits in `take` gets nothing.

        Args:
            timeout_s: Seconds to wait for the thread that reads.

        Returns:
            False where it had not ended by then.
        """
        with self._lock:
            was_closing, self._is_closing = self._is_closing, True
            thread = self._thread
        self._shelves.close()
        if thread is None and not was_closing:
            self._end()
        self._loop.add_callback(lambda: None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        metrics.retire(self)
        return thread is None or thread is threading.current_thread() or not thread.is_alive()

    def __enter__(self) -> Self:
        return self.open()
