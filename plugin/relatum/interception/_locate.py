"""Finding messages that were published: their places in the table, and the streams that may hold them.

Nothing here stands on the publish path; connections are opened when somebody first waits or settles.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa

from relatum._ids import MessageId
from relatum._names import TIME_HEADER
from relatum.collecting import AsyncOutcomes, Outcomes
from relatum.errors import (
    ConfigurationError,
    DataError,
    NotFound,
    NotRecordedInTime,
    Transient,
)
from relatum.interception._ports import Recorder
from relatum.reading import BrokerAddress, Message, StreamReader
from relatum.store import make_engine, receipts, streams, translated_errors

POLL_FIRST_S: Final = 0.002
"""Seconds before the table is asked again for the first time; a batch is recorded in about that time."""

POLL_LAST_S: Final = 0.05
"""Seconds between two questions at most: what a receipt can come late by."""


CONNECT_S: Final = 10.0
"""Seconds to reach the broker at most."""

_CONNECT_LEAST_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Sent:
    """What is known of one message that was sent.

    Attributes:
        exchange: Where it was published to.
        routing_key: With which routing key.
        message_id: Its property of that name.
        receipt: What the recorder writes its places down under; None where it was not asked to.
        time_us: The time header it was sent with; None where it has none.
        body: Its body.
        sent_at: When, UTC, by the clock of this machine: a moment before it was handed to the client.
        monotonic_s: The same moment on `time.monotonic()`'s scale.
    """

    exchange: str
    routing_key: str
    message_id: str
    receipt: str | None
    time_us: int | None
    body: bytes
    sent_at: datetime
    monotonic_s: float

    @classmethod
    def of(
        cls,
        exchange: Any,
        routing_key: Any,
        message_id: str,
        headers: dict[str, Any],
        body: Any,
        *,
        monotonic_s: float | None = None,
    ) -> "Sent":
        """The facts of a message.

        Args:
            exchange: Where it is published to.
            routing_key: With which routing key.
            message_id: Its property of that name.
            headers: Its headers.
            body: Its body.
            monotonic_s: `time.monotonic()` before it was handed to the client; None: it is about to be. A lost
                connection may be noticed minutes later, so who learns of it then must have looked before.
        """
        now = time.monotonic()
        before_s = now if monotonic_s is None else monotonic_s
        at = datetime.now(UTC) - timedelta(seconds=now - before_s)
        content = body.encode() if isinstance(body, str) else bytes(body)
        return cls(str(exchange), str(routing_key), message_id, None, headers.get(TIME_HEADER), content, at, before_s)

    def is_in(self, message: Message) -> bool:
        """Whether that message is this one."""
        try:
            return (
                message.properties.message_id == self.message_id
                and (self.time_us is None or message.headers.get(TIME_HEADER) == self.time_us)
                and message.body == self.body
            )
        except DataError:
            # What the broker took from us by AMQP 0.9.1 it can write: what cannot be read is somebody else's.
            return False


class Locator:
    """Finds the messages of one connection.

    Args:
        address: Where streams are read.
        database: Where receipts are; None: only streams can be searched.
        recorder: The recorder in this process, which tells of receipts at once; None: the table is asked.
    """

    def __init__(
        self, address: BrokerAddress, database: "str | sa.URL | sa.Engine | None", recorder: Recorder | None
    ) -> None:
        self._address = address
        self._database = database
        self._recorder = recorder
        self._lock = threading.Lock()
        self._reader: StreamReader | None = None
        self._engine: sa.Engine | None = database if isinstance(database, sa.Engine) else None

    def close(self) -> None:
        """Close what was opened for reading."""
        with self._lock:
            reader, self._reader = self._reader, None
            if reader is not None:
                reader.close()
            if self._engine is not None and self._engine is not self._database:
                self._engine.dispose()
                self._engine = None

    def subscribe(self, sent: Sent, listener: Callable[[MessageId], None]) -> Callable[[], None]:
        """Hear of the message's places from the recorder in this process; without one, nothing is heard."""
        if self._recorder is None or sent.receipt is None:
            return lambda: None
        return self._recorder.subscribe(sent.receipt, listener)

    def routes(self, sent: Sent, timeout_s: float = CONNECT_S) -> frozenset[str] | None:
        """The streams the message was routed to, or None where that cannot be known.

        It can be where the stream protocol answers in time, but for exchanges that route by headers.
        """
        names: list[str] | None = None
        with suppress(Transient, NotFound):
            names = self._asked_routes(sent, timeout_s)
        if sent.exchange == "":
            # The default exchange leads to the queue of that name and nowhere else.
            return frozenset([sent.routing_key]) if names is None else frozenset(names)
        return frozenset(names) if names else None

    def recorded(self, sent: Sent) -> frozenset[MessageId]:
        """The message's places in the table so far.

        Raises:
            ConfigurationError: there is no database to ask.
            DatabaseUnavailable: it does not answer.
        """
        query = (
            sa.select(streams.c.name, receipts.c.stream_offset)
            .join_from(receipts, streams, receipts.c.stream_id == streams.c.stream_id)
            .where(receipts.c.message_id == sent.receipt, streams.c.vhost == self._address.vhost)
        )
        with translated_errors(), self._database_engine().connect() as connection:
            return frozenset(MessageId(name, offset) for name, offset in connection.execute(query))

    def outcomes(self) -> Outcomes:
        """Where to ask what became of messages.

        Raises:
            ConfigurationError: there is no database to ask.
        """
        return Outcomes(self._database_engine())

    def async_outcomes(self) -> AsyncOutcomes:
        """The asyncio twin of `outcomes`."""
        return AsyncOutcomes(self._database_engine())

    def destinations(self, sent: Sent, timeout_s: float) -> frozenset[str] | None:
        """The queues or streams a message must be in if it arrived, or None where that cannot be known.

        Raises:
            Transient: the broker does not answer.
            NotFound: there is no such exchange.
        """
        if sent.exchange == "":
            # Not asked for: a broker that starts says of streams, too, that they are none.
            return frozenset([sent.routing_key])
        names = self._asked_routes(sent, timeout_s)
        return frozenset(names) if names else None

    def reader(self, timeout_s: float) -> StreamReader:
        """A reader of the caller's own, connected within about `timeout_s` seconds."""
        return StreamReader.open(self._address, timeout_s=min(CONNECT_S, max(_CONNECT_LEAST_S, timeout_s)))

    def _asked_routes(self, sent: Sent, timeout_s: float) -> list[str] | None:
        with self._lock:
            timeout_s = min(CONNECT_S, max(_CONNECT_LEAST_S, timeout_s))
            names: list[str] | None = self._with_reader(
                lambda reader: reader.routes(sent.exchange, sent.routing_key), timeout_s
            )
            return names

    def _with_reader(self, question: Callable[[StreamReader], Any], timeout_s: float) -> Any:
        """Ask through the open reader, and once more through a new one where that has lost its connection."""
        if self._reader is not None:
            try:
                return question(self._reader)
            except Transient:
                self._reader.close()
                self._reader = None
        self._reader = StreamReader.open(self._address, timeout_s=timeout_s)
        return question(self._reader)

    def _database_engine(self) -> sa.Engine:
        with self._lock:
            if self._engine is None:
                if self._database is None or isinstance(self._database, sa.Engine):
                    raise ConfigurationError("a receipt needs the database: give intercept() its URL")
                self._engine = make_engine(self._database, pool_size=2)
            return self._engine


def is_complete(expected: frozenset[str] | None, found: frozenset[MessageId]) -> bool:
    """Whether each stream the message was routed to has it; where the streams are not known, whether one has."""
    if expected is None:
        return bool(found)
    return expected <= {place.stream for place in found}


def in_order(found: frozenset[MessageId]) -> tuple[MessageId, ...]:
    """One place for each stream, by the stream's name."""
    return tuple(sorted(found))


def not_recorded(sent: Sent, expected: frozenset[str] | None, found: frozenset[MessageId], timeout_s: float) -> Any:
    """The error of a receipt that was waited for in vain."""
    missing = "" if expected is None else f" (missing: {', '.join(sorted(expected - {at.stream for at in found}))})"
    return NotRecordedInTime(
        f"the message {sent.message_id} is confirmed, but was not recorded within {timeout_s} s{missing}: wait again, "
        "or see whether a recorder runs (`relatum status`)",
        found=in_order(found),
        in_stream=True if expected or found else None,
    )
