"""A recorder inside a publisher's process.

A message published to the default exchange goes to the queue named by its routing key, so Relatum asks the broker about
that name. For any other exchange, it asks which streams are bound to it. It never asks which of them a routing key
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

from relatum.common.closing import close_within
from relatum.common.headers import BROKERS_OWN, NAME_BYTES_MAX
from relatum.common.processes import of_one_process
from relatum.common.waiting import QUESTION_S, Duty, Server, SharedWait, backoff, ended
from relatum.errors import (
    AccessRefused,
    ConnectionLost,
    InvalidKeyDefinition,
    KeyDefinitionConflict,
    NotFound,
    RelatumError,
)
from relatum.keys import KeyAgreement, KeyDefinition, as_definitions
from relatum.reading import AnyBroker, BrokerAddress, StreamReader
from relatum.recording.recorder_group import RecorderGroup
from relatum.recording.statistics import RecorderStatistics
from relatum.store.catalog import add_keys, check_keys
from relatum.store.database import AnyDatabase

logger = logging.getLogger("relatum.recorder")

# --- where messages go ------------------------------------------------------------------------------------------------

ASK_S: Final = (0.5, 60.0)
"""Least and most seconds before a query is repeated; doubled each time."""

UNUSED_S: Final = 300.0
"""Seconds without a publish after which Relatum stops asking about a name or exchange."""

SUBJECTS_MAX: Final = 10_000
"""Maximum names and exchanges in memory; the least recently used one is dropped first."""


class Subject(NamedTuple):
    """The subject of a query: a possible name of a stream, or an exchange."""

    name: str
    is_exchange: bool


@dataclass(slots=True)
class _State:
    due: float
    used: float
    pause_s: float = ASK_S[0]


class Watched:
    """The subjects of one recorder. Guarded by its lock."""

    def __init__(self) -> None:
        self.new: dict[Subject, None] = {}
        self._due: list[Subject] = []
        self._states: dict[Subject, _State] = {}
        self._streams: set[str] = set()

    def add(self, exchange: Any, routing_key: Any, now: float) -> bool:
        """Note a message's destination; return True if the broker must be asked about it now.

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
        self._states[subject].used = now
        return state is None

    def next(self, now: float) -> Subject | None:
        """Return the subject of the next query, new subjects first; None if no query is due."""
        if self.new:
            return next(iter(self.new))
        if not self._due:
            for subject, state in list(self._states.items()):
                if now - state.used > UNUSED_S:
                    self._forget(subject)
            self._due = [subject for subject, state in reversed(self._states.items()) if state.due <= now]
        return self._due.pop() if self._due else None

    def next_s(self, now: float) -> float:
        """Return the seconds until the next query is due."""
        return max(0.0, min((state.due for state in self._states.values()), default=now + ASK_S[1]) - now)

    def answered(self, subject: Subject, streams: Sequence[str], now: float) -> None:
        """Note the broker's answer. A stream's name is not queried again; other queries repeat after a backoff."""
        if streams and not subject.is_exchange:
            self._forget(subject)
            self._streams.update(streams)
            return
        self.new.pop(subject, None)
        state = self._states.get(subject)
        if state is not None:
            state.due = now + state.pause_s
            state.pause_s = min(2 * state.pause_s, ASK_S[1])

    def _forget(self, subject: Subject) -> None:
        self.new.pop(subject, None)
        self._states.pop(subject, None)


def _subject(exchange: Any, routing_key: Any) -> Subject | None:
    name, is_exchange = _text(exchange), True
    if name == "":
        name, is_exchange = _text(routing_key), False
    return None if not name or name.startswith(BROKERS_OWN) else Subject(name, is_exchange)


def _text(value: Any) -> str | None:
    """Return the name as text; None if it is invalid. Clients also accept bytes."""
    try:
        text = value.decode() if isinstance(value, bytes) else value
        return str(text) if isinstance(text, str) and len(text.encode()) <= NAME_BYTES_MAX else None
    except UnicodeError:
        return None


# --- the publisher's keys ---------------------------------------------------------------------------------------------

COMPARE_S: Final = 60.0
"""Seconds after which the definitions are compared again: others may have removed and redefined a key."""


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
        """Ask the database, and return the seconds until the next query."""
        try:
            # Define only once: a key that is missing later was removed on purpose.
            ask = add_keys if self._defines and not self.has_agreed else check_keys
            ask(self._engine, self._definitions)
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
"""Seconds for which a closing recorder still records the last messages. The next recorder records the rest."""

CLOSE_S: Final = 2.0
"""Seconds that closing may take in all; threads that wait for a silent server are left to end by themselves."""

DATABASE_CONNECTIONS_MAX: Final = 2
"""Connections to PostgreSQL of one embedded recorder; there may be hundreds of recorders."""

GATHER_S: Final = 0.01
"""Most seconds for which messages are gathered before they are committed: publishers wait for their receipts."""

_TALK: Final = ("celeryev", ".pidbox")
"""Suffixes of Celery's exchanges for its workers' events, which are expected to have no streams."""

BOUND_MAX: Final = 100
"""Maximum streams recorded for one exchange that is not a super stream."""


class EmbeddedRecorder:
    """Records the streams that are published to.

    Except for `close`, its methods never wait for the broker or the database.

    Args:
        broker: The broker.
        database: PostgreSQL's URL, or a `Database`.
        definitions: Keys to define, unless they are already defined.
        defines: False: only compare the keys with the database's, for a publisher whose streams others record.
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
            address, database, connections_max=DATABASE_CONNECTIONS_MAX, gather_s=GATHER_S, on_receipts=self._hurry
        )
        self._keys = PublishersKeys(self._group.database.engine, definitions, defines=defines)
        self.agreement = self._keys.agreement
        """Whether the database defines the keys as the publisher does."""
        self._changed = threading.Condition()
        self._watched = Watched()
        self._is_away = False
        """Whether the last query of the broker failed, or the keys are not defined."""
        self._unknown: set[str] = set()
        self._waits: WeakSet[SharedWait[Any, Any]] = WeakSet()
        self._search: Duty | None = None
        of_one_process(self, "an embedded recorder")
        self._begin()

    def _begin(self) -> None:
        """Start the loop. If the interpreter is exiting or out of threads, publishing continues without it."""
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
            self._search = self._group.repeat(self._look_up, "looking for streams to record")
            if not self._keys.has_agreed:
                self._group.repeat(self._agree, "defining the publisher's keys")

    def statistics(self) -> RecorderStatistics:
        """Return what was recorded, and how far behind each stream is. Asks no server."""
        return self._group.statistics()

    def watch(self, exchange: Any, routing_key: Any) -> None:
        """Record the streams that a message published there may go to, from now on. Cheap if they are known.

        These are the stream named by the routing key, or the streams bound to the exchange. Invalid names are ignored.
        Streams behind further exchanges or an alternate exchange are not found: watch them by name, exchange "".
        """
        with self._changed:
            is_new = self._watched.add(exchange, routing_key, time.monotonic())
        if is_new and not self._group.loop.call(self._wake):
            self._begin()

    def hurry(self, waits: "SharedWait[Any, Any]") -> None:
        """Make these receipt waits poll soon after each commit of receipts. `waits` is held weakly."""
        with self._changed:
            self._waits.add(waits)

    def _hurry(self) -> None:
        with self._changed:
            waits = list(self._waits)
        for each in waits:
            each.hurry()

    def left(self) -> dict[str, int | None]:
        """Return how many messages of which streams are not recorded; None if unknown. Asks no server."""
        with self._changed:
            new = [subject.name for subject in self._watched.new]
        return dict.fromkeys(new) | self._group.left()

    def close(self) -> None:
        """Record what was published until now, and stop, within two seconds, whether or not servers answer.

        It does not wait for an unavailable broker or database, or for streams that another process records.
        """
        close_within(self._close, CLOSE_S, name="relatum-closing")
        self._group.end()

    def _close(self) -> None:
        until = time.monotonic() + DRAIN_S
        with self._changed:
            known = self._changed.wait_for(lambda: self._is_away or not self._watched.new, DRAIN_S)
        if known and not self._is_away:
            self._group.drain(until)
        self._group.stop()

    # --- in the loop --------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        # A new route is not a reason to ask an unavailable server.
        if self._search is not None and not self._is_away:
            self._search.wake()

    async def _agree(self) -> float:
        try:
            return await self._group.loop.ask(self._keys.look)
        finally:
            self._note(is_away=not self._keys.has_agreed)
            self._wake()

    async def _look_up(self) -> float:
        """Ask about the subject that is due, and return the seconds until the next is due."""
        # Keys first: messages recorded before a key is defined have no rows for it.
        if not self._keys.has_agreed:
            return math.inf
        with self._changed:
            subject = self._watched.next(time.monotonic())
        if subject is None:
            self._note(is_away=False)
            return self._watched.next_s(time.monotonic())
        try:
            streams = await self._group.loop.ask(self._find, subject)
        except Exception as error:
            # After a lost connection, which this query may have broken, it is repeated only after its backoff.
            is_lost = isinstance(error, ConnectionLost)
            if is_lost:
                logger.info("cannot look up the streams of %r: %s", subject.name, ended(error))
            self._note(subject if is_lost else None, is_away=True)
            raise
        self._group.outages.answered(Server.BROKER)
        self._note(subject, streams, is_away=False)
        return 0.0

    def _note(self, subject: Subject | None = None, streams: Sequence[str] = (), *, is_away: bool) -> None:
        """Note the broker's answer about a subject, if it was asked, and wake a drain."""
        with self._changed:
            if subject is not None:
                self._watched.answered(subject, streams, time.monotonic())
            self._is_away = is_away
            self._changed.notify_all()

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _find(self, subject: Subject) -> list[str]:
        """Record the streams of a subject, and return them."""
        reader, name = self._group.follower.reader(), subject.name
        if subject.is_exchange:
            return self._bound(reader, name)
        try:
            found = reader.routes("", name)
            if found is None:
                reader.bounds(name)
                found = [name]
        except NotFound:
            return []
        except AccessRefused:
            # A stream that this user may not read: recording it reports that, and other streams are recorded.
            found = [name]
        for stream in found:
            self._group.add(stream)
        return found

    def _bound(self, reader: StreamReader, exchange: str) -> list[str]:
        """Record the streams bound to an exchange; warn once if they are unknown."""
        streams = reader.bound(exchange)
        is_super_stream = all(stream.startswith(f"{exchange}-") for stream in streams)
        if streams and (is_super_stream or len(streams) <= BOUND_MAX):
            for stream in streams:
                # Record all: a lookup by the super stream's name needs the partitions that others publish to.
                self._group.add(stream, super_stream=exchange if is_super_stream else None)
            return streams
        if exchange not in self._unknown:
            self._unknown.add(exchange)
            logger.log(
                logging.DEBUG if exchange.endswith(_TALK) else logging.WARNING,
                "the streams that exchange %r routes to are unknown: %s; this process records only those named in "
                "intercept(…, streams=[…])",
                exchange,
                f"{len(streams)} streams are bound to it" if streams else "no stream is bound to it directly",
            )
        return []
