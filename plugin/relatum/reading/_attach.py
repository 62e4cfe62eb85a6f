"""One subscription for a few chunks: what is asked, and what came of it. No I/O."""

from relatum.errors import ProtocolError
from relatum.reading._leading import NotSettled
from relatum.reading._stream_errors import moved, refusal
from relatum.wire import Answer, Broker, Chunk, Code, Event, StreamMoved, StreamPlaces, frames


class Attach:
    """One subscription for a few chunks, and what it brought.

    After a Subscribe, or a Credit, the answer to the next command is a barrier: all chunks that were granted and are
    there have come by then. The Unsubscribe of a pair is such a command; a subscription that may go on has an empty
    Metadata there, which costs the broker nothing.
    """

    __slots__ = (
        "answer",
        "barrier",
        "chunks",
        "chunks_seen",
        "code",
        "granted",
        "is_at_barrier",
        "is_done",
        "reached",
        "stream",
        "subscribed",
        "subscription",
    )

    def __init__(self, stream: str, subscription: int, subscribed: int, barrier: int, granted: int) -> None:
        self.stream = stream
        self.subscription = subscription
        self.subscribed = subscribed
        self.barrier = barrier
        self.granted = granted
        self.chunks: list[Chunk] = []
        self.code: int = Code.OK
        self.answer = b""
        self.reached: int | None = None
        self.chunks_seen = 0
        self.is_at_barrier = self.is_done = False

    def take(self, event: Event) -> None:
        """Take one event, of this pair or not."""
        if type(event) is Chunk:
            if event.subscription == self.subscription:
                self.chunks.append(event)
        elif type(event) is Answer:
            if event.correlation == self.subscribed:
                self.code = event.code
            elif event.correlation == self.barrier:
                self.is_at_barrier, self.answer = True, event.body
        elif type(event) is StreamMoved and event.stream == self.stream:
            raise moved(self.stream)

    def check(self) -> None:
        """Raise what the answer to Subscribe amounts to."""
        if self.code != Code.OK:
            raise refusal(self.stream, self.code)


def other_nodes(places: StreamPlaces, own: Broker) -> list[Broker]:
    """The nodes with a replica of a stream, other than one: replicas first, they have less to do than leaders."""
    if places.code != Code.OK:
        return []
    leader = (places.leader,) if places.leader is not None else ()
    return [node for node in dict.fromkeys((*places.replicas, *leader)) if node != own]


def not_settled(last: Attach, *, may_be_empty: bool) -> NotSettled:
    """The error for a leader that has nothing to show yet, by what came of asking for the last chunk."""
    message = f"The stream {last.stream!r} is starting, or what it has is not committed yet."
    places = places_in(last.answer, last.stream)
    is_alone = not set(places.replicas) - {places.leader}
    return NotSettled(message, stream=last.stream, may_be_empty=may_be_empty, is_alone=is_alone)


def places_in(body: bytes, stream: str) -> StreamPlaces:
    """Where a stream lies, by an answer to Metadata."""
    for places in frames.decode_metadata(body):
        if places.stream == stream:
            return places
    raise ProtocolError(f"The broker did not answer for the stream {stream!r}.")
