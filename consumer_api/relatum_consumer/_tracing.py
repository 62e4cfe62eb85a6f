"""A trace: each hop finds all new values in one statement, and reads all new messages at once. See docs/adr/0027."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias

from relatum.checks import checked_count
from relatum.errors import InvalidInput
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.reading import ChunkCache, Message
from relatum.store.coverage import TIME
from relatum_consumer._trace_values import Directions, Places, Value, places_in_time, places_of
from relatum_consumer.lookups.answer import Status
from relatum_consumer.lookups.answering import ANSWER_MESSAGES_MAX, Lost, Row, again_if_replaced, in_time, verified
from relatum_consumer.lookups.arguments import Names, is_in_span, names_of, span_of
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.consumed import Consumed, GivenMessage, given_message
from relatum_consumer.lookups.proof import Evidence, evidence
from relatum_consumer.traces import Step, Stop, StopReason, Trace

HOPS_MAX: Final = 1_000
"""The most hops of a trace."""

FAN_OUT_MAX: Final = 10_000
"""The highest `fan_out=` of a trace."""

Start: TypeAlias = "Message | Consumed | tuple[str, Any]"
"""A message that was read or consumed, or a tuple of a key's name and a value."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    hops: int
    limit: int
    fan_out: int
    since: int | None
    until: int | None

    @property
    def is_in_time(self) -> bool:
        return self.since is not None or self.until is not None

    def has(self, time_us: int | None) -> bool:
        return is_in_span(time_us, self.since, self.until)


class _Visited(NamedTuple):
    """A message of the trace, and its number of hops from the start."""

    message: Message
    values: tuple[Value, ...]
    hops: int


def trace(
    catalog: Catalog,
    start: Start,
    by: Names,
    streams: Names,
    hops: int,
    limit: int,
    fan_out: int,
    since: datetime | None,
    until: datetime | None,
    *,
    complete: bool,
) -> Trace:
    """Trace everything that is connected with a start."""
    checked_count("hops", hops, most=HOPS_MAX)
    checked_count("limit", limit, most=ANSWER_MESSAGES_MAX)
    checked_count("fan_out", fan_out, most=FAN_OUT_MAX)
    bounds = _Bounds(hops, limit, fan_out, *span_of(since, until))
    names, meant = names_of("by", by), names_of("streams", streams)
    catalog.check_names(meant)
    if isinstance(start, MessageId):
        raise InvalidInput("a trace starts with a message, not with its place: relations.read(stream, offset) first")
    held: GivenMessage | None = None
    values: list[Value] = []
    required = set(names or ())
    if isinstance(start, tuple) and len(start) == 2 and isinstance(start[0], str):
        wanted = catalog.value_sought(*start)
        values.append((wanted.key_id, wanted.value))
        required.add(start[0])
        definitions = _keys(catalog, None if names is None else (*names, start[0]))
    else:
        held = given_message(start, "a message, or a key's name and a value as a tuple,")
        definitions = _keys(catalog, names)
        found = catalog.values_of(held.message, [key.name for key in definitions])
        if not found.wanted:
            alone = () if held.id is None else (held.message,)
            return Trace(alone, {message.id: 0 for message in alone}, missing_keys=found.missing_keys)
    required_ids = frozenset(key.key_id for key in definitions if key.name in required)

    def ask() -> Trace:
        course = _TraceRun(catalog, Directions(definitions), bounds, meant, held, values, required_ids)
        return course.trace(complete=complete)

    return again_if_replaced(catalog, ask, leaves_out=meant is None)


def _keys(catalog: Catalog, names: Sequence[str] | None) -> list[KeyDefinition]:
    """Return the keys to follow: the named keys, and the defined ones that they name."""
    chosen = catalog.definitions(names)
    if names is None:
        return chosen
    in_force = {key.name: key for key in catalog.definitions(None)}
    more = [in_force[key.names] for key in chosen if key.names in in_force]
    return list({key.name: key for key in (*chosen, *more)}.values())


class _TraceRun:
    """One trace in progress."""

    def __init__(
        self,
        catalog: Catalog,
        directions: Directions,
        bounds: _Bounds,
        names: tuple[str, ...] | None,
        start: GivenMessage | None,
        values: Sequence[Value],
        required: frozenset[int],
    ) -> None:
        self._catalog = catalog
        self._required = required
        self._directions = directions
        self._bounds = bounds
        self._names = names
        self._visited: dict[MessageId, _Visited] = {}
        self._asked: set[Value] = set()
        self._too_many: set[Value] = set()
        self._stops: list[Stop] = []
        self._steps: list[Step] = []
        self._lost = Lost()
        self._frontier: list[Value] = list(values)
        # Hops return to the same chunks: messages that belong together were published together.
        self._kept = ChunkCache()
        self._is_copy = None if start is None else start.is_copy
        if start is not None and start.id is not None:
            self._take(start.id, start.message, 0, directions.values_of(start.message))
        elif start is not None:
            self._frontier += directions.values_of(start.message)

    def trace(self, *, complete: bool) -> Trace:
        """Trace to the end, or to a bound."""
        # Before the index is asked for anything, so that the evidence holds for everything found.
        key_ids = [*self._directions.definitions, *([TIME] if self._bounds.is_in_time else [])]
        known = evidence(self._catalog, self._names, key_ids, kept=self._kept)
        if not known.streams:
            if known.unreadable_streams:
                raise self._catalog.why_left_out(known.unreadable_streams[0])
            if not known.gone:
                self._catalog.nothing_recorded()
        for hop in range(1, self._bounds.hops + 2):
            wanted = self._next_values()
            if not wanted:
                break
            if hop > self._bounds.hops:
                self._stops.append(Stop(StopReason.HOPS, len(wanted)))
                break
            if not self._hop(hop, wanted, known, complete=complete):
                break
        return self._concluded(known, complete=complete)

    def _next_values(self) -> list[Value]:
        frontier = dict.fromkeys(self._frontier)
        found = [each for each in dict.fromkeys(self._directions.sought(frontier)) if each not in self._asked]
        self._frontier = []
        return found

    @property
    def _sought(self) -> set[int]:
        """The ids of the keys that were searched."""
        return {key_id for key_id, _ in self._asked}

    def _take(self, where: MessageId, message: Message, hop: int, values: tuple[Value, ...]) -> None:
        hops = 0 if self._is_copy is not None and self._is_copy(message) else hop
        self._visited[where] = _Visited(message, values, hops)
        self._frontier += values

    # --- one hop ------------------------------------------------------------------------------------------

    def _hop(self, hop: int, wanted: Sequence[Value], known: Evidence, *, complete: bool) -> bool:
        """Find and read the messages with the values. True to go on."""
        self._asked.update(wanted)
        by_value = self._places(wanted)
        if complete:
            self._add_unrecorded(set(wanted), by_value, known)
        rows = self._new_rows(by_value)
        cut = len(rows) - (self._bounds.limit - len(self._visited))
        if cut > 0:
            rows = rows[:-cut]
            self._stops.append(Stop(StopReason.LIMIT, cut))
        lost = self._lost
        before, expired, deleted, was_whole = len(self._visited), len(lost.expired), len(lost.deleted), not lost.unread
        self._read(rows, hop, known)
        # Copies of the start do not count as found.
        found = sum(1 for met in islice(self._visited.values(), before, None) if met.hops)
        status = known.status(
            is_found=bool(found or cut > 0 or self._too_many.intersection(wanted)),
            was_read=complete,
            is_whole=was_whole and not lost.unread,
            has_expired=len(lost.expired) > expired,
            was_deleted=len(lost.deleted) > deleted,
            required=self._required & self._sought,
        )
        self._steps.append(Step(hop, len(wanted), found, status))
        return cut <= 0

    def _places(self, wanted: Sequence[Value]) -> dict[Value, Places]:
        """Return the indexed messages of each value; at most one above `fan_out`, to notice too many."""
        bounds, most = self._bounds, self._bounds.fan_out + 1
        found = places_of(self._catalog, self._names, wanted, most)
        if not bounds.is_in_time:
            return found
        # If a value has too many, ask for those in the span.
        full = [value for value, places in found.items() if len(places) >= most]
        span = {"since": bounds.since, "until": bounds.until}
        within = places_in_time(self._catalog, self._names, full, most, **span) if full else {}
        for value, places in found.items():
            if value in full:
                inside = within.get(value, {})
            else:
                inside = {where: time_us for where, time_us in places.items() if bounds.has(time_us)}
            if len(inside) < len(places):
                self._stop(StopReason.TIME, len(places) - len(inside), value)
            found[value] = inside
        return found

    def _stop(self, reason: StopReason, count: int, value: Value) -> None:
        self._stops.append(Stop(reason, count, self._directions.definitions[value[0]].name, value[1]))

    def _add_unrecorded(self, wanted: set[Value], by_value: dict[Value, Places], known: Evidence) -> None:
        """Add messages that are not recorded; per value at most one above `fan_out`, to notice too many."""

        def consider(message: Message) -> None:
            if not self._bounds.has(message.time_us):
                return
            for value in wanted.intersection(self._directions.values_of(message)):
                places = by_value.setdefault(value, {})
                if len(places) <= self._bounds.fan_out:
                    places.setdefault(message.id, message.time_us)

        known.scan(self._catalog.servers, consider)

    def _new_rows(self, by_value: Mapping[Value, Places]) -> list[Row]:
        """Return rows of new messages, by time, stream and offset; values with too many become stops."""
        new: dict[MessageId, Row] = {}
        for value, places in by_value.items():
            if len(places) > self._bounds.fan_out:
                self._too_many.add(value)
                self._stop(StopReason.FAN_OUT, len(places), value)
                continue
            for where, time_us in places.items():
                if where not in self._visited and where not in self._lost:
                    new.setdefault(where, Row(where, time_us)).carries.add(value)
        return sorted(new.values(), key=in_time)

    def _read(self, rows: Sequence[Row], hop: int, known: Evidence) -> None:
        """Read messages and check each against its row; deleted and refused streams are not asked."""

        def take(row: Row, message: Message) -> bool | None:
            values = self._directions.values_of(message)
            if not row.carries.issubset(values):
                return None
            self._take(row.id, message, hop, values)
            return True

        refused = {each.stream for each in known.unreadable_streams}
        asked: list[Row] = []
        for row in rows:
            if row.id.stream in refused:
                self._lost.unread[row.id] = None
            elif row.id.stream in known.gone:
                self._lost.deleted[row.id] = None
            else:
                asked.append(row)
        verified(self._catalog, asked, take, self._lost, is_named=self._names is not None, kept=self._kept)

    # --- the end ------------------------------------------------------------------------------------------

    def _concluded(self, known: Evidence, *, complete: bool) -> Trace:
        known.check_present(self._catalog, self._names)
        ordered = sorted((met.message for met in self._visited.values()), key=in_time)
        values = {message.id: self._visited[message.id].values for message in ordered}
        edges, shared = self._directions.links(values, self._too_many)
        found = Trace(
            tuple(ordered),
            {where: met.hops for where, met in self._visited.items()},
            edges,
            shared,
            tuple(self._stops),
            tuple(self._steps),
            expired=tuple(self._lost.expired),
            deleted=tuple(self._lost.deleted),
            unread=tuple(self._lost.unread),
            streams=known.streams,
            unreadable_streams=known.unreadable_streams,
        )
        if not complete:
            uncovered = tuple(known.uncovered) if known.is_open(self._required & self._sought) else ()
            new_keys = known.named_new_keys(self._catalog, self._sought)
            found = replace(found, uncovered=uncovered, new_keys=new_keys)
        if found.status is Status.NOT_RECORDED_YET:
            found = replace(found, unrecorded_streams=known.unrecorded_streams(self._catalog))
        return found
