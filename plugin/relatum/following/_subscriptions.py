"""The subscriptions of one connection: who has which number, what credit, and what came of it. No I/O.

Whoever subscribes or is granted credit may ask for a barrier: the answer to an empty Metadata. The broker handles a
connection's commands in order, so what was there to send has come by then; a stream that got nothing has no more at
present, at this node.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from relatum.errors import DataError, RelatumError, StreamUnavailable
from relatum.following._followed import Followed
from relatum.reading import ATTACHES_MAX, CLOSES_SINCE, Broker, StreamPlaces, refusal
from relatum.wire import (
    SUBSCRIPTIONS,
    Answer,
    Code,
    CreditRefused,
    Damaged,
    Event,
    Start,
    StartSpec,
    StreamMoved,
    StreamSession,
    frames,
    is_before,
)

WAITS_BEFORE: Final = (4, 2, 1)
"""Version before which a connection waits two milliseconds, for all its streams, whenever one of them has no more: for
each lone message. Source: rabbitmq-server, pull request 14766; `timer:sleep(1)` in `rabbit_stream_reader` of 3.10.8."""

CROWD: Final = 64
"""Streams whose messages wait for each other then, on one connection, for an eighth of a second at most."""


class Quiet(NamedTuple):
    """A stream has no more at present, at this node."""

    followed: Followed


class Ended(NamedTuple):
    """A subscription is no more: it was refused, or ended by the broker."""

    followed: Followed
    code: int
    error: RelatumError


class Placed(NamedTuple):
    """Where streams lie that were asked about."""

    places: list[StreamPlaces]


Outcome = Quiet | Ended | Placed


class Subscriptions:
    """The subscriptions of one session.

    Args:
        session: The session.

    Attributes:
        followed: The streams, by the subscription's number.
    """

    def __init__(self, session: StreamSession) -> None:
        self._session = session
        self.followed: dict[int, Followed] = {}
        self._answers: dict[int, int] = {}
        self._awaiting: dict[int, None] = {}
        self._barriers: dict[int, list[int]] = {}
        self._places: set[int] = set()
        self._attaches = 0

    @property
    def room(self) -> int:
        """How many more can be subscribed to: numbers that are ending are not free yet."""
        return min(SUBSCRIPTIONS - self._session.subscription_count, self._attaches_left)

    @property
    def is_crowded(self) -> bool:
        """Whether another stream is better read over another connection: its messages would wait for those of many."""
        return len(self.followed) >= CROWD and is_before(self._version, WAITS_BEFORE)

    @property
    def is_worn(self) -> bool:
        """Whether the connection is to be replaced when it has to take another: the broker leaks files for it."""
        return self._attaches_left <= 0

    @property
    def _attaches_left(self) -> int:
        return ATTACHES_MAX - self._attaches if is_before(self._version, CLOSES_SINCE) else SUBSCRIPTIONS

    @property
    def _version(self) -> str:
        return self._session.server_properties.get("version", "")

    def add(self, followed: Followed, offset: int) -> None:
        """Subscribe, with one credit and a barrier."""
        number = self._session.take_subscription()
        correlation = self._session.next_correlation()
        self._attaches += 1
        self._answers[correlation] = number
        self.followed[number] = followed
        followed.subscription = number
        start = StartSpec(Start.OFFSET, offset)
        self._session.send(frames.subscribe(correlation, number, followed.stream, start, 1))
        self._awaiting[number] = None

    def remove(self, followed: Followed) -> None:
        """Unsubscribe; what is under way for it is dropped as it comes."""
        number, followed.subscription = followed.subscription, None
        if number is not None and self.followed.pop(number, None) is not None:
            self._awaiting.pop(number, None)
            self._session.unsubscribe(number)

    def grant(self, followed: Followed, chunks: int, *, asks: bool) -> None:
        """Grant credit, where it is any; `asks` for a barrier."""
        if followed.subscription is not None:
            if chunks:
                self._session.send(frames.credit(followed.subscription, chunks))
            if asks:
                followed.has_come, followed.barrier = False, None
                self._awaiting[followed.subscription] = None

    def ask_places(self, streams: list[str]) -> None:
        """Ask where streams lie, in one frame."""
        correlation = self._session.next_correlation()
        self._places.add(correlation)
        self._session.send(frames.metadata(correlation, streams))

    def set_barrier(self) -> None:
        """One barrier for all that were subscribed or granted credit since the last one."""
        if self._awaiting:
            correlation = self._session.next_correlation()
            self._barriers[correlation] = list(self._awaiting)
            for number in self._awaiting:
                self.followed[number].barrier = correlation
            self._awaiting.clear()
            self._session.send(frames.metadata(correlation, []))

    def own_node(self) -> Broker:
        """The node, as it advertises itself."""
        properties = self._session.connection_properties
        port = properties.get("advertised_port", "")
        return Broker(properties.get("advertised_host", ""), int(port) if port.isdecimal() else 0)

    def outcomes(self, event: Event) -> Iterator[Outcome]:
        """What an event other than a chunk amounts to."""
        if type(event) is Answer:
            yield from self._answered(event)
        elif type(event) is StreamMoved:
            yield from self._moved(event)
        elif type(event) is CreditRefused:
            yield from self._broken(event.subscription, event.code, None)
        elif type(event) is Damaged:
            yield from self._broken(event.subscription, Code.OK, event.error)

    def _broken(self, number: int, code: int, error: DataError | None) -> Iterator[Outcome]:
        followed = self.followed.get(number)
        if followed is not None:
            stream = followed.stream
            message = f"The broker dropped the subscription to {stream!r}."
            yield self._ended(followed, code, error or StreamUnavailable(message, stream=stream))

    def _answered(self, answer: Answer) -> Iterator[Outcome]:
        if answer.correlation in self._places:
            self._places.discard(answer.correlation)
            yield Placed(frames.decode_metadata(answer.body))
        for number in self._barriers.pop(answer.correlation, ()):
            followed = self.followed.get(number)
            # One that was granted credit since is asked about by a later one.
            if followed is not None and followed.barrier == answer.correlation and not followed.has_come:
                yield Quiet(followed)
        followed = self.followed.get(self._answers.pop(answer.correlation, -1))
        if followed is not None and answer.code != Code.OK:
            yield self._ended(followed, answer.code, refusal(followed.stream, answer.code))

    def _moved(self, moved: StreamMoved) -> Iterator[Outcome]:
        for followed in [each for each in self.followed.values() if each.stream == moved.stream]:
            error = StreamUnavailable(f"The stream {moved.stream!r} moved or was deleted.", stream=moved.stream)
            yield self._ended(followed, moved.code, error)

    def _ended(self, followed: Followed, code: int, error: RelatumError) -> Ended:
        # Also where the broker has none any more: its answer makes the number free.
        self.remove(followed)
        return Ended(followed, code, error)
