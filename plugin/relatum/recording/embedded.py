"""A recorder inside a publisher's process.

The default exchange routes a message to the queue named by its routing key: Relatum queries the broker for a stream of
that name. For any other exchange, it queries the streams bound to it. It never queries which of them a routing key
reaches: if the exchange inspects messages, that query crashes the stream plugin of RabbitMQ 3.10.
"""

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import sqlalchemy as sa

from relatum.common.checks import is_clean
from relatum.common.closing import close_within
from relatum.common.headers import NAME_BYTES_MAX, RESERVED_PREFIX
from relatum.common.processes import refuse_in_child
from relatum.common.waiting import QUESTION_S, RepeatedTask, Server, SharedWait, backoff, ended
from relatum.errors import ConnectionLost, InvalidKeyDefinition, KeyDefinitionConflict, RelatumError
from relatum.keys import KeyAgreement, KeyDefinition, as_definitions
from relatum.reading import AnyBroker, BrokerAddress, StreamReader
from relatum.recording.recorder_group import RecorderGroup
from relatum.recording.statistics import RecorderStatistics
from relatum.store.catalog import add_keys, check_keys
from relatum.store.database import AnyDatabase

logger = logging.getLogger("relatum.recorder")

# --- destinations of messages -----------------------------------------------------------------------------------------

ASK_S: Final = (0.5, 60.0)
"""Minimum and maximum seconds before a query is repeated; the pause doubles each time."""

UNUSED_S: Final = 300.0
"""Seconds without a publish after which Relatum stops querying a name or exchange."""

SUBJECTS_MAX: Final = 10_000
"""Maximum names and exchanges in memory; the least recently used is dropped first."""


class Subject(NamedTuple):
    """The subject of a query: an exchange, or a name that may be a stream's."""

    name: str
    is_exchange: bool


@dataclass(slots=True)
class _State:
    query_at: float
    used_at: float
    pause_s: float = ASK_S[0]


class Watched:
    """The subjects that one recorder queries. Callers hold the recorder's lock."""

    def __init__(self) -> None:
        self.new: dict[Subject, None] = {}
        self._queue: list[Subject] = []
        self._states: dict[Subject, _State] = {}
        self._streams: set[str] = set()

    def add(self, exchange: Any, routing_key: Any, now: float) -> bool:
        """Add a message's destination; return True if it is new and must be queried now.

        Invalid names are ignored: the client refuses them.
        """
        subject = _subject(exchange, routing_key)
        if subject is None or (not subject.is_exchange and subject.name in self._streams):
            return False
        state = self._states.pop(subject, None)
        if state is None:
            self.new[subject] = None
            if len(self._states) >= SUBJECTS_MAX:
                self._forget(next(iter(self._states)))
        self._states[subject] = state or _State(now, now)
        self._states[subject].used_at = now
        return state is None

    def next(self, now: float) -> Subject | None:
        """Return the subject of the next query, new subjects first; None if no query is due."""
        if self.new:
            subject = next(iter(self.new))
            # If this query fails, as for an exchange that lost a connection lately, the others come first.
            self.new[subject] = self.new.pop(subject)
            return subject
        if not self._queue:
            for subject, state in list(self._states.items()):
                if now - state.used_at > UNUSED_S:
                    self._forget(subject)
            self._queue = [subject for subject, state in reversed(self._states.items()) if state.query_at <= now]
        return self._queue.pop() if self._queue else None

    def next_s(self, now: float) -> float:
        """Return the seconds until the next query is due."""
        return max(0.0, min((state.query_at for state in self._states.values()), default=now + ASK_S[1]) - now)

    def answered(self, subject: Subject, streams: Sequence[str], now: float) -> None:
        """Store the broker's answer. A stream's name is not queried again; other queries repeat after a backoff."""
        if streams and not subject.is_exchange:
            self._forget(subject)
            self._streams.update(streams)
            return
        self.new.pop(subject, None)
        state = self._states.get(subject)
        if state is not None:
            state.query_at = now + state.pause_s
            state.pause_s = min(2 * state.pause_s, ASK_S[1])

    def _forget(self, subject: Subject) -> None:
        self.new.pop(subject, None)
        self._states.pop(subject, None)


def _subject(exchange: Any, routing_key: Any) -> Subject | None:
    name, is_exchange = _text(exchange), True
    if name == "":
        name, is_exchange = _text(routing_key), False
    return None if not name or name.startswith(RESERVED_PREFIX) else Subject(name, is_exchange)


def _text(value: Any) -> str | None:
    """Return the name as text; None if it is invalid. Clients also accept bytes."""
    text = value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
    is_name = isinstance(text, str) and is_clean(text) and len(text.encode()) <= NAME_BYTES_MAX
    return str(text) if is_name else None


# --- the publisher's keys ---------------------------------------------------------------------------------------------

COMPARE_S: Final = 60.0
"""Seconds between two comparisons of the definitions: another process may remove and redefine a key."""


class PublishersKeys:
    """Defines the keys of one publisher, and reports if the database defines them differently."""

    def __init__(self, engine: sa.Engine, definitions: Sequence[KeyDefinition], *, defines: bool) -> None:
        self.agreement = KeyAgreement()
        self._engine = engine
        self._definitions = definitions
        self._defines = defines
        self._pauses = backoff(QUESTION_S)
        self.has_agreed = not definitions
        if not definitions:
            self.agreement.tell(None)

    def look(self) -> float:
        """Compare the keys with the database's; return the seconds until the next comparison."""
        try:
            # Define only once: a key that is missing later was removed on purpose.
            query = add_keys if self._defines and not self.has_agreed else check_keys
            query(self._engine, self._definitions)
        except (KeyDefinitionConflict, InvalidKeyDefinition) as error:
            if self.agreement.conflict is None:
                logger.warning("the database and this publisher define the keys differently: %s", ended(error))
            self.agreement.tell(error)
            return COMPARE_S if self.has_agreed else next(self._pauses)
        except RelatumError:
            # Keep the last known result.
            self.agreement.tell(self.agreement.conflict)
            raise
        self.has_agreed = True
        if self.agreement.conflict is not None:
            logger.warning("the database now defines the keys as this publisher does")
        self.agreement.tell(None)
        return COMPARE_S


# --- the recorder -----------------------------------------------------------------------------------------------------

DRAIN_S: Final = 1.8
"""Seconds for which a closing recorder continues to record. The next recorder records the rest."""

CLOSE_S: Final = 2.0
"""Maximum seconds of a close, in total. A close does not wait for threads that a silent server blocks."""

DATABASE_CONNECTIONS_MAX: Final = 2
"""Maximum connections to PostgreSQL of one embedded recorder, since there may be hundreds of recorders."""

GATHER_S: Final = 0.01
"""Maximum seconds for which messages are gathered before a commit: short, since publishers wait for receipts."""

_CELERY_SUFFIXES: Final = ("celeryev", ".pidbox")
"""Suffixes of Celery's exchanges for worker events and control, which are expected to have no streams."""

BOUND_MAX: Final = 100
"""Maximum streams recorded for one exchange that is not a super stream."""


class EmbeddedRecorder:
    """Records the streams that this process publishes to.

    Only `close` waits for the broker or the database. `definitions` are keys to define, unless they exist; without
    `defines`, they are only compared, since another process records.
    """

    def __init__(
        self,
        broker: AnyBroker,
        database: AnyDatabase,
        definitions: Sequence[KeyDefinition] = (),
        *,
        defines: bool = True,
    ) -> None:
        address = BrokerAddress.of(broker)
        definitions = as_definitions(definitions)
        self._group = RecorderGroup(
            address, database, connections_max=DATABASE_CONNECTIONS_MAX, gather_s=GATHER_S, on_receipts=self._poll_soon
        )
        self._keys = PublishersKeys(self._group.database.engine, definitions, defines=defines)
        self.agreement = self._keys.agreement
        """Whether the database defines the keys as the publisher does."""
        self._changed = threading.Condition()
        self._watched = Watched()
        self._is_down = False
        """Whether the last query to the broker failed, or the keys are not defined."""
        self._unknown: set[str] = set()
        self._waits: WeakSet[SharedWait[Any, Any]] = WeakSet()
        self._search: RepeatedTask | None = None
        refuse_in_child(self, "an embedded recorder")
        self._begin()

    def _begin(self) -> None:
        """Start the loop. If the interpreter is exiting or out of threads, publishing continues without recording."""
        try:
            self._group.loop.start()
        except RuntimeError as error:
            logger.warning(
                "this process publishes without recording; the next recorder records its messages: %s", error
            )
            self.agreement.tell(None)
        else:
            self._group.loop.call(self._begin_duties)

    def _begin_duties(self) -> None:
        if self._search is None:
            self._search = self._group.repeat(self._query_next, "looking for streams to record")
            if not self._keys.has_agreed:
                self._group.repeat(self._compare_keys, "defining the publisher's keys")

    def statistics(self) -> RecorderStatistics:
        """Return the numbers of recorded messages and the lag of each stream. Queries no server."""
        return self._group.statistics()

    def watch(self, exchange: Any, routing_key: Any) -> None:
        """Record from now on the streams that a message with this destination may reach. Cheap for a known one.

        For exchange "", this is the stream named by the routing key; for others, all streams bound to the exchange, if
        they are at most 100 or the partitions of a super stream.
        Streams behind further exchanges or an alternate exchange are not found: watch each of them by name, with
        exchange "". Invalid names are ignored.
        """
        with self._changed:
            is_new = self._watched.add(exchange, routing_key, time.monotonic())
        if is_new and not self._group.loop.call(self._wake):
            self._begin()

    def poll_soon(self, waits: "SharedWait[Any, Any]") -> None:
        """Make these receipt waits poll soon after each commit of receipts. `waits` is held weakly."""
        with self._changed:
            self._waits.add(waits)

    def _poll_soon(self) -> None:
        with self._changed:
            waits = list(self._waits)
        for each in waits:
            each.poll_soon()

    def left(self) -> dict[str, int | None]:
        """Return the number of unrecorded messages by stream; None if unknown. Queries no server.

        Includes exchanges and streams that the broker was not queried for yet, with None.
        """
        with self._changed:
            new = [subject.name for subject in self._watched.new]
        return dict.fromkeys(new) | self._group.left()

    def close(self) -> None:
        """Record the messages published so far, and stop, within two seconds even if no server answers.

        Does not wait for an unavailable broker or database, or for streams that another process records.
        """
        close_within(self._close, CLOSE_S, name="relatum-closing")
        self._group.end()

    def _close(self) -> None:
        until = time.monotonic() + DRAIN_S
        with self._changed:
            has_queried = self._changed.wait_for(lambda: self._is_down or not self._watched.new, DRAIN_S)
        if has_queried and not self._is_down:
            self._group.drain(until)
        self._group.stop()

    # --- in the loop --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        # A new destination does not shorten the backoff of an unavailable server.
        if self._search is not None and not self._is_down:
            self._search.wake()

    async def _compare_keys(self) -> float:
        try:
            return await self._group.loop.ask(self._keys.look)
        finally:
            self._store_answer(is_down=not self._keys.has_agreed)
            self._wake()

    async def _query_next(self) -> float:
        """Query the next subject; return the seconds until the next query is due."""
        # Keys first: messages recorded before a key is defined have no rows for it.
        if not self._keys.has_agreed:
            return math.inf
        with self._changed:
            subject = self._watched.next(time.monotonic())
        if subject is None:
            self._store_answer(is_down=False)
            return self._watched.next_s(time.monotonic())
        try:
            streams = await self._group.loop.ask(self._record_subject, subject)
        except Exception as error:
            # This query may have caused the lost connection: repeat it only after its backoff.
            is_lost = isinstance(error, ConnectionLost)
            if is_lost:
                logger.info("cannot look up the streams of %r: %s", subject.name, ended(error))
            self._store_answer(subject if is_lost else None, is_down=True)
            raise
        self._group.outages.answered(Server.BROKER)
        self._store_answer(subject, streams, is_down=False)
        return 0.0

    def _store_answer(self, subject: Subject | None = None, streams: Sequence[str] = (), *, is_down: bool) -> None:
        """Store whether a server is unavailable and, with a subject, the broker's answer; wake a waiting `close`."""
        with self._changed:
            if subject is not None:
                self._watched.answered(subject, streams, time.monotonic())
            self._is_down = is_down
            self._changed.notify_all()

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _record_subject(self, subject: Subject) -> list[str]:
        """Record the streams of a subject, and return them."""
        reader, name = self._group.follower.reader, subject.name
        if subject.is_exchange:
            return self._record_bound(reader, name)
        # If this user may not read the stream, its recording reports that.
        found = reader.routes("", name) or []
        for stream in found:
            self._group.add(stream)
        return found

    def _record_bound(self, reader: StreamReader, exchange: str) -> list[str]:
        """Record the streams bound to an exchange, and return them; warn once if they are unknown."""
        streams = reader.bound(exchange)
        is_super_stream = all(stream.startswith(f"{exchange}-") for stream in streams)
        if streams and (is_super_stream or len(streams) <= BOUND_MAX):
            for stream in streams:
                # All: a lookup by the super stream's name also needs partitions that only other processes publish to.
                self._group.add(stream, super_stream=exchange if is_super_stream else None)
            return streams
        if exchange not in self._unknown:
            self._unknown.add(exchange)
            logger.log(
                logging.DEBUG if exchange.endswith(_CELERY_SUFFIXES) else logging.WARNING,
                "the streams that exchange %r routes to are unknown: %s; this process records only those named in "
                "intercept(…, streams=[…])",
                exchange,
                f"{len(streams)} streams are bound to it" if streams else "no stream is bound to it directly",
            )
        return []
