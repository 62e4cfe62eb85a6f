"""`Relations.trace` of 1,000 messages in five streams, compared with `read_many` of the same messages."""

from collections.abc import Callable, Iterator
from typing import Final

from benchmarks import _streams as streams
from benchmarks._bare import BareStreamClient
from benchmarks._context import Context
from benchmarks._results import Row, attempted
from benchmarks._timing import in_turns, median, milliseconds
from relatum import MessageId
from relatum.keys import KeyDefinition
from relatum.reading import Message
from relatum.recording import backfill
from relatum.store.catalog import add_keys
from relatum.store.database import as_engine
from relatum_consumer import Relations, Status

GROUP: Final = "trace"

MESSAGES: Final = 1_000
STREAMS: Final = 5
GAP: Final = 20
"""Other messages between two traced messages of a stream."""

AIM: Final = 3.0
ROUNDS: Final = 15
WAYS: Final = {"ten effects each": 10, "two effects each": 2}


def measure(context: Context) -> Iterator[Row]:
    """Yield the rows about traces."""
    what = f"`trace` of {MESSAGES:,} messages in {STREAMS} streams"
    yield from attempted(GROUP, what, lambda: _compare(context, what))


def _compare(context: Context, what: str) -> Iterator[Row]:
    each = MESSAGES // STREAMS * GAP
    database = context.new_database()
    with as_engine(database) as engine:
        add_keys(engine, ["id", *(KeyDefinition(_cause(width), names="id") for width in WAYS.values())])
    names = []
    for number in range(STREAMS):
        names.append(context.stream(f"trace-{number}", lambda name, n=number: _write(context, name, n, each), each))
        backfill(context.broker, database, names[-1])
    ids = [MessageId(names[number % STREAMS], number // STREAMS * GAP) for number in range(MESSAGES)]
    with Relations(context.broker, database) as relations:
        start = relations.read(*ids[0])
        for kind, width in WAYS.items():
            context.say(f"{what}, {kind}")
            yield _row(context, f"{what}, {kind}", relations, start, ids, _cause(width))
    context.drop_database(database)


def _row(context: Context, what: str, relations: Relations, start: Message, ids: list[MessageId], key: str) -> Row:
    found = relations.trace(start, by=key, hops=20)
    assert (found.status, {message.id for message in found}) == (Status.FOUND, set(ids))
    ways: dict[str, Callable[[], object]] = {
        "trace": lambda: relations.trace(start, by=key, hops=20),
        "many": lambda: [message for message in relations.read_many(ids) if isinstance(message, Message)],
    }
    taken = {name: median(values) for name, values in in_turns(ways, context.rounds(ROUNDS)).items()}
    ratio = taken["trace"] / taken["many"]
    return Row(
        GROUP,
        what,
        milliseconds(taken["trace"]),
        f"{milliseconds(taken['many'])}: `read_many` of the same",
        ratio,
        f"≤ {AIM:g} ×",
        ratio <= AIM,
        f"{len(found.steps)} hops",
        figures={f"{name}_s": value for name, value in taken.items()} | {"hops": len(found.steps)},
    )


def _cause(width: int) -> str:
    return f"cause_{width}"


def _write(context: Context, stream: str, number: int, messages: int) -> None:
    with BareStreamClient(context.stream_url) as client:
        client.publish_all(stream, (_encoded(number, place) for place in range(messages)))


def _encoded(stream: int, place: int) -> bytes:
    """Encode a message of the trace or another one; all have two headers."""
    number = place // GAP * STREAMS + stream
    headers = {"order_id": f"other-{stream}-{place}", "host": streams.host(place)}
    if place % GAP == 0:
        headers = {"id": f"m{number}", "host": streams.host(place)}
        headers |= {_cause(width): f"m{(number - 1) // width}" for width in WAYS.values() if number}
    pairs = b""
    for name, value in headers.items():
        pairs += b"\xa1%c%b\xa1%c%b" % (len(name), name.encode(), len(value), value.encode())
    body = streams.body(number)
    return b"\0St\xc1%c%c%b\0Su\xa0%c%b" % (len(pairs) + 1, 2 * len(headers), pairs, len(body), body)
