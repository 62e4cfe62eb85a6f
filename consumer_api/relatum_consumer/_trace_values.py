"""The values that a trace follows: which keys to search them by, their indexed messages, and the messages' links."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, TypeAlias

import sqlalchemy as sa

from relatum.common.ids import MessageId
from relatum.keys import KeyDefinition, bases_of
from relatum.reading import Message
from relatum.reading.extractor import Extractor
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum.store.rows import array_text
from relatum_consumer.lookups.by_key import rows_of, span_parameters, streams_with
from relatum_consumer.lookups.catalog import Catalog, named, streams_meant
from relatum_consumer.traces import Edge, Shared

Value: TypeAlias = tuple[int, str]
"""A key's id, and a value in canonical form."""

Places: TypeAlias = dict[MessageId, int | None]
"""Ids of messages, each with its time; None if the time is unknown."""


class KeyGraph:
    """The keys of a trace, and which key names which. A reference to a key outside the trace is ignored."""

    def __init__(self, definitions: Sequence[KeyDefinition]) -> None:
        self.definitions = {key.key_id: key for key in definitions}
        numbers = {key.name: key.key_id for key in definitions}
        self._named = {key.key_id: numbers[key.names] for key in definitions if key.names in numbers}
        self._namers: dict[int, list[int]] = defaultdict(list)
        for key_id, other in self._named.items():
            self._namers[other].append(key_id)
        # Faster than the definitions. It would return values inside headers and bodies last.
        self._extractor = Extractor(definitions) if all(key.is_plain for key in definitions) else None
        self._search_keys = {key_id: self._search_keys_of(key_id) for key_id in self.definitions}

    def _search_keys_of(self, key_id: int) -> tuple[int, ...]:
        """Return the keys to search a value by: the key itself, the key it names, and the keys that name it.

        They include keys that name the same key: their messages belong together even if no message has the named key.
        """
        roots = [key_id, *([self._named[key_id]] if key_id in self._named else [])]
        return tuple(dict.fromkeys(each for root in roots for each in (root, *self._namers[root])))

    def values_of(self, message: Message) -> tuple[Value, ...]:
        """Return a message's values, in the order of the keys. Invalid values are left out, as the recorder does."""
        if self._extractor is not None and message.raw is not None:
            return tuple(self._extractor.from_record(message.raw, message.chunk_ms).values)
        # This parses a body once for all keys.
        base_of = bases_of(message)
        return tuple((key_id, text) for key_id, key in self.definitions.items() for text in key.read(base_of)[0])

    def sought(self, values: Iterable[Value]) -> Iterable[Value]:
        return ((other, value) for key_id, value in values for other in self._search_keys[key_id])

    def links(
        self, values: Mapping[MessageId, Sequence[Value]], too_many: Iterable[Value]
    ) -> tuple[tuple[Edge, ...], tuple[Shared, ...]]:
        """Return the links between messages with these values, in the messages' order; `too_many` values share none."""
        carriers: dict[Value, list[MessageId]] = defaultdict(list)
        for where, pairs in values.items():
            for pair in pairs:
                carriers[pair].append(where)
        edges: list[Edge] = []
        for effect, pairs in values.items():
            for key_id, value in pairs:
                if key_id in self._named:
                    named = carriers.get((self._named[key_id], value), ())
                    causes: list[MessageId | None] = [each for each in named if each != effect]
                    name = self.definitions[key_id].name
                    edges += [Edge(cause, effect, name, value) for cause in causes or [None]]
        left_out = set(too_many)
        shared = [
            Shared(self.definitions[key_id].name, value, tuple(ids))
            for (key_id, value), ids in carriers.items()
            if len(ids) > 1
            and (key_id, value) not in left_out
            # If the trace has the message that the value names, edges link the others to it.
            and (self._named.get(key_id), value) not in carriers
        ]
        return tuple(edges), tuple(shared)


_VALUE: Final = 'wanted.value COLLATE "C"'
_WANTED: Final = "unnest(:key_ids::smallint[], :values::text[]) AS wanted (key_id, value)"


@lru_cache(maxsize=64)
def rows_of_values(names: int | None) -> sa.TextClause:
    """Select rows of values, at most `most` for each: key id, value, stream, offset, time.

    Each value takes one index probe of each part that may hold it. Rows of other virtual hosts, of replaced streams and
    of streams outside the `names` have a NULL stream, and count towards `most`. If that leaves out rows of a value, the
    caller selects them with `rows_by_stream`.
    """
    # The LIMIT makes PostgreSQL join value by value, with the index.
    return sql(f"""
        SELECT wanted.key_id, wanted.value, s.name, found.stream_offset, found.time_us
        FROM {_WANTED}
        CROSS JOIN LATERAL (
          SELECT r.stream_id, r.stream_offset, r.time_us
          FROM relatum.relationships r
          WHERE r.key_id = wanted.key_id AND r.value = {_VALUE}
            AND {part_may_hold_values("r", "wanted.key_id", _VALUE, _VALUE)}
          LIMIT :most::bigint
        ) AS found
        LEFT JOIN relatum.streams s ON s.stream_id = found.stream_id AND {streams_meant(names)}""")


@lru_cache(maxsize=64)
def rows_by_stream(names: int | None) -> sa.TextClause:
    """Select rows of the searched streams, in the time span if it is not NULL: `most` for each value and stream."""
    rows = rows_of("oldest", ("with_value.key_id", "with_value.value", "s.stream_id"), limit=":most::bigint")
    return sql(f"""
        WITH RECURSIVE {streams_with("wanted.key_id", "wanted.value", _WANTED)}
        SELECT with_value.key_id, with_value.value, s.name, found.stream_offset, found.time_us
        FROM with_value
        JOIN relatum.streams s ON s.stream_id = with_value.stream_id AND {streams_meant(names)}
        CROSS JOIN LATERAL {rows} AS found""")


def parameters_of(vhost: str, names: Sequence[str] | None, values: Sequence[Value], most: int) -> dict[str, Any]:
    """Return the parameters of both statements, except the time span."""
    key_ids, texts = [str(key_id) for key_id, _ in values], [text for _, text in values]
    arrays = {"key_ids": array_text(key_ids), "values": array_text(texts)}
    return named(names) | {"vhost": vhost, "most": most} | arrays


def places_of(catalog: Catalog, names: Sequence[str] | None, values: Sequence[Value], most: int) -> dict[Value, Places]:
    """Return the indexed messages of each value, at most `most`, whatever their times."""
    statement = rows_of_values(None if names is None else len(names))
    rows = catalog.servers.rows(statement, parameters_of(catalog.vhost, names, values, most))
    found = _by_value(rows, most)
    counts = Counter(map(itemgetter(0, 1), rows))
    undecided = [value for value, count in counts.items() if count >= most > len(found.get(value, ()))]
    return found | places_by_stream(catalog, names, undecided, most)


def places_by_stream(
    catalog: Catalog,
    names: Sequence[str] | None,
    values: Sequence[Value],
    most: int,
    since: int | None = None,
    until: int | None = None,
) -> dict[Value, Places]:
    """Like `places_of`, but slower, and only with times from `since` to before `until`; None: no bound."""
    if not values:
        return {}
    statement = rows_by_stream(None if names is None else len(names))
    parameters = parameters_of(catalog.vhost, names, values, most) | span_parameters(since, until)
    found = _by_value(catalog.servers.rows(statement, parameters), most)
    return {value: found.get(value, {}) for value in values}


def _by_value(rows: Iterable[Any], most: int) -> dict[Value, Places]:
    """Group the rows of searched streams by value, at most `most` for each."""
    found: dict[Value, Places] = {}
    for key_id, value, stream, offset, time_us in rows:
        if stream is not None:
            places = found.setdefault((key_id, value), {})
            if len(places) < most:
                places[MessageId(stream, offset)] = time_us
    return found
