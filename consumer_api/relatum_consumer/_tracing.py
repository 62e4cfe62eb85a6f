"""A trace: each hop searches all new values in one statement, and reads all new messages at once; docs/adr/0027."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

from relatum.common.checks import checked_count
from relatum.common.ids import MessageId
from relatum.errors import InvalidInput
from relatum.keys import KeyDefinition
from relatum.reading import ChunkCache, Message
from relatum.store.coverage import TIME
from relatum_consumer._trace_values import KeyGraph, Places, Value, places_by_stream, places_of
from relatum_consumer.lookups.answer import Status
from relatum_consumer.lookups.answering import (
    ANSWER_MESSAGES_MAX,
    LostMessages,
    Row,
    in_time,
    retry_if_replaced,
    verified,
)
from relatum_consumer.lookups.arguments import (
    Consumed,
    GivenMessage,
    Names,
    given_message,
    is_in_span,
    names_of,
    span_of,
)
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.proof import Evidence, evidence
from relatum_consumer.lookups.telemetry import Lookups, lookup
from relatum_consumer.traces import Step, Stop, StopReason, Trace

HOPS_MAX: Final = 1_000
"""The highest `hops=` of a trace."""

FAN_OUT_MAX: Final = 10_000
"""The highest `fan_out=` of a trace."""

Start: TypeAlias = "Message | Consumed | tuple[str, Any]"
"""A message that was read or consumed, or a tuple of a key's name and a value."""


class _Visited(NamedTuple):
    message: Message
    values: tuple[Value, ...]
    hops: int


def _start_of(
    catalog: Catalog, start: Start, names: Sequence[str] | None
) -> tuple[GivenMessage | None, list[Value], list[KeyDefinition]]:
    """Return the message or the values that a trace starts with, and the keys to follow."""
    if isinstance(start, MessageId):
        raise InvalidInput("a trace starts with a message, not with an id: read the message with relations.read(…)")
    if isinstance(start, tuple) and len(start) == 2 and isinstance(start[0], str):
        wanted = catalog.value_sought(*start)
        return None, [(wanted.key_id, wanted.value)], _keys(catalog, None if names is None else (*names, start[0]))
    given = given_message(start, "a message, or a key's name and a value as a tuple,")
    return given, [], _keys(catalog, names)


def _keys(catalog: Catalog, names: Sequence[str] | None) -> list[KeyDefinition]:
    """Return the keys to follow: the named keys, and the defined keys that they name."""
    chosen = catalog.definitions(names)
    if names is None:
        return chosen
    in_force = {key.name: key for key in catalog.definitions(None)}
    more = [in_force[key.names] for key in chosen if key.names in in_force]
    return list({key.name: key for key in (*chosen, *more)}.values())


@dataclass(slots=True)
class _TraceRun:
    """One trace in progress; its bounds are the arguments of `Relations.trace`. Times are microseconds since 1970."""

    catalog: Catalog
    key_graph: KeyGraph
    names: tuple[str, ...] | None
    required: Set[int]
    hops: int
    limit: int
    fan_out: int
    since: int | None
    until: int | None
    frontier: list[Value] = field(default_factory=list)
    visited: dict[MessageId, _Visited] = field(default_factory=dict)
    searched: set[Value] = field(default_factory=set)
    searched_keys: set[int] = field(default_factory=set)
    too_many: set[Value] = field(default_factory=set)
    stops: list[Stop] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    lost: LostMessages = field(default_factory=LostMessages)
    # Later hops read the same chunks again: messages that belong together are published together.
    chunks: ChunkCache = field(default_factory=ChunkCache)
    is_copy: Callable[[Message], bool] | None = None

    def trace(self, start: GivenMessage | None, values: Sequence[Value], *, complete: bool) -> Trace:
        if start is not None:
            self.is_copy, values = start.is_copy, self.key_graph.values_of(start.message)
            if start.id is not None:
                self.visited[start.id] = _Visited(start.message, tuple(values), 0)
        self.frontier += values
        # Collected before the first query of the index, so that the evidence holds for everything found.
        key_ids = [*self.key_graph.definitions, *[TIME] * self._is_bounded]
        known = evidence(self.catalog, self.names, key_ids, chunks=self.chunks)
        if not known.streams and (known.unreadable_streams or not known.gone):
            known.nothing_searched(self.catalog)
        for hop in range(1, self.hops + 2):
            sought = dict.fromkeys(self.key_graph.sought(dict.fromkeys(self.frontier)))
            wanted, self.frontier = [value for value in sought if value not in self.searched], []
            if not wanted:
                break
            if hop > self.hops:
                self.stops.append(Stop(StopReason.HOPS, len(wanted)))
                break
            if not self._hop(hop, wanted, known, complete=complete):
                break
        return self._concluded(known, complete=complete)

    @property
    def _is_bounded(self) -> bool:
        return self.since is not None or self.until is not None

    def _hop(self, hop: int, wanted: Sequence[Value], known: Evidence, *, complete: bool) -> bool:
        """Find and read the messages with the values. Returns False if the trace has reached its limit of messages."""
        self.searched.update(wanted)
        self.searched_keys.update(key_id for key_id, _ in wanted)
        by_value = self._places(wanted)
        if complete:
            self._add_unrecorded(set(wanted), by_value, known)
        rows = self._new_rows(by_value)
        cut = len(rows) - (self.limit - len(self.visited))
        if cut > 0:
            rows = rows[:-cut]
            self.stops.append(Stop(StopReason.LIMIT, cut))
        lost = LostMessages()
        found = sum(self._read(rows, hop, known, lost))
        self.lost.statuses |= lost.statuses
        outcome = Status.FOUND if found or cut > 0 or self.too_many.intersection(wanted) else lost.outcome
        required = self.required & self.searched_keys
        status = known.status(
            outcome, was_read=complete, is_whole=not self.lost.ids(Status.UNPROVEN), required=required
        )
        self.steps.append(Step(hop, len(wanted), found, status))
        return cut <= 0

    def _places(self, wanted: Sequence[Value]) -> dict[Value, Places]:
        """Return the indexed messages of each value: at most `fan_out` + 1, which shows that there are too many."""
        most = self.fan_out + 1
        found = places_of(self.catalog, self.names, wanted, most)
        if not self._is_bounded:
            return found
        # If a value has too many messages, query only those in the time span.
        full = [value for value, places in found.items() if len(places) >= most]
        within = places_by_stream(self.catalog, self.names, full, most, self.since, self.until)
        for value, places in found.items():
            inside = within.get(value)
            if inside is None:
                inside = {
                    each: time_us for each, time_us in places.items() if is_in_span(time_us, self.since, self.until)
                }
            if len(inside) < len(places):
                self._stop(StopReason.TIME, len(places) - len(inside), value)
            found[value] = inside
        return found

    def _stop(self, reason: StopReason, count: int, value: Value) -> None:
        self.stops.append(Stop(reason, count, self.key_graph.definitions[value[0]].name, value[1]))

    def _add_unrecorded(self, wanted: set[Value], by_value: dict[Value, Places], known: Evidence) -> None:
        """Add messages that are not recorded: at most `fan_out` + 1 for each value."""
        outside: Counter[Value] = Counter()

        def consider(message: Message) -> None:
            is_inside = is_in_span(message.time_us, self.since, self.until)
            for value in wanted.intersection(self.key_graph.values_of(message)):
                if not is_inside:
                    outside[value] += 1
                elif len(places := by_value.setdefault(value, {})) <= self.fan_out:
                    places.setdefault(message.id, message.time_us)

        known.scan(self.catalog.servers, consider)
        reported = {(stop.key, stop.value) for stop in self.stops if stop.reason is StopReason.TIME}
        for value, count in outside.items():
            # The index may have counted some of these messages. Its count is a lower bound already.
            if (self.key_graph.definitions[value[0]].name, value[1]) not in reported:
                self._stop(StopReason.TIME, count, value)

    def _new_rows(self, by_value: Mapping[Value, Places]) -> list[Row]:
        """Return the rows of new messages, ordered by time, stream and offset; values with too many become stops."""
        new: dict[MessageId, Row] = {}
        for value, places in by_value.items():
            if len(places) > self.fan_out:
                self.too_many.add(value)
                self._stop(StopReason.FAN_OUT, len(places), value)
                continue
            for where, time_us in places.items():
                if where not in self.visited and where not in self.lost.statuses:
                    new.setdefault(where, Row(where, time_us)).carries.add(value)
        return sorted(new.values(), key=in_time)

    def _read(self, rows: Sequence[Row], hop: int, known: Evidence, lost: LostMessages) -> list[bool]:
        """Read and check the messages of readable streams. Returns for each whether it is not a copy of the start."""

        def take(row: Row, message: Message) -> bool | None:
            values = self.key_graph.values_of(message)
            if not row.carries.issubset(values):
                return None
            is_copy = self.is_copy is not None and self.is_copy(message)
            self.visited[row.id] = _Visited(message, values, 0 if is_copy else hop)
            self.frontier += values
            return not is_copy

        refused = [each.stream for each in known.unreadable_streams]
        left_out = dict.fromkeys(known.gone, Status.DELETED) | dict.fromkeys(refused, Status.UNPROVEN)
        lost.statuses |= {row.id: left_out[row.id.stream] for row in rows if row.id.stream in left_out}
        readable = [row for row in rows if row.id.stream not in left_out]
        return verified(self.catalog, readable, take, lost, is_named=self.names is not None, chunks=self.chunks)

    def _concluded(self, known: Evidence, *, complete: bool) -> Trace:
        known.check_present(self.catalog, self.names, self.searched_keys)
        visited = dict(sorted(self.visited.items(), key=lambda each: in_time(each[1].message)))
        values = {where: visit.values for where, visit in visited.items()}
        edges, shared = self.key_graph.links(values, self.too_many)
        is_open = not complete and known.is_open(self.required & self.searched_keys)
        found = Trace(
            tuple(visit.message for visit in visited.values()),
            {where: visit.hops for where, visit in self.visited.items()},
            edges,
            shared,
            tuple(self.stops),
            tuple(self.steps),
            expired=self.lost.ids(Status.EXPIRED),
            deleted=self.lost.ids(Status.DELETED),
            unread=self.lost.ids(Status.UNPROVEN),
            streams=known.streams,
            unreadable_streams=known.unreadable_streams,
            uncovered=tuple(known.uncovered) if is_open else (),
            new_keys=() if complete else known.named_new_keys(self.catalog, self.searched_keys),
        )
        if found.status is Status.NOT_RECORDED_YET:
            found = replace(found, unrecorded_streams=known.unrecorded_streams(self.catalog))
        return found


class TraceMethods:
    """The tracing method of `Relations`."""

    _catalog: Catalog
    _lookups: Lookups

    @lookup
    def trace(
        self,
        start: Start,
        *,
        by: Names = None,
        streams: Names = None,
        hops: int = 8,
        limit: int = 1_000,
        fan_out: int = 200,
        since: datetime | None = None,
        until: datetime | None = None,
        complete: bool = False,
    ) -> Trace:
        """Return all messages connected with a message or a value, by following one or several keys hop by hop.

        Each hop searches all new values with one statement, and reads all new messages together. If a key names another
        key (`KeyDefinition(…, names=)`), its links have a direction: they show which message caused which.

        Args:
            start: A message read or consumed, recorded or not, or a tuple of a key's name and a value.
            by: The key or keys to follow, together with the keys that they name. None: all defined keys.
            streams: The streams and super streams to search. None: all recorded streams. The start may be elsewhere.
            hops: Maximum number of hops from the start, 1 to 1,000. Default 8.
            limit: Maximum number of messages including the start, 1 to 100,000. Default 1,000. The last hop leaves out
                its newest messages.
            fan_out: A value that more than this many messages have is not followed; 1 to 10,000. Default 200. Recorded
                messages count even if retention has dropped them since.
            since: As for `find`; the start itself may be earlier.
            until: As for `find`.
            complete: True also reads retained messages that are not recorded yet, at each hop.

        Returns:
            The messages, their links, what a bound left out, and how certain each step is. The trace covers all
            messages that were recorded when the call began (with `complete`, all that were retained), and perhaps some
            later ones.

        Raises:
            InvalidRelationshipKey: `start` is a value that no message can carry.
        """
        checked_count("hops", hops, most=HOPS_MAX)
        checked_count("limit", limit, most=ANSWER_MESSAGES_MAX)
        checked_count("fan_out", fan_out, most=FAN_OUT_MAX)
        low, high = span_of(since, until)
        key_names, stream_names = names_of("by", by), names_of("streams", streams)
        self._catalog.check_names(stream_names)
        given, values, definitions = _start_of(self._catalog, start, key_names)
        if given is not None:
            found, missing_keys = self._catalog.values_of(given.message, [key.name for key in definitions])
            if not found:
                messages = () if given.id is None else (given.message,)
                return Trace(messages, {message.id: 0 for message in messages}, missing_keys=missing_keys)
        required = dict(values).keys() | {key.key_id for key in definitions if key.name in (key_names or ())}
        key_graph = KeyGraph(definitions)

        def attempt() -> Trace:
            run = _TraceRun(self._catalog, key_graph, stream_names, required, hops, limit, fan_out, low, high)
            return run.trace(given, values, complete=complete)

        return retry_if_replaced(self._catalog, attempt, leaves_out=stream_names is None)
