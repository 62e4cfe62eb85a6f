"""Lookups by key: probe the index, read the indexed messages, and prove that there is no message if none is found."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Final, TypeVar

import sqlalchemy as sa

from relatum.common.checks import checked_count, checked_text
from relatum.common.ids import MessageId
from relatum.common.limits import INTEGER_MAX, INTEGER_MIN, KEY_VALUE_BYTES_MAX
from relatum.errors import InvalidInput
from relatum.reading import Message
from relatum.store.coverage import TIME
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.lookups.answer import Answer, Hit, MissingKey, Status
from relatum_consumer.lookups.answering import (
    ANSWER_MESSAGES_MAX,
    Found,
    LostMessages,
    Matches,
    Row,
    answered,
    check_count,
    in_time,
    verified,
)
from relatum_consumer.lookups.arguments import (
    Consumed,
    Names,
    Order,
    check_limit,
    given_message,
    is_in_span,
    names_of,
    span_of,
)
from relatum_consumer.lookups.catalog import Catalog, Wanted, named, streams_meant
from relatum_consumer.lookups.proof import Evidence

_Item = TypeVar("_Item", Row, Message)

_ADVICE: Final = "pass limit=, or a shorter time span (since=, until=)"


class OwnMessage:
    """The ids of the given message: one id, or the ids of the copies that are found while messages are read."""

    def __init__(self, where: MessageId | None = None, is_copy: Callable[[Message], bool] | None = None) -> None:
        self._is_copy = is_copy
        self.ids: set[MessageId] = set() if where is None else {where}

    @property
    def copies(self) -> tuple[MessageId, ...]:
        """The ids of the copies found so far, in order; empty if the given message has an id."""
        return () if self._is_copy is None else tuple(sorted(self.ids))

    def holds(self, message: Message) -> bool:
        """Whether a message is the given one or its copy; the ids of copies are collected."""
        if self._is_copy is None:
            return bool(self.ids) and message.id in self.ids
        if message.id not in self.ids and self._is_copy(message):
            self.ids.add(message.id)
        return message.id in self.ids


@dataclass(frozen=True, slots=True)
class Question:
    """A search by key, except for the given message. Times are microseconds since 1970; `until` is exclusive."""

    wanted: tuple[Wanted, ...]
    names: tuple[str, ...] | None = None
    order: Order = "oldest"
    limit: int | None = None
    since: int | None = None
    until: int | None = None
    own: OwnMessage = field(default_factory=OwnMessage)
    missing_keys: tuple[MissingKey, ...] = ()
    being_read: list[MessageId] = field(default_factory=list)
    """Ids of the indexed messages that are being read now."""

    @property
    def key_ids(self) -> list[int]:
        """The ids of what must be recorded: the keys, and `TIME` if the search has a time span."""
        is_bounded = self.since is not None or self.until is not None
        return [wanted.key_id for wanted in self.wanted] + [TIME] * is_bounded

    @property
    def rows_max(self) -> int:
        """Rows to select in each stream: more than the limit, for the given message or to detect too many."""
        return max(1, len(self.own.ids)) + (ANSWER_MESSAGES_MAX if self.limit is None else self.limit)

    def is_meant(self, message: Message) -> bool:
        """Whether a message matches the search."""
        if not any(each.is_of(message) for each in self.wanted) or self.own.holds(message):
            return False
        return is_in_span(message.time_us, self.since, self.until)

    def hit(self, row: Row | None, message: Message) -> Hit | None:
        """Return the message with the keys that it shares; None if it lacks a value that its row has."""
        found = [each for each in self.wanted if each.is_of(message)]
        if row is not None and not row.carries.issubset(each.key_id for each in found):
            return None
        # A message may share several values of one key.
        return Hit(message, tuple(dict.fromkeys(each.definition.name for each in found)))

    def sort(self, items: Iterable[_Item]) -> list[_Item]:
        """Return the items in the order of the answer, up to the limit."""
        sort_key: Callable[[Row | Message], Any] = attrgetter("id") if self.order == "offset" else in_time
        ordered = sorted(items, key=sort_key, reverse=self.order == "newest")
        if self.limit is None:
            check_count(len(ordered), _ADVICE)
        return ordered[: self.limit]


def question_of(
    catalog: Catalog, message: Message | Consumed, to: Names, by: Names, limit: int | None, order: Order
) -> Question:
    """Build the search for messages related to a given message."""
    given = given_message(message)
    names, keys = names_of("to", to), names_of("by", by)
    check_limit(limit, order)
    wanted, missing_keys = catalog.values_of(given.message, keys)
    return Question(wanted, names, order, limit, own=OwnMessage(given.id, given.is_copy), missing_keys=missing_keys)


def sought(
    catalog: Catalog,
    key: str,
    value: Any,
    streams: Names,
    since: datetime | None,
    until: datetime | None,
    limit: int | None,
    order: Order,
) -> Question:
    """Build the search for messages that carry a key's value."""
    names = names_of("streams", streams)
    check_limit(limit, order)
    low, high = span_of(since, until)
    return Question((catalog.value_sought(key, value),), names, order, limit, low, high)


def answer(catalog: Catalog, question: Question, *, complete: bool = False) -> Answer:
    """Answer a search by key."""
    if not question.wanted:
        return without_values(catalog, question.names, question.missing_keys)
    find = partial(_find, catalog, question)
    return answered(catalog, question.names, question.key_ids, find, complete=complete)


def without_values(catalog: Catalog, names: Sequence[str] | None, missing_keys: tuple[MissingKey, ...]) -> Answer:
    """Return the answer for a message that has none of the keys: no message can share a value with it."""
    catalog.check_names(names)
    streams = set(catalog.recorded(names))
    for name in names or ():
        # Without a query of a server, if the names are recorded.
        if not catalog.recorded([name]):
            streams.update(catalog.servers.partitions(name) or [name])
    if not streams:
        catalog.nothing_recorded()
    return Answer(Status.ABSENT, streams=tuple(sorted(streams)), missing_keys=missing_keys)


def _find(catalog: Catalog, question: Question, known: Evidence | None) -> Found:
    found = probe(catalog, question)
    if known is None:
        return found
    gathered = Matches(question.is_meant, _ADVICE, first=question.sort, limit=question.limit)
    known.scan(catalog.servers, gathered.consider)
    read = (*(hit.message for hit in found.hits), *gathered.messages)
    messages = question.sort({message.id: message for message in read}.values())
    hits = tuple(hit for message in messages if (hit := question.hit(None, message)))
    return Found(hits, found.lost, question.own.copies)


def probe(catalog: Catalog, question: Question) -> Found:
    """Read and check the indexed messages."""
    left_out = catalog.unreadable_streams(question.names)
    lost = LostMessages(floors=dict.fromkeys((each.stream for each in left_out), INTEGER_MAX), left_out=left_out)
    while True:
        known = len(question.own.ids) + len(lost.statuses)
        probed = catalog.servers.rows(*_probe(catalog, question, lost.floors))
        rows = _merged(question, probed)
        question.being_read[:] = [row.id for row in rows]
        read = verified(catalog, rows, question.hit, lost, is_named=question.names is not None)
        question.being_read.clear()
        hits = [hit for hit in read if not question.own.holds(hit.message)]
        # New ones may hide further matches beyond the limit. Each round knows more of them, so the rounds end.
        is_whole = len(question.own.ids) + len(lost.statuses) == known
        if is_whole or question.limit is None or len(rows) < question.limit:
            return Found(tuple(hits), lost, question.own.copies)


def _probe(catalog: Catalog, question: Question, floors: Mapping[str, int]) -> tuple[sa.TextClause, dict[str, Any]]:
    names, wanted = question.names, question.wanted
    parameters: dict[str, Any] = {"vhost": catalog.vhost, "limit": question.rows_max} | named(names)
    parameters |= span_parameters(question.since, question.until)
    for n, each in enumerate(wanted):
        parameters |= {f"key_id_{n}": each.key_id, f"value_{n}": each.value}
    if floors:
        parameters |= {"floor_names": list(floors), "floors": list(floors.values())}
    return probe_statement(
        question.order,
        keys=len(wanted),
        names=None if names is None else len(names),
        floored=bool(floors),
        many=len(catalog.recorded(names)) > FEW_STREAMS,
    ), parameters


def _merged(question: Question, probed: Iterable[tuple[str, int, int | None, int]]) -> list[Row]:
    """Merge rows into one per message, in the order of the answer, up to the limit, without the given message."""
    rows: dict[MessageId, Row] = {}
    for stream, offset, time_us, key_id in probed:
        where = MessageId(stream, offset)
        if where not in question.own.ids:
            rows.setdefault(where, Row(where, time_us)).carries.add(key_id)
    return question.sort(rows.values())


FEW_STREAMS: Final = 4
"""Up to this many streams, each part of the table is probed for each stream. If there are more, the statement first
finds the streams that have the value."""


def span_parameters(since: int | None, until: int | None) -> dict[str, int | None]:
    """Return a time span's parameters: NULL without bounds; one missing bound becomes the least or greatest time."""
    if since is None and until is None:
        return {"since": None, "until": None}
    return {"since": INTEGER_MIN + 1 if since is None else since, "until": INTEGER_MAX if until is None else until}


@lru_cache(maxsize=512)
def probe_statement(order: Order, *, keys: int, names: int | None, floored: bool, many: bool = False) -> sa.TextClause:
    """Select rows of key values in streams: stream, offset, time, key id; at most `limit` for each key and stream.

    The statement probes each part's index once for each key and stream, and stops at the limit: a value shared by a
    million messages costs no more than any other. Only the order by offset must sort a value's rows in a stream.

    The text depends on the number of keys (`key_id_…`, `value_…`) and of names (`name_…`; None: all recorded streams):
    with arrays the probe takes 1.5 times as long. `floored` selects only offsets from `floors` on, one for each of
    `floor_names`. `many` first finds the streams that have the value, with the same result.
    """
    key_id, value, wanted = ":key_id_0::smallint", ":value_0::text", ""
    if keys > 1:
        pairs = ", ".join(f"(:key_id_{n}::smallint, :value_{n}::text)" for n in range(keys))
        key_id, value, wanted = "wanted.key_id", "wanted.value", f"(VALUES {pairs}) AS wanted (key_id, value)"
    floors = "LEFT JOIN unnest(:floor_names::text[], :floors::bigint[]) AS floors (name, floor) USING (name)"
    found = rows_of(order, (key_id, value, "meant.stream_id"), floor="coalesce(floors.floor, 0)" if floored else "0")
    has_value = f"({key_id}, {value}, meant.stream_id) IN (SELECT * FROM with_value WHERE stream_id IS NOT NULL)"
    return sql(f"""
        WITH RECURSIVE meant AS (
          SELECT s.stream_id, s.name
          FROM relatum.streams s
          WHERE {streams_meant(names)}
        ){f", {streams_with(key_id, value, wanted)}" if many else ""}
        SELECT meant.name, found.stream_offset, found.time_us, {key_id} AS key_id
        FROM meant
        {f"CROSS JOIN {wanted}" if wanted else ""}
        {floors if floored else ""}
        CROSS JOIN LATERAL {found} AS found /* of relatum.relationships */
        {f"WHERE {has_value}" if many else ""}""")


def rows_of(order: Order, place: tuple[str, str, str], *, floor: str = "0", limit: str = ":limit::bigint") -> str:
    """Return SQL for the rows of a key's value in a stream, from an offset on, in the time span if it is not NULL."""
    return f"relatum.rows_of({', '.join((*place, floor, ':since::bigint', ':until::bigint', limit))}, '{order}')"


def streams_with(key_id: str, value: str, wanted: str) -> str:
    """Return SQL for the table `with_value`: for each value the streams that have its rows, in order, then NULL."""
    return f"""with_value (key_id, value, stream_id) AS (
          SELECT {key_id}, {value}, relatum.stream_of({key_id}, {value}, 0)
          {f"FROM {wanted}" if wanted else ""}
          UNION ALL
          SELECT key_id, value, relatum.stream_of(key_id, value, stream_id)
          FROM with_value
          WHERE stream_id IS NOT NULL
        )"""


VALUES_MAX: Final = 1_000
"""The highest `limit=` of a list of a key's values."""

VALUES_STEPS: Final = 200
"""Index probes beyond the limit, for values of other virtual hosts or replaced streams."""

_LAST: Final = "\U0010ffff"
"""The highest code point, a noncharacter: with it, a prefix sorts after all values that begin with the prefix."""

# The walk starts before the first pair of value and stream: no stream has the id -1.
VALUES_OF_KEY: Final = sql(f"""
    WITH RECURSIVE walk (value, stream_id, is_meant, step) AS (
      SELECT :low::text COLLATE "C", -1, false, 0
      UNION ALL
      SELECT following.value, following.stream_id,
        EXISTS (SELECT * FROM relatum.streams s WHERE s.stream_id = following.stream_id AND {streams_meant(None)}),
        walk.step + 1
      FROM walk
      CROSS JOIN LATERAL (
        SELECT r.value, r.stream_id
        FROM relatum.relationships r
        WHERE r.key_id = :key_id::smallint
          AND (r.value, r.stream_id) > (walk.value, CASE WHEN walk.is_meant THEN {2**31 - 1} ELSE walk.stream_id END)
          AND r.value <= :high::text
          AND {part_may_hold_values("r", ":key_id::smallint", "walk.value", ":high::text")}
        ORDER BY r.value, r.stream_id
        LIMIT 1
      ) AS following
      WHERE walk.step < :steps::bigint
    )
    SELECT value FROM walk WHERE is_meant LIMIT :most::bigint""")
"""Selects the first `most` values of `key_id` in present streams of `vhost` from `low` to `high`, in order.

A step finds the next pair of value and stream with one probe of each part's index. If the stream is searched, the next
step skips the value's other streams; otherwise it takes the value's next stream. The walk ends after `steps`.
"""


def values_parameters(vhost: str, key_id: int, prefix: str, most: int) -> dict[str, Any]:
    """Return the parameters of `VALUES_OF_KEY` for values with a prefix, compared by their UTF-8 bytes."""
    steps = most + VALUES_STEPS
    return {"vhost": vhost, "key_id": key_id, "low": prefix, "high": prefix + _LAST, "most": most, "steps": steps}


def values(catalog: Catalog, key: str, prefix: str, limit: int) -> tuple[str, ...]:
    """Return a key's first values that begin with a prefix."""
    checked_count("limit", limit, most=VALUES_MAX)
    if len(checked_text("prefix", prefix, what="the beginning of a value").encode()) > KEY_VALUE_BYTES_MAX:
        raise InvalidInput(f"prefix= takes the beginning of a value: text of {KEY_VALUE_BYTES_MAX:,} bytes at most")
    definition = catalog.definition(key)
    if definition.is_composite:
        raise InvalidInput(f"the key {key!r} is composite: only values of keys that are not composite are listed")
    parameters = values_parameters(catalog.vhost, definition.key_id, prefix, limit)
    return tuple(value for (value,) in catalog.servers.rows(VALUES_OF_KEY, parameters))
