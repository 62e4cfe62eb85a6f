"""Finds published messages: their places in the table, and the streams that may contain them.

Nothing here runs during a publish. The first wait or `settle` opens connections.
"""

import logging
import math
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from relatum.common.headers import BROKERS_OWN, RECEIPT_HEADER, TIME_HEADER
from relatum.common.ids import MessageId
from relatum.common.waiting import LEAST_S, SharedWait, within
from relatum.errors import (
    AccessRefused,
    ConnectionLost,
    DatabaseUnavailable,
    DataError,
    NotFound,
    Transient,
    UsedAfterClose,
)
from relatum.metrics import Histogram
from relatum.outcomes import Outcomes
from relatum.reading import BrokerAddress, Message, SharedReader, StreamReader
from relatum.store.database import AnyDatabase, Database, sql

if TYPE_CHECKING:
    from relatum.publishing._receipt import PlaceSearch

logger = logging.getLogger("relatum.interception")

CONNECT_S: Final = 10.0
"""Seconds to connect to the broker, and for each answer, unless the call has less time left."""

ASK_S: Final = 60.0
"""Seconds until the broker is asked again which streams are bound to an exchange."""

EXCHANGES_MAX: Final = 1000
"""Exchanges whose streams are cached."""

NAMED_MAX: Final = 100
"""Exchanges and queues named in warnings."""

LOOKED_AT_MAX: Final = 32
"""Streams of one exchange whose recording a receipt waits for. With more, it returns the first recorded places."""

PLACES: Final = sql("""
    SELECT message_id, name, stream_offset FROM relatum.receipts JOIN relatum.streams USING (stream_id)
    WHERE message_id = ANY (:receipts::text[]) AND vhost = :vhost::text""")

RECORDED_TO: Final = sql("""
    SELECT name, max(to_offset) FROM relatum.streams LEFT JOIN relatum.coverage USING (stream_id)
    WHERE vhost = :vhost::text AND name = ANY (:names::text[]) AND replaced_at IS NULL
        AND kind IS DISTINCT FROM 'hole'
    GROUP BY name""")


@dataclass(frozen=True, slots=True)
class Destinations:
    """The streams that may contain a message.

    If `is_exact`, a message that the broker accepted is in each of these streams and in no other. Otherwise it is in
    some of these streams, or in others: the broker cannot be asked safely where an exchange routes a key, and exchanges
    may be bound to exchanges. Its absence from these streams then proves nothing.
    """

    streams: frozenset[str]
    is_exact: bool


@dataclass(frozen=True, slots=True)
class Sent:
    exchange: str
    routing_key: str
    message_id: str
    receipt: str | None
    """The name under which the recorder stores the message's places; None without a receipt."""
    time_us: int | None
    body: bytes
    sent_at: datetime
    """When it was handed to the client, by this machine's clock. `monotonic_s` is the same moment."""
    monotonic_s: float

    @classmethod
    def of(
        cls,
        exchange: Any,
        routing_key: Any,
        message_id: str,
        headers: dict[str, Any] | None,
        body: Any,
        monotonic_s: float | None = None,
    ) -> "Sent":
        """Return the facts of a message handed to the client at `monotonic_s`, or about to be handed over (None).

        A lost connection may be noticed minutes later, so the caller must read the clock before it sends.
        """
        now = time.monotonic()
        before_s = now if monotonic_s is None else monotonic_s
        at = datetime.now(UTC) - timedelta(seconds=now - before_s)
        content = body.encode() if isinstance(body, str) else bytes(body)
        headers = headers or {}
        asked = headers.get(RECEIPT_HEADER)
        receipt = asked if isinstance(asked, str) else message_id if asked is True else None
        time_us = headers.get(TIME_HEADER)
        return cls(_name(exchange), _name(routing_key), message_id, receipt, time_us, content, at, before_s)

    def is_in(self, message: Message) -> bool:
        try:
            return (
                message.properties.message_id == self.message_id
                and (self.time_us is None or message.headers.get(TIME_HEADER) == self.time_us)
                and message.body == self.body
            )
        except DataError:
            # What AMQP 0.9.1 has sent can be decoded, so a message that cannot be decoded is not ours.
            return False


class Locator:
    """Finds the messages of one connection. `records`: whether this process records the streams it publishes to."""

    def __init__(
        self,
        address: BrokerAddress,
        database: "AnyDatabase | None",
        streams: frozenset[str],
        receipt_s: Histogram,
        *,
        records: bool,
    ) -> None:
        self._address = address
        # Without a database there are no receipts, only searches of the streams.
        self._database = None if database is None else Database(database, refusing=None, pool_size=2)
        self._records = records
        self._named = streams
        self.receipt_s = receipt_s
        self._bound_to: dict[str, tuple[float, frozenset[str]]] = {}
        self._warned: set[tuple[str, str]] = set()
        self._reader = SharedReader(address, timeout_s=CONNECT_S)
        self._is_closed = False
        # Weak, so that a connection dropped without `release` is freed without the garbage collector.
        self.waits: SharedWait[PlaceSearch, bool] = SharedWait(partial(Locator._poll, weakref.proxy(self)), first_s=0)

    def close(self) -> None:
        """Close the reader and the database. A search that still runs then opens a reader for each read."""
        self._is_closed = True
        self._reader.close()
        self.waits.join()
        if self._database is not None:
            self._database.close()

    # --- the broker: which streams may have a message -------------------------------------------------------------

    def destinations_and_ends(self, sent: Sent, timeout_s: float) -> tuple[Destinations, dict[str, int]]:
        """Return the streams that may contain a confirmed message and, unless exact, their last offsets (-1: empty)."""
        where, ends = Destinations(self._named, is_exact=False), dict[str, int]()
        with within(max(LEAST_S, timeout_s)):
            with suppress(Transient, NotFound):
                where = self.destinations(sent)
                if sent.exchange == "" and where.streams:
                    with self.reader() as reader:
                        is_stream = reader.routes("", sent.routing_key) != []
                    if not is_stream:
                        text = "%r is not a stream, so receipts of messages published to it have no places"
                        self._warn_once(text, sent.routing_key)
                        where = Destinations(frozenset(), is_exact=True)
            if not where.is_exact and len(where.streams) <= LOOKED_AT_MAX:
                with suppress(Transient, NotFound, AccessRefused), self.reader() as reader:
                    for stream in where.streams:
                        with suppress(NotFound, AccessRefused):
                            bounds = reader.bounds(stream)
                            if not bounds.is_silence:
                                ends[stream] = bounds.end - 1
        return where, ends

    def destinations(self, sent: Sent) -> Destinations:
        """Return the queues or streams that contain a message if it arrived, as far as Relatum can tell.

        The default exchange routes only to the queue named by the routing key. Any other exchange may route to the
        streams that are bound to it, and to the streams that `intercept(streams=…)` names; the routing key of a super
        stream names one of its partitions.
        """
        exchange, name = sent.exchange, sent.routing_key
        if exchange == "":
            is_queue = name and not name.startswith(BROKERS_OWN)
            return Destinations(frozenset([name] if is_queue else ()), is_exact=True)
        bound = self._bound(exchange)
        if f"{exchange}-{name}" in bound and all(stream.startswith(f"{exchange}-") for stream in bound):
            return Destinations(frozenset([f"{exchange}-{name}"]), is_exact=True)
        return Destinations(bound | self._named, is_exact=False)

    def _bound(self, exchange: str) -> frozenset[str]:
        if exchange.startswith(BROKERS_OWN):
            return frozenset()
        now = time.monotonic()
        asked_at, bound = self._bound_to.get(exchange, (-math.inf, frozenset()))
        if now - asked_at >= ASK_S:
            with self.reader() as reader:
                bound = frozenset(reader.bound(exchange))
            if len(self._bound_to) >= EXCHANGES_MAX:
                self._bound_to.clear()
            self._bound_to[exchange] = now, bound
            if not (bound or self._named):
                self._warn_once(
                    "the streams that exchange %r routes to are unknown, so receipts may be incomplete: name them "
                    "in intercept(…, streams=[…])",
                    exchange,
                )
        return bound

    def _warn_once(self, text: str, name: str) -> None:
        if (text, name) not in self._warned and len(self._warned) < NAMED_MAX:
            self._warned.add((text, name))
            logger.warning(text, name)

    @contextmanager
    def reader(self) -> Iterator[StreamReader]:
        """Return the reader that all searches of this connection share.

        A reader for each unsettled message would flood a restarted broker with connections.
        """
        if self._is_closed:
            with StreamReader.open(self._address, timeout_s=CONNECT_S) as reader:
                yield reader
            return
        try:
            yield self._reader.get()
        except UsedAfterClose as error:
            raise ConnectionLost("the connection was released during the search: search again") from error

    # --- the table: which streams have the message -----------------------------------------------------------------

    def _poll(self, looks: "Sequence[PlaceSearch]") -> Iterator[tuple[int, bool]]:
        """Query the places of all awaited messages, and yield the searches that have ended.

        While the database is unavailable, the messages count as not recorded yet.
        """
        looked_in = frozenset[str]().union(*(look.ends for look in looks))
        # A stream that was never recorded counts as unrecorded only if this process has a recorder.
        recorded_to = dict.fromkeys(looked_in, 0 if self._records else math.inf)
        wanted = [look.sent.receipt for look in looks if look.sent.receipt is not None]
        places: defaultdict[str | None, set[MessageId]] = defaultdict(set)
        try:
            # In this order: a row written between the two queries is among the places.
            for name, to_offset in self._rows(RECORDED_TO, names=list(looked_in)) if looked_in else ():
                recorded_to[name] = to_offset or 0
            for receipt, stream, offset in self._rows(PLACES, receipts=wanted):
                places[receipt].add(MessageId(stream, offset))
        except DatabaseUnavailable:
            return
        now = time.monotonic()
        for number, look in enumerate(looks):
            look.places = look.places | places[look.sent.receipt]
            look.recorded_to = recorded_to
            if look.has_all or now >= look.deadline:
                yield number, True

    def _rows(self, statement: sa.TextClause, **parameters: list[str]) -> list[Any]:
        assert self._database is not None
        return self._database.rows(statement, {"vhost": self._address.vhost, **parameters})

    @cached_property
    def outcomes(self) -> Outcomes:
        assert self._database is not None
        return Outcomes(self._database)


def _name(given: Any) -> str:
    return given.decode(errors="replace") if isinstance(given, bytes) else str(given)
