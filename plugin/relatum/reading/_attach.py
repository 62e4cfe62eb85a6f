"""One subscription for a few chunks.

The broker handles a connection's commands in order. So a Subscribe with a few credits and an Unsubscribe in one write
are answered by the Subscribe's answer, at most that many chunks, and the Unsubscribe's answer. Chunks that have not
come by then are not there. So a question such as "what is at or after this offset" is one round trip, needs no
time-out, and many can be in flight. Yet if nothing came, this does not prove that nothing is there: see `_leaders`.
"""

from relatum.reading._bounds import moved, refusal
from relatum.reading._connection import SocketConnection
from relatum.wire import frames
from relatum.wire.chunk import Chunk
from relatum.wire.frames import Code, StartSpec
from relatum.wire.session import Answer, Event, StreamMoved


class Attach:
    """One subscription for a few chunks, and the chunks received. It never waits; see `until`.

    After a Subscribe or a Credit, the answer to the next command is a barrier: all granted chunks that exist have come
    by then. In a pair, the Unsubscribe is that command; a subscription that may go on sends an empty Metadata, which
    costs the broker nothing.
    """

    def __init__(self, connection: SocketConnection, stream: str, start: StartSpec, chunks: int = 1) -> None:
        self._session = session = connection.session
        self.stream = stream
        self.subscription = session.take_subscription()
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
        """Ask for at most `chunks` chunks from a start on, and end there."""
        attach = cls(connection, stream, start, chunks)
        connection.session.unsubscribe(attach.subscription, attach.barrier)
        attach.is_done = True
        return attach

    @classmethod
    def to_go_on(cls, connection: SocketConnection, stream: str, start: StartSpec, chunks: int) -> "Attach":
        """As `once`, but keep the subscription at its barrier until `go_on` or `end`."""
        # RabbitMQ 4 sends for a Credit only when half of the first credit is back. So the first credit is the least,
        # else the chunks would not come before the barrier.
        attach = cls(connection, stream, start)
        if chunks > 1:
            attach.go_on(chunks - 1)
        else:
            connection.session.send(frames.metadata(attach.barrier, []))
        return attach

    def go_on(self, chunks: int) -> None:
        """Ask for more chunks."""
        self.barrier = self._session.next_correlation()
        self.granted += chunks
        self.is_at_barrier = False
        self._session.send(frames.credit(self.subscription, chunks) + frames.metadata(self.barrier, []))

    def end(self) -> None:
        """Unsubscribe: chunks that still come are dropped."""
        if not self.is_done:
            self.is_done = True
            self._session.unsubscribe(self.subscription)

    def take(self, event: Event) -> None:
        """Handle one event, which may belong to another subscription."""
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
        """Raise the error in the answer to Subscribe, if any."""
        if self.code != Code.OK:
            raise refusal(self.stream, self.code)


def until(connection: SocketConnection, *attaches: Attach) -> None:
    """Wait until all the existing chunks that subscriptions asked for have come."""
    for awaited in attaches:
        while not awaited.is_at_barrier:
            for event in connection.exchange():
                for attach in attaches:
                    attach.take(event)
