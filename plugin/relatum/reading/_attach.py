"""One subscription for a few chunks.

The broker handles a connection's commands in order: a Subscribe with a few credits and an Unsubscribe written together
are answered by the Subscribe's answer, at most that many chunks, and the Unsubscribe's answer. Chunks that did not come
before the latter are not there. So each question of the kind "what is at or after" is one round trip, without a
time-out, and many may be in flight. That nothing came is no proof that nothing is there, though: see `_leaders`.
"""

from relatum.reading._bounds import moved, refusal
from relatum.reading._connection import SocketConnection
from relatum.wire import Answer, Chunk, Code, Event, StartSpec, StreamMoved, frames


class Attach:
    """One subscription for a few chunks, and what it brought; nothing here waits, see `until`.

    After a Subscribe, or a Credit, the answer to the next command is a barrier: all chunks that were granted and are
    there have come by then. The Unsubscribe of a pair is such a command; a subscription that may go on has an empty
    Metadata there, which costs the broker nothing.
    """

    __slots__ = (
        "_session",
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

    def __init__(self, connection: SocketConnection, stream: str, start: StartSpec, chunks: int = 1) -> None:
        self._session = session = connection.session
        self.stream = stream
        self.subscription = connection.next_subscription()
        self.subscribed = session.next_correlation()
        self.barrier = session.next_correlation()
        self.granted = chunks
        self.chunks: list[Chunk] = []
        self.code: int = Code.OK
        self.answer = b""
        self.reached: int | None = None
        self.chunks_seen = 0
        self.is_at_barrier = self.is_done = False
        session.send(frames.subscribe(self.subscribed, self.subscription, stream, start, chunks))

    @classmethod
    def once(cls, connection: SocketConnection, stream: str, start: StartSpec, chunks: int = 1) -> "Attach":
        """Ask for at most that many chunks from a start on, and end there."""
        attach = cls(connection, stream, start, chunks)
        connection.session.unsubscribe(attach.subscription, attach.barrier)
        attach.is_done = True
        return attach

    @classmethod
    def to_go_on(cls, connection: SocketConnection, stream: str, start: StartSpec, chunks: int) -> "Attach":
        """As `once`, but the subscription stays at its barrier until `go_on` or `end`."""
        # RabbitMQ 4 sends for a Credit only when half of the first credit is there again: so the first is the least,
        # else the chunks would not come before the barrier.
        attach = cls(connection, stream, start)
        if chunks > 1:
            attach.go_on(chunks - 1)
        else:
            connection.session.send(frames.metadata(attach.barrier, []))
        return attach

    def go_on(self, chunks: int) -> None:
        """Ask for so many chunks more."""
        self.barrier = self._session.next_correlation()
        self.granted += chunks
        self.is_at_barrier = False
        self._session.send(frames.credit(self.subscription, chunks) + frames.metadata(self.barrier, []))

    def end(self) -> None:
        """Ask for no more: what still comes is dropped."""
        if not self.is_done:
            self.is_done = True
            self._session.unsubscribe(self.subscription)

    def take(self, event: Event) -> None:
        """Take one event, of this subscription or not."""
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


def until(connection: SocketConnection, *attaches: Attach) -> None:
    """Wait until all that was asked for by subscriptions, and is there, has come."""
    for awaited in attaches:
        while not awaited.is_at_barrier:
            for event in connection.exchange():
                for attach in attaches:
                    attach.take(event)
