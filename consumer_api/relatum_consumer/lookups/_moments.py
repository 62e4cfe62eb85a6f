"""Look-ups by time, as steps: beside a moment, and around it; of what is recorded, and of what is not."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from relatum.reading import Message
from relatum_consumer.lookups._answer import Answer
from relatum_consumer.lookups._answering import Find, Found, answered
from relatum_consumer.lookups._gathered import Gathered
from relatum_consumer.lookups._proof import Evidence
from relatum_consumer.lookups._requests import Steps
from relatum_consumer.lookups._time_index import blocks_within, keyed_within, next_by_blocks, next_by_key
from relatum_consumer.lookups._time_search import Lost, Moment, Nearest, Search, Side, Window, rank, time_of


def beside(search: Search, moment: Moment, sides: Sequence[Side], *, complete: bool) -> Steps[Answer]:
    """The next message on a side of the moment; of two sides the nearer one, and the earlier if equally near."""
    return _answered(search, partial(_nearest, search, moment, sides), complete=complete)


def window(
    search: Search, span: Window, *, complete: bool, nearest: int | None = None, limit: int | None = None
) -> Steps[Answer]:
    """All messages in a span of time, by time, partition and offset; with a limit those nearest to a time."""
    return _answered(search, partial(_within, search, span, nearest, limit), complete=complete)


def _answered(search: Search, find: Find, *, complete: bool) -> Steps[Answer]:
    yield from search.catalog.check_names(search.names)
    return (yield from answered(search.catalog, search.names, search.key_ids, find, complete=complete))


# --- beside a moment --------------------------------------------------------------------------------------


def _nearest(search: Search, moment: Moment, sides: Sequence[Side], known: Evidence | None) -> Steps[Found]:
    lost = Lost()
    targets = yield from search.targets()
    among = {stream.name for stream in targets}.union({each.stream for each in known.uncovered} if known else ())
    found: list[Message] = []
    for side in sides:
        candidates: list[Message] = []
        for stream in targets:
            edge = moment.edge(stream.name, among, side)
            look = next_by_blocks if search.by is None else next_by_key
            message = yield from look(search, stream, edge, side.direction, lost)
            candidates += [] if message is None else [message]
        if known:
            candidates += yield from _unrecorded_beside(search, moment, side, known, among)
        if candidates:
            found.append(min(candidates, key=rank) if side.direction == "after" else max(candidates, key=rank))
    nearest = sorted(found, key=lambda message: (abs(time_of(message) - moment.time_us), rank(message)))
    return search.found(nearest[:1], lost)


def _unrecorded_beside(
    search: Search, moment: Moment, side: Side, known: Evidence, among: Collection[str]
) -> Steps[list[Message]]:
    """The nearest message of each stream, of what is not recorded of it."""
    streams = {each.stream for each in known.uncovered}
    nearest = {stream: Nearest(search, moment.edge(stream, among, side), side.direction) for stream in streams}
    yield from known.scan(lambda message: nearest[message.stream].consider(message))
    return [each.message for each in nearest.values() if each.message is not None]


# --- around a moment --------------------------------------------------------------------------------------


def _within(
    search: Search, span: Window, nearest: int | None, limit: int | None, known: Evidence | None
) -> Steps[Found]:
    def first(messages: Iterable[Message]) -> list[Message]:
        return sorted(messages, key=lambda message: (abs(time_of(message) - (nearest or 0)), rank(message)))[:limit]

    lost = Lost()
    advice = "ask for a shorter span of time"
    found = Gathered(lambda message: span.holds(search, message), advice, first=first, limit=limit)
    targets = yield from search.targets()
    if search.by is None:
        yield from blocks_within(search, targets, span, lost, found)
    else:
        for stream in targets:
            yield from keyed_within(search, stream, span, lost, found)
    if known:
        yield from known.scan(found.consider)
    messages = found.messages if limit is None else first(found.messages)
    return search.found(sorted(messages, key=rank), lost)
