"""Finds published messages: their places in the table, and the streams that may contain them.

A publish does not use this module's queries. The first wait or `settle` opens connections.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

import sqlalchemy as sa

from relatum.common.checks import is_clean
from relatum.common.headers import NAME_BYTES_MAX, RECEIPT_HEADER, RESERVED_PREFIX, TIME_HEADER
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
from relatum.reading import BrokerAddress, Message, StreamReader
from relatum.store.database import AnyDatabase, Database, sql

logger = logging.getLogger("relatum.interception")

_CONNECT_S: Final = 10.0
"""Seconds to connect to the broker, and to wait for each answer, unless the call has less time left."""

_BINDINGS_CACHE_S: Final = 60.0
"""Seconds for which the streams bound to an exchange are cached."""

_EMPTY_CACHE_S: Final = 1.0
"""Seconds for which it is cached that no stream is bound to an exchange."""

_EXCHANGES_MAX: Final = 1000
"""Exchanges whose streams are cached."""

_WARNINGS_MAX: Final = 100
"""Exchanges and queues that warnings name."""

_AWAITED_STREAMS_MAX: Final = 32
"""Streams of one exchange whose recording a receipt waits for. With more, it returns the first recorded places."""

PLACES: Final = sql("""
    SELECT message_id, name, min(stream_offset) FROM relatum.receipts JOIN relatum.streams USING (stream_id)
    WHERE message_id = ANY (:receipts::text[]) AND vhost = :vhost::text GROUP BY message_id, name""")
"""Selects the places of messages. A consumer that publishes a message again copies its header, at a later offset."""

RECORDED_TO: Final = sql("""
    SELECT name, max(to_offset) FROM relatum.streams LEFT JOIN relatum.coverage USING (stream_id)
    WHERE vhost = :vhost::text AND name = ANY (:names::text[]) AND replaced_at IS NULL
        AND kind IS DISTINCT FROM 'hole'
    GROUP BY name""")


@dataclass(frozen=True, slots=True)
class Destinations:
    """The streams that may contain a message.

    If `is_exact`, a message that the broker accepted is in each of these streams and in no other. Otherwise it may be
    in some of these streams or in others: the broker has no safe query for all routes of an exchange, and exchanges
    may be bound to exchanges. Absence from these streams then proves nothing.
    """

    streams: frozenset[str]
    is_exact: bool


@dataclass(frozen=True, slots=True)
class SentMessage:
    exchange: str
    routing_key: str
    message_id: str
    receipt: str | None
    """The name under which the recorder stores the message's places; None without a receipt."""
    time_us: int | None
    body: bytes
    sent_at: datetime
    """When the message was passed to the client, by this machine's clock. `monotonic_s` is the same moment."""
    monotonic_s: float
    copies: frozenset[str]
    """The routing keys in the headers CC and BCC."""

    @classmethod
    def of(
        cls,
        exchange: Any,
        routing_key: Any,
        message_id: str,
        headers: dict[str, Any] | None,
        body: Any,
        monotonic_s: float | None = None,
        time_s: float | None = None,
    ) -> "SentMessage":
        """Describe a message that was passed to the client at `monotonic_s` and `time_s`, or will be passed now (None).

        A lost connection may be detected minutes later, so the caller must read the clocks before it sends. It must
        read both: while a machine sleeps, the monotonic clock stands still.
        """
        sent_s = time.monotonic() if monotonic_s is None else monotonic_s
        at = datetime.fromtimestamp(time.time() if time_s is None else time_s, UTC)
        content = body.encode() if isinstance(body, str) else bytes(body)
        headers = headers or {}
        request = headers.get(RECEIPT_HEADER)
        receipt = request if isinstance(request, str) else message_id if request is True else None
        time_us = headers.get(TIME_HEADER)
        lists = [keys for name in ("CC", "BCC") if isinstance(keys := headers.get(name), list | tuple)]
        copies = frozenset(_text(key) for keys in lists for key in keys)
        return cls(_text(exchange), _text(routing_key), message_id, receipt, time_us, content, at, sent_s, copies)

    def is_in(self, message: Message) -> bool:
        try:
            return (
                message.properties.message_id == self.message_id
                and (self.time_us is None or message.headers.get(TIME_HEADER) == self.time_us)
                and message.body == self.body
            )
        except DataError:
            # Every message sent through AMQP 0.9.1 can be decoded, so this message is another one.
            return False


@dataclass(eq=False)
class PlaceSearch:
    """One wait for the places of a message. It ends when all places are known, or at its deadline.

    `ends`: the offsets after the last messages of the possible streams, queried after the confirm; infinity if a stream
    cannot be read now. Empty if the streams are known exactly, or are too many.
    `recorded_to`: how far those streams were recorded before the last query of the places.
    """

    sent: SentMessage
    where: Destinations
    ends: dict[str, float]
    deadline: float
    places: set[MessageId] = field(default_factory=set)
    recorded_to: dict[str, float] = field(default_factory=dict)

    @property
    def missing(self) -> frozenset[str]:
        """The streams that may contain the message, but in which its place is not known."""
        return self.where.streams - {place.stream for place in self.places}

    @property
    def has_all(self) -> bool:
        """Whether all places are known.

        If the streams are known exactly, a place in each must be known. Otherwise one place must be known, and every
        other stream must be recorded up to the end that it had after the confirm.
        """
        if self.where.is_exact:
            return not self.missing
        is_recorded = (self.recorded_to.get(name, 0) >= end for name, end in self.ends.items() if name in self.missing)
        return bool(self.places) and all(is_recorded)


class Locator:
    """Finds the messages of one connection. `records`: Whether this process records the streams it publishes to."""

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
        # Without a database there are no receipts: the locator only searches streams.
        self._database = None if database is None else Database(database, refusing=None, pool_size=2)
        self._records = records
        self._configured_streams = streams
        self.receipt_s = receipt_s
        self._bindings: dict[str, tuple[float, frozenset[str]]] = {}
        self._warnings: set[tuple[str, str]] = set()
        self._reader = StreamReader(address, timeout_s=_CONNECT_S)
        self._is_closed = False
        self.waits: SharedWait[PlaceSearch, bool] = SharedWait(self._poll, first_s=0)

    def close(self) -> None:
        """Close the reader and the database. A search that is still running then opens a reader for each read."""
        self._is_closed = True
        self._reader.close()
        self.waits.join()
        if self._database is not None:
            self._database.close()

    # --- the broker: which streams may contain a message ----------------------------------------------------------

    def destinations_and_ends(self, sent: SentMessage, timeout_s: float) -> tuple[Destinations, dict[str, float]]:
        """Return the streams that may contain a confirmed message and, if not exact, the ends of those that exist."""
        where, ends = Destinations(self._configured_streams, is_exact=False), dict[str, float]()
        with within(max(LEAST_S, timeout_s)):
            with suppress(Transient, NotFound):
                where = self.destinations(sent)
                if sent.exchange == "" and where.streams:
                    where = replace(where, streams=where.streams.union(filter(_is_queue_name, sent.copies)))
                    names = where.streams
                    if len(names) <= _AWAITED_STREAMS_MAX:
                        with self.reader() as reader:
                            names = frozenset(name for name in names if reader.routes("", name) != [])
                    if not names:
                        text = "%r is not a stream, so receipts of messages published to it have no places"
                        self._warn_once(text, sent.routing_key)
                    where = Destinations(names, is_exact=where.is_exact or not names)
            if not where.is_exact and len(where.streams) <= _AWAITED_STREAMS_MAX:
                with suppress(Transient, NotFound, AccessRefused), self.reader() as reader:
                    # If no connection can be opened, the wait ends at the first place.
                    reader.missing([])
                    for stream in where.streams:
                        try:
                            bounds = reader.bounds(stream)
                        except Transient:
                            ends[stream] = math.inf
                        except (NotFound, AccessRefused):
                            pass
                        else:
                            if not bounds.is_silence:
                                ends[stream] = bounds.end
        return where, ends

    def destinations(self, sent: SentMessage) -> Destinations:
        """Return the queues or streams that the broker may have routed a message to.

        The default exchange routes only to the queue that the routing key names. A super stream's exchange routes to
        the partition that the routing key names. Any other exchange may route to the streams bound to it, and to the
        streams of `intercept(streams=…)`.
        """
        exchange, name = sent.exchange, sent.routing_key
        if exchange == "":
            return Destinations(frozenset([name] if _is_queue_name(name) else ()), is_exact=not sent.copies)
        bound = self._bound_streams(exchange)
        if f"{exchange}-{name}" in bound and all(stream.startswith(f"{exchange}-") for stream in bound):
            return Destinations(frozenset([f"{exchange}-{name}"]), is_exact=not sent.copies)
        return Destinations(bound | self._configured_streams, is_exact=False)

    def _bound_streams(self, exchange: str) -> frozenset[str]:
        if exchange.startswith(RESERVED_PREFIX):
            return frozenset()
        now = time.monotonic()
        queried_at, bound = self._bindings.get(exchange, (-math.inf, frozenset()))
        # A starting broker may not have restored its bindings yet.
        if now - queried_at >= (_BINDINGS_CACHE_S if bound else _EMPTY_CACHE_S):
            with self.reader() as reader:
                bound = frozenset(reader.bound(exchange))
            if len(self._bindings) >= _EXCHANGES_MAX:
                self._bindings.clear()
            self._bindings[exchange] = now, bound
            if not (bound or self._configured_streams):
                self._warn_once(
                    "the streams that exchange %r routes to are unknown, so receipts may be incomplete: name them "
                    "in intercept(…, streams=[…])",
                    exchange,
                )
        return bound

    def _warn_once(self, text: str, name: str) -> None:
        if (text, name) not in self._warnings and len(self._warnings) < _WARNINGS_MAX:
            self._warnings.add((text, name))
            logger.warning(text, name)

    @contextmanager
    def reader(self) -> Iterator[StreamReader]:
        """Provide the reader that all searches of this connection share.

        One reader per unsettled message would flood a restarted broker with connections.
        """
        if self._is_closed:
            with StreamReader.open(self._address, timeout_s=_CONNECT_S) as reader:
                yield reader
            return
        try:
            yield self._reader
        except UsedAfterClose as error:
            raise ConnectionLost("the connection was released during the search") from error

    # --- the table: which streams contain the message --------------------------------------------------------------

    def _poll(self, searches: Sequence[PlaceSearch]) -> Iterator[tuple[int, bool]]:
        """Query the places of all awaited messages, and yield the searches that have ended.

        While the database is unavailable, this treats the messages as not recorded yet.
        """
        awaited = frozenset[str]().union(*(search.ends for search in searches))
        # A wait includes a stream that was never recorded only if this process records.
        recorded_to = dict.fromkeys(awaited, 0 if self._records else math.inf)
        wanted = [search.sent.receipt for search in searches if search.sent.receipt is not None]
        places: defaultdict[str | None, set[MessageId]] = defaultdict(set)
        try:
            # Query the places last: they then include all rows up to `recorded_to`.
            for name, to_offset in self._rows(RECORDED_TO, names=list(awaited)) if awaited else ():
                recorded_to[name] = to_offset or 0
            for receipt, stream, offset in self._rows(PLACES, receipts=wanted):
                places[receipt].add(MessageId(stream, offset))
        except DatabaseUnavailable:
            return
        now = time.monotonic()
        for number, search in enumerate(searches):
            streams, is_exact = search.where.streams, search.where.is_exact
            found = (place for place in places[search.sent.receipt] if not is_exact or place.stream in streams)
            search.places = search.places.union(found)
            search.recorded_to = recorded_to
            if search.has_all or now >= search.deadline:
                yield number, True

    def _rows(self, statement: sa.TextClause, **parameters: list[str]) -> list[Any]:
        assert self._database is not None
        return self._database.rows(statement, {"vhost": self._address.vhost, **parameters})

    @cached_property
    def outcomes(self) -> Outcomes:
        assert self._database is not None
        return Outcomes(self._database)


def _is_queue_name(key: str) -> bool:
    return is_clean(key) and not key.startswith(RESERVED_PREFIX) and 1 <= len(key.encode()) <= NAME_BYTES_MAX


def _text(given: Any) -> str:
    return given.decode(errors="replace") if isinstance(given, bytes) else str(given)
