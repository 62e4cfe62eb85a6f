"""The subscriptions of one connection: numbers, credit and answers. No I/O.

A barrier is the answer to an empty Metadata command that follows a subscription or credit. The broker handles the
commands of a connection in order: if a stream got no chunk before the barrier, it has no more records on this node
now.
"""

from typing import TYPE_CHECKING, Final

from relatum.errors import RelatumError, StreamUnavailable
from relatum.reading import StreamPlaces, refusal
from relatum.wire import frames
from relatum.wire.chunk import Chunk
from relatum.wire.frames import Code, Start, StartSpec
from relatum.wire.session import SUBSCRIPTIONS, Answer, CreditRefused, Damaged, Event, StreamMoved, StreamSession

if TYPE_CHECKING:
    from relatum.following._connection import Connection
    from relatum.following._followed import Followed

WAITS_BEFORE: Final = (4, 2, 1)
"""Before this version, the broker delays all streams of a connection by two milliseconds whenever one has no more, so
for each lone message. Source: rabbitmq-server, pull request 14766; `timer:sleep(1)` in `rabbit_stream_reader` of
3.10.8."""

CROWD: Final = 64
"""Maximum streams on a connection to such a broker: they delay each other by at most an eighth of a second."""

CHUNKS_MAX: Final = 1024
"""Maximum chunks of a stream in flight and held; messages published one by one have one each. An owner that releases
them five times a second keeps up with 5,000 a second."""


class Interrupted(Exception):
    """The connection ended, which is reported once for all its streams."""


class Ended(Exception):
    """The broker refused or ended a subscription, with its code and the matching error."""

    def __init__(self, code: int, error: RelatumError) -> None:
        super().__init__(code, error)
        self.code = code
        self.error = error


class Subscription:
    """The subscription to one stream: its number on the connection, and its credit.

    `barrier`: Answered after everything requested before it. `is_quiet`: A barrier showed that there is no more.
    """

    def __init__(self, followed: "Followed", number: int, window_bytes: int) -> None:
        self.followed = followed
        self.number = number
        self.connection: Connection | None = None
        self.barrier: int | None = None
        self.has_come = self.is_quiet = False
        self._under_way, self._held, self._window = 1, 0, 1
        self._window_bytes = window_bytes

    def on_chunk(self, chunk: Chunk) -> None:
        """Count an arrived chunk, and adapt the window to its size."""
        self.has_come = True
        self._under_way -= 1
        self._held += 1
        self._window = min(CHUNKS_MAX, self._window_bytes // (len(chunk.data) or 1) or 1)

    def free(self) -> None:
        """Count a released chunk."""
        self._held -= 1

    def credit(self) -> int:
        """Take the available credit: how many more chunks may be in flight now.

        A quiet stream gets none while more than half of its window is in flight, since a credit costs both sides as
        much as a chunk. Otherwise all of it is taken, since a barrier is sent with it anyway.
        """
        if self.is_quiet and self._under_way * 2 > self._window:
            return 0
        credit = max(0, self._window - self._under_way - self._held)
        self._under_way += credit
        return credit

    @property
    def may_come(self) -> bool:
        """Whether a chunk may arrive; without credit, silence proves nothing."""
        return self._under_way > 0


class Subscriptions:
    """The subscriptions of one session."""

    def __init__(self, session: StreamSession) -> None:
        self._session = session
        self._all: dict[int, Subscription] = {}
        self._answers: dict[int, int] = {}
        self._awaiting: dict[int, None] = {}
        self._barriers: dict[int, list[int]] = {}
        self._places: set[int] = set()

    @property
    def room(self) -> int:
        """The number of subscriptions that still fit; numbers being unsubscribed are not free yet."""
        return min(SUBSCRIPTIONS - self._session.subscription_count, self._session.attaches_left)

    @property
    def is_crowded(self) -> bool:
        """Whether the streams on this connection would delay another one."""
        return len(self._all) >= CROWD and self._session.is_older_than(WAITS_BEFORE)

    # --- commands -----------------------------------------------------------------------------------------------------

    def add(self, followed: "Followed", offset: int, window_bytes: int) -> Subscription:
        """Subscribe, with one credit and a barrier."""
        number = self._session.take_subscription()
        correlation = self._session.next_correlation()
        self._answers[correlation] = number
        subscription = self._all[number] = Subscription(followed, number, window_bytes)
        start = StartSpec(Start.OFFSET, offset)
        self._session.send(frames.subscribe(correlation, number, followed.stream, start, 1))
        self._awaiting[number] = None
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Unsubscribe; chunks still in flight are dropped on arrival."""
        number = subscription.number
        if self._all.get(number) is subscription:
            del self._all[number]
            self._awaiting.pop(number, None)
            self._session.unsubscribe(number)

    def grant(self, subscription: Subscription) -> bool:
        """Grant the available credit; return whether there is something to send.

        Until the stream is quiet, request a barrier, too; even without credit if chunks were larger than expected: with
        so much in flight, there may be no credit for long.
        """
        if self._all.get(subscription.number) is not subscription:
            return False
        credit = subscription.credit()
        asks = not subscription.is_quiet and (credit > 0 or (subscription.has_come and subscription.may_come))
        if credit:
            self._session.send(frames.credit(subscription.number, credit))
        if asks:
            subscription.has_come, subscription.barrier = False, None
            self._awaiting[subscription.number] = None
        return credit > 0 or asks

    def ask_places(self, streams: list[str]) -> None:
        """Ask for the places of streams, in one frame."""
        correlation = self._session.next_correlation()
        self._places.add(correlation)
        self._session.send(frames.metadata(correlation, streams))

    def set_barrier(self) -> None:
        """Set one barrier for all streams that were subscribed or granted credit since the last one."""
        if self._awaiting:
            correlation = self._session.next_correlation()
            self._barriers[correlation] = list(self._awaiting)
            for number in self._awaiting:
                self._all[number].barrier = correlation
            self._awaiting.clear()
            self._session.send(frames.metadata(correlation, []))

    def interrupt(self) -> None:
        """Interrupt all streams, since the connection has ended."""
        subscriptions, self._all = self._all, {}
        self._awaiting.clear()
        for subscription in subscriptions.values():
            subscription.connection = None
            subscription.followed.on_ended(Interrupted())

    # --- answers ------------------------------------------------------------------------------------------------------

    def receive(self, events: list[Event]) -> list[StreamPlaces]:
        """Pass events to their streams; return the requested places of streams."""
        places = list[StreamPlaces]()
        for event in events:
            if type(event) is Chunk:
                subscription = self._all.get(event.subscription)
                if subscription is not None:
                    subscription.on_chunk(event)
                    subscription.followed.on_chunk(event)
            elif type(event) is Answer:
                places += self._answered(event)
            elif type(event) is StreamMoved:
                error = StreamUnavailable(f"The stream {event.stream!r} moved or was deleted.", stream=event.stream)
                for each in [each for each in self._all.values() if each.followed.stream == event.stream]:
                    self._end(each, event.code, error)
            elif isinstance(event, CreditRefused | Damaged):
                self._broken(event)
        return places

    def _broken(self, event: CreditRefused | Damaged) -> None:
        subscription = self._all.get(event.subscription)
        if subscription is None:
            return
        if isinstance(event, Damaged):
            self._end(subscription, Code.OK, event.error)
        else:
            stream = subscription.followed.stream
            error = StreamUnavailable(f"The broker dropped the subscription to {stream!r}.", stream=stream)
            self._end(subscription, event.code, error)

    def _answered(self, answer: Answer) -> list[StreamPlaces]:
        if answer.correlation in self._places:
            self._places.discard(answer.correlation)
            return frames.decode_metadata(answer.body)
        for number in self._barriers.pop(answer.correlation, ()):
            subscription = self._all.get(number)
            # If it was granted credit since, a later barrier will show it.
            if subscription is not None and subscription.barrier == answer.correlation and not subscription.has_come:
                subscription.followed.on_drained()
        subscription = self._all.get(self._answers.pop(answer.correlation, -1))
        if subscription is not None and answer.code != Code.OK:
            self._end(subscription, answer.code, refusal(subscription.followed.stream, answer.code))
        return []

    def _end(self, subscription: Subscription, code: int, error: RelatumError) -> None:
        # Even if the broker has ended it: the answer frees the number.
        self.remove(subscription)
        subscription.followed.on_ended(Ended(code, error))
