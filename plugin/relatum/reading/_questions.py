"""What is asked over one connection: a message, the ends of streams, where they are, what is bound and routed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final

from relatum.errors import AccessRefused, NotFound, StreamUnavailable
from relatum.headers import BROKERS_OWN, NAME_BYTES_MAX
from relatum.reading._attach import Attach, not_settled, other_nodes, places_in
from relatum.reading._batches import StreamBounds
from relatum.reading._connection import SocketConnection
from relatum.reading._leading import LedElsewhere
from relatum.reading._message import Message
from relatum.reading._stream_errors import refusal
from relatum.wire import (
    FIRST,
    LAST,
    Answer,
    Broker,
    Chunk,
    Code,
    Start,
    StartSpec,
    StreamPlaces,
    frames,
    record_at,
)

STATS_SINCE: Final = (3, 11)
"""Version from which StreamStats is answered."""

ROUTE_SINCE: Final = (4, 3)
"""Version from which Route is known to be safe. In 3.10.8 the one process that serves all stream connections of a node
evaluates it, with a message that has no content: any exchange that looks into messages (headers, hash by header, recent
history, JMS topic) crashes it, reached directly, as alternate exchange or through a binding between exchanges. 4.3.6
evaluates it in the process of the connection, with an empty message. Versions between were not tried."""

RECOVERED_SINCE: Final = (4, 3)
"""Version from which a broker is known to have its bindings before it lets anybody in. 3.10.8 answers while it recovers
them: of 40 there were none for up to 0.6 s, then some for 20 to 50 ms, never the same for over 20. Versions between
were not tried."""

RECOVERING_S: Final = 0.1
"""Seconds in which a broker that recovers bindings surely recovers another one."""

PLACES_AT_ONCE: Final = 128
"""Streams of one question where they lie: 33 kB of names at most."""


def find(connection: SocketConnection, stream: str, offset: int) -> Message | None:
    """The message at an offset, in one round trip; None where this node has none there."""
    attach = connection.attach(stream, StartSpec(Start.OFFSET, offset))
    connection.until(attach)
    attach.check()
    for chunk in attach.chunks:
        record = record_at(chunk, offset)
        if record is not None:
            return Message.from_record(stream, offset, record, chunk.time_ms)
    return None


# --- the ends of streams ----------------------------------------------------------------------------------------------


def bounds(connection: SocketConnection, stream: str, *, any_node: bool = False) -> StreamBounds:
    """The first and the last offset, in one round trip where this node leads.

    `any_node`: True takes this node's word though it does not lead: they are not proven then.

    Raises:
        LedElsewhere: this node does not lead the stream.
        NotSettled: it does, and has nothing to show yet: ask again.
    """
    first, last = connection.attach(stream, FIRST), attach_at_end(connection, stream)
    connection.until(first, last)
    check_leading(connection, last, any_node=any_node)
    shown = _shown(first, last, is_proven=not any_node)
    if shown is not None:
        return shown
    may_be_empty = not first.chunks
    if may_be_empty and not any_node and not connection.is_of_before(STATS_SINCE):
        if _has_no_message(connection, stream):
            return StreamBounds(None, None, is_proven=True)
        # A leader shows nothing until another replica has answered it, however long that takes after an election.
        may_be_empty = False
    raise not_settled(last, may_be_empty=may_be_empty)


def ask_bounds(
    connection: SocketConnection, streams: Sequence[str], lasts: Collection[str]
) -> dict[str, tuple[Attach | None, Attach]]:
    """Ask for the ends of a few streams, of `lasts` for the last one alone; does not wait: see `all_bounds`."""
    return {
        stream: (
            None if stream in lasts else connection.attach(stream, FIRST),
            attach_at_end(connection, stream),
        )
        for stream in streams
    }


def all_bounds(
    connection: SocketConnection,
    pairs: Mapping[str, tuple[Attach | None, Attach]],
    keep: Callable[[str, Chunk], object],
) -> dict[str, StreamBounds]:
    """The first and the last offset of those of the streams that this node leads and that have messages to show.

    All in one round trip. The first is 0 where it was not asked for. `keep` is shown the chunks that came.
    """
    connection.until(*(attach for pair in pairs.values() for attach in pair if attach is not None))
    found: dict[str, StreamBounds] = {}
    for stream, (first, last) in pairs.items():
        # What it is that is wrong with a stream is found out by asking for that one alone.
        with suppress(NotFound, AccessRefused, StreamUnavailable):
            check_leading(connection, last, any_node=False)
            shown = _shown(last if first is None else first, last, is_proven=True)
            if shown is not None:
                is_first_known = first is not None or shown.last is None
                found[stream] = shown if is_first_known else StreamBounds(0, shown.last, is_proven=True)
                for chunk in (*(first.chunks if first is not None else ()), *last.chunks):
                    keep(stream, chunk)
    return found


def _shown(first: Attach, last: Attach, *, is_proven: bool) -> StreamBounds | None:
    """A stream's first and last offset, by its first and its last chunk; None where one of them did not come."""
    first.check()
    last.check()
    if not (first.chunks and last.chunks):
        return None
    end = last.chunks[-1].last_offset
    # A chunk of batches without a record has none, and may be all there is.
    return StreamBounds(*((first.chunks[0].first_offset, end) if end >= 0 else (None, None)), is_proven=is_proven)


def attach_at_end(connection: SocketConnection, stream: str) -> Attach:
    """Ask for the last chunk, and who leads the stream; does not wait."""
    last = connection.subscribe(stream, LAST, 1)
    connection.end(last)
    connection.session.send(frames.metadata(last.barrier, [stream]))
    return last


def check_leading(connection: SocketConnection, last: Attach, *, any_node: bool) -> None:
    """See that this node leads the stream, by what came of `attach_at_end`.

    Raises:
        LedElsewhere: it does not.
    """
    if last.code not in (Code.OK, Code.STREAM_NOT_AVAILABLE):
        last.check()
    places = places_in(last.answer, last.stream)
    if not any_node and (places.code != Code.OK or places.leader != connection.own_node):
        message = f"The stream {last.stream!r} is led by another node, or by none at present."
        raise LedElsewhere(message, stream=last.stream, leader=places.leader)


def _has_no_message(connection: SocketConnection, stream: str) -> bool:
    """Whether the leader's log has no message at all, committed or not; from RabbitMQ 3.11 on.

    The broker keeps notes of its own in the log (offsets that readers stored, for example), and retention may
    leave nothing else. They are counted, and no reader is given them.
    """
    before = _stats(connection, stream)
    if before.get("first_chunk_id", 0) < 0:
        return True
    if before.get("committed_chunk_id", -1) != before.get("last_chunk_id"):
        return False
    # All that is written is committed. So this attach is given the first message, if there is one, unless the
    # leader was elected anew just now, which sets the committed chunk back.
    first = connection.attach(stream, FIRST)
    connection.until(first)
    first.check()
    return not first.chunks and before == _stats(connection, stream)


def _stats(connection: SocketConnection, stream: str) -> dict[str, int]:
    """What the leader says of its log; empty where it says nothing."""
    answer = connection.answer(frames.stream_stats, stream)
    return frames.decode_stats(answer.body) if answer.code == Code.OK else {}


# --- exchanges and places ---------------------------------------------------------------------------------------------


def routes(connection: SocketConnection, exchange: str, routing_key: str) -> list[str] | None:
    """The streams that an exchange routes a key to; None where this broker cannot be asked without harm."""
    if exchange == "":
        return _named(connection, routing_key)
    if exchange.startswith(BROKERS_OWN) or not _answers_routes(connection):
        return None
    _prove_alive(connection)
    answer = connection.answer(frames.route, routing_key, exchange)
    if answer.code == Code.STREAM_DOES_NOT_EXIST:
        raise NotFound(f"There is no exchange {exchange!r}.")
    return _strings(answer, exchange)


def _answers_routes(connection: SocketConnection) -> bool:
    """Whether Route is known to do no harm there; a version that cannot be read is not known."""
    parts = connection.session.server_properties.get("version", "").split(".")[:2]
    return len(parts) == 2 and all(part.isdecimal() for part in parts) and tuple(map(int, parts)) >= ROUTE_SINCE


def _named(connection: SocketConnection, name: str) -> list[str]:
    """The stream of that name, if it is one: all that the default exchange can lead to.

    Never by Route: RabbitMQ 3.10 delivers an empty message where the key is an address of direct reply-to.
    """
    if name.startswith(BROKERS_OWN) or not 1 <= len(name.encode(errors="replace")) <= NAME_BYTES_MAX:
        return []
    return [] if places(connection, name).code == Code.STREAM_DOES_NOT_EXIST else [name]


def partitions(
    connection: SocketConnection, super_stream: str, before: list[str] | None = None
) -> tuple[list[str], bool]:
    """The streams bound to an exchange, in order: a super stream's; none where there is no such exchange.

    It lists bindings and routes nothing, so exchanges of every kind may be asked about.

    Args:
        connection: The connection.
        super_stream: The exchange.
        before: What it was a moment ago, where that might have been too few.

    Returns:
        The streams, and whether they may be too few: the broker may be recovering the others. Ask again then.
    """
    if not super_stream or super_stream.startswith(BROKERS_OWN):
        return [], False
    _prove_alive(connection)
    answer = connection.answer(frames.partitions, super_stream)
    if answer.code == Code.STREAM_DOES_NOT_EXIST:
        return [], False
    found = _strings(answer, super_stream)
    if found == before:
        connection.settled.add(super_stream)
    may_lack = super_stream not in connection.settled and connection.is_of_before(RECOVERED_SINCE)
    return found, bool(found) and may_lack


def _prove_alive(connection: SocketConnection) -> None:
    """Exchange something harmless: a connection that is lost afterwards was lost over the question itself.

    So nobody takes it for an idle connection that had been closed, and asks once more.
    """
    connection.answer(frames.metadata, [])
    connection.is_reused = False


def _strings(answer: Answer, name: str) -> list[str]:
    if answer.code != Code.OK:
        raise refusal(name, answer.code)
    return frames.decode_strings(answer.body)


def elsewhere(connection: SocketConnection, stream: str) -> list[Broker]:
    """The other nodes that have a stream."""
    return other_nodes(places(connection, stream), connection.own_node)


def places(connection: SocketConnection, stream: str) -> StreamPlaces:
    """On which nodes a stream is."""
    return places_in(connection.answer(frames.metadata, [stream]).body, stream)


def missing(connection: SocketConnection, streams: Sequence[str]) -> list[str]:
    """Those of the streams that the broker does not know, in few round trips; it says so of other queues, too."""
    found: list[str] = []
    for start in range(0, len(streams), PLACES_AT_ONCE):
        answer = connection.answer(frames.metadata, list(streams[start : start + PLACES_AT_ONCE]))
        known = frames.decode_metadata(answer.body)
        found += [each.stream for each in known if each.code == Code.STREAM_DOES_NOT_EXIST]
    return found
