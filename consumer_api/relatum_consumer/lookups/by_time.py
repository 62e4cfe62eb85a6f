"""Lookups by time: the messages next to a moment, and around it."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Final

import sqlalchemy as sa

from relatum.common.checks import checked_name, checked_seconds
from relatum.common.ids import MessageId
from relatum.common.limits import INTEGER_MAX, TIME_US_MAX
from relatum.errors import AccessRefused, InvalidInput, NotFound
from relatum.reading import Message
from relatum.store.coverage import TIME
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.lookups.answer import Answer, Hit
from relatum_consumer.lookups.answering import Find, Found, LostMessages, Matches, Row, answered, verified
from relatum_consumer.lookups.arguments import Consumed, Names, check_limit, given_message, names_of, time_us_of
from relatum_consumer.lookups.by_key import OwnMessage, Question, answer, without_values
from relatum_consumer.lookups.catalog import Catalog, PresentStream, Wanted, check_times, in_partition_order
from relatum_consumer.lookups.proof import Evidence
from relatum_consumer.lookups.servers import Servers
from relatum_consumer.lookups.telemetry import Lookups, lookup
from relatum_consumer.lookups.time_index import Direction, Nearest, Place, blocks_between, next_by_blocks, read_within

FIRST_OF_ITS_TIME: Final = -1
"""Sorts before the offsets of all messages with the same time."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment to search from: microseconds since 1970, and the id of the given message, if known."""

    time_us: int
    id: MessageId | None = None

    def edge(self, stream: str, among: Collection[str], direction: Direction, *, inclusive: bool) -> Place:
        """Return the place in a stream beyond which messages match.

        Messages of the same time match by their order: by offset in the given message's own stream, by partition and
        offset in its super stream. In other streams they match if `inclusive`.
        """
        if self.id is not None and stream == self.id.stream:
            return self.time_us, self.id.offset
        if self.id is not None and self.id.stream in among:
            comes_later = in_partition_order(stream) > in_partition_order(self.id.stream)
            return self.time_us, FIRST_OF_ITS_TIME if comes_later else INTEGER_MAX
        begins_at_time = inclusive == (direction == "after")
        return self.time_us, FIRST_OF_ITS_TIME if begins_at_time else INTEGER_MAX


@dataclass(frozen=True, slots=True)
class Search:
    """A search by time in streams and super streams; None: in all. `by`: The key's value that messages must carry."""

    catalog: Catalog
    names: tuple[str, ...] | None
    by: Wanted | None = None

    def targets(self) -> list[PresentStream]:
        """The recorded streams to search; without names, only streams whose times are recorded."""
        streams = self.catalog.streams(self.names)
        if self.names is None:
            return [stream for stream in streams if stream.record_time]
        check_times(streams)
        return streams

    def answered(self, find: Find, *, complete: bool) -> Answer:
        """Return the answer from the results of `find`; its proof needs recorded times, and the key if there is one."""
        key_ids = [TIME] if self.by is None else [TIME, self.by.key_id]
        return answered(self.catalog, self.names, key_ids, find, complete=complete)

    def shares_key(self, message: Message) -> bool:
        """Whether a message carries the key's value; True without a key."""
        return self.by is None or self.by.is_of(message)

    def found(self, messages: Iterable[Message], lost: LostMessages) -> Found:
        """Return the messages found, with the key that they share."""
        keys = () if self.by is None else (self.by.definition.name,)
        return Found(tuple(Hit(message, keys) for message in messages), lost)


def rank(message: Message) -> tuple[int, tuple[int, str], int]:
    """A sort key of messages with a time: by time, partition and offset."""
    return time_of(message), in_partition_order(message.stream), message.offset


def time_of(message: Message) -> int:
    """Return the time of a message that has one."""
    assert message.time_us is not None, "messages without a time were left out"
    return message.time_us


class TimeMethods:
    """The methods of `Relations` that find messages by time."""

    _catalog: Catalog
    _lookups: Lookups

    @lookup
    def after(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        *,
        by: str | None = None,
        inclusive: bool = False,
        complete: bool = False,
    ) -> Answer:
        """Return the next message in time in a stream, even if the stream is not in the order of times.

        In the message's own stream, equal times are ordered by offset (in its super stream by partition, then offset),
        so repeated calls return every message once. In another stream, or from a `datetime`, the next message is
        strictly later.

        Args:
            moment: A message read or consumed, whose time is used; or a `datetime` (without a zone: UTC). If a client
                does not provide the message's stream and offset, the lookup may return a copy of the message.
            stream: The stream or super stream to search.
            by: A key's name: only messages that share its value with the given message. Not with a `datetime`.
            inclusive: True accepts an equal time in another stream: the message with the lowest offset.
            complete: True also reads retained messages that are not recorded yet.

        Returns:
            At most one message, with the status.

        Raises:
            TimeNotRecorded: recording of times is switched off for the stream.
            InvalidInput: the message has no time, or several values of the key.
        """
        return self._next_to({"after": inclusive}, moment, stream, by, complete=complete)

    @lookup
    def before(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        *,
        by: str | None = None,
        inclusive: bool = False,
        complete: bool = False,
    ) -> Answer:
        """Return the previous message in time in a stream; arguments, result and errors are those of `after`.

        With `inclusive`, it returns the message with the highest offset among those of an equal time.
        """
        return self._next_to({"before": inclusive}, moment, stream, by, complete=complete)

    @lookup
    def nearest(
        self, moment: Message | Consumed | datetime, stream: str, *, by: str | None = None, complete: bool = False
    ) -> Answer:
        """Return the message nearest in time in a stream, other than the given message.

        An equal time is nearest. Of two equally near messages, the earlier one is returned; of several messages with
        the same time at or before the moment, the one with the highest offset. In the message's own stream, messages of
        the same time with a higher offset count as later: the first of them is returned if no earlier one has the time.
        Arguments, result and errors are those of `after`.
        """
        return self._next_to({"before": True, "after": False}, moment, stream, by, complete=complete)

    def _next_to(
        self,
        sides: Mapping[Direction, bool],
        moment: Message | Consumed | datetime,
        stream: str,
        by: str | None,
        *,
        complete: bool,
    ) -> Answer:
        """Find the nearest message on the given sides. A side is True if an equal time in another stream matches."""
        at, message = _moment(moment)
        search = _search(self._catalog, message, stream, by)
        if isinstance(search, Answer):
            return search
        return search.answered(partial(_nearest, search, at, sides), complete=complete)

    @lookup
    def window(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        *,
        before_s: float = 0.0,
        after_s: float = 0.0,
        by: str | None = None,
        complete: bool = False,
    ) -> Answer:
        """Return all messages of a stream around a moment, ordered by time, partition and offset.

        The given message itself is left out, if its stream and offset are known.

        Args:
            moment: As for `after`.
            stream: As for `after`.
            before_s: Seconds before the moment, inclusive, 0 (default) or more.
            after_s: Seconds after the moment, inclusive, 0 (default) or more.
            by: As for `after`.
            complete: As for `after`.

        Raises:
            TimeNotRecorded: as for `after`.
        """
        at, message = _moment(moment)
        low, high = _span(at, before_s, after_s)
        search = _search(self._catalog, message, stream, by)
        if isinstance(search, Answer):
            return search
        if search.by is None:
            return search.answered(partial(_within, search, at, low, high, None), complete=complete)
        search.targets()
        question = Question((search.by,), search.names, since=low, until=high + 1, own=OwnMessage(at.id))
        found = answer(self._catalog, question, complete=complete)
        return replace(found, hits=tuple(sorted(found.hits, key=lambda hit: rank(hit.message))))

    @lookup
    def around(
        self,
        moment: Message | Consumed | datetime,
        streams: Names = None,
        *,
        before_s: float = 0.0,
        after_s: float = 0.0,
        limit: int | None = None,
        complete: bool = False,
    ) -> Answer:
        """Return all messages of several streams around a moment, merged by time.

        Messages of the same time are ordered by stream, shorter names first (`r-2` before `r-10`), then offset.

        Args:
            moment: A `datetime` (without a zone: UTC), or a message read or consumed; the message is included.
            streams: The streams and super streams to search. None: all streams that are recorded with their times.
            before_s: As for `window`.
            after_s: As for `window`.
            limit: Maximum number of messages; those nearest to the moment are returned. None: all, up to 100,000.
            complete: As for `after`.

        Raises:
            TimeNotRecorded: as for `after`, for a named stream.
        """
        search = Search(self._catalog, names_of("streams", streams))
        check_limit(limit, "oldest")
        at, _ = _moment(moment)
        low, high = _span(at, before_s, after_s)
        # Without an id, the given message is included.
        return search.answered(partial(_within, search, replace(at, id=None), low, high, limit), complete=complete)


def _moment(moment: Message | Consumed | datetime) -> tuple[Moment, Message | None]:
    """Return the moment, and the message whose time it is; None for a datetime."""
    if isinstance(moment, datetime):
        return Moment(time_us_of(moment)), None
    given = given_message(moment, "a datetime or a message")
    if given.message.time_us is None:
        where = f" at {given.id}" if given.id else ""
        raise InvalidInput(f"the message{where} has no time: pass a datetime instead")
    return Moment(given.message.time_us, given.id), given.message


def _span(at: Moment, before_s: float, after_s: float) -> tuple[int, int]:
    """Return a time span around a moment, both ends included. Very long spans are cut to twice the calendar."""
    for argument, seconds in (("before_s", before_s), ("after_s", after_s)):
        checked_seconds(argument, seconds, most=math.inf)
    before_us, after_us = (round(min(seconds * 1_000_000, 2 * TIME_US_MAX)) for seconds in (before_s, after_s))
    return at.time_us - before_us, at.time_us + after_us


def _search(catalog: Catalog, message: Message | None, stream: str, by: str | None) -> Search | Answer:
    """Return the search, or the answer if the message has no value of the key."""
    if not isinstance(stream, str):
        raise InvalidInput(f"stream= takes the name of one stream or super stream, not {type(stream).__name__}")
    checked_name("stream", stream)
    if by is None:
        return Search(catalog, (stream,))
    if not isinstance(by, str):
        raise InvalidInput(f"by= takes the name of one key, not {type(by).__name__}")
    if message is None:
        raise InvalidInput("by= needs a message, whose value it uses: with a datetime, use find(…, since=, until=)")
    wanted, missing_keys = catalog.values_of(message, [by])
    if len(wanted) > 1:
        raise InvalidInput(
            f"the message has {len(wanted)} values of the key {by!r}, and by= takes one: "
            "use find(…, since=, until=) for one of them"
        )
    if wanted:
        return Search(catalog, (stream,), wanted[0])
    return without_values(catalog, [stream], missing_keys)


def _nearest(search: Search, moment: Moment, sides: Mapping[Direction, bool], known: Evidence | None) -> Found:
    lost = LostMessages()
    targets = search.targets()
    among = {stream.name for stream in targets}.union({each.stream for each in known.uncovered} if known else ())
    found: list[Message] = []
    for direction, inclusive in sides.items():
        edges = {name: moment.edge(name, among, direction, inclusive=inclusive) for name in among}
        nearest = {name: Nearest(edge, direction, search.shares_key) for name, edge in edges.items()}
        for stream in targets:
            find_next = next_by_blocks if search.by is None else partial(_next_by_key, search)
            find_next(search.catalog.servers, stream, nearest[stream.name], lost)
        if known:
            # The lambda is called before `nearest` changes.
            known.scan(search.catalog.servers, lambda message: nearest[message.stream].consider(message))  # noqa: B023
        candidates = [each.message for each in nearest.values() if each.message is not None]
        if candidates:
            found.append(min(candidates, key=rank) if direction == "after" else max(candidates, key=rank))
    closest = sorted(found, key=lambda message: (abs(time_of(message) - moment.time_us), rank(message)))
    return search.found(closest[:1], lost)


def _keyed_neighbour(beyond: str, order: str) -> sa.TextClause:
    return sql(f"""
        SELECT r.stream_offset, r.time_us
        FROM relatum.relationships r
        WHERE r.key_id = :key_id::smallint AND r.value = :value::text AND r.stream_id = :stream_id::int
          AND {part_may_hold_values("r", ":key_id::smallint", ":value::text", ":value::text")}
          AND (r.time_us, r.stream_offset) {beyond} (:t::bigint, :o::bigint) AND r.stream_offset >= :floor::bigint
        ORDER BY r.time_us {order}, r.stream_offset {order}
        LIMIT 1""")


KEYED_NEIGHBOUR: Final[Mapping[Direction, sa.TextClause]] = {
    "after": _keyed_neighbour(">", ""),
    "before": _keyed_neighbour("<", "DESC"),
}
"""Selects the row of a key's value in a stream next to (`t`, `o`), in the order of (time, offset): offset, time."""


def _next_by_key(search: Search, servers: Servers, stream: PresentStream, nearest: Nearest, lost: LostMessages) -> None:
    """Pass the next message with the key's value to `nearest`."""
    by, edge = search.by, nearest.edge
    assert by is not None, "only lookups by key come here"
    while nearest.message is None:
        parameters = {"key_id": by.key_id, "value": by.value, "stream_id": stream.stream_id, "t": edge[0], "o": edge[1]}
        parameters["floor"] = lost.floors.get(stream.name, 0)
        rows = servers.rows(KEYED_NEIGHBOUR[nearest.direction], parameters)
        if not rows:
            return
        places = [Row(MessageId(stream.name, offset), time_us, {by.key_id}) for offset, time_us in rows]
        read = verified(search.catalog, places, lambda _, each: each if by.is_of(each) else None, lost, is_named=True)
        for message in read:
            nearest.consider(message)


def _within(search: Search, at: Moment, low: int, high: int, limit: int | None, known: Evidence | None) -> Found:
    def is_meant(message: Message) -> bool:
        return message.time_us is not None and low <= message.time_us <= high and message.id != at.id

    def first(messages: Iterable[Message]) -> list[Message]:
        return sorted(messages, key=lambda message: (abs(time_of(message) - at.time_us), rank(message)))[:limit]

    lost = LostMessages(left_out=search.catalog.unreadable_streams(search.names))
    servers, targets = search.catalog.servers, search.targets()
    found = Matches(is_meant, "ask for a shorter time span", first=first, limit=limit)
    by_stream = blocks_between(servers, targets, low, high)
    for stream in targets:
        blocks = by_stream.get(stream.stream_id, [])
        try:
            read_within(servers, blocks, stream, low, high, lost, found.consider)
        except (AccessRefused, NotFound) as error:
            if search.names is not None:
                raise
            # No error, since the stream was not named: the answer says that matching messages could not be read.
            lost.take(MessageId(stream.name, blocks[0].first_offset), INTEGER_MAX, is_sure=isinstance(error, NotFound))
    if known:
        known.scan(servers, found.consider)
    messages = found.messages if limit is None else first(found.messages)
    return search.found(sorted(messages, key=rank), lost)
